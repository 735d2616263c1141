"""A kind of rows that wait for their last result, plugged into the scheduler from outside, as a grammar would be.

The toy's rows wait for a "mask" that depends on their last token. Masks are made elsewhere and come late, in any order;
a row whose mask is there is planned, while others still wait for theirs.
"""

from collections.abc import Callable

import numpy as np
import pytest

from jpaged.engine.constraints.dependent_rows import DependentRows, Taken
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.sequences.group import SequenceGroup
from tests.engine.helpers import Engine, assert_complete, assert_found, make_request, make_search


class Masked(DependentRows):
    """Requests whose id begins with "masked". `delay` says how many results later the mask of a slot comes."""

    delay: Callable[[int], int] = staticmethod(lambda slot: 0)

    def __init__(self, number, slots, blocks):
        super().__init__(number, slots, blocks)
        self.masks: dict[int, tuple[int, int]] = {}  # of a slot: known tokens that it is for, and results it takes yet
        self.planned_with: list[tuple[int, ...]] = []
        self.num_waits = 0

    def group_of(self, request):
        return SequenceGroup.form(request) if request.request_id.startswith("masked") else None

    def take(self, step_id, slots, rows, result):
        self._age()
        for slot in slots[rows].tolist():
            assert slot not in self.masks, "a row ran again before its last result was read"
            self.masks[slot] = (int(self._slots.num_known[slot]) + 1, type(self).delay(slot))
        self._age()
        return Taken(rows, [])

    def left(self, request):
        super().left(request)
        self.masks.pop(request.slot, None)

    def planned(self, step_id, rows):
        super().planned(step_id, rows)
        for slot in rows.tolist():
            num_known, left = self.masks.pop(slot)
            assert (num_known, left) == (self._slots.num_known[slot], 0), "the mask is for the last token"
        self.planned_with.append(tuple(rows.tolist()))

    def wait(self):
        self.num_waits += 1
        return self._age()

    def _age(self) -> bool:
        self.masks = {slot: (known, max(left - 1, 0)) for slot, (known, left) in self.masks.items()}
        come = [slot for slot, (_, left) in self.masks.items() if not left]
        self.made_ready(np.array(come, np.int64))
        return bool(self.masks)


class SlowlyMasked(Masked):
    delay = staticmethod(lambda slot: 2 * (slot % 3))


def masks_of(engine: Engine) -> Masked:
    return next(iter(engine.scheduler._dependents._kinds.values()))


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Masked, SlowlyMasked])
def test_rows_that_wait_for_a_mask_get_their_own_tokens(kind, depth):
    engine = Engine(kinds=(kind,), pipeline_depth=depth)
    masked = [make_request(f"masked {i}", 3 + i, 9 + i, stop_token_ids=list(range(i, 97, 20))) for i in range(6)]
    ordinary = [make_request(f"ordinary {i}", 3 + i, 9) for i in range(2)]
    engine.add(*masked, *ordinary)
    engine.run()
    assert_complete(*masked, *ordinary)
    engine.assert_idle()


def test_a_row_is_planned_again_only_when_its_result_has_been_read_while_others_go_on():
    engine = Engine(kinds=(Masked,), pipeline_depth=2)
    masked, ordinary = make_request("masked", 4, 12), make_request("ordinary", 4, 40)
    engine.add(masked, ordinary)
    engine.run()
    of_masked = [plan.step_id for plan in engine.plans if masks_rows(plan, 0)]
    of_other = [plan.step_id for plan in engine.plans if masks_rows(plan, 1)]
    assert len(of_masked) == 11
    assert set(np.diff(of_masked)) == {3}
    assert set(np.diff(of_other)) == {1}


def masks_rows(plan, slot: int) -> bool:
    return slot in plan.decode_slots.tolist()


def test_half_of_the_rows_run_while_the_masks_of_the_others_are_made():
    engine = Engine(kinds=(SlowlyMasked,), pipeline_depth=1)
    masked = [make_request(f"masked {i}", 4, 20) for i in range(6)]
    engine.add(*masked)
    engine.run()
    assert_complete(*masked)
    sizes = {len(rows) for rows in masks_of(engine).planned_with}
    assert min(sizes) < 6, "some steps had only a part of the rows"


