"""Rows whose next token a grammar constrains: a kind of rows that wait for their last result.

    take          tokens -> maker      the host's cores make the masks, while other rows' steps run
    collect       guesses are checked  those that hold are stored and reported
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

**Guesses.** A row without truncation, log-probabilities or penalties may run without its mask: it samples among all
tokens. The token's noise depends on its seed and position alone, so if the token is allowed, it is the one that the
mask would have led to. The grammar is asked only whether it is: that takes microseconds, where a mask takes up to
milliseconds. Until it has said so the token is held back: nobody has seen it, and it may be dropped.

    step i        {"name": "Ada ?      sampled among all tokens; held back
    allowed                            it is stored and reported, and ends the sequence if it was to
    refused                            the slot goes back by a token, with the mask for this place, or without one:
    step i + n    {"name": "Ada L      the same position again; a second guess, which leaves out the first one's token

A slot that lost its last token computes the token before it again, into the place where that stands already. Layers
with recurrent states cannot go back, so models with them do not guess. `jpaged/text/guides.py` decides where a guess is
worth it.

Where all constrained rows are ready at once they are planned in two halves: while one half's step runs, the masks of
the other half are made.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jpaged.engine.constraints.dependent_rows import Confirmed, DependentRows, Ended, Taken
from jpaged.engine.constraints.mask_maker import Followed, Grammar, Grammars, Job, MaskMaker, MasksMade, Place
from jpaged.engine.interface import NO_TOKEN, FinishCode, SamplingVariant, StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.plan_in_progress import PlanInProgress
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Group, Request
from jpaged.engine.sequences.slots import Slots

LEAST_HALVED = 64
"""So many rows run in one step, even where all constrained rows are ready at once."""

_NO_SLOTS = np.zeros((0,), np.int64)
_PATIENCE_S = 0.01
"""The longest that ready rows wait for others whose masks are in the making."""
_ENOUGH = 3
"""A step is worth its while with one in so many of all constrained rows."""
_WAIT_S = 0.0005
"""The longest wait for a mask or a grammar before the engine looks for new requests."""


_ANY = np.array([NO_TOKEN], np.int32)
"""The mask of a row that guesses: all tokens. One that guesses again has all but those behind the first."""


class _Held(NamedTuple):
    """A token that was guessed, until it is known to be allowed. code: the `FinishCode` that came with it."""

    token: int
    code: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """One constrained sequence.

    forced: tokens that must come next. mask: what may come after them, as of `StepPlan.masks`.
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

    grammars: compiles constraints and follows them. guesses: whether rows may run without their masks; not where layers
    keep states of sequences.
    """

    def __init__(
        self, number: int, slots: Slots, blocks: BlockManager, grammars: Grammars, guesses: bool = False
    ) -> None:
        super().__init__(number, slots, blocks)
        num_slots = len(slots.requests)
        self._grammars, self._guesses = grammars, guesses
        self._maker = MaskMaker(grammars)
        self._compiling: dict[str, Future[Grammar]] = {}
        self._compiled: dict[str, Grammar] = {}
        self._sequences: dict[Request, _Sequence] = {}
        self._by_slot: list[_Sequence | None] = [None] * num_slots
        self._masks: list[np.ndarray | None] = [None] * num_slots  # what each slot's next token must keep to
        self._sent: list[np.ndarray | None] = [None] * num_slots  # what the device has
        self._is_open = [False] * num_slots  # under that mask a row guesses: its token need not be allowed
        self._is_catching_up = np.zeros((num_slots,), np.bool_)  # forced tokens are being computed
        self._in_making: set[int] = set()  # slots whose last token the maker has, or whose mask it makes
        self._held: dict[int, _Held] = {}  # guesses that it checks, by slot
        self._confirmed: dict[int, _Held] = {}  # those that are allowed, but not stored yet
        self._refused: set[int] = set()  # slots that are to go back by a token on the device, too
        self._come: list[int] = []  # slots whose masks have come, but which are not ready yet
        self._planned = np.zeros((0,), np.int64)
        self._has_failed = False
        self._keeps_back = False  # rows that are ready wait for others
        self._waits_since: float | None = None  # when the first of them became ready

    def group_of(self, request: Request) -> SequenceGroup | None:
        """The group of a request with structured_outputs, which begin to be compiled."""
        constraint = request.sampling.structured_outputs
        if constraint is None:
            return None
        future = self._grammars.compile(constraint)
        self._compiling[request.request_id] = future
        news = self._maker.news  # what has compiled keeps the future, which must not keep this object
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
                    grammar.begin(sampling.ignore_eos, self._may_guess(member)),
                    deque(grammar.forced),
                    grammar.mask,
                    skips=member.variant < SamplingVariant.FULL,
                )
                self._sequences[member] = sequence
                self._follow(sequence, member.output_token_ids)
            # The first token keeps to a mask: so no slot ever goes back into its prompt, whose blocks others share.
            self._by_slot[member.slot] = sequence
            self._has_failed |= bool(sequence.failure)
            self._set_mask(member.slot, sequence)

    def _may_guess(self, request: Request) -> bool:
        """Whether a token that is sampled among all, if it is allowed, is the one that its mask would have led to."""
        return self._guesses and request.variant <= SamplingVariant.SAMPLING

    def _follow(self, sequence: _Sequence, token_ids: Sequence[int]) -> None:
        """Moves a new sequence past tokens that it has generated in another engine."""
        tokens = deque(token_ids)
        while sequence.forced and tokens:
            sequence.forced.popleft()
            tokens.popleft()
        if tokens:
            place = self._grammars.resume(sequence.guide, tuple(tokens))
            sequence.forced.extend(place.forced)
            self._fail(sequence, place.failure)
            if not place.failure:
                made = self._grammars.make_masks([sequence.guide], [None]) if place.needs_mask else [_ANY]
                self._set_made(sequence, made[0])

    def _set_made(self, sequence: _Sequence, made: np.ndarray | str) -> None:
        """Takes a mask, or why there is none."""
        if isinstance(made, str):
            self._fail(sequence, made)
        else:
            sequence.mask = made

    def _fail(self, sequence: _Sequence, failure: str) -> None:
        sequence.failure, self._has_failed = failure, self._has_failed or bool(failure)

    def begins(self, group: Group, slots: Sequence[int]) -> None:
        """All that is known of these slots is computed, forced tokens included."""
        super().begins(group, slots)
        self._is_catching_up[slots] = False

    def leaves(self, request: Request) -> None:
        """Waits for what is in the making. A guess that is allowed, but was not stored, is a token that must come
        next: it is sampled again.
        """
        slot, sequence = request.slot, self._by_slot[request.slot]
        while slot in self._in_making:
            self._take_made(self._maker.take())
        held = self._confirmed.pop(slot, None)
        if held is not None and sequence is not None:
            sequence.forced.appendleft(held.token)
            self._slots.take_back(slot)

    def left(self, request: Request) -> None:
        """A sequence has ended, or lost its slot: what it needs to go on in another is kept."""
        super().left(request)
        self.leaves(request)
        slot = request.slot
        if slot in self._come:
            self._come.remove(slot)
        self._refused.discard(slot)
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

    def collect(self) -> Confirmed | None:
        """Takes in what has come from the maker. Returns the guesses that are allowed."""
        self._maker.news.clear()
        while self._maker.has_result:
            self._take_made(self._maker.take())
        if not self._confirmed:
            return None
        confirmed, self._confirmed = self._confirmed, {}
        before: dict[int, list[int]] = {}
        for slot in confirmed:
            sequence = self._by_slot[slot]
            if sequence is not None and sequence.unreported:
                before[slot], sequence.unreported = sequence.unreported, []
        tokens, codes = zip(*confirmed.values(), strict=True)
        return Confirmed(
            np.array(list(confirmed), np.int64), np.array(tokens, np.int32), np.array(codes, np.uint8), before
        )

    def settle(self) -> None:
        """Waits until no guess is to be checked."""
        while self._held:
            self._take_made(self._maker.take())

    def prepare(self, num_queued: int | None) -> list[Request]:
        """Rows whose masks have come, or who guess, are ready. Returns the sequences whose forced tokens are to be
        computed.
        """
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
        changed: list[int] = []
        for slot in (*rows.tolist(), *chunks):
            mask = self._masks[slot]
            if mask is None or mask is self._sent[slot]:
                continue
            self._sent[slot] = mask
            self._is_open[slot] = mask.dtype == np.int32 and bool(mask[0] == NO_TOKEN)
            changed.append(slot)
            plan.masks.append(mask)
            plan.mask_tokens.append(self._token_to_go_back_to(slot))
        plan.mask_slots += changed

    def _token_to_go_back_to(self, slot: int) -> int:
        """The token that is its last again, of a slot whose guess was refused; NO_TOKEN for others."""
        if slot not in self._refused:
            return NO_TOKEN
        self._refused.remove(slot)
        return int(self._slots.known(slot)[-1])

    def variant(self, others: SamplingVariant) -> SamplingVariant:
        """A program that applies masks."""
        return SamplingVariant.FULL if others == SamplingVariant.BEAM else max(others, SamplingVariant.MASKED)

    def take(self, step_id: int, slots: np.ndarray, rows: np.ndarray, result: StepResult) -> Taken:
        """Hands the tokens of sequences that go on to the maker, and those that were guessed, which are held back."""
        before: dict[int, list[int]] = {}
        job = Job([], [], [], [], [], [])
        is_told = np.ones((len(rows),), np.bool_)
        codes, tokens = result.finish_codes[rows].tolist(), result.token_ids[rows, 0].tolist()
        for i, (slot, code, token) in enumerate(zip(slots[rows].tolist(), codes, tokens, strict=True)):
            sequence = self._by_slot[slot]
            assert sequence is not None
            is_guess, goes_on = self._is_open[slot], code == FinishCode.RUNNING
            if is_guess:
                is_told[i] = False
                self._held[slot] = _Held(token, code)
            else:
                if sequence.unreported:
                    before[slot], sequence.unreported = sequence.unreported, []
                if not goes_on:
                    continue
                if sequence.forced:
                    sequence.forced.popleft()
                    self._come.append(slot)
                    continue
            job.slots.append(slot)
            job.guides.append(sequence.guide)
            job.token_ids.append(token)
            job.guessed.append(is_guess)
            job.last.append(not goes_on)
            job.before.append(None if is_guess else sequence.mask)
        if job.slots:
            self._in_making.update(job.slots)
            self._maker.put(job)
        return Taken(rows[is_told], [], before, num_held=len(rows) - int(np.count_nonzero(is_told)))

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
        """Whether `collect`, `prepare` or `may_queue` would find something."""
        return self._maker.news.is_set() or bool(self._confirmed) or (bool(self._come) and not self._keeps_back)

    @property
    def awaits(self) -> bool:
        """Whether masks are in the making, or guesses are checked."""
        return bool(self._in_making)

    def wait(self) -> bool:
        """Waits a moment for masks and grammars in the making."""
        if (self._come and not self._keeps_back) or self._has_failed or self._confirmed:
            return True
        if not self._in_making and not self._compiling:
            return False
        self._maker.news.wait(_WAIT_S)
        return True

    def close(self) -> None:
        """Ends the thread that makes masks, and what it asks for them."""
        self._maker.close()
        self._grammars.close()

    def _take_made(self, made: Followed | MasksMade) -> None:
        if isinstance(made, Followed):
            for slot, place in zip(made.slots, made.places, strict=True):
                self._take_place(slot, place)
            return
        for slot, mask in zip(made.slots, made.masks, strict=True):
            self._in_making.discard(slot)
            sequence = self._by_slot[slot]
            if sequence is not None:
                self._set_made(sequence, mask)
                self._come.append(slot)

    def _take_place(self, slot: int, place: Place) -> None:
        """Takes in where a slot's guide stands. Its mask may be in the making yet."""
        held, sequence = self._held.pop(slot, None), self._by_slot[slot]
        assert sequence is not None  # who leaves a slot waits for what is in the making
        if place.failure:
            if held is not None:
                self._slots.take_back(slot)
            self._in_making.discard(slot)
            self._fail(sequence, place.failure)
            return
        if place.is_refused:
            self._slots.take_back(slot)
            self._refused.add(slot)
        else:
            sequence.forced.extend(place.forced)
            if held is not None:
                self._confirmed[slot] = held
        if not place.needs_mask:
            refused = held if place.is_refused else None
            sequence.mask = _ANY if refused is None else np.append(sequence.mask, np.int32(refused.token))
            self._in_making.discard(slot)
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
            mask = np.array([sequence.forced[0]], np.int32)
        self._masks[slot] = mask
