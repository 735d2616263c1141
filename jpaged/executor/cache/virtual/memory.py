"""The memory of a runner in the virtual layout: its arrays, the pages below them, and what maps them for each plan."""

import weakref
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jpaged.api.errors import OutOfMemoryError
from jpaged.engine.interface import NULL_BLOCK
from jpaged.executor.cache.virtual.arrays import CpuRanges, GpuRanges, Ranges
from jpaged.executor.cache.virtual.driver import Driver
from jpaged.executor.cache.virtual.layout import VirtualCache
from jpaged.executor.cache.virtual.mapper import PlanMapper
from jpaged.executor.cache.virtual.pages import PageManager
from jpaged.executor.mesh import DeviceMesh


class VirtualMemory:
    """What is below the pools of a runner.

    Args:
        cache: what the pools are for.
        mesh: of one process.

    Attributes:
        pools: the arrays, over the mesh; the null block has memory, the other pages none yet.
        mapper: keeps pages below the places of running sequences.

    Raises:
        MissingPackageError: there is no cuda-bindings. OutOfMemoryError: the device has not a page left.
    """

    def __init__(self, cache: VirtualCache, mesh: DeviceMesh) -> None:
        config = cache.config
        self._num_pages = config.num_blocks
        self._page_bytes = cache.block_bytes
        self._ranges: list[Ranges] = []
        shards: list[list[jax.Array]] = []
        located: list[tuple[Driver, int]] = []
        for device in mesh.devices:
            ranges: Ranges
            if device.platform == "cpu":
                ranges = CpuRanges(device, config.num_blocks * cache.block_bytes)
            else:
                ranges = GpuRanges(device)
            self._ranges.append(ranges)
            arrays = [ranges.array(pool.shape, np.dtype(pool.dtype)) for pool in cache.pools]
            shards.append([array for array, _ in arrays])
            located += [(ranges.driver, base) for _, base in arrays]
        self._manager = PageManager(located, cache.page_bytes, cache.first_place, cache.num_places)
        self._manager.back(np.array([NULL_BLOCK]))
        self.pools = tuple(mesh.joined(parts, cache.pools_spec) for parts in zip(*shards, strict=True))
        tables = (len(cache.groups), config.max_num_seqs, config.max_blocks_per_seq)
        drivers = [ranges.driver for ranges in self._ranges]
        self.mapper = PlanMapper(self._manager, drivers, tables, config.block_size, cache.geometry.read_behind)
        self._finalizer = weakref.finalize(self, _give_back, self._manager, self._ranges, self.mapper)

    @property
    def backed_bytes(self) -> int:
        """Memory that pages have on each device."""
        return self._manager.num_backed * self._page_bytes

    def back_most(self) -> int:
        """Gives pages their memory, the first ones first, as far as each device has some to spare.

        Returns: how many have memory, the null block included.
        """
        return self.take(np.arange(self._num_pages))

    def are_backed(self, num_pages: int) -> np.ndarray:
        """Which of the first so many pages have memory, bool [num_pages]."""
        self.mapper.join()
        return np.array([self._manager.is_backed(page) for page in range(num_pages)], np.bool_)

    def take(self, pages: np.ndarray) -> int:
        """Gives distinct pages their memory, in order, as far as each device has some to spare.

        Returns: how many have it then, the first ones.
        """
        spare = min(ranges.free_bytes() - ranges.left_free for ranges in self._ranges)
        return self.mapper.take(pages, spare // self._page_bytes)

    def back_first(self, count: int) -> None:
        """Gives the first so many pages their memory.

        Raises:
            OutOfMemoryError: a device has not so much; only the null block has memory then.
        """
        try:
            self._manager.back(np.arange(count))
        except OutOfMemoryError as error:
            num_backed = self._manager.num_backed
            self.withdraw_all()
            raise OutOfMemoryError(
                f"The device has memory for {num_backed} of the KV cache's {count} pages; others have the rest. "
                f"Let them give it back."
            ) from error

    def withdraw_all(self) -> None:
        """Gives all memory back but the null block's. Nothing runs, and contents are lost."""
        self.mapper.forget()
        self._manager.withdraw(np.arange(1, self._num_pages))

    def close(self, wait: Callable[[], None]) -> None:
        """Gives memory and addresses back, once everything dispatched has run (`wait`); the arrays may be freed then.
        The second time it does nothing.
        """
        if not self._finalizer.alive:
            return
        self.mapper.join()
        wait()
        self._manager.close()
        for ranges in self._ranges:
            ranges.free()
        self._finalizer()


def _give_back(manager: PageManager, ranges: Sequence[Ranges], mapper: PlanMapper) -> None:
    """What is left to do when a runner is closed, or forgotten without: on a CPU the arrays' memory goes with them."""
    mapper.close()
    for of_device in ranges:
        of_device.synchronize()
    for of_device in ranges:
        of_device.forget(manager)
