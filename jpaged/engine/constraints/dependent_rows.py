"""Rows that wait for their last result: the seam for whatever decides on the host how a sequence goes on.

An ordinary sequence needs nothing of the host between two tokens, so plans run ahead of results. A **dependent**
sequence can be planned again only when its last result has been read and something has been made of it: which beams
go on, which tokens a grammar allows next, how many drafts were right. Other sequences fill the steps in between.

    plan i       rows that are ready; from here they wait
    plan i+1     (other sequences)
    result i     `take`: what is made of it makes rows ready, at once or later
    plan i+3     `contribute`: what the device must know first; then the rows again

A kind of dependent rows is a subclass of `DependentRows`; a scheduler makes one object of each kind that it is given
(`Scheduler(kinds=...)`). To add one whose rows wait for something made elsewhere, as `grammars.py` waits for masks:

    group_of     say which requests are of the kind: `SequenceGroup.form(request)` for them, None for others
    may_queue    a request that needs something first, such as a compiled grammar, waits for it outside the queue
    hand_over    a request whose rows the device can see to by itself becomes an ordinary one
    take         hand the new tokens to whatever makes the masks; return the rows, whose tokens are then stored,
                 reported and tested for their end like everybody's. Do not call `made_ready` before the mask is there:
                 half of the rows may be planned while the masks of the other half are being made
    collect      if `take` has held tokens back until something was known of them: those that count
    prepare      call `made_ready` for slots whose mask has come; return sequences that know further tokens already
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
from collections.abc import Callable, Iterable, Sequence
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
    stop_reason: int | str | None


class Taken(NamedTuple):
    """What a kind has made of a step's results.

    rows: int64 [r]; those whose tokens are stored, reported and tested for their end as every sequence's are. The kind
        has dealt with the others.
    ended: sequences that are over.
    before: known tokens, by slot, that are to be reported before those of this result.
    num_held: tokens of the other rows that `collect` may bring later.
    stopped: some of `rows`, whose tokens stop their sequences though the device does not know it.
    """

    rows: np.ndarray
    ended: list[Ended]
    before: dict[int, list[int]] = {}  # noqa: RUF012  # never written to
    num_held: int = 0
    stopped: Sequence[int] = ()


class Confirmed(NamedTuple):
    """Tokens that a kind has held back and that now count: of distinct slots, int64 [n], int32 [n].

    codes: uint8 [n]; the `FinishCode` that came with each. before: as of `Taken`. ended: slots whose sequences end with
    their tokens though the device goes on.
    """

    slots: np.ndarray
    token_ids: np.ndarray
    codes: np.ndarray
    before: dict[int, list[int]]
    ended: Sequence[int] = ()


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

    @abstractmethod
    def group_of(self, request: Request) -> SequenceGroup | None:
        """The group of a request that is of this kind; None for any other."""

    def may_queue(self, request: Request) -> bool:
        """Whether a new request of this kind may wait for its slots now, or needs something else first. Asked for each
        plan until it may.

        Raises:
            JPagedError: what it needs cannot be had; the request ends.
        """
        return True

    def hand_over(self, request: Request, others_run: bool) -> bool:
        """Makes a request that is about to get a slot an ordinary one, whose rows wait for nothing, if the device can
        do for it what this kind does. Returns whether it is one now.

        others_run: some ran before the plan that is being made, and wait for all that it brings.
        """
        return False

    def admitted(self, group: Group) -> None:  # noqa: B027  # most kinds need not know
        """Members of a group have got their slots. Their prompt, or all that they know, is now computed in chunks."""

    def begins(self, group: Group, slots: Sequence[int]) -> None:
        """The step being planned computes the last known token of these slots: from here they wait for results.

        Of a group that forks itself only those that have computed the prompt are named.
        """
        for slot in slots:
            self._slots.begin_waiting(slot, self.number)

    def leaves(self, request: Request) -> None:  # noqa: B027  # most kinds hold nothing back
        """A sequence is about to be preempted. What was held back of it is not counted as computed any more."""

    def left(self, request: Request) -> None:
        """A sequence has ended, or lost its slot. It still has its slot's number here."""
        self._is_ready[request.slot] = False

    def forgotten(self, group: Group) -> None:  # noqa: B027  # most kinds keep nothing
        """All sequences of a request of this kind have ended, or it is an ordinary one from now on."""

    def collect(self) -> Confirmed | None:
        """Takes in what was made elsewhere; called before `prepare`. Returns tokens that `take` has held back, which
        are now stored, reported and tested for their end, before `prepare` is called.
        """
        return None

    def settle(self) -> None:  # noqa: B027  # most kinds hold nothing back
        """Waits until `collect` brings all tokens that were held back and count."""

    def prepare(self, num_queued: int | None) -> list[Request]:
        """A plan is about to be made. Returns sequences of this kind that have come to know tokens without sampling
        them; these are computed in chunks, after which `begins` is called for them again. The kind has made sure that
        their blocks have room.

        num_queued: steps that the device has not ended yet, where the next one would have dependent rows alone. Rows
            may then be kept back, to run together with others that become ready. None where the step is made for other
            rows in any case.
        """
        return []

    def failed(self) -> list[tuple[Ended, list[int]]]:
        """Sequences that cannot go on, since the last call, and the last tokens of each that have not been reported."""
        return []

    @property
    def awaits(self) -> bool:
        """Whether something is made elsewhere that will make rows ready."""
        return False

    @property
    def has_news(self) -> bool:
        """Whether `collect`, `prepare` or `may_queue` would find what they did not find before."""
        return False

    @property
    def num_due(self) -> int:
        """Tokens of each step's budget that are kept for rows of this kind, whether they run in it or not: they may
        become ready at any time, and decode rows are never left out of a step for want of budget.
        """
        return int(np.count_nonzero(self._slots.kind == self.number)) * self.most_tokens

    @property
    def run_ahead(self) -> bool:
        """Whether rows that are planned now want a place for one token more than they compute (`run_ahead.py`)."""
        return False

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
        """Waits until a row becomes ready or a request may queue, or for a moment. False: none will by itself."""
        return False

    def forget_device(self) -> None:  # noqa: B027  # most kinds tell the device nothing but of sequences
        """What the device was told is there no more: another engine has run on it. No sequence has a slot."""

    def close(self) -> None:  # noqa: B027  # most kinds hold nothing
        """Nothing will be planned any more."""


