"""A buddy allocator: contiguous ranges whose sizes are powers of two.

    order 3   [               0..7                ]        one free chunk of 8
    order 2   [      0..3      ][      4..7       ]        split: two buddies
    order 1   [ 0..1 ][ 2..3 ]  |                          split again; 0..1 is handed out
              used     free       free

A chunk of order k starts at a multiple of 2^k, so its buddy is found by flipping bit k of its start. A chunk is split
in halves until it just fits, and joined again with its buddy when both are free. A range whose size is no power of
two is covered with the largest aligned chunks that fit: 15,728 slots are 8192 + 4096 + 2048 + 1024 + 256 + 64 + 32 +
16, of which seven chunks of 2,048 can be made.
"""

from jpaged.api.errors import EngineDeadError, OutOfMemoryError


class BuddyAllocator:
    """Hands out chunks of the range 0 .. size-1, the lowest that fits first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]
        self._order_of: dict[int, int] = {}
        start = 0
        for order in reversed(range(size.bit_length())):
            if size & 1 << order:
                self._free[order].add(start)
                start += 1 << order

    @property
    def largest_free(self) -> int:
        """The largest size that can be allocated now; 0 when nothing is free."""
        return max((1 << order for order, starts in enumerate(self._free) if starts), default=0)

    @property
    def num_allocated(self) -> int:
        """Units in allocated chunks, the rounding included."""
        return sum(1 << order for order in self._order_of.values())

    def allocate(self, n: int) -> int:
        """Takes a chunk of the least power of two that holds n units.

        Returns: where it starts.

        Raises:
            OutOfMemoryError: there is no free chunk of that size; nothing is allocated.
        """
        order = max(n - 1, 0).bit_length()
        found = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if found is None:
            raise OutOfMemoryError(
                f"A chunk of {1 << order} units wanted, the largest free one has {self.largest_free}."
            )
        start = min(self._free[found])
        self._free[found].remove(start)
        for k in reversed(range(order, found)):
            self._free[k].add(start + (1 << k))
        self._order_of[start] = order
        return start

    def free(self, start: int) -> None:
        """Gives back the chunk that starts here, and joins it with its buddies as far as they are free.

        Raises:
            EngineDeadError: no allocated chunk starts here.
        """
        if start not in self._order_of:
            raise EngineDeadError(f"No allocated chunk starts at {start}.")
        order = self._order_of.pop(start)
        while order + 1 < len(self._free) and start ^ 1 << order in self._free[order]:
            self._free[order].remove(start ^ 1 << order)
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)

    def chunks(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The allocated and the free chunks, (start, size) each, ascending; for tests."""
        allocated = sorted((start, 1 << order) for start, order in self._order_of.items())
        free = sorted((start, 1 << order) for order, starts in enumerate(self._free) for start in starts)
        return allocated, free
