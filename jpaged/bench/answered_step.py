"""A step whose result is known when it is dispatched: what executors return that stand for a device."""

from jpaged.engine.interface import StepResult


class AnsweredStep:
    """A `StepHandle` that nobody waits for."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result
