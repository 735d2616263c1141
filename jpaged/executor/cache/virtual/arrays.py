"""Arrays whose memory the page manager maps: JAX sees them whole, though only some pages are there.

    a GPU    reserved addresses, imported through DLPack. A program that updates such an array must have it donated:
             else XLA copies all of it, and faults.
    a CPU    an array of JAX's own, whose memory is taken away (`memfd.py`)

Both keep their address for ever, since each program that updates them has them donated.
"""

from math import prod
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.api.errors import UnsupportedModelError
from jpaged.executor.cache.virtual.cuda import CudaDriver
from jpaged.executor.cache.virtual.driver import Driver
from jpaged.executor.cache.virtual.memfd import MemfdDriver, Memory
from jpaged.executor.cache.virtual.pages import PageManager
from jpaged.executor.views import CODES, view


class Ranges(Protocol):
    """Addresses of one device, and the driver that maps memory below them.

    spare_bytes: that each page needs besides its blocks. left_free: bytes of the device that no page takes, for what
        CUDA and JAX allocate yet.
    """

    spare_bytes: ClassVar[int]
    left_free: ClassVar[int]

    @property
    def driver(self) -> Driver: ...

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[jax.Array, int]:
        """A new array, and where its first page begins."""
        ...

    def free_bytes(self) -> int:
        """Memory that pages could have."""
        ...

    def free(self) -> None:
        """Gives the addresses back, below which there is nothing any more and which no program uses. The arrays may be
        freed then.
        """
        ...

    def synchronize(self) -> None:
        """Waits for all that the device was given to do."""
        ...

    def forget(self, manager: PageManager) -> None:
        """What is to be done when the arrays were freed or forgotten, and no device of the manager runs anything any
        more; manager: of what is below them.
        """
        ...


class GpuRanges:
    """`Ranges` of a GPU."""

    spare_bytes: ClassVar[int] = 0
    left_free: ClassVar[int] = 2**29

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self.driver = CudaDriver(int(device.local_hardware_id or 0))
        self._reserved: list[tuple[int, int]] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[jax.Array, int]:
        if dtype.name not in CODES:
            raise UnsupportedModelError(
                f"kv_cache_layout='virtual' holds {', '.join(CODES)}, not {dtype.name}; use kv_cache_layout='paged'."
            )
        unit = self.driver.granularity
        num_bytes = -(-prod(shape) * dtype.itemsize // unit) * unit
        address = self.driver.reserve(num_bytes)
        self._reserved.append((address, num_bytes))
        return view(address, shape, dtype, self._device), address

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def free(self) -> None:
        while self._reserved:
            self.driver.give_up(*self._reserved.pop())

    def synchronize(self) -> None:
        self.driver.synchronize()

    def forget(self, manager: PageManager) -> None:
        manager.close()
        self.free()


_MOST_TRIED = 64
"""Arrays of at least 32 MiB that are allocated to get one that is a mapping of its own."""


class CpuRanges:
    """`Ranges` of a CPU. num_bytes: memory that pages may have."""

    spare_bytes: ClassVar[int] = 64
    left_free: ClassVar[int] = 0

    def __init__(self, device: jax.Device, num_bytes: int) -> None:
        self._device = device
        self.driver = MemfdDriver(Memory(num_bytes))
        self._adopted: list[int] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[jax.Array, int]:
        tried = []  # kept: each takes some of the heap's free memory, until the allocator has to ask for a mapping
        while True:
            array = jax.device_put(jnp.zeros(shape, dtype), self._device).block_until_ready()
            tried.append(array)
            if self.driver.can_adopt(array.unsafe_buffer_pointer()) or len(tried) == _MOST_TRIED:
                break
        begin = self.driver.adopt(array.unsafe_buffer_pointer(), prod(shape) * dtype.itemsize)
        self._adopted.append(begin)
        return array, begin

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def free(self) -> None:
        while self._adopted:
            self.driver.abandon(self._adopted.pop())

    def synchronize(self) -> None:
        """Who reads an array of a CPU waits for it by itself."""

    def forget(self, manager: PageManager) -> None:
        """Arrays that were freed have taken what was below them along."""
        self.driver.close()
