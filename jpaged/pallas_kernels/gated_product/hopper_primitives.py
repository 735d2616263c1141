"""What the gated product asks of a GPU for which Pallas has no word: wgmma of any width, stores of a tile of rows.
`hopper_interpreted.py` has the same for a CPU.

A tile of accumulators [64, columns] has one register an element (`ACCUMULATOR`): thread l of warp w holds rows
16 w + l / 4 and 8 below, of each eight columns 2 (l % 4) and the next, in the order in which wgmma takes them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jpaged.pallas_kernels.common.hopper_primitives import *  # noqa: F403  (kernels call them through this module)
from jpaged.pallas_kernels.common.inline_mlir import constant, offset, scalar, warp_and_lane
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS

STORED = 32  # columns that four threads store of a row at once
LINES = (plgpu.SwizzleTransform(128),)
"""The layout of operands in shared memory: [rows, 64], [64, 64]."""

ACCUMULATOR = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)

STEP = 16  # of the shared axis, in one wgmma
LINE_BYTES = 2 * DEPTH
ATOM_BYTES = 8 * LINE_BYTES  # eight lines, after which the swizzle repeats


def zeros(columns: int) -> tuple[jax.Array, jax.Array]:
    """Two accumulators [64, columns] that products may be added to."""

    @plgpu.inline_mgpu(return_type=_accumulators(columns))
    def begin(ctx: Any) -> tuple[Any, Any]:
        del ctx
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        layout = ACCUMULATOR.to_mgpu()
        fresh = [mgpu.FragmentedArray.splat(zero, (ROWS, columns), layout) for _ in range(2)]
        return pinned(*fresh)

    return tuple(begin())


def await_warpgroup() -> None:
    """Waits until all threads of the warpgroup are here. A warpgroup arrives at a `ClusterBarrier` by its first warp
    alone, which would not wait for the others.
    """

    @plgpu.inline_mgpu()
    def wait(ctx: Any) -> None:
        del ctx
        mgpu.utils.warpgroup_barrier()

    wait()


def add_products(first: jax.Array, second: jax.Array, x_ref: Any, w_ref: Any) -> tuple[jax.Array, jax.Array]:
    """Issues first += x @ w[0] and second += x @ w[1], as one group of wgmmas.

    x_ref [64, 64], w_ref [2, n, 64, 64] in shared memory, of 16 bits; n blocks of columns behind one another, of which
    the accumulators may have fewer. Where they have all, the two are neighbours, and one instruction computes both: it
    reads x once.
    """
    columns = first.shape[1]
    refs = plgpu.RefType(LINES)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR, ACCUMULATOR, refs, refs), return_type=_accumulators(columns))
    def issue(ctx: Any, first: Any, second: Any, x: Any, w: Any) -> tuple[Any, Any]:
        del ctx
        kind = "bf16" if ir.MemRefType(x.type).element_type == ir.BF16Type.get() else "f16"
        blocks = ir.MemRefType(w.type).shape[1]
        registers = [[vector.extract(r, [], [0]) for r in acc.registers.flat] for acc in (first, second)]
        x_lines, w_lines = address(x), address(w)
        do("wgmma.fence.sync.aligned;")
        # Rows of x are lines of the shared axis. Rows of w are lines of columns: the next 64 of these are a block on.
        for step in range(DEPTH // STEP):
            lhs = descriptor(x_lines, 2 * STEP * step, 0, ATOM_BYTES)
            at = LINE_BYTES * STEP * step
            if columns == DEPTH * blocks:
                rhs = descriptor(w_lines, at, LINE_BYTES * DEPTH, ATOM_BYTES)
                both = wgmma(kind, registers[0] + registers[1], lhs, rhs)
                registers = [both[: columns // 2], both[columns // 2 :]]
                continue
            for i in range(2):
                start = at + i * blocks * LINE_BYTES * DEPTH
                rhs = descriptor(w_lines, start, LINE_BYTES * DEPTH, ATOM_BYTES)
                registers[i] = wgmma(kind, registers[i], lhs, rhs)
        do("wgmma.commit_group.sync.aligned;")
        return rebuilt(first, registers[0]), rebuilt(second, registers[1])

    return tuple(issue(first, second, x_ref, w_ref))


def await_products_before() -> None:
    """Waits until all products are in but those issued last."""
    plgpu.wgmma_wait(1)


def await_products(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The accumulators, once all products are in."""

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR, ACCUMULATOR), return_type=_accumulators(first.shape[1]))
    def wait(ctx: Any, first: Any, second: Any) -> tuple[Any, Any]:
        del ctx
        do("wgmma.wait_group.sync.aligned 0;")
        return pinned(first, second)

    return tuple(wait(first, second))


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x, one instruction an element; a division by the compiler's rules is six."""

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=ACCUMULATOR)
    )
    def approximate(ctx: Any, x: Any) -> Any:
        del ctx
        f32 = ir.F32Type.get()
        values = [vector.extract(register, [], [0]) for register in x.registers.flat]
        return rebuilt(x, [llvm.inline_asm(f32, [v], "rcp.approx.ftz.f32 $0, $1;", "=f,f") for v in values])

    return approximate(x)


def load_for_all_rows(columns_ref: Any, rows: int) -> jax.Array:
    """Numbers [columns] in global memory as an array [rows, columns], the same in each row."""
    row = plgpu.load(columns_ref, layout=ACCUMULATOR.reduce(0), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(row, (rows, *row.shape), [1]), ACCUMULATOR)


def stored_shape(shape: tuple[int, int], padded: tuple[int, int]) -> tuple[int, int]:
    """The shape of an output that `store_rows` stores: without what tiles have more than it, up to `padded`."""
    del padded
    return shape


