"""When the next step must be dispatched so that the device does not run dry.

A step is planned when it is dispatched, so a request that comes while steps are queued on the device waits for all of
them. Dispatched late, only just before the device needs it, a step takes in what has come until then:

    device    |======= step 1 =======|======= step 2 =======|
    host            ^ read 0              ^ dispatch 2, then read 1
                    |--- spare time ---|-lead-|

For that the end of step 1 must be foreseen. Decode steps follow each other with nearly the same rows and context, so
one takes about as long as those before it, and a step with prompt chunks takes longer than one without. The shortest
of the last few is what is expected: where that is too little, the next step is dispatched sooner than need be, and the
device still never waits. Of a step unlike those before nothing is expected.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jpaged.engine.interface import StepPlan

LEAD_S = 0.003
"""How long before the device runs out of work a step is dispatched, at least: for planning it, for dispatching its
programs (about a millisecond), and for whatever else keeps the host."""

LEAD_SHARE = 0.25
"""The same as a share of the expected step, since what the host has to do grows with it as well."""

_REMEMBERED = 4
_ALIKE = 0.75
"""Share of the rows of a remembered step that another must have to be expected to take as long."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    dispatched_at: float


class Pace:
    """Times the steps of a loop that reads them in order. `clock`: seconds, of any origin."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._read_at = clock()

    def dispatched(self, plan: StepPlan) -> None:
        """`plan` has joined the device's queue."""
        self._in_flight.append(_InFlight(plan, self._clock()))

    def read(self) -> None:
        """The oldest step's results have just come."""
        step, now = self._in_flight.popleft(), self._clock()
        rows = len(step.plan.decode_slots)
        if rows and not step.plan.chunks:
            self._recent.append((rows, now - max(step.dispatched_at, self._read_at)))
        self._read_at = now

    def spare_s(self) -> float:
        """Seconds from now for which the device has enough to do; zero or less if it is time for another step."""
        end, expected = self._read_at, 0.0
        for step in self._in_flight:
            expected = self._expected_s(step.plan)
            end = max(end, step.dispatched_at) + expected
        return end - max(LEAD_S, LEAD_SHARE * expected) - self._clock()

    def _expected_s(self, plan: StepPlan) -> float:
        rows = len(plan.decode_slots)
        alike = [seconds for others, seconds in self._recent if rows >= _ALIKE * others] if rows else []
        return min(alike, default=0.0)
