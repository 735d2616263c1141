"""The loop that dispatches just in time, before a device that takes its time: when steps begin, end and are planned."""

from collections.abc import Callable

import numpy as np
import pytest

from jpaged.engine.interface import StepPlan, StepResult
from jpaged.engine.loop import EngineCore
from jpaged.engine.pace import Pace
from jpaged.engine.scheduler.scheduler import Scheduler
from tests.engine.fake_executor import FakeExecutor, FakeHandle
from tests.engine.helpers import make_config, make_request


class Device:
    """Runs steps one behind the other; dispatching one takes the host's time, and reading one all until its end.

    Attributes:
        idle_s: time between steps in which it had nothing to do, though requests were there.
        queued: at each dispatch, the steps that had not ended.
    """

    def __init__(
        self, executor: FakeExecutor, step_s: Callable[[StepPlan], float], dispatch_s: Callable[[], float]
    ) -> None:
        self.now = 0.0
        self.idle_s = 0.0
        self.queued: list[int] = []
        self._executor, self._step_s, self._dispatch_s = executor, step_s, dispatch_s
        self._ends: list[float] = []

    def execute(self, plan: StepPlan) -> "Running":
        self.now += self._dispatch_s()
        self.queued.append(sum(end > self.now for end in self._ends))
        last = self._ends[-1] if self._ends else self.now
        self.idle_s += max(0.0, self.now - last)
        self._ends.append(max(self.now, last) + self._step_s(plan))
        return Running(self, self._executor.execute(plan), self._ends[-1])


class Running:
    def __init__(self, device: Device, handle: FakeHandle, end: float) -> None:
        self._device, self._handle, self._end = device, handle, end

    def is_ready(self) -> bool:
        return self._device.now >= self._end

    def result(self) -> StepResult:
        self._device.now = max(self._device.now, self._end)
        return self._handle.result()


class Served:
    """A core driven as the engine process drives it: it waits whole milliseconds for requests while it can.

    tell_s: what telling tokens takes. dispatch_s: what dispatching a step takes. wake_s: how late every wait ends.
    """

    def __init__(
        self,
        step_s: Callable[[StepPlan], float],
        pipeline_depth: int = 2,
        tell_s: float = 0.0,
        dispatch_s: float | Callable[[], float] = 0.0005,
        wake_s: float = 0.0,
    ) -> None:
        config = make_config(num_blocks=512, max_model_len=256, pipeline_depth=pipeline_depth)
        self.executor = FakeExecutor(config)
        self.device = Device(self.executor, step_s, dispatch_s if callable(dispatch_s) else lambda: dispatch_s)
        self.tell_s, self.wake_s = tell_s, wake_s
        self.core = EngineCore(Scheduler(config, 0), self.device, Pace(lambda: self.device.now))

    def run(self, until: float, arrivals: dict[str, float] | None = None) -> None:
        """Until a time, or until nothing is left. Requests arrive at the times given."""
        expected = sorted((arrivals or {}).items(), key=lambda arrival: arrival[1])
        while self.device.now < until and (self.core.has_unfinished() or expected):
            while expected and expected[0][1] <= self.device.now:
                self.core.add_request(make_request(expected.pop(0)[0], 4, 20))
            spare_ms = int(self.core.spare_s() * 1000)
            if spare_ms > 0:
                soon = self.device.now + spare_ms / 1000 + self.wake_s
                self.device.now = min(soon, expected[0][1]) if expected else soon
            else:
                if self.core.step(just_in_time=True):
                    self.device.now += self.tell_s

    def run_to_first_token(self, request_id: str) -> None:
        """Serves one request, whose client has enough with its first token and says so a millisecond later."""
        request = make_request(request_id, 4, 20)
        self.core.add_request(request)
        while not request.output_token_ids:
            self.run(until=self.device.now + 0.001)
        self.run(until=self.device.now + 0.001)
        self.core.abort([request_id])

    def idle(self, seconds: float) -> None:
        self.core.spare_s()
        self.device.now += seconds

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
    assert started * 0.010 - begun < 0.010 + 0.5 * 0.010


@pytest.mark.parametrize(
    ("step_ms", "tell_ms"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (7, 0), (7, 4), (20, 0), (20, 5), (20, 12)]
)
def test_the_device_never_waits_though_steps_vary_and_telling_tokens_takes_time(step_ms, tell_ms):
    rng = np.random.default_rng(step_ms)

    def step_s(plan: StepPlan) -> float:
        return step_ms / 1000 * rng.uniform(0.9, 1.1) * (3 if plan.chunks else 1)

    served = Served(step_s, tell_s=tell_ms / 1000)
    for i in range(4):
        served.core.add_request(make_request(f"first {i}", 4, 200))
    arrivals = {f"later {i}": 0.02 + 0.017 * i for i in range(20)}
    served.run(until=1.0, arrivals=arrivals)
    assert len(served.executor.plans) > 40
    assert served.device.idle_s == pytest.approx(0, abs=0.0005)


