"""Short ways to build what the engine's tests need."""

from collections.abc import Sequence

import numpy as np

from jpaged.config import SchedulerConfig
from jpaged.engine.interface import StepPlan
from jpaged.engine.loop import EngineCore
from jpaged.engine.request import Request
from jpaged.engine.scheduler import RequestUpdate, Scheduler
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_executor import FakeExecutor, reference_tokens


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


class Engine:
    """A core with a fake executor, that collects what is reported and looks for damage after each step."""

    def __init__(self, *, seed: int = 0, **changes) -> None:
        self.config = make_config(**changes)
        self.scheduler = Scheduler(self.config, seed)
        self.executor = FakeExecutor(self.config)
        self.core = EngineCore(self.scheduler, self.executor)
        self.reported: dict[str, list[int]] = {}

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.core.add_request(request)

    def step(self) -> list[RequestUpdate]:
        updates = self.core.step()
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
        assert self.scheduler.pool.num_free == self.scheduler.pool.capacity
        assert self.scheduler.slots.num_used == 0


def name_of(request: Request) -> str:
    """The key of `Engine.reported`: the request's id, and for its further sequences the index as well."""
    return f"{request.request_id}/{request.index}" if request.index else request.request_id


def expected_tokens(request: Request) -> list[int]:
    return reference_tokens(request.prompt_token_ids, request.seed, request.max_len, request.stop_token_ids)


def assert_complete(*requests: Request) -> None:
    for request in requests:
        assert request.finished
        assert request.output_token_ids == expected_tokens(request)
