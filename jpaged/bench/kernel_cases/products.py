"""Products of linear layers in few bits, and rows rounded to FP8 for them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.case import CARD_BYTES_S, CARD_FLOPS, L2_BYTES, Built, Case, normal
from jpaged.pallas_kernels.fp8_product.api import product_of_rounded
from jpaged.pallas_kernels.round_rows.operands import padded, type_of_sums

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28_672, 4096), "down": (4096, 14_336)}
"""Outputs and inputs of an 8B model's products."""

_BITS = {"bf16": 16, "FP8": 8, "rounded FP8": 8, "FP8 blocks": 8, "FP8 weights": 8, "4 bits": 4}
_BITS |= {"INT8": 8, "INT8 weights": 8}
"""Of a weight, by the name of a form that products are measured in. "rounded FP8": of rows that are in FP8 already, as
`round_rows` leaves them, without any scales; "FP8" and "INT8" round them, too, but for few rows in FP8 on Hopper."""


def product_floor_us(form: str, rows: int, outputs: int, inputs: int) -> float:
    """What a product takes at least: reading its weights, or its operations in the type that it multiplies in."""
    flops = CARD_FLOPS * (2 if form in ("FP8", "rounded FP8", "FP8 blocks", "INT8") else 1)
    of_rows = inputs + 2 * outputs if form == "rounded FP8" else 2 * (inputs + outputs)
    moved = outputs * inputs * _BITS[form] / 8 + rows * of_rows
    return max(moved / CARD_BYTES_S, 2 * rows * outputs * inputs / flops) * 1e6


def product_case(form: str, rows: int, outputs: int, inputs: int, backend: str | None) -> Built:
    """x @ weights.T, with weights in a form of `_BITS`, many pairs of them in turn; its work are the operations."""
    copies = max(2, min(64, -(-L2_BYTES // (outputs * inputs * _BITS[form] // 8))))
    values = [normal(i, (outputs, inputs), jnp.bfloat16) for i in range(copies)]
    groups = inputs // 128 if form in ("FP8 blocks", "4 bits") else 1
    scale = jnp.full((outputs, groups), 0.01, jnp.float32)
    product: Callable[..., Any]
    if form == "bf16":
        weights, product = values, lambda x, w, _: lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    elif form == "4 bits":
        weights = [lax.bitcast_convert_type(x, jnp.uint8)[..., 0][:, : inputs // 2] for x in values]
        product = partial(ops.int4_product, group=128, backend=backend)
    elif form.startswith("INT8"):
        weights = [lax.bitcast_convert_type(x, jnp.int8)[..., 0] for x in values]
        product = partial(ops.int8_product, activations="dynamic" if form == "INT8" else "none", backend=backend)
    else:
        weights = [(x * 64).astype(jnp.float8_e4m3fn) for x in values]
        options: dict[str, Any] = {"group": 128 if groups > 1 else None, "backend": backend}
        product = partial(ops.fp8_product, activations="none" if form == "FP8 weights" else "dynamic", **options)
    del values
    # Products of one x would be joined.
    x: list[Any] = [normal(100 + i, (rows, inputs), jnp.bfloat16) for i in range(copies)]
    if form == "rounded FP8":
        x = [ops.round_rows(one)[0] for one in x]
        product = _of_rounded

    @jax.jit
    def program(x: list[Any], weights: list[jax.Array], scale: jax.Array) -> list[Any]:
        return [product(one, w, scale) for one, w in zip(x, weights, strict=True)]

    return program, (x, weights, scale), copies, 2.0 * rows * outputs * inputs


def _of_rounded(x: ops.RoundedRows, w: jax.Array, scale: jax.Array) -> jax.Array:
    del scale
    return product_of_rounded(x.values, w, type_of_sums(x.dtype))


_ROUNDED = {"norm": 4096, "attention": 4096, "gate, up": 14_336}
"""Columns of an 8B model's rows that are rounded to FP8, by what makes them."""


def rounding_bytes(what: str, rows: int) -> int:
    """What rounding moves at least: bfloat16 sums, scales of their outputs and the residual in, it and e4m3 out."""
    columns = _ROUNDED[what]
    match what:
        case "norm":
            return columns * (rows * (2 + 2 + 2 + 1) + 4 + 2)
        case "attention":
            return columns * rows * (2 + 1)
        case _:
            return columns * (rows * (4 + 1) + 8)


def rounding_case(what: str, rows: int, backend: str | None) -> Built:
    """Rows rounded to FP8 behind a norm, as they are, or behind the activation, of many arrays in turn."""
    columns, moved = _ROUNDED[what], rounding_bytes(what, rows)
    copies = max(2, min(64, -(-L2_BYTES // moved)))
    scale = jnp.full((columns,), 1.1, jnp.bfloat16)

    def drawn(key: int) -> dict[str, Any]:
        if what == "attention":
            return {"x": normal(key, (rows, columns), jnp.bfloat16)}
        height, width = padded(rows), columns if what == "norm" else 2 * columns
        arrays = normal(key, (height, width), jnp.bfloat16), jnp.ones((height, 1)), jnp.full((width,), 0.1, jnp.float32)
        x = ops.Sums(*arrays, rows, jnp.dtype(jnp.bfloat16))
        return {"x": x, "residual": normal(key + 1, (rows, columns), jnp.bfloat16)} if what == "norm" else {"x": x}

    options: dict[str, Any] = {"activation": "silu"} if what == "gate, up" else {}

    @jax.jit
    def program(operands: list[dict[str, Any]], scale: jax.Array) -> list[Any]:
        norm: dict[str, Any] = {"norm": scale} if what == "norm" else {}
        return [ops.round_rows(**one, **norm, **options, backend=backend) for one in operands]

    return program, ([drawn(2 * i) for i in range(copies)], scale), copies, float(moved)


def cases(backend: str | None) -> Iterator[Case]:
    for what in _ROUNDED:
        for rows in (1, 8, 32, 256, 8192):
            floor = rounding_bytes(what, rows) / CARD_BYTES_S * 1e6
            name = f"round rows, {what}, {rows:,} rows (floor {floor:.1f} us)"
            yield Case(name, "us", None, partial(rounding_case, what, rows, backend))
    for layer, (width, depth) in PRODUCTS.items():
        for rows in (1, 8, 32, 64, 256, 512, 8192):
            for form in _BITS:
                floor = product_floor_us(form, rows, width, depth)
                name = f"product {form}, {layer}, {rows:,} rows (floor {floor:.1f} us)"
                yield Case(name, "us", None, partial(product_case, form, rows, width, depth, backend))
    for form, aim in (("bf16", None), ("rounded FP8", 1250.0), ("FP8 blocks", None)):
        build = partial(product_case, form, 8192, 8192, 8192, backend)
        yield Case(f"product {form}, square, 8,192 rows", "TFLOP/s", aim, build)
