"""Rows that wait for their last result: the seam for whatever decides on the host how a sequence goes on.

An ordinary sequence needs nothing of the host between two tokens, so plans run ahead of results. A **dependent**
sequence can be planned again only when its last result has been read and something has been made of it: which beams
go on, which tokens a grammar allows next, how many drafts were right. Other sequences fill the steps in between.

    plan i       rows that are ready; from here they wait
    plan i+1     (other sequences)
    result i     `take`: what is made of it makes rows ready, at once or later
    plan i+3     `contribute`: what the device must know first; then the rows again

A kind of dependent rows is a subclass of `DependentRows`; a scheduler makes one object of each kind that it is given
(`Scheduler(kinds=...)`). To add one, for example a grammar whose rows wait for a mask:

    group_of     say which requests are of the kind: `SequenceGroup.form(request)` for them, None for others
    take         hand the new tokens to whatever makes the masks; return the rows, whose tokens are then stored,
                 reported and tested for their end like everybody's. Do not call `made_ready` before the mask is there:
                 half of the rows may be planned while the masks of the other half are being made
    made_ready   call it for slots whose mask has come, at the latest from `wait`
    wait         the engine has nothing else to do: wait for a mask
    contribute   put the masks of the planned rows into the plan. That needs a field of PlanInProgress and StepPlan, as
                 beams are one, and a step program that applies it.

A kind whose rows need nothing but their last result, such as drafts to verify, overrides only `group_of` and
`contribute`, and sets `most_tokens`. Beam search (`searches.py`) overrides nearly everything.

What a sequence group says of itself (`SequenceGroup.runs_together`, `forks_itself`, `can_be_stored`) decides how its
members get slots and blocks, and how they come back after a preemption: those that run together come back all at once,
others one by one, like everybody.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from jpaged.engine.interface import SamplingVariant, StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.plan_in_progress import PlanInProgress
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import FinishReason, Group, Request
from jpaged.engine.sequences.slots import Slots


class Ended(NamedTuple):
    """A sequence that its kind ends, with all tokens that it has generated."""

    request: Request
    token_ids: list[int]
    reason: FinishReason
    stop_reason: int | None


class Taken(NamedTuple):
    """What a kind has made of a step's results.

    rows: int64 [r]; those whose tokens are stored, reported and tested for their end as every sequence's are. The kind
        has dealt with the others.
    ended: sequences that are over.
    """

    rows: np.ndarray
    ended: list[Ended]


class DependentRows(ABC):
    """One kind of rows that wait for their last result. As it stands, rows are ready as soon as that has been read.

    Args:
        number: of the kind; `Slots.kind` of its rows.
        slots, blocks: the scheduler's. A kind may read all of them, and change what its own sequences have.

    most_tokens: that a result can bring to a row. How many do come, from none up, need not be known beforehand; with
        more than 1, the step's `tokens_per_row` bounds it as well, and max_num_batched_tokens must have room for them.
    """

    most_tokens: ClassVar[int] = 1

    def __init__(self, number: int, slots: Slots, blocks: BlockManager) -> None:
        self.number = number
        self._slots = slots
        self._blocks = blocks
        self._is_ready = np.zeros((len(slots.requests),), np.bool_)

    @classmethod
    @abstractmethod
    def group_of(cls, request: Request) -> SequenceGroup | None:
        """The group of a request that is of this kind; None for any other."""

    def admitted(self, group: Group) -> None:  # noqa: B027  # most kinds need not know
        """A group has got its slots. Its prompt, or all that it knows, is now computed in chunks."""

    def begins(self, group: Group, slots: Sequence[int]) -> None:
        """The step being planned computes the last known token of these slots: from here they wait for results.

        Of a group that forks itself only those that have computed the prompt are named.
        """
        for slot in slots:
            self._slots.begin_waiting(slot, self.number)

    def left(self, request: Request) -> None:
        """A sequence has ended, or lost its slot. It still has its slot's number here."""
        self._is_ready[request.slot] = False

    @property
    def num_due(self) -> int:
        """Tokens of each step's budget that are kept for rows of this kind, whether they run in it or not: they may
        become ready at any time, and decode rows are never left out of a step for want of budget.
        """
        return int(np.count_nonzero(self._slots.kind == self.number)) * self.most_tokens

    def rows(self) -> np.ndarray:
        """The slots that can be planned now, int64 [r]. Asked more than once for a plan."""
        return np.flatnonzero(self._is_ready)

    def planned(self, step_id: int, rows: np.ndarray) -> None:
        """The slots that `rows` named are in the step being planned."""
        self._is_ready[rows] = False

    def contribute(self, plan: PlanInProgress) -> None:  # noqa: B027  # drafts and masks do, toys need not
        """Adds what the device must be told before the rows of the plan run."""

    def variant(self, others: SamplingVariant) -> SamplingVariant:
        """The sampling program for a step with rows of this kind, given the least that does for all sequences."""
        return others

    def take(self, step_id: int, slots: np.ndarray, rows: np.ndarray, result: StepResult) -> Taken:
        """Takes in what a step found for rows of this kind. Called for each step that had such rows, also when none of
        them has its slot any more.

        Args:
            slots: int64 [rows]; by row of the step. rows: those of this kind that brought tokens; int64 [r].
        """
        self.made_ready(slots[rows])
        return Taken(rows, [])

    def made_ready(self, slots: np.ndarray) -> None:
        """What these slots waited for is there: int64 [n]. They have read their last result and have not ended."""
        self._is_ready[slots] = True

    def wait(self) -> bool:
        """Nothing can run and no result is awaited: waits until a row becomes ready. False: none will by itself."""
        return False


