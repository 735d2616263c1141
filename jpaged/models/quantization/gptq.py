"""4-bit weights by GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounding that knows the layer's inputs.

    weight [out, in], hessian = sum of x x^T over the calibration's inputs x [in]

    scales       of each group: the best of 20 candidates, by the error of rounding, squared and weighted by the
                 hessian's diagonal
    U            upper Cholesky factor of the inverse of (hessian + damping), inputs in the order of the diagonal, the
                 largest first, as those are rounded best whose errors others can still take over ("act-order")
    a column     value = round(weight / scale), error = (weight - value * scale) / U[j, j]
                 the columns that follow take over what they can: weight -= error * U[j, following]

Columns of a block are updated one by one, those of later blocks once for the whole block, by a product (section 3.3
there). Scales are fixed before, so that a checkpoint stores nothing of the order.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve

from jpaged.pallas_kernels.common.numerics import LEAST_LARGEST

DAMPING = 0.01
"""As in the paper."""
_HIGHEST = lax.Precision.HIGHEST


def gptq(
    weight: jax.Array, hessian: jax.Array, *, group: int, scale_dtype: Any, damping: float
) -> tuple[jax.Array, jax.Array]:
    """Values from -8 to 7 and their scales.

    weight: floats [outputs, inputs], in groups of inputs that share a scale.
    hessian: float32 [inputs, inputs]; an input that is always zero has a row of zeros.
    damping: of the mean of the hessian's diagonal, what is added to it; ten times as much, until there is a factor,
        where it is too little.

    Returns int8 [outputs, inputs] and scale_dtype [outputs, inputs / group].

    Raises:
        ValueError: weight or hessian has NaN or infinity, or a scale would be too small or too large for its type.
    """
    if not bool(jnp.all(jnp.isfinite(weight))):
        raise ValueError("has NaN or infinity")
    order = jnp.argsort(-jnp.diag(hessian), stable=True)
    while True:
        factor = _factor(hessian[order][:, order], jnp.float32(damping))
        if bool(jnp.all(jnp.isfinite(factor))):
            break
        if damping > 1:
            raise ValueError("has calibration inputs with NaN or infinity")
        damping *= 10
    values, scales = _quantize(weight.astype(jnp.float32), jnp.diag(hessian), order, factor, group, scale_dtype)
    if not bool(jnp.all(jnp.isfinite(scales) & (scales > 0))):
        raise ValueError(f"has values too small or too large for a scale in {jnp.dtype(scale_dtype)}")
    return values, scales


@jax.jit
def _factor(hessian: jax.Array, damping: jax.Array) -> jax.Array:
    """U; NaN where there is none."""
    diagonal = jnp.diag(hessian)
    added = damping * jnp.mean(diagonal) + jnp.where(diagonal == 0, 1.0, 0.0)
    lower = jnp.linalg.cholesky(hessian + jnp.diag(added))
    inverse = cho_solve((lower, True), jnp.eye(hessian.shape[0], dtype=jnp.float32))
    return jnp.linalg.cholesky((inverse + inverse.T) / 2).T


@partial(jax.jit, static_argnums=(4, 5))
def _quantize(
    weight: jax.Array, importance: jax.Array, order: jax.Array, factor: jax.Array, group: int, scale_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """importance: float32 [inputs], the hessian's diagonal. order: of the inputs in the factor."""
    outputs, inputs = weight.shape
    weight = jnp.where(importance == 0, 0.0, weight)  # of inputs that are always zero
    scales = _scales(weight, importance, group, scale_dtype)
    scale_of_column = jnp.repeat(scales.astype(jnp.float32), group, axis=1)[:, order]
    numbers = jnp.arange(inputs)

    def of_block(weight: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = index * group
        rows = lax.dynamic_slice_in_dim(factor, first, group, 0)  # [block, inputs]
        square = lax.dynamic_slice_in_dim(rows, first, group, 1)
        own = lax.dynamic_slice_in_dim(weight, first, group, 1)
        own_scales = lax.dynamic_slice_in_dim(scale_of_column, first, group, 1)

        def column(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            own, values, errors = state
            taken, scale = (lax.dynamic_index_in_dim(x, j, 1, keepdims=False) for x in (own, own_scales))
            value = _rounded(taken, scale)
            row = lax.dynamic_index_in_dim(square, j, 0, keepdims=False)
            error = (taken - value * scale) / row[j]
            own = own - error[:, None] * jnp.where(jnp.arange(group) > j, row, 0.0)
            values = lax.dynamic_update_index_in_dim(values, value.astype(jnp.int8), j, 1)
            return own, values, lax.dynamic_update_index_in_dim(errors, error, j, 1)

        start = own, jnp.zeros(own.shape, jnp.int8), jnp.zeros_like(own)
        _, values, errors = lax.fori_loop(0, group, column, start)
        later = jnp.where(numbers >= first + group, rows, 0.0)
        return weight - jnp.dot(errors, later, precision=_HIGHEST), values

    _, values = lax.scan(of_block, weight[:, order], jnp.arange(inputs // group))
    values = values.transpose(1, 0, 2).reshape(outputs, inputs)
    return values[:, jnp.argsort(order)], scales


def _scales(weight: jax.Array, importance: jax.Array, group: int, dtype: Any) -> jax.Array:
    """[outputs, groups]: of the largest magnitude / 7.5, and less of it, what makes the least weighted error."""
    groups = weight.reshape(weight.shape[0], -1, group)
    weighed = importance.reshape(-1, group)
    largest = jnp.max(jnp.abs(groups), axis=2)
    start = jnp.where(largest < LEAST_LARGEST, 1.0, largest / 7.5)

    def tried(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = (start * part).astype(dtype)
        wide = scale.astype(jnp.float32)[:, :, None]
        return scale, jnp.sum(weighed * (groups - _rounded(groups, wide) * wide) ** 2, axis=2)

    def better(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scale, error = tried(1 - i * _SHRINKS_BY)
        return jnp.where(error < best[1], scale, best[0]), jnp.minimum(error, best[1])

    return lax.fori_loop(1, _SHRINKS, better, tried(jnp.float32(1)))[0]


_SHRINKS, _SHRINKS_BY = 20, 0.025


def _rounded(weight: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(weight / scale), -8, 7)
