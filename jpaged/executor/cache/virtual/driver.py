"""What the page manager asks of a device: addresses, memory, and putting the one below the other.

    reserve ---> addresses, nothing below them: a read or a write faults
    create  ---> memory without an address, a multiple of `granularity` bytes
    map     ---> that memory is below these addresses; one piece of memory may be below several
    allow   ---> kernels may read them, or read and write
    unmap, release       the way back

`cuda.py` makes CUDA's calls, `memfd.py` those of Linux, for CPUs.
"""

from typing import Any, Protocol

Handle = Any
"""Physical memory, as its driver knows it."""


class Driver(Protocol):
    """The calls for one device. Addresses and sizes are multiples of `granularity`. None of them waits for kernels, so
    nothing may be unmapped before its last reader is done.

    granularity: bytes of the smallest page.
    """

    granularity: int

    def create(self, num_bytes: int) -> Handle:
        """Physical memory.

        Raises:
            OutOfMemoryError: the device has no more.
        """
        ...

    def release(self, handle: Handle) -> None:
        """Gives memory back, which is below no address any more."""
        ...

    def map(self, address: int, handle: Handle, num_bytes: int) -> None:
        """Puts all of a handle's memory below addresses that have none. `allow` must follow."""
        ...

    def allow(self, address: int, num_bytes: int, read_only: bool) -> None:
        """Lets kernels read mapped addresses, and write them unless `read_only`. The range may cover several maps."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes the memory away below addresses that are all mapped; whole maps, one or several."""
        ...

    def clear(self, address: int, num_bytes: int) -> None:
        """Fills writable addresses with zeros."""
        ...

    def settle(self) -> None:
        """Waits until what `clear` does can be seen by kernels that are dispatched from here on."""
        ...

    def begin_thread(self) -> None:
        """Called once by each other thread, before anything else."""
        ...
