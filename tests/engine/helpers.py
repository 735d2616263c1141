"""Short ways to build what the engine's tests need."""

from collections.abc import Sequence

import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.interface import BlockMemory, StepPlan
from jpaged.engine.loop import EngineCore
from jpaged.engine.scheduler.scheduler import RequestUpdate, Scheduler
from jpaged.engine.sequences.request import Request
from tests.engine.fake_executor import VOCAB_SIZE, FakeExecutor, fingerprint, logprob_of, reference_tokens


def make_config(**changes) -> SchedulerConfig:
    values = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "pipeline_depth": 0,
    }
    return SchedulerConfig(**(values | changes))


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    max_tokens: int | None = 8,
    *,
    priority: int = 0,
    salt=None,
    **sampling,
) -> Request:
    """`prompt` may be a length: then the tokens are distinct from those of requests with other ids."""
    if isinstance(prompt, int):
        prompt = np.random.default_rng(list(request_id.encode())).integers(0, 2**30, prompt)
    values = {"temperature": 0.0, "output_kind": RequestOutputKind.DELTA} | sampling
    params = SamplingParams(max_tokens=max_tokens, **values)
    return Request(request_id, prompt, params, priority=priority, cache_salt=salt)


def make_search(
    request_id: str, prompt: int | Sequence[int], beam_width: int, max_tokens: int = 8, *, priority: int = 0, **params
) -> Request:
    """A beam search; otherwise as `make_request`."""
    beam = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens, **params)
    if isinstance(prompt, int):
        prompt = np.random.default_rng(list(request_id.encode())).integers(0, 2**30, prompt)
    return Request(request_id, prompt, beam.sampling_params(), priority=priority, beam=beam)


class Engine:
    """A core with a fake executor, that collects what is reported and looks for damage after each step."""

    def __init__(
        self, *, seed: int = 0, rank=None, num_brought=None, kinds=(Searches,), executor=FakeExecutor, **changes
    ) -> None:
        self.config = make_config(**changes)
        self.executor = executor(self.config, rank=rank, num_brought=num_brought)
        memory = self.executor if isinstance(self.executor, BlockMemory) else None
        self.scheduler = Scheduler(self.config, seed, kinds=kinds, memory=memory)
        self.core = EngineCore(self.scheduler, self.executor)
        self.reported: dict[str, list[int]] = {}

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.core.add_request(request)

    def step(self) -> list[RequestUpdate]:
        return self._take(self.core.step())

    def preempt(self, request: Request, mode: str) -> None:
        """Preempts all running sequences of a request, as if blocks were short, when what is in flight is read."""
        scheduler = self.scheduler
        while scheduler.num_in_flight:
            plan, handle = self.core._in_flight.popleft()
            self._take(scheduler.update(plan, handle.result()))
        if running := request.group.running():
            scheduler.preemption.preempt(running, mode)
            self.core.check_integrity()

    def _take(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        assert len({name_of(update.request) for update in updates}) == len(updates)  # the last one says how it ended
        for update in updates:
            self.reported.setdefault(name_of(update.request), []).extend(update.new_token_ids)
        self.core.check_integrity()
        return updates

    def run(self, max_steps: int = 2000) -> None:
        """Until every request has finished and every result been read."""
        for _ in range(max_steps):
            if not self.core.has_unfinished() and not self.scheduler.num_in_flight:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_unfinished} requests left after {max_steps} steps")

    def table(self, request: Request) -> list[int]:
        return self.scheduler.slots.blocks(request.slot).tolist()

    def assert_idle(self) -> None:
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_present
        assert self.scheduler.slots.num_used == 0


def name_of(request: Request) -> str:
    """The key of `Engine.reported`: the request's id, and for its further sequences the index as well."""
    return f"{request.request_id}/{request.index}" if request.index else request.request_id


def expected_tokens(request: Request) -> list[int]:
    return reference_tokens(request.prompt_token_ids, request.seed, request.max_len, request.stop_token_ids)


def expected_beams(request: Request) -> list[tuple[list[int], float]]:
    """What a beam search must find: tokens and score of each sequence, best first. Written for clarity: every token of
    the vocabulary is a candidate of every beam.
    """
    beam = request.beam
    width, penalty, stops = beam.beam_width, beam.length_penalty, set(request.stop_token_ids)
    max_tokens = request.max_len - request.prompt_len
    last = 0
    for token in request.prompt_token_ids.tolist():
        last = fingerprint(last, token)
    live: list[tuple[np.float32, list[int], int]] = [(np.float32(0), [], last)]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        candidates = [
            (total + np.float32(logprob_of(last, token)), [*tokens, token], fingerprint(last, token))
            for total, tokens, last in live
            for token in range(VOCAB_SIZE)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        ends = [tokens[-1] in stops or length == max_tokens for _, tokens, _ in candidates]
        for (total, tokens, _), over in list(zip(candidates, ends, strict=True))[:width]:
            if over:
                finished.append((tokens, float(total / np.float32(length**penalty))))
        finished = sorted(finished, key=lambda found: -found[1])[:width]
        live = [candidate for candidate, over in zip(candidates, ends, strict=True) if not over][:width]
        if len(finished) == width and live:
            reach = max_tokens if beam.early_stopping == "never" and penalty > 0 else length
            best = float(live[0][0] / np.float32(reach**penalty))
            if beam.early_stopping is True or width == 1 or best <= finished[-1][1]:
                break
    return finished


def assert_found(*requests: Request) -> None:
    for request in requests:
        assert request.group.finished
        found = [(member.output_token_ids, member.score) for member in request.group.members]
        assert found == expected_beams(request)


def assert_complete(*requests: Request) -> None:
    for request in requests:
        assert request.finished
        assert request.output_token_ids == expected_tokens(request)
