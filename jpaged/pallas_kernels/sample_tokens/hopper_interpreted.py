"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows, for clusters of one CTA.

It has no warps: what is asked of a warp is asked of its warpgroup, which gives the same tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.sample_tokens import hopper_primitives
from jpaged.pallas_kernels.sample_tokens.hopper_cluster import Cluster


def exchange_memory(cluster: Cluster) -> tuple[Any, Any]:
    """Shared memory for `exchange`, and a barrier at which all warpgroups arrive."""
    return hopper_primitives.exchange_memory(cluster), plgpu.Barrier(num_arrivals=cluster.warpgroups)


def exchange(
    kind: str,
    arrays: Sequence[jax.Array],
    k: jax.Array,
    records_ref: Any,
    turn: jax.Array,
    cluster: Cluster,
) -> list[jax.Array]:
    """Reduces over the warpgroups of one CTA, whose records they are instead of warps'.

    records_ref: of `exchange_memory`.
    """
    records, barrier = records_ref
    warpgroup = lax.axis_index("warpgroup")

    def merged(columns: Sequence[jax.Array]) -> list[jax.Array]:
        if kind == "sums":
            return [jnp.sum(x) for x in columns]
        if kind == "highest":
            return [jnp.max(columns[0])]
        scores, ids, _ = columns
        winner = jnp.argmin(jnp.where(scores == jnp.max(scores), ids, jnp.iinfo(jnp.int32).max))
        return [x[winner] for x in columns]

    for i, value in enumerate(merged(arrays)):
        records[turn, warpgroup, i] = lax.bitcast_convert_type(value, jnp.int32)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    columns = []
    for i, array in enumerate(arrays):
        words = jnp.stack([records[turn, g, i] for g in range(cluster.warpgroups)])
        columns.append(lax.bitcast_convert_type(words, array.dtype))
    if kind != "highest":
        return merged(columns)
    ranked = jnp.sort(columns[0], descending=True)
    few = (k > 0) & (k <= cluster.warpgroups)
    return [ranked[0], jnp.where(few, ranked[jnp.clip(k - 1, 0, cluster.warpgroups - 1)], -math.inf)]


def leave() -> None:
    """Nothing: no other CTA sends to this one."""


def warp_any(x: jax.Array, threshold: jax.Array, layout: Any) -> jax.Array:
    """Whether any element is above the threshold."""
    del layout
    return jnp.any(x > threshold)


def warp_max(x: jax.Array, layout: Any) -> jax.Array:
    """The largest element."""
    del layout
    return jnp.max(x)


def reinterpret(x: jax.Array, dtype: Any) -> jax.Array:
    """The same 32 bits of a scalar, as another dtype."""
    return lax.bitcast_convert_type(x, dtype)
