"""Grouped products of a mixture of experts in 16, 8 and 4 bits, its routing, and its whole sparse layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log2

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import CARD_BYTES_S, CARD_FLOPS, Built, Case, normal
from jpaged.models.experts import Routing, mix, route_rows
from jpaged.models.grouped_linear import PlainProduct
from jpaged.pallas_kernels.grouped_product.api import tile_height
from jpaged.pallas_kernels.grouped_product.tiles import RowTiles, plan_tiles
from jpaged.pallas_kernels.quantized_grouped_product.api import EIGHT_BITS, MX_GROUP, Form
from jpaged.pallas_kernels.quantized_grouped_product.api import tile_height as quantized_tile_height
from jpaged.pallas_kernels.route_tokens.rows import WEIGHTS_BEHIND


@dataclass(frozen=True)
class FewBits:
    """A form in which experts keep 8 or 4 bits. form, group: as of `quantized_grouped_product`. std: of its values
    where they are random, before scales."""

    name: str
    form: Form
    group: int | None
    std: float

    def groups(self, inputs: int) -> int:
        """Of inputs that share a scale."""
        return 1 if self.group is None else inputs // self.group

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Of one expert's values and scales."""
        values = outputs * inputs // (1 if self.form in EIGHT_BITS else 2)
        return values + outputs * self.groups(inputs) * (1 if self.form == "mxfp4" else 4)

    def random(self, key: int, experts: int, outputs: int, inputs: int) -> tuple[jax.Array, jax.Array]:
        """Values and scales of all experts; weights deviate by inputs ** -0.5, in MXFP4 by about that."""
        scale_shape, std = (experts, outputs, self.groups(inputs)), inputs**-0.5 / self.std
        if self.form == "int8":
            bits = jax.random.bits(jax.random.key(key), (experts, outputs, inputs), jnp.uint8)
            return jax.lax.bitcast_convert_type(bits, jnp.int8), jnp.full(scale_shape, std, jnp.float32)
        if self.form == "fp8":
            w = (normal(key, (experts, outputs, inputs), jnp.bfloat16) * self.std).astype(jnp.float8_e4m3fn)
            return w, jnp.full(scale_shape, std, jnp.float32)
        w = jax.random.bits(jax.random.key(key), (experts, outputs, inputs // 2), jnp.uint8)
        if self.form == "mxfp4":
            return w, jnp.full(scale_shape, round(log2(std)) + 127, jnp.uint8)
        return w, jnp.full(scale_shape, std, jnp.float32)


FEW_BITS = (
    FewBits("e4m3", "fp8", None, 64.0),
    FewBits("int8", "int8", None, 73.9),
    FewBits("int4", "int4", 128, 4.6),
    FewBits("MXFP4", "mxfp4", MX_GROUP, 2.9),
)


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

    def floors_us(self, tokens: int, bits: FewBits | None = None) -> tuple[float, float]:
        """What reading the experts of so many tokens takes at least, and what their operations take, microseconds.

        bits: of their weights, which are multiplied in bfloat16 whatever they are; None for bfloat16.
        """
        rows = tokens * self.per_token
        touched = float(np.mean([len(np.unique(self.draw(seed, tokens))) for seed in range(_DRAWS)]))
        moved = touched * self.expert_bytes(bits) + 2 * rows * (2 * self.hidden + 2 * self.inner)
        return moved / CARD_BYTES_S * 1e6, self.operations(tokens) / CARD_FLOPS * 1e6

    def expert_bytes(self, bits: FewBits | None) -> int:
        """Of an expert's gate, up and down, with scales; None for bfloat16."""
        if bits is None:
            return 2 * 3 * self.hidden * self.inner
        return bits.matrix_bytes(2 * self.inner, self.hidden) + bits.matrix_bytes(self.hidden, self.inner)

    def operations(self, tokens: int) -> float:
        """Of both products."""
        return 6.0 * tokens * self.per_token * self.hidden * self.inner


_DRAWS = 8  # of the experts of a case's tokens, which its calls take in turn


def experts_case(tokens: int, e: Experts, backend: str | None) -> Built:
    """Both grouped products, of rows that are sorted; its work are the operations."""
    gate_up = normal(0, (e.experts, e.hidden, 2, e.inner), jnp.bfloat16) * e.hidden**-0.5
    down = normal(1, (e.experts, e.inner, e.hidden), jnp.bfloat16) * e.inner**-0.5
    rows = tokens * e.per_token
    height = tile_height(rows, e.experts, backend)
    grouped = [_tiled(e.draw(seed, tokens), e.experts, height) for seed in range(_DRAWS)]
    x = normal(2, (rows, e.hidden), jnp.bfloat16)

    @jax.jit
    def program(x: jax.Array, gate_up: jax.Array, down: jax.Array, grouped: list[tuple], twos: jax.Array) -> jax.Array:
        for sizes, tiles in grouped:
            inner = ops.gated_grouped_product(x, gate_up, sizes, tiles=tiles, backend=backend)
            x = ops.weighted_grouped_product(inner, down, sizes, twos, tiles=tiles, backend=backend)
        return x

    # As routing gives them: tiles are known, and weights may be read past the rows.
    arguments = (x, gate_up, down, grouped, jnp.full(rows + WEIGHTS_BEHIND, 2.0, jnp.float32))
    return program, arguments, len(grouped), e.operations(tokens)


def _tiled(drawn: np.ndarray, experts: int, height: int) -> tuple[jax.Array, RowTiles]:
    """Sizes of groups, and their tiles. drawn: experts of tokens."""
    sizes = jnp.asarray(np.bincount(drawn.ravel(), minlength=experts), jnp.int32)
    return sizes, RowTiles(*plan_tiles(sizes, rows=drawn.size, height=height), height)


def quantized_experts_case(
    tokens: int, bits: FewBits, e: Experts, backend: str | None, height: int | None = None
) -> Built:
    """As `experts_case`, in few bits, but the first product reads rows in an order of their own, as those of tokens.

    height: of tiles; None for the one that is best.
    """
    gate_up = bits.random(0, e.experts, 2 * e.inner, e.hidden)
    down = bits.random(1, e.experts, e.hidden, e.inner)
    # Eight draws of one token are few enough experts in 4 bits to stay in an L2 cache.
    draws = _DRAWS if tokens > 1 else 4 * _DRAWS
    rows = tokens * e.per_token
    height = height or quantized_tile_height(rows, e.experts, has_groups=bits.group is not None)
    orders = (jnp.asarray(np.random.default_rng(seed).permutation(rows), jnp.int32) for seed in range(draws))
    grouped = [(*_tiled(e.draw(seed, tokens), e.experts, height), order) for seed, order in enumerate(orders)]
    x = normal(2, (rows, e.hidden), jnp.bfloat16)
    product: Callable[..., jax.Array] = partial(
        ops.quantized_grouped_product, form=bits.form, group=bits.group, backend=backend
    )

    @jax.jit
    def program(x: jax.Array, gate_up: tuple, down: tuple, grouped: list[tuple], twos: jax.Array) -> jax.Array:
        for sizes, tiles, order in grouped:
            inner = product(x, *gate_up, sizes, tiles=tiles, row_indices=order, activation="silu")
            x = product(inner, *down, sizes, tiles=tiles, weights=twos)
        return x

    arguments = (x, gate_up, down, grouped, jnp.full(rows, 2.0, jnp.float32))
    return program, arguments, len(grouped), e.operations(tokens)


def sparse_case(tokens: int, e: Experts, backend: str | None) -> Built:
    """A whole sparse layer behind the norm: router, sorting, both products, and the sums of each token's rows."""
    gate_up = normal(0, (e.experts, e.hidden, 2, e.inner), jnp.bfloat16) * e.hidden**-0.5
    down = normal(1, (e.experts, e.inner, e.hidden), jnp.bfloat16) * e.inner**-0.5
    router = [normal(3 + i, (e.hidden, e.experts), jnp.bfloat16) for i in range(_DRAWS)]
    x = normal(2, (tokens, e.hidden), jnp.bfloat16)
    routing = Routing(per_token=e.per_token, zipf=e.zipf)

    @jax.jit
    def program(x: jax.Array, gate_up: jax.Array, down: jax.Array, router: list[jax.Array]) -> jax.Array:
        tokens, weights = x, (PlainProduct(gate_up), PlainProduct(down))
        for gate in router:
            # Of the tokens that it began with: without norms in between, those of later calls are nearly zero, and
            # would all pick the same experts. The barrier keeps the order.
            read, x = lax.optimization_barrier((tokens, x))
            logits = jnp.einsum("th,he->te", read, gate, preferred_element_type=jnp.float32) * e.hidden**-0.5
            if e.zipf:
                logits = routing.skewed(logits)
            experts, shares, rows = route_rows(logits, routing, backend=backend)
            x = mix(x, weights, e.experts, experts, shares, activation="silu", backend=backend, rows=rows) * 2
        return x

    return program, (x, gate_up, down, router), _DRAWS, e.operations(tokens)


def routing_case(tokens: int, e: Experts, backend: str | None) -> Built:
    """From logits to rows sorted by expert, alone; its work are the assignments."""
    logits = [normal(i, (tokens, e.experts), jnp.float32) for i in range(_DRAWS)]
    routing = Routing(per_token=e.per_token)
    height = tile_height(tokens * e.per_token, e.experts, backend)

    @jax.jit
    def program(logits: list[jax.Array]) -> list[ops.RoutedTokens]:
        made: list[ops.RoutedTokens] = []
        for one in logits:
            # All results are the program's, and each waits for the one before: none is left out, none runs beside it.
            one, made[-1:] = lax.optimization_barrier((one, made[-1:]))
            made.append(ops.route_tokens(one, routing, tile_height=height, backend=routing_backend))
        return made

    routing_backend = ops.route_tokens_backend(logits[0], routing, backend)
    return program, (logits,), _DRAWS, float(tokens * e.per_token)


def cases(backend: str | None, zipf: float) -> Iterator[Case]:
    """zipf: of the experts of the skewed cases."""
    for skew in (0.0, zipf):
        experts, skewed = Experts(zipf=skew), f", Zipf {skew:g}" if skew else ""
        for tokens in _TOKENS:
            floors = experts.floors_us(tokens)
            name = f"experts, {tokens:,} tokens{skewed} ({_said(floors)})"
            yield Case(name, "us", round(max(floors) / 0.85, 1), partial(experts_case, tokens, experts, backend))
        for tokens in (1, 32, 256, 8192):
            name = f"sparse layer, {tokens:,} tokens{skewed}"
            yield Case(name, "us", None, partial(sparse_case, tokens, experts, backend))
    even = Experts()
    for tokens in _TOKENS:
        yield Case(f"routing, {tokens:,} tokens", "us", None, partial(routing_case, tokens, even, backend))
    for bits in FEW_BITS:
        for tokens in _TOKENS:
            name = f"experts in {bits.name}, {tokens:,} tokens ({_said(even.floors_us(tokens, bits))})"
            yield Case(name, "us", None, partial(quantized_experts_case, tokens, bits, even, backend))


_TOKENS = (1, 8, 32, 256, 1024, 8192)


def _said(floors_us: tuple[float, float]) -> str:
    return f"bytes {floors_us[0]:.0f} us, products {floors_us[1]:.0f} us"
