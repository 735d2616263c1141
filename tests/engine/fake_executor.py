"""An executor that keeps what the device would keep, and checks every plan against it.

Plans are run when their results are asked for, in order, so a plan that the scheduler goes on writing to, or one that
relies on something not yet run, shows. Instead of keys and values a block holds, for each token, a fingerprint of all
tokens up to it, which is exactly what keys and values depend on, and of the cache group that it was written for. A row
that reads a block of another sequence or group, a stale one, or one not yet written, fails; it reads, in each group's
table, what its queries see through the group's window.

Where layers keep states of sequences (`SchedulerConfig.keeps_states`), a slot has one, which is never cleared: it holds
the fingerprint of the token that was computed last. So a token that is computed twice, not at all, or in another slot
than the ones before it, fails; and so does one that goes on from a snapshot of any other state than its own.

A step may bring `StepPlan.tokens_per_row` tokens a row: each row then runs so often, unless it ends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import numpy as np

from jpaged.api.structured_outputs import FEW_TOKENS
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import (
    NO_PLACE,
    NO_TOKEN,
    NULL_BLOCK,
    NUM_RANKED,
    PART_ROOM,
    SWAP_CHUNK_BLOCKS,
    FinishCode,
    Logprobs,
    SamplingVariant,
    SlotStart,
    StepPlan,
    StepResult,
    TablePart,
    TargetScores,
)

VOCAB_SIZE = 97
TOP_K = 20
ANY = np.full((-(-VOCAB_SIZE // 32),), 0xFFFFFFFF, np.uint32)
"""The mask that allows all."""
_MASK = 2**62 - 1
_STRIDE = 29
"""A prime: its multiples reach every token."""


def fingerprint(previous: int, token_id: int) -> int:
    """What the cache holds for a token, given what it holds for the token before (0 for none)."""
    return (previous * 6364136223846793005 + (token_id + 1) * 1442695040888963407 + 99991) & _MASK


def next_token(last_fingerprint: int, seed: int, position: int) -> int:
    """The token that the fake model samples at a position."""
    return fingerprint(last_fingerprint ^ (seed & _MASK), position) % VOCAB_SIZE


def logprob_of(last_fingerprint: int, token_id: int) -> float:
    """The log-probability that the fake model gives a token. (It has nothing to do with what it samples.)"""
    return -float((fingerprint(last_fingerprint, token_id) >> 20) % 2**22 / 2**18)


@lru_cache(maxsize=1 << 16)
def top_tokens(last_fingerprint: int, n: int) -> list[int]:
    """The most likely tokens, best first."""
    return sorted(range(VOCAB_SIZE), key=lambda token: (-logprob_of(last_fingerprint, token), token))[:n]


def allowed_token(token: int, mask: np.ndarray) -> int:
    """The token that the fake model samples where it would sample `token`, but may only what the mask allows: the first
    allowed one in an order of all that begins with it, as the most likely of all comes before the others.
    """
    assert VOCAB_SIZE % _STRIDE
    ranked = ((token + i * _STRIDE) % VOCAB_SIZE for i in range(VOCAB_SIZE))
    return next(t for t in ranked if mask[t // 32] >> (t % 32) & 1)


def ranked_tokens(token: int, mask: np.ndarray) -> list[int]:
    """What comes after it in that order, if it is not allowed either: the first allowed ones."""
    ranked = ((token + i * _STRIDE) % VOCAB_SIZE for i in range(VOCAB_SIZE))
    return list(islice((t for t in ranked if mask[t // 32] >> (t % 32) & 1), NUM_RANKED))


def mask_of(tokens: np.ndarray) -> np.ndarray:
    """The mask that allows these tokens alone; or, where NO_TOKEN stands first, all but those behind it."""
    assert 0 < len(tokens) <= FEW_TOKENS
    bits = np.zeros((32 * len(ANY),), np.bool_)
    if tokens[0] == NO_TOKEN:
        bits[tokens[1:]] = True
        bits = ~bits
    else:
        bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def reference_tokens(prompt: Sequence[int], seed: int, max_len: int, stop_token_ids: Sequence[int] = ()) -> list[int]:
    """What a request must generate, whatever happens around it."""
    last = 0
    for token in prompt:
        last = fingerprint(last, int(token))
    output: list[int] = []
    while len(prompt) + len(output) < max_len:
        token = next_token(last, seed, len(prompt) + len(output))
        output.append(token)
        if token in stop_token_ids:
            break
        last = fingerprint(last, token)
    return output


def content_of(print_of_token: int, group: int) -> int:
    """What a block of a cache group holds for a token of this fingerprint."""
    return (print_of_token + group * 0x9E3779B97F4A7C1) & _MASK


@dataclass
class _Slot:
    """tables: a block table for each cache group. first_query: of the row that ran last. place: in the table of its
    constraint. forgets: it was told of another last token, and has not sampled since; the next body must be told again,
    or it takes it for `was_active`.
    """

    start: SlotStart
    tokens: list[int]
    prints: list[int]
    tables: list[list[int]]
    num_computed: int
    first_query: int = 0
    active: bool = True
    place: int = NO_PLACE
    mask: np.ndarray | None = None
    ranked: list[int] | None = None
    forgets: bool = False
    was_active: bool = True


class FakeHandle:
    def __init__(self, executor: "FakeExecutor", plan: StepPlan) -> None:
        self.plan = plan
        self.computed: StepResult | None = None
        self._executor = executor

    def is_ready(self) -> bool:
        return self.computed is not None

    def result(self) -> StepResult:
        self._executor.run_until(self)
        assert self.computed is not None
        return self.computed


class FakeTables:
    """The tables of constraints, by the numbers that they have on the device. places: (mask, first entry, table)."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[int, int, int]] = {}
        self._masks: dict[int, np.ndarray] = {}
        self._entries: dict[int, int] = {}
        self._tables: dict[int, tuple[int, np.ndarray]] = {}  # first place, classes

    def write(self, part: TablePart) -> None:
        sizes = len(part.mask_of), len(part.masks), len(part.entries)
        assert all(size <= room for size, room in zip(sizes, PART_ROOM, strict=True))
        if part.classes is not None:
            self._tables[part.number] = part.first_place, part.classes
        self._masks.update(enumerate(part.masks, part.masks_at))
        self._entries.update(enumerate(part.entries.tolist(), part.entries_at))
        for i, (mask, first) in enumerate(zip(part.mask_of.tolist(), part.entries_of.tolist(), strict=True)):
            self.places[part.places_at + i] = mask, first, part.number

    def mask_at(self, place: int) -> np.ndarray:
        return self._masks[self.places[place][0]]

    def next_place(self, place: int, token: int) -> int:
        _, first_entry, number = self.places[place]
        first_place, classes = self._tables[number]
        state = self._entries[first_entry + int(classes[token])]
        return NO_PLACE if state < 0 else first_place + state


