"""Checks of the ops' arguments. They run while tracing, on shapes and types alone, so they cost a call nothing."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import FP8
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.registry import is_hopper

ArrayLike = jax.Array | jax.ShapeDtypeStruct


FLOATS = (jnp.bfloat16.dtype, jnp.float16.dtype, jnp.float32.dtype, jnp.float64.dtype)


def check_rank(name: str, x: ArrayLike, axes: str) -> None:
    """Raises ValueError unless `x` has one axis for each word of `axes`."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} must be an array [{axes}], got {type(x).__name__}")
    if len(x.shape) != len(axes.split(",")):
        raise ValueError(f"{name} must have the axes [{axes}], got shape {tuple(x.shape)}")


def check_floats(name: str, x: ArrayLike, axes: str) -> None:
    """Raises ValueError if `x` does not have these axes, or is not of floats."""
    check_rank(name, x, axes)
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be of floats, got {x.dtype}")


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


def holds_latents(pool: ArrayLike) -> bool:
    """Whether a (checked) pool has no values apart from keys."""
    return pool.shape[1] == 1


def triton_on_hopper(device: Device, kv_pool: ArrayLike, *arguments: Any) -> bool:
    """Whether Triton stands in on Hopper for what Hopper's kernels refuse: pools in e4m3, heads of more than 256
    columns, latents but for decode steps; for `Op.also`."""
    return is_hopper(device) and (holds_latents(kv_pool) or kv_pool.dtype == FP8 or kv_pool.shape[-1] > 256)


def check_pool(name: str, pool: ArrayLike, *, latents: bool = False) -> None:
    """Raises ValueError unless `pool` is of floats or e4m3 [num_blocks, 2, kv_heads, block_size, head_dim].

    latents: it may also be one of latents, [num_blocks, 1, kv_heads, block_size, head_dim].
    """
    check_rank(name, pool, "num_blocks, 2, kv_heads, block_size, head_dim")
    if pool.shape[1] != 2 and not (latents and holds_latents(pool)):
        parts = "2 or 1" if latents else "2"
        raise ValueError(
            f"{name} must be [num_blocks, {parts}, kv_heads, block_size, head_dim], got shape {pool.shape}"
        )
    if min(pool.shape) < 1:
        raise ValueError(f"{name} must not have an empty axis, got shape {pool.shape}")
    if pool.dtype not in (*FLOATS, FP8):
        raise ValueError(f"{name} must be bfloat16, float16, float32, float64 or {FP8}, got {pool.dtype}")


def goes_with_pool(dtype: jnp.dtype, pool: ArrayLike) -> bool:
    """Whether queries, keys or values of this dtype go with a pool: its own, or any floats with one in e4m3."""
    return dtype == pool.dtype or (pool.dtype == FP8 and dtype in FLOATS)


def check_kv_scales(kv_scales: ArrayLike | None, pool: ArrayLike) -> None:
    """Raises ValueError unless these are None, or float32 [2] for a (checked) pool in e4m3."""
    if kv_scales is None:
        return
    if pool.dtype != FP8:
        raise ValueError(f"kv_scales are of a pool in {FP8}, and this one is in {pool.dtype}; leave them out")
    check_array("kv_scales", kv_scales, jnp.float32, "2", (2,))


def check_pools(name: str, pools: tuple[ArrayLike, ...]) -> None:
    """Raises ValueError unless `pools` is a non-empty sequence of pools of one shape and type."""
    if not isinstance(pools, (tuple, list)) or not pools:
        raise ValueError(f"{name} must be a non-empty tuple of pools, one a layer, got {type(pools).__name__}")
    for i, pool in enumerate(pools):
        check_pool(f"{name}[{i}]", pool, latents=True)
        if pool.shape != pools[0].shape or pool.dtype != pools[0].dtype:
            raise ValueError(
                f"{name} must all have one shape and dtype: {name}[{i}] is {pool.dtype}{pool.shape}, "
                f"{name}[0] is {pools[0].dtype}{pools[0].shape}"
            )


def check_slots(name: str, pool: ArrayLike) -> None:
    """Raises ValueError if a (checked) pool has more slots than int32 can number."""
    slots = pool.shape[0] * pool.shape[3]
    if slots >= 2**31:
        raise ValueError(f"{name} has {slots} slots; an int32 slot_mapping needs fewer than 2**31")


def check_like(name: str, x: ArrayLike, axes: str, shape: tuple[int, ...], other: str, dtype: jnp.dtype) -> None:
    """Raises ValueError unless `x` is of `dtype`, a float, and has the shape that goes with the argument `other`."""
    check_rank(name, x, axes)
    if x.dtype != dtype or x.dtype not in FLOATS:
        raise ValueError(f"{name} must be {dtype}, to go with {other}, and of floats, got {x.dtype}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)} like {other}, got shape {tuple(x.shape)}")


def check_eps(name: str, eps: float) -> float:
    if (value := check_real(name, eps)) < 0:
        raise ValueError(f"{name} must not be negative, got {eps!r}")
    return value


def check_real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number known while tracing, got {value!r}")
    return float(value)


def check_flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, known while tracing, got {value!r}")
    return value
