"""When the next step must be dispatched so that the device does not run dry.

A step is planned when it is dispatched, so a request that arrives while steps are queued on the device waits for all of
them. We therefore dispatch a step as late as the device allows, so that it includes the requests that came meanwhile:

    device    ... step 0 |========== step 1 ==========|========== step 2 ==========|
    host           read 0 |-told-|-spare-|-2-|  read 1 |-told-|-spare-|-3-|  read 2
                          the tokens of 0  |
                                           '- planned and dispatched

This needs an estimate of when step 1 ends. Consecutive decode steps have nearly the same rows and context, so they take
about the same time; steps with prompt chunks take longer. The estimate is the shortest of the last few decode steps. If
it is too short, the next step is dispatched earlier than necessary, and the device does not wait. A step unlike recent
ones gets an estimate of zero.

If the estimate was too long, or the host was late, step 1 has ended before its results are asked for. Its duration is
then unknown, because the host may have been asleep since it ended. We count the time until the results were asked for,
capped at two thirds of the estimate; without the cap, a host that keeps oversleeping would leave the device idle. So
the estimate follows when steps become shorter, and one late turn only makes the next few steps start early.

The host also needs time for its own part: telling tokens, planning and dispatching. We allow for its average duration
and for some slack. Slack is learned as TCP learns its window: it doubles whenever a step was dispatched after the
device had run dry, and shrinks a little with every other step. Where steps are too short for all that, as many steps
are queued as the pipeline is deep.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from jpaged.engine.interface import StepPlan

LEAST_SLACK_S, MOST_SLACK_S = 0.0005, 0.008
"""Bounds of the slack: how long before the device runs out of work a step should be dispatched."""

SLACK_SHARE = 0.15
"""The least slack as a share of the expected step, for steps whose durations vary."""

SHRINKING = 1 / 64
"""The share by which slack shrinks with each step that was in time. If the host's turns vary much, about one step in
fifty is late, by a fraction of the slack.
"""

_IF_ENDED = 2 / 3
"""The cap, as a share of the estimate, for a step that had ended before it was read. With 1, a host that oversleeps
would keep the estimate of long ago; with 1/2, a host that is late now and then would queue more than one step.
"""

_REMEMBERED_STEPS = 4
_REMEMBERED_TURNS = 16
_ALIKE = 0.75
"""A step with at least this share of a remembered step's rows is expected to take as long."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    dispatched_at: float


class Pace:
    """Times the turns of a loop that reads its steps in order. `clock`: seconds, of any origin.

    The host's part of a turn is telling, from `read` to `spare_s` or `begins`, and from `begins` to `dispatched`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_STEPS)  # rows, seconds
        self._tellings: deque[float] = deque([0.0], maxlen=_REMEMBERED_TURNS)
        self._dispatches: deque[float] = deque([0.0], maxlen=_REMEMBERED_TURNS)
        self._telling_s = self._dispatching_s = 0.0  # their means, which are asked for several times a turn
        self._slack_s = 4 * LEAST_SLACK_S
        self._read_at = self._begun_at = clock()
        self._telling = False
        self._told_s = 0.0

    def begins(self) -> None:
        """A step is about to be planned."""
        self._begun_at = self._clock()
        self._tell_until(self._begun_at)

    def dispatched(self, plan: StepPlan, was_late: bool) -> None:
        """`plan` has joined the device's queue. was_late: the device had done all that was in it before."""
        now = self._clock()
        self._tellings.append(self._told_s)
        self._dispatches.append(now - self._begun_at)
        self._telling_s, self._dispatching_s = fmean(self._tellings), fmean(self._dispatches)
        self._told_s = 0.0
        if was_late:
            self._slack_s = max(self._slack_s, min(2 * self._slack(self._expected_s(plan)), MOST_SLACK_S))
        else:
            self._slack_s = max(self._slack_s * (1 - SHRINKING), LEAST_SLACK_S)
        self._in_flight.append(_InFlight(plan, now))

    def read(self, had_ended: bool) -> None:
        """The oldest step's results have just come. had_ended: it had ended before anybody asked for them."""
        step, now = self._in_flight.popleft(), self._clock()
        rows = len(step.plan.decode_slots)
        if rows and not step.plan.chunks:
            seconds = now - max(step.dispatched_at, self._read_at)
            if had_ended:
                seconds = min(seconds, _IF_ENDED * self._expected_s(step.plan))
            self._steps.append((rows, seconds))
        self._read_at, self._telling = now, True

    def has_enough(self) -> bool:
        """Whether what is in flight behind the oldest step lasts for a turn of the host."""
        if len(self._in_flight) < 2:
            return False
        behind = [self._expected_s(step.plan) for step in list(self._in_flight)[1:]]
        return sum(behind) > self._telling_s + self._lead_s(behind[-1])

    def spare_s(self) -> float:
        """Seconds from now for which one step in flight is enough; zero or less if it is time for another step."""
        now = self._clock()
        self._tell_until(now)
        if len(self._in_flight) != 1:
            return 0.0
        step = self._in_flight[0]
        expected = self._expected_s(step.plan)
        return max(self._read_at, step.dispatched_at) + expected - self._lead_s(expected) - now

    def _tell_until(self, now: float) -> None:
        if self._telling:
            self._telling = False
            self._told_s += now - self._read_at

    def _lead_s(self, expected_s: float) -> float:
        """How long before the device runs out of work planning should begin."""
        return self._dispatching_s + self._slack(expected_s)

    def _slack(self, expected_s: float) -> float:
        return max(self._slack_s, SLACK_SHARE * expected_s)

    def _expected_s(self, plan: StepPlan) -> float:
        rows = len(plan.decode_slots)
        alike = [seconds for others, seconds in self._steps if rows >= _ALIKE * others] if rows else []
        return min(alike, default=0.0)