class FakeExecutor:
    """Args:
    on_execute: called with each plan as it is dispatched.
    num_brought: gives for a sequence's start, its tokens and the most tokens of a row how many the row brings, if it
        does not end; all of them if None.
    rank: gives for a sequence's tokens the TOP_K most likely next ones and their log-probabilities, instead of those
        that the fake model gives.

    Attributes:
        num_ranked: tokens of `StepResult.ranked` that are not left out, as if the vocabulary had no more.
    """

    num_ranked = 2

    def __init__(
        self,
        config: SchedulerConfig,
        on_execute: Callable[[StepPlan], None] | None = None,
        rank: Callable[[list[int]], tuple[list[int], list[float]]] | None = None,
        num_brought: Callable[[SlotStart, list[int], int], int] | None = None,
    ) -> None:
        self.config = config
        self.plans: list[StepPlan] = []
        self.on_execute = on_execute
        self.rank = rank
        self.num_brought = num_brought
        self._queue: deque[FakeHandle] = deque()
        self._slots: dict[int, _Slot] = {}
        self._host: dict[int, np.ndarray] = {}
        self._states: dict[int, int] = {}
        self._run_ahead: set[int] = set()
        self.num_run_ahead = 0
        self._snapshots: dict[int, int] = {}
        self._tables = FakeTables()
        self._content = np.zeros((config.num_blocks, config.block_size), np.int64)

    def execute(self, plan: StepPlan) -> FakeHandle:
        assert plan.step_id == len(self.plans)
        self.plans.append(plan)
        if self.on_execute is not None:
            self.on_execute(plan)
        handle = FakeHandle(self, plan)
        self._queue.append(handle)
        return handle

    def run_until(self, handle: FakeHandle) -> None:
        while handle.computed is None:
            oldest = self._queue.popleft()
            oldest.computed = self._run(oldest.plan)

    def _run(self, plan: StepPlan) -> StepResult:
        self._check_sizes(plan)
        for slot in plan.ends.tolist():
            if slot in self._slots:
                self._slots[slot].active = self._slots[slot].forgets = False
        for out in plan.swap_outs:
            assert 0 < len(out.block_ids) <= SWAP_CHUNK_BLOCKS
            assert 0 <= out.chunk < self.config.num_swap_chunks
            self._host[out.chunk] = self._content[out.block_ids].copy()
        for part in plan.table_parts:
            self._tables.write(part)
        for start in plan.starts:
            self._start(start)
        self._load_states(plan)
        assert len(plan.mask_slots) == len(set(plan.mask_slots.tolist())) == len(plan.masks)
        self._forget(plan)
        given = (plan.mask_slots.tolist(), plan.masks, plan.mask_tokens.tolist(), plan.mask_backs.tolist())
        for slot, mask, token, num_lost in zip(*given, strict=True):
            assert self._slots[slot].start.sampling.structured_outputs is not None
            self._slots[slot].mask = mask_of(mask) if mask.dtype == np.int32 else mask.copy()
            if mask.dtype == np.int32 and mask[0] == NO_TOKEN:
                assert needed_variant(self._slots[slot].start) == SamplingVariant.MASKED
                assert not self._slots[slot].start.sampling.truncates
            assert (num_lost > 0) <= (token != NO_TOKEN)
            if token != NO_TOKEN:
                self._renew(self._slots[slot], token, num_lost)
        for back in plan.swap_ins:
            held = self._host[back.chunk] if back.keep else self._host.pop(back.chunk)
            wanted = np.flatnonzero(back.block_ids != NULL_BLOCK)
            self._content[back.block_ids[wanted]] = held[wanted]
        self._move_beams(plan.beams)
        self._copy(plan.copies)
        copied = set(map(tuple, plan.copies.tolist()))
        for slot, group, index, block_id in plan.table_updates.tolist():
            blocks = self._slots[slot].tables[group]
            assert block_id != NULL_BLOCK
            if index < len(blocks) and blocks[index] != NULL_BLOCK:
                assert (blocks[index], block_id) in copied, "neither appended nor a copy"
            blocks += [NULL_BLOCK] * (index + 1 - len(blocks))
            blocks[index] = block_id
        for slot in plan.decode_slots.tolist() if not plan.has_run_ahead else ():
            self._write_decode(self._slots[slot])
        self._check_run_ahead(plan)
        for i, chunk in enumerate(plan.chunks):
            self._write_chunk(self._slots[chunk.slot], chunk.start, chunk.token_ids.tolist())
            if not len(chunk.token_ids):
                assert i > 0
                assert self._slots[chunk.slot].tokens == self._slots[plan.chunks[i - 1].slot].tokens
                if self.config.keeps_states:
                    self._states[chunk.slot] = self._states[plan.chunks[i - 1].slot]
        self._check_shared_prefix(plan)
        result = self._sample(plan)
        for slot in plan.run_ahead.tolist():
            self._write_decode(self._slots[slot])
        self._run_ahead = set(plan.run_ahead.tolist())
        self.num_run_ahead += len(plan.run_ahead)
        self._save_states(plan)
        return result

    def _load_states(self, plan: StepPlan) -> None:
        starts = {start.slot: start.num_computed_tokens for start in plan.starts}
        slots = plan.state_loads[:, 1].tolist()
        assert len(set(slots)) == len(slots)
        for snapshot, slot in plan.state_loads.tolist():
            assert starts[slot] > 0
            self._states[slot] = self._snapshots[snapshot]

    def _save_states(self, plan: StepPlan) -> None:
        slots, snapshots = plan.state_saves.T.tolist()
        assert len(set(snapshots)) == len(snapshots)
        assert all(0 <= snapshot < self.config.num_state_snapshots for snapshot in snapshots)
        assert set(slots) <= {*plan.decode_slots.tolist(), *(chunk.slot for chunk in plan.chunks)}
        self._snapshots |= {snapshot: self._states[slot] for slot, snapshot in zip(slots, snapshots, strict=True)}

    def _check_run_ahead(self, plan: StepPlan) -> None:
        if len(plan.run_ahead):
            assert len(plan.run_ahead) == len(set(plan.run_ahead.tolist()))
            assert not self.config.keeps_states
        if plan.has_run_ahead:
            assert not plan.chunks
            assert set(plan.decode_slots.tolist()) <= self._run_ahead
            assert all(s.num_computed == len(s.tokens) for s in map(self._slots.get, plan.decode_slots.tolist()))

    def _forget(self, plan: StepPlan) -> None:
        """Of what was told to bodies only what a row of theirs samples now is known without being told again."""
        sampled = set(plan.decode_slots.tolist()) if plan.has_run_ahead else set()
        for slot, state in self._slots.items():
            if state.forgets and slot not in sampled:
                state.active = state.was_active

    def _renew(self, state: _Slot, token: int, num_lost: int) -> None:
        if not state.forgets:
            state.was_active = state.active
        if num_lost:
            self._go_back(state, token, num_lost)
        elif not state.forgets or state.num_computed == len(state.tokens) - 1:
            self._replace_last(state, token)
        state.forgets = state.active = True

    def _go_back(self, state: _Slot, token: int, num_lost: int) -> None:
        """`token` is the last one, and not computed yet: of what is computed so many tokens do not count."""
        assert not self.config.keeps_states
        assert state.mask is not None
        was_ahead = (state.active or state.forgets) and state.num_computed == len(state.tokens)
        assert state.num_computed == len(state.tokens) - (not was_ahead)
        if num_lost > was_ahead:  # the token that was sampled last does not count
            assert num_lost == was_ahead + 1
            state.tokens.pop()
            state.prints.pop()
        state.num_computed -= num_lost
        if state.tokens[-1] != token:
            self._replace_last(state, token)

    def _replace_last(self, state: _Slot, token: int) -> None:
        """Not the token that was sampled last counts, but another one that was ranked after it."""
        assert state.num_computed == len(state.tokens) - 1
        assert state.ranked is not None
        assert token in state.ranked[1:]
        state.tokens[-1] = token
        state.prints[-1] = fingerprint(state.prints[-2], token)

    def _check_sizes(self, plan: StepPlan) -> None:
        rows = plan.decode_slots.tolist() + [chunk.slot for chunk in plan.chunks]
        assert rows or plan.starts, "a plan without purpose"
        assert len(rows) == len(set(rows)) <= self.config.max_num_seqs
        num_tokens = len(plan.decode_slots) + sum(max(1, len(chunk.token_ids)) for chunk in plan.chunks)
        assert num_tokens <= self.config.max_num_batched_tokens
        for i, chunk in enumerate(plan.chunks):
            assert len(chunk.token_ids) or (i and chunk.samples and plan.chunks[i - 1].samples)
        for array in (plan.ends, plan.decode_slots, plan.beams, plan.copies, plan.table_updates):
            assert array.dtype == np.int32
        assert plan.state_loads.dtype == plan.state_saves.dtype == np.int32

    def _move_beams(self, beams: np.ndarray) -> None:
        slots, parents, _ = beams.T
        moved = slots != parents
        assert not set(slots[moved].tolist()) & set(parents.tolist())
        assert len(set(slots.tolist())) == len(slots)
        if self.config.keeps_states:
            self._states |= {slot: self._states[parent] for slot, parent, _ in beams.tolist()}
        for slot, parent, token in beams.tolist():
            state, source = self._slots[slot], self._slots[parent]
            assert state.active
            assert source.active
            n = state.num_computed = source.num_computed
            state.tables = [table.copy() for table in source.tables]
            kept = source.prints[:n]
            state.tokens = [*source.tokens[:n], token]
            state.prints = [*kept, fingerprint(kept[-1], token)]

    def _copy(self, copies: np.ndarray) -> None:
        source, target = copies.T
        assert len(set(target.tolist())) == len(target)
        assert not set(source.tolist()) & set(target.tolist())
        assert NULL_BLOCK not in copies
        self._content[target] = self._content[source]

    def _start(self, start: SlotStart) -> None:
        old = self._slots.get(start.slot)
        assert old is None or not old.active, f"slot {start.slot} starts anew while it is active"
        tokens = start.token_ids.tolist()
        prints: list[int] = []
        for token in tokens:
            prints.append(fingerprint(prints[-1] if prints else 0, token))
        assert start.num_computed_tokens <= len(tokens) < start.max_len <= self.config.max_model_len
        assert len(start.block_ids) == len(self.config.cache_groups)
        self._slots[start.slot] = _Slot(start, tokens, prints, start.block_ids.tolist(), start.num_computed_tokens)
        self._slots[start.slot].place = start.place
        assert start.place == NO_PLACE or start.place in self._tables.places, "its table is not there"

    def _write_decode(self, state: _Slot) -> None:
        state.first_query = state.num_computed
        if state.active:
            assert state.num_computed == len(state.tokens) - 1, "a decode row computes the last token"
            self._write(state)
        else:
            self._content[NULL_BLOCK] = -1

    def _write_chunk(self, state: _Slot, start: int, token_ids: list[int]) -> None:
        assert state.active
        assert start == state.num_computed
        if state.start.sampling.structured_outputs is not None and start >= state.start.prompt_len:
            for token in token_ids[len(state.tokens) - start :]:  # forced: the host appends them
                state.tokens.append(token)
                state.prints.append(fingerprint(state.prints[-1], token))
        assert token_ids == state.tokens[start : start + len(token_ids)]
        state.first_query = start if token_ids else start - 1
        for _ in token_ids:
            self._write(state)

    def _write(self, state: _Slot) -> None:
        """Computes one more token of the sequence, into blocks that nobody else has where they see them, unless they
        count this very token as computed already: a prefix hit, or a fork, in the plan that computes it.
        """
        index, offset = divmod(state.num_computed, self.config.block_size)
        for group in range(len(state.tables)):
            block_id = state.tables[group][index]
            assert block_id != NULL_BLOCK
            sharers = [other for other in self._slots.values() if other.active and self._sees(other, block_id)]
            assert all(other is state or other.num_computed > state.num_computed for other in sharers), (
                "a shared block is written to where others have yet to write or count on something else"
            )
            row = self._row(state, group, index)
            self._content[row, offset] = content_of(state.prints[state.num_computed], group)
        if self.config.keeps_states:
            n, slot = state.num_computed, state.start.slot
            before = self._states[slot] if n else 0
            self._states[slot] = fingerprint(before, state.tokens[n])
            assert self._states[slot] == state.prints[n], f"slot {slot} goes on from a state that is not its own"
        state.num_computed += 1

    def _row(self, state: _Slot, group: int, index: int) -> int:
        """Where the sequence's block at this index is, among all contents."""
        return state.tables[group][index]

    def _sees(self, state: _Slot, block_id: int) -> bool:
        """Whether a sequence has the block where its queries see it; what a window has passed is of no interest."""
        size = self.config.block_size
        for table, group in zip(state.tables, self.config.cache_groups, strict=True):
            first = 0 if group.window is None else max(0, state.num_computed - group.window + 1) // size
            if block_id in table[first:]:
                return True
        return False

    def _sample(self, plan: StepPlan) -> StepResult:
        rows = [(slot, True) for slot in plan.decode_slots.tolist()]
        rows += [(chunk.slot, chunk.samples) for chunk in plan.chunks]
        k = plan.tokens_per_row
        token_ids = np.full((len(rows), k), NO_TOKEN, np.int32)
        codes = np.zeros((len(rows),), np.uint8)
        scores = plan.variant in (SamplingVariant.FULL, SamplingVariant.BEAM)
        logprobs = _empty_logprobs(len(rows), k) if scores else None
        ranked = np.full((len(rows), NUM_RANKED), NO_TOKEN, np.int32)
        scored = {len(plan.decode_slots) + i for i, c in enumerate(plan.chunks) if c.score_targets is not None}
        was_active = [self._slots[slot].active for slot, _ in rows]
        left = [k] * len(rows)
        for row in range(len(plan.decode_slots)) if self.num_brought is not None else ():
            state = self._slots[rows[row][0]]
            left[row] = self.num_brought(state.start, state.tokens, k)
            state.num_computed -= state.active and not left[row]  # its last token is to be computed again
        for again in range(k):
            for row, (slot, _) in enumerate(rows) if again else ():
                if self._slots[slot].active and again < left[row]:
                    self._write_decode(self._slots[slot])
            for row, (slot, samples) in enumerate(rows):
                state = self._slots[slot]
                if not state.active or (again and not samples) or again >= left[row]:
                    continue
                self._check_reads(state)
                needed = needed_variant(state.start)
                assert plan.variant >= needed or (needed == SamplingVariant.MASKED and not samples)
                assert plan.variant < SamplingVariant.BEAM or needed == SamplingVariant.GREEDY
                ends = state.num_computed == len(state.tokens)
                assert samples == ends or row in scored or (not samples and needed == SamplingVariant.MASKED)
                if samples:
                    token_ids[row, again] = self._sample_row(state, logprobs, (row, again))
                    codes[row] = self._code_of(state)
                    if state.ranked is not None:
                        some = state.ranked[: self.num_ranked]
                        ranked[row, : len(some)] = some
                    state.active = codes[row] == FinishCode.RUNNING
                    state.forgets = False
        assert all(was_active[row] or (token_ids[row] == NO_TOKEN).all() for row in range(len(rows)))
        prompt_logprobs, scores = self._prompt_logprobs(plan), self._scores(plan)
        result = StepResult(token_ids, codes, logprobs, prompt_logprobs, scores, plan.num_sharing > 0)
        return replace(result, ranked=ranked if plan.variant == SamplingVariant.MASKED else None)

    def _sample_row(self, state: _Slot, logprobs: Logprobs | None, place: tuple[int, int]) -> int:
        token = next_token(state.prints[-1], state.start.seed, len(state.tokens))
        if state.start.place != NO_PLACE:
            token = allowed_token(token, self._tables.mask_at(state.place))
            state.place = self._tables.next_place(state.place, token)
        elif state.start.sampling.structured_outputs is not None:
            assert state.mask is not None, "a constrained row runs without a mask"
            state.ranked = ranked_tokens(token, state.mask)
            token = state.ranked[0]
        if logprobs is not None:
            _fill_logprobs(logprobs, place, state.prints[-1], token)
            if self.rank is not None:
                logprobs.top_ids[place], logprobs.top_logprobs[place] = self.rank(state.tokens)
        state.prints.append(fingerprint(state.prints[-1], token))
        state.tokens.append(token)
        return token

    def _code_of(self, state: _Slot) -> FinishCode:
        if state.tokens[-1] in state.start.stop_token_ids:
            return FinishCode.STOP
        return FinishCode.LENGTH if len(state.tokens) == state.start.max_len else FinishCode.RUNNING

    def _check_shared_prefix(self, plan: StepPlan) -> None:
        """What rows are said to share is in the first one's blocks, and none of it is what they write in this step."""
        size, shared_len = self.config.block_size, plan.shared_len
        if not plan.num_sharing:
            assert shared_len == 0
            return
        assert self.config.shared_prefix_attention
        assert not plan.chunks
        assert 2 <= plan.num_sharing <= len(plan.decode_slots)
        assert shared_len > 0
        assert shared_len % size == 0
        sharing = [self._slots[slot] for slot in plan.decode_slots[: plan.num_sharing].tolist()]
        group = self.config.windows.index(None)
        held = self._content[sharing[0].tables[group][: shared_len // size]].reshape(-1).tolist()
        for state in sharing:
            if state.active:
                assert state.num_computed > shared_len
                expected = [content_of(of_token, group) for of_token in state.prints[:shared_len]]
                assert expected == held, "rows are said to share what they do not"

    def _check_reads(self, state: _Slot) -> None:
        size, n = self.config.block_size, state.num_computed
        for group, (table, of_group) in enumerate(zip(state.tables, self.config.cache_groups, strict=True)):
            first = 0 if of_group.window is None else max(0, state.first_query - of_group.window + 1)
            blocks = table[: -(-n // size)]
            assert NULL_BLOCK not in blocks[first // size :], f"slot {state.start.slot} has no block for what it reads"
            rows = [self._row(state, group, index) for index in range(first // size, len(blocks))]
            held = self._content[rows].reshape(-1)[first % size : n - first // size * size]
            wrong = np.flatnonzero(held != np.array([content_of(p, group) for p in state.prints[first:n]], np.int64))
            assert not len(wrong), f"position {first + wrong[0]} of slot {state.start.slot} reads what is not its own"

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, Logprobs]:
        found = {}
        for row, chunk in enumerate(plan.chunks, start=len(plan.decode_slots)):
            if chunk.prompt_logprob_targets is None:
                continue
            found[row] = _empty_logprobs(len(chunk.token_ids))
            prints = self._slots[chunk.slot].prints
            for i, target in enumerate(chunk.prompt_logprob_targets.tolist()):
                if target != NO_TOKEN:
                    _fill_logprobs(found[row], (i,), prints[chunk.start + i], target)
        return found

    def _scores(self, plan: StepPlan) -> dict[int, TargetScores]:
        found = {}
        for row, chunk in enumerate(plan.chunks, start=len(plan.decode_slots)):
            if chunk.score_targets is not None:
                count, stop = len(chunk.score_targets), chunk.start + len(chunk.token_ids)
                prints = self._slots[chunk.slot].prints[stop - count : stop]
                found[row] = scores_of(prints, chunk.score_targets)
        return found


def scores_of(prints: Sequence[int], targets: Sequence[int]) -> TargetScores:
    """The fake model's scores of targets that each follow a token of this fingerprint."""
    pairs = list(zip(prints, (int(target) for target in targets), strict=True))
    return TargetScores(
        np.array([logprob_of(last, target) for last, target in pairs], np.float32),
        np.array([(last + target) % 3 == 0 for last, target in pairs]),
    )


def needed_variant(start: SlotStart) -> SamplingVariant:
    if start.sampling.needs_full_variant:
        return SamplingVariant.FULL
    if start.sampling.structured_outputs is not None:
        return SamplingVariant.MASKED if start.place == NO_PLACE else SamplingVariant.TABLE
    if start.sampling.truncates:
        return SamplingVariant.TRUNCATED
    return SamplingVariant.GREEDY if start.sampling.greedy else SamplingVariant.SAMPLING


def _empty_logprobs(*shape: int) -> Logprobs:
    return Logprobs(
        np.zeros(shape, np.float32),
        np.zeros(shape, np.int32),
        np.zeros((*shape, TOP_K), np.int32),
        np.zeros((*shape, TOP_K), np.float32),
    )


def _fill_logprobs(logprobs: Logprobs, place: tuple[int, ...], last_fingerprint: int, token: int) -> None:
    likeliest = top_tokens(last_fingerprint, TOP_K)
    values = [logprob_of(last_fingerprint, likely) for likely in likeliest]
    logprobs.token_logprobs[place] = own = logprob_of(last_fingerprint, token)
    logprobs.token_ranks[place] = 1 + sum(value > own for value in values)
    logprobs.top_ids[place], logprobs.top_logprobs[place] = likeliest, values
