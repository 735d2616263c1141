"""The fake executor over pages of real memory: rows read and write where the virtual layout would have them.

What the fake executor says of contents holds here through addresses: a place that has another page than its sequence's
shows as wrong contents, and one without a page, or with one that may only be read, ends the process.
"""

import ctypes

import numpy as np

from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import NULL_BLOCK, StepPlan, StepResult
from jpaged.executor.cache.virtual.mapper import PlanMapper
from jpaged.executor.cache.virtual.memfd import MemfdDriver, Memory
from jpaged.executor.cache.virtual.pages import PageManager
from tests.engine.fake_executor import FakeExecutor, FakeHandle, _Slot

PAGE_BYTES = MemfdDriver.granularity


class MappedHandle(FakeHandle):
    """number: of the step, among those that were dispatched."""

    number: int

    def result(self) -> StepResult:
        result = super().result()
        self._executor.mapper.has_run(self.number)
        return result


class _OnEachDevice:
    """Contents that every device has: whatever one of them has otherwise, or not at all, shows when it is read."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def __getitem__(self, index):
        first, *others = (array[index] for array in self._arrays)
        assert all(np.array_equal(other, first) for other in others), "devices differ"
        return first

    def __setitem__(self, index, value) -> None:
        for array in self._arrays:
            array[index] = value


class MappedExecutor(FakeExecutor):
    """As `FakeExecutor`; its blocks' contents are at their homes, and rows use the places of their slots, on each of
    `num_devices` devices. read_behind: as of `PlanMapper`.
    """

    num_devices = 1
    read_behind = 0

    def __init__(self, config: SchedulerConfig, **options) -> None:
        super().__init__(config, **options)
        width = -(-(config.max_model_len + self.read_behind) // config.block_size)
        self._tables = (len(config.cache_groups), config.max_num_seqs, width)
        num_places = int(np.prod(self._tables))
        rows = config.num_blocks + num_places
        drivers = [MemfdDriver(Memory(config.num_blocks * PAGE_BYTES)) for _ in range(self.num_devices)]
        self.driver = drivers[0]
        bases = [driver.reserve(rows * PAGE_BYTES) for driver in drivers]
        self.manager = PageManager(list(zip(drivers, bases, strict=True)), PAGE_BYTES, config.num_blocks, num_places)
        self.manager.back(np.array([NULL_BLOCK]))
        self.mapper = PlanMapper(self.manager, drivers, self._tables, config.block_size, self.read_behind)
        self.drivers = drivers
        arrays = []
        for base in bases:
            memory = (ctypes.c_byte * (rows * PAGE_BYTES)).from_address(base)
            arrays.append(np.frombuffer(memory, np.int64).reshape(rows, -1)[:, : config.block_size])
        self._content = arrays[0] if len(arrays) == 1 else _OnEachDevice(arrays)

    def execute(self, plan: StepPlan) -> MappedHandle:
        self.mapper.prepare(plan, self._run_all)
        handle = super().execute(plan)
        handle.__class__ = MappedHandle
        handle.number = self.mapper.num_steps
        self.mapper.dispatched(plan)
        return handle

    def assert_nothing_leaks(self) -> None:
        """Pages are where tables say, and devices' memory is theirs. Gives everything back."""
        self.mapper.check_integrity()
        assert sum(driver.memory.num_used for driver in self.drivers) == self.manager.backed_bytes
        self.mapper.close()
        self.manager.withdraw(np.arange(self.config.num_blocks))
        assert self.manager.backed_bytes == 0
        assert not any(driver.memory.num_used for driver in self.drivers)

    def _run_all(self) -> None:
        if self._queue:
            self.run_until(self._queue[-1])

    def _row(self, state: _Slot, group: int, index: int) -> int:
        if state.tables[group][index] == NULL_BLOCK:
            return NULL_BLOCK
        _, slots, width = self._tables
        return self.config.num_blocks + (group * slots + state.start.slot) * width + index
