"""The shapes programs are compiled for. A step runs in the smallest bucket that holds it; the rest is padding."""

from bisect import bisect_left
from collections.abc import Sequence


def geometric_buckets(smallest: int, largest: int, factor: int = 2) -> tuple[int, ...]:
    """`smallest`, times `factor`, and so on, ending exactly with `largest`."""
    buckets = []
    size = min(smallest, largest)
    while size < largest:
        buckets.append(size)
        size *= factor
    return (*buckets, largest)


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `size`. ValueError if none does."""
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"{size} exceeds the largest bucket, {buckets[-1]}.")
    return buckets[index]
