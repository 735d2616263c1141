"""Rows to round, what they should become by numpy in float64, and how near that must be."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from scipy.special import erf

from jpaged.pallas_kernels.round_rows.operands import Operands, Options, RoundedRows, Sums, padded

E4M3 = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """What of `round_rows` is asked for. depth: of the result. kept: type of the products of sums."""

    rows: int = 5
    depth: int = 1024
    dtype: Any = jnp.bfloat16
    sums: bool = False
    kept: Any = jnp.float32
    residual: bool = False
    norm: Any = None
    activation: str | None = None
    given: float | None = None
    upper_bound: float | None = None


CASES = [
    Case(),
    Case(rows=17, given=0.25),
    Case(upper_bound=2.0, dtype=jnp.float32, residual=True),
    Case(residual=True, norm=jnp.float32, sums=True, dtype=jnp.float16),
    Case(rows=1, residual=True, norm=jnp.bfloat16, sums=True, kept=jnp.bfloat16),
    Case(activation="silu", sums=True, kept=jnp.bfloat16),
    Case(activation="gelu", dtype=jnp.float32),
    Case(activation="gelu_tanh", given=0.01, sums=True),
]


def operands(case: Case, seed: int = 0) -> tuple[Operands, Options]:
    """The arguments of implementations; rows differ in size, and the first of them are of zeros, where nothing is
    added to them."""
    rng = np.random.default_rng(seed)
    width = case.depth if case.activation is None else 2 * case.depth

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    x: Any
    if case.sums:
        products = normal(padded(case.rows), width) * 100
        of_rows = np.exp(normal(padded(case.rows), 1)) * 0.1
        products[case.rows :], of_rows[case.rows :] = np.nan, np.nan  # nobody may read them
        products[0] = 0
        arrays = (jnp.asarray(array) for array in (products, of_rows, np.exp(normal(width)) * 0.1))
        x = Sums(*arrays, case.rows, jnp.dtype(case.dtype))
        x = replace(x, products=x.products.astype(case.kept))
    else:
        values = normal(case.rows, width) * np.exp(normal(case.rows, 1))
        values[0] = 0
        x = jnp.asarray(values, case.dtype)
    residual = jnp.asarray(normal(case.rows, case.depth), case.dtype) if case.residual else None
    norm = None if case.norm is None else jnp.asarray(1 + normal(case.depth) / 4, case.norm)
    given = None if case.given is None else jnp.asarray([case.given], jnp.float32)
    return Operands(x, residual, norm, given), Options(1e-5, case.activation, case.upper_bound)


def _activated(name: str, x: np.ndarray) -> np.ndarray:
    match name:
        case "silu":
            return x / (1 + np.exp(-x))
        case "relu":
            return np.maximum(x, 0)
        case "gelu":
            return 0.5 * x * (1 + erf(x / np.sqrt(2)))
        case _:
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _wide(x: Any) -> np.ndarray:
    """float64 [rows, width]: what is rounded, or activated first."""
    if not isinstance(x, Sums):
        return np.asarray(x, np.float64)
    wide = np.asarray(x.products, np.float64) * np.asarray(x.of_rows) * np.asarray(x.of_outputs)
    return wide[: x.count]


def expected(case: Case, x: Any, residual: Any, norm: Any, given: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Values and scales before they are rounded, and the sum with the residual; float64."""
    wide = _wide(x)
    if case.activation is not None:
        wide = _activated(case.activation, wide[:, : case.depth]) * wide[:, case.depth :]
    after = None
    if residual is not None:
        after = (np.asarray(residual, np.float64) + wide).astype(case.dtype)
        wide = after.astype(np.float64)
    if norm is not None:
        wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5)
        wide = (wide.astype(norm.dtype).astype(np.float64) * np.asarray(norm, np.float64)).astype(case.dtype)
        wide = wide.astype(np.float64)
    if given is not None:
        scales = np.full((case.rows, 1), float(given[0]))
    else:
        largest = np.abs(wide).max(1, keepdims=True)
        largest = largest if case.upper_bound is None else np.minimum(largest, case.upper_bound)
        scales = np.where(largest == 0, 1.0, largest / 448)
    return np.clip(wide / scales, -448, 448), scales, after


def check(case: Case, arguments: Operands, found: tuple[RoundedRows, Any]) -> None:
    """Fails unless the result is the one expected, but for roundings that sums in another order move."""
    rows, after = found
    assert (rows.count, rows.dtype) == (case.rows, case.dtype)
    assert rows.values.shape == (padded(case.rows), case.depth)
    assert rows.scales.shape == (padded(case.rows), 1)
    assert (rows.values.dtype, rows.scales.dtype) == (E4M3, jnp.float32)
    values, scales, sums = expected(case, *arguments)
    got = np.asarray(rows.values[: case.rows]).astype(np.float64)
    np.testing.assert_allclose(rows.scales[: case.rows], scales, rtol=2**-7 if case.norm or case.residual else 1e-5)
    most = np.abs(values) * (2**-4 + 2**-6) + 2**-10
    if case.activation == "gelu_tanh" and jax.default_backend() == "cpu":  # whose tanh is off by 3e-7, all of its tail
        wide = np.abs(_wide(arguments.x))
        most += 2**-22 * wide[:, : case.depth] * wide[:, case.depth :] / scales
    assert np.all(np.abs(got - values) <= most)
    assert np.mean(got == values.astype(E4M3).astype(np.float64)) > 0.95
    if not (case.residual or case.given):
        assert np.all(np.abs(got).max(1)[1:] == 448)
    if sums is not None:
        eps, cancelled = float(jnp.finfo(case.dtype).eps), 2**-22  # of terms about 1
        np.testing.assert_allclose(np.asarray(after, np.float64), sums.astype(np.float64), rtol=eps, atol=cancelled)
        assert np.mean(np.asarray(after) == sums) > 0.99
    assert (after is None) == (sums is None)
