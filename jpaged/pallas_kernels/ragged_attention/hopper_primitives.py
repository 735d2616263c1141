"""What the ragged attention kernel asks of a GPU beside what Pallas has words for: a sum that stays in its accumulator,
stores of parts of a tile, and barriers of the hardware. `hopper_interpreted.py` has the same for a CPU."""

from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from jpaged.pallas_kernels.common.hopper_primitives import *  # noqa: F403  (kernels call them through this module)
from jpaged.pallas_kernels.common.inline_mlir import constant, instruction, offset, scalar, warp_and_lane

_FIRST_TURN_BARRIER = 8  # of the hardware's 16; those below are Mosaic's own


def no_sum(rows: int, columns: int) -> None:
    """What a loop carries of a sum [rows, columns] that begins as zeros: nothing, it is in the accumulator."""
    del rows, columns


def issue_product(acc_ref: Any, acc: None, lhs: jax.Array, rhs: Any) -> None:
    """Issues the product of lhs, in registers, and rhs, in shared memory, onto the accumulator."""
    plgpu.wgmma(acc_ref, lhs, rhs)


def await_product(acc_ref: Any, acc: None) -> jax.Array:
    """The sum, when all products are done."""
    return plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)


def put_back(acc_ref: Any, acc: jax.Array) -> None:
    """Makes acc what further products are added to; gives what a loop carries of it."""
    acc_ref[...] = acc


class Place(NamedTuple):
    """Where the rows of a consumer's tile belong.

    Row g * tokens + i is token `token` + i of head `head` + g, and is stored if that token is in [first, end).
    """

    token: jax.Array
    first: jax.Array
    end: jax.Array
    head: jax.Array
    tokens: int
    heads: int


def store_rows(out_ref: Any, lse_ref: Any, out: jax.Array, lse: jax.Array, place: Place) -> None:
    """Stores the rows of a consumer's tile whose token is to be stored.

    out [64, D] goes to out_ref [T, H, D], lse [64] to lse_ref [T, H]. TMA cannot do this: a box has no end of its own
    inside the array.

    In wgmma's layout a thread holds rows 16 w + l / 4 and 8 below, of its warp w and lane l; of each, columns
    2 (l % 4) and the next of every eight: a quad of lanes shares two rows.
    """
    _, total_heads, head_dim = out_ref.shape
    tokens, heads = place.tokens, place.heads
    refs, results = [plgpu.RefType()] * 2, [plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)]

    @plgpu.inline_mgpu(arg_types=(*refs, *results, *[plgpu.Layout.WG_SPLAT] * 4))
    def store(
        ctx: Any, out_gmem: Any, lse_gmem: Any, out: Any, lse: Any, token: Any, first: Any, end: Any, head: Any
    ) -> None:
        del ctx
        i64 = ir.IntegerType.get_signless(64)
        f32 = ir.F32Type.get()
        element = ir.MemRefType(out_gmem.type).element_type
        out_base, lse_base = mgpu.utils.memref_ptr(out_gmem), mgpu.utils.memref_ptr(lse_gmem)
        warp, lane = warp_and_lane()
        quad_row = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        quad_lane = arith.remui(lane, constant(4))
        lse_registers = list(lse.registers.flat)
        registers = out.registers.reshape(head_dim // 8, 2)
        for half in range(2):
            row = arith.addi(quad_row, constant(8 * half))
            group = arith.divui(row, constant(tokens))
            where = arith.addi(scalar(token), arith.remui(row, constant(tokens)))
            mine = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, where, scalar(first)),
                arith.cmpi(arith.CmpIPredicate.slt, where, scalar(end)),
            )
            mine = arith.andi(mine, arith.cmpi(arith.CmpIPredicate.slt, group, constant(heads)))
            with mgpu.utils.when(mine):
                pair = arith.addi(
                    arith.muli(arith.extsi(i64, where), constant(total_heads, 64)),
                    arith.extsi(i64, arith.addi(scalar(head), group)),
                )
                column = arith.extsi(i64, arith.muli(quad_lane, constant(2)))
                start = arith.addi(arith.muli(pair, constant(head_dim, 64)), column)
                for i in range(head_dim // 8):
                    at = arith.addi(start, constant(8 * i, 64))
                    llvm.store(registers[i, half], offset(out_base, at, element))
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, quad_lane, constant(0))):
                    llvm.store(lse_registers[half], offset(lse_base, pair, f32))

    store(out_ref, lse_ref, out, lse, place.token, place.first, place.end, place.head)


def turn_barrier(operation: str, wg: jax.Array) -> None:
    """Syncs on, or arrives at, the hardware barrier that starts a warpgroup's turn, for the 256 threads of two.

    Pallas' own barriers live in shared memory; as turns they cost 1.6 % of prefill_1x16384's time.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def barrier(ctx: Any, wg: Any) -> None:
        del ctx
        instruction(f"bar.{operation} $0, 256;", arith.addi(scalar(wg), constant(_FIRST_TURN_BARRIER)))

    barrier(wg)


def zero_rows(tile_ref: Any, begin: jax.Array, swizzle: int, transforms: tuple) -> None:
    """Zeroes rows `begin` and up of a [rows, D] tile of 16-bit values in swizzled shared memory; for one warp.

    Memory holds tiles of 8 rows by `swizzle` bytes one after another. The swizzle moves 16-byte pieces within a row of
    a tile only, so that whole rows can be zeroed without following it.
    """
    rows, head_dim = tile_ref.shape
    pieces = head_dim * 2 // 16  # of 16 bytes, a row
    per_tile = swizzle // 16

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT))
    def zero(ctx: Any, tile: Any, begin: Any) -> None:
        del ctx
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        base = mgpu.utils.memref_ptr(tile)
        _, lane = warp_and_lane()
        quad = ir.VectorType.get((4,), i32)
        nothing = arith.constant(quad, ir.DenseElementsAttr.get_splat(quad, ir.IntegerAttr.get(i32, 0)))
        first = arith.addi(arith.muli(scalar(begin), constant(pieces)), lane)
        loop = scf.ForOp(first, constant(rows * pieces), constant(32), [])
        with ir.InsertionPoint(loop.body):
            row = arith.divui(loop.induction_variable, constant(pieces))
            piece = arith.remui(loop.induction_variable, constant(pieces))
            tile_index = arith.addi(
                arith.muli(arith.divui(row, constant(8)), constant(pieces // per_tile)),
                arith.divui(piece, constant(per_tile)),
            )
            in_tile = arith.addi(
                arith.muli(arith.remui(row, constant(8)), constant(swizzle)),
                arith.muli(arith.remui(piece, constant(per_tile)), constant(16)),
            )
            at = arith.addi(arith.muli(tile_index, constant(8 * swizzle)), in_tile)
            llvm.store(nothing, offset(base, at, i8), alignment=16)
            scf.yield_([])
        # The tensor cores read shared memory through another proxy, which sees plain stores after this fence alone.
        instruction("fence.proxy.async.shared::cta;")

    zero(tile_ref, begin)
