"""How the 128 threads of a warpgroup share a small array that they read from global memory straight into registers.

    shape [.., rows, columns]    a vector of columns a lane, neighbouring lanes on neighbouring vectors; lanes left over
                                 go to the rows, and so do the warps; the rest of the array lies behind that in each
                                 thread's registers

Threads that no power of two in the shape can use hold copies of what others hold, and store the same values.
"""

import math
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

_LANES, _WARPS = 32, 4


def thread_layout(shape: tuple[int, ...], widest: int) -> Any:
    """The layout with the widest vectors, of `widest` elements at most (a power of two), that uses most threads.

    No row is cut between warps, so a sum over its columns is one of shuffles.
    """
    candidates = []
    vector = math.gcd(widest, shape[-1])
    while vector:
        candidates.append(_distribute(shape, vector))
        vector //= 2
    return max(candidates, key=lambda candidate: candidate[0])[1]


def _distribute(shape: tuple[int, ...], vector: int) -> tuple[int, Any]:
    """The threads that hold something of their own, and the layout."""
    left = [*shape[:-1], shape[-1] // vector]
    rank = len(shape)

    def take(limit: int, axes: list[int]) -> list[int]:
        """Powers of two out of `left` along the axes in turn, of a product of at most `limit`."""
        taken = [1] * rank
        for axis in axes:
            taken[axis] = math.gcd(left[axis], limit // math.prod(taken))
            left[axis] //= taken[axis]
        return taken

    rows = list(range(rank - 1))
    lanes = take(_LANES, [rank - 1, *reversed(rows)])
    warps = take(_WARPS, rows)
    inner = (*lanes[:-1], lanes[-1] * vector)
    outer = tuple(w * n for w, n in zip(warps, inner, strict=True))
    lane_copies, warp_copies = _LANES // math.prod(lanes), _WARPS // math.prod(warps)
    layout = mgpu.TiledLayout(
        plgpu.Tiling((outer, inner, (*[1] * (rank - 1), vector))),
        warp_dims=(plgpu.Replicated(warp_copies), *range(-3 * rank, -2 * rank)),
        lane_dims=(plgpu.Replicated(lane_copies), *range(-2 * rank, -rank)),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    used = _LANES * _WARPS // (lane_copies * warp_copies)
    return used, plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
