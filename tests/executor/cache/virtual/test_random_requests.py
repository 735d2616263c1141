"""The random operations of the scheduler's tests over pages that are mapped and unmapped below their slots."""

import numpy as np
import pytest
from hypothesis import settings

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
TestMappedMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    ("policy", "mode", "groups", "tokens_per_row"),
    [
        ("fcfs", "auto", "full", 1),
        ("priority", "swap", "full", 1),
        ("priority", "recompute", "full", 4),
        ("priority", "swap", "full and window", 2),
        ("fcfs", "recompute", "windows and full", 1),
    ],
)
def test_hundreds_of_requests_find_their_own_pages_and_none_leaks(policy, mode, groups, tokens_per_row, depth):
    drive = serve_at_random(policy, mode, groups, tokens_per_row, depth, **CHANGES)
    executor = drive.engine.executor
    counts = executor.manager.counts
    assert counts.num_mapped > 1000
    assert counts.num_created <= executor.config.num_blocks
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
    executor.mapper.check_integrity()
    assert executor.driver.memory.num_used == executor.manager.backed_bytes
    executor.mapper.close()
    executor.manager.withdraw(np.arange(executor.config.num_blocks))
    assert executor.driver.memory.num_used == executor.manager.backed_bytes == 0
