"""How a product is cut in Triton kernels: the order of its tiles, and the parts of its inputs."""

import triton
import triton.language as tl

from jpaged.pallas_kernels import devices

_MOST_SPLITS = 8


def splits_of(ctas: int, steps: int) -> int:
    """Parts of the inputs that CTAs of their own sum up, so that a few outputs keep most multiprocessors reading."""
    splits = 1
    while splits < _MOST_SPLITS and 5 * splits * ctas < 3 * devices.num_multiprocessors() and steps >= 16 * splits:
        splits *= 2
    return splits


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
