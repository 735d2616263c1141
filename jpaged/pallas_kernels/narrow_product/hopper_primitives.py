"""The instructions that Pallas lacks for products with weights in 4 or 8 bits, which are widened to 16 bits in
registers, in the layout that mma and wgmma read. `hopper_interpreted.py` has the same for a CPU.

A tile of accumulators [64, rows] has one register an element (`ACCUMULATOR` of the gated product): thread l of warp w
holds outputs 16 w + l / 4 and 8 below, of each eight rows 2 (l % 4) and the next. Both wgmma and a warp's own mma have
it so, and weights alike: of 16 inputs, a thread has four of each of its two outputs.
"""

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jpaged.pallas_kernels.common.hopper_primitives import await_kernel_before, in_warps, set_registers
from jpaged.pallas_kernels.common.inline_mlir import constant, instruction, offset, scalar, warp_and_lane
from jpaged.pallas_kernels.gated_product.hopper_primitives import (
    ACCUMULATOR,
    ATOM_BYTES,
    LINE_BYTES,
    LINES,
    STEP,
    address,
    descriptor,
    do,
    less,
    pinned,
    rebuilt,
)
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS
from jpaged.pallas_kernels.invariant_product.hopper_primitives import zeros

__all__ = [
    "add_products",
    "await_kernel_before",
    "in_warps",
    "load_groups",
    "scaled",
    "set_registers",
    "store_outputs",
    "stored_shape",
    "zeros",
]

MMA_ROWS = 16
"""Rows up to which each warp multiplies by itself (mma): for one row that took less time than wgmma, which a warpgroup
takes for more, and for 4 bits alone."""
_OF_OUTPUTS = ACCUMULATOR.reduce(1)
_PIECE = 16  # bytes that the swizzle moves as one: 16 inputs of a group's first half, and 16 of its second


def stored_shape(shape: tuple[int, ...], padded: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an output that `store_outputs` stores: without what tiles have more than it, up to `padded`."""
    del padded
    return shape


def load_groups(ref: Any, output: jax.Array, group: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Numbers of `count` groups from `group` on, of 64 outputs from `output` on: float32 [64] a group, or int32 of
    uint8. Indices past the ends are clamped, and what comes of them is not used.

    ref: float32 or uint8 [outputs, groups] in global memory.
    """
    outputs, groups = ref.shape
    width = math.gcd(groups, count)  # numbers of a load
    is_float = ref.dtype == jnp.float32
    dtype = jnp.float32 if is_float else jnp.int32
    result = (plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=_OF_OUTPUTS),) * count

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 2), return_type=result)
    def load(ctx: Any, ref: Any, output: Any, group: Any) -> Any:
        del ctx
        i64 = ir.IntegerType.get_signless(64)
        element = ir.MemRefType(ref.type).element_type
        kind = ir.F32Type.get() if is_float else ir.IntegerType.get_signless(32)
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))
        warp, lane = warp_and_lane()
        mine = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        values: list[list[Any]] = [[] for _ in range(count)]
        for half in range(2):
            row = arith.addi(scalar(output), arith.addi(mine, constant(8 * half)))
            row = arith.extsi(i64, arith.minsi(row, constant(outputs - 1)))
            for first in range(0, count, width):
                place = arith.minsi(arith.addi(scalar(group), constant(first)), constant(groups - width))
                at = arith.addi(arith.muli(row, constant(groups, 64)), arith.extsi(i64, place))
                found = (_floats if is_float else _bytes)(offset(base, at, element), width)
                for i, value in enumerate(found):
                    values[first + i].append(value)
        one = ir.VectorType.get((1,), kind)
        zero = arith.constant(kind, ir.FloatAttr.get(kind, 0.0) if is_float else ir.IntegerAttr.get(kind, 0))
        filled = []
        for pair in values:
            array = mgpu.FragmentedArray.splat(
                zero, (ROWS,), _OF_OUTPUTS.to_mgpu(), is_signed=None if is_float else True
            )
            for i, value in enumerate(pair):
                array.registers.flat[i] = vector.from_elements(one, [value])
            filled.append(array)
        return tuple(filled)

    return tuple(load(ref, output, group))


def _floats(at: Any, count: int) -> list[Any]:
    """So many neighbouring float32 numbers in global memory, at a multiple of their bytes."""
    f32 = ir.F32Type.get()
    words = [word for i in range(0, count, 4) for word in _words("global", offset(at, constant(i), f32), min(count, 4))]
    return [arith.bitcast(f32, word) for word in words]