class Dependents:
    """The kinds of dependent rows that a scheduler has, as one."""

    def __init__(self, kinds: Sequence[type[DependentRows]], slots: Slots, blocks: BlockManager) -> None:
        self._slots = slots
        self._kinds = {number: kind(number, slots, blocks) for number, kind in enumerate(kinds, start=1)}
        self.counts_vary = any(kind.most_tokens > 1 for kind in kinds)  # whether a row may bring no token at all
        self._kind_of: dict[str, DependentRows] = {}  # by request id, while the request is unfinished
        self._awaited: dict[int, set[int]] = {}  # kinds that have rows in a step, by step

    def __bool__(self) -> bool:
        """Whether any unfinished request has such rows."""
        return bool(self._kind_of)

    def group_of(self, request: Request) -> SequenceGroup:
        """The group of a new request, of whatever kind."""
        for kind in self._kinds.values():
            group = kind.group_of(request)
            if group is not None:
                self._kind_of[request.request_id] = kind
                return group
        return SequenceGroup.form(request)

    def of(self, request: Request) -> DependentRows | None:
        """The kind of a request's rows; None for an ordinary one."""
        return self._kind_of.get(request.request_id)

    def forget(self, request: Request) -> None:
        """The request has finished."""
        self._kind_of.pop(request.request_id, None)

    def rows(self) -> dict[int, np.ndarray]:
        """The slots that can be planned now, int64 [r] each, by the kind's number; kinds without are left out."""
        if not self._kind_of:
            return {}
        found = {number: kind.rows() for number, kind in self._kinds.items()}
        return {number: rows for number, rows in found.items() if len(rows)}

    def most_tokens(self, kinds: Iterable[int]) -> int:
        """The most tokens that rows of all these kinds can take of one result."""
        return min(self._kinds[number].most_tokens for number in kinds)

    def num_due(self) -> int:
        """As `DependentRows.num_due`."""
        return sum(kind.num_due for kind in self._kinds.values()) if self._kind_of else 0

    def planned(self, step_id: int, rows: dict[int, np.ndarray]) -> None:
        """All that `rows` named is in the step being planned."""
        for number, of_kind in rows.items():
            self._kinds[number].planned(step_id, of_kind)

    def contribute(self, plan: PlanInProgress) -> None:
        """As `DependentRows.contribute`; and the plan's results are awaited from here."""
        if self._kind_of:
            for kind in self._kinds.values():
                kind.contribute(plan)
        if plan.kinds:
            self._awaited[plan.step_id] = plan.kinds

    def variant(self, others: SamplingVariant, kinds: set[int]) -> SamplingVariant:
        """As `DependentRows.variant`, for a step with rows of these kinds."""
        for number in sorted(kinds):
            others = self._kinds[number].variant(others)
        return others

    def awaits(self, step_id: int) -> bool:
        """Whether a step has rows of these kinds."""
        return step_id in self._awaited

    def take(self, step_id: int, slots: np.ndarray, rows: np.ndarray, result: StepResult) -> Taken:
        """Hands a step's results to the kinds that have rows in it; returns the rows that are to go on as all do, and
        the sequences that are over.
        """
        awaited = self._awaited.pop(step_id)
        kind_of_row = self._slots.kind[slots[rows]]
        ordinary, ended = [rows[~np.isin(kind_of_row, list(awaited))]], []
        for number in sorted(awaited):
            taken = self._kinds[number].take(step_id, slots, rows[kind_of_row == number], result)
            ordinary.append(taken.rows)
            ended += taken.ended
        return Taken(np.concatenate(ordinary), ended)

    def wait(self) -> bool:
        """As `DependentRows.wait`, of the first kind that will have rows."""
        return bool(self._kind_of) and any(kind.wait() for kind in self._kinds.values())
