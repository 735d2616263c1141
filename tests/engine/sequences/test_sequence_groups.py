"""Several sequences from one prompt: one prefill, shared blocks, copy-on-write, scheduled and preempted together."""

import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import RequestOutputKind
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.engine.sequences.seeds import sample_seed
from tests.engine.fake_executor import reference_tokens
from tests.engine.helpers import Engine, assert_complete, assert_found, expected_tokens, make_request, make_search


def members(request: Request) -> list[Request]:
    return request.group.members


def assert_group_complete(*requests: Request) -> None:
    for request in requests:
        assert_complete(*members(request))


def test_figure_8_two_samples_share_the_prompt_and_copy_the_block_they_part_in():
    """Kwon et al. 2023, figure 8: a prompt of seven tokens, blocks of four, two samples."""
    engine = Engine(block_size=4)
    request = make_request("Four score and seven years ago our", 7, max_tokens=10, n=2, temperature=1.0)
    engine.add(request)
    a1, a2 = members(request)
    pool = engine.scheduler.pool

    engine.step()  # the prompt, once; both samples' tables map to its two blocks
    full, partly = engine.table(a1)
    assert engine.table(a2) == [full, partly]
    assert [pool.ref_count(block) for block in (full, partly)] == [2, 2]
    assert [len(chunk.token_ids) for chunk in engine.plans[0].chunks] == [7, 0]
    assert pool.num_used == 2

    engine.step()  # A1 writes first: its last block is copied; A2 is then the only owner of the original
    copy = engine.table(a1)[1]
    assert engine.plans[1].copies.tolist() == [[partly, copy]]
    assert engine.plans[1].table_updates.tolist() == [[a1.slot, 0, 1, copy]]
    assert (engine.table(a1), engine.table(a2)) == ([full, copy], [full, partly])
    assert [pool.ref_count(block) for block in (full, partly, copy)] == [2, 1, 1]

    engine.step()  # the next tokens need new blocks, and nothing is copied
    assert len(engine.plans[2].copies) == 0
    assert engine.table(a1)[:2] == [full, copy]
    assert engine.table(a2)[:2] == [full, partly]
    assert len({*engine.table(a1), *engine.table(a2)}) == 5

    engine.run()
    assert_group_complete(request)
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9])
def test_each_sample_has_its_own_tokens_and_the_first_those_of_a_single_one(depth, prompt_len):
    engine = Engine(pipeline_depth=depth)
    single = make_request("single", list(range(prompt_len)), 12, seed=5, temperature=1.0)
    several = make_request("several", list(range(prompt_len)), 12, seed=5, temperature=1.0, n=4)
    engine.add(single, several)
    engine.run()
    outputs = [member.output_token_ids for member in members(several)]
    assert outputs[0] == single.output_token_ids
    assert len(set(map(tuple, outputs))) == 4
    for i, output in enumerate(outputs):
        assert output == reference_tokens(range(prompt_len), sample_seed(5, i), prompt_len + 12)
    engine.assert_idle()


def test_the_seeds_of_samples_are_streams_of_their_own():
    seeds = [sample_seed(seed, i) for seed in range(20) for i in range(20)]
    assert len(set(seeds)) == 400
    assert sample_seed(7, 0) == 7
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_prompt_is_computed_once_whatever_the_number_of_samples():
    engine = Engine(enable_prefix_caching=False)
    engine.add(make_request("a", 22, 5, n=6))
    engine.run()
    assert sum(len(chunk.token_ids) for plan in engine.plans for chunk in plan.chunks) == 22
    assert engine.core.stats().prompt_tokens == 22


def test_all_copies_of_a_step_are_in_its_plan():
    engine = Engine()
    a, b = make_request("a", 6, 5, n=4), make_request("b", 7, 5, n=3)
    engine.add(a, b)
    engine.step()
    engine.step()
    assert len(engine.plans[1].copies) == 3 + 2
    engine.run()
    assert_group_complete(a, b)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(8, 5), (6, 1)])
def test_nothing_is_copied_where_no_shared_block_is_written(prompt_len, max_tokens):
    engine = Engine()
    request = make_request("a", prompt_len, max_tokens, n=4)
    engine.add(request)
    engine.run()
    assert all(not len(plan.copies) for plan in engine.plans)
    assert_group_complete(request)


def test_a_group_waits_for_slots_for_all_of_its_sequences():
    engine = Engine(max_num_seqs=4)
    a, b, c = make_request("a", 4, 6, n=2), make_request("b", 4, 3, n=3), make_request("c", 4, 3)
    engine.add(a, b, c)
    engine.step()
    assert [r.status for r in (a, b, c)] == [RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.WAITING]
    engine.run()
    assert_group_complete(a, b, c)
    assert b.stats.first_scheduled_time < c.stats.first_scheduled_time


def test_a_prompt_ends_only_in_a_step_that_has_room_for_all_samples():
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=8)
    request = make_request("a", 14, 5, n=4)
    engine.add(request)
    engine.run()
    assert [[len(c.token_ids) for c in plan.chunks] for plan in engine.plans[:3]] == [[8], [5], [1, 0, 0, 0]]
    assert_group_complete(request)


