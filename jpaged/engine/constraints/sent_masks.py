"""What the device has been told of constrained slots, and what it is yet to be told: masks, and last tokens that are
others than those it has sampled.
"""

from collections.abc import Sequence

import numpy as np

from jpaged.engine.interface import NO_TOKEN
from jpaged.engine.plan_in_progress import PlanInProgress


class SentMasks:
    """By slot, bool [slots] each.

    is_open: whether the slot's row guesses under the mask that the device has: its token need not be allowed.
    refused: slots that are to lose the token that they sampled last. replaced: slots of which another token counts.
    """

    def __init__(self, num_slots: int) -> None:
        self._sent: list[np.ndarray | None] = [None] * num_slots
        self.is_open = np.zeros((num_slots,), np.bool_)
        self.refused = np.zeros((num_slots,), np.bool_)
        self.replaced = np.zeros((num_slots,), np.bool_)

    def send(
        self,
        plan: PlanInProgress,
        slots: np.ndarray,
        masks: Sequence[np.ndarray],
        are_open: np.ndarray,
        last_tokens: np.ndarray,
        num_further: np.ndarray,
    ) -> None:
        """Puts into a plan what the device does not have yet. Once a plan.

        slots: int64 [n], distinct. masks: of each. are_open: bool [n]; whether they are those of guesses. last_tokens:
            int32 [n]; of each slot's known ones, the last one that is not computed, or computed in vain. num_further:
            int64 [n]; how many tokens from there on the device has so computed.
        """
        sent = self._sent
        is_new = np.array([mask is not sent[slot] for slot, mask in zip(slots.tolist(), masks, strict=True)], np.bool_)
        num_lost = num_further + self.refused[slots]
        is_other = (num_lost > 0) | self.replaced[slots]
        which = np.flatnonzero(is_other | is_new)
        if not len(which):
            return
        told = slots[which]
        plan.masks = [masks[i] for i in which.tolist()]
        for slot, mask in zip(told.tolist(), plan.masks, strict=True):
            sent[slot] = mask
        self.is_open[told] = are_open[which]
        self.refused[told] = self.replaced[told] = False
        plan.mask_slots = told.astype(np.int32)
        plan.mask_tokens = np.where(is_other, last_tokens, NO_TOKEN)[which].astype(np.int32)
        plan.mask_backs = num_lost[which].astype(np.int32)

    def left(self, slot: int) -> None:
        """The slot is somebody else's from now on, or nobody's."""
        self._sent[slot] = None
        self.refused[slot] = self.replaced[slot] = False
