"""Rows whose last token the device computes before their masks are known.

The body of the next step needs no mask: only sampling does. So behind a step's sampling the device computes the tokens
that it has just drawn, while the host sees to the grammars; the next plan only samples.

    device   | body | sample | body, ahead  |        | sample | body, ahead  |
    host              read, ask, masks come, plan ---'          read, ...

A row whose token turns out to be another one, or none, or whose forced tokens are computed as a chunk, goes back by a
token and is computed again: beside the others, behind the next plan's sampling, which it waits for. Its keys and values
go to the same place. What was computed ahead of a plan that cannot use it, since it has chunks or other rows, is lost.
"""

import numpy as np

from jpaged.engine.interface import SamplingVariant
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.plan_in_progress import PlanInProgress
from jpaged.engine.sequences.slots import Slots

MOST_AHEAD = 256
"""More constrained rows than these run in halves instead: the device computes one while the host sees to the other."""
_LEAST_SHARE = 0.5
"""Of the rows that are ready, those that must have been computed ahead for a plan that only samples."""
_NEEDS_MORE = [variant for variant in SamplingVariant if variant > SamplingVariant.MASKED]


class RunAhead:
    """Keeps which slots the device has computed one token further than the plans so far say.

    is_further: bool [slots].
    """

    def __init__(self, number: int, slots: Slots, blocks: BlockManager) -> None:
        self._number, self._slots, self._blocks = number, slots, blocks
        self.is_further = np.zeros((len(slots.requests),), np.bool_)
        self._by_last_plan = np.zeros((len(slots.requests),), np.bool_)

    @property
    def is_worthwhile(self) -> bool:
        """Whether constrained rows run alone, not too many, and none of which needs more than a mask."""
        slots = self._slots
        return (
            0 < slots.num_used <= MOST_AHEAD
            and not any(slots.variant_counts[variant] for variant in _NEEDS_MORE)
            and int(np.count_nonzero(slots.kind == self._number)) == slots.num_used
        )

    @property
    def has_computed(self) -> bool:
        """Whether the last plan had tokens computed ahead."""
        return bool(self._by_last_plan.any())

    def computed(self, ready: np.ndarray) -> np.ndarray:
        """Those of these slots that were computed ahead, if they are worth a plan that only samples; else none."""
        some = ready[self.is_further[ready] & self._by_last_plan[ready]]
        return some if len(some) and len(some) >= _LEAST_SHARE * len(ready) else some[:0]

    def forget(self) -> None:
        """What the last plan had computed ahead is computed again."""
        self._by_last_plan[:] = False

    def changed(self, slots: np.ndarray) -> None:
        """The last token of these slots is another one than the device has drawn."""
        self._by_last_plan[slots] = False

    def left(self, slots: np.ndarray | int) -> None:
        """The device has ended these slots, or they start anew."""
        self.is_further[slots] = self._by_last_plan[slots] = False

    def plan(self, plan: PlanInProgress, rows: np.ndarray, waiting: np.ndarray, late: np.ndarray) -> np.ndarray:
        """Sets what the device computes after this plan's sampling. Returns the slots among it that are not in `rows`,
        int64 [n].

        rows: slots that sample in the plan. waiting: those that could run, but are not in the plan. late: those that
            cannot, as their masks are in the making, or it is not known yet whether their last token counts.
        """
        self._by_last_plan[:] = False
        samples_all = all(chunk.samples for chunk in plan.chunks)
        has_step = len(rows) or plan.chunks  # another plan computes nothing
        if not has_step or not samples_all or not self.is_worthwhile or not self._has_room(waiting).all():
            return waiting[:0]
        slots = self._slots
        late = late[slots.num_computed[late] == slots.num_known[late] - 1]
        others = np.concatenate([waiting, late[self._has_room(late)]])
        found = np.concatenate([rows[self._has_room(rows)], others])
        plan.run_ahead = found.astype(np.int32)
        self._by_last_plan[found] = True
        return others

    def _has_room(self, slots: np.ndarray) -> np.ndarray:
        """Whether the token behind all that is computed has a place that nobody else writes to, and another follows."""
        computed = self._slots.num_computed[slots]
        has_room = (computed < self._slots.capacity[slots]) & (computed < self._slots.end[slots])
        return has_room & self._blocks.own_last_blocks(slots)
