"""`ReplicatedEngine` and `LLM` over replicas that run in threads here, with an engine that computes nothing: what goes
over the pipes, and what comes of calls, refusals, aborts, interrupts and forks at any moment."""

import gc
import itertools
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, EngineArgs, PoolingParams, SamplingParams
from jpaged.api.errors import (
    EngineDeadError,
    InvalidParameterError,
    InvalidPromptError,
    OutOfMemoryError,
    UnsupportedParameterError,
)
from jpaged.api.outputs import CompletionOutput, RequestOutput, TargetScores
from jpaged.engine.limits import RequestLimits
from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import EngineStats
from jpaged.frontend.inputs import ProcessedInput
from jpaged.host.device_memory import MemoryNotSharedError
from jpaged.processes import engine_process, launch, weight_delivery
from jpaged.processes.pulse import Pulse
from jpaged.processes.replicas import ReplicatedEngine
from tests.support.fake_cuda import on_device

REFUSED_TOKEN = 99
PARAMS = SamplingParams(temperature=0, max_tokens=1)
ARGS = EngineArgs(data_parallel_size=2, skip_tokenizer_init=True, verbose=False)


class EchoEngine:
    """Stands for a replica's `LLMEngine`. Each step answers the oldest request with the last token of its prompt.

    held: while it is set, steps answer nothing. size: how often an answer repeats its prompt.
    num_blocks: that are left to requests; a pinned prefix takes one for each of its tokens.
    pins: has room for them, False where every pin is refused.
    """

    vocab_size, eos_token_ids = 100, (1,)
    default_sampling_params = SamplingParams()
    args = EngineArgs()
    startup = SimpleNamespace(on_first_use=None, device="a thread", seconds=dict[str, float](), on_gpu=False)
    has_prefix_cache = True
    core: ClassVar[None] = None

    def __init__(self) -> None:
        self.requests: dict[str, tuple[Request, list[int]]] = {}
        self.received: list[Request] = []
        self.num_answered = 0
        self.held = False
        self.size = 1
        self.num_blocks = 2000
        self.pinned: list[list[int]] = []
        self.pins = True
        self.weights: Any = None
        self.refuses: Exception | None = None
        self.startup = SimpleNamespace(**vars(EchoEngine.startup), give_back_weights=self.give_back_weights)
        self.slept_at_level_2 = False

    def check_awake(self) -> None:
        """It never sleeps."""

    def rest(self) -> bool:
        """It has no memory to give back."""
        return False

    def request_limits(self) -> RequestLimits:
        return RequestLimits(
            max_model_len=8000, max_num_seqs=16, max_num_batched_tokens=64, block_size=4, num_blocks=self.num_blocks
        )

    def queue(self, request: Request, checked: ProcessedInput) -> None:
        self.received.append(request)
        if checked.prompt_token_ids[0] == REFUSED_TOKEN:
            raise OutOfMemoryError("no room")
        self.requests[request.request_id] = request, checked.prompt_token_ids

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        if self.held:
            time.sleep(0.001)
            return []
        request_id, (request, tokens) = next(iter(self.requests.items()))
        del self.requests[request_id]
        self.num_answered += 1
        if request.score_targets is not None:
            scores = TargetScores(request.score_targets.astype(np.float32), request.score_targets % 2 == 0)
            return [RequestOutput(request_id, None, tokens, [], finished=True, scores=scores)]
        if request.pooling is not None:
            vector = request.prompt_token_ids.astype(np.float32)
            return [RequestOutput(request_id, None, tokens, [], finished=True, embedding=vector)]
        completion = CompletionOutput(0, "x" * self.size, tokens[-1:], finish_reason="length")
        return [RequestOutput(request_id, None, tokens, [completion], finished=True)]

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def get_metrics(self) -> EngineStats:
        counts = {field.name: self.num_answered for field in fields(EngineStats)}
        return EngineStats(**counts | {"step_tokens": (self.num_answered,), "expert_load": None})

    def pause(self) -> None:
        self.held = True

    def resume(self) -> None:
        self.held = False

    def reset_prefix_cache(self) -> bool:
        self.num_blocks = 2000
        self.pinned.clear()
        return True

    def pin_prefix(self, prompt: list[int], cache_salt: str | None) -> int:
        if not self.pins:
            raise OutOfMemoryError("no room for a pin")
        self.pinned.append(prompt)
        self.num_blocks -= len(prompt)
        return len(prompt)

    def unpin_prefix(self, prompt: list[int], cache_salt: str | None) -> bool:
        if prompt not in self.pinned:
            return False
        self.pinned.remove(prompt)
        self.num_blocks += len(prompt)
        return True

    def update_weights(self, weights: dict[str, np.ndarray], *, partial: bool, in_flight: str) -> None:
        if "surplus" in weights:
            raise InvalidParameterError("there is no place for 'surplus'")
        if self.refuses is not None:
            raise self.refuses
        self.weights = {name: array.tolist() for name, array in weights.items()}, partial, in_flight

    def give_back_weights(self) -> bool:
        if self.slept_at_level_2:
            self.weights = None
        return self.slept_at_level_2


