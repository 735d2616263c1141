"""Rows that have still to be rounded, what they are multiplied with, and what follows in float64."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jpaged.pallas_kernels.few_rows_fp8_product.operands import UnroundedRows
from jpaged.pallas_kernels.round_rows.operands import Operands as RowsToRound
from jpaged.pallas_kernels.round_rows.operands import Options
from jpaged.pallas_kernels.round_rows.reference import round_rows

E4M3 = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """depth: inputs. wide: x is float32, as an activation leaves it. parts: of each row, whose largest magnitudes are
    known."""

    rows: int = 3
    depth: int = 528
    outputs: int = 80
    dtype: Any = jnp.bfloat16
    wide: bool = False
    norm: Any = None
    parts: int = 0
    given: float | None = None
    upper_bound: float | None = None


CASES = [
    Case(),
    Case(rows=1),
    Case(rows=8, depth=64, outputs=16),
    Case(norm=jnp.bfloat16),
    Case(rows=1, norm=jnp.bfloat16, depth=1024),
    Case(norm=jnp.float32, depth=2064),
    Case(rows=1, wide=True, parts=5),
    Case(rows=8, wide=True, parts=3, upper_bound=2.0),
    Case(given=0.01),
    Case(dtype=jnp.float16, norm=jnp.float16),
]


def unrounded(case: Case, seed: int = 0) -> UnroundedRows:
    """Rows of different sizes; the second is of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.rows, case.depth)) * np.exp(rng.standard_normal((case.rows, 1)))
    x[1:2] = 0
    x = jnp.asarray(x, jnp.float32 if case.wide else case.dtype)
    norm = None if case.norm is None else jnp.asarray(1 + rng.standard_normal(case.depth) / 4, case.norm)
    largest = None
    if case.parts:
        cut = np.array_split(np.abs(np.asarray(x, np.float32)), case.parts, axis=1)
        largest = jnp.asarray(np.stack([part.max(axis=1) for part in cut]).view(np.int32))
    given = None if case.given is None else jnp.asarray([case.given], jnp.float32)
    return UnroundedRows(x, norm, largest, given, 1e-5, case.upper_bound, jnp.dtype(case.dtype))


def weights(case: Case, outputs: int, seed: int = 1) -> tuple[Any, Any]:
    """w e4m3 [outputs, K], and its scales."""
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((outputs, case.depth)) * 64).astype(E4M3)
    return jnp.asarray(w), jnp.asarray(np.exp(rng.standard_normal(outputs)) * 0.001, jnp.float32)


def products(rows: UnroundedRows, w: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the rows that `round_rows` makes: products without scales, the sums of their magnitudes, and the scales of the
    rows; float64."""
    count = rows.shape[0]
    options = Options(rows.norm_eps, None, rows.upper_bound)
    rounded, _ = round_rows(RowsToRound(rows.x, None, rows.norm, rows.input_scale), options)
    values, w = np.asarray(rounded.values[:count]).astype(np.float64), np.asarray(w).astype(np.float64)
    return values @ w.T, np.abs(values) @ np.abs(w).T, np.asarray(rounded.scales[:count], np.float64)
