"""Rows whose next token a grammar constrains: a kind of rows that wait for their last result.

    take          tokens -> maker      the host's cores make the masks, while other rows' steps run
    prepare       masks have come      rows are ready; what the grammar forces is appended, and computed as a chunk
    contribute    masks that changed -> plan

A sequence's guide says, after each token, which tokens may follow (a mask of bits), and which must: where there is only
one way to go on, its tokens need no step each. They become known tokens, which the next step computes together with the
last sampled one:

    known         ... | {  |            the last sampled token, not yet computed
    forced                   "na me":
    next step           {    "na me":   one chunk; the token after it is sampled under the mask for that place

Only what fits the sequence's last block is appended at once. For the rest, as for sequences whose every token must be
sampled (log-probabilities and penalties are by token), the mask has one bit. So a sequence's tokens do not depend on
how they came about.

Where all constrained rows are ready at once they are planned in two halves: while one half's step runs, the masks of
the other half are made.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.constraints.dependent_rows import DependentRows, Ended, Taken
from jpaged.engine.interface import FinishCode, SamplingVariant, StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.plan_in_progress import PlanInProgress
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Group, Request
from jpaged.engine.sequences.slots import Slots

LEAST_HALVED = 8
"""So many rows run in one step, even where all constrained rows are ready at once."""

_NO_SLOTS = np.zeros((0,), np.int64)
_PATIENCE_S = 0.01
"""The longest that ready rows wait for others whose masks are in the making."""
_ENOUGH = 3
"""A step is worth its while with one in so many of all constrained rows."""
_WAIT_S = 0.0005
"""The longest wait for a mask or a grammar before the engine looks for new requests."""


class Grammar(Protocol):
    """A compiled constraint: first come its forced tokens, then one that its mask, uint32 [words], allows."""

    forced: tuple[int, ...]
    mask: np.ndarray

    def begin(self, ignore_eos: bool) -> Any:
        """The guide of a new sequence: it stands behind the forced tokens. ignore_eos: as in `SamplingParams`."""
        ...


class Grammars(Protocol):
    """Compiles constraints and follows them; `jpaged.text.grammar_compiler` implements it.

    num_words: uint32 words of a mask.
    """

    num_words: int

    def compile(self, params: StructuredOutputsParams) -> "Future[Any]":
        """Compiles in a thread, unless it is known already. The future brings a Grammar, or raises JPagedError."""
        ...

    def advance(
        self, guides: Sequence[Any], token_ids: Sequence[int], masks: np.ndarray
    ) -> "Sequence[tuple[int, ...] | str]":
        """Moves each guide past a token, and past what this forces. No two calls at a time have a guide in common.

        masks: uint32 [n, words]; what may follow is written here.
        Returns: for each guide the forced tokens, or why it cannot go on.
        """
        ...

    def resume(self, guide: Any, token_ids: Sequence[int], mask: np.ndarray) -> "tuple[int, ...] | str":
        """Moves a guide past many tokens at once, forced ones included. mask: uint32 [words]; as of `advance`.

        Returns: the tokens that must follow these, or why the guide cannot go on.
        """
        ...

    def close(self) -> None:
        """Nothing will be asked for any more."""
        ...


class _Job(NamedTuple):
    slots: list[int]
    guides: list[Any]
    token_ids: list[int]
    before: list[np.ndarray]  # the last mask of each


class _Made(NamedTuple):
    """forced: as `Grammars.advance` returns it. masks: uint32 [words] each; the array of before where it is equal."""

    slots: list[int]
    forced: "Sequence[tuple[int, ...] | str]"
    masks: list[np.ndarray]


@dataclass(slots=True, eq=False)
class _Sequence:
    """One constrained sequence.

    forced: tokens that must come next. mask: uint32 [words]; what may come after them.
    skips: whether forced tokens may be appended without being sampled.
    unreported: appended tokens that its caller has not been told of.
    failure: why the grammar cannot be followed further.
    """

    guide: Any
    forced: deque[int]
    mask: np.ndarray
    skips: bool
    unreported: list[int] = field(default_factory=list)
    failure: str = ""


class ConstrainedRows(DependentRows):
    """Keeps the masks of constrained sequences and appends what their grammars force.

    grammars: compiles constraints and follows them.
    """

    def __init__(self, number: int, slots: Slots, blocks: BlockManager, grammars: Grammars) -> None:
        super().__init__(number, slots, blocks)
        num_slots = len(slots.requests)
        self._grammars = grammars
        self._compiling: dict[str, Future[Grammar]] = {}
        self._compiled: dict[str, Grammar] = {}
        self._sequences: dict[Request, _Sequence] = {}
        self._by_slot: list[_Sequence | None] = [None] * num_slots
        self._masks: list[np.ndarray | None] = [None] * num_slots  # what each slot's next token must keep to
        self._sent: list[np.ndarray | None] = [None] * num_slots  # what the device has
        self._is_catching_up = np.zeros((num_slots,), np.bool_)  # forced tokens are being computed
        self._in_making: set[int] = set()
        self._come: list[int] = []  # slots whose masks have come, but which are not ready yet
        self._planned = np.zeros((0,), np.int64)
        self._has_failed = False
        self._keeps_back = False  # rows that are ready wait for others
        self._waits_since: float | None = None  # when the first of them became ready
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Made | BaseException] = queue.SimpleQueue()
        self._news = threading.Event()
        self._maker: threading.Thread | None = None

    def group_of(self, request: Request) -> SequenceGroup | None:
        """The group of a request with structured_outputs, which begin to be compiled."""
        constraint = request.sampling.structured_outputs
        if constraint is None:
            return None
        future = self._grammars.compile(constraint)
        self._compiling[request.request_id] = future
        news = self._news  # what has compiled keeps the future, which must not keep this object
        future.add_done_callback(lambda _: news.set())
        return SequenceGroup.form(request)

    def may_queue(self, request: Request) -> bool:
        """Whether its grammar is compiled.

        Raises:
            JPagedError: it cannot be compiled.
        """
        future = self._compiling.get(request.request_id)
        if future is None:
            return True
        if not future.done():
            return False
        del self._compiling[request.request_id]
        self._compiled[request.request_id] = future.result()
        return True

    def admitted(self, group: Group) -> None:
        """Members of a group have got slots, for the first time or again."""
        for member in group.members:
            if member.slot < 0 or self._by_slot[member.slot] is not None:
                continue
            sequence = self._sequences.get(member)
            if sequence is None:
                grammar, sampling = self._compiled[member.request_id], member.sampling
                sequence = _Sequence(
                    grammar.begin(sampling.ignore_eos),
                    deque(grammar.forced),
                    grammar.mask,
                    skips=member.variant < SamplingVariant.FULL,
                )
                self._sequences[member] = sequence
                self._follow(sequence, member.output_token_ids)
            self._by_slot[member.slot] = sequence
            self._has_failed |= bool(sequence.failure)
            self._set_mask(member.slot, sequence)

    def _follow(self, sequence: _Sequence, token_ids: Sequence[int]) -> None:
        """Moves a new sequence past tokens that it has generated in another engine."""
        tokens = deque(token_ids)
        while sequence.forced and tokens:
            sequence.forced.popleft()
            tokens.popleft()
        if tokens:
            mask = np.zeros((self._grammars.num_words,), np.uint32)
            forced = self._grammars.resume(sequence.guide, tuple(tokens), mask)
            if isinstance(forced, str):
                sequence.failure, self._has_failed = forced, True
            else:
                sequence.forced, sequence.mask = deque(forced), mask

    def begins(self, group: Group, slots: Sequence[int]) -> None:
        """All that is known of these slots is computed, forced tokens included."""
        super().begins(group, slots)
        self._is_catching_up[slots] = False

    def left(self, request: Request) -> None:
        """A sequence has ended, or lost its slot: what it needs to go on in another is kept."""
        super().left(request)
        slot = request.slot
        while slot in self._in_making:
            self._take_made(self._results.get())
        if slot in self._come:
            self._come.remove(slot)
        self._by_slot[slot] = None
        self._is_catching_up[slot] = False
        self._masks[slot] = self._sent[slot] = None

    def forgotten(self, group: Group) -> None:
        """All sequences of a request have ended."""
        self._compiling.pop(group.members[0].request_id, None)
        self._compiled.pop(group.members[0].request_id, None)
        for member in group.members:
            self._sequences.pop(member, None)

    @property
    def num_due(self) -> int:
        """A token for each row, but for those whose forced tokens are in the queue of chunks."""
        return int(np.count_nonzero((self._slots.kind == self.number) & ~self._is_catching_up))

    def prepare(self, num_queued: int | None) -> list[Request]:
        """Takes in the masks that have come; returns the sequences whose forced tokens are to be computed."""
        self._collect()
        self._keeps_back = self._gains_company(num_queued)
        if self._keeps_back:
            return []
        come, self._come = self._come, []
        catching_up, ready = [], []
        for slot in come:
            sequence, request = self._by_slot[slot], self._slots.requests[slot]
            if sequence is None or request is None or sequence.failure:
                continue
            if self._append_forced(slot, sequence, request):
                catching_up.append(request)
            else:
                ready.append(slot)
            self._set_mask(slot, sequence)
        if ready:
            self.made_ready(np.array(ready, np.int64))
        return catching_up

    def _gains_company(self, num_queued: int | None) -> bool:
        """Whether rows that could run now will have run as soon, and with more others, if they are planned later.

        A step takes the host and the device hardly longer with more rows, so few large steps are best; two, so that one
        runs while the masks of the other's rows are made. Rows wait for slow masks of others at most `_PATIENCE_S`.
        """
        num_here = len(self._come) + int(np.count_nonzero(self._is_ready))
        if num_queued is None or not num_here:
            self._waits_since = None
            return False
        if num_queued > 1:
            return True
        if not self._in_making or _ENOUGH * num_here >= int(np.count_nonzero(self._slots.kind == self.number)):
            return False
        now = time.perf_counter()
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since < _PATIENCE_S

    def rows(self) -> np.ndarray:
        """The slots whose masks are there; of more than half of all constrained rows, a half."""
        if self._keeps_back:
            return _NO_SLOTS
        ready = np.flatnonzero(self._is_ready)
        if len(ready) > LEAST_HALVED:
            half = -(-int(np.count_nonzero(self._slots.kind == self.number)) // 2)
            ready = ready[: max(half, LEAST_HALVED)]
        return ready

    def planned(self, step_id: int, rows: np.ndarray) -> None:
        super().planned(step_id, rows)
        self._planned, self._waits_since = rows, None

    def contribute(self, plan: PlanInProgress) -> None:
        """Adds the masks that the device does not have yet, of the rows that sample in this plan."""
        rows, self._planned = self._planned, self._planned[:0]
        chunks = [c.slot for c in plan.chunks if c.samples and self._by_slot[c.slot] is not None]
        changed: dict[int, np.ndarray] = {}
        for slot in (*rows.tolist(), *chunks):
            mask = self._masks[slot]
            if mask is not None and mask is not self._sent[slot]:
                changed[slot] = self._sent[slot] = mask
        if changed:
            plan.mask_slots, plan.masks = np.array(list(changed), np.int32), np.stack(list(changed.values()))

    def variant(self, others: SamplingVariant) -> SamplingVariant:
        """A program that applies masks."""
        return SamplingVariant.FULL if others == SamplingVariant.BEAM else max(others, SamplingVariant.MASKED)

    def take(self, step_id: int, slots: np.ndarray, rows: np.ndarray, result: StepResult) -> Taken:
        """Hands the tokens of sequences that go on to the maker."""
        before: dict[int, list[int]] = {}
        job = _Job([], [], [], [])
        running = result.finish_codes[rows] == FinishCode.RUNNING
        tokens = result.token_ids[rows, 0]
        for slot, goes_on, token in zip(slots[rows].tolist(), running.tolist(), tokens.tolist(), strict=True):
            sequence = self._by_slot[slot]
            assert sequence is not None
            if sequence.unreported:
                before[slot], sequence.unreported = sequence.unreported, []
            if not goes_on:
                continue
            if sequence.forced:
                sequence.forced.popleft()
                self._come.append(slot)
            else:
                job.slots.append(slot)
                job.guides.append(sequence.guide)
                job.token_ids.append(token)
                job.before.append(sequence.mask)
        if job.slots:
            self._in_making.update(job.slots)
            self._start_maker()
            self._jobs.put(job)
        return Taken(rows, [], before)

    def failed(self) -> list[tuple[Ended, list[int]]]:
        """Sequences whose grammars could not be followed further, since the last call."""
        if not self._has_failed:
            return []
        self._has_failed = False
        ended = []
        for slot, sequence in enumerate(self._by_slot):
            request = self._slots.requests[slot]
            if sequence is not None and sequence.failure and request is not None:
                known = self._slots.known(slot)[request.prompt_len :].tolist()
                ended.append((Ended(request, known, "abort", sequence.failure), sequence.unreported))
        return ended

    @property
    def has_news(self) -> bool:
        """Whether `prepare` or `may_queue` would find something."""
        return self._news.is_set() or (bool(self._come) and not self._keeps_back)

    @property
    def awaits(self) -> bool:
        """Whether masks are in the making."""
        return bool(self._in_making)

    def wait(self) -> bool:
        """Waits a moment for masks and grammars in the making."""
        if (self._come and not self._keeps_back) or self._has_failed:
            return True
        if not self._in_making and not self._compiling:
            return False
        self._news.wait(_WAIT_S)
        return True

    def close(self) -> None:
        """Ends the thread that makes masks, and what it asks for them."""
        if self._maker is not None:
            self._jobs.put(None)
            self._maker = None
        self._grammars.close()

    def _collect(self) -> None:
        self._news.clear()
        while not self._results.empty():
            self._take_made(self._results.get())

    def _take_made(self, made: "_Made | BaseException") -> None:
        if isinstance(made, BaseException):
            raise made
        for slot, forced, mask in zip(made.slots, made.forced, made.masks, strict=True):
            self._in_making.discard(slot)
            sequence = self._by_slot[slot]
            if sequence is None:
                continue
            if isinstance(forced, str):
                sequence.failure, self._has_failed = forced, True
                continue
            sequence.forced.extend(forced)
            sequence.mask = mask
            self._come.append(slot)

    def _append_forced(self, slot: int, sequence: _Sequence, request: Request) -> bool:
        """Appends what is forced and fits the slot's last block. The sequence's last token is always sampled, so that
        the device ends it.
        """
        if not sequence.forced or not sequence.skips or not self._blocks.owns_last_block(slot):
            return False
        slots = self._slots
        known = int(slots.num_known[slot])
        most = min(int(slots.capacity[slot]) - known, request.max_len - 1 - known)
        some: list[int] = []
        while len(some) < most and sequence.forced and sequence.forced[0] not in request.stop_token_ids:
            some.append(sequence.forced.popleft())
        if not some:
            return False
        slots.append_forced(slot, some)
        if request.reports_each_token:
            request.output_token_ids.extend(some)
        sequence.unreported += some
        self._is_catching_up[slot] = True
        return True

    def _set_mask(self, slot: int, sequence: _Sequence) -> None:
        mask = sequence.mask
        if sequence.forced:
            mask = np.zeros_like(mask)
            mask[sequence.forced[0] // 32] = np.uint32(1 << sequence.forced[0] % 32)
        self._masks[slot] = mask

    def _start_maker(self) -> None:
        """The thread knows nothing of this object, so that it ends with it."""
        if self._maker is None:
            arguments = (self._grammars, self._jobs, self._results, self._news)
            self._maker = threading.Thread(target=_make, args=arguments, name="jpaged-masks", daemon=True)
            self._maker.start()
            weakref.finalize(self, self._jobs.put, None)


def _make(
    grammars: Grammars,
    jobs: "queue.SimpleQueue[_Job | None]",
    results: "queue.SimpleQueue[_Made | BaseException]",
    news: threading.Event,
) -> None:
    """In a thread: makes masks in the order in which they are asked for, until there is no job but None."""
    while (job := jobs.get()) is not None:
        masks = np.empty((len(job.slots), grammars.num_words), np.uint32)
        try:
            forced = grammars.advance(job.guides, job.token_ids, masks)
            kept = [
                before if np.array_equal(before, mask) else mask.copy()
                for before, mask in zip(job.before, masks, strict=True)
            ]
            results.put(_Made(job.slots, forced, kept))
        except BaseException as error:  # raised again where the results are read
            results.put(error)
        news.set()
