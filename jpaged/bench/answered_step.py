"""Steps whose results are known when they are dispatched, for executors that stand for a device."""

import numpy as np

from jpaged.engine.interface import NO_TOKEN, FinishCode, StepPlan, StepResult


class AnsweredStep:
    """A `StepHandle` that nobody waits for."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class DeviceSequences:
    """What a device keeps of sequences, as far as their lengths go.

    lengths, limits: int64 [slots]; tokens that each has, and how many it may have.
    """

    def __init__(self, slots: int) -> None:
        self.lengths = np.zeros((slots,), np.int64)
        self.limits = np.zeros((slots,), np.int64)

    def begin(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Takes in the sequences that a plan starts. Returns the slot of each of its rows, and whether it samples."""
        for start in plan.starts:
            self.lengths[start.slot] = len(start.token_ids)
            self.limits[start.slot] = start.max_len
        rows = plan.decode_slots
        samples = np.ones((plan.num_rows,), np.bool_)
        if plan.chunks:
            rows = np.concatenate([rows, np.array([chunk.slot for chunk in plan.chunks], np.int32)])
            samples[len(plan.decode_slots) :] = [chunk.samples for chunk in plan.chunks]
        return rows, samples

    def answer(self, rows: np.ndarray, samples: np.ndarray, tokens: np.ndarray | int) -> AnsweredStep:
        """The rows that sample get these tokens, one each; sequences at their limit end."""
        self.lengths[rows] += samples
        codes = ((self.lengths[rows] == self.limits[rows]) & samples).astype(np.uint8) * np.uint8(FinishCode.LENGTH)
        return AnsweredStep(StepResult(np.where(samples, tokens, NO_TOKEN).astype(np.int32)[:, None], codes))
