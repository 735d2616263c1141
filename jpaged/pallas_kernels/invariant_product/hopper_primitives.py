"""What the invariant product asks of a GPU: the gated product's words, for one accumulator. `hopper_interpreted.py` has
the same for a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jpaged.pallas_kernels.common.hopper_primitives import in_warps, set_registers
from jpaged.pallas_kernels.common.inline_mlir import constant, offset, scalar, warp_and_lane
from jpaged.pallas_kernels.gated_product.hopper_primitives import (
    ACCUMULATOR,
    ATOM_BYTES,
    LINE_BYTES,
    LINES,
    STEP,
    address,
    await_products_before,
    descriptor,
    do,
    less,
    pinned,
    rebuilt,
    store_tile,
    wgmma,
)
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS

__all__ = [
    "add_product",
    "await_product",
    "await_products_before",
    "in_warps",
    "set_registers",
    "store_tile",
    "store_wide",
    "zeros",
]


def _accumulator(columns: int) -> Any:
    return plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=ACCUMULATOR)


def zeros(columns: int) -> jax.Array:
    """An accumulator [64, columns] that products may be added to."""

    @plgpu.inline_mgpu(return_type=_accumulator(columns))
    def begin(ctx: Any) -> Any:
        del ctx
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        (fresh,) = pinned(mgpu.FragmentedArray.splat(zero, (ROWS, columns), ACCUMULATOR.to_mgpu()))
        return fresh

    return begin()


def add_product(sums: jax.Array, x_ref: Any, w_ref: Any, outputs_first: bool) -> jax.Array:
    """Issues sums += x @ w as one group of wgmmas.

    x_ref [64, 64], w_ref [n, 64, 64] in shared memory, of 16 bits: n blocks of 64 columns behind one another, each
    [k, columns], or [columns, k] with outputs_first.
    """
    refs = plgpu.RefType(LINES)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR, refs, refs), return_type=_accumulator(sums.shape[1]))
    def issue(ctx: Any, sums: Any, x: Any, w: Any) -> Any:
        del ctx
        kind = "bf16" if ir.MemRefType(x.type).element_type == ir.BF16Type.get() else "f16"
        registers = [vector.extract(r, [], [0]) for r in sums.registers.flat]
        x_lines, w_lines = address(x), address(w)
        do("wgmma.fence.sync.aligned;")
        for step in range(DEPTH // STEP):
            lhs = descriptor(x_lines, 2 * STEP * step, 0, ATOM_BYTES)
            if outputs_first:  # lines of the shared axis, as x has them
                rhs = descriptor(w_lines, 2 * STEP * step, 0, ATOM_BYTES)
            else:  # lines of columns, whose next 64 are a block on
                rhs = descriptor(w_lines, LINE_BYTES * STEP * step, LINE_BYTES * DEPTH, ATOM_BYTES)
            registers = wgmma(kind, registers, lhs, rhs, lines_of_columns=not outputs_first)
        do("wgmma.commit_group.sync.aligned;")
        return rebuilt(sums, registers)

    return issue(sums, x_ref, w_ref)


def await_product(sums: jax.Array) -> jax.Array:
    """The accumulator, once all products are in."""

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR,), return_type=_accumulator(sums.shape[1]))
    def wait(ctx: Any, sums: Any) -> Any:
        del ctx
        do("wgmma.wait_group.sync.aligned 0;")
        (ready,) = pinned(sums)
        return ready

    return wait(sums)


def store_wide(out_ref: Any, tile: jax.Array, row: jax.Array, end: int, column: jax.Array, last: int) -> None:
    """Stores float32 tile [64, columns] from (row, column) of float32 out_ref [M, N] on, up to row `end` and column
    `last`, a multiple of 8. Four threads store 32 bytes of a row, behind one another."""
    _, width = out_ref.shape
    octets = tile.shape[1] // 8

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR, *[plgpu.Layout.WG_SPLAT] * 2))
    def store(ctx: Any, out: Any, tile: Any, row: Any, column: Any) -> None:
        del ctx
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(out))
        warp, lane = warp_and_lane()
        mine = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        first = arith.addi(scalar(column), arith.muli(arith.remui(lane, constant(4)), constant(2)))
        pairs = tile.registers.reshape(octets, 2, 2)  # of every eight columns: two rows, two columns
        for half in range(2):
            where = arith.addi(scalar(row), arith.addi(mine, constant(8 * half)))
            start = arith.muli(arith.extsi(i64, where), constant(width, 64))
            for i in range(octets):
                at = arith.addi(first, constant(8 * i))
                with mgpu.utils.when(arith.andi(less(where, constant(end)), less(at, constant(last)))):
                    values = [vector.extract(register, [], [0]) for register in pairs[i, half]]
                    pair = vector.from_elements(ir.VectorType.get((2,), f32), values)
                    llvm.store(pair, offset(base, arith.addi(start, arith.extsi(i64, at)), f32), alignment=8)

    store(out_ref, tile, row, column)
