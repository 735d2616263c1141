"""What the device has been told of constrained slots, and what it is yet to be told: masks, and last tokens that are
others than those it has sampled.
"""

import numpy as np

from jpaged.engine.constraints.constrained_sequence import ANY
from jpaged.engine.interface import NO_TOKEN
from jpaged.engine.plan_in_progress import PlanInProgress


class SentMasks:
    """By slot.

    is_open: whether the slot's row guesses under the mask that the device has: its token need not be allowed.
    refused: slots that are to lose the token that they sampled last. replaced: slots of which another token counts.
    """

    def __init__(self, num_slots: int) -> None:
        self._sent: list[np.ndarray | None] = [None] * num_slots
        self.is_open = [False] * num_slots
        self.refused: set[int] = set()
        self.replaced: set[int] = set()

    def send(self, plan: PlanInProgress, slot: int, mask: np.ndarray | None, last_token: int, num_further: int) -> None:
        """Adds what the device does not have yet.

        mask: None: the slot is not at its constraint yet. last_token: of the slot's known ones, the last one that is
            not computed, or computed in vain. num_further: how many tokens from there on the device has so computed.
        """
        num_lost = num_further + (slot in self.refused)
        is_other = num_lost > 0 or slot in self.replaced
        if mask is None or (mask is self._sent[slot] and not is_other):
            return
        self._sent[slot] = mask
        self.is_open[slot] = mask is ANY or (mask.dtype == np.int32 and bool(mask[0] == NO_TOKEN))
        self.refused.discard(slot)
        self.replaced.discard(slot)
        plan.mask_slots.append(slot)
        plan.masks.append(mask)
        plan.mask_tokens.append(last_token if is_other else NO_TOKEN)
        plan.mask_backs.append(num_lost)

    def left(self, slot: int) -> None:
        """The slot is somebody else's from now on, or nobody's."""
        self._sent[slot] = None
        self.refused.discard(slot)
        self.replaced.discard(slot)
