"""What the decode attention kernels ask of a GPU for which Pallas has no word: arrivals counted in global memory, a
warpgroup's read of a row of a table, stores of any number of heads. `hopper_interpreted.py` has the same for a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jpaged.pallas_kernels.common.hopper_primitives import *  # noqa: F403  (kernels call them through this module)
from jpaged.pallas_kernels.common.inline_mlir import constant, offset, scalar, warp_and_lane

WARPGROUP = 128  # threads
_FIRST_OWN_BARRIER = 8  # of the hardware's 16; those below are Mosaic's own


def is_last_to_arrive(counters_ref: Any, index: jax.Array, expected: jax.Array) -> jax.Array:
    """Counts this warpgroup's arrival at counters [n], after all its stores to memory: whether it is the last of
    `expected`.

    What the others stored before they arrived may be read by the last.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def count(ctx: Any, counters: Any, index: Any, expected: Any) -> Any:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        at = offset(mgpu.utils.memref_ptr(counters), scalar(index), i32)
        thread = mgpu.utils.thread_idx()
        in_warpgroup = arith.remui(thread, constant(WARPGROUP))
        # Thread 0 counts. What it was shown by this barrier is covered by its first fence, which comes before the
        # count; what others counted before it, by its second, which comes after.
        mgpu.utils.warpgroup_barrier()
        # A barrier's reduction tells all 128 what it found and keeps them from reading sooner. One a warpgroup, or
        # arrivals of two would mix.
        barrier = arith.addi(arith.divui(thread, constant(WARPGROUP)), constant(_FIRST_OWN_BARRIER))
        last = llvm.inline_asm(
            i32,
            [at, in_warpgroup, scalar(expected), barrier],
            """{
            .reg .pred first, mine, all;
            .reg .b32 old;
            setp.eq.u32 first, $2, 0;
            mov.b32 old, -1;
            @first fence.acq_rel.gpu;
            @first atom.add.relaxed.gpu.global.u32 old, [$1], 1;
            @first fence.acq_rel.gpu;
            add.u32 old, old, 1;
            setp.eq.and.u32 mine, old, $3, first;
            barrier.cta.red.or.pred all, $4, 128, mine;
            selp.b32 $0, 1, 0, all;
            }""",
            "=r,l,r,r,r,~{memory}",  # the compiler, too, must leave loads and stores on their side of it
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(last, (), is_signed=True)

    return count(counters_ref, index, expected) != 0


def load_entries(tables_ref: Any, row: jax.Array, first: jax.Array) -> jax.Array:
    """128 entries of a row of tables int32 [rows, entries] from the `first` on, one a thread of the warpgroup; past the
    row's end, its last.

    Pallas' own loads take a slice, which may not reach past the row's end.
    """
    width = tables_ref.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, plgpu.Layout.WG_STRIDED((WARPGROUP,), 1)),
    )
    def load(ctx: Any, tables: Any, row: Any, first: Any) -> Any:
        del ctx
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        thread = arith.remui(mgpu.utils.thread_idx(), constant(WARPGROUP))
        entry = arith.minsi(arith.addi(scalar(first), thread), constant(width - 1))
        at = arith.addi(arith.muli(arith.extsi(i64, scalar(row)), constant(width, 64)), arith.extsi(i64, entry))
        one = ir.VectorType.get((1,), i32)
        value = llvm.load(one, offset(mgpu.utils.memref_ptr(tables), at, i32))
        layout = mgpu.WGStridedFragLayout((WARPGROUP,), 1)
        return mgpu.FragmentedArray(_registers=np.array([value], dtype=object), _layout=layout, _is_signed=True)

    return load(tables_ref, row, first)


def store_heads(
    out_ref: Any, lse_ref: Any, out: jax.Array, lse: jax.Array, first: jax.Array, column: jax.Array, heads: int
) -> None:
    """Stores `heads` columns of out [head_dim, columns] and lse [columns], from `column` on, as heads from `first` on.

    out_ref: [all heads, head_dim]; lse_ref: [all heads]. TMA cannot: it moves heads by eights.

    In wgmma's layout a thread holds, of every 64 rows (of head_dim) and 8 columns (heads), rows 16 w + l / 4 and 8
    below, of its warp w and lane l; of each, columns 2 (l % 4) and the next.
    """
    head_dim, columns = out.shape
    refs, results = [plgpu.RefType()] * 2, [plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)]

    @plgpu.inline_mgpu(arg_types=(*refs, *results, *[plgpu.Layout.WG_SPLAT] * 2))
    def store(ctx: Any, out_gmem: Any, lse_gmem: Any, out: Any, lse: Any, first: Any, column: Any) -> None:
        del ctx
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        element = ir.MemRefType(out_gmem.type).element_type
        out_base, lse_base = mgpu.utils.memref_ptr(out_gmem), mgpu.utils.memref_ptr(lse_gmem)
        warp, lane = warp_and_lane()
        dim = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        pair = arith.muli(arith.remui(lane, constant(4)), constant(2))
        registers = out.registers.reshape(head_dim // 64, columns // 8, 2)  # vectors of two columns
        lse_registers = list(lse.registers.flat)
        for eight in range(columns // 8):
            for k in range(2):
                nth = arith.subi(arith.addi(pair, constant(8 * eight + k)), scalar(column))
                inside = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, nth, constant(0)),
                    arith.cmpi(arith.CmpIPredicate.slt, nth, constant(heads)),
                )
                with mgpu.utils.when(inside):
                    head = arith.extsi(i64, arith.addi(scalar(first), nth))
                    start = arith.addi(arith.muli(head, constant(head_dim, 64)), arith.extsi(i64, dim))
                    for part in range(head_dim // 64):
                        for half in range(2):
                            at = arith.addi(start, constant(64 * part + 8 * half, 64))
                            value = llvm.extractelement(registers[part, eight, half], constant(k))
                            llvm.store(value, offset(out_base, at, element))
                    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, dim, constant(0))):
                        value = llvm.extractelement(lse_registers[eight], constant(k))
                        llvm.store(value, offset(lse_base, head, f32))

    store(out_ref, lse_ref, out, lse, first, column)
