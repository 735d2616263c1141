"""What kernels read behind a chunk, the rest of a tile of keys, has memory: on real pages, which fault elsewhere."""

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.interface import NULL_BLOCK, Chunk, SamplingVariant, SlotStart, StepPlan
from jpaged.executor.cache.virtual.geometry import Geometry
from jpaged.executor.cache.virtual.mapper import PlanMapper
from jpaged.executor.cache.virtual.memfd import MemfdDriver, Memory
from jpaged.executor.cache.virtual.pages import NO_PAGE, PageManager
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.start.shapes import whole_tiles
from jpaged.pallas_kernels.contiguous_attention.api import READ_BEHIND, TILE_TOKENS
from tests.engine.scheduler.test_scheduling_at_random import serve_at_random
from tests.executor.cache.virtual.mapped_executor import MappedExecutor
from tests.executor.cache.virtual.test_random_requests import assert_nothing_leaks

PAGES, SLOTS, WIDTH, PAGE_TOKENS, TOKEN_BYTES = 6, 2, 3, 1024, 4
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES


class Pages:
    """Two slots of up to 2 pages and what is read behind them, and their mapper."""

    def __init__(self) -> None:
        self.driver = MemfdDriver(Memory(PAGES * PAGE_BYTES))
        self.base = self.driver.reserve((PAGES + SLOTS * WIDTH) * PAGE_BYTES)
        self.manager = PageManager([(self.driver, self.base)], PAGE_BYTES, PAGES, SLOTS * WIDTH)
        self.manager.back(np.array([NULL_BLOCK]))
        self.mapper = PlanMapper(self.manager, [self.driver], (1, SLOTS, WIDTH), PAGE_TOKENS, READ_BEHIND)
        self.num_waits = 0

    def dispatch(self, **changes: Any) -> None:
        plan = StepPlan(0, SamplingVariant.GREEDY, **changes)
        self.mapper.prepare(plan, self._wait)
        self.mapper.dispatched(plan)
        self.mapper.join()

    def can_read(self, slot: int, first: int, count: int) -> bool:
        """Whether a kernel may read these tokens of a slot. The system copies them, and says if there is no memory."""
        return self._copied(ctypes.CDLL(None).write, slot, first, count)

    def can_write(self, slot: int, first: int, count: int) -> bool:
        return self._copied(ctypes.CDLL(None).read, slot, first, count)

    def page(self, slot: int, index: int) -> int:
        return int(self.manager.pages_at(np.array([slot * WIDTH + index]))[0])

    def _copied(self, call: Any, slot: int, first: int, count: int) -> bool:
        file = os.memfd_create("copied")
        try:
            os.pwrite(file, bytes(count * TOKEN_BYTES), 0)
            entry = (PAGES + slot * WIDTH) * PAGE_TOKENS + first
            address = ctypes.c_void_p(self.base + entry * TOKEN_BYTES)
            return bool(call(file, address, ctypes.c_size_t(count * TOKEN_BYTES)) == count * TOKEN_BYTES)
        finally:
            os.close(file)

    def _wait(self) -> None:
        self.num_waits += 1


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.mapper.close()
    pages.manager.close()


def start(slot: int, num_tokens: int, *block_ids: int) -> SlotStart:
    tokens, blocks = np.zeros((num_tokens,), np.int32), np.array([block_ids], np.int32)
    return SlotStart(slot, tokens, num_tokens, blocks, 0, num_tokens + 8, SamplingParams(), 0, ())


def chunk(slot: int, first: int, stop: int) -> Chunk:
    return Chunk(slot, first, np.zeros((stop - first,), np.int32), False)


def test_the_tile_of_a_chunk_at_any_token_reaches_behind_the_last_page_and_finds_memory(pages: Pages) -> None:
    pages.dispatch(starts=(start(0, 1020, 1),), chunks=(chunk(0, 0, 1000 - READ_BEHIND),))
    assert pages.page(0, 1) == NO_PAGE  # the tile ends within the page
    pages.dispatch(chunks=(chunk(0, 1000 - READ_BEHIND, 1000),))
    pages.dispatch(chunks=(chunk(0, 1000, 1020),))
    assert pages.can_read(0, 1000, TILE_TOKENS)
    assert not pages.can_write(0, PAGE_TOKENS, 1)
    assert pages.manager.num_backed == 2  # the null block and the sequence's: no memory for what is only read


def test_behind_the_longest_sequence_there_is_a_place_of_its_own_slot(pages: Pages) -> None:
    pages.dispatch(starts=(start(0, 2048, 1, 2),), chunks=(chunk(0, 2000, 2048),))
    assert pages.can_read(0, 2000, TILE_TOKENS)
    assert pages.page(0, 2) == NULL_BLOCK
    assert pages.page(1, 0) == NO_PAGE


def test_a_prompt_s_own_next_page_is_mapped_with_the_chunk_before_it(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages.mapper, "_change", lambda *_: None)  # nothing is mapped while steps run
    pages.dispatch(starts=(start(0, 1100, 1, 2),), chunks=(chunk(0, 0, 1000),))
    assert pages.page(0, 1) == 2


