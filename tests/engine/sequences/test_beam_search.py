"""Beam search in the engine: the right sequences and scores, through forked and freed block tables."""

import numpy as np
import pytest

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.engine.sequences.beam_search import BeamSearch, rank
from jpaged.engine.sequences.request import Request, RequestStatus
from tests.engine.fake_executor import TOP_K
from tests.engine.helpers import Engine, assert_complete, assert_found, make_request, make_search


def tables(engine: Engine, request: Request) -> list[list[int]]:
    """Of each beam, in the order of their slots."""
    return [engine.table(member) for member in request.group.members]


def ref_counts(engine: Engine, blocks: list[int]) -> list[int]:
    return [engine.scheduler.pool.ref_count(block) for block in blocks]


def scripted(prompt_len: int, script: dict[tuple[int, ...], dict[int, float]]):
    """A model that knows these continuations of the tokens generated, and finds all else very unlikely."""

    def rank(tokens: list[int]) -> tuple[list[int], list[float]]:
        likely = script.get(tuple(tokens[prompt_len:]), {})
        ids = [*likely, *(token for token in range(200, 200 + TOP_K))][:TOP_K]
        values = [*likely.values(), *(-50.0 - i for i in range(TOP_K))][:TOP_K]
        return ids, values

    return rank


def test_figure_9_beams_are_forked_and_freed_through_their_block_tables():
    """Kwon et al. 2023, figure 9, width 4: all candidates share block 0; candidates 0 to 2 share the first three blocks
    and part at the fourth; candidate 3 parted from them at the second. Then the best four all come from candidates 1
    and 2: the blocks of 0 and 3 alone (2, 4, 5, 8) are freed, and four new ones (9 to 12) are taken.
    """
    on = {20: -0.1}
    script: dict[tuple[int, ...], dict[int, float]] = {(): {10: -1.0, 11: -1.1, 12: -1.2, 13: -1.3}}
    for first in (10, 11, 12, 13):
        script |= {(first, *[20] * n): on for n in range(3)}
    x, y, z, w = ((first, 20, 20, 20) for first in (10, 11, 12, 13))
    script |= {x: {50: -0.1, 51: -0.2, 52: -0.3}, y: {50: -0.1}, z: {50: -5.0}, w: {50: -5.0}}
    script |= {(*x, last): on for last in (50, 51, 52)} | {(*y, 50): on}
    script |= {(*x, last, 20): {70: -0.1, 71: -0.2} for last in (51, 52)}
    script |= {(*x, 50, 20): {70: -9.0}, (*y, 50, 20): {70: -9.0}}
    engine = Engine(block_size=2, rank=scripted(2, script))
    request = make_search("a", [1, 2], beam_width=4, max_tokens=12)
    engine.add(request)
    slots, pool = engine.scheduler.slots, engine.scheduler.pool

    def generated() -> list[list[int]]:
        return [slots.known(member.slot)[2:].tolist() for member in request.group.members]

    for _ in range(6):  # the prompt, and the first five tokens of each candidate
        engine.step()
    by_tokens = dict(zip(map(tuple, generated()), tables(engine, request), strict=True))
    assert sorted(by_tokens) == sorted([(*x, 50, 20), (*x, 51, 20), (*x, 52, 20), (*y, 50, 20)])
    candidates = [by_tokens[(*x, 50, 20)], by_tokens[(*x, 51, 20)], by_tokens[(*x, 52, 20)], by_tokens[(*y, 50, 20)]]
    b0, b1, b3, b5 = candidates[0]
    b6, b7 = candidates[1][3], candidates[2][3]
    assert candidates[1:3] == [[b0, b1, b3, b6], [b0, b1, b3, b7]]
    assert candidates[3][0] == b0
    b2, b4, b8 = candidates[3][1:]
    assert len({b0, b1, b2, b3, b4, b5, b6, b7, b8}) == 9 == pool.num_used
    assert ref_counts(engine, [b0, b1, b2, b3, b4, b5, b6, b7, b8]) == [4, 3, 1, 3, 1, 1, 1, 1, 1]

    engine.step()  # the last tokens of the fourth blocks; then the best four come from candidates 1 and 2
    assert sorted(tables(engine, request)) == sorted([[b0, b1, b3, b6]] * 2 + [[b0, b1, b3, b7]] * 2)
    assert ref_counts(engine, [b0, b1, b3, b6, b7]) == [4, 4, 4, 2, 2]
    assert ref_counts(engine, [b2, b4, b5, b8]) == [0, 0, 0, 0]
    assert pool.num_used == 5

    engine.step()  # their first tokens go to blocks of their own
    plan = engine.plans[-1]
    assert len(plan.copies) == 0, "the fourth blocks were full"
    assert sorted(slot for slot, *_ in plan.table_updates.tolist()) == [m.slot for m in request.group.members]
    moves = {slot: parent for slot, parent, _ in plan.beams.tolist()}
    assert sorted(moves) == [m.slot for m in request.group.members]
    assert len(set(moves.values())) == 2
    assert pool.num_used == 9
    engine.run()
    assert [member.output_token_ids[:7] for member in request.group.members] == [
        [*x, 51, 20, 70],
        [*x, 51, 20, 71],
        [*x, 52, 20, 70],
        [*x, 52, 20, 71],
    ]
    engine.assert_idle()


