"""Rows that have still to be rounded to FP8, and what implementations of `few_rows_fp8_product` take."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "norm", "largest", "input_scale"),
    meta_fields=("norm_eps", "upper_bound", "dtype"),
)
@dataclass(frozen=True)
class UnroundedRows:
    """Rows [M, K] as a product reads them that rounds them itself, as `round_rows` would.

    x: floats [M, K].
    norm: the scale [K] of an RMS norm of x, of x's type or float32; None for no norm.
    largest: int32 [P, M], bits of float32 numbers: the largest magnitude of each of P parts of a row of x; None where
        it is not known. Goes with no norm.
    norm_eps, input_scale, upper_bound: as of `round_rows`.
    dtype: of what results of the rows are meant for; x may be wider.
    """

    x: jax.Array
    norm: jax.Array | None
    largest: jax.Array | None
    input_scale: jax.Array | None
    norm_eps: float
    upper_bound: float | None
    dtype: Any

    @property
    def shape(self) -> tuple[int, int]:
        rows, depth = self.x.shape
        return rows, depth


class Operands(NamedTuple):
    """The arrays of one product: `api.py` says what each is."""

    rows: UnroundedRows
    w: jax.Array
    scale: jax.Array
    residual: jax.Array | None
