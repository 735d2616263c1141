"""FP4 (E2M1) in Triton kernels: four bits s ee m to 16-bit floats, exactly."""

import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_assembly import twice
from jpaged.pallas_kernels.common.triton_fp8 import widen


def _fours_in_registers(kind: str, lower_left: int, upper_left: int, digits: int, factor: int) -> tl.constexpr:
    """Four bytes, in a register, to their lower four bits and their upper ones as `kind`, two in a register each.

    lower_left, upper_left: how far their digits move to their places. digits: their mask. factor: the power of two, in
    `kind`. Added to minus zero, a product keeps the sign of its zeros.
    """
    parts = "".join(
        f"""
    shl.b32 sign, {of}, {sign_left};
    shl.b32 size, {of}, {left};
    and.b32 size, size, {twice(digits)};
    lop3.b32 size, sign, zero, size, 0xEA;
    fma.rn.{kind} ${output}, size, factor, zero;"""
        for output, of, sign_left, left in (
            (0, "a", 12, lower_left),
            (1, "b", 12, lower_left),
            (2, "a", 8, upper_left),
            (3, "b", 8, upper_left),
        )
    )
    return tl.constexpr(f"""
{{
    .reg .b32 a, b, sign, size, factor, zero;
    mov.b32 factor, {twice(factor)};
    mov.b32 zero, {twice(0x8000)};
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;{parts}
}}
""")


_BFLOAT16_FOURS = _fours_in_registers("bf16x2", 6, 2, 0x01C0, 0x7E80)
_FLOAT16_FOURS = _fours_in_registers("f16x2", 9, 5, 0x0E00, 0x7400)


@triton.jit
def widen_e2m1_halves(packed, DTYPE: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """uint8 -> E2M1 of its lower and of its upper four bits, both as DTYPE, as of `widen_e2m1`. IN_REGISTERS: four
    neighbours of a thread at a time. On GPUs alone."""
    if IN_REGISTERS and DTYPE.is_bf16():
        lower, upper = tl.inline_asm_elementwise(
            _BFLOAT16_FOURS, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif IN_REGISTERS:
        lower, upper = tl.inline_asm_elementwise(
            _FLOAT16_FOURS, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        lower, upper = widen_e2m1(packed & 15, DTYPE), widen_e2m1(packed >> 4, DTYPE)
    return lower, upper


@triton.jit
def widen_e2m1(bits, DTYPE: tl.constexpr):
    """Four bits s ee m in uint8 -> DTYPE, exactly: in place they are the value times 2^-126 or 2^-14."""
    word = bits.to(tl.uint16)
    sign, size = (word & 8) << 12, word & 7
    if DTYPE.is_bf16():
        value = (sign | (size << 6)).to(tl.bfloat16, bitcast=True) * tl.full([], 8.507059173023462e37, tl.bfloat16)
    else:
        value = (sign | (size << 9)).to(tl.float16, bitcast=True) * tl.full([], 16384.0, tl.float16)
    return value


@triton.jit
def widen_nvfp4(bits, scale, DTYPE: tl.constexpr):
    """E2M1 times e4m3, both as uint8 -> DTYPE, exactly: a product has six digits."""
    value = widen_e2m1(bits, DTYPE).to(tl.float32) * widen(scale, DTYPE).to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def inverse(outer):
    """1 / outer, and 0 of 0: what a sum of NVFP4 is multiplied by."""
    return tl.where(outer == 0, 0.0, 1.0 / tl.where(outer == 0, 1.0, outer))
