"""Rows in FP8, sums of products of them whose scales have still to be multiplied, and what `round_rows` takes."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROWS_OF_A_PRODUCT = 16
"""cuBLASLt's FP8 products take multiples of so many rows. XLA pads others before each product and cuts its result."""


def type_of_sums(dtype: Any) -> Any:
    """That a product for results of this dtype keeps its sums in, which are accumulated in float32: bfloat16 has its
    range, and rounds them as a product in 16 bits would; half the bytes to write and to read. float16 has not."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def padded(rows: int) -> int:
    """The rows that an array of rounded rows has for so many."""
    return -(-rows // ROWS_OF_A_PRODUCT) * ROWS_OF_A_PRODUCT


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=("count", "dtype"))
@dataclass(frozen=True)
class RoundedRows:
    """Row m is about values[m] * scales[m].

    values: e4m3 [R, K]; R is `padded(count)`, and rows from `count` on hold anything.
    scales: float32 [R, 1].
    dtype: of what was rounded.
    """

    values: jax.Array
    scales: jax.Array
    count: int
    dtype: Any


@partial(
    jax.tree_util.register_dataclass, data_fields=("products", "of_rows", "of_outputs"), meta_fields=("count", "dtype")
)
@dataclass(frozen=True)
class Sums:
    """A product of rounded rows: products[m, n] * of_rows[m] * of_outputs[n].

    products: [R, N], of `type_of_sums` or float32, and of_rows: float32 [R, 1]; rows from `count` on hold anything.
    of_outputs: float32 [N].
    dtype: that the result is meant for.
    """

    products: jax.Array
    of_rows: jax.Array
    of_outputs: jax.Array
    count: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.products.shape[1]

    def wide(self) -> jax.Array:
        """float32 [count, N]."""
        return self.products[: self.count].astype(jnp.float32) * self.of_rows[: self.count] * self.of_outputs

    def array(self) -> jax.Array:
        """[count, N], of its dtype."""
        return self.wide().astype(self.dtype)

    def added_to(self, x: jax.Array) -> jax.Array:
        """x [count, N] and the sums, added in float32 and rounded once."""
        return (x.astype(jnp.float32) + self.wide()).astype(x.dtype)


class Operands(NamedTuple):
    """The arrays that implementations of `round_rows` take: `api.py` says what each is. None for none."""

    x: jax.Array | Sums
    residual: jax.Array | None
    norm: jax.Array | None
    input_scale: jax.Array | None


@dataclass(frozen=True)
class Options:
    """The options that they take, known while tracing; hashable, so one static argument of a jit."""

    norm_eps: float
    activation: str | None
    upper_bound: float | None
