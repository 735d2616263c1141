"""What plans say of the next ones: blocks promised to slots, and the slots that requests get."""

import numpy as np
import pytest

from jpaged.engine.interface import NULL_BLOCK, CacheGroup
from jpaged.engine.scheduler.foresight import Foresight
from tests.engine.helpers import Engine, expected_tokens, make_request

SIZE = 4
RUN = 128 // SIZE
"""Blocks that a growing row is promised at once, where there are plenty."""


def engine_with(**changes) -> Engine:
    options = {"num_blocks": 2048, "max_num_seqs": 8, "max_model_len": 256, "plans_ahead": True, "watermark": 0.0}
    return Engine(**(options | changes))


def promised(plan) -> dict[tuple[int, int], int]:
    """Blocks by slot and index of its table."""
    return {(slot, index): block for slot, _, index, block in plan.ahead.tolist()}


def taken(plan) -> dict[tuple[int, int], int]:
    return {(slot, index): block for slot, _, index, block in plan.table_updates.tolist()}


def test_a_growing_row_is_promised_a_run_of_blocks_once_and_gets_them():
    engine = engine_with()
    engine.add(make_request("a", 6, 200))
    engine.run()
    announced, got = {}, {}
    for plan in engine.plans:
        announced |= promised(plan)
        for place, block in taken(plan).items():
            assert announced[place] == block, "a row got another block than the one that was mapped for it"
            got[place] = block
    assert sorted(index for _, index in got) == list(range(2, -(-205 // SIZE)))
    lengths = [len(plan.ahead) for plan in engine.plans if len(plan.ahead)]
    assert lengths[0] == RUN
    assert len(lengths) == 2  # the second one is what is left of the sequence


def test_an_executor_that_maps_nothing_costs_no_search_for_slots(monkeypatch):
    monkeypatch.setattr(Foresight, "_best_fit", lambda *_: pytest.fail("any slot will do"))
    engine = engine_with(plans_ahead=False)
    engine.add(*(make_request(str(i), 6, 20) for i in range(12)))
    engine.run()


def test_requests_that_wait_are_not_prepared_beyond_a_steps_tokens_however_long_they_wait():
    engine = engine_with(num_blocks=4000, max_num_seqs=64, max_model_len=1024, max_num_batched_tokens=256)
    engine.add(*(make_request(str(i), 500, 4) for i in range(40)))
    for _ in range(12):
        engine.step()
        prepared = engine.scheduler._planner._foresight._prepared
        assert len(prepared) <= 1
    engine.run()


def test_blocks_of_former_tenants_are_promised_anew_once_the_memory_was_given_back():
    """A slot that keeps them is promised none of them again, since they are mapped there; asleep they are not."""

    def announced(engine: Engine, names: str) -> int:
        before = len(engine.plans)
        engine.add(*(make_request(name, 30, 4) for name in names))
        engine.run()
        return sum(len(plan.ahead) for plan in engine.plans[before:])

    engine = engine_with(max_num_batched_tokens=32, enable_prefix_caching=False)
    at_first = announced(engine, "abc")
    assert announced(engine, "def") < at_first
    engine.scheduler.take_memory_anew()
    assert announced(engine, "ghi") == at_first


def test_nothing_is_promised_behind_a_sequences_end():
    engine = engine_with()
    engine.add(make_request("a", 6, 20))
    engine.run()
    assert max(index for plan in engine.plans for _, index in promised(plan)) == (6 + 20 - 2) // SIZE


def test_where_blocks_are_short_rows_are_promised_only_what_the_next_step_needs():
    engine = engine_with(num_blocks=33, max_num_seqs=4)
    engine.add(*(make_request(str(i), 20, 24) for i in range(4)))
    engine.run()
    assert max(len(plan.ahead) for plan in engine.plans) <= 8
    assert any(len(plan.ahead) for plan in engine.plans)


def test_promises_keep_no_block_from_who_needs_it():
    engine = engine_with(num_blocks=65, max_num_seqs=3)
    first = make_request("first", 6, 60)
    engine.add(first)
    for _ in range(4):
        engine.step()
    free = engine.scheduler.pool.num_free
    assert any(len(plan.ahead) > 4 for plan in engine.plans)
    big = make_request("big", (free - 2) * SIZE - 1, 3)
    engine.add(big)
    engine.run()
    assert engine.reported["first"] == expected_tokens(first)
    assert engine.reported["big"] == expected_tokens(big)
    engine.assert_idle()


def test_rows_that_grow_in_one_step_are_promised_blocks_over_the_steps_before():
    engine = engine_with(block_size=16, max_num_seqs=200, num_blocks=4096, max_num_batched_tokens=4096)
    engine.add(*(make_request(str(i), 17, 40) for i in range(200)))
    engine.run()
    growing = next(i for i, plan in enumerate(engine.plans) if len(plan.table_updates) == 200)
    rows = [len(set(plan.ahead[:, 0].tolist())) for plan in engine.plans[:growing]]
    assert max(rows) == 64
    assert sum(rows) == 200
    announced = {}
    for plan in engine.plans[:growing]:
        announced |= promised(plan)
    assert taken(engine.plans[growing]).items() <= announced.items()


def test_a_request_that_waits_gets_a_slot_with_the_blocks_that_were_announced():
    engine = engine_with(max_num_batched_tokens=32, max_num_seqs=8)
    requests = [make_request(str(i), 30, 4) for i in range(6)]
    engine.add(*requests)
    engine.run()
    announced, num_foreseen = {}, 0
    for plan in engine.plans:
        for start in plan.starts:
            entries = {(start.slot, i): block for i, block in enumerate(start.block_ids[0].tolist())}
            num_foreseen += entries.items() <= announced.items()
        announced |= promised(plan)
    assert num_foreseen == 4  # all but those that the first step has room for
    assert [engine.reported[request.request_id] for request in requests] == list(map(expected_tokens, requests))


def test_the_prefix_that_a_waiting_request_will_hit_is_not_promised_away():
    engine = engine_with(num_blocks=65, max_num_batched_tokens=24, max_num_seqs=4)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 2**30, 16).tolist()
    for name, tokens in (("oldest", 31), ("prefix", [*prompt, 1]), ("rest", 202)):  # 8, 5 and 51 blocks: all
        engine.add(make_request(name, tokens, 1))
        engine.run()
    engine.add(make_request("whole step", 24, 1), make_request("again", [*prompt, *rng.integers(0, 99, 20)], 2))
    engine.run()
    start = next(s for plan in engine.plans for s in plan.starts if s.prompt_len == 36)
    assert start.num_computed_tokens == 16


def test_of_free_slots_a_request_gets_the_one_whose_blocks_fit_best():
    engine = engine_with(enable_prefix_caching=False, max_num_seqs=3)
    engine.add(make_request("short", 4, 2), make_request("long", 100, 2), make_request("middle", 40, 2))
    engine.run()
    slots = {start.prompt_len: start.slot for plan in engine.plans for start in plan.starts}
    for prompt_len in (40, 100, 4):
        num_plans = len(engine.plans)
        engine.add(make_request(f"again-{prompt_len}", prompt_len, 2))
        engine.run()
        (start,) = (start for plan in engine.plans[num_plans:] for start in plan.starts)
        assert start.slot == slots[prompt_len]


def test_blocks_free_for_long_are_had_again_though_prefixes_are_in_them_and_fresh_ones_are_not():
    engine = engine_with(num_blocks=65, max_num_seqs=4)
    for i in range(4):  # in slots of their own, the pool's 64 blocks
        engine.add(make_request(str(i), 62, 2))
        engine.run()
    pool, slots = engine.scheduler.pool, engine.scheduler.slots
    tables = [slots.block_tables[0, slot, :15] for slot in range(4)]
    assert len({block for table in tables for block in table.tolist()} - {NULL_BLOCK}) == 60
    can_have = [pool.can_have(table, slot).all() for slot, table in enumerate(tables)]
    assert can_have == [True, True, False, False]


@pytest.mark.parametrize("changes", [{"cache_groups": (CacheGroup(), CacheGroup(window=9))}, {"tokens_per_row": 2}])
def test_windows_and_steps_of_several_tokens_are_foreseen_one_block_a_row(changes):
    engine = engine_with(**changes)
    engine.add(make_request("a", 6, 60))
    engine.run()
    lengths = {len(plan.ahead) for plan in engine.plans}
    assert max(lengths) == len(engine.config.cache_groups)
