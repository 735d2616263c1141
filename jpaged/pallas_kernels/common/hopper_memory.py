"""Shared memory in the layout that products and copies agree on, and reads into registers."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzle(columns: int) -> tuple[int, tuple[Any, ...]]:
    """(bytes, transforms) of the widest swizzle whose lines a row of so many 16-bit numbers fills.

    Tiles of 8 rows by one line, in each of which pieces of 16 bytes are permuted by row: the layout that TMA writes and
    wgmma reads without bank conflicts.
    """
    width = next(size for size in (128, 64, 32) if columns * 2 % size == 0)
    return width, (plgpu.TilingTransform((8, width // 2)), plgpu.SwizzleTransform(width))


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of 16-bit numbers in that layout."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle(shape[-1])[1])


def load(ref: Any, layout: Any) -> jax.Array:
    """Reads a reference into registers of the given layout, by whatever loads it takes."""
    return plgpu.load(ref, layout=layout, optimized=False)
