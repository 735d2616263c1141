"""Grouped products of a mixture of experts, and its whole sparse layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import CARD_BYTES_S, CARD_FLOPS, Built, Case, normal
from jpaged.models.experts import Routing, mix, route


@dataclass(frozen=True)
class Experts:
    """Shape of a sparse layer: Qwen3-30B-A3B's. zipf: of an expert's popularity, rank ** -zipf; 0 for equal ones."""

    experts: int = 128
    per_token: int = 8
    hidden: int = 2048
    inner: int = 768
    zipf: float = 0.0

    def draw(self, seed: int, tokens: int) -> np.ndarray:
        """int32 [tokens, per_token], different ones for each token (Gumbel's top-k)."""
        rng = np.random.default_rng(seed)
        popularity = -self.zipf * np.log(np.arange(1, self.experts + 1)) + rng.gumbel(size=(tokens, self.experts))
        return np.argsort(-popularity, axis=1)[:, : self.per_token].astype(np.int32)

    def floors_us(self, tokens: int) -> tuple[float, float]:
        """What reading the experts of so many tokens takes at least, and what their operations take, microseconds."""
        rows, weights = tokens * self.per_token, 3 * self.hidden * self.inner
        touched = float(np.mean([len(np.unique(self.draw(seed, tokens))) for seed in range(_DRAWS)]))
        moved = touched * weights + rows * (2 * self.hidden + 2 * self.inner)
        return 2 * moved / CARD_BYTES_S * 1e6, 2 * rows * weights / CARD_FLOPS * 1e6


_DRAWS = 8  # of the experts of a case's tokens, which its calls take in turn


def experts_case(tokens: int, e: Experts, backend: str | None) -> Built:
    """Both grouped products, of rows that are sorted; its work are the operations."""
    gate_up = normal(0, (e.experts, e.hidden, 2, e.inner), jnp.bfloat16) * e.hidden**-0.5
    down = normal(1, (e.experts, e.inner, e.hidden), jnp.bfloat16) * e.inner**-0.5
    drawn = [e.draw(seed, tokens).ravel() for seed in range(_DRAWS)]
    if tokens == 1:  # as `jpaged.models.experts.mix` does
        grouped: list[tuple] = [(None, jnp.asarray(one)) for one in drawn]
    else:
        grouped = [(jnp.asarray(np.bincount(one, minlength=e.experts), jnp.int32), None) for one in drawn]
    rows = tokens * e.per_token
    x = normal(2, (rows, e.hidden), jnp.bfloat16)

    @jax.jit
    def program(x: jax.Array, gate_up: jax.Array, down: jax.Array, grouped: list[tuple], twos: jax.Array) -> jax.Array:
        for sizes, groups in grouped:
            inner = ops.gated_grouped_product(x, gate_up, sizes, groups=groups, backend=backend)
            x = ops.weighted_grouped_product(inner, down, sizes, twos, groups=groups, backend=backend)
        return x

    work = 6.0 * rows * e.hidden * e.inner
    return program, (x, gate_up, down, grouped, jnp.full(rows, 2.0, jnp.float32)), _DRAWS, work


def sparse_case(tokens: int, e: Experts, backend: str | None) -> Built:
    """A whole sparse layer behind the norm: router, sorting, both products, and the sums of each token's rows."""
    gate_up = normal(0, (e.experts, e.hidden, 2, e.inner), jnp.bfloat16) * e.hidden**-0.5
    down = normal(1, (e.experts, e.inner, e.hidden), jnp.bfloat16) * e.inner**-0.5
    router = [normal(3 + i, (e.hidden, e.experts), jnp.bfloat16) for i in range(_DRAWS)]
    x = normal(2, (tokens, e.hidden), jnp.bfloat16)
    routing = Routing(per_token=e.per_token, zipf=e.zipf)

    @jax.jit
    def program(x: jax.Array, gate_up: jax.Array, down: jax.Array, router: list[jax.Array]) -> jax.Array:
        tokens = x
        for gate in router:
            # Of the tokens that it began with: without norms in between, those of later calls are nearly zero, and
            # would all pick the same experts. The barrier keeps the order.
            read, x = lax.optimization_barrier((tokens, x))
            logits = jnp.einsum("th,he->te", read, gate, preferred_element_type=jnp.float32) * e.hidden**-0.5
            if e.zipf:
                logits = routing.skewed(logits)
            x = mix(x, gate_up, down, *route(logits, routing), activation="silu", backend=backend) * 2
        return x

    return program, (x, gate_up, down, router), _DRAWS, 6.0 * tokens * e.per_token * e.hidden * e.inner


def cases(backend: str | None, zipf: float) -> Iterator[Case]:
    """zipf: of the experts of the skewed cases."""
    for skew in (0.0, zipf):
        experts, skewed = Experts(zipf=skew), f", Zipf {skew:g}" if skew else ""
        for tokens in (1, 8, 32, 256, 1024, 8192):
            floors = experts.floors_us(tokens)
            name = f"experts, {tokens:,} tokens{skewed} (bytes {floors[0]:.0f} us, products {floors[1]:.0f} us)"
            yield Case(name, "us", round(max(floors) / 0.85, 1), partial(experts_case, tokens, experts, backend))
        for tokens in (1, 32, 256, 8192):
            name = f"sparse layer, {tokens:,} tokens{skewed}"
            yield Case(name, "us", None, partial(sparse_case, tokens, experts, backend))