def test_beams_that_part_in_the_middle_of_a_block_copy_it_once_fewer_than_they_are():
    engine = Engine(block_size=4)
    request = make_search("a", 6, beam_width=4)
    engine.add(request)
    engine.step()
    engine.step()
    assert len(engine.plans[1].copies) == 3
    assert len({table[0] for table in tables(engine, request)}) == 1
    engine.run()
    assert_found(request)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_the_best_sequences_are_found_with_their_scores(width, depth):
    engine = Engine(pipeline_depth=depth)
    requests = [make_search(str(i), i + 1, width, 10) for i in range(6)]
    engine.add(*requests)
    engine.run()
    assert_found(*requests)
    engine.assert_idle()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.5])
def test_stop_tokens_end_sequences_and_the_search_ends_by_its_rule(early_stopping, length_penalty):
    engine = Engine(pipeline_depth=2, max_num_seqs=16)
    requests = [
        make_search(
            str(i),
            i + 2,
            beam_width=3,
            max_tokens=14,
            stop_token_ids=list(range(i, 97, 12)),
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        for i in range(8)
    ]
    engine.add(*requests)
    engine.run()
    assert_found(*requests)
    reasons = {member.finish_reason for request in requests for member in request.group.members}
    assert "stop" in reasons or length_penalty > 1, "long sequences win"
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
def test_other_requests_run_beside_beams_and_each_gets_what_is_its_own(depth):
    engine = Engine(pipeline_depth=depth, max_num_seqs=16, num_blocks=256)
    searches = [make_search(f"search {i}", 5 + i, 1 + i, 12) for i in range(4)]
    others = [make_request(str(i), 3 + i, 30, n=1 + i % 2) for i in range(4)]
    engine.add(*(request for pair in zip(searches, others, strict=True) for request in pair))
    engine.run()
    assert_found(*searches)
    assert_complete(*(member for request in others for member in request.group.members))


def test_other_sequences_go_on_while_a_search_waits_for_its_results():
    engine = Engine(pipeline_depth=2)
    other, search = make_request("other", 4, 30), make_search("search", 4, 3, 8)
    engine.add(other, search)
    engine.run()
    decoding = [plan.decode_slots.tolist() for plan in engine.plans]
    with_other = [other.slot in rows or 0 in rows for rows in decoding]
    assert with_other[1:30] == [True] * 29, "one token in every step"
    widths = [len(rows) - 1 for rows in decoding[1:24]]
    assert set(widths) == {0, 3}
    assert [i for i, width in enumerate(widths, 1) if width] == list(range(3, 24, 3)), "the search in every third"


def test_all_searches_move_in_the_same_steps():
    engine = Engine(pipeline_depth=2, max_num_seqs=16)
    requests = [make_search(str(i), 4 + 9 * i, 3, 12) for i in range(4)]
    for request in requests:
        engine.add(request)
        engine.step()
    engine.run()
    assert_found(*requests)
    assert max(len(plan.decode_slots) for plan in engine.plans) == 12
    assert len(engine.plans) < 24


def test_the_budget_of_a_search_is_kept_for_it_while_it_waits():
    engine = Engine(pipeline_depth=2, max_num_batched_tokens=6, max_num_seqs=8)
    search, others = make_search("search", 4, 4, 10), [make_request(str(i), 3, 9) for i in range(6)]
    engine.add(search, *others)
    engine.run()
    assert_found(search)
    assert_complete(*others)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_search_comes_back_as_one_and_finds_the_same(depth, caching):
    engine = Engine(
        num_blocks=27,
        watermark=0.0,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
        max_num_batched_tokens=16,
        max_model_len=128,
    )
    first, search = make_request("first", 40, 60), make_search("search", 10, 4, 20)
    engine.add(first, search)
    while engine.core.has_unfinished():
        engine.step()
        statuses = {member.status for member in search.group.members}
        assert len(statuses) == 1, "all beams run, or none"
    engine.run()
    assert search.stats.num_preemptions > 0
    assert_complete(first)
    assert_found(search)
    engine.assert_idle()


@pytest.mark.parametrize(
    ("tiers", "depth", "num_blocks", "lengths", "preempted_at"),
    [
        (0, 0, 38, (24, 51, 48, 62), (10, 28)),
        (0, 0, 39, (34, 52, 34, 48), (43, 33)),
        (0, 2, 42, (33, 42, 53, 63), (10, 28)),
        (1, 0, 39, (48, 46, 34, 35), (18, 28)),
        (1, 0, 38, (24, 51, 48, 62), (42, 32)),
        (2, 2, 44, (50, 34, 63, 43), (17, 28)),
        (2, 2, 43, (59, 53, 38, 28), (37, 29)),
    ],
)
def test_a_search_preempted_while_it_comes_back_finds_the_same(tiers, depth, num_blocks, lengths, preempted_at):
    """Its beams count the prompt's seven full blocks as computed, which the leader has not computed yet; or one has
    computed all that it knows, and the other has not. The swap space is full the first time, and has room by then.
    """
    engine = Engine(
        num_blocks=num_blocks,
        max_model_len=128,
        max_num_batched_tokens=8,
        max_num_seqs=16,
        num_swap_chunks=1,
        watermark=0.0,
        enable_prefix_caching=tiers > 0,
        host_prefix_cache=tiers == 2,
        shared_prefix_attention=tiers > 0,
        pipeline_depth=depth,
    )
    others = [make_request(str(i), 4, length) for i, length in enumerate(lengths)]
    search, late = make_search("s", 30, 2, 14), make_request("late", 4, 40, n=2)
    engine.add(*others, search, late)
    slots, beams, seen = engine.scheduler.slots, search.group.members, []
    while engine.core.has_unfinished():
        before = [int(slots.num_computed[beam.slot]) for beam in beams if beam.slot >= 0]
        num_preemptions = search.stats.num_preemptions
        engine.step()
        if search.stats.num_preemptions > num_preemptions:
            seen.append(tuple(before))
        if search.status == RequestStatus.RUNNING and seen:
            engine.core.abort(["late"])
    assert preempted_at in seen
    assert_found(search)
    assert_complete(*others)


@pytest.mark.parametrize("depth", [0, 2])
def test_many_searches_in_a_small_pool_all_find_their_sequences(depth):
    engine = Engine(num_blocks=30, watermark=0.0, pipeline_depth=depth, max_num_seqs=16)
    searches = [make_search(str(i), 3 + i % 7, 1 + i % 4, 6 + i % 9) for i in range(16)]
    others = [make_request(f"other {i}", 3 + i % 7, 20, n=1 + i % 3) for i in range(8)]
    engine.add(*searches, *others)
    engine.run()
    assert engine.core.stats().num_preemptions > 5
    assert_found(*searches)
    assert_complete(*(member for request in others for member in request.group.members))
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 8])
def test_an_aborted_search_frees_all_that_it_holds(depth, steps):
    engine = Engine(pipeline_depth=depth)
    other, search = make_request("other", 3, 20), make_search("search", 9, 4, 20)
    engine.add(other, search)
    for _ in range(steps):
        engine.step()
    assert engine.core.abort(["search"]) == [search]
    assert all(member.status == RequestStatus.FINISHED for member in search.group.members)
    again = make_search("again", search.prompt_token_ids, 4, 6)
    engine.add(again)
    engine.run()
    assert_complete(other)
    assert_found(again)
    engine.assert_idle()


