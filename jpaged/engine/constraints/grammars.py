"""Rows whose next token a grammar constrains: a kind of rows that wait for their last result.

    hand_over     a grammar that has a table is the device's, and none of this is needed
    take          tokens -> maker      the host's cores make the masks, while other rows' steps run
    collect       guesses are checked  those that hold are stored and reported
    prepare       masks have come      rows are ready; what the grammar forces is appended, and computed as a chunk
    contribute    masks that changed, parts of tables -> plan

A sequence's guide says, after each token, which tokens may follow (a mask of bits), and which must: where there is only
one way to go on, its tokens need no step each. They become known tokens, which the next step computes together with the
last sampled one:

    known         ... | {  |            the last sampled token, not yet computed
    forced                   "na me":
    next step           {    "na me":   one chunk; the token after it is sampled under the mask for that place

Only what fits the sequence's last block is appended at once. For the rest, as for sequences whose every token must be
sampled (log-probabilities and penalties are by token), the mask has one bit. So a sequence's tokens do not depend on
how they came about.

Where a mask would take long, a row may run without it and guess (`held_guesses.py`).

Rows that run alone are computed before their masks are known (`run_ahead.py`). Where they cannot be, more than 64 run
in two halves: while one half's step runs, the masks of the other half are made.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np

from jpaged.engine.constraints.batch_gate import BatchGate, are_enough, gain_by_chunks, is_in_halves, most_together
from jpaged.engine.constraints.constrained_sequence import ANY, ConstrainedSequence
from jpaged.engine.constraints.dependent_rows import Confirmed, DependentRows, Ended, Taken
from jpaged.engine.constraints.following import Grammar, Grammars, Job, Places
from jpaged.engine.constraints.held_guesses import HeldGuesses
from jpaged.engine.constraints.run_ahead import RunAhead
from jpaged.engine.constraints.sent_masks import SentMasks
from jpaged.engine.constraints.tables import Tables
from jpaged.engine.interface import NO_TOKEN, TABLE_ROOM, FinishCode, SamplingVariant, StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.plan_in_progress import PlanInProgress
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Group, Request
from jpaged.engine.sequences.slots import Slots

_RUNNING = int(FinishCode.RUNNING)
_NO_SLOTS = np.zeros((0,), np.int64)
_WAIT_S = 0.0002
"""The longest wait for a mask or a grammar before the engine looks for new requests."""
_PARTS_PER_PLAN = 4
"""Parts of tables sent with each step while others run: 2.3 MB, with a vocabulary of 152,000 tokens."""


class ConstrainedRows(DependentRows):
    """Keeps the masks of constrained sequences and appends what their grammars force.

    grammars: compiles constraints and follows them. guesses: whether rows may run without their masks; not where layers
    keep states of sequences. runs_ahead: whether rows may be computed before their masks are known; neither there, nor
    where the memory of blocks comes and goes.
    """

    def __init__(
        self,
        number: int,
        slots: Slots,
        blocks: BlockManager,
        grammars: Grammars,
        guesses: bool = False,
        runs_ahead: bool = False,
    ) -> None:
        super().__init__(number, slots, blocks)
        num_slots = len(slots.requests)
        self._grammars, self._guesses = grammars, guesses
        self._maker = grammars.follower()
        self._compiling: dict[str, Future[Grammar]] = {}
        self._compiled: dict[str, Grammar] = {}
        self._sequences: dict[Request, ConstrainedSequence] = {}
        self._by_slot: list[ConstrainedSequence | None] = [None] * num_slots
        self._masks: list[np.ndarray | None] = [None] * num_slots  # what each slot's next token must keep to
        self._device = SentMasks(num_slots)
        self._is_catching_up = np.zeros((num_slots,), np.bool_)  # forced tokens are being computed
        self._in_making = np.zeros((num_slots,), np.bool_)  # the maker has the slot's last token, or makes its mask
        self._guesses_next = np.zeros((num_slots,), np.bool_)  # the slot's mask is that of a guess
        # Its sequence has failed, or has forced or unreported tokens, or ends that may be early; or had any of these
        # when its mask was set.
        self._needs_care = np.zeros((num_slots,), np.bool_)
        self._come: list[int] = []  # slots whose masks have come, but which are not ready yet
        self._planned = np.zeros((0,), np.int64)
        self._has_failed = False
        self._has_taken = False  # something has come from the maker since `collect`
        self._keeps_back = False  # rows that are ready wait for others
        self._gate = BatchGate()
        self._runs_ahead = runs_ahead and not slots.has_windows
        self._ahead = RunAhead(number, slots, blocks)
        self._held = HeldGuesses(slots, self._device, self._ahead)
        self._tables = Tables(TABLE_ROOM)
        self._has_chunks = False  # forced tokens are to be computed in the next plan

    def group_of(self, request: Request) -> SequenceGroup | None:
        """The group of a request with structured_outputs, which begin to be compiled."""
        constraint = request.sampling.structured_outputs
        if constraint is None:
            return None
        future = self._grammars.compile(constraint)
        self._compiling[request.request_id] = future
        wake = self._maker.wake  # what has compiled keeps the future, which must not keep this object
        future.add_done_callback(lambda _: wake())
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

    def hand_over(self, request: Request, others_run: bool) -> bool:
        """Has the device follow the request's grammar by its table, if that is there, there is room for it, and the
        host has not begun to follow the grammar. While others run, only if the device has the whole table.
        """
        table, sampling = self._compiled[request.request_id].table, request.sampling
        if table is None or sampling.ignore_eos or sampling.min_tokens:  # a table allows ends that these forbid
            return False
        members = request.group.members
        if any(member in self._sequences for member in members):
            return False
        if any(table.follow(table.start, member.output_token_ids) < 0 for member in members):
            return False
        placed = self._tables.place(table)
        if placed is None or (others_run and not placed.is_sent):
            return False
        placed.hold()
        for member in members:
            member.follow(placed)
        return True

    def admitted(self, group: Group) -> None:
        """Members of a group have got slots, for the first time or again."""
        for member in group.members:
            if member.slot < 0 or self._by_slot[member.slot] is not None:
                continue
            sequence = self._sequences.get(member)
            if sequence is None:
                grammar, sampling = self._compiled[member.request_id], member.sampling
                sequence = ConstrainedSequence(
                    grammar.begin(sampling.ignore_eos, self._may_guess(member)),
                    deque(grammar.forced),
                    grammar.mask,
                    skips=member.variant < SamplingVariant.FULL,
                    stops=frozenset(member.stop_token_ids),
                    early_ends=frozenset(member.eos_token_ids if sampling.min_tokens else ()),
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

    def _follow(self, sequence: ConstrainedSequence, token_ids: Sequence[int]) -> None:
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
                made = self._grammars.make_masks([sequence.guide]) if place.needs_mask else [ANY]
                self._set_made(sequence, made[0])

    def _set_made(self, sequence: ConstrainedSequence, made: np.ndarray | str) -> None:
        """Takes a mask, or why there is none."""
        if isinstance(made, str):
            self._fail(sequence, made)
        else:
            sequence.mask = made

    def _fail(self, sequence: ConstrainedSequence, failure: str) -> None:
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
        while self._in_making[slot]:
            self._take_all(waits=True)
        token = self._held.take_back(slot)
        if token is not None and sequence is not None:
            sequence.forced.appendleft(token)

    def left(self, request: Request) -> None:
        """A sequence has ended, or lost its slot: what it needs to go on in another is kept."""
        super().left(request)
        self.leaves(request)
        slot = request.slot
        if slot in self._come:
            self._come.remove(slot)
        self._by_slot[slot] = None
        self._is_catching_up[slot] = False
        self._masks[slot] = None
        self._device.left(slot)
        self._ahead.left(slot)

    def forgotten(self, group: Group) -> None:
        """All sequences of a request have ended, or the device follows them."""
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
        self._has_taken = False
        self._take_all()
        return self._held.collect(self._by_slot, self._needs_care)

    def settle(self) -> None:
        """Waits until no guess is to be checked. What was computed ahead is not counted on."""
        self._ahead.forget()
        while self._held:
            self._take_all(waits=True)

    def prepare(self, num_queued: int | None) -> list[Request]:
        """Rows whose masks have come, or who guess, are ready. Returns the sequences whose forced tokens are to be
        computed.
        """
        is_halved, are_enough = is_in_halves(self._num_all, self.run_ahead), self._are_enough()
        self._keeps_back = self._gate.should_wait(num_queued, self._num_here, is_halved, are_enough)
        if self._keeps_back:
            return []
        come, self._come = np.array(self._come, np.int64), []
        by_slot = cast("list[ConstrainedSequence]", self._by_slot)  # each of these has a sequence
        is_careful = self._needs_care[come]
        catching_up, ready = [], come[~is_careful].tolist()
        for slot in ready:
            self._masks[slot] = by_slot[slot].mask
        careful = come[is_careful].tolist()
        num_forced = sum(len(by_slot[slot].forced) for slot in careful)
        appends = gain_by_chunks(num_forced, len(come), self._ahead.has_computed)
        for slot in careful:
            sequence, request = by_slot[slot], self._slots.requests[slot]
            if request is None or sequence.failure:
                continue
            if appends and sequence.forced and self._append_forced(slot, sequence, request):
                catching_up.append(request)
            else:
                ready.append(slot)
            self._set_mask(slot, sequence)
        if ready:
            self.made_ready(np.array(ready, np.int64))
        self._has_chunks = bool(catching_up) or num_queued is None
        return catching_up

    @property
    def _num_here(self) -> int:
        """Rows that could run now."""
        return len(self._come) + int(np.count_nonzero(self._is_ready))

    @property
    def _num_all(self) -> int:
        return int(np.count_nonzero(self._slots.kind == self.number))

    def _are_enough(self) -> bool:
        """Whether a step of the rows that could run now is worth its while, or no others are to come."""
        return not self.awaits or are_enough(self._num_here, self._num_all, self.run_ahead)

    def rows(self) -> np.ndarray:
        """The slots whose masks are there. Of those that the device has computed ahead, if there are any, only these;
        where nothing is computed ahead and rows run in halves, at most half of all constrained rows.
        """
        if self._keeps_back:
            return _NO_SLOTS
        ready = np.flatnonzero(self._is_ready)
        if self._runs_ahead and not self._has_chunks and len(computed := self._ahead.computed(ready)):
            return computed
        return ready if self.run_ahead else ready[: most_together(self._num_all)]

    @property
    def run_ahead(self) -> bool:
        return self._runs_ahead and self._ahead.is_worthwhile

    def planned(self, step_id: int, rows: np.ndarray) -> None:
        super().planned(step_id, rows)
        self._planned = rows
        self._gate.reset()

    def contribute(self, plan: PlanInProgress) -> None:
        """Adds the masks that the device does not have yet, of the rows that sample in this plan, what it computes
        ahead, and parts of tables.
        """
        plan.table_parts += self._tables.take_parts(_PARTS_PER_PLAN)
        rows, self._planned = self._planned, self._planned[:0]
        ahead, is_further, device = self._ahead, self._ahead.is_further, self._device
        own = [chunk for chunk in plan.chunks if self._by_slot[chunk.slot] is not None]
        are_computed = bool(len(rows)) and len(rows) == len(ahead.computed(rows))
        plan.has_run_ahead = are_computed and not plan.chunks and self.run_ahead
        computed, token_ids = self._slots.num_computed, self._slots.token_ids
        told = [c for c in own if c.samples or device.replaced[c.slot] or is_further[c.slot]]
        of_chunks = np.array([chunk.slot for chunk in told], np.int64)
        again = _NO_SLOTS
        if self._runs_ahead:
            sampling = np.array([chunk.slot for chunk in own if chunk.samples], np.int64)
            waiting, late = np.flatnonzero(self._is_ready), np.flatnonzero(self._in_making)
            again = ahead.plan(plan, np.concatenate([rows, sampling]), waiting, late)
        # Each slot's last token that is not computed, by place; and whether the device has computed it, in vain.
        slots = np.concatenate([rows, of_chunks, again])
        starts = np.array([chunk.start for chunk in told], np.int64)
        lasts = token_ids[slots, np.concatenate([computed[rows] - 1, starts, computed[again]])]
        further = is_further[slots].astype(np.int64)
        if plan.has_run_ahead:
            further[: len(rows)] = 0
        in_making, known = self._in_making[slots], cast("list[np.ndarray]", self._masks)
        # A row is sampled under its own mask once that is there.
        masks = [ANY if later else known[slot] for slot, later in zip(slots.tolist(), in_making.tolist(), strict=True)]
        device.send(plan, slots, masks, in_making | self._guesses_next[slots], lasts, further)
        if unsampled := {chunk.slot for chunk in own if not chunk.samples}:  # which are told again with the next chunk
            renewed = plan.mask_slots[plan.mask_tokens != NO_TOKEN].tolist()
            device.replaced[[slot for slot in renewed if slot in unsampled]] = True
        is_further[slots] = False
        is_further[plan.run_ahead] = True

    def variant(self, others: SamplingVariant) -> SamplingVariant:
        """A program that applies masks."""
        return SamplingVariant.FULL if others == SamplingVariant.BEAM else max(others, SamplingVariant.MASKED)

    def take(self, step_id: int, slots: np.ndarray, rows: np.ndarray, result: StepResult) -> Taken:
        """Hands the tokens of sequences that go on to the maker, and those that were guessed, which are held back."""
        before: dict[int, list[int]] = {}
        own, codes = slots[rows], result.finish_codes[rows]
        is_running = codes == _RUNNING
        if not is_running.all():
            self._ahead.left(own[~is_running])
        by_slot = cast("list[ConstrainedSequence]", self._by_slot)  # each of these has a sequence
        is_guessed = self._device.is_open[own]
        is_asked, stopped = is_running | is_guessed, []
        for i in np.flatnonzero(self._needs_care[own] & ~is_guessed).tolist():
            slot, sequence = int(own[i]), by_slot[own[i]]
            if sequence.unreported:
                before[slot], sequence.unreported = sequence.unreported, []
            # Before `min_tokens` an end is sampled only where the grammar allows nothing else.
            if sequence.early_ends and int(result.token_ids[rows[i], 0]) in sequence.early_ends:
                if codes[i] != FinishCode.STOP:
                    stopped.append(int(rows[i]))
                is_asked[i] = False
            elif is_running[i] and sequence.forced:
                sequence.forced.popleft()
                self._come.append(slot)
                is_asked[i] = False
        asked = np.flatnonzero(is_asked)
        if len(asked):
            self._ask(own[asked], rows[asked], codes[asked], is_guessed[asked], result)
        return Taken(rows[~is_guessed], [], before, int(np.count_nonzero(is_guessed)), stopped)

    def _ask(
        self, slots: np.ndarray, rows: np.ndarray, codes: np.ndarray, is_guessed: np.ndarray, result: StepResult
    ) -> None:
        """Hands over what these slots have sampled, in these rows, each with its finish code. Guesses are held back."""
        sequences = cast("list[ConstrainedSequence]", [self._by_slot[slot] for slot in slots.tolist()])
        tokens = (result.token_ids if result.ranked is None else result.ranked)[rows]
        last = np.zeros((len(slots),), np.int64)
        if is_guessed.any():
            guessing = [sequences[i] for i in np.flatnonzero(is_guessed).tolist()]
            last[is_guessed] = self._held.hold(slots[is_guessed], guessing, tokens[is_guessed], codes[is_guessed])
        if result.ranked is not None:  # rows that truncate rank nothing
            tokens[:, 0] = result.token_ids[rows, 0]
        self._in_making[slots] = True
        self._maker.put(Job(slots, [one.guide for one in sequences], tokens.astype(np.int32), is_guessed, last))

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
        is_held = self._held.has_allowed or (bool(self._come) and not self._keeps_back)
        return self._has_taken or is_held or self._maker.has_news

    @property
    def awaits(self) -> bool:
        """Whether masks are in the making, or guesses are checked."""
        return bool(self._in_making.any())

    def wait(self) -> bool:
        """Waits a moment for masks and grammars in the making: to plan takes longer than what most of them do."""
        if (self._come and not self._keeps_back) or self._has_failed or self._held.has_allowed:
            return True
        if not self.awaits and not self._compiling:
            return False
        ends = time.perf_counter() + _WAIT_S
        while (left := ends - time.perf_counter()) > 0:
            self._maker.wait(left)
            if self._maker.has_news:
                self._take_all()
                self._has_taken = True
            if self._are_enough():
                break
        return True

    def forget_device(self) -> None:
        """No table is on the device."""
        self._tables = Tables(TABLE_ROOM)

    def close(self) -> None:
        """Ends what follows the grammars."""
        self._maker.close()
        self._grammars.close()

    def _take_all(self, waits: bool = False) -> None:
        for result in self._maker.take_all(waits):
            if result.places is not None:
                self._take_places(result.slots, result.places)
            if result.masks is not None:
                self._take_masks(result.slots, result.masks)

    def _take_masks(self, slots: np.ndarray, masks: Sequence["np.ndarray | str"]) -> None:
        """Takes in the masks of these slots, or why there is none."""
        self._in_making[slots] = self._guesses_next[slots] = False
        for slot, mask in zip(slots.tolist(), masks, strict=True):
            sequence = self._by_slot[slot]
            assert sequence is not None  # who leaves a slot waits for what is in the making
            self._set_made(sequence, mask)
            self._needs_care[slot] |= bool(sequence.failure)
            self._come.append(slot)

    def _take_places(self, slots: np.ndarray, places: Places) -> None:
        """Takes in where these slots' guides stand. Masks of some may be in the making yet."""
        self._held.answered(slots, places)
        by_slot = cast("list[ConstrainedSequence]", self._by_slot)  # as above
        for i, failure in places.failures.items():
            self._in_making[slots[i]] = False
            self._fail(by_slot[slots[i]], failure)
        for i, forced in places.forced.items():
            if i not in places.failures:
                by_slot[slots[i]].forced.extend(forced)
                self._needs_care[slots[i]] = True
        is_there = ~places.needs_mask
        come = slots[is_there]
        for slot, is_refused in zip(come.tolist(), places.is_refused[is_there].tolist(), strict=True):
            sequence = by_slot[slot]
            sequence.mask = np.append(sequence.mask, self._held.refused_tokens(slot)) if is_refused else ANY
        self._in_making[come], self._guesses_next[come] = False, True
        self._come += come.tolist()

    def _append_forced(self, slot: int, sequence: ConstrainedSequence, request: Request) -> bool:
        """Appends what is forced and fits the slot's last block. The sequence's last token is always sampled, so that
        the device ends it.
        """
        if not sequence.skips or not self._blocks.owns_last_block(slot):
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

    def _set_mask(self, slot: int, sequence: ConstrainedSequence) -> None:
        mask = sequence.mask
        if sequence.forced:
            mask = np.array([sequence.forced[0]], np.int32)
        self._masks[slot] = mask
        self._guesses_next[slot] = mask.dtype == np.int32 and len(mask) > 0 and mask[0] == NO_TOKEN
        self._needs_care[slot] = bool(sequence.forced or sequence.unreported or sequence.early_ends)
