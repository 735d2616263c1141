"""The order of a product's tiles in Triton kernels."""

import triton
import triton.language as tl

_SIDE_BY_SIDE = tl.constexpr(16)


@triton.jit
def place(number, TILES: tl.constexpr, STRIPS: tl.constexpr):
    """(tile of rows, strip of outputs) of a CTA. CTAs that run at the same time then share rows and weights, which they
    find in the L2 cache: all strips of 16 tiles come before the next 16."""
    band = number // (_SIDE_BY_SIDE * STRIPS)
    first = band * _SIDE_BY_SIDE
    tiles = tl.minimum(TILES - first, _SIDE_BY_SIDE)
    within = number % (_SIDE_BY_SIDE * STRIPS)
    return first + within % tiles, within // tiles
