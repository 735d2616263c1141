"""4-bit integers in Triton kernels: two in a byte, to 16-bit floats."""

import triton
import triton.language as tl

_EIGHT = tl.constexpr("""
{
    .reg .b32 a, b, c, d, one, less;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.b32 c, a, 4;
    shr.b32 d, b, 4;
    lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, a, one, less;
    fma.rn.bf16x2 $1, b, one, less;
    fma.rn.bf16x2 $2, c, one, less;
    fma.rn.bf16x2 $3, d, one, less;
}
""")
"""Four bytes to eight bfloat16: each becomes the lower one of 16 bits. Four bits put below the digits of 128 make it
larger by their value, two at a time, and 136 is taken away."""


@triton.jit
def halves(packed, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """uint8 -> the lower and the upper four bits, less 8, both of DTYPE, tl.bfloat16 or tl.float16.

    IN_REGISTERS: in bfloat16 four neighbours of a thread at a time. On GPUs alone.
    """
    if IN_REGISTERS and DTYPE.is_bf16():
        lower, upper = tl.inline_asm_elementwise(
            _EIGHT, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        lower = ((packed & 15).to(tl.float32) - 8.0).to(DTYPE)
        upper = ((packed >> 4).to(tl.float32) - 8.0).to(DTYPE)
    return lower, upper


RAISED = tl.constexpr(128.0)
"""What `raised_halves` adds to values."""

_EIGHT_RAISED = tl.constexpr("""
{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.b32 c, a, 4;
    shr.b32 d, b, 4;
    lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, d, 0x000F000F, 0x43004300, 0xEA;
}
""")


@triton.jit
def raised_halves(packed, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """uint8 -> the lower and the upper four bits, plus RAISED: `halves` without its subtraction. A sum of products with
    them is too large by RAISED times the sum of the other factors."""
    if IN_REGISTERS and DTYPE.is_bf16():
        lower, upper = tl.inline_asm_elementwise(
            _EIGHT_RAISED, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        lower = ((packed & 15).to(tl.float32) + RAISED).to(DTYPE)
        upper = ((packed >> 4).to(tl.float32) + RAISED).to(DTYPE)
    return lower, upper


_ONES = tl.constexpr("""
    mov.b32 $0, 0x3F803F80;
    mov.b32 $1, 0x3F803F80;
""")


@triton.jit
def ones_like(packed, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Ones of DTYPE in the shape and layout of `raised_halves`. `tl.full` would get another operand layout, for which
    Triton would load the other operand a second time, without pipelining."""
    if IN_REGISTERS and DTYPE.is_bf16():
        ones = tl.inline_asm_elementwise(_ONES, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        ones = tl.full(packed.shape, 1.0, DTYPE)
    return ones


FEW_ROWS = tl.constexpr(8)
"""Up to so many, `products` takes zero points from sums."""


@triton.jit
def products(
    packed,
    lower,
    upper,
    input_sums,
    zeros,
    has_zeros,
    ZEROS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):
    """A group's products of 4-bit integers [.., N, ROWS], without its scales: float32.

    With up to FEW_ROWS rows, 128 + the zero point is taken from the products, as often as the inputs' sum, and not from
    each weight: an instruction less for two weights, for products with ones, which are few then.

    Args:
        packed: uint8 [.., N, K / 2].
        lower, upper: the inputs [.., K / 2, ROWS] of a byte's lower bits, and of its upper ones.
        input_sums: their sums [.., N, ROWS] if rows are up to FEW_ROWS: products of both with `ones_like`.
        zeros: where the zero points [.., N] are, if ZEROS; else they are 8. has_zeros: which of them are there.
    """
    if input_sums.shape[len(input_sums.shape) - 1] <= FEW_ROWS:
        of_lower, of_upper = raised_halves(packed, lower.dtype, IN_REGISTERS)
        part = tl.dot(of_upper, upper, tl.dot(of_lower, lower))
        if ZEROS:
            beyond = RAISED + tl.load(zeros, mask=has_zeros, other=0).to(tl.float32)
            part -= input_sums * tl.expand_dims(beyond, -1)
        else:
            part -= input_sums * (RAISED + 8.0)
    else:
        of_lower, of_upper = halves(packed, lower.dtype, IN_REGISTERS)
        if ZEROS:
            beyond = (tl.load(zeros, mask=has_zeros, other=0).to(tl.float32) - 8.0).to(lower.dtype)
            of_lower, of_upper = of_lower - tl.expand_dims(beyond, -1), of_upper - tl.expand_dims(beyond, -1)
        part = tl.dot(of_lower, lower)
        part = tl.dot(of_upper, upper, part)
    return part
