"""Slots that lose the token that they sampled last. The host sends this with the rows of the next body that computes
them."""

from typing import NamedTuple

import numpy as np

from jpaged.engine.interface import NO_TOKEN, StepPlan


class Renewals(NamedTuple):
    """Arrays int32 [n]: slots, their last tokens from now on, and how many computed tokens they lose."""

    slots: np.ndarray
    tokens: np.ndarray
    backs: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> "Renewals":
        """All of a plan's (`StepPlan.mask_tokens`)."""
        some = np.flatnonzero(plan.mask_tokens != NO_TOKEN)
        return cls(plan.mask_slots[some], plan.mask_tokens[some], plan.mask_backs[some])

    def among(self, slots: np.ndarray) -> tuple[np.ndarray, "Renewals"]:
        """The renewals of some slots, int32 [r], all distinct; before them their indices into `slots`, int64 [n]."""
        if not len(self.slots) or not len(slots):
            return np.zeros((0,), np.int64), self._some(np.zeros((0,), np.int64))
        order = np.argsort(slots)
        found = np.searchsorted(slots, self.slots, sorter=order)
        rows = order[np.minimum(found, len(slots) - 1)]
        are_here = slots[rows] == self.slots
        return rows[are_here], self._some(are_here)

    def without(self, slots: np.ndarray) -> "Renewals":
        """The renewals of all slots but these."""
        return self._some(~np.isin(self.slots, slots))

    def _some(self, which: np.ndarray) -> "Renewals":
        return Renewals(*(field[which] for field in self))
