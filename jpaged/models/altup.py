"""Several residual streams, of which each layer computes one and corrects the others (AltUp, Baykal et al. 2023,
arXiv:2301.13310).

    begin    embeddings [T, hidden] --> [T, streams, hidden]: themselves, and products of them, as large as they are
    layer    predicted = streams + a mixture of the streams
             computed  = what the layer makes of predicted[active]
             corrected = predicted + coefficients * (computed - predicted[active])
    end      --> [T, hidden]: the mean of the first stream and of products of the others, as large as it is

Mixtures and coefficients are each token's own. All of this is small and whole on each device: what a layer exchanges
between devices stays what it is for one stream.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.linear import Linear, PlainLinear, times
from jpaged.models.norms import Norm
from jpaged.models.parameters import Constant, parameter

_LEAST_SQUARE = 1e-5
"""Of a stream's mean square when it is made as large as the first: one that is nearly zero stays small."""


class AltUpStreams(nnx.Module):
    """What makes the streams before the first layer, and one of them behind the last.

    count: of the streams.
    """

    def __init__(self, count: int, hidden_size: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def products() -> nnx.List[Linear]:
            sizes = (hidden_size,), (hidden_size,), hidden_size**-0.5
            return nnx.List(Linear(*sizes, dtype, rngs) for _ in range(count - 1))

        self.first_products, self.last_products = products(), products()

    def begin(self, x: jax.Array, backend: str | None) -> jax.Array:
        """[T, hidden] -> [T, streams, hidden]. backend: of products (`Linear`)."""
        others = (_as_large(product(x, backend=backend), x) for product in self.first_products)
        return jnp.stack([x, *others], axis=1)

    def end(self, streams: jax.Array, backend: str | None) -> jax.Array:
        """[T, streams, hidden] -> [T, hidden]. backend: of products (`Linear`)."""
        first = streams[:, 0]
        others = (
            _as_large(product(streams[:, number], backend=backend), first)
            for number, product in enumerate(self.last_products, start=1)
        )
        return jnp.mean(jnp.stack([first, *others]), axis=0, dtype=jnp.float32).astype(first.dtype)


def _as_large(x: jax.Array, example: jax.Array) -> jax.Array:
    """x [T, hidden], each row multiplied so that its mean square is that of the example's."""
    wide = x.astype(jnp.float32)
    wanted, found = (jnp.mean(jnp.square(one), axis=-1, keepdims=True) for one in (example.astype(jnp.float32), wide))
    return (wide * jnp.sqrt(wanted) / jnp.sqrt(jnp.maximum(found, _LEAST_SQUARE))).astype(x.dtype)


class AltUp(nnx.Module):
    """A layer's side of it.

    count: of the streams. active: the number of the one that the layer computes.
    norm: of what a token's mixture and coefficients are made of.
    scaled: columns of the active stream have a learned scale for who reads it next (`active_part`).
    """

    def __init__(
        self, count: int, active: int, hidden_size: int, norm: Norm, dtype: jnp.dtype, rngs: nnx.Rngs, *, scaled: bool
    ) -> None:
        self.active, self.norm = active, norm
        # Not quantized: coefficients of whole streams, of products that are tiny.
        self.router = PlainLinear((hidden_size,), (count,), hidden_size**-0.5, dtype, rngs)
        self.mixture = PlainLinear((count,), (count, count), count**-0.5, dtype, rngs)
        self.coefficients = PlainLinear((count,), (count,), count**-0.5, dtype, rngs)
        self.scale = parameter(rngs, Constant(1.0), (hidden_size,), dtype) if scaled else None

    def predict(self, streams: jax.Array) -> jax.Array:
        """[T, streams, hidden] -> what the layer is to begin from, likewise."""
        weights = self.mixture(self._routed(streams[:, self.active]))  # [T, of, from]
        wide = streams.astype(jnp.float32)
        parts = (weights[:, :, number, None] * wide[:, number, None] for number in range(streams.shape[1]))
        return sum(parts, start=wide).astype(streams.dtype)

    def correct(self, predicted: jax.Array, computed: jax.Array) -> jax.Array:
        """[T, streams, hidden] and what the layer made of the active one, [T, hidden] -> [T, streams, hidden]."""
        coefficients = 1 + self.coefficients(self._routed(computed))
        change = computed.astype(jnp.float32) - predicted[:, self.active].astype(jnp.float32)
        return (predicted.astype(jnp.float32) + coefficients[:, :, None] * change[:, None]).astype(predicted.dtype)

    def active_part(self, streams: jax.Array) -> jax.Array:
        """[T, streams, hidden] -> [T, hidden]: the active one, scaled."""
        part = streams[:, self.active]
        return part if self.scale is None else part * self.scale[...]

    def _routed(self, x: jax.Array) -> jax.Array:
        """[T, hidden] -> float32 [T, streams], between -1 and 1."""
        return jnp.tanh(self.router(times(self.norm(x), x.shape[-1] ** -1.0), jnp.dtype(jnp.float32)))