class ReplicaThread:
    """Stands for a replica's process: serves what comes over the socket `fd`, with an `EchoEngine`."""

    def __init__(self, fd: int, ended: list[int]) -> None:
        self.engine = EchoEngine()
        self.pid = 0
        self._ended = ended
        self._thread = threading.Thread(target=self._run, args=(socket.socket(fileno=os.dup(fd)),), daemon=True)
        self._thread.engine = self.engine  # type: ignore[attr-defined]
        self._thread.start()

    def _run(self, sock: socket.socket) -> None:
        try:
            engine_process.serve([sock], Pulse.create())
        except EngineDeadError:
            pass  # its client has been told
        finally:
            sock.close()
            self._ended.append(0)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        pass


@pytest.fixture
def ended(monkeypatch) -> Iterator[list[int]]:
    """Replaces processes by threads; a list of exit codes of those that have ended."""
    codes: list[int] = []
    started: list[ReplicaThread] = []

    def start(fds: list[int], environment: dict[str, str]) -> ReplicaThread:
        _pulse, _control, client = fds
        started.append(ReplicaThread(client, codes))
        return started[-1]

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(launch, "_start", start)
    monkeypatch.setattr(engine_process, "LLMEngine", lambda args, **_: threading.current_thread().engine)  # type: ignore[attr-defined]
    yield codes
    wait_until(lambda: len(codes) == len(started))


@pytest.fixture
def engine(ended) -> Iterator[ReplicatedEngine]:
    engine = ReplicatedEngine(ARGS)
    yield engine
    for echo in echoes(engine):
        echo.held = False
    engine.close()


@pytest.fixture
def llm(ended) -> Iterator[LLM]:
    llm = LLM(**{name: getattr(ARGS, name) for name in ("data_parallel_size", "skip_tokenizer_init", "verbose")})
    yield llm
    llm.engine.close()


def echoes(engine: ReplicatedEngine) -> list[EchoEngine]:
    return [process.engine for process in engine._processes._processes]  # type: ignore[attr-defined]


def wait_until(happens: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run(engine: ReplicatedEngine) -> dict[str, int]:
    """The last token of each request's answer."""
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids[0] for output in engine.step()}
    return found


