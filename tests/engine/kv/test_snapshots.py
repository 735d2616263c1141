"""Which states are kept, for how long, and who may go on from them."""

from typing import Any

import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.engine.kv.snapshots import StateSnapshots
from tests.engine.helpers import Engine, expected_tokens, make_request

STATES: dict[str, Any] = {"keeps_states": True, "num_state_snapshots": 4, "state_snapshot_tokens": 4}


def digests(name: str, count: int) -> list[bytes]:
    return [f"{name}{i}".encode().ljust(32, b".") for i in range(count)]


def serve(engine: Engine, request_id: str, prompt: list[int], max_tokens: int = 1, **options: Any) -> int:
    """Runs a request alone; returns how many tokens of its prompt were cached."""
    request = make_request(request_id, prompt, max_tokens, **options)
    engine.add(request)
    engine.run()
    assert request.output_token_ids == expected_tokens(request)
    return request.num_cached_tokens


def test_the_least_recently_used_snapshot_gives_way_and_a_hit_refreshes_its_own_alone():
    snapshots, chain, other = StateSnapshots(2, 4, 4), digests("a", 2), digests("b", 1)
    assert snapshots.save(chain[0]) is not None
    assert snapshots.save(chain[1]) is not None
    assert snapshots.deepest(chain) == 0, "saved after the rows of the very plan"
    snapshots.step_id = 1
    assert snapshots.deepest(chain) == 2
    kept = snapshots.load(chain[1])
    assert snapshots.save(other[0]) not in (None, kept)
    assert snapshots.deepest(chain[:1]) == 0
    assert snapshots.load(chain[1]) == kept


def test_a_plan_saves_a_snapshot_once_even_if_it_came_free_meanwhile():
    snapshots, chain = StateSnapshots(1, 4, 4), digests("a", 3)
    assert snapshots.save(chain[0]) == 0
    assert snapshots.save(chain[1]) is None
    snapshots.forget(chain[0])
    assert snapshots.save(chain[1]) is None
    snapshots.step_id = 1
    assert snapshots.save(chain[2]) == 0


def test_two_are_held_for_a_slot_and_the_last_that_is_right_gets_its_name():
    snapshots, chain = StateSnapshots(8, 4, 4), digests("a", 9)
    for step, num_blocks in enumerate(range(1, 9)):
        snapshots.step_id = step
        assert snapshots.hold(3, 4 * num_blocks, num_known=4 * num_blocks - 1) is not None
        assert snapshots.num_used == min(2, num_blocks)
    snapshots.leave(3, chain[:7], set(chain))  # it had stopped before it reached the eighth block's end
    snapshots.step_id = 9
    assert snapshots.deepest(chain) == 7
    assert snapshots.num_used == 1


def test_what_may_be_wrong_is_not_given_up_for_what_may_be_wrong():
    snapshots = StateSnapshots(8, 4, 4)
    found = [snapshots.hold(0, computed, num_known=5) for computed in (4, 8, 12)]
    assert found[2] is None
    assert None not in found[:2]


def test_half_of_the_snapshots_are_for_sequences_that_decode():
    snapshots = StateSnapshots(5, 4, 4)
    assert [snapshots.hold(slot, 4, num_known=4) is None for slot in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("hits", "matched", "last", "stops"),
    [(0, 0, 1, ()), (0, 0, 2, (8,)), (0, 2, 3, (8,)), (0, 2, 4, (8, 16)), (3, 4, 5, (20,)), (3, 3, 4, ())],
)
def test_chunks_end_where_enough_is_new(hits, matched, last, stops):
    assert StateSnapshots(1, 4, 7).stops(hits, matched, last) == stops  # 7 tokens are two blocks of 4


def test_integrity_names_what_is_lost_and_what_nobody_can_hit():
    snapshots, chain = StateSnapshots(2, 4, 4), digests("a", 1)
    snapshots.save(chain[0])
    snapshots.check_integrity(set(chain))
    with pytest.raises(EngineDeadError, match="stands behind a block that no prefix can hit"):
        snapshots.check_integrity(set())
    snapshots._free.clear()
    with pytest.raises(EngineDeadError, match="lost or doubly owned"):
        snapshots.check_integrity(set(chain))


def test_a_prompt_goes_on_from_its_last_full_block_and_parts_where_others_part():
    engine = Engine(**STATES)
    first, second, third = ([1] * 17 + [tail] * 9 for tail in (2, 3, 4))
    assert serve(engine, "first", first) == 0
    assert serve(engine, "again", first) == 24
    assert serve(engine, "second", second) == 0
    assert engine.core.stats().prefix_cache_state_misses == 16
    assert serve(engine, "third", third) == 16
    assert engine.core.stats().prefix_cache_state_misses == 16
    assert serve(engine, "with another salt", first, salt="salt") == 0


