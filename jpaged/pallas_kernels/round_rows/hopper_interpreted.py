"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows. It has no warps: warpgroups store numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.hopper_interpreted import await_kernel_before

__all__ = ["await_kernel_before", "memory", "over_cta"]


def memory(warpgroups: int) -> Any:
    """Shared memory of one call of `over_cta`: a number a warpgroup, and the barrier behind which they are read."""
    return plgpu.SMEM((warpgroups,), jnp.float32), plgpu.Barrier(num_arrivals=warpgroups)


def over_cta(kind: str, x: jax.Array, memory: Any, warpgroups: int, layout: Any) -> jax.Array:
    """The "sum" or "max" of arrays that a CTA's warpgroups have."""
    del layout
    numbers, barrier = memory
    reduce = jnp.sum if kind == "sum" else jnp.max
    numbers[lax.axis_index("warpgroup")] = reduce(x)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    return reduce(jnp.stack([numbers[i] for i in range(warpgroups)]))
