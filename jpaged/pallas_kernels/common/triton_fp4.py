"""FP4 (E2M1) in Triton kernels: four bits s ee m to 16-bit floats, exactly."""

import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_fp8 import widen


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
