"""Steps that bring several tokens a row."""

import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.engine.interface import NO_TOKEN, StepPlan, StepResult
from jpaged.engine.scheduler.scheduler import Scheduler
from tests.engine.helpers import Engine, assert_complete, assert_found, make_config, make_request, make_search


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("tokens_per_row", [1, 2, 4, 7])
def test_the_tokens_are_those_of_single_steps(tokens_per_row, block_size, depth):
    engine = Engine(tokens_per_row=tokens_per_row, block_size=block_size, num_blocks=400, pipeline_depth=depth)
    requests = [
        make_request(str(i), 3 + i, 5 + 3 * i, stop_token_ids=list(range(i, 97, 30)), n=1 + i % 3, logprobs=1)
        for i in range(8)
    ]
    engine.add(*requests)
    engine.run()
    members = [member for request in requests for member in request.group.members]
    assert_complete(*members)
    for member in members:
        assert [next(iter(position)) for position in member.logprobs] == member.output_token_ids
    engine.assert_idle()


def test_a_sequence_takes_as_many_steps_fewer_and_reports_its_tokens_together():
    engine = Engine(tokens_per_row=4)
    request = make_request("a", 6, 18)
    engine.add(request)
    reported = []
    while engine.core.has_unfinished():
        reported += [update.new_token_ids for update in engine.step()]
    assert [len(tokens) for tokens in reported] == [1, 4, 4, 4, 4, 1]
    assert [plan.tokens_per_row for plan in engine.plans] == [1, 4, 4, 4, 4, 4]
    assert engine.core.stats().generated_tokens == 18
    assert_complete(request)


def test_a_step_that_computes_a_prompt_brings_one_token_a_row():
    engine = Engine(tokens_per_row=4, max_num_batched_tokens=8)
    first, late = make_request("first", 4, 40), make_request("late", 20, 4)
    engine.add(first)
    engine.step()
    engine.step()
    engine.add(late)
    engine.run()
    assert_complete(first, late)
    assert all(plan.tokens_per_row == 1 for plan in engine.plans if plan.chunks)
    assert all(plan.tokens_per_row == 4 for plan in engine.plans if not plan.chunks)


def test_where_blocks_are_short_for_several_tokens_rows_go_on_with_one():
    engine = Engine(tokens_per_row=4, block_size=2, num_blocks=20, watermark=0.0, max_model_len=20)
    requests = [make_request(str(i), 4, 15) for i in range(2)]
    engine.add(*requests)
    engine.run()
    assert_complete(*requests)
    assert engine.core.stats().num_preemptions == 0, "each has at most nine blocks and a half"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("depth", [0, 2])
def test_preempted_sequences_come_back_and_lose_nothing(mode, depth):
    engine = Engine(
        tokens_per_row=4, num_blocks=17, watermark=0.0, pipeline_depth=depth, num_swap_chunks=4, preemption_mode=mode
    )
    requests = [make_request(str(i), 3 + i % 5, 20 + i) for i in range(8)]
    search = make_search("s", 7, 2, 9)
    engine.add(*requests, search)
    engine.run()
    assert_complete(*requests)
    assert_found(search)
    assert engine.core.stats().num_preemptions > 2
    engine.assert_idle()


def test_generated_blocks_are_found_by_a_continuation():
    engine = Engine(tokens_per_row=4)
    first = make_request("first", 9, 20)
    engine.add(first)
    engine.run()
    again = make_request("again", [*first.prompt_token_ids.tolist(), *first.output_token_ids, 1, 2], 3)
    engine.add(again)
    engine.run()
    assert again.num_cached_tokens == 28
    assert_complete(again)


def test_a_row_that_goes_on_with_fewer_tokens_than_were_due_is_noticed():
    scheduler = Scheduler(make_config(tokens_per_row=4))
    scheduler.add(make_request("a", 4, 40))
    first = scheduler.schedule()
    assert isinstance(first, StepPlan)
    scheduler.update(first, StepResult(np.array([[5]], np.int32), np.zeros((1,), np.uint8)))
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    lost = StepResult(np.array([[5, 6, NO_TOKEN, NO_TOKEN]], np.int32), np.zeros((1,), np.uint8))
    with pytest.raises(EngineDeadError, match="returned 0 tokens for 1 running"):
        scheduler.update(plan, lost)
