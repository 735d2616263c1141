"""8-bit integers in Triton kernels: to 16-bit floats, for GPUs of every kind.

    bfloat16    128 + the lower seven bits, less 128, or less 256 of negative numbers
    float16     1024 + (the number + 128), less 1152

Bits put below the digits of a power of two make it larger by their value, and both differences are exact. Triton's own
conversion takes an I2F a number before 9.0, and in float16 there, too, of a unit slower than those for integers.
"""

import triton
import triton.language as tl


@triton.jit
def widen_int8(values, DTYPE: tl.constexpr):
    """int8 -> DTYPE, which is tl.bfloat16 or tl.float16, exactly."""
    bits = values.to(tl.uint8, bitcast=True).to(tl.uint16)
    if DTYPE.is_bf16():
        digits = ((bits & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
        return digits - ((bits & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        digits = ((bits ^ 0x80) | 0x6400).to(tl.float16, bitcast=True)
        return digits - tl.full([], 1152.0, tl.float16)