def store_rows(out_ref: Any, tile: jax.Array, row: jax.Array, column: jax.Array) -> None:
    """Stores float32 tile [64, columns] from (row, column) of out_ref [M, I] on, in its 16-bit type.

    What would lie past an end is left out; I and columns are multiples of 8, columns at most 32.
    """
    rows, width = out_ref.shape
    store_tile(out_ref, tile, row, rows, column, width)


def store_tile(
    out_ref: Any, tile: jax.Array, row: jax.Array, end: jax.Array | int, column: jax.Array, last: int
) -> None:
    """Stores float32 tile [64, columns] from (row, column) of out_ref [M, I] on, in its 16-bit type, up to row `end`
    and column `last`.

    I, columns and last are multiples of 8, columns at most 32. The four threads that share a row exchange what they
    have, so that each stores 16 bytes, behind one another.
    """
    _, width = out_ref.shape
    octets = tile.shape[1] // 8

    fixed_end, ends = (end, []) if isinstance(end, int) else (0, [end])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR, *[plgpu.Layout.WG_SPLAT] * (2 + len(ends))))
    def store(ctx: Any, out: Any, tile: Any, row: Any, column: Any, *ends: Any) -> None:
        del ctx
        bound = scalar(ends[0]) if ends else constant(fixed_end)
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        element = ir.MemRefType(out.type).element_type
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(out))
        warp, lane = warp_and_lane()
        octet = arith.remui(lane, constant(4))  # that this thread stores
        at = arith.addi(scalar(column), arith.muli(octet, constant(8)))
        there = arith.andi(less(at, constant(last)), less(octet, constant(octets)))
        mine = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        pairs = tile.registers.reshape(octets, 2, 2)  # of every eight columns: two rows, two columns
        for half in range(2):
            words = [_packed(pairs[i, half], element) for i in range(octets)]
            words = _transposed([*words, *[constant(0)] * (4 - octets)], octet)
            where = arith.addi(scalar(row), arith.addi(mine, constant(8 * half)))
            with mgpu.utils.when(arith.andi(less(where, bound), there)):
                start = arith.muli(arith.extsi(i64, where), constant(width, 64))
                target = offset(base, arith.addi(start, arith.extsi(i64, at)), element)
                quad = vector.from_elements(ir.VectorType.get((4,), i32), words)
                llvm.store(quad, target, alignment=16)

    store(out_ref, tile, row, column, *ends)


def less(x: Any, bound: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, x, bound)


def _accumulators(columns: int) -> tuple[Any, Any]:
    return (plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=ACCUMULATOR),) * 2


def pinned(*accumulators: Any) -> tuple[Any, ...]:
    """The same, which the compiler may compute neither later nor read sooner than here."""
    after = mgpu.fragmented_array.optimization_barrier(*accumulators)
    return (after,) if len(accumulators) == 1 else tuple(after)


def do(ptx: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], ptx, "", has_side_effects=True)


def rebuilt(accumulator: Any, registers: list[Any]) -> Any:
    """An accumulator of other registers."""
    one = ir.VectorType.get((1,), ir.F32Type.get())
    rebuilt = accumulator.copy()
    for i, register in enumerate(registers):
        rebuilt.registers.flat[i] = vector.from_elements(one, [register])
    return rebuilt


def address(ref: Any) -> Any:
    """Where an array in shared memory begins, as descriptors say it: in units of 16 bytes."""
    i64 = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    return arith.shrui(arith.andi(address, constant(0x3FFFF, 64)), constant(4, 64))


def descriptor(address: Any, distance: int, leading: int, stride: int) -> Any:
    """An operand of lines of 128 bytes that begins so many bytes behind an address.

    In units of 16 bytes: bits 0 on its address; 16 on, how far the next line's width of columns is, where lines are
    of columns; 32 on, how far the next eight lines are; bit 62, the swizzle of 128 bytes.
    """
    fixed = (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 62
    return arith.addi(address, constant(fixed + (distance >> 4), 64))


def wgmma(kind: str, registers: list[Any], lhs: Any, rhs: Any, *, lines_of_columns: bool = True) -> list[Any]:
    """registers + lhs [64, 16] @ rhs [16, columns]. lines_of_columns: whether a line of rhs has 64 of these, for one
    element of the shared axis; else it has 64 of that axis, as those of lhs do."""
    count = len(registers)
    f32 = ir.F32Type.get()
    listed = ",".join(f"${i}" for i in range(count))
    ptx = (
        f"{{ .reg .pred add; setp.eq.u32 add, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k{STEP}.f32.{kind}.{kind} "
        f"{{{listed}}}, ${2 * count}, ${2 * count + 1}, add, 1, 1, 0, {int(lines_of_columns)}; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["l", "l"]
    kinds = llvm.StructType.get_literal([f32] * count)
    result = llvm.inline_asm(kinds, [*registers, lhs, rhs], ptx, ",".join(constraints), has_side_effects=True)
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]


def _packed(pair: Any, element: Any) -> Any:
    """Two neighbouring float32 registers, rounded to 16 bits each, as one of 32."""
    values = [vector.extract(register, [], [0]) for register in pair]
    two = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), values)
    rounded = arith.truncf(ir.VectorType.get((2,), element), two)
    whole = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), rounded)
    return vector.extract(whole, [], [0])


def _transposed(words: list[Any], quad_lane: Any) -> list[Any]:
    """Word j of lane i becomes word i of lane j, among the four lanes of a quad."""
    for distance in (1, 2):
        low = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(quad_lane, constant(distance)), constant(0))
        for i in range(4):
            if i & distance:
                continue
            a, b = words[i], words[i + distance]
            received = mgpu.utils.shfl_bfly(arith.select(low, b, a), distance)
            words[i] = arith.select(low, a, received)
            words[i + distance] = arith.select(low, received, b)
    return words
