"""A sum or maximum over all threads of a CTA, by one exchange through shared memory.

A thread merges its own elements, a warp its threads' by a butterfly of shuffles, and stores one number. Behind a
barrier every warp merges all of these, a lane each, in the same order: all threads have the same result each time.
`hopper_interpreted.py` has the same for a CPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jpaged.pallas_kernels.common.hopper_primitives import await_kernel_before
from jpaged.pallas_kernels.common.inline_mlir import constant

__all__ = ["await_kernel_before", "memory", "over_cta"]

_WARPS = 4  # of a warpgroup


def memory(warpgroups: int) -> Any:
    """Shared memory of one call of `over_cta`: a number a warp, and the barrier behind which they are read."""
    return plgpu.SMEM((warpgroups * _WARPS,), jnp.float32), plgpu.Barrier(num_arrivals=warpgroups)


def over_cta(kind: str, x: jax.Array, memory: Any, warpgroups: int, layout: Any) -> jax.Array:
    """The "sum" or "max" of float32 arrays that a CTA's warpgroups have. NaN in any makes the maximum NaN.

    memory: of `memory`, of this call's own. warpgroups: at most 8. layout: of x, one-dimensional.
    """
    numbers, barrier = memory
    used = warpgroups * _WARPS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(ctx: Any, numbers: Any, x: Any) -> None:
        del ctx
        width = ir.VectorType(x.registers.flat[0].type).shape[0]
        mine = [vector.extract(register, [], [i]) for register in x.registers.flat for i in range(width)]
        while len(mine) > 1:  # by pairs, so that few wait for one another
            merged = [_merge(kind, *mine[i : i + 2]) for i in range(0, len(mine) - 1, 2)]
            mine = merged + mine[2 * len(merged) :]
        of_warp = _butterfly(kind, mine[0])
        thread = mgpu.utils.thread_idx()
        lane, warp = arith.remui(thread, constant(32)), arith.divui(thread, constant(32))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0))):
            llvm.store(of_warp, _address(numbers, warp))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT)
    )
    def merge(ctx: Any, numbers: Any) -> Any:
        del ctx
        f32 = ir.F32Type.get()
        lane = arith.remui(mgpu.utils.thread_idx(), constant(32))
        there = arith.cmpi(arith.CmpIPredicate.ult, lane, constant(used))
        number = llvm.load(f32, _address(numbers, arith.select(there, lane, constant(0))))
        if kind == "sum":
            number = arith.select(there, number, arith.constant(f32, ir.FloatAttr.get(f32, 0.0)))
        return mgpu.FragmentedArray.splat(_butterfly(kind, number), (), is_signed=None)

    store(numbers, x)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    return merge(numbers)


def _merge(kind: str, a: Any, b: Any) -> Any:
    return arith.addf(a, b) if kind == "sum" else arith.maximumf(a, b)


def _butterfly(kind: str, number: Any) -> Any:
    """Of all lanes of a warp, for each of them."""
    for distance in (16, 8, 4, 2, 1):
        number = _merge(kind, number, mgpu.utils.shfl_bfly(number, distance))
    return number


def _address(numbers: Any, index: Any) -> Any:
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(numbers), [index], ir.F32Type.get())