def _bytes(at: Any, count: int) -> list[Any]:
    """So many neighbouring bytes in global memory, at a multiple of their number."""
    if count < 4:
        words = [instruction(f"ld.global.u{8 * count} $0, [$1];", at, result=ir.IntegerType.get_signless(32))]
    else:
        words = _words("global", at, count // 4)
    shifted = [arith.shrui(words[i // 4], constant(8 * (i % 4))) for i in range(count)]
    return [arith.andi(one, constant(255)) for one in shifted]


def _words(space: str, at: Any, count: int, distance: int = 0) -> list[Any]:
    """1, 2 or 4 neighbouring words of 32 bits in a state space of PTX, so many bytes behind an address, in one load."""
    i32 = ir.IntegerType.get_signless(32)
    if count == 1:
        return [instruction(f"ld.{space}.b32 $0, [$1+{distance}];", at, result=i32)]
    names = ", ".join(f"${i}" for i in range(count))
    found: list[Any] = instruction(
        f"ld.{space}.v{count}.b32 {{{names}}}, [${count}+{distance}];", at, result=[i32] * count
    )
    return found


def add_products(
    sums: tuple[jax.Array, ...], w_ref: Any, x_ref: Any, scales: Any, zero_points: Any, form: Any
) -> tuple[jax.Array, ...]:
    """sums + (a stage's weights) @ x^T.

    Args:
        sums: float32 [64, rows], one for each 64 outputs.
        w_ref: uint8 [64 * blocks, 128] in shared memory, as `int4_product` or `fp8_product` has it.
        x_ref: [inputs of a stage / 64, rows, 64] in shared memory, of 16 bits.
        scales, zero_points: of each block a tuple of arrays [64], one a group; zero points int32. () for no scales, and
            for zero points of 8 throughout.
        form: a `Form`. Of 8 bits there may be at most 16 rows.
    """
    refs = plgpu.RefType(LINES)
    of_groups, of_zeros = (tuple(tuple(_OF_OUTPUTS for _ in one) for one in given) for given in (scales, zero_points))
    result = tuple(plgpu.ShapeDtypeStruct(one.shape, jnp.float32, layout=ACCUMULATOR) for one in sums)

    @plgpu.inline_mgpu(arg_types=((ACCUMULATOR,) * len(sums), refs, refs, of_groups, of_zeros), return_type=result)
    def add(ctx: Any, sums: Any, w: Any, x: Any, scales: Any, zero_points: Any) -> Any:
        del ctx
        kind = "bf16" if ir.MemRefType(x.type).element_type == ir.BF16Type.get() else "f16"
        numbers = _Integers(kind) if form.bits == 4 else _Floats(kind)
        stage = _Stage(numbers, w, x, form.group or form.inputs, zero_points)
        products = _mma_products if stage.rows <= MMA_ROWS else _wgmma_products
        sums = list(sums)
        for number, block, of_group in products(stage, form.groups, sums):
            factors = [numbers.factor(one) for one in _values(scales[block][number])] if scales else None
            sums[block] = rebuilt(sums[block], _scaled_sums(sums[block], of_group, factors))
        return tuple(sums)

    return tuple(add(sums, w_ref, x_ref, scales, zero_points))


def scaled(sums: jax.Array, scale: jax.Array) -> jax.Array:
    """sums [64, rows] * scale [64]."""
    result = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=ACCUMULATOR)

    @plgpu.inline_mgpu(arg_types=(ACCUMULATOR, _OF_OUTPUTS), return_type=result)
    def multiply(ctx: Any, sums: Any, scale: Any) -> Any:
        del ctx
        factors = _values(scale)
        return rebuilt(sums, [arith.mulf(one, factors[_output_of(i)]) for i, one in enumerate(_values(sums))])

    found: jax.Array = multiply(sums, scale)
    return found


class _Stage(NamedTuple):
    """A stage's operands, as a thread sees them."""

    numbers: "_Numbers"
    w: Any
    x: Any
    group: int
    zero_points: Any

    @property
    def rows(self) -> int:
        return ir.MemRefType(self.x.type).shape[1]

    def biases(self, block: int, number: int) -> list[Any]:
        """What is added to numbers of a group, of the upper and of the lower output."""
        return self.numbers.biases(_values(self.zero_points[block][number]) if self.zero_points else None)


def _wgmma_products(stage: _Stage, groups: int, accumulators: list[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """(group, block, its products [64, rows]) by wgmma, which reads x from shared memory. The order of inputs is
    wgmma's: a thread needs two bytes of an output, and two more eight bytes on. While products are computed, the next
    ones' numbers are made.

    accumulators: of the blocks, for their shape.
    """
    _, lane = warp_and_lane()
    word = arith.divui(arith.remui(lane, constant(4)), constant(2))  # which two threads share
    w = _Lines(stage.w, arith.muli(word, constant(4)), per_warp=16)
    x_lines, rows = address(stage.x), stage.rows
    issued = collections.deque[tuple[int, int, list[Any] | None]]()

    def completed() -> Iterator[tuple[int, int, list[Any]]]:
        """Waits for the products issued first: if these are the last of a group, they are it."""
        number, block, registers = issued.popleft()
        do(f"wgmma.wait_group.sync.aligned {len(issued)};")
        if registers is not None:
            (products,) = pinned(rebuilt(accumulators[block], registers))
            yield number, block, _values(products)

    pieces = stage.group // (2 * _PIECE)
    step = 2 if rows < 64 else 1  # pieces whose products are issued together, of 16 registers a thread
    for number, block in itertools.product(range(groups), range(len(accumulators))):
        biases = stage.biases(block, number)
        registers: list[Any] | None = None
        for first in range(0, pieces, step):
            at_once = range(first, min(first + step, pieces))
            operands = [_operands(stage, w, block, number * pieces + i, biases) for i in at_once]
            do("wgmma.fence.sync.aligned;")
            for i, both in zip(at_once, operands, strict=True):
                for half, lhs in enumerate(both):
                    at = number * stage.group + half * (stage.group // 2) + i * _PIECE
                    distance = at // DEPTH * rows * LINE_BYTES + at % DEPTH * 2
                    rhs = descriptor(x_lines, distance, 0, ATOM_BYTES)
                    registers = _wgmma(stage.numbers.kind, rows, registers, lhs, rhs)
            do("wgmma.commit_group.sync.aligned;")
            issued.append((number, block, registers if at_once.stop == pieces else None))
            if len(issued) > 1:
                yield from completed()
    while issued:
        yield from completed()


def _mma_products(stage: _Stage, groups: int, accumulators: list[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """(group, block, its products [64, rows]) by mma, for which each warp reads x itself.

    mma sums over inputs, so any order will do that weights and x share. Of each run of inputs, which is half of a group
    in 4 bits and up to 64 in 8, a thread takes a quarter, neighbours, and four of these in each product: the first and
    third, the second and fourth.

    accumulators: of the blocks, for their number.
    """
    numbers = stage.numbers
    run, runs = numbers.run(stage.group), numbers.runs
    _, lane = warp_and_lane()
    quad = arith.remui(lane, constant(4))
    w = _Lines(stage.w, arith.muli(quad, constant(run // 4)), per_warp=16)
    x = _Lines(stage.x, arith.muli(quad, constant(run // 2)), per_warp=0)
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    eights = range(stage.rows // 8)
    for number in range(groups):
        inputs = range(number * stage.group, (number + 1) * stage.group, run)  # the first of each run
        places = [(at % DEPTH * 2, at // DEPTH * stage.rows) for at in inputs]
        pairs = [
            [_even_and_odd(x.read(first, run // 8, line=line + 8 * eight)) for first, line in places]
            for eight in eights
        ]
        for block in range(len(accumulators)):
            biases = stage.biases(block, number)
            products = [[zero] * 4 for _ in eights]
            for first in range(0, len(inputs), runs):  # of the runs that share bytes
                words = [w.read(inputs[first] // runs, run // 16, line=ROWS * block + 8 * half) for half in range(2)]
                for step in range(run // 16):
                    outputs = [numbers.of_word(one[step], bias) for one, bias in zip(words, biases, strict=True)]
                    for i in range(runs):
                        lhs = [one for two in zip(*(output[i] for output in outputs), strict=True) for one in two]
                        for eight in eights:
                            rhs = pairs[eight][first + i][step]
                            products[eight] = _mma(numbers.kind, products[eight], lhs, rhs)
            yield number, block, [one for eight in products for one in eight]


def _output_of(i: int) -> int:
    """Which of a thread's two outputs its i-th sum is of: of every eight rows, it has two of each."""
    return i // 2 % 2


def _values(array: Any) -> list[Any]:
    """What a thread has of it."""
    return [vector.extract(register, [], [0]) for register in array.registers.flat]


class _Lines:
    """Reads of shared memory in lines of 128 bytes, by threads whose line is that of their l / 4, in their warp's.

    The swizzle stores piece p of line n in place of piece p XOR (n % 8). Lines begin at multiples of 128 bytes. All
    reads are done before a consumer arrives at `free`, after which the producer fills the stage again.
    """

    def __init__(self, ref: Any, within: Any, *, per_warp: int) -> None:
        """within: where in a line a thread's bytes begin. per_warp: lines of a warp; 0 if all warps have the same."""
        i32 = ir.IntegerType.get_signless(32)
        warp, lane = warp_and_lane()
        eighth = arith.divui(lane, constant(4))
        line = arith.addi(eighth, arith.muli(warp, constant(per_warp)))
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
        first = arith.addi(base, arith.muli(line, constant(LINE_BYTES)))
        self._start = arith.addi(first, arith.xori(within, arith.muli(eighth, constant(_PIECE))))

    def read(self, first: int, count: int, *, line: int) -> list[Any]:
        """So many neighbouring words `first` bytes and so many lines behind the thread's.

        `first`, the thread's own start and the offset within one read use different bits, since they are XORed.
        """
        found: list[Any] = []
        for at in range(0, 4 * count, _PIECE):
            place = arith.xori(self._start, constant(first + at))
            found += _words("shared", place, min(count, _PIECE // 4), line * LINE_BYTES)
        return found


def _operands(stage: _Stage, w: _Lines, block: int, piece: int, biases: list[Any]) -> list[list[Any]]:
    """Registers of two operands [64, 16] of wgmma: of a piece's lower bits, and of its upper ones."""
    _, lane = warp_and_lane()
    odd = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, constant(1)), constant(1))
    # The bytes of a word that are this thread's, each to become the lower one of 16 bits.
    which = arith.select(odd, constant(0x4342), constant(0x4140))
    pairs = []
    for second in range(2):  # two words on
        for half in range(2):
            line = ROWS * block + 8 * half
            (word,) = w.read(piece * _PIECE + 8 * second, 1, line=line)
            pairs.append(stage.numbers.four(word, which, biases[half]))
    return [[lower for lower, _ in pairs], [upper for _, upper in pairs]]


def _even_and_odd(words: list[Any]) -> list[list[Any]]:
    """Of each two words of two numbers each: the first ones, and the second ones."""
    i32 = ir.IntegerType.get_signless(32)
    return [
        [
            llvm.inline_asm(i32, [a, b], f"prmt.b32 $0, $1, $2, {which};", "=r,r,r", has_side_effects=False)
            for which in (0x5410, 0x7632)
        ]
        for a, b in zip(words[::2], words[1::2], strict=True)
    ]


class _Numbers(Protocol):
    """How bits become 16-bit floats, two a register.

    runs: of inputs, that share bytes. kind: of floats, as PTX names it.
    """

    runs: int
    kind: str

    def run(self, group: int) -> int:
        """Neighbouring inputs of a group that a thread takes a quarter of."""

    def factor(self, scale: Any) -> Any:
        """What sums are multiplied by, of a group's scale."""

    def biases(self, points: Any) -> list[Any]:
        """What is added to numbers of two outputs, given their zero points or None."""

    def of_word(self, word: Any, bias: Any) -> list[list[Any]]:
        """Of a word's first and third byte, and of its second and fourth: a pair of registers for each run."""

    def four(self, word: Any, which: Any, bias: Any) -> list[Any]:
        """Of two bytes of a word: a register for each run, for wgmma."""


class _Integers:
    """4-bit integers to two 16-bit floats a register.

    Four bits are taken as the lowest ones of a float, or as those above them: so they are their number times a power of
    two, far below all others (that the highest may be the exponent's lowest bit changes nothing). A multiplication
    brings both to the number / 64 in bfloat16, / 512 in float16, and takes the zero point.
    """

    runs = 2

    def __init__(self, kind: str) -> None:
        self.kind = kind
        # The powers of two that lower bits, upper bits and zero points are multiplied by; and -8 as the latter become.
        constants = (0x7F00, 0x7D00, 0xFF00, 0xBE00) if kind == "bf16" else (0x7800, 0x6800, 0xF800, 0xA400)
        self._lower, self._upper, self._negative, self._eight = (one * 0x00010001 for one in constants)
        self._divisor = 64.0 if kind == "bf16" else 512.0

    def factor(self, scale: Any) -> Any:
        f32 = ir.F32Type.get()
        return arith.mulf(scale, arith.constant(f32, ir.FloatAttr.get(f32, self._divisor)))

    def run(self, group: int) -> int:
        return group // 2

    def biases(self, points: Any) -> list[Any]:
        if points is None:
            return [constant(self._eight)] * 2
        i32 = ir.IntegerType.get_signless(32)
        ptx = f"{{ .reg .b32 a, b; mov.b32 a, {self._negative}; mov.b32 b, 0; fma.rn.{self.kind}x2 $0, $1, a, b; }}"
        both = [arith.muli(one, constant(0x00010001)) for one in points]
        return [llvm.inline_asm(i32, [one], ptx, "=r,r", has_side_effects=False) for one in both]

    def four(self, word: Any, which: Any, bias: Any) -> list[Any]:
        """Of two bytes of a word: the lower bits, and the upper ones.

        which: these bytes, each to become the lower one of 16 bits, as prmt has it.
        """
        ptx = f"""
            prmt.b32 a, $2, 0, $3;
            and.b32 b, a, 0x00F000F0;
            and.b32 a, a, 0x000F000F;
            fma.rn.{self.kind}x2 $0, a, lower, $4;
            fma.rn.{self.kind}x2 $1, b, upper, $4;"""
        return self._made(ptx, 2, word, which, bias)

    def of_word(self, word: Any, bias: Any) -> list[list[Any]]:
        ptx = f"""
            shr.b32 b, $4, 8;
            and.b32 a, $4, 0x000F000F;
            fma.rn.{self.kind}x2 $0, a, lower, $5;
            and.b32 a, b, 0x000F000F;
            fma.rn.{self.kind}x2 $1, a, lower, $5;
            and.b32 a, $4, 0x00F000F0;
            fma.rn.{self.kind}x2 $2, a, upper, $5;
            and.b32 a, b, 0x00F000F0;
            fma.rn.{self.kind}x2 $3, a, upper, $5;"""
        found = self._made(ptx, 4, word, bias)
        return [found[:2], found[2:]]

    def _made(self, ptx: str, count: int, *operands: Any) -> list[Any]:
        """So many registers that PTX makes of operands."""
        i32 = ir.IntegerType.get_signless(32)
        constants = f"mov.b32 lower, {self._lower}; mov.b32 upper, {self._upper};"
        whole = f"{{ .reg .b32 a, b, lower, upper; {constants} {ptx} }}"
        kinds = llvm.StructType.get_literal([i32] * count)
        constraints = ",".join(["=r"] * count + ["r"] * len(operands))
        found = llvm.inline_asm(kinds, list(operands), whole, constraints, has_side_effects=False)
        return [llvm.extractvalue(i32, found, [i]) for i in range(count)]


class _Floats:
    """e4m3 to two 16-bit floats a register, as `triton_fp8` does it: bits are put in their places, which makes numbers
    too small by a power of two, and multiplied with that. The largest magnitude, e4m3's NaN, becomes 480."""

    runs = 1

    def __init__(self, kind: str) -> None:
        self.kind = kind
        # How far the bits of a lower and of an upper byte move to the left and to the right; their mask; the power.
        places = (4, 4, 0x07F0, 0x7B80) if kind == "bf16" else (7, 1, 0x3F80, 0x5C00)
        self._left, self._right, self._digits, self._power = places

    def run(self, group: int) -> int:
        return min(group, DEPTH)

    def biases(self, points: Any) -> list[Any]:
        del points
        return [None, None]

    def factor(self, scale: Any) -> Any:
        return scale

    def four(self, word: Any, which: Any, bias: Any) -> list[Any]:
        raise NotImplementedError("e4m3 is not multiplied by wgmma")

    def of_word(self, word: Any, bias: Any) -> list[list[Any]]:
        del bias
        i32 = ir.IntegerType.get_signless(32)
        digits, signs, power = (one * 0x00010001 for one in (self._digits, 0x8000, self._power))
        ptx = f"""{{
            .reg .b32 a, b, s, power;
            mov.b32 power, {power};
            shl.b32 a, $2, {self._left};
            shr.b32 b, $2, {self._right};
            and.b32 a, a, {digits};
            and.b32 b, b, {digits};
            shl.b32 s, $2, 8;
            lop3.b32 a, s, {signs}, a, 0xEA;
            lop3.b32 b, $2, {signs}, b, 0xEA;
            mul.rn.{self.kind}x2 $0, a, power;
            mul.rn.{self.kind}x2 $1, b, power;
        }}"""
        kinds = llvm.StructType.get_literal([i32] * 2)
        found = llvm.inline_asm(kinds, [word], ptx, "=r,=r,r", has_side_effects=False)
        return [[llvm.extractvalue(i32, found, [i]) for i in range(2)]]


def _scaled_sums(sums: Any, products: list[Any], factors: list[Any] | None) -> list[Any]:
    """sums + products * the factor of each output; None: of 1."""
    if factors is None:
        return [arith.addf(total, product) for total, product in zip(_values(sums), products, strict=True)]
    f32 = ir.F32Type.get()
    found = []
    for i, (total, product) in enumerate(zip(_values(sums), products, strict=True)):
        values = [product, factors[_output_of(i)], total]
        found.append(llvm.inline_asm(f32, values, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"))
    return found


def _wgmma(kind: str, rows: int, registers: list[Any] | None, lhs: list[Any], rhs: Any) -> list[Any]:
    """registers, or zeros, + lhs [64, 16] @ rhs [16, rows]: lhs in four registers, rhs in lines of the shared axis."""
    count = rows // 2
    f32 = ir.F32Type.get()
    names = [f"${i}" for i in range(count + 4)]
    ptx = (
        f"{{ .reg .pred add; setp.{'ne' if registers is None else 'eq'}.u32 add, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{rows}k{STEP}.f32.{kind}.{kind} "
        f"{{{','.join(names[:count])}}}, {{{','.join(names[count:])}}}, ${count + 4}, add, 1, 1, 0; }}"
    )
    added = registers or []
    constraints = ["=f"] * count + ["r"] * 4 + ["l"] + [str(i) for i in range(len(added))]
    kinds = llvm.StructType.get_literal([f32] * count)
    result = llvm.inline_asm(kinds, [*lhs, rhs, *added], ptx, ",".join(constraints), has_side_effects=True)
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]


def _mma(kind: str, registers: list[Any], lhs: list[Any], rhs: list[Any]) -> list[Any]:
    """registers + lhs [16, 16] @ rhs [16, 8] of a warp."""
    f32 = ir.F32Type.get()
    ptx = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    kinds = llvm.StructType.get_literal([f32] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    result = llvm.inline_asm(kinds, [*lhs, *rhs, *registers], ptx, constraints, has_side_effects=False)
    return [llvm.extractvalue(f32, result, [i]) for i in range(4)]


def store_outputs(
    out_ref: Any, sums: jax.Array, split: jax.Array, row: jax.Array, rows: int, output: jax.Array, outputs: int
) -> None:
    """Stores sums [64, columns] as outputs from `output` on, of rows from `row` on, as far as there are that many.

    out_ref: [splits, rows, outputs] in global memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR, *[plgpu.Layout.WG_SPLAT] * 3))
    def store(ctx: Any, out: Any, sums: Any, split: Any, row: Any, output: Any) -> None:
        del ctx
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        element = ir.MemRefType(out.type).element_type
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(out))
        warp, lane = warp_and_lane()
        mine = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
        mine = arith.addi(scalar(output), mine)
        first = arith.addi(scalar(row), arith.muli(arith.remui(lane, constant(4)), constant(2)))
        part = arith.muli(arith.extsi(i64, scalar(split)), constant(rows, 64))
        # Of every eight rows, a thread has two outputs of two rows.
        for i, value in enumerate(_values(sums)):
            eight, half, k = i // 4, _output_of(i), i % 2
            at_row, at = arith.addi(first, constant(8 * eight + k)), arith.addi(mine, constant(8 * half))
            line = arith.muli(arith.addi(part, arith.extsi(i64, at_row)), constant(outputs, 64))
            with mgpu.utils.when(arith.andi(less(at_row, constant(rows)), less(at, constant(outputs)))):
                rounded = value if element == f32 else arith.truncf(element, value)
                llvm.store(rounded, offset(base, arith.addi(line, arith.extsi(i64, at)), element))

    store(out_ref, sums, split, row, output)