def test_beams_that_might_not_fit_the_pool_are_refused():
    engine = Engine(num_blocks=17)
    with pytest.raises(OutOfMemoryError, match=r"beam_width=4 may need 17 blocks for 20 tokens, .* has 16"):
        engine.add(make_search("a", 5, 4, 15))
    fits = make_search("a", 5, 4, 11)
    engine.add(fits)
    engine.run()
    assert_found(fits)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"beam_width": 2.0}, "beam_width must be an integer"),
        ({"beam_width": 21}, "beam_width must be at most 20"),
        ({"beam_width": 4, "n": 5}, "n=5 is above beam_width=4"),
        ({"beam_width": 4, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 4, "early_stopping": "soon"}, "early_stopping"),
        ({"beam_width": 4, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 4, "ignore_eos": 1}, "ignore_eos"),
        ({"beam_width": 12, "stop_token_ids": list(range(9))}, "beam_width=12 and 9 stop tokens"),
        ({"beam_width": 9}, "beam_width=9 .*max_num_seqs=8"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(fields, says):
    with pytest.raises(InvalidParameterError, match=says):
        Engine().add(make_search("a", 4, **fields))


def test_a_beam_that_goes_on_keeps_its_place():
    """Or a slot could be a parent and be overwritten in the same step."""
    rng = np.random.default_rng(0)
    search = BeamSearch(BeamSearchParams(beam_width=5, max_tokens=100), 100, ())
    for step in range(60):
        ids = np.stack([rng.choice(1000, 5, replace=False) for _ in range(search.num_live)])
        scores = -np.sort(rng.exponential(3.0, ids.shape).astype(np.float32), axis=1)
        (ranking,) = rank([search], ids[None], scores[None])
        choice = search.advance(ranking, step, lambda beam: [])
        for parent in set(choice.parents) if step else ():
            assert choice.parents[parent] == parent
