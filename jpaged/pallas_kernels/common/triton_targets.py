"""The GPUs that Triton kernels are compiled for, and what a table of tile sizes needs to know of them.

A table has an entry for each family: GPUs whose multiprocessors have the same shared memory and the same instructions
for products and copies.

    family   compute capabilities   shared memory of a CTA   e.g.
    80       8.0, 8.7               163 KiB                  A100, Orin
    86       8.6, 8.9               99 KiB                   A10, RTX 3090, L4, L40S, RTX 4090
    90       9.0                    227 KiB                  H100, H200
    100      10.0, 10.3             227 KiB                  B200, B300
    120      12.0, 12.1             99 KiB                   RTX 5090, RTX PRO 6000, DGX Spark
"""

from collections.abc import Mapping
from typing import TypeVar

from jpaged.pallas_kernels import devices

T = TypeVar("T")

FAMILY = {80: 80, 87: 80, 86: 86, 89: 86, 90: 90, 100: 100, 103: 100, 120: 120, 121: 120}
"""The family of each compute capability that the kernels are compiled for, as 10 * major + minor."""

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that one CTA may use, by family."""

_H200 = 90


def by_shared_memory(large: T, small: T) -> dict[int, T]:
    """A table with one entry for the families whose CTAs have 163 KiB of shared memory or more, and one for others."""
    return {family: large if size >= SHARED_BYTES[80] else small for family, size in SHARED_BYTES.items()}


def capability() -> int:
    """The compute capability to compile for: that of JAX's default device, an H200's where there is no GPU."""
    found = devices.default_device().capability
    return _H200 if found is None else 10 * found[0] + found[1]


def for_family(table: Mapping[int, T]) -> T:
    """The entry of a table, keyed by family, for `capability()`.

    Raises:
        ValueError: no kernel is compiled for the device.
    """
    if (found := FAMILY.get(capability())) is None:
        raise ValueError(f"there are no Triton kernels for compute capability {capability() / 10:.1f}")
    return table[found]