def test_a_page_that_comes_where_chunks_read_waits_for_them(pages: Pages) -> None:
    grows = {"table_updates": np.array([[0, 0, 1, 2]], np.int32), "decode_slots": np.array([0], np.int32)}
    pages.dispatch(starts=(start(0, 1024, 1),), chunks=(chunk(0, 1000, 1024),), ahead=np.array([[0, 0, 1, 2]]))
    assert pages.page(0, 1) == NULL_BLOCK  # not what the plan announced: the step may be reading
    pages.dispatch(**grows)
    assert pages.num_waits == 1
    assert pages.page(0, 1) == 2
    assert pages.can_write(0, PAGE_TOKENS, 1)


def test_a_page_that_comes_when_the_chunks_were_read_does_not_wait(pages: Pages) -> None:
    pages.dispatch(starts=(start(0, 1020, 1),), chunks=(chunk(0, 1000, 1020),))
    decode = {"decode_slots": np.array([0], np.int32)}
    pages.dispatch(**decode)
    pages.mapper.has_run(0)
    pages.dispatch(**decode, ahead=np.array([[0, 0, 1, 2]]))  # while steps 1 and 2 decode, which read no tile there
    assert pages.page(0, 1) == 2
    pages.dispatch(**decode, table_updates=np.array([[0, 0, 1, 2]], np.int32))
    assert pages.num_waits == 0


class ReadingTiles(MappedExecutor):
    """Whose chunks read behind their tokens, when they run: a step or two after they were planned. What is there then
    has not changed since the step was dispatched."""

    read_behind, num_read_only = 5, 0

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self._dispatched: deque[np.ndarray] = deque()

    def execute(self, plan: StepPlan) -> Any:
        prepare = self.mapper.prepare

        def preparing(plan: StepPlan, wait: Any) -> None:
            prepare(plan, wait)
            chunks = [(one.slot, one.start, len(one.token_ids)) for one in plan.chunks if len(one.token_ids)]
            self._dispatched.extend(self._pages_read(*chunk) for chunk in chunks)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.mapper, "prepare", preparing)
            return super().execute(plan)

    def _write_chunk(self, state: Any, start: int, token_ids: list[int]) -> None:
        super()._write_chunk(state, start, token_ids)
        if token_ids:
            pages = self._pages_read(state.start.slot, start, len(token_ids))
            assert (pages != NO_PAGE).all(), f"slot {state.start.slot}, {len(token_ids)} from {start}: {pages}"
            np.testing.assert_array_equal(pages, self._dispatched.popleft())
            self.num_read_only += int(np.count_nonzero(pages == NULL_BLOCK))

    def _pages_read(self, slot: int, start: int, count: int) -> np.ndarray:
        size, end = self.config.block_size, start + count
        indices = np.arange((end - 1) // size, (end + self.read_behind - 1) // size + 1)
        return self.manager.pages_at(slot * self._tables[2] + indices)


@pytest.mark.parametrize(("policy", "mode", "depth"), [("fcfs", "auto", 0), ("priority", "swap", 2)])
def test_chunks_of_random_requests_find_memory_behind_them_when_they_run(policy: str, mode: str, depth: int) -> None:
    drive = serve_at_random(policy, mode, "full", 1, depth, num_requests=300, executor=ReadingTiles, plans_ahead=True)
    executor = drive.engine.executor
    assert executor.num_read_only > 50
    assert_nothing_leaks(executor)


def test_tables_leave_places_behind_the_longest_sequence() -> None:
    geometry = Geometry("per-layer", 1, 1, PAGE_TOKENS, PAGE_TOKENS, most_tokens=100 * PAGE_TOKENS)
    reading = Geometry(
        "per-layer", 1, 1, PAGE_TOKENS, PAGE_TOKENS, most_tokens=100 * PAGE_TOKENS, read_behind=READ_BEHIND
    )
    longest = reading.longest(20, 10)
    assert longest == geometry.longest(20, 10) - READ_BEHIND == 8 * PAGE_TOKENS - READ_BEHIND

    def width(max_model_len: int, geometry: Geometry) -> int:
        return ExecutorConfig(
            max_num_seqs=10,
            max_model_len=max_model_len,
            block_size=PAGE_TOKENS,
            num_blocks=20,
            decode_buckets=(10,),
            token_buckets=(16,),
            geometry=geometry,
        ).max_blocks_per_seq

    assert width(longest, reading) == 8
    assert width(longest + 1, reading) == 9
    assert width(8 * PAGE_TOKENS, geometry) == 8


def test_pages_hold_whole_tiles() -> None:
    for token_bytes, page_tokens in ((2048, 1024), (10240, 1024), (32768, 128)):
        geometry = Geometry.fit("per-layer", 32, 1, token_bytes, whole_tiles(2**21, token_bytes))
        assert geometry.page_tokens == page_tokens