def assert_idle(engine: ReplicatedEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert engine._router.num_unfinished == sum(engine._router.outstanding) == 0


# --- what must not be lost or mixed up --------------------------------------------------------------------------------


def test_an_abort_drops_no_output_of_another_request(engine):
    echoes(engine)[1].held = True
    engine.add_request("finished", [2, 3], PARAMS)
    engine.add_request("aborted", [2, 4], PARAMS)
    wait_until(lambda: echoes(engine)[0].num_answered)
    engine.get_metrics()  # reads the output on the way to its answer
    engine.abort_request("aborted")
    assert run(engine) == {"finished": 3}
    assert_idle(engine)


def test_a_refusal_on_the_way_to_a_reply_is_for_step_and_replies_stay_with_their_questions(engine):
    engine.add_request("refused", [REFUSED_TOKEN], PARAMS)
    engine.add_request("served", [2, 3], PARAMS)
    wait_until(lambda: echoes(engine)[1].num_answered)
    assert engine.get_metrics().num_finished == 1
    assert engine.reset_prefix_cache() is True
    with pytest.raises(OutOfMemoryError, match=r"^Request 'refused': no room"):
        engine.step()
    assert run(engine) == {"served": 3}
    assert_idle(engine)


def test_a_question_that_was_broken_off_leaves_no_reply_to_the_next(engine, monkeypatch):
    def interrupt(replica: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.get_metrics()
    assert engine.reset_prefix_cache() is True


def test_an_interrupt_in_the_middle_of_a_message_ends_the_engine(engine, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    engine.add_request("a", [2], PARAMS)
    monkeypatch.setattr(engine._replicas[0].link, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    with pytest.raises(EngineDeadError, match="failed earlier"):
        engine.step()
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("others", [[], ["other"]], ids=["on the same replica", "on another"])
def test_an_aborted_requests_id_is_free_at_once_and_its_late_output_is_dropped(engine, others):
    for last_token in range(3, 20):
        answered = sum(echo.num_answered for echo in echoes(engine))
        for other in others:
            engine.add_request(other, [2], PARAMS)
        engine.add_request("a", [2, 2], PARAMS)
        wait_until(lambda answered=answered: sum(echo.num_answered for echo in echoes(engine)) > answered)
        engine.abort_request(["a", *others])
        engine.add_request("a", [2, last_token], PARAMS)
        assert run(engine) == {"a": last_token}
    assert_idle(engine)


def test_an_id_is_in_use_until_step_has_told_the_end(engine):
    engine.add_request("a", [2, 3], PARAMS)
    wait_until(lambda: echoes(engine)[0].num_answered)
    engine.get_metrics()
    with pytest.raises(InvalidParameterError, match="'a' is in use"):
        engine.add_request("a", [2, 4], PARAMS)
    assert run(engine) == {"a": 3}
    engine.add_request("a", [2, 4], PARAMS)
    assert run(engine) == {"a": 4}


def test_requests_can_be_added_while_nobody_reads_what_came_of_those_before(engine):
    for echo in echoes(engine):
        echo.size = 1 << 18
    prompt = [3] * 2000
    for i in range(100):  # outputs fill the sockets as soon as the first are done
        engine.add_request(str(i), prompt, PARAMS)
        if i == 10:
            wait_until(lambda: all(echo.num_answered for echo in echoes(engine)))
    for echo in echoes(engine):
        echo.size = 1
    assert len(run(engine)) == 100


def test_a_pause_reaches_every_replica(engine):
    engine.pause()
    assert [echo.held for echo in echoes(engine)] == [True, True]
    engine.resume()
    assert [echo.held for echo in echoes(engine)] == [False, False]


def test_a_prefix_that_a_replica_refuses_is_refused_by_pin_prefix_and_not_by_step(engine):
    engine.add_request("other", [2, 3], PARAMS)
    with pytest.raises(OutOfMemoryError, match="no room"):
        engine.pin_prefix([REFUSED_TOKEN, 5])
    assert run(engine) == {"other": 3}
    assert engine.pin_prefix([5, 6, 7]) == 3
    assert_idle(engine)


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_pin_that_one_replica_refuses_stays_on_none(engine, refusing):
    engine.pin_prefix([2, 3])
    echoes(engine)[refusing].pins = False
    with pytest.raises(OutOfMemoryError, match="no room for a pin"):
        engine.pin_prefix([5, 6, 7])
    assert [echo.pinned for echo in echoes(engine)] == [[[2, 3]]] * 2
    assert engine._inputs.limits.num_blocks == 2000 - 2, "what a request must keep to"
    assert engine.unpin_prefix([2, 3]) is True
    assert_idle(engine)


def test_every_replica_takes_new_weights_or_none_does(llm):
    llm.update_weights({"a": {"b": np.arange(3.0)}}, partial=True, in_flight="continue")
    taken = [({"a.b": [0.0, 1.0, 2.0]}, True, "continue")] * 2
    assert [echo.weights for echo in echoes(llm.engine)] == taken
    for weights, message in (({"surplus": np.ones(2)}, "no place for 'surplus'"), ({"a": 1}, "'a' is a int, not an")):
        with pytest.raises(InvalidParameterError, match=message):
            llm.update_weights(weights)
    with pytest.raises(InvalidParameterError, match="in_flight must be one of"):
        llm.update_weights({"a": np.ones(2)}, in_flight="never")
    with pytest.raises(UnsupportedParameterError, match="weights_as is for data_parallel_size=1"):
        llm.weights_as("huggingface")
    assert [echo.weights for echo in echoes(llm.engine)] == taken
    assert llm.generate([[2, 3]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == [3]


def test_replicas_read_weights_on_the_device_or_get_them_through_the_host(llm, cuda, caplog):
    caplog.set_level(logging.INFO, "jpaged.engine")
    for created, path in ((True, "on the device"), (False, "through the host")):  # a process opens no handle of its own
        weights = on_device(cuda, {"a": np.arange(3, dtype=np.float32) + created}, created)
        llm.update_weights(weights, partial=True)
        taken = [({"a": [0.0 + created, 1.0 + created, 2.0 + created]}, True, "recompute")] * 2
        assert [echo.weights for echo in echoes(llm.engine)] == taken
        assert ("an engine process cannot have them: cuIpcOpenMemHandle_v2" in caplog.text) == (not created), path


def test_weights_that_one_replica_has_no_memory_for_are_given_back_by_the_others(llm):
    for echo in echoes(llm.engine):
        echo.slept_at_level_2 = True
    echoes(llm.engine)[1].refuses = OutOfMemoryError("no room for weights")
    with pytest.raises(OutOfMemoryError, match="no room for weights"):
        llm.update_weights({"a": np.ones(2)})
    assert [echo.weights for echo in echoes(llm.engine)] == [None, None]
    echoes(llm.engine)[1].refuses = None
    llm.update_weights({"a": np.ones(2)})


def test_an_engine_of_which_only_some_replicas_took_the_weights_serves_no_more(llm):
    echoes(llm.engine)[1].refuses = InvalidParameterError("no descriptor to map them")
    with pytest.raises(InvalidParameterError, match="no descriptor"):
        llm.update_weights({"a": np.ones(2)})
    with pytest.raises(EngineDeadError, match="Only some replicas took the weights"):
        llm.generate([[2, 3]], PARAMS, use_tqdm=False)


def test_an_engine_of_which_some_replicas_cannot_get_the_weights_either_way_serves_no_more(llm, cuda, monkeypatch):
    real, number = engine_process.opened, itertools.count()

    @contextmanager
    def opened(message):
        if next(number):
            raise MemoryNotSharedError("it does not see it")
        with real(message) as views:
            yield views

    monkeypatch.setattr(engine_process, "opened", opened)
    monkeypatch.setattr(weight_delivery, "SharedWeights", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        llm.update_weights(on_device(cuda, {"a": np.ones(3, np.float32)}))
    with pytest.raises(EngineDeadError, match=r"Only some replicas took the weights \(no space left"):
        llm.generate([[2, 3]], PARAMS, use_tqdm=False)


# --- what is refused at the door --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.abort_request(5), "request_ids"),
        (lambda e: e.abort_request(None), "request_ids"),
        (lambda e: e.add_request(5, [2], PARAMS), "request_id"),
        (lambda e: e.add_request("", [2], PARAMS), "request_id"),
        (lambda e: e.add_request("a", [2], "greedy"), "params must be"),
        (lambda e: e.add_request("a", [2], PARAMS, arrival_time="now"), "arrival_time"),
        (lambda e: e.add_request("a", [2], PARAMS, arrival_time=float("nan")), "arrival_time"),
        (lambda e: e.add_request("a", [2], PARAMS, arrival_time=10**400), "arrival_time"),
        (lambda e: e.add_request("a", [2], PARAMS, arrival_time=threading.Lock()), "arrival_time"),
        (lambda e: e.add_request("a", [2], PARAMS, priority="high"), "priority"),
        (lambda e: e.add_request("a", [2], PARAMS, priority=2**63), "priority"),
        (lambda e: e.add_request("a", [2], PARAMS, priority=threading.Lock()), "priority"),
        (lambda e: e.add_request("a", [2], PARAMS, cache_salt=["x"]), "cache_salt"),
        (lambda e: e.add_request("a", [2], PARAMS, cache_salt="\ud800"), "cache_salt"),
        (lambda e: e.add_score_request("a", [2, 3], cache_salt={}), "cache_salt"),
        (lambda e: e.add_score_request(None, [2, 3]), "request_id"),
        (lambda e: e.pin_prefix([2, 3], cache_salt=[]), "cache_salt"),
        (lambda e: e.unpin_prefix([2, 3], cache_salt=7), "cache_salt"),
        (lambda e: e.sleep(True), "level must be an integer"),
        (lambda e: e.sleep("1"), "level must be an integer"),
        (lambda e: e.sleep(3), "level must be at most 2"),
        (lambda e: e.add_request("a", [2], SamplingParams(stop_token_ids=range(2, 66))), "stop_token_ids"),
        (lambda e: e.add_request("a", [2], BeamSearchParams(beam_width=20, max_tokens=2)), "beam_width"),
        (lambda e: e.add_request("a", [2], SamplingParams(n=17)), "n=17 exceeds max_num_seqs=16"),
        (lambda e: e.add_request("a", [2], SamplingParams(n=2, best_of=17)), "best_of=17 exceeds max_num_seqs=16"),
        (lambda e: e.add_request("a", [2], BeamSearchParams(beam_width=17, max_tokens=2)), "beam_width=17 exceeds"),
    ],
)
def test_what_an_engine_refuses_is_refused_here_and_nothing_is_sent_or_routed(engine, call, says):
    with pytest.raises(InvalidParameterError, match=says):
        call(engine)
    assert_idle(engine)
    assert engine.get_metrics().num_finished == 0  # and the replicas have read all that was sent
    assert [echo.received for echo in echoes(engine)] == [[], []]


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([2, 3], SamplingParams(n=17), r"prompts\[2\]: n=17 exceeds max_num_seqs=16"),
        ([2] * 8000, PARAMS, r"prompts\[2\]: The prompt has 8000 tokens; with max_model_len=8000"),
    ],
    ids=["sequences", "length"],
)
def test_a_prompt_that_no_replica_could_serve_is_named_and_none_of_the_others_has_been_sent(llm, prompt, params, says):
    with pytest.raises((InvalidParameterError, InvalidPromptError), match=says):
        llm.generate([[2, 3], [2, 4], prompt], [PARAMS, PARAMS, params], use_tqdm=False)
    assert_idle(llm.engine)
    llm.get_metrics()  # and the replicas have read all that was sent
    assert [echo.received for echo in echoes(llm.engine)] == [[], []]


@pytest.mark.parametrize("forget", ["unpin_prefix", "reset_prefix_cache"])
def test_what_pinned_prefixes_leave_of_the_least_pool_is_known_at_the_door(llm, forget):
    search, prefix = BeamSearchParams(beam_width=4, max_tokens=1000), [5] * 1500
    llm.beam_search([2, 3, 4, 5], search)
    echoes(llm.engine)[1].num_blocks -= 1
    llm.pin_prefix(prefix)
    sent = [len(echo.received) for echo in echoes(llm.engine)]
    with pytest.raises(OutOfMemoryError, match=r"^beam_width=4 may need 1001 blocks .* has 499; lower beam_width"):
        llm.beam_search([2, 3, 4, 5], search)
    assert [len(echo.received) for echo in echoes(llm.engine)] == sent
    getattr(llm, forget)(*[prefix] if forget == "unpin_prefix" else [])
    llm.beam_search([2, 3, 4, 5], search)


def test_aborting_what_is_no_request_changes_nothing(engine):
    engine.add_request("a", [2, 3], PARAMS)
    engine.abort_request([None, ["a"], "unknown"])
    assert run(engine) == {"a": 3}


class _Name(StrEnum):
    TENANT = "tenant"


class _Greedy(SamplingParams):
    pass


def test_replicas_get_plain_types_only_whatever_the_caller_has_made_of_them(engine):
    engine.add_request(
        _Name.TENANT,
        {"prompt": _Name.TENANT, "prompt_token_ids": np.array([2, 3])},
        _Greedy(temperature=0, max_tokens=np.int64(1), stop_token_ids=np.array([5]).tolist()),
        priority=np.int32(4),
        cache_salt=_Name.TENANT,
        arrival_time=Fraction(1, 2),
    )
    assert run(engine) == {"tenant": 3}
    [request] = [one for echo in echoes(engine) for one in echo.received]
    sent = [request.priority, request.cache_salt, request.stats.arrival_time]
    assert sent == [4, "tenant", 0.5]
    assert [type(value) for value in (request.sampling, *sent)] == [SamplingParams, int, str, float]
    assert type(SamplingParams(stop=[_Name.TENANT]).stop[0]) is str


def test_pooling_parameters_arrive_as_they_were_given_and_embeddings_come_back(engine):
    params = PoolingParams(pooling="mean", normalize=False)
    engine.add_request("a", [4, 5, 6], params, priority=3, cache_salt="x")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    [request] = [one for echo in echoes(engine) for one in echo.received]
    assert (request.pooling, request.samples, request.priority, request.cache_salt) == (params, False, 3, "x")
    [output] = outputs
    assert (output.embedding.tolist(), output.embedding.dtype, output.outputs) == ([4.0, 5.0, 6.0], np.float32, [])


def test_scored_tokens_arrive_as_they_were_given_and_their_scores_come_back(engine):
    engine.add_score_request("a", [4, 5, 6, 7], 2, priority=3, cache_salt="x")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    [request] = [one for echo in echoes(engine) for one in echo.received]
    assert request.prompt_token_ids.tolist() == [4, 5, 6]
    assert request.score_targets.tolist() == [6, 7]
    assert request.prompt_token_ids.dtype == request.score_targets.dtype == np.int32
    assert (request.priority, request.cache_salt) == (3, "x")
    [output] = outputs
    assert (output.request_id, output.prompt_token_ids, output.outputs) == ("a", [], [])
    assert (output.scores.logprobs.tolist(), output.scores.greedy.tolist()) == ([6.0, 7.0], [True, False])
    assert (output.scores.logprobs.dtype, output.scores.greedy.dtype) == (np.float32, np.bool_)


# --- threads, interrupts ----------------------------------------------------------------------------------------------


class _OneAtATime:
    """An engine that notices when it is called within a call."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._inside, self.overlaps = engine, 0, 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            self._inside += 1
            self.overlaps += self._inside > 1
            try:
                time.sleep(0.0005)  # so that another thread comes
                return value(*args, **options)
            finally:
                self._inside -= 1

        return call


def test_threads_never_reach_the_engine_at_once_and_metrics_come_between_steps(llm):
    llm.engine = watched = _OneAtATime(llm.engine)
    wrong: list[Any] = []

    def generate(i: int) -> None:
        for _ in range(5):
            outputs = llm.generate([[2, i]] * 5, PARAMS, use_tqdm=False)
            wrong.extend(o for o in outputs if o.outputs[0].token_ids != [i])

    def ask() -> None:
        for _ in range(10):
            if llm.pin_prefix([2, 3, 4]) != 3 or llm.unpin_prefix([2, 3]) or not llm.reset_prefix_cache():
                wrong.append("an answer to another question")
            if not isinstance(llm.get_metrics(), EngineStats):
                wrong.append("no metrics")

    def catching(function: Callable[..., None], *args: int) -> None:
        try:
            function(*args)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=catching, args=(generate, i)) for i in range(3, 6)]
    threads += [threading.Thread(target=catching, args=(ask,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert watched.overlaps == 0


def test_metrics_do_not_wait_for_the_end_of_another_threads_call(llm):
    for echo in echoes(llm.engine):
        echo.held = True
    thread = threading.Thread(target=lambda: llm.generate([[2, 3]], PARAMS, use_tqdm=False))
    thread.start()
    wait_until(llm.engine.has_unfinished_requests)
    assert llm.get_metrics().num_finished == 0
    assert thread.is_alive()
    for echo in echoes(llm.engine):
        echo.held = False
    thread.join()


class _InterruptingBar:
    """A progress bar during whose last update Ctrl-C comes."""

    def __init__(self, total: int, **options: Any) -> None:
        self._left = total

    def update(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGINT)

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def test_an_interrupt_is_never_lost_even_when_all_is_done(llm):
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[2, 3]] * 3, PARAMS, use_tqdm=_InterruptingBar)
    assert_idle(llm.engine)


@pytest.mark.parametrize("half", ["check_request", "queue"])
def test_an_interrupt_while_prompts_are_added_ends_the_call_and_leaves_nothing(llm, monkeypatch, half):
    added = []

    def add(*args: Any, **options: Any) -> Any:
        added.append(args)
        os.kill(os.getpid(), signal.SIGINT)
        return getattr(ReplicatedEngine, half)(llm.engine, *args, **options)

    monkeypatch.setattr(llm.engine, half, add)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[2, 3]] * 1000, PARAMS, use_tqdm=False)
    assert len(added) == 1
    assert_idle(llm.engine)


def test_an_interrupted_question_leaves_the_engine_usable(llm, monkeypatch):
    def ask(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return ReplicatedEngine._ask_all(llm.engine, *args)

    questions = [llm.get_metrics, llm.reset_prefix_cache, lambda: llm.pin_prefix([2]), lambda: llm.unpin_prefix([2])]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "_ask_all", ask)
        for question in questions:
            with pytest.raises(KeyboardInterrupt):
                question()
    assert llm.reset_prefix_cache() is True


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_closed_engine_says_so_and_closing_it_again_does_nothing(engine, ended):
    engine.add_request("a", [2], PARAMS)
    engine.close()
    engine.close()
    wait_until(lambda: ended == [0, 0])
    assert not engine.has_unfinished_requests()
    engine.abort_request("a")
    for call in (engine.step, engine.get_metrics, lambda: engine.add_request("b", [2], PARAMS)):
        with pytest.raises(EngineDeadError, match="was closed"):
            call()


def test_a_block_with_an_llm_ends_its_replicas(ended):
    with LLM(data_parallel_size=2, skip_tokenizer_init=True, verbose=False) as llm:
        assert len(llm.generate([2, 3], PARAMS, use_tqdm=False)) == 1
    wait_until(lambda: ended == [0, 0])
    for call in (lambda: llm.generate([2, 3], PARAMS), llm.get_metrics, llm.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="was closed"):
            call()


def test_replicas_end_when_nobody_has_the_engine_any_more(ended):
    llm = LLM(data_parallel_size=2, skip_tokenizer_init=True, verbose=False)
    gone = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert gone() is None
    wait_until(lambda: ended == [0, 0])


def test_a_message_that_a_replica_cannot_read_ends_the_engine_and_does_not_hang(engine):
    engine._replicas[0].link.send_frame(b"\3\0\0\0no!")
    with pytest.raises(EngineDeadError, match="A frame is no message"):
        engine.get_metrics()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of JAX, at a fork
def test_a_forked_process_has_no_part_in_the_replicas(engine, ended):
    read, write = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        try:
            engine.step()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os.read(wait, 1)
        os._exit(0)
    try:
        assert b"EngineDeadError: The replicas belong to the process" in os.read(read, 1000)
        engine.add_request("a", [2, 3], PARAMS)
        assert run(engine) == {"a": 3}
        engine.close()
        wait_until(lambda: ended == [0, 0])  # while the child is still there
    finally:
        os.write(go, b".")
        os.waitpid(child, 0)
        for fd in (read, write, wait, go):
            os.close(fd)
