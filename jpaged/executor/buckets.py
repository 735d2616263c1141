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


def fine_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """`smallest`, doubling to 64, from there in two steps to each doubling and from 256 on in four, to `largest`.

    So where steps are long at most a fifth of one is padding, a tenth on average. Where they are short, padded rows
    cost next to nothing: a product of 8 rows takes as long as one of 1 (of exactly 1, longer: XLA then chooses
    another kernel). Each size costs about a second of a cold start.
    """
    buckets = []
    size = min(smallest, largest)
    while size < largest:
        buckets.append(size)
        power = 2 ** (size.bit_length() - 1)
        size += power if size < 64 else power // 2 if size < 256 else power // 4
    return (*buckets, largest)


def doublings(buckets: Sequence[int]) -> tuple[int, ...]:
    """The largest of ascending buckets, and going down every one of at most half the size of the last one kept.

    For programs that few requests need: fewer to compile, at up to twice the rows.
    """
    kept = [buckets[-1]]
    for size in buckets[-2::-1]:
        if 2 * size <= kept[-1]:
            kept.append(size)
    return tuple(reversed(kept))


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `size`. ValueError if none does."""
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"{size} exceeds the largest bucket, {buckets[-1]}.")
    return buckets[index]