def test_the_engine_waits_for_masks_when_nothing_else_can_run():
    engine = Engine(kinds=(SlowlyMasked,), pipeline_depth=2)
    masked = make_request("masked", 4, 9)
    engine.add(make_request("masked first", 4, 1), masked)
    engine.run()
    assert_complete(masked)
    assert masks_of(engine).num_waits > 0


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_waiting_rows_are_preempted_and_come_back_like_everybody(mode, depth):
    rng = np.random.default_rng(depth)
    engine = Engine(
        kinds=(Searches, SlowlyMasked),
        pipeline_depth=depth,
        num_blocks=20,
        num_swap_chunks=4,
        preemption_mode=mode,
        watermark=0.0,
    )
    masked = [make_request(f"masked {i}", 3 + i, 20, n=1 + i % 3, temperature=1.0) for i in range(9)]
    searches = [make_search(f"search {i}", 3 + i, 2, 9) for i in range(3)]
    engine.add(*masked, *searches)
    while engine.core.has_unfinished():
        engine.step()
        running = [request for request in masked if request.group.running()]
        if running and rng.random() < 0.1:
            engine.preempt(running[rng.integers(len(running))], mode)
    engine.run()
    assert engine.core.stats().num_preemptions > 5
    assert_complete(*(member for request in masked for member in request.group.members))
    assert_found(*searches)
    engine.assert_idle()


def test_the_budget_keeps_a_token_for_each_waiting_row():
    """The fake executor refuses steps beyond it: rows may all become ready in the step that begins a long prompt."""
    engine = Engine(kinds=(Masked,), pipeline_depth=2, max_num_batched_tokens=6)
    masked = [make_request(f"masked {i}", 2, 15) for i in range(4)]
    engine.add(*masked)
    for _ in range(9):
        engine.step()
    late = make_request("late", 40, 3)
    engine.add(late)
    engine.run()
    assert_complete(*masked, late)
    assert max(len(chunk.token_ids) for plan in engine.plans for chunk in plan.chunks if plan.step_id > 9) == 2


def test_an_aborted_row_that_waits_for_a_mask_leaves_nothing_behind():
    engine = Engine(kinds=(SlowlyMasked,), pipeline_depth=2)
    masked = [make_request(f"masked {i}", 4, 20) for i in range(3)]
    engine.add(*masked)
    for _ in range(8):
        engine.step()
    for request in masked:
        engine.core.abort([request.request_id])
    engine.run()
    engine.assert_idle()
    assert not masks_of(engine).masks
    assert not engine.scheduler._dependents


class Drafted(DependentRows):
    """Requests whose id begins with "draft": a result brings them from no token to all four."""

    most_tokens = 4

    def group_of(self, request):
        return SequenceGroup.form(request) if request.request_id.startswith("draft") else None


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("tokens_per_row", [1, 2, 4])
def test_rows_with_drafts_to_verify_bring_from_none_to_all_of_their_tokens(tokens_per_row, depth):
    def num_brought(start, tokens, most: int) -> int:
        return most if start.seed % 2 else (start.seed + 7 * len(executor.plans)) % (most + 1)

    engine = Engine(
        kinds=(Drafted,),
        num_brought=num_brought,
        pipeline_depth=depth,
        tokens_per_row=tokens_per_row,
        max_num_batched_tokens=40,
        num_blocks=28,
        watermark=0.0,
    )
    executor = engine.executor
    drafts = [
        make_request(
            f"draft {i}", 3 + i, 21, seed=2 * i, n=1 + i % 2, stop_token_ids=list(range(i, 97, 40)), logprobs=1
        )
        for i in range(6)
    ]
    ordinary = [make_request(f"ordinary {i}", 3 + i, 21, seed=2 * i + 1, logprobs=1) for i in range(3)]
    engine.add(*drafts, *ordinary)
    engine.run()
    members = [member for request in (*drafts, *ordinary) for member in request.group.members]
    assert_complete(*members)
    for member in members:
        assert [next(iter(position)) for position in member.logprobs] == member.output_token_ids
    assert (max(plan.tokens_per_row for plan in engine.plans)) == tokens_per_row
    engine.assert_idle()