def test_a_hit_on_a_prompt_costs_a_step_for_what_is_left():
    engine = Engine(**STATES)
    serve(engine, "first", [1] * 26)
    chunks = [len(chunk.token_ids) for plan in engine.plans for chunk in plan.chunks]
    serve(engine, "again", [1] * 26)
    assert chunks == [24, 2]
    assert [len(chunk.token_ids) for plan in engine.plans for chunk in plan.chunks] == [24, 2, 2]


def test_an_answer_that_is_sent_back_is_not_computed_again():
    engine = Engine(**STATES, pipeline_depth=2)
    request = make_request("first", [5] * 10, 20)
    engine.add(request)
    engine.run()
    conversation = [*[5] * 10, *request.output_token_ids]
    assert serve(engine, "second", [*conversation, 7]) == 28  # of 30 tokens, the last of which was not computed


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_answer_that_stops_leaves_no_state_of_tokens_that_it_does_not_have(depth):
    rng = np.random.default_rng(depth)
    engine = Engine(**(STATES | {"num_state_snapshots": 16}), pipeline_depth=depth)
    for i in range(12):
        prompt = rng.integers(0, 97, rng.integers(1, 12)).tolist()
        request = make_request(str(i), prompt, 40, stop_token_ids=list(range(0, 97, 9)))
        engine.add(request)
        engine.run()
        conversation = [*prompt, *request.output_token_ids]
        cached = serve(engine, f"{i} again", [*conversation, 7])
        assert cached <= (len(conversation) - 1) // 4 * 4
        assert depth or cached == (len(conversation) - 1) // 4 * 4


def test_a_snapshot_goes_with_its_block():
    engine = Engine(**STATES, num_blocks=12, max_model_len=44)
    serve(engine, "first", [1] * 26)
    serve(engine, "other", list(range(40)))  # takes all blocks but one
    assert serve(engine, "again", [1] * 26) == 0
    assert engine.scheduler.pool.cache.snapshots.num_used > 0


def test_a_preempted_sequence_comes_back_to_its_last_snapshot():
    engine = Engine(**STATES)
    request = make_request("a", [3] * 14, 30)
    engine.add(request)
    for _ in range(14):
        engine.step()
    engine.preempt(request, "recompute")
    engine.run()
    starts = [start.num_computed_tokens for plan in engine.plans for start in plan.starts]
    assert starts[0] == 0
    assert starts[1] >= 20
    assert request.output_token_ids == expected_tokens(request)


@pytest.mark.parametrize("num_snapshots", [1, 3, 8])
def test_at_random_whoever_loads_gets_the_state_behind_its_blocks(num_snapshots):
    """Chains of blocks get names and lose them, slots decode along chains and leave, and plans save and load."""
    rng = np.random.default_rng(num_snapshots)
    snapshots, names, content = StateSnapshots(num_snapshots, 4, 4), set[bytes](), dict[int, bytes]()
    chains = [digests(f"{name}", 8) for name in "abcde"]
    running: dict[int, tuple[list[bytes], int]] = {}
    num_loads = 0
    for step in range(2000):
        snapshots.step_id, saves = step, dict[int, bytes]()
        for chain in chains:
            if n := snapshots.deepest(chain[: rng.integers(9)]):
                assert content[snapshots.load(chain[n - 1])] == chain[n - 1]
                num_loads += 1
        for _ in range(rng.integers(3)):
            chain, n = chains[rng.integers(len(chains))], int(rng.integers(8))
            names |= set(chain[: n + 1])
            if (taken := snapshots.save(chain[n])) is not None:
                assert taken not in saves
                saves[taken] = chain[n]
        for slot in range(3):
            chain, n = running.pop(slot, (chains[rng.integers(len(chains))], 0))
            if n == 8 or rng.random() < 0.2:
                known = int(rng.integers(max(0, n - 1), n + 1))  # the last one may have been planned in vain
                names |= set(chain[:known])
                snapshots.leave(slot, chain[:known], names)
                continue
            running[slot] = chain, n + 1
            if (taken := snapshots.hold(slot, 4 * (n + 1), 4 * n + 1)) is not None:
                assert taken not in saves
                saves[taken] = chain[n]
        for name in [name for name in sorted(names) if rng.random() < 0.05]:
            names.remove(name)
            snapshots.forget(name)
        content |= saves
        snapshots.check_integrity(names)
    assert num_loads > 500
