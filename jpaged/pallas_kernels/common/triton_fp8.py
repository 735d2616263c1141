"""FP8 (e4m3) in Triton kernels: bits to 16-bit floats, for GPUs of every kind.

    e4m3       s eeee mmm
    bfloat16   s eeee eeee mmm mmmm    a quarter of e4m3's exponents, 120 too small
    float16    s eeeee mmm mmm mmmm    half of them, 8 too small

Bits that are put in place are the value times 2^-120 or 2^-8, subnormal numbers too; a product with that power of two
is exact. GPUs before 8.9 have no conversion of their own, and that of the others is several times slower than their
integer units. The largest magnitude, e4m3's NaN, becomes 480, unless NaN is asked for.
"""

import triton
import triton.language as tl

_FOUR = tl.constexpr("""
{
    .reg .b32 a, b, c, d, by, zero;
    mov.b32 by, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.b32 c, a, 4;
    shr.b32 d, b, 4;
    and.b32 c, c, 0x07F007F0;
    and.b32 d, d, 0x07F007F0;
    lop3.b32 a, a, 0x80008000, c, 0xEA;
    lop3.b32 b, b, 0x80008000, d, 0xEA;
    fma.rn.bf16x2 $0, a, by, zero;
    fma.rn.bf16x2 $1, b, by, zero;
}
""")
"""Four bytes to as many bfloat16: each becomes the upper one of 16 bits, is put in place as below, two at a time, and
multiplied by 2^120. The product is a fused one with -0, which GPUs have since Ampere."""


@triton.jit
def widen_fours(bits):
    """e4m3 as uint8 -> bfloat16, exactly, but for NaN; four neighbours of a thread at a time. On GPUs alone."""
    return tl.inline_asm_elementwise(_FOUR, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def widen(bits, DTYPE: tl.constexpr, NAN: tl.constexpr = False):
    """e4m3 as uint8 -> DTYPE, which is tl.bfloat16 or tl.float16, exactly. NAN: whether there may be NaN."""
    word = bits.to(tl.uint16) << 8
    if DTYPE.is_bf16():
        placed = (word & 0x8000) | ((word >> 4) & 0x07F0)
        value = placed.to(tl.bfloat16, bitcast=True) * tl.full([], 1.329227995784916e36, tl.bfloat16)
    else:
        placed = (word & 0x8000) | ((word >> 1) & 0x3F80)
        value = placed.to(tl.float16, bitcast=True) * tl.full([], 256.0, tl.float16)
    if NAN:
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
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
