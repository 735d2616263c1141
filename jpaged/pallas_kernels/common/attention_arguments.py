"""What the attention ops have in common: the arguments of their implementations, and checks of those of callers.

Checks run while tracing, on shapes and types alone.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.arguments import ArrayLike, check_rank, check_real, goes_with_pool, holds_latents
from jpaged.pallas_kernels.devices import Device


class Operands(NamedTuple):
    """The arrays that every attention op takes.

    q: [queries, heads, head_dim]. kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim], or of latents 1 in place
    of 2. block_tables: int32 [rows, M]. kv_lens: int32 [rows]. alibi_slopes: float32 [heads], or None.
    """

    q: jax.Array
    kv_pool: jax.Array
    block_tables: jax.Array
    kv_lens: jax.Array
    alibi_slopes: jax.Array | None


@dataclass(frozen=True)
class Features:
    """The options that every attention op takes, known while tracing; hashable, so one static argument of a jit."""

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None
    value_dim: int | None = None


def check_features(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    scale: float | None,
    sliding_window: int | None,
    logit_softcap: float | None,
    value_dim: int | None,
    *,
    narrow_values: bool = False,
) -> Features:
    """The attention ops' options, checked, with the default scale in its place. narrow_values: as of
    `check_value_dim`."""
    if block_tables.shape[1] < 1:
        raise ValueError(f"block_tables must have at least one column, got shape {tuple(block_tables.shape)}")
    value_dim = check_value_dim(value_dim, kv_pool, narrow_values=narrow_values)
    scale = check_scale(scale, q.shape[2])
    return Features(scale, check_window(sliding_window), check_softcap(logit_softcap), value_dim)


def check_value_dim(value_dim: int | None, pool: ArrayLike, *, narrow_values: bool = False) -> int | None:
    """Raises ValueError unless it says how wide values are where a (checked) pool holds latents, and is None where it
    does not. narrow_values: values apart from keys may be narrower than these, too."""
    if not holds_latents(pool) and (value_dim is None or not narrow_values):
        if value_dim is not None:
            raise ValueError(f"value_dim must be None for a pool that has values apart from keys, got {value_dim!r}")
        return None
    kept = "latents" if holds_latents(pool) else "values"
    if (
        isinstance(value_dim, bool)
        or not isinstance(value_dim, numbers.Integral)
        or not 1 <= value_dim <= pool.shape[4]
    ):
        raise ValueError(
            f"value_dim must be an int from 1 to the {pool.shape[4]} columns of the pool's {kept}, got {value_dim!r}"
        )
    return int(value_dim)


def triton_on_hopper(device: Device, q: ArrayLike, kv_pool: ArrayLike, value_dim: int | None = None) -> bool:
    """As `arguments.triton_on_hopper`, of what attention ops give `Op.pick`."""
    return check.triton_on_hopper(device, kv_pool)


def to_pick_by(q: ArrayLike, kv_pool: ArrayLike, value_dim: int | None) -> tuple[Any, ...]:
    """What attention ops give `Op.pick`: q and kv_pool, and for a pool of latents value_dim, too. So an implementation
    that does not know of latents is not asked whether it supports them, but fails."""
    return (q, kv_pool) if value_dim is None else (q, kv_pool, value_dim)


def output_shape(q: jax.Array, features: Features) -> tuple[int, ...]:
    """Of the attention of these queries: [queries, heads, columns of a value]."""
    return q.shape if features.value_dim is None else (*q.shape[:2], features.value_dim)


def check_queries(q: ArrayLike, pool: ArrayLike) -> None:
    """Raises ValueError unless `q` is [rows, heads, head_dim] and fits the (checked) pool."""
    check_rank("q", q, "rows, heads, head_dim")
    _, _, kv_heads, _, head_dim = pool.shape
    if not goes_with_pool(q.dtype, pool):
        raise ValueError(f"q must have the pool's dtype {pool.dtype}, got {q.dtype}")
    if q.shape[2] != head_dim:
        raise ValueError(f"q must have the pool's head_dim {head_dim}, got shape {tuple(q.shape)}")
    if q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"q must have a multiple of the pool's {kv_heads} KV heads, got {q.shape[1]} heads")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale, 1 / sqrt(head_dim) by default."""
    return 1.0 / math.sqrt(head_dim) if scale is None else check_real("scale", scale)


def check_window(sliding_window: int | None) -> int | None:
    if sliding_window is None:
        return None
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, numbers.Integral) or sliding_window < 1:
        raise ValueError(f"sliding_window must be None or an int of at least 1, got {sliding_window!r}")
    return int(sliding_window)


def check_softcap(logit_softcap: float | None) -> float | None:
    if logit_softcap is None:
        return None
    if (cap := check_real("logit_softcap", logit_softcap)) <= 0:
        raise ValueError(f"logit_softcap must be None or positive, got {logit_softcap!r}")
    return cap


def check_alibi(alibi_slopes: jax.Array | None, heads: int) -> jax.Array | None:
    """The slopes as float32 [heads]."""
    return check_per_head("alibi_slopes", alibi_slopes, heads)


def check_per_head(name: str, numbers: jax.Array | None, heads: int) -> jax.Array | None:
    """A number of each query head as float32 [heads]; None for None.

    Raises:
        ValueError: they are not floats of that shape.
    """
    if numbers is None:
        return None
    found = jnp.asarray(numbers)
    if found.shape != (heads,) or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(f"{name} must be float [{heads}], got {found.dtype}{found.shape}")
    return found.astype(jnp.float32)
