"""When the next step must be dispatched so that the device does not run dry.

A step is planned when it is dispatched, so a request that comes while steps are queued on the device waits for all of
them. Dispatched late, only just before the device needs it, a step takes in what has come until then:

    device    ... step 0 |========== step 1 ==========|========== step 2 ==========|
    host           read 0 |-told-|-spare-|-2-|  read 1 |-told-|-spare-|-3-|  read 2
                          the tokens of 0  |
                                           '- planned and dispatched

For that the end of step 1 must be foreseen. Decode steps follow each other with nearly the same rows and context, so
one takes about as long as those before it, and a step with prompt chunks takes longer than one without. The shortest
of the last few is what is expected: where that is too little, the next step is dispatched sooner than need be, and the
device does not wait. Of a step unlike those before nothing is expected.

Where it was too much, or the host was late, step 1 has ended before its results are asked for, and how long it took is
not known: since then the host may have slept, for want of requests even. It counts as the time until then, or as two
thirds of what was expected if that is less. So where steps have become shorter, what is expected of them follows, even
if the host sleeps longer than it meant to every time, as on a busy machine; and a host that was late once dispatches a
few steps sooner than need be.

And the host must be done in time with its own part, telling tokens, planning and dispatching: as long as it took on
average is allowed for, and some slack. How much slack is learned as TCP learns its window: it doubles whenever a step
was dispatched after the device had run dry, and shrinks a little with every other. Where steps are too short for all
that, as many are queued as the pipeline is deep.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from jpaged.engine.interface import StepPlan

LEAST_SLACK_S, MOST_SLACK_S = 0.0005, 0.008
"""Between them is how long before the device runs out of work a step should have been dispatched."""

SLACK_SHARE = 0.15
"""The same as a share of the expected step, at least: for steps that vary."""

SHRINKING = 1 / 64
"""Of the slack with each step in time. So where the host's turns vary much, one step in fifty or so is late, by a
fraction of the slack.
"""

_IF_ENDED = 2 / 3
"""Of what was expected of a step that had ended before it was read counts no more than this. With all of it a host that
sleeps beyond its slack would go on to expect what steps took long ago; with half, one that is late now and then would
queue more steps than one.
"""

_REMEMBERED_STEPS = 4
_REMEMBERED_TURNS = 16
_ALIKE = 0.75
"""Share of the rows of a remembered step that another must have to be expected to take as long."""


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
        behind = [self._expected_s(step.plan) for step in list(self._in_flight)[1:]]
        return bool(behind) and sum(behind) > fmean(self._tellings) + self._lead_s(behind[-1])

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
        return fmean(self._dispatches) + self._slack(expected_s)

    def _slack(self, expected_s: float) -> float:
        return max(self._slack_s, SLACK_SHARE * expected_s)

    def _expected_s(self, plan: StepPlan) -> float:
        rows = len(plan.decode_slots)
        alike = [seconds for others, seconds in self._steps if rows >= _ALIKE * others] if rows else []
        return min(alike, default=0.0)
