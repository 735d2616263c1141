"""Multi-head latent attention (MLA; DeepSeek-V2, Liu et al. 2024, arXiv:2405.04434): all heads share a token's latent.

    x [T, hidden] --down--> latent of queries [T, query_rank]    latent c [T, value_dim]    k [T, rotated_dim]
                                |-- norm, or x itself                |-- norm                   |-- rotation
                                '-- query --> q, r of each head      '----- the cache keeps ----'
                                                 '-- rotation

    of a head: score = (q K c + r k) * scale, value = V c;  K is [plain_dim, value_dim], V [head_values, value_dim]

q K is computed once for all tokens of the context and meets latents as they are; their weighted sum goes through V
("absorbed", section 2.1.2 there). So attention is that of many query heads over one key-value head, whose values are
the first columns of its keys, and keys and values of heads need not be made.

Programs of many tokens that have chunks of prompts make them all the same, for the tokens of the step: a query meets
plain_dim + rotated_dim columns of its chunk's keys then, and not value_dim + rotated_dim (`expanded_attention`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jpaged.models.config import ModelConfig
from jpaged.models.family import Attend
from jpaged.models.linear import Linear, PartialSum, Reader
from jpaged.models.norms import HeadNorms, Norm, RMSNorm
from jpaged.models.parameters import Normal, parameter
from jpaged.pallas_kernels import Expansion
from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.rope_and_write.reference import rotate

EXPANDED_FROM = 1024
"""Tokens of the smallest program that expands its own. A chunk of so many tokens, in DeepSeek's sizes, takes 0.62 times
the operations of the absorbed form, projections included; one of 341 takes as many, by more kernels."""

_NORM_EPS = 1e-6
"""Of the norms of latents, whatever config.json says of the others."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelConfig):
    """What configurations with latent attention have. num_kv_heads is 1; head_dim is value_dim + rotated_dim, the
    columns that the cache keeps of a token.

    query_rank: columns that queries are compressed to; None where they are not.
    plain_dim, rotated_dim: columns of a head's query that meet its own keys, and the key that all heads share.
    head_values: columns of a head's values.
    scale: multiplies the scores.
    latent_bias: the products with hidden states, of attention, have biases.
    """

    query_rank: int | None
    plain_dim: int
    rotated_dim: int
    head_values: int
    scale: float
    latent_bias: bool = False


class LatentAttention(Reader):
    """See above. It takes the place of `layers.Attention`.

    Every shard has `down` and keeps all latents; heads are split.
    """

    def __init__(self, config: LatentConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, heads, rank, bias = config.hidden_size, config.num_heads, config.value_dim, config.latent_bias
        assert rank is not None
        self.plain_dim, self.value_dim, self.scale = config.plain_dim, rank, config.scale
        self.query_rank = config.query_rank or 0
        narrow = config.head_values <= config.plain_dim + config.rotated_dim
        self.expanded_from = EXPANDED_FROM if narrow else None
        self.down = Linear((hidden,), (self.query_rank + config.head_dim,), hidden**-0.5, dtype, rngs, bias=bias)
        self.query_norm = RMSNorm(self.query_rank, _NORM_EPS, dtype, rngs) if self.query_rank else None
        inputs, by_head = self.query_rank or hidden, (heads, config.plain_dim + config.rotated_dim)
        self.query = Linear((inputs,), by_head, inputs**-0.5, dtype, rngs, shard_axis=1)
        self.latent_norm = RMSNorm(rank, _NORM_EPS, dtype, rngs)
        self.to_keys = parameter(rngs, Normal(rank**-0.5), (heads, config.plain_dim, rank), dtype, 0, of_linear=True)
        self.to_values = parameter(
            rngs, Normal(rank**-0.5), (heads, config.head_values, rank), dtype, 0, of_linear=True
        )
        out_std = (heads * config.head_values * 2 * config.num_layers) ** -0.5
        self.out = Linear((heads, config.head_values), (hidden,), out_std, dtype, rngs, shard_axis=0, bias=bias)

    def __call__(
        self,
        x: jax.Array,
        attend: Attend,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norms: tuple[Norm, ...] | HeadNorms | None = None,
        backend: str | None = "xla",
        temperature: jax.Array | None = None,
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden].

        rotation: cos and sin (`Rope.table`), of `rotated_dim` columns.
        norms: None; there is none of a head, and those of latents are the layer's own.
        backend: of products that have kernels (`Linear`).
        temperature: float32 [T], what the queries are multiplied by (`Temperature.of`); None for nothing.

        Raises:
            ValueError: norms are given.
        """
        if norms is not None:
            raise ValueError("Latent attention takes no norms of queries and keys.")
        down = self.down(x, backend=backend)
        of_queries, latents, shared = jnp.split(down, (self.query_rank, self.query_rank + self.value_dim), axis=-1)
        queries = self.query(x if self.query_norm is None else self.query_norm(of_queries), backend=backend)
        if temperature is not None:
            queries = (queries * temperature[:, None, None]).astype(queries.dtype)
        plain, rotated = queries[..., : self.plain_dim], queries[..., self.plain_dim :]
        latents, shared = self.latent_norm(latents)[:, None], shared[:, None]
        if rotation is not None:
            rotated, shared = rotate(rotated, *rotation), rotate(shared, *rotation)
        precision = precision_of(x.dtype)
        to_keys, to_values = self.to_keys[...], self.to_values[...]
        absorbed = jnp.einsum("thn,hnr->thr", plain, to_keys, precision=precision)
        keys = jnp.concatenate([latents, shared], axis=-1)
        qk = jnp.concatenate([jnp.concatenate([absorbed, rotated], axis=-1), keys], axis=-2)[:, None]
        features: dict[str, Any] = {"rotation": None, "norms": None, "norm_eps": 0.0, "scale": self.scale}
        if self._expands(x.shape[0], attend):
            expansion = Expansion(jnp.concatenate([plain, rotated], axis=-1), to_keys, to_values)
            y = attend(qk, value_dim=self.value_dim, expansion=expansion, **features)
        else:
            y = attend(qk, value_dim=self.value_dim, **features)
            y = jnp.einsum("thr,hvr->thv", y, to_values, precision=precision)
        # Or XLA would have the next product take columns before heads, and transpose its weights in each step.
        y = lax.optimization_barrier(y.reshape(y.shape[0], -1)).reshape(y.shape)
        return self.out.partial_sum(y, backend)

    def _expands(self, tokens: int, attend: Attend) -> bool:
        """Whether a program of so many tokens makes keys and values of heads for them."""
        if self.expanded_from is None or tokens < self.expanded_from:
            return False
        return getattr(attend, "takes_expansion", False)
