"""Constrained rows whose last tokens are computed before their masks are known."""

import pytest

from jpaged.engine.constraints.batch_gate import are_enough, gain_by_chunks, is_in_halves
from jpaged.engine.constraints.run_ahead import MOST_AHEAD
from jpaged.engine.interface import SamplingVariant
from tests.engine.helpers import assert_complete, make_request
from tests.engine.test_constrained_rows import MadeUpGrammars, assert_constrained, constrained, engine_of


def run(grammars, requests, **changes):
    engine = engine_of(grammars, **changes)
    engine.add(*requests)
    engine.run(20_000)
    engine.assert_idle()
    return engine


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(("delay_s", "share"), [(0.0, 0.0), (0.001, 0.5), (0.0, 1.0)])
def test_rows_that_run_alone_sample_in_most_steps_what_the_step_before_has_computed(delay_s, share, block_size):
    grammars = MadeUpGrammars(delay_s, share=share)
    requests = [constrained(f"constrained {i}", 3 + i, 30, stop_token_ids=[i]) for i in range(6)]
    engine = run(grammars, requests, block_size=block_size, num_blocks=1024)
    assert_constrained(*requests)
    are_sampled = [plan.has_run_ahead for plan in engine.plans]
    # The made-up grammar forces runs of tokens at one place in three; where blocks have room these come in chunks.
    assert sum(are_sampled) > (0.6 if block_size == 1 else 0.05) * len(are_sampled)
    backs = [back for plan in engine.plans for back in plan.mask_backs.tolist()]
    if share:  # other tokens than those computed count, or none does
        assert max(backs) == 2
        assert min(grammars.num_refused, grammars.num_later) > 0
    else:
        assert max(backs) <= 1


def test_without_being_asked_for_nothing_is_computed_ahead():
    requests = [constrained(f"constrained {i}", 3 + i, 20) for i in range(4)]
    engine = run(MadeUpGrammars(share=0.5), requests, runs_ahead=False)
    assert_constrained(*requests)
    assert not any(len(plan.run_ahead) or plan.has_run_ahead for plan in engine.plans)


def test_beside_ordinary_rows_nothing_is_computed_ahead():
    requests = [constrained(f"constrained {i}", 3 + i, 20) for i in range(4)]
    ordinary = make_request("ordinary", 3, 100)
    engine = engine_of(MadeUpGrammars(share=0.5))
    engine.add(*requests, ordinary)
    while ordinary.slot < 0:
        engine.step()
    slot = ordinary.slot
    engine.run(20_000)
    assert_constrained(*requests)
    assert_complete(ordinary)
    # Where masks are slow to come, on a busy machine, the ordinary row ends first, and the others go on alone.
    *beside, _ = [i for i, plan in enumerate(engine.plans) if slot in plan.decode_slots]
    assert len(beside) > 90
    assert not any(len(plan.run_ahead) for plan in engine.plans[: beside[-1] + 1])


@pytest.mark.parametrize("wants", [{"logprobs": 2}, {"repetition_penalty": 1.1}])
def test_rows_that_need_more_than_a_mask_are_not_computed_ahead(wants):
    requests = [constrained("a", 3, 20, **wants), constrained("b", 4, 20)]
    engine = run(MadeUpGrammars(), requests)
    assert_constrained(*requests)
    assert sum(plan.variant == SamplingVariant.FULL for plan in engine.plans) > 10
    variants = {plan.variant for plan in engine.plans if plan.has_run_ahead or len(plan.run_ahead)}
    assert variants <= {SamplingVariant.MASKED}


def test_a_request_that_comes_is_computed_at_once_though_others_were_computed_ahead():
    engine = engine_of(MadeUpGrammars(), block_size=1, num_blocks=1024)
    first, second = constrained("first", 3, 60), constrained("second", 4, 60)
    engine.add(first)
    while not (engine.plans and engine.plans[-1].has_run_ahead):
        engine.step()
    num_plans = len(engine.plans)
    engine.add(second)
    engine.run(20_000)
    assert_constrained(first, second)
    with_chunk = next(i for i, plan in enumerate(engine.plans[num_plans:]) if any(c.start == 0 for c in plan.chunks))
    assert with_chunk <= 3
    assert any(plan.has_run_ahead for plan in engine.plans[num_plans + with_chunk :])


def test_what_was_computed_ahead_of_a_pause_is_computed_again():
    engine = engine_of(MadeUpGrammars(), block_size=1, num_blocks=1024)
    request = constrained("constrained", 3, 60)
    engine.add(request)
    while not (engine.plans and engine.plans[-1].has_run_ahead and len(engine.plans[-1].run_ahead)):
        engine.step()
    engine.core.pause()  # as before new weights
    num_plans = len(engine.plans)
    engine.core.resume()
    engine.run(20_000)
    assert_constrained(request)
    assert not engine.plans[num_plans].has_run_ahead
    assert any(plan.has_run_ahead for plan in engine.plans[num_plans + 1 :])


@pytest.mark.parametrize("num_requests", [MOST_AHEAD // 2, MOST_AHEAD + 40])
def test_more_rows_than_that_run_in_halves(num_requests):
    requests = [constrained(f"constrained {i}", 4, 7 + i % 3) for i in range(num_requests)]
    changes = {"max_num_seqs": num_requests, "num_blocks": 4096, "max_num_batched_tokens": 4096}
    engine = engine_of(MadeUpGrammars(), block_size=2, pipeline_depth=2, **changes)
    engine.add(*requests)
    among: list[int] = []  # for each plan the rows that there were
    while engine.core.has_unfinished() or engine.scheduler.num_in_flight:
        num_running = engine.scheduler.slots.num_used
        engine.step()
        among += [num_running] * (len(engine.plans) - len(among))
    assert_constrained(*requests)
    most = 0
    for plan, num_running in zip(engine.plans, among, strict=True):
        # Once enough have ended, the others are few enough to run in one step, and do where all are ready.
        if not plan.has_run_ahead and (num_running > MOST_AHEAD) == (num_requests > MOST_AHEAD):
            most = max(most, len(plan.decode_slots))
    assert most > 0
    assert (most > num_requests // 2) == (num_requests <= MOST_AHEAD)


def test_of_many_rows_computed_ahead_half_are_enough():
    assert is_in_halves(200, is_ahead=False)
    assert not is_in_halves(200, is_ahead=True)
    for num_all, is_ahead, enough in ((20, True, 15), (20, False, 15), (200, True, 100), (200, False, 66)):
        assert are_enough(enough, num_all, is_ahead)
        assert not are_enough(enough - 1, num_all, is_ahead)


def test_where_rows_were_computed_ahead_only_many_forced_tokens_are_worth_chunks():
    assert gain_by_chunks(5, 10)
    assert not gain_by_chunks(5, 10, is_ahead=True)
    assert gain_by_chunks(9, 10, is_ahead=True)