def test_a_host_that_is_slow_to_dispatch_begins_earlier():
    served = Served(lambda plan: 0.012, dispatch_s=0.005)
    served.core.add_request(make_request("a", 4, 100))
    served.run(until=2.0)
    assert not served.core.has_unfinished()
    assert served.device.idle_s < 0.010  # once, before it is known


@pytest.mark.parametrize(("slow_s", "share"), [(0.002, 0.98), (0.004, 0.65)])
def test_for_a_host_that_is_slow_now_and_then_the_device_waits_rarely_and_requests_for_one_step(slow_s, share):
    rng = np.random.default_rng(0)
    served = Served(lambda plan: 0.005, tell_s=0.0005, dispatch_s=lambda: slow_s if rng.random() < 0.1 else 0.0007)
    for i in range(10):
        served.core.add_request(make_request(str(i), 4, 200))
        served.run(until=served.device.now + 60)
    assert len(served.device.queued) > 1900
    assert served.device.idle_s < 0.0075 * served.device.now
    assert np.mean(np.array(served.device.queued) <= 1) > share


def test_what_is_expected_follows_steps_that_have_become_much_shorter():
    times = iter([0.030] * 20 + [0.010] * 1000)
    served = Served(lambda plan: next(times))
    served.core.add_request(make_request("a", 4, 200))
    served.run(until=10.0)
    assert not served.core.has_unfinished()
    assert served.device.idle_s < 0.030  # 0.020 is what the first alone may cost
    assert set(served.device.queued[30:]) == {1}


def test_what_is_expected_follows_shorter_steps_though_the_host_is_woken_late_every_time():
    times = iter([0.030] * 20 + [0.010] * 1000)
    served = Served(lambda plan: next(times), wake_s=0.010)
    served.core.add_request(make_request("a", 4, 200))
    served.run(until=10.0)
    assert not served.core.has_unfinished()
    assert served.device.idle_s < 0.1 * served.device.now


def test_one_slow_step_does_not_make_the_next_late():
    times = iter([0.010, 0.010, 0.010, 0.030] * 100)
    served = Served(lambda plan: next(times))
    served.core.add_request(make_request("a", 4, 100))
    served.run(until=3.0)
    assert not served.core.has_unfinished()
    assert served.device.idle_s == pytest.approx(0, abs=0.0005)


def test_time_without_requests_is_not_taken_for_the_time_of_steps_that_outlived_theirs():
    served = Served(lambda plan: 0.006)
    served.core.add_request(make_request("long", 4, 50))
    served.run(until=10.0)
    for i in range(8):
        served.run_to_first_token(f"short {i}")
        assert served.core.scheduler.num_in_flight > 0
        served.idle(10.0)
    begun = served.device.now
    served.core.add_request(make_request("next", 4, 30))
    served.run(until=begun + 100)
    assert served.device.now - begun < 31 * 0.006 + 0.010


def test_time_without_requests_is_no_part_of_a_turn():
    served = Served(lambda plan: 0.010)
    for i in range(2):
        served.device.queued.clear()
        served.core.add_request(make_request(str(i), 4, 30))
        served.run(until=served.device.now + 10.0)
        served.idle(10.0)
    assert set(served.device.queued[6:]) == {1}


def test_a_host_that_is_woken_late_again_and_again_costs_few_steps_more_time():
    served = Served(lambda plan: 0.008, wake_s=0.010)
    served.core.add_request(make_request("a", 4, 200))
    served.run(until=10.0)
    assert not served.core.has_unfinished()
    assert served.device.idle_s < 0.2 * 200 * 0.008  # each time would be as much as the steps themselves


def test_of_short_steps_as_many_are_queued_as_the_pipeline_is_deep():
    served = Served(lambda plan: 0.0009)
    served.core.add_request(make_request("a", 4, 200))
    served.run(until=0.15)
    assert np.median(served.device.queued[10:]) == 2


def test_where_telling_tokens_takes_most_of_a_step_the_queue_is_deep():
    served = Served(lambda plan: 0.007, tell_s=0.0062)
    served.core.add_request(make_request("a", 4, 200))
    served.run(until=1.0)
    assert np.median(served.device.queued[10:]) == 2


def test_a_host_that_was_stuck_for_a_while_is_soon_trusted_again():
    turns = iter([0.030] * 40 + [0.0005] * 1000)
    served = Served(lambda plan: 0.010, dispatch_s=lambda: next(turns))
    for i in range(4):
        served.core.add_request(make_request(str(i), 4, 250))
    served.run(until=20.0)
    assert len(served.device.queued) > 200
    assert set(served.device.queued[40 + 100 :]) == {1}


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
    assert served.device.idle_s == pytest.approx(0, abs=0.0005)


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
