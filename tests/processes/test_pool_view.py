"""What the picture of the pool shows, against a real pool, block manager and scheduler."""

import numpy as np
import pytest

from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.sequences.slots import Slots
from jpaged.processes.pool_view import CACHED, FIRST_COLOUR, FREE, NUM_COLOURS, OTHER, SHARED, Holder, view_pool
from tests.engine.helpers import Engine, make_config, make_request

SIZE = 4


def colour(number):
    return FIRST_COLOUR + number % NUM_COLOURS


def cells_of(view):
    """By block id; the null block has none."""
    return dict(enumerate(view.cells, 1))


def view_of(engine, numbers):
    scheduler = engine.scheduler
    tables = [
        (numbers[scheduler.slots.requests[slot].request_id], scheduler.slots.blocks(slot))
        for slot in scheduler.slots.used().tolist()
    ]
    return view_pool(*scheduler.pool.occupancy(), tables, scheduler.config.block_size), dict(tables)


def test_a_forked_sequence_shares_all_blocks_until_it_writes():
    config = make_config(block_size=SIZE, num_blocks=16)
    pool, slots = BlockPool(16, SIZE, False), Slots(config)
    manager = BlockManager(pool, slots)
    parent = slots.acquire(make_request("a", 1), 0, np.arange(6, dtype=np.int32), pool.allocate(2), 6)
    child = slots.acquire(make_request("b", 1), 0, np.zeros((0,), np.int32), np.zeros((0,), np.int32), 0)
    manager.fork(parent, [child])

    def view():
        return view_pool(*pool.occupancy(), [(5, slots.blocks(parent)), (8, slots.blocks(child))], SIZE)

    first, last = slots.blocks(parent).tolist()
    before = view()
    assert (before.num_used, before.num_shared) == (2, 2)
    assert cells_of(before)[first] == cells_of(before)[last] == colour(5) | SHARED
    assert before.holders == [Holder(5, 2, 2), Holder(8, 2, 2)]

    manager.append(manager.growth(np.array([parent, child])))
    after = view()
    copied = int(slots.blocks(parent)[-1])
    assert (after.num_used, after.num_shared) == (3, 1)
    assert [cells_of(after)[block] for block in (first, copied, last)] == [colour(5) | SHARED, colour(5), colour(8)]
    assert after.holders == [Holder(5, 2, 1), Holder(8, 2, 1)]


def test_a_prefix_that_two_requests_have_in_common_is_shared_and_stays_cached_when_both_have_ended():
    engine = Engine(num_blocks=32)
    prefix = list(range(100, 112))
    engine.add(make_request("a", [*prefix, 1], 20))
    engine.step()
    engine.add(make_request("b", [*prefix, 2], 20))
    engine.step()
    view, tables = view_of(engine, {"a": 3, "b": 4})
    common = tables[3][:3].tolist()
    assert tables[4][:3].tolist() == common
    assert {cells_of(view)[block] for block in common} == {colour(3) | SHARED}
    assert cells_of(view)[int(tables[4][-1])] == colour(4)
    assert view.num_shared == 3
    engine.core.abort(["a", "b"])
    engine.run()
    view, tables = view_of(engine, {})
    assert (view.num_used, view.num_shared, view.num_holders, tables) == (0, 0, 0, {})
    assert {cells_of(view)[block] for block in common} == {CACHED}
    assert view.num_cached == view.cells.count(CACHED) == engine.core.stats().num_cached_blocks >= 3
    assert engine.core.reset_prefix_cache()
    assert set(view_of(engine, {})[0].cells) == {FREE}


def test_samples_of_one_request_count_their_common_blocks_once():
    engine = Engine(num_blocks=32)
    engine.add(make_request("a", 12, 6, n=3))
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler
    tables = [(7, scheduler.slots.blocks(slot)) for slot in scheduler.slots.used().tolist()]
    assert len(tables) == 3
    view = view_pool(*scheduler.pool.occupancy(), tables, SIZE)
    distinct = {int(block) for _, table in tables for block in table}
    assert view.holders == [Holder(7, len(distinct), view.num_shared)]
    assert view.num_used == len(distinct) < sum(len(table) for _, table in tables)


def test_blocks_of_a_pinned_prefix_belong_to_no_request():
    engine = Engine(num_blocks=32)
    prompt = list(range(100, 113))
    engine.add(make_request("a", prompt, 2))
    engine.run()
    pinned = engine.core.pin_prefix(np.array(prompt, np.int32)) // SIZE
    view, _ = view_of(engine, {})
    assert pinned == 3
    assert view.cells.count(OTHER) == view.num_used == 3


@pytest.mark.parametrize("num_blocks", [65, 66, 1000, 12345])
def test_a_large_pool_is_drawn_in_cells_whose_levels_add_up(num_blocks):
    rng = np.random.default_rng()
    refs = rng.integers(0, 3, num_blocks, dtype=np.int32) * (rng.random(num_blocks) < 0.3)
    refs[0] = 0
    named = rng.random(num_blocks) < 0.2
    named[0] = False
    owned = np.flatnonzero(refs)
    owners = rng.integers(1, 40, len(owned))
    tables = [(int(number), owned[owners == number].astype(np.int32)) for number in np.unique(owners)]
    exact = view_pool(refs, named, tables, SIZE, max_cells=num_blocks)
    assert exact.blocks_per_cell == 1
    assert exact.levels == b""
    view = view_pool(refs, named, tables, SIZE, max_cells=64)
    assert len(view.cells) <= 64
    assert (view.num_used, view.num_shared, view.num_cached) == (exact.num_used, exact.num_shared, exact.num_cached)
    assert exact.num_used == len(owned)
    for i, code in enumerate(view.cells):
        blocks = exact.cells[i * view.blocks_per_cell : (i + 1) * view.blocks_per_cell]
        used = [block for block in blocks if block != FREE]
        if view.blocks_per_cell == 1:
            assert code == blocks[0]
            continue
        assert view.levels[i] == -(-255 * len(used) // len(blocks))
        assert code == FREE if not used else used.count(code) == max(map(used.count, used))


def test_the_list_names_the_largest_requests_and_counts_all():
    refs = np.zeros((200,), np.int32)
    tables, start = [], 1
    for number in range(1, 11):
        tables.append((number, np.arange(start, start + number, dtype=np.int32)))
        start += number
    refs[1:start] = 1
    view = view_pool(refs, np.zeros((200,), np.bool_), tables, SIZE, max_listed=3)
    assert [(holder.number, holder.blocks) for holder in view.holders] == [(8, 8), (9, 9), (10, 10)]
    assert view.num_holders == 10
