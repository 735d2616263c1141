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

    x: [M, K], of `dtype` or float32.
    norm: the scale [K] of an RMS norm of x, of x's dtype or float32; None for no norm.
    largest: int32 [P, M], the bits of float32 numbers: the largest magnitude of each of P parts of a row of x; None if
        not known. Cannot be given with a norm.
    norm_eps, input_scale, upper_bound: as of `round_rows`.
    dtype: of the rows that x stands for, and of results made of them; x may be float32 all the same, as `activated`
        gives it.
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
