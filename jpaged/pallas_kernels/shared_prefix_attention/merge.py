"""Attention to all keys from attention to parts of them, merged by log-sum-exp."""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check


def merge_attention(outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention to all keys, from attention of the same queries to parts of them. Computed in float32 or wider.

    Args:
        outs: arrays [rows, heads, head_dim] of one shape and dtype, one a part.
        lses: float32 [rows, heads] each; their log-sum-exps, -inf where a query saw none of the part's keys.
    Returns:
        The output, of the parts' dtype, and its log-sum-exp, float32: 0 and -inf where a query saw nothing at all. A
        query that saw keys of one part alone gets exactly that part's result.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    _check_parts(outs, lses)
    wide = jnp.promote_types(outs[0].dtype, jnp.float32)
    top = reduce(jnp.maximum, lses)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = [jnp.exp(lse - top) for lse in lses]
    total = reduce(jnp.add, weights)
    parts = zip(outs, weights, strict=True)
    out = reduce(jnp.add, [out.astype(wide) * weight[..., None] for out, weight in parts])
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return out.astype(outs[0].dtype), top + jnp.log(total)


def _check_parts(outs: Sequence[check.ArrayLike], lses: Sequence[check.ArrayLike]) -> None:
    """Raises ValueError unless these are results [rows, heads, head_dim] of one shape and dtype, and the float32
    log-sum-exps [rows, heads] of each."""
    for name, arrays in (("outs", outs), ("lses", lses)):
        if not isinstance(arrays, (tuple, list)) or not arrays:
            raise ValueError(f"{name} must be a non-empty list of arrays, one a part, got {type(arrays).__name__}")
    if len(outs) != len(lses):
        raise ValueError(f"lses must be as many as outs, {len(outs)}, got {len(lses)}")
    check.check_rank("outs[0]", outs[0], "rows, heads, head_dim")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check.check_like(f"outs[{i}]", out, "rows, heads, head_dim", outs[0].shape, "outs[0]", outs[0].dtype)
        check.check_array(f"lses[{i}]", lse, jnp.float32, "rows, heads", outs[0].shape[:2])
