"""Slots that lose the token that they sampled last; the body that computes them next is told so with its rows."""

from typing import NamedTuple

import numpy as np

from jpaged.engine.interface import NO_TOKEN, StepPlan


class Renewals(NamedTuple):
    """int32 [n] each: slots, their last tokens from now on, and by how many tokens they are shorter."""

    slots: np.ndarray
    tokens: np.ndarray
    backs: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> "Renewals":
        """Those of a plan (`StepPlan.mask_tokens`)."""
        some = np.flatnonzero(plan.mask_tokens != NO_TOKEN)
        return cls(plan.mask_slots[some], plan.mask_tokens[some], plan.mask_backs[some])

    def among(self, slots: np.ndarray) -> tuple[np.ndarray, "Renewals"]:
        """Those of some slots, int32 [r], all distinct: where they stand among these, int64 [n], and what they are."""
        if not len(self.slots) or not len(slots):
            return np.zeros((0,), np.int64), self._some(np.zeros((0,), np.int64))
        order = np.argsort(slots)
        found = np.searchsorted(slots, self.slots, sorter=order)
        rows = order[np.minimum(found, len(slots) - 1)]
        are_here = slots[rows] == self.slots
        return rows[are_here], self._some(are_here)

    def without(self, slots: np.ndarray) -> "Renewals":
        """Those of all other slots."""
        return self._some(~np.isin(self.slots, slots))

    def _some(self, which: np.ndarray) -> "Renewals":
        return Renewals(*(field[which] for field in self))
