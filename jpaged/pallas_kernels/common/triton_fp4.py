"""FP4 (E2M1) in Triton kernels: four bits s ee m to 16-bit floats, exactly."""

import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_assembly import twice


def _fours_in_registers(kind: str, spread: tuple[str, ...], factor: int, *, scaled: bool = False) -> tl.constexpr:
    """Four bytes, in a register, to their lower four bits and their upper ones as `kind`, two in a register each.

    spread: what puts the sign and the digits of the lower four bits of {of}, and of the upper ones, in their places in
    `bits`. There they are a number that `factor`, a power of two in `kind`, makes right. scaled: each is multiplied by
    one more, of further registers in the order of results. Added to minus zero, a product keeps a zero's sign.
    """
    parts = "".join(
        spread[output // 2].format(of=of)
        + f"""
    fma.rn.{kind} ${output}, bits, factor, zero;"""
        + (f"\n    fma.rn.{kind} ${output}, ${output}, ${5 + output}, zero;" if scaled else "")
        for output, of in enumerate("abab")
    )
    return tl.constexpr(f"""
{{
    .reg .b32 a, b, bits, sign, factor, zero;
    mov.b32 factor, {twice(factor)};
    mov.b32 zero, {twice(0x8000)};
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;{parts}
}}
""")


# Multiplied by the sum of two powers of two, four bits are in two places, which do not overlap here.
_BFLOAT16_SPREAD = tuple(
    f"""
    and.b32 bits, {{of}}, {mask};
    mul.lo.u32 bits, bits, {powers};
    and.b32 bits, bits, 0x81C081C0;"""
    for mask, powers in (("0x000F000F", "0x1040"), ("0x00F000F0", "0x0104"))
)
_FLOAT16_SPREAD = tuple(
    f"""
    shl.b32 sign, {{of}}, {sign_left};
    shl.b32 bits, {{of}}, {left};
    and.b32 bits, bits, 0x0E000E00;
    lop3.b32 bits, sign, zero, bits, 0xEA;"""
    for sign_left, left in ((12, 9), (8, 5))
)
_BFLOAT16_FOURS = _fours_in_registers("bf16x2", _BFLOAT16_SPREAD, 0x7E80, scaled=True)
_FLOAT16_FOURS = _fours_in_registers("f16x2", _FLOAT16_SPREAD, 0x7400)


@triton.jit
def scaled_halves(packed, of_lower, of_upper, IN_REGISTERS: tl.constexpr):
    """uint8 [.., 16 G] -> E2M1 of each byte's lower and upper four bits, times what its sixteen bytes have in of_lower
    and of_upper, [.., G] of the result's type, bfloat16 or float16. Products with e4m3, and in bfloat16 with powers of
    two, are exact, the latter from 2^-126 on.

    IN_REGISTERS: four neighbours of a thread at a time. On GPUs alone.
    """
    times_lower, times_upper = _of_each_byte(of_lower, packed), _of_each_byte(of_upper, packed)
    if of_lower.dtype.is_fp16():
        lower, upper = float16_halves(packed, IN_REGISTERS)
        lower, upper = lower * times_lower, upper * times_upper
    elif IN_REGISTERS:
        lower, upper = tl.inline_asm_elementwise(
            _BFLOAT16_FOURS,
            "=r,=r,=r,=r,r,r,r,r,r",
            [packed, times_lower, times_upper],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        lower = widen_e2m1(packed & 15, tl.bfloat16) * times_lower
        upper = widen_e2m1(packed >> 4, tl.bfloat16) * times_upper
    return lower, upper


@triton.jit
def _of_each_byte(of_sixteens, packed):
    """[.., G] -> [.., 16 G]."""
    spread, _ = tl.broadcast(tl.expand_dims(of_sixteens, -1), tl.full((16,), 0, of_sixteens.dtype))
    return tl.reshape(spread, packed.shape)


@triton.jit
def float16_halves(packed, IN_REGISTERS: tl.constexpr):
    """uint8 -> E2M1 of a byte's lower and upper four bits, both float16. IN_REGISTERS: likewise."""
    if IN_REGISTERS:
        lower, upper = tl.inline_asm_elementwise(
            _FLOAT16_FOURS, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        lower, upper = widen_e2m1(packed & 15, tl.float16), widen_e2m1(packed >> 4, tl.float16)
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
def inverse(outer):
    """1 / outer, and 0 of 0: what a sum of NVFP4 is multiplied by."""
    return tl.where(outer == 0, 0.0, 1.0 / tl.where(outer == 0, 1.0, outer))