MakeRows = Callable[[int, Slots, BlockManager], DependentRows]
"""Makes a scheduler's object of a kind: the kind itself, or what gives it further arguments."""


class Dependents:
    """The kinds of dependent rows that a scheduler has, as one."""

    def __init__(self, kinds: Sequence[MakeRows], slots: Slots, blocks: BlockManager) -> None:
        self._slots = slots
        self._kinds = {number: kind(number, slots, blocks) for number, kind in enumerate(kinds, start=1)}
        # Whether a row may bring no token at all.
        self.counts_vary = any(kind.most_tokens > 1 for kind in self._kinds.values())
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
        """The request has finished, or is an ordinary one from now on."""
        kind = self._kind_of.pop(request.request_id, None)
        if kind is not None:
            kind.forgotten(request.group)

    def may_queue(self, request: Request) -> bool:
        """As `DependentRows.may_queue`; an ordinary request always may."""
        kind = self._kind_of.get(request.request_id)
        return kind is None or kind.may_queue(request)

    def hand_over(self, request: Request, others_run: bool) -> None:
        """As `DependentRows.hand_over`."""
        kind = self._kind_of.get(request.request_id)
        if kind is not None and kind.hand_over(request, others_run):
            self.forget(request)

    def forget_device(self) -> None:
        """As `DependentRows.forget_device`."""
        for kind in self._kinds.values():
            kind.forget_device()

    def collect(self) -> list[Confirmed]:
        """As `DependentRows.collect`."""
        found = [kind.collect() for kind in self._kinds.values()] if self._kind_of else []
        return [one for one in found if one is not None]

    def settle(self) -> None:
        """As `DependentRows.settle`."""
        for kind in self._kinds.values() if self._kind_of else ():
            kind.settle()

    def prepare(self, num_queued: int | None) -> list[Request]:
        """As `DependentRows.prepare`."""
        return [request for kind in self._kinds.values() for request in kind.prepare(num_queued)]

    @property
    def awaits_news(self) -> bool:
        """As `DependentRows.awaits`."""
        return bool(self._kind_of) and any(kind.awaits for kind in self._kinds.values())

    def failed(self) -> list[tuple[Ended, list[int]]]:
        """As `DependentRows.failed`."""
        return [ended for kind in self._kinds.values() for ended in kind.failed()] if self._kind_of else []

    @property
    def has_news(self) -> bool:
        """As `DependentRows.has_news`."""
        return bool(self._kind_of) and any(kind.has_news for kind in self._kinds.values())

    def close(self) -> None:
        """As `DependentRows.close`."""
        for kind in self._kinds.values():
            kind.close()

    def rows(self) -> dict[int, np.ndarray]:
        """The slots that can be planned now, int64 [r] each, by the kind's number; kinds without are left out."""
        if not self._kind_of:
            return {}
        found = {number: kind.rows() for number, kind in self._kinds.items()}
        return {number: rows for number, rows in found.items() if len(rows)}

    @property
    def run_ahead(self) -> bool:
        """As `DependentRows.run_ahead`."""
        return bool(self._kind_of) and any(kind.run_ahead for kind in self._kinds.values())

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
        is_ordinary, ended = np.ones((len(rows),), np.bool_), []
        for number in awaited:
            is_ordinary &= kind_of_row != number
        ordinary = [rows[is_ordinary]]
        before: dict[int, list[int]] = {}
        num_held = 0
        stopped: list[int] = []
        for number in sorted(awaited):
            taken = self._kinds[number].take(step_id, slots, rows[kind_of_row == number], result)
            ordinary.append(taken.rows)
            ended += taken.ended
            before |= taken.before
            num_held += taken.num_held
            stopped += taken.stopped
        return Taken(np.concatenate(ordinary), ended, before, num_held, stopped)

    def wait(self) -> bool:
        """As `DependentRows.wait`, of the first kind that will have rows."""
        return bool(self._kind_of) and any(kind.wait() for kind in self._kinds.values())
