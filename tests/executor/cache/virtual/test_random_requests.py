"""The random operations of the scheduler's tests over pages that are mapped and unmapped below their slots."""

import threading

import numpy as np
import pytest
from hypothesis import settings

from jpaged.api.errors import OutOfMemoryError
from tests.engine.helpers import Engine, make_request
from tests.engine.scheduler.test_scheduling_at_random import SchedulingMachine, serve_at_random
from tests.executor.cache.virtual.mapped_executor import MappedExecutor

CHANGES = {"executor": MappedExecutor, "plans_ahead": True}


class MappedMachine(SchedulingMachine):
    """Fewer draws than over blocks: what is new is how pages follow."""

    changes = CHANGES

    def teardown(self):
        super().teardown()
        if hasattr(self, "drive"):
            assert_nothing_leaks(self.drive.engine.executor)


TestMappedMachine = MappedMachine.TestCase
TestMappedMachine.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("policy", "mode", "groups", "tokens_per_row", "depth"),
    [
        ("fcfs", "auto", "full", 1, 0),
        ("priority", "swap", "full", 1, 2),
        ("priority", "recompute", "full", 4, 0),
        ("priority", "recompute", "full", 1, 2),
        ("priority", "swap", "full and window", 2, 2),
        ("fcfs", "recompute", "windows and full", 1, 0),
    ],
)
def test_many_requests_find_their_own_pages_and_none_leaks(policy, mode, groups, tokens_per_row, depth):
    drive = serve_at_random(policy, mode, groups, tokens_per_row, depth, num_requests=200, **CHANGES)
    executor = drive.engine.executor
    counts = executor.manager.counts
    assert counts.num_mapped > 250
    assert counts.num_created <= executor.config.num_blocks
    assert_nothing_leaks(executor)


class TwoDevices(MappedExecutor):
    num_devices = 2


class FailingDevice(TwoDevices):
    """Whose second device now and then has no memory for a mapping, as a call ahead of a step finds; not in a step."""

    num_failures = 0

    def __init__(self, config, **options) -> None:
        super().__init__(config, **options)
        driver, rng = self.drivers[1], np.random.default_rng(3)
        steps_thread = threading.get_ident()

        def fails(call):
            def calling(*arguments, **named):
                if threading.get_ident() != steps_thread and rng.random() < 0.1:
                    self.num_failures += 1
                    raise OutOfMemoryError("injected")
                return call(*arguments, **named)

            return calling

        driver.map, driver.allow = fails(driver.map), fails(driver.allow)


@pytest.mark.parametrize("executor", [TwoDevices, FailingDevice])
def test_two_devices_have_the_same_pages_whatever_comes_and_though_one_fails(executor):
    drive = serve_at_random("priority", "swap", "full", 1, 2, num_requests=200, executor=executor, plans_ahead=True)
    executor = drive.engine.executor
    assert executor.manager.counts.num_mapped > 250
    if isinstance(executor, FailingDevice):
        assert executor.num_failures > 10
    assert_nothing_leaks(executor)


def test_a_slot_gets_the_pages_again_that_it_had_and_maps_nothing():
    """Without a prefix cache, which would lose what they hold."""
    engine = Engine(**CHANGES, num_blocks=64, max_num_seqs=4, enable_prefix_caching=False, pipeline_depth=2)
    counts = engine.executor.manager.counts
    for turn in range(5):
        engine.add(*(make_request(f"{turn}-{i}", 20 + i, 10) for i in range(4)))
        engine.run()
        if turn == 0:
            mapped = counts.num_mapped
    assert mapped >= 4 * 7
    assert counts.num_mapped == mapped
    assert counts.num_kept >= 4 * mapped / 2
    assert counts.num_unmapped == 0


def test_of_a_long_prompt_only_the_first_chunks_pages_are_mapped_before_the_step():
    engine = Engine(**CHANGES, num_blocks=64, max_num_batched_tokens=16, max_model_len=128, pipeline_depth=0)
    mapper = engine.executor.mapper
    mapped = []
    mapper.dispatched = lambda plan, then=mapper.dispatched: (mapped.append(mapper.counts.num_mapped), then(plan))
    engine.add(make_request("long", 64, 4))
    engine.run()
    assert mapped[:2] == [16 // 4, 64 // 4]


def assert_nothing_leaks(executor: MappedExecutor) -> None:
    """And gives everything back."""
    executor.assert_nothing_leaks()
