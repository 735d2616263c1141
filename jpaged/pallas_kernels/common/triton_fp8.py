"""FP8 (e4m3) in Triton kernels: bits to 16-bit floats, for GPUs of every kind.

    e4m3       s eeee mmm
    bfloat16   s eeee eeee mmm mmmm    a quarter of e4m3's exponents, 120 too small
    float16    s eeeee mmm mmm mmmm    half of them, 8 too small

Bits that are put in place are the value times 2^-120 or 2^-8, subnormal numbers too; a product with that power of two
is exact. GPUs before 8.9 have no conversion of their own, and that of the others is several times slower than their
integer units. The largest magnitude, e4m3's NaN, becomes 480.
"""

import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_assembly import twice


def _pairs_in_registers(kind: str, lower_left: int, upper_right: int, digits: int, factor: int) -> tl.constexpr:
    """Two words of 16 bits, in a register, to their lower bytes and their upper ones as `kind`, two in a register each.

    lower_left, upper_right: how far bits move to their places. digits: their mask. factor: the power of two, in `kind`.
    Added to minus zero, a product keeps the sign of its zeros.
    """
    return tl.constexpr(f"""
{{
    .reg .b32 lower, upper, sign, factor, zero;
    mov.b32 factor, {twice(factor)};
    mov.b32 zero, {twice(0x8000)};
    shl.b32 lower, $2, {lower_left};
    shr.b32 upper, $2, {upper_right};
    and.b32 lower, lower, {twice(digits)};
    and.b32 upper, upper, {twice(digits)};
    shl.b32 sign, $2, 8;
    lop3.b32 lower, sign, zero, lower, 0xEA;
    lop3.b32 upper, $2, zero, upper, 0xEA;
    fma.rn.{kind} $0, lower, factor, zero;
    fma.rn.{kind} $1, upper, factor, zero;
}}
""")


def _fours_in_registers(kind: str, right: int, digits: int, factor: int) -> tl.constexpr:
    """Four bytes, in a register, as `kind`, two in a register each; arguments likewise."""
    return tl.constexpr(f"""
{{
    .reg .b32 a, b, c, d, factor, zero;
    mov.b32 factor, {twice(factor)};
    mov.b32 zero, {twice(0x8000)};
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.b32 c, a, {right};
    shr.b32 d, b, {right};
    and.b32 c, c, {twice(digits)};
    and.b32 d, d, {twice(digits)};
    lop3.b32 a, a, zero, c, 0xEA;
    lop3.b32 b, b, zero, d, 0xEA;
    fma.rn.{kind} $0, a, factor, zero;
    fma.rn.{kind} $1, b, factor, zero;
}}
""")


_BFLOAT16_PAIRS = _pairs_in_registers("bf16x2", 4, 4, 0x07F0, 0x7B80)
_FLOAT16_PAIRS = _pairs_in_registers("f16x2", 7, 1, 0x3F80, 0x5C00)
_BFLOAT16_FOURS = _fours_in_registers("bf16x2", 4, 0x07F0, 0x7B80)
_FLOAT16_FOURS = _fours_in_registers("f16x2", 1, 0x3F80, 0x5C00)


@triton.jit
def widen_pairs(words, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Two e4m3 side by side, as uint16 -> the lower byte's value and the upper one's, as of `widen`.

    Words of 16 bits go from shared memory to the tensor cores as operands in 16 bits do, which bytes do not.
    IN_REGISTERS: two words at a time. On GPUs alone.
    """
    if IN_REGISTERS:
        if DTYPE.is_bf16():
            lower, upper = tl.inline_asm_elementwise(
                _BFLOAT16_PAIRS, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            lower, upper = tl.inline_asm_elementwise(
                _FLOAT16_PAIRS, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
    else:
        lower, upper = widen((words & 0xFF).to(tl.uint8), DTYPE), widen((words >> 8).to(tl.uint8), DTYPE)
    return lower, upper


@triton.jit
def widen(bits, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr = False):
    """e4m3 as uint8 -> DTYPE, which is tl.bfloat16 or tl.float16, exactly.

    IN_REGISTERS: four neighbours of a thread at a time. On GPUs alone.
    """
    if IN_REGISTERS and DTYPE.is_bf16():
        value = tl.inline_asm_elementwise(_BFLOAT16_FOURS, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif IN_REGISTERS:
        value = tl.inline_asm_elementwise(_FLOAT16_FOURS, "=r,=r,r", [bits], dtype=tl.float16, is_pure=True, pack=4)
    else:
        word = bits.to(tl.uint16) << 8
        if DTYPE.is_bf16():
            placed = (word & 0x8000) | ((word >> 4) & 0x07F0)
            value = placed.to(tl.bfloat16, bitcast=True) * tl.full([], 1.329227995784916e36, tl.bfloat16)
        else:
            placed = (word & 0x8000) | ((word >> 1) & 0x3F80)
            value = placed.to(tl.float16, bitcast=True) * tl.full([], 256.0, tl.float16)
    return value


@triton.jit
def narrow(x):
    """float32 -> e4m3 as uint8: rounded to the nearest, ties to even; what is beyond 448 becomes 448; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    magnitude = tl.minimum(size, 0x43E00000).to(tl.float32, bitcast=True)  # 448, as numbers and their bits sort alike
    rounded = magnitude.to(tl.uint32, bitcast=True)
    normal = ((rounded + 0x7FFFF + ((rounded >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal numbers are multiples of 2^-9, which is what the last digit of 2^14 stands for.
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    number = tl.where(rounded < 0x3C800000, small, normal)
    return (sign | tl.where(size > 0x7F800000, 0x7F, number)).to(tl.uint8)


@triton.jit
def as_fp8(pointer):
    """A pointer to uint8 as one to e4m3, for GPUs from 8.9 on."""
    return pointer.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
