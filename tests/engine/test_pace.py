"""The loop that dispatches just in time, before a device that takes its time: when steps begin, end and are planned."""

from collections.abc import Callable

import numpy as np
import pytest

from jpaged.engine.interface import StepPlan, StepResult
from jpaged.engine.loop import EngineCore
from jpaged.engine.pace import LEAD_S, Pace
from jpaged.engine.scheduler import Scheduler
from tests.engine.fake_executor import FakeExecutor, FakeHandle
from tests.engine.helpers import make_config, make_request

HOST_S = 0.0005
"""What a dispatch takes of the host."""


class Device:
    """Runs steps one behind the other; reading one moves the clock to its end.

    Attributes:
        idle_s: time between steps in which it had nothing to do, though requests were there.
        queued: at each dispatch, the steps that had not ended.
    """

    def __init__(self, executor: FakeExecutor, step_s: Callable[[StepPlan], float]) -> None:
        self.now = 0.0
        self.idle_s = 0.0
        self.queued: list[int] = []
        self._executor, self._step_s = executor, step_s
        self._ends: list[float] = []

    def execute(self, plan: StepPlan) -> "Running":
        self.now += HOST_S
        self.queued.append(sum(end > self.now for end in self._ends))
        last = self._ends[-1] if self._ends else self.now
        self.idle_s += max(0.0, self.now - last)
        self._ends.append(max(self.now, last) + self._step_s(plan))
        return Running(self, self._executor.execute(plan), self._ends[-1])


class Running:
    def __init__(self, device: Device, handle: FakeHandle, end: float) -> None:
        self._device, self._handle, self._end = device, handle, end

    def result(self) -> StepResult:
        self._device.now = max(self._device.now, self._end)
        return self._handle.result()


class Served:
    """A core driven as the engine process drives it: it waits whole milliseconds for requests while it can."""

    def __init__(self, step_s: Callable[[StepPlan], float], pipeline_depth: int = 2) -> None:
        config = make_config(num_blocks=512, max_model_len=256, pipeline_depth=pipeline_depth)
        self.executor = FakeExecutor(config)
        self.device = Device(self.executor, step_s)
        self.core = EngineCore(Scheduler(config, 0), self.device, Pace(lambda: self.device.now))

    def run(self, until: float, arrivals: dict[str, float] | None = None) -> None:
        """Until a time, or until nothing is left. Requests arrive at the times given."""
        expected = sorted((arrivals or {}).items(), key=lambda arrival: arrival[1])
        while self.device.now < until and (self.core.has_unfinished() or expected):
            while expected and expected[0][1] <= self.device.now:
                self.core.add_request(make_request(expected.pop(0)[0], 4, 20))
            spare_ms = int(self.core.spare_s() * 1000)
            if spare_ms > 0:
                soon = self.device.now + spare_ms / 1000
                self.device.now = min(soon, expected[0][1]) if expected else soon
            else:
                self.core.step(just_in_time=True)

    def start_of(self, request_id: str) -> int:
        """The index of the plan that a request of `arrivals` was taken into."""
        prompt = make_request(request_id, 4).prompt_token_ids.tolist()
        prompts = [[start.token_ids.tolist() for start in plan.starts] for plan in self.executor.plans]
        return next(i for i, of_plan in enumerate(prompts) if prompt in of_plan)


def test_a_request_waits_for_the_step_that_runs_and_no_other():
    served = Served(lambda plan: 0.010)
    served.core.add_request(make_request("first", 4, 200))
    served.run(until=0.1045)
    begun = served.device.now
    served.run(until=0.2, arrivals={"second": begun})
    started = served.start_of("second")
    assert started * 0.010 - begun < 0.010 + LEAD_S


@pytest.mark.parametrize("step_ms", [1, 2, 4, 7, 20])
def test_the_device_never_waits_though_steps_vary(step_ms):
    rng = np.random.default_rng(step_ms)
    served = Served(lambda plan: step_ms / 1000 * rng.uniform(0.9, 1.1) * (3 if plan.chunks else 1))
    for i in range(4):
        served.core.add_request(make_request(f"first {i}", 4, 200))
    arrivals = {f"later {i}": 0.02 + 0.017 * i for i in range(20)}
    served.run(until=1.0, arrivals=arrivals)
    assert len(served.executor.plans) > 40
    assert served.device.idle_s == pytest.approx(0, abs=HOST_S)


def test_one_slow_step_does_not_make_the_next_late():
    times = iter([0.010, 0.010, 0.010, 0.030] * 100)
    served = Served(lambda plan: next(times))
    served.core.add_request(make_request("a", 4, 100))
    served.run(until=3.0)
    assert not served.core.has_unfinished()
    assert served.device.idle_s == pytest.approx(0, abs=HOST_S)


def test_of_short_steps_as_many_are_queued_as_the_pipeline_is_deep():
    served = Served(lambda plan: 0.0015)
    served.core.add_request(make_request("a", 4, 200))
    served.run(until=0.15)
    assert np.median(served.device.queued[10:]) == 2


def test_of_long_steps_one_runs_when_the_next_is_dispatched():
    served = Served(lambda plan: 0.020)
    served.core.add_request(make_request("a", 4, 100))
    served.run(until=1.0)
    assert set(served.device.queued[10:]) == {1}


def test_nothing_is_expected_of_a_step_of_far_fewer_rows():
    served = Served(lambda plan: 0.004 * len(plan.decode_slots) or 0.004)
    requests = [make_request(str(i), 4, 8 if i else 60) for i in range(8)]  # seven end at once, one goes on
    for request in requests:
        served.core.add_request(request)
    served.run(until=2.0)
    assert not served.core.has_unfinished()
    assert served.device.idle_s == pytest.approx(0, abs=HOST_S)


def test_tokens_are_those_of_the_loop_that_runs_ahead():
    tokens = []
    for just_in_time in (False, True):
        served = Served(lambda plan: 0.006)
        requests = [make_request(str(i), 3 + i, 30 + i) for i in range(12)]
        for request in requests:
            served.core.add_request(request)
        while served.core.has_unfinished():
            served.device.now += max(0.0, served.core.spare_s()) if just_in_time else 0.0
            served.core.step(just_in_time=just_in_time)
        served.core.check_integrity()
        tokens.append([request.output_token_ids for request in requests])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_no_more_steps_are_in_flight_than_the_pipeline_is_deep(pipeline_depth):
    served = Served(lambda plan: 0.001, pipeline_depth)
    served.core.add_request(make_request("a", 4, 50))
    served.run(until=1.0)
    assert max(served.device.queued) <= pipeline_depth
