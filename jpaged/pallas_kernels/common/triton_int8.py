"""8-bit integers in Triton kernels: to 16-bit floats, for GPUs of every kind.

    bfloat16    128 + the lower seven bits, less 128, or less 256 of negative numbers
    float16     1024 + (the number + 128), less 1152

Bits put below the digits of a power of two make it larger by their value, and both differences are exact. Triton's own
conversion takes an I2F a number before 9.0, and in float16 there, too, of a unit slower than those for integers.
"""

import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_assembly import twice

_BFLOAT16_FOURS = tl.constexpr(f"""
{{
    .reg .b32 a, b, c, d, one, digits, less;
    mov.b32 one, {twice(0x3F80)};
    mov.b32 digits, {twice(0x4300)};
    mov.b32 less, {twice(0xC300)};
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, {twice(0x80)}, less, 0xEA;
    lop3.b32 d, b, {twice(0x80)}, less, 0xEA;
    lop3.b32 a, a, {twice(0x7F)}, digits, 0xEA;
    lop3.b32 b, b, {twice(0x7F)}, digits, 0xEA;
    fma.rn.bf16x2 $0, a, one, c;
    fma.rn.bf16x2 $1, b, one, d;
}}
""")
"""Four int8, in a register, to bfloat16, two in a register each."""

_FLOAT16_FOURS = tl.constexpr(f"""
{{
    .reg .b32 a, b, one, digits, less;
    mov.b32 one, {twice(0x3C00)};
    mov.b32 digits, {twice(0x6400)};
    mov.b32 less, {twice(0xE480)};
    xor.b32 a, $2, 0x80808080;
    prmt.b32 b, a, 0, 0x4342;
    prmt.b32 a, a, 0, 0x4140;
    or.b32 a, a, digits;
    or.b32 b, b, digits;
    fma.rn.f16x2 $0, a, one, less;
    fma.rn.f16x2 $1, b, one, less;
}}
""")
"""Likewise to float16."""


@triton.jit
def widen_int8(values, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """int8 -> DTYPE, which is tl.bfloat16 or tl.float16, exactly. IN_REGISTERS: four neighbours of a thread at a time.
    On GPUs alone."""
    if IN_REGISTERS and DTYPE.is_bf16():
        return tl.inline_asm_elementwise(_BFLOAT16_FOURS, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif IN_REGISTERS:
        return tl.inline_asm_elementwise(_FLOAT16_FOURS, "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4)
    bits = values.to(tl.uint8, bitcast=True).to(tl.uint16)
    if DTYPE.is_bf16():
        digits = ((bits & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
        return digits - ((bits & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        digits = ((bits ^ 0x80) | 0x6400).to(tl.float16, bitcast=True)
        return digits - tl.full([], 1152.0, tl.float16)
