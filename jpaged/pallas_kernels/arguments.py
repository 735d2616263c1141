"""Checks of the ops' arguments. They run while tracing, on shapes and types alone, so they cost a call nothing."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

ArrayLike = jax.Array | jax.ShapeDtypeStruct

_FLOATS = (jnp.bfloat16.dtype, jnp.float16.dtype, jnp.float32.dtype, jnp.float64.dtype)


def check_rank(name: str, x: ArrayLike, axes: str) -> None:
    """Raises ValueError unless `x` has one axis for each word of `axes`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} must be an array [{axes}], got {type(x).__name__}")
    if len(x.shape) != len(axes.split(",")):
        raise ValueError(f"{name} must have the axes [{axes}], got shape {tuple(x.shape)}")


def check_int32(name: str, x: ArrayLike, axes: str, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError unless `x` is int32 of `shape`, where None stands for any size."""
    check_array(name, x, jnp.int32, axes, shape)


def check_array(name: str, x: ArrayLike, dtype: Any, axes: str, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError unless `x` has this dtype and shape, where None stands for any size."""
    check_rank(name, x, axes)
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {jnp.dtype(dtype)}, got {x.dtype}")
    for got, want, axis in zip(x.shape, shape, axes.split(","), strict=True):
        if want is not None and got != want:
            raise ValueError(f"{name} [{axes}] must have {axis.strip()} = {want}, got shape {tuple(x.shape)}")


def check_scalar(name: str, x: ArrayLike) -> None:
    """Raises ValueError unless `x` is an int32 scalar."""
    if getattr(x, "shape", None) != () or x.dtype != jnp.int32:
        raise ValueError(f"{name} must be an int32 scalar, got {getattr(x, 'dtype', type(x).__name__)}{_shape(x)}")


def _shape(x: object) -> tuple[int, ...] | str:
    return tuple(getattr(x, "shape", ())) or ""


def check_pool(name: str, pool: ArrayLike) -> None:
    """Raises ValueError unless `pool` is a float array [num_blocks, 2, kv_heads, block_size, head_dim]."""
    check_rank(name, pool, "num_blocks, 2, kv_heads, block_size, head_dim")
    if pool.shape[1] != 2:
        raise ValueError(f"{name} must be [num_blocks, 2, kv_heads, block_size, head_dim], got shape {pool.shape}")
    if min(pool.shape) < 1:
        raise ValueError(f"{name} must not have an empty axis, got shape {pool.shape}")
    if pool.dtype not in _FLOATS:
        raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {pool.dtype}")


def check_pools(name: str, pools: tuple[ArrayLike, ...]) -> None:
    """Raises ValueError unless `pools` is a non-empty sequence of pools of one shape and type."""
    if not isinstance(pools, (tuple, list)) or not pools:
        raise ValueError(f"{name} must be a non-empty tuple of pools, one a layer, got {type(pools).__name__}")
    for i, pool in enumerate(pools):
        check_pool(f"{name}[{i}]", pool)
        if pool.shape != pools[0].shape or pool.dtype != pools[0].dtype:
            raise ValueError(
                f"{name} must all have one shape and dtype: {name}[{i}] is {pool.dtype}{pool.shape}, "
                f"{name}[0] is {pools[0].dtype}{pools[0].shape}"
            )


def check_parts(outs: Sequence[ArrayLike], lses: Sequence[ArrayLike]) -> None:
    """Raises ValueError unless these are results [rows, heads, head_dim] of one shape and dtype, and the float32
    log-sum-exps [rows, heads] of each."""
    for name, arrays in (("outs", outs), ("lses", lses)):
        if not isinstance(arrays, (tuple, list)) or not arrays:
            raise ValueError(f"{name} must be a non-empty list of arrays, one a part, got {type(arrays).__name__}")
    if len(outs) != len(lses):
        raise ValueError(f"lses must be as many as outs, {len(outs)}, got {len(lses)}")
    check_rank("outs[0]", outs[0], "rows, heads, head_dim")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_like(f"outs[{i}]", out, "rows, heads, head_dim", outs[0].shape, "outs[0]", outs[0].dtype)
        check_array(f"lses[{i}]", lse, jnp.float32, "rows, heads", outs[0].shape[:2])


def check_slots(name: str, pool: ArrayLike) -> None:
    """Raises ValueError if a (checked) pool has more slots than int32 can number."""
    slots = pool.shape[0] * pool.shape[3]
    if slots >= 2**31:
        raise ValueError(f"{name} has {slots} slots; an int32 slot_mapping needs fewer than 2**31")


def check_like(name: str, x: ArrayLike, axes: str, shape: tuple[int, ...], other: str, dtype: jnp.dtype) -> None:
    """Raises ValueError unless `x` is of `dtype`, a float, and has the shape that goes with the argument `other`."""
    check_rank(name, x, axes)
    if x.dtype != dtype or x.dtype not in _FLOATS:
        raise ValueError(f"{name} must be {dtype}, to go with {other}, and of floats, got {x.dtype}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)} like {other}, got shape {tuple(x.shape)}")


def check_eps(name: str, eps: float) -> float:
    if (value := _real(name, eps)) < 0:
        raise ValueError(f"{name} must not be negative, got {eps!r}")
    return value


def check_qkv(
    qkv: ArrayLike,
    rotation: tuple[ArrayLike, ArrayLike] | None,
    norms: tuple[ArrayLike, ArrayLike] | None,
    norm_eps: float,
) -> float:
    """The eps; raises ValueError unless `qkv` is [T, kv_heads, group + 2, head_dim] and the others fit it."""
    check_rank("qkv", qkv, "T, kv_heads, group + 2, head_dim")
    tokens, kv_heads, slots, head_dim = qkv.shape
    if qkv.dtype not in _FLOATS or kv_heads < 1 or slots < 3 or head_dim < 1:
        raise ValueError(f"qkv must be floats [T, kv_heads, group + 2, head_dim], got {qkv.dtype}{tuple(qkv.shape)}")
    for name, pair in (("rotation", rotation), ("norms", norms)):
        if pair is not None and (not isinstance(pair, (tuple, list)) or len(pair) != 2):
            raise ValueError(f"{name} must be None or a pair of arrays, got {type(pair).__name__}")
    if rotation is not None:
        if head_dim % 2:
            raise ValueError(f"rotation needs an even head_dim, got {head_dim}")
        for i, table in enumerate(rotation):
            check_like(f"rotation[{i}]", table, "T, head_dim / 2", (tokens, head_dim // 2), "qkv", jnp.float32.dtype)
    for i, scale in enumerate(norms or ()):
        check_like(f"norms[{i}]", scale, "head_dim", (head_dim,), "qkv", qkv.dtype)
    return check_eps("norm_eps", norm_eps)


def check_queries(q: ArrayLike, pool: ArrayLike) -> None:
    """Raises ValueError unless `q` is [rows, heads, head_dim] and fits the (checked) pool."""
    check_rank("q", q, "rows, heads, head_dim")
    _, _, kv_heads, _, head_dim = pool.shape
    if q.dtype != pool.dtype:
        raise ValueError(f"q must have the pool's dtype {pool.dtype}, got {q.dtype}")
    if q.shape[2] != head_dim:
        raise ValueError(f"q must have the pool's head_dim {head_dim}, got shape {tuple(q.shape)}")
    if q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"q must have a multiple of the pool's {kv_heads} KV heads, got {q.shape[1]} heads")


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number known while tracing, got {value!r}")
    return float(value)


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale, 1 / sqrt(head_dim) by default."""
    return 1.0 / math.sqrt(head_dim) if scale is None else _real("scale", scale)


def check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, known while tracing, got {value!r}")
    return value


def check_window(sliding_window: int | None) -> int | None:
    if sliding_window is None:
        return None
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, numbers.Integral) or sliding_window < 1:
        raise ValueError(f"sliding_window must be None or an int of at least 1, got {sliding_window!r}")
    return int(sliding_window)


def check_softcap(logit_softcap: float | None) -> float | None:
    if logit_softcap is None:
        return None
    if (cap := _real("logit_softcap", logit_softcap)) <= 0:
        raise ValueError(f"logit_softcap must be None or positive, got {logit_softcap!r}")
    return cap


def check_alibi(alibi_slopes: jax.Array | None, heads: int) -> jax.Array | None:
    """The slopes as float32 [heads]."""
    if alibi_slopes is None:
        return None
    slopes = jnp.asarray(alibi_slopes)
    if slopes.shape != (heads,) or not jnp.issubdtype(slopes.dtype, jnp.floating):
        raise ValueError(f"alibi_slopes must be float [{heads}], got {slopes.dtype}{slopes.shape}")
    return slopes.astype(jnp.float32)
