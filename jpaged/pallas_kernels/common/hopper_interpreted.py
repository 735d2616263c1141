"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows. It has no warps, registers or overlapping grids,
no accumulator that begins as anything but zeros, and no product of an operand in registers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["add_product", "await_kernel_before", "in_warps", "set_registers"]


def await_kernel_before() -> None:
    """Nothing: kernels run one after the other."""


def set_registers(count: int, action: str) -> None:
    """Nothing."""
    del count, action


def in_warps(run: Callable[[Sequence[str]], None], *jobs: str) -> None:
    """Has `run` do all jobs at once, in an order in which none waits for what another brings later."""
    run(jobs)


def add_product(acc: jax.Array, lhs: Any, rhs: Any) -> jax.Array:
    """acc + lhs @ rhs. rhs is in shared memory; lhs is too, or an array."""
    if isinstance(lhs, jax.Array):
        values = rhs[...]
        plgpu.commit_smem()  # as wgmma's own reads do, this one comes before any copy to the same place
        return acc + jnp.dot(lhs, values, preferred_element_type=jnp.float32)

    def product(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, lhs, rhs)
        return acc_ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
