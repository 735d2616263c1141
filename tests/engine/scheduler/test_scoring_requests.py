"""Requests that score given tokens and sample nothing, with a fake device."""

import numpy as np
import pytest

from jpaged.api.errors import InvalidPromptError
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.sequences.request import Request
from tests.engine.fake_executor import fingerprint, scores_of
from tests.engine.helpers import Engine, assert_complete, make_request

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


def score_request(request_id: str, tokens: list[int], first: int) -> Request:
    return Request(request_id, tokens[:-1], GREEDY, score_targets=tokens[first:])


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def assert_scored(request: Request, tokens: list[int], first: int) -> None:
    prints = [0]
    for token in tokens[:-1]:
        prints.append(fingerprint(prints[-1], token))
    expected = scores_of(prints[first:], tokens[first:])
    assert request.finished
    assert request.output_token_ids == []
    np.testing.assert_array_equal(request.scores.logprobs, expected.logprobs)
    np.testing.assert_array_equal(request.scores.greedy, expected.greedy)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("budget", [7, 64])
def test_every_target_is_scored_whatever_the_chunks(depth, budget):
    engine = Engine(max_num_batched_tokens=budget, pipeline_depth=depth)
    rng = np.random.default_rng(0)
    rows = [(random_tokens(i, n), int(rng.integers(1, n))) for i, n in enumerate(rng.integers(2, 60, 40))]
    requests = [score_request(str(i), *row) for i, row in enumerate(rows)]
    engine.add(*requests)
    engine.run()
    engine.assert_idle()
    for request, row in zip(requests, rows, strict=True):
        assert_scored(request, *row)


def test_a_shared_context_is_computed_once_up_to_its_last_full_block():
    engine = Engine()
    context = random_tokens(1, 21)  # five full blocks of 4
    rows = [context + random_tokens(10 + i, 3) for i in range(4)]
    requests = [score_request(str(i), row, 21) for i, row in enumerate(rows)]
    engine.add(*requests)
    engine.run()
    assert [request.num_cached_tokens for request in requests] == [0, 20, 20, 20]
    assert sum(len(chunk.token_ids) for plan in engine.plans for chunk in plan.chunks) == 23 + 3 * 3
    for request, row in zip(requests, rows, strict=True):
        assert_scored(request, row, 21)


def test_tokens_to_score_are_computed_even_if_they_are_in_the_cache():
    engine = Engine()
    tokens = random_tokens(2, 33)
    first, again = score_request("first", tokens, 1), score_request("again", tokens, 9)
    engine.add(first, again)
    engine.run()
    assert again.num_cached_tokens == 8
    assert_scored(first, tokens, 1)
    assert_scored(again, tokens, 9)


def test_scoring_and_generating_share_steps_and_survive_preemption():
    engine = Engine(num_blocks=24, watermark=0.0, max_num_batched_tokens=16, pipeline_depth=2)
    generating = [make_request(f"g{i}", 6, 40) for i in range(4)]
    rows = [(random_tokens(i, 40), 5) for i in range(6)]
    scoring = [score_request(f"s{i}", *row) for i, row in enumerate(rows)]
    for pair in zip(generating, scoring[:4], strict=True):
        engine.add(*pair)
    engine.add(*scoring[4:])
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    assert_complete(*generating)
    for request, row in zip(scoring, rows, strict=True):
        assert_scored(request, *row)


def test_an_aborted_score_request_frees_its_blocks():
    engine = Engine(max_num_batched_tokens=8, pipeline_depth=2)
    engine.add(score_request("a", random_tokens(3, 40), 1))
    engine.step()
    assert [request.request_id for request in engine.core.abort(["a"])] == ["a"]
    engine.run()
    engine.assert_idle()


def test_more_targets_than_tokens_are_refused():
    with pytest.raises(InvalidPromptError, match="3 score targets for a prompt of 2 tokens"):
        Request("a", [1, 2], GREEDY, score_targets=[1, 2, 3])
