"""Messages between processes: what is sent arrives, in whatever pieces, and what is no message is refused."""

from dataclasses import fields

import numpy as np
import pytest

from jpaged.api import errors
from jpaged.api.errors import EngineDeadError, JPagedError, error_of
from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats, TargetScores
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.expert_load import ExpertLoad
from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import EngineStats
from jpaged.processes.wire import (
    Abort,
    Add,
    Answer,
    Finish,
    FrameReader,
    FromEngine,
    Output,
    Outputs,
    Stats,
    ToEngine,
    frame,
)


def sent(message, kind):
    [received] = FrameReader(kind).feed(frame(message))
    return received


def test_a_request_arrives_as_it_was_checked():
    constraint = StructuredOutputsParams(json={"enum": ["é", 1]}, whitespace_pattern=" ?")
    sampling = SamplingParams(
        temperature=0.5, seed=2**62, stop=["end"], logit_bias={5: 1.5}, structured_outputs=constraint
    )
    request = Request(
        "a",
        np.random.default_rng().integers(0, 1000, 50),
        sampling,
        bad_words_token_ids=((3, 4), (5,)),
        priority=-7,
        cache_salt="tenant",
        arrival_time=1.25,
        score_targets=[8, 9],
    )
    arrived = sent(Add.of(3, request), ToEngine).request("b", (2,))
    assert arrived.request_id == "b"
    assert arrived.prompt_token_ids.tolist() == request.prompt_token_ids.tolist()
    assert arrived.score_targets.tolist() == [8, 9]
    assert arrived.sampling == sampling
    for name in ("bad_words_token_ids", "priority", "cache_salt", "beam"):
        assert getattr(arrived, name) == getattr(request, name)
    assert arrived.stats.arrival_time == 1.25
    assert arrived.stop_token_ids == (2,)


@pytest.mark.parametrize("constraint", [{"json": {"type": "integer"}}, {"choice": ["a", "b"]}])
def test_a_constraint_is_not_checked_again_where_it_arrives(constraint, monkeypatch):
    params = StructuredOutputsParams(**constraint)
    message = Add.of(3, Request("a", np.arange(3), SamplingParams(structured_outputs=params)))
    monkeypatch.setattr(StructuredOutputsParams, "__post_init__", lambda self: pytest.fail("it is checked again"))
    arrived = sent(message, ToEngine).request("b", ()).sampling.structured_outputs
    assert arrived == params
    assert hash(arrived) == hash(params)


def test_an_output_arrives_with_the_prompt_that_its_client_kept():
    logprobs = [{7: Logprob(-0.5, 1, "x"), 9: Logprob(-2.0, 2, None)}]
    completion = CompletionOutput(1, "text", [7], -0.5, logprobs, "stop", "end", 0.25)
    scores = TargetScores(np.array([-1.0, -2.5], np.float32), np.array([True, False]))
    stats = RequestStateStats(1.0, 2.0, 3.0, 4.0, 5.0, 6)
    output = RequestOutput("a", "prompt", [1, 2], [completion], True, [None, logprobs[0]], 4, stats, scores)
    [arrived] = sent(Outputs([Output.of(5, output)]), FromEngine).outputs
    assert arrived.handle == 5
    found = arrived.request_output("a", "prompt", [1, 2])
    assert found.scores.logprobs.tolist() == [-1.0, -2.5]
    assert found.scores.greedy.tolist() == [True, False]
    found.scores.logprobs[0] = 0  # it is the caller's own
    found.scores = output.scores
    assert found == output


def test_statistics_arrive_with_the_tokens_of_each_expert():
    load = ExpertLoad((1, 3), ((4, 2**40), (0, 0)), ((4, 1), (0, 0)))
    stats = EngineStats(
        **{field.name: 1 for field in fields(EngineStats)} | {"step_tokens": (1, 2), "expert_load": load}
    )
    assert sent(Answer(7, Stats(stats)), FromEngine).value.stats == stats


def test_messages_arrive_whatever_pieces_their_bytes_come_in():
    messages = [Abort([1, 2]), Finish(3, 0, "x" * 1000), Abort([])]
    data, reader, received = b"".join(map(frame, messages)), FrameReader(ToEngine), []
    cuts = sorted(np.random.default_rng().integers(0, len(data), 20).tolist())
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        received += reader.feed(data[start:stop])
    assert received == messages


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x03\0\0\0no!", frame(Outputs([]))])
def test_bytes_that_are_no_message_of_the_right_kind_are_refused(data):
    with pytest.raises(EngineDeadError, match="frame"):
        list(FrameReader(ToEngine).feed(data))


def test_errors_keep_their_type_and_words_and_strangers_are_named():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, JPagedError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = error_of(kind.__name__, "words")
        assert (type(error), str(error)) == (kind, "words")
    stranger = error_of("XlaRuntimeError", "words")
    assert (type(stranger), str(stranger)) == (EngineDeadError, "XlaRuntimeError: words")