def test_a_group_that_has_a_slot_but_no_budget_yet_starts_although_nothing_else_runs_in_the_step():
    """What is left of the budget beside a search in flight holds no prompt's end with all of its samples."""
    engine = Engine(pipeline_depth=2, max_num_batched_tokens=6, max_num_seqs=8)
    search = make_search("search", 4, 4, 10)
    engine.add(search)
    engine.step()
    engine.step()
    group = make_request("group", 1, 6, n=4, temperature=1.0)
    engine.add(group)
    engine.step()
    assert (engine.plans[-1].num_rows, [start.slot for start in engine.plans[-1].starts]) == (
        0,
        [members(group)[0].slot],
    )
    engine.run()
    assert_found(search)
    assert_group_complete(group)


def test_nobody_is_let_in_before_a_group_that_waits_for_budget():
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=16)
    running = [make_request(str(i), 1, 4 + i) for i in range(6)]
    group, later = make_request("group", 4, 4, n=5), [make_request(f"later {i}", 1, 30) for i in range(4)]
    engine.add(*running, group, *later)
    engine.run()
    assert_group_complete(*running, group, *later)
    assert group.stats.first_token_time < min(request.stats.first_scheduled_time for request in later)


def tight(**changes) -> Engine:
    return Engine(**({"num_blocks": 17, "watermark": 0.0} | changes))


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_group_is_preempted_together_and_comes_back_with_its_tokens(depth, caching):
    engine = tight(pipeline_depth=depth, enable_prefix_caching=caching)
    a, b = make_request("a", 10, 30), make_request("b", 10, 30, n=3, temperature=1.0)
    engine.add(a, b)
    seen = set()
    while engine.core.has_unfinished():
        running = [member.status for member in members(b)]
        engine.step()
        if RequestStatus.PREEMPTED in {member.status for member in members(b)}:
            seen.add((tuple(running), tuple(member.status for member in members(b))))
    engine.run()
    together = ((RequestStatus.RUNNING,) * 3, (RequestStatus.PREEMPTED,) * 3)
    assert together in seen
    assert_group_complete(a, b)
    assert (a.stats.num_preemptions, b.stats.num_preemptions >= 1) == (0, True)
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_group_that_does_not_fit_alone_gives_up_its_sequences_one_by_one(depth):
    engine = tight(pipeline_depth=depth, max_num_seqs=8)
    request = make_request("a", 6, 40, n=6, temperature=1.0)
    engine.add(request)
    engine.run()
    assert_group_complete(request)
    assert request.stats.num_preemptions > 3
    engine.assert_idle()


def test_a_group_preempted_in_the_middle_of_its_prompt_comes_back_as_one():
    engine = tight(max_num_batched_tokens=4, max_num_seqs=4, num_blocks=13)
    a, b = make_request("a", 4, 24), make_request("b", 30, 3, n=3)
    engine.add(a)
    for _ in range(4):
        engine.step()
    engine.add(b)
    engine.run()
    assert b.stats.num_preemptions >= 1
    assert sum(len(chunk.token_ids) == 0 for plan in engine.plans for chunk in plan.chunks) == 2
    assert_group_complete(a, b)
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_an_aborted_group_frees_all_that_it_holds(depth, steps):
    engine = Engine(pipeline_depth=depth, max_num_batched_tokens=8)
    a, b = make_request("a", 3, 9), make_request("b", 13, 20, n=3)
    engine.add(a, b)
    for _ in range(steps):
        engine.step()
    assert engine.core.abort(["b"]) == [b]
    assert all(member.finish_reason == "abort" for member in members(b))
    engine.core.check_integrity()
    engine.run()
    assert_group_complete(a)
    engine.assert_idle()


def test_a_sequence_that_ends_leaves_the_others_of_its_group_running():
    engine = Engine(pipeline_depth=2)
    request = make_request("a", 5, 20, n=3, temperature=1.0, stop=["x"])
    engine.add(request)
    first, second, third = members(request)
    while len(second.output_token_ids) < 4:
        engine.step()
    assert engine.core.finish("a", "x", index=1) is second
    assert engine.core.has_unfinished()
    engine.run()
    assert_complete(first, third)
    assert second.output_token_ids == expected_tokens(second)[:4]
    assert engine.core.finish("a", "x", index=1) is None
    assert engine.core.stats().num_finished == 1
    engine.assert_idle()


def test_updates_name_the_sequence():
    engine = Engine()
    request = make_request("a", 4, 3, n=2, temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add(request)
    seen = []
    while engine.core.has_unfinished():
        seen += engine.step()
    assert [update.request.index for update in seen] == [0, 1]
    assert [update.new_token_ids for update in seen] == [member.output_token_ids for member in members(request)]


def test_a_shared_block_counts_once_in_what_is_held():
    engine = Engine()
    engine.add(make_request("a", 6, 9, n=4))
    engine.step()
    stats = engine.core.stats()
    assert (stats.token_slots, stats.tokens_held) == (8, 6)
    engine.step()
    stats = engine.core.stats()
    assert (stats.token_slots, stats.tokens_held) == (20, 4 + 4 * 3)


@pytest.mark.parametrize(
    ("limits", "asked", "says"),
    [
        ({"max_num_seqs": 3}, {"n": 4}, "n=4 .*max_num_seqs=3"),
        ({"max_num_batched_tokens": 3}, {"n": 4}, "n=4 .*max_num_batched_tokens=3"),
        ({"max_num_seqs": 3}, {"n": 2, "best_of": 5}, "best_of=5 .*max_num_seqs=3"),
    ],
)
def test_more_sequences_than_can_run_at_once_are_refused(limits, asked, says):
    engine = Engine(**limits)
    with pytest.raises(InvalidParameterError, match=says):
        engine.add(make_request("a", 4, 4, **asked))
    assert not engine.core.has_unfinished()
