"""What the kernels for Hopper ask of a GPU beside products, copies and barriers.

A kernel's body is written for the GPU alone. It calls these functions, and those of the `hopper_primitives.py` beside
it, through a name that is bound where the kernel is entered: to that module, or to `hopper_interpreted.py`, which has
the same functions in words that Pallas' interpreter on a CPU knows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["add_product", "await_kernel_before", "in_warps", "set_registers"]


def await_kernel_before() -> None:
    """Waits until the kernel before this one has ended, whose results are read: grids start while it ends."""
    plgpu.griddepcontrol_wait()


def set_registers(count: int, action: str) -> None:
    """Has each thread of the warpgroup take or give back registers ("increase", "decrease"), to have `count`."""
    plgpu.set_max_registers(count, action=action)


def in_warps(run: Callable[[Sequence[str]], None], *jobs: str) -> None:
    """Runs `run([job])` for each job, in a warp each, and waits until all are done.

    A copy that the warpgroup asks for has all of its threads meet first, and then arrive at the copy's barrier.
    """

    @plgpu.warp_map
    def _(warp: jax.Array) -> None:
        for number, job in enumerate(jobs):
            pl.when(warp == number)(partial(run, [job]))


def add_product(acc: jax.Array, lhs: Any, rhs: Any) -> jax.Array:
    """acc + lhs @ rhs. rhs is in shared memory; lhs is too, or in registers."""

    def product(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, lhs, rhs)

    return pl.run_state(product)(plgpu.ACC.init(acc))
