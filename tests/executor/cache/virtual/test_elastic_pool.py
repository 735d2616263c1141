"""Pages that come and go while requests run, on real memory that a neighbour takes and gives back at random."""

import numpy as np
import pytest

from jpaged.api.errors import OutOfMemoryError
from tests.engine.helpers import Engine, make_request, make_search
from tests.engine.scheduler.test_scheduling_at_random import serve_at_random
from tests.executor.cache.virtual.mapped_executor import PAGE_BYTES, MappedExecutor
from tests.executor.cache.virtual.test_random_requests import assert_nothing_leaks


class ElasticExecutor(MappedExecutor):
    """Whose pages have memory only from `take_memory` to `give_memory_back`, less what `held_by_others` pages take."""

    def __init__(self, config, **options) -> None:
        super().__init__(config, **options)
        self.num_taken = self.num_given = 0
        self.held_by_others = 0

    def has_memory(self, num_blocks: int) -> np.ndarray:
        self.mapper.withdraw_all()
        return np.array([self.manager.is_backed(page) for page in range(num_blocks)])

    def take_memory(self, block_ids: np.ndarray) -> int:
        count = self.mapper.take(block_ids, self.driver.free_bytes() // PAGE_BYTES - self.held_by_others)
        self.num_taken += count
        return count

    def give_memory_back(self, block_ids: np.ndarray, nothing_runs: bool) -> None:
        self.num_given += len(block_ids)
        self.mapper.retire(block_ids)
        if nothing_runs:
            self._run_all()
            self.mapper.withdraw_all()


class NeighbouredExecutor(ElasticExecutor):
    """Whose neighbour holds another share of the device in each step."""

    def execute(self, plan):
        handle = super().execute(plan)
        most = self.driver.free_bytes() // PAGE_BYTES
        self.held_by_others = int(np.random.default_rng(self.mapper.num_steps).integers(0, most + 1))
        return handle


AT_ONCE = {"executor": NeighbouredExecutor, "plans_ahead": True, "kv_idle_release_s": 1e-6}


@pytest.mark.parametrize(
    ("policy", "mode", "groups", "tokens_per_row", "depth"),
    [
        ("fcfs", "auto", "full", 1, 2),
        ("priority", "swap", "full and window", 2, 2),
    ],
)
def test_hundreds_of_requests_share_memory_with_a_neighbour(policy, mode, groups, tokens_per_row, depth):
    executor = serve_at_random(policy, mode, groups, tokens_per_row, depth, **AT_ONCE).engine.executor
    assert executor.num_taken > 100
    assert executor.num_given > 100
    assert_nothing_leaks(executor)


def elastic(**changes) -> Engine:
    options = {"num_blocks": 64, "max_num_seqs": 8, "max_model_len": 32, "pipeline_depth": 2, "plans_ahead": True}
    return Engine(**(options | {"kv_idle_release_s": 100.0, "executor": ElasticExecutor} | changes))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def with_clock(engine: Engine) -> Clock:
    clock = engine.scheduler.elastic._clock = Clock()
    engine.scheduler.elastic.restart()
    return clock


def rest(engine: Engine, turns: int = 4) -> None:
    for _ in range(turns):
        engine.core.rest()
        engine.core.check_integrity()


def test_the_pool_begins_with_the_longest_sequence_and_grows_with_requests():
    engine = elastic()
    pool = engine.scheduler.pool
    assert 8 <= pool.num_present <= 32
    engine.add(*(make_request(str(i), 20, 8) for i in range(8)))
    engine.run()
    assert pool.num_present >= 8 * 7
    assert engine.scheduler.stats().num_preemptions == 0
    assert_nothing_leaks(engine.executor)


def test_memory_goes_back_when_it_has_been_idle_and_not_before():
    engine = elastic()
    clock, pool = with_clock(engine), engine.scheduler.pool
    engine.add(*(make_request(str(i), 20, 8) for i in range(8)))
    engine.run()
    present = pool.num_present
    for clock.now in (1.0, 50.0, 99.0):
        rest(engine)
        assert pool.num_present == present
    for clock.now in (120.0, 180.0, 240.0):
        rest(engine)
    assert pool.num_present == 8  # of the longest sequence
    assert engine.executor.manager.num_backed == 8 + 1
    assert_nothing_leaks(engine.executor)


def test_memory_goes_back_while_a_request_runs_that_needs_little():
    engine = elastic(num_blocks=200)
    clock, pool = with_clock(engine), engine.scheduler.pool
    engine.add(*(make_request(str(i), 20, 8) for i in range(8)))
    engine.run()
    present = pool.num_present
    engine.add(make_request("long", 3, 28))
    for clock.now in range(0, 400, 20):
        engine.step()
    assert pool.num_present < present
    engine.run()
    assert len(engine.reported["long"]) == 28
    assert engine.executor.manager.num_backed == pool.num_present + 1
    assert_nothing_leaks(engine.executor)


def test_requests_wait_for_memory_that_others_have_and_take_it_when_it_is_free():
    engine = elastic()
    engine.executor.held_by_others = 1000
    pool = engine.scheduler.pool
    engine.add(*(make_request(str(i), 20, 12) for i in range(24)))
    present = pool.num_present
    for _ in range(12):
        engine.step()
    assert pool.num_present == present
    assert engine.scheduler.stats().num_preemptions > 0
    engine.executor.held_by_others = 0
    engine.run()
    assert pool.num_present > present
    assert {len(tokens) for tokens in engine.reported.values()} == {12}


def test_a_request_that_needs_more_than_the_device_has_is_refused_and_leaves_no_trace():
    engine = elastic()
    with_clock(engine)
    search = make_search("beams", 4, 8, max_tokens=28)
    engine.executor.held_by_others = 1000
    with pytest.raises(OutOfMemoryError, match="others use the rest"):
        engine.add(search)
    engine.executor.held_by_others = 0
    assert not engine.core.has_unfinished()
    engine.add(make_search("beams", 4, 8, max_tokens=28))
    engine.run()
    engine.assert_idle()
