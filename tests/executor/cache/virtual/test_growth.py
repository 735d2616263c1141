"""A thousand sequences that all need a page in one step: what is mapped before it, and what is not in time."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from jpaged.bench.mapping_calls import MappingExecutor, count_calls
from jpaged.bench.workloads import BenchRequest
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import SamplingVariant, StepPlan
from jpaged.engine.loop import EngineCore
from jpaged.engine.scheduler.scheduler import Scheduler
from tests.engine.helpers import Engine, expected_tokens, make_request
from tests.executor.cache.virtual.mapped_executor import MappedExecutor
from tests.executor.cache.virtual.test_random_requests import assert_nothing_leaks

ROWS, PAGE_TOKENS = 1000, 16


def config() -> SchedulerConfig:
    return SchedulerConfig(
        block_size=PAGE_TOKENS,
        num_blocks=40_000,
        max_num_seqs=ROWS,
        max_num_batched_tokens=ROWS * (PAGE_TOKENS + 1),
        max_model_len=256,
        plans_ahead=True,
        watermark=0.0,
    )


def grow_together(executor: MappingExecutor, num_tokens: int) -> list[tuple[int, int]]:
    """Sequences of equal lengths; for each step that needed pages, how many it needed and how many it mapped itself."""
    core = EngineCore(Scheduler(executor.config), executor)
    found, mapper = [], executor.mapper
    prepare = mapper.prepare

    def counting(plan, wait):
        before = mapper.num_in_steps
        prepare(plan, wait)
        if len(plan.table_updates):
            found.append((len(plan.table_updates), mapper.num_in_steps - before))

    mapper.prepare = counting
    for i in range(ROWS):
        core.add_request(make_request(str(i), PAGE_TOKENS + 1, num_tokens))
    while core.has_unfinished():
        core.step()
    mapper.check_integrity()
    return found


class Executor(MappingExecutor):
    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.config = config


def test_pages_of_a_thousand_sequences_that_grow_at_once_are_mapped_in_the_steps_before():
    executor = Executor(config())
    calls = executor.driver.calls
    steps = grow_together(executor, 5 * PAGE_TOKENS)
    assert [needed for needed, _ in steps] == [ROWS] * 4
    assert sum(mapped for _, mapped in steps) < ROWS // 2  # of the first growth, right after the prompts
    assert [mapped for _, mapped in steps[1:]] == [0, 0, 0]
    assert calls["allow"] < 1.2 * 2 * ROWS + 1  # of a prompt's pages and of a run
    executor.mapper.close()


class NeverInTime(Executor):
    """Whose thread has not begun when the next step comes."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        change = self.mapper._change
        self.mapper._change = lambda batches, unused: change(type(batches)(), unused)


def test_what_the_thread_does_not_come_to_is_mapped_by_the_step_that_needs_it():
    executor = NeverInTime(config())
    steps = grow_together(executor, 3 * PAGE_TOKENS)
    assert steps == [(ROWS, ROWS)] * 2
    executor.mapper.close()


def test_a_step_waits_for_a_few_pages_of_the_thread_and_not_for_all_that_it_has_to_do():
    executor = Executor(config())
    mapper, driver, steps_thread = executor.mapper, executor.driver, threading.get_ident()
    begun = threading.Event()

    def slow(address: int, handle: int, num_bytes: int) -> None:
        if threading.get_ident() != steps_thread:
            begun.set()
            while not mapper._is_pausing:
                os.sched_yield()
        driver.calls["map"] += 1

    before = driver.calls["map"]
    driver.map = slow
    slots = np.arange(200, dtype=np.int32)
    ahead = np.stack([slots, 0 * slots, 0 * slots, 1 + slots], axis=1)
    empty = StepPlan(0, SamplingVariant.GREEDY)
    mapper.dispatched(StepPlan(0, SamplingVariant.GREEDY, ahead=ahead))
    begun.wait()
    mapper.prepare(empty, lambda: None)
    mapped = driver.calls["map"] - before
    assert 0 < mapped <= 16
    mapper.dispatched(empty)  # goes on where it was stopped
    mapper._is_pausing = True
    mapper.join()
    mapper._is_pausing = False
    driver.map = type(driver).map.__get__(driver)
    mapper.dispatched(empty)
    mapper.join()
    assert driver.calls["map"] - before == 200
    mapper.close()


class HalfInTime(MappedExecutor):
    """On real memory, which ends the process at a stray access: every other plan finds that nothing was mapped."""

    def __init__(self, config, **options) -> None:
        super().__init__(config, **options)
        change, self.num_calls = self.mapper._change, 0

        def half(batches, unused):
            self.num_calls += 1
            change(batches if self.num_calls % 2 else type(batches)(), unused)

        self.mapper._change = half


@pytest.mark.parametrize("depth", [0, 2])
def test_sequences_get_their_tokens_though_mapping_is_late(depth):
    engine = Engine(
        executor=HalfInTime, plans_ahead=True, num_blocks=400, max_num_seqs=24, max_num_batched_tokens=48,
        max_model_len=96, pipeline_depth=depth,
    )  # fmt: skip
    requests = [make_request(str(i), 5 + 3 * (i % 7), 40) for i in range(60)]
    engine.add(*requests)
    engine.run()
    assert [engine.reported[request.request_id] for request in requests] == list(map(expected_tokens, requests))
    assert engine.executor.mapper.num_in_steps > 60
    assert_nothing_leaks(engine.executor)


def test_calls_are_counted_for_each_round():
    requests = [BenchRequest(list(range(i, i + 40)), 20) for i in range(8)]
    first, second = count_calls(replace(config(), enable_prefix_caching=False), [requests, requests])
    assert first["tokens"] == 160
    assert first["steps"] >= 20
    assert first["maps"] >= 1000 * 8 * 3 / 160
    assert first["unmap"] == 0
    assert 0 < first["set_access"] < first["maps"]
    assert second["maps"] == second["in_the_step"] == 0
    assert second["kept"] >= first["maps"]
