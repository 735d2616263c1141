"""Which sequences share a prefix, as the scheduler tells the executor."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.kv.shared_prefix import SharedPrefixes
from tests.engine.helpers import Engine, assert_complete, assert_found, make_request, make_search

NUM_SLOTS = 8

paths = st.lists(st.integers(0, 2), max_size=6).map(tuple)
"""A sequence's blocks; those of two sequences are the same as far as their paths are."""


@given(st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), paths), max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_group_saves_three_quarters_of_the_most_and_has_all_who_share(changes, random):
    block_of = {(): 0}
    tables = np.zeros((NUM_SLOTS, 6), np.int32)
    shared = SharedPrefixes(tables, 2000)
    running: dict[int, tuple] = {}
    for slot, path in changes:
        if slot in running:
            shared.remove(slot)
            del running[slot]
        else:
            ids = [block_of.setdefault(path[: i + 1], len(block_of)) for i in range(len(path))]
            tables[slot, : len(ids)] = ids
            shared.add(slot, len(ids))
            running[slot] = path
        rows = list(running)
        random.shuffle(rows)
        grouped, num_sharing, depth = shared.group(np.array(rows, np.int64))
        assert sorted(grouped.tolist()) == sorted(rows)
        owners = Counter(path[: i + 1] for path in running.values() for i in range(len(path)))
        most = max(((count - 1) * len(prefix) for prefix, count in owners.items()), default=0)
        if num_sharing:
            prefix = running[int(grouped[0])][:depth]
            assert [running[slot][:depth] == prefix for slot in grouped.tolist()] == [
                i < num_sharing for i in range(len(rows))
            ]
            assert (num_sharing - 1) * depth >= 0.75 * most
        else:
            assert (depth, most) == (0, 0)
            assert grouped.tolist() == rows


def test_a_fork_counts_and_a_beam_that_moves_counts_once():
    tables = np.zeros((3, 4), np.int32)
    shared = SharedPrefixes(tables, 20)
    tables[0] = [5, 6, 7, 8]
    shared.add(0, 3)
    tables[1] = tables[0]
    shared.add_fork(0, 1)
    tables[1, 3] = 9
    shared.add_fork(1, 0)
    rows, num_sharing, depth = shared.group(np.array([0, 1]))
    assert (rows.tolist(), num_sharing, depth) == ([0, 1], 2, 3)
    shared.remove(0)
    assert shared.group(np.array([1])) == (np.array([1]), 0, 0)


def sharing(engine: Engine) -> list[tuple[list[int], int, int]]:
    """Of each plan that has decode rows alone: those, how many share, and how many tokens."""
    return [(p.decode_slots.tolist(), p.num_sharing, p.shared_len) for p in engine.plans if not p.chunks]


def test_plans_name_who_shares_as_requests_come_and_go():
    prefix = list(range(10, 22))
    other = make_request("other", 13, 20)
    requests = [make_request(str(i), [*prefix, 90 + i], tokens) for i, tokens in enumerate((3, 12, 6))]
    engine = Engine(shared_prefix_attention=True)
    engine.add(other, *requests)
    engine.run()
    assert_complete(other, *requests)
    # The first step computes the prompts. Slot 0 shares nothing; slot 1 ends after two more steps, 3 after three.
    assert sharing(engine)[:6] == [([1, 2, 3, 0], 3, 12)] * 2 + [([2, 3, 0], 2, 12)] * 3 + [([0, 2], 0, 0)]
    assert engine.core.stats().num_shared_prefix_steps == 5


def test_without_the_option_plans_name_nobody():
    requests = [make_request(str(i), [*range(12), 90 + i]) for i in range(3)]
    engine = Engine()
    engine.add(*requests)
    engine.run()
    assert {(n, tokens) for _, n, tokens in sharing(engine)} == {(0, 0)}
    assert engine.core.stats().num_shared_prefix_steps == 0


def test_samples_and_beams_of_one_prompt_share_it():
    samples = make_request("samples", 9, 8, n=3, temperature=1.0)
    search = make_search("search", 14, 4, 6)
    engine = Engine(shared_prefix_attention=True)
    engine.add(samples)
    engine.run()
    engine.add(search)
    engine.run()
    for member in samples.group.members:
        assert_complete(member)
    assert_found(search)
    found = {(n, tokens) for _, n, tokens in sharing(engine)}
    assert {(3, 8), (4, 12)} <= found


def test_a_preempted_sequence_leaves_the_group_and_comes_back():
    requests = [make_request(str(i), [*range(16), 50 + i], 20) for i in range(4)]
    engine = Engine(shared_prefix_attention=True, num_blocks=16, watermark=0.0, pipeline_depth=2)
    engine.add(*requests)
    engine.run()
    assert_complete(*requests)
    assert engine.core.stats().num_preemptions > 0
    assert {n for _, n, _ in sharing(engine)} >= {2, 3}
    engine.assert_idle()
