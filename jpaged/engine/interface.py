"""What passes between the control plane (`engine/`) and the data plane (`executor/`).

    Scheduler --StepPlan--> Executor.execute --StepHandle--> .result() --StepResult--> Scheduler

A plan says only what changed and which slots run; everything a running sequence needs lives on the device
under its slot. Plans hold numpy arrays and plain Python, so the control plane never imports jax.

The rows of a step are its decode slots, in order, and then its chunks, in order:

    row      0 .. d-1                    d .. d+c-1
             plan.decode_slots[row]      plan.chunks[row - d].slot
    query    1 token, `last token` of    the chunk's tokens, sent by the host
             the slot, on the device
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jpaged.api.outputs import TargetScores
from jpaged.api.sampling_params import SamplingParams

NULL_BLOCK = 0
"""The block that padded rows and finished slots write to. It is never allocated and never attended to."""

SWAP_CHUNK_BLOCKS = 16
"""Blocks that move to or from host memory in one copy."""

NO_TOKEN = -1
"""Stands in `StepResult.token_ids` after a row's tokens, and everywhere for a row that sampled nothing."""

NUM_RANKED = 16
"""Tokens that a step with masks ranks for each row. Of a place where a tenth of all tokens is allowed, one of 16 is in
four cases of five. `lax.top_k` sorts all for more than 16."""


class SamplingVariant(IntEnum):
    """Which sampling program a step needs; each but the last does all that the ones before it do."""

    GREEDY = 0  # every row is greedy: an argmax
    SAMPLING = 1  # temperature and seeds
    TRUNCATED = 2  # top_k, top_p, min_p
    TABLE = 3  # slots that follow a constraint's table, `SlotStart.place`
    MASKED = 4  # masks of `StepPlan.masks`; `StepResult.ranked`
    FULL = 5  # penalties, logit_bias, allowed_token_ids, bad_words, min_tokens, logprobs
    BEAM = 6  # every row is greedy or a beam: an argmax, and logprobs


class FinishCode(IntEnum):
    """Why the device deactivated a slot."""

    RUNNING = 0
    STOP = 1  # sampled one of the slot's stop tokens
    LENGTH = 2  # reached `SlotStart.max_len` tokens
    NOT_FINITE = 3  # its logits are not finite, so the row's token means nothing


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same of each token, and so share block tables.

    A group has a block table for every slot. All groups draw on one pool of block ids: a block belongs to one group
    while it is held, and the pool has as many arrays as a group has layers.

    window: the most tokens that a query sees, its own included; None: all before it.
    """

    window: int | None = None


class TableRoom(NamedTuple):
    """What the device has room for, of all constraints together that it follows by tables (`TablePart`).

    tables: constraints. states: of their automata; each has a place. masks: with a bit for every token. entries: next
    states, by state and class of tokens.
    """

    tables: int
    states: int
    masks: int
    entries: int


TABLE_ROOM = TableRoom(tables=64, states=3 << 13, masks=3 << 10, entries=3 << 22)
"""103 MB with a vocabulary of 152,000 tokens: as much as three of the largest tables take."""


class PartRoom(NamedTuple):
    """The most of each in a `TablePart`."""

    states: int
    masks: int
    entries: int


PART_ROOM = PartRoom(states=1 << 10, masks=1 << 4, entries=1 << 16)
"""574 KB with a vocabulary of 152,000 tokens."""
NO_PLACE = 0
"""The place of a slot that follows no table. Its mask, number 0, allows all tokens, and all lead back to it."""


@dataclass(frozen=True, slots=True)
class TablePart:
    """A part of a constraint's table: a finite automaton over tokens, which the device follows without the host.

    The tables on the device lie in common arrays of places, masks and entries (`TableRoom`). State s of this one is
    place first_place + s. No other table that a slot follows overlaps it. A part has at most `PART_ROOM` of each.

    number: of the table, below `TableRoom.tables`.
    classes: int32 [vocabulary]; tokens that lead to the same state from every state are of one class. None where an
        earlier part had them.
    masks: uint32 [m, ceil(vocabulary / 32)]; bit v % 32 of word v // 32 is set for token v. masks_at: where they go.
    mask_of, entries_of: int32 [p]; by place, its mask, and the first of its entries. places_at: where they go.
    entries: int16 [e]; by place and class, the state that a token of the class leads to, counted from this table's
        first; -1 where it may not follow, or ends the sequence. entries_at: where they go.
    """

    number: int
    first_place: int
    classes: np.ndarray | None
    masks_at: int
    masks: np.ndarray
    places_at: int
    mask_of: np.ndarray
    entries_of: np.ndarray
    entries_at: int
    entries: np.ndarray


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence takes a slot, at its first admission or when it resumes after a preemption.

    token_ids: int32 [known]; every known token, the prompt's and then the output's.
    block_ids: int32 [groups, n]; the first n entries of its block table in each group. NULL_BLOCK where the group no
        longer holds a block, because no later query sees its tokens.
    num_computed_tokens: tokens whose keys and values are in the pool already (prefix cache).
    max_len: the total length, in tokens, at which the device stops the sequence.
    stop_token_ids: tokens that stop it, the end-of-sequence tokens included unless ignored.
    bad_words_token_ids: token sequences whose last token is never sampled after the others.
    place: where it stands, after the output's known tokens, in its constraint's table, which the device follows from
        there; NO_PLACE if it has no constraint, or the host follows it. While a slot with a place samples, plans have
        variant TABLE, MASKED or FULL, and none has a mask for it. All parts of the table come with the plan of the
        start or before it.
    """

    slot: int
    token_ids: np.ndarray
    prompt_len: int
    block_ids: np.ndarray
    num_computed_tokens: int
    max_len: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    place: int = NO_PLACE


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive known tokens of one sequence to compute in this step.

    A chunk without tokens follows the chunk that ends a prompt: its sequence was forked from that one's at this end
    (its `SlotStart` counts the whole prompt as computed), and samples its own first token after the same last token.

    token_ids: int32 [n]; they stand at positions start .. start+n-1.
    samples: the chunk reaches the end of the known tokens, so a new token is sampled after it.
    prompt_logprob_targets: int32 [n], or None when not asked for; the token that follows each of the chunk's
        tokens in the prompt, NO_TOKEN where none does. Their log-probabilities come back.
    score_targets: int32 [m], or None when nothing is scored; the tokens that follow the last m of the chunk's tokens.
        Their `TargetScores` come back.
    num_pooled: how many of the chunk's last tokens have their hidden states summed; the sum comes back. 0: none.
    """

    slot: int
    start: int
    token_ids: np.ndarray
    samples: bool
    prompt_logprob_targets: np.ndarray | None = None
    score_targets: np.ndarray | None = None
    num_pooled: int = 0


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Blocks that move between the pool and a chunk of host memory.

    block_ids: int32 [n], n at most SWAP_CHUNK_BLOCKS; the i-th is, or becomes, what stands in the chunk's i-th place.
        The null block for a place that is of no interest.
    keep: of a copy to the pool; the chunk still holds its blocks afterwards.
    """

    chunk: int
    block_ids: np.ndarray
    keep: bool = False


def no_rows() -> np.ndarray:
    """No slots."""
    return np.zeros((0,), np.int32)


def _no_pairs() -> np.ndarray:
    return np.zeros((0, 2), np.int32)


def _no_triples() -> np.ndarray:
    return np.zeros((0, 3), np.int32)


def _no_table_updates() -> np.ndarray:
    return np.zeros((0, 4), np.int32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration. The executor writes the parts of tables, then applies ends, swap-outs, starts, beams, masks,
    swap-ins, copies and table updates in this order, state loads before beams, then runs the rows, and saves states
    last.

    table_parts: of constraints that slots follow, in this plan or later.
    ends: int32 [e]; slots to deactivate because the host says so (abort, stop string, preemption). A slot the
        device stopped itself needs no entry. A slot may end and start anew in one plan.
    swap_outs, swap_ins: blocks that go to host memory, and that come back from there.
    beams: int32 [b, 3]; (slot, parent slot, token): the slot goes on with the parent's length and block table (its own,
        if it is the parent), and with `token` as its last. No slot is both a parent of others and given one.
    state_loads: int32 [l, 2]; (snapshot, slot): the slot's states become what the snapshot holds. A slot is among them
        at its start alone, with the tokens computed that the snapshot was saved after.
    state_saves: int32 [s, 2]; (slot, snapshot): after the rows have run, the snapshot becomes a copy of the slot's
        states. Only where layers keep states; a snapshot is saved once in a plan.
    copies: int32 [c, 2]; (block, block): the first one's contents go to the second (copy-on-write). No block is both
        copied from and to.
    table_updates: int32 [u, 4]; (slot, group, index, block id): block-table entries that running sequences get at
        their end, or in place of a shared block. Blocks that a group gives back are not among them: no later query
        reads them, and steps run in order.
    mask_slots, masks: int32 [m]; m arrays; the tokens that these slots may sample from now on. Either uint32
        [ceil(vocabulary / 32)]: bit v % 32 of word v // 32 is set for token v; or int32 [n], n from 1 to FEW_TOKENS:
        these tokens, or, where NO_TOKEN stands first, all but those behind it. Only slots whose `SamplingParams` have
        structured_outputs and that started with NO_PLACE, and these only when their masks have changed.
    mask_tokens: int32 [m]; for each of them NO_TOKEN, or the token that is the slot's last from now on, in place of the
        one that it sampled last. The slot is active, even if that one had ended it. The plan must compute the slot, and
        later plans that do so must give the token again, up to the one that samples the slot.
    mask_backs: int32 [m]; computed tokens that the slot loses: its length shrinks by so many. 1 where that token is the
        one before the one that was sampled, and one more where the slot was in `run_ahead`.
    decode_slots: int32 [d]; slots that compute their last token and sample the next.
    has_run_ahead: whether they have computed their last tokens, all of them behind the plan before; they only sample.
        There are no chunks.
    run_ahead: int32 [a]; slots that compute their last token, as of then, behind this plan's sampling. Nothing is
        sampled; a later plan samples, or takes the token back (`mask_backs`). Slots that have ended compute nothing.
    num_sharing, shared_len: the first `num_sharing` of them begin with the same `shared_len` computed tokens, full
        blocks of the first one's table in the first group without a window, which an executor may read once for all.
        Both 0 where there are chunks.
    tokens_per_row: tokens that each sampling row brings, unless it ends earlier; a row that waits for its last result
        (`constraints/dependent_rows.py`) may bring fewer, or none. 1 where there are chunks.
    ahead: int32 [a, 4]; like `table_updates`, entries that later plans will probably bring, also at the start of slots
        that are free now: for an executor that has something to prepare for them. The blocks
        are still free, and may go to others.
    """

    step_id: int
    variant: SamplingVariant
    table_parts: tuple[TablePart, ...] = ()
    ends: np.ndarray = field(default_factory=no_rows)
    starts: tuple[SlotStart, ...] = ()
    swap_outs: tuple[HostCopy, ...] = ()
    swap_ins: tuple[HostCopy, ...] = ()
    beams: np.ndarray = field(default_factory=_no_triples)
    state_loads: np.ndarray = field(default_factory=_no_pairs)
    state_saves: np.ndarray = field(default_factory=_no_pairs)
    copies: np.ndarray = field(default_factory=_no_pairs)
    table_updates: np.ndarray = field(default_factory=_no_table_updates)
    mask_slots: np.ndarray = field(default_factory=no_rows)
    masks: tuple[np.ndarray, ...] = ()
    mask_tokens: np.ndarray = field(default_factory=no_rows)
    mask_backs: np.ndarray = field(default_factory=no_rows)
    decode_slots: np.ndarray = field(default_factory=no_rows)
    has_run_ahead: bool = False
    run_ahead: np.ndarray = field(default_factory=no_rows)
    num_sharing: int = 0
    shared_len: int = 0
    chunks: tuple[Chunk, ...] = ()
    tokens_per_row: int = 1
    ahead: np.ndarray = field(default_factory=_no_table_updates)

    @property
    def num_rows(self) -> int:
        return len(self.decode_slots) + len(self.chunks)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the model's own distribution (before temperature, penalties and masks).

    The leading shape `...` is [rows, tokens_per_row] for sampled tokens and [n] for the n targets of a chunk.

    token_logprobs: float32 [...]; of the token that was sampled (or is the target).
    token_ranks: int32 [...]; its rank, 1 for the most likely.
    top_ids, top_logprobs: int32, float32 [..., k]; the k most likely tokens, best first.
    """

    token_logprobs: np.ndarray
    token_ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found, by row.

    token_ids: int32 [rows, tokens_per_row]; a row's tokens first, NO_TOKEN after them. None for a chunk that does not
        sample and for a slot that was inactive.
    finish_codes: uint8 [rows]; a `FinishCode` each.
    logprobs: by row and token; None unless the plan's variant is FULL or BEAM.
    prompt_logprobs: row -> Logprobs [n], for chunks that asked.
    scores: row -> TargetScores [m], for chunks with targets.
    read_shared_prefix: whether the step read what rows share (`StepPlan.num_sharing`) once for all of them.
    pooled: row -> float32 [hidden], for chunks with `num_pooled`: the sum of these tokens' hidden states.
    ranked: int32 [rows, NUM_RANKED], of MASKED, else None; a row's token, and those that it would have sampled in its
        place, best first, if those before had not been allowed. NO_TOKEN after the last; throughout for rows that
        truncate or sample nothing.
    """

    token_ids: np.ndarray
    finish_codes: np.ndarray
    logprobs: Logprobs | None = None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    scores: dict[int, TargetScores] = field(default_factory=dict)
    read_shared_prefix: bool = False
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    ranked: np.ndarray | None = None


class StepHandle(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult:
        """Waits for the step's arrays and returns them."""
        ...

    def is_ready(self) -> bool:
        """Whether the step has ended, so that `result` need not wait."""
        ...


class Executor(Protocol):
    """Runs plans in the order given. `execute` returns as soon as the step is dispatched."""

    def execute(self, plan: StepPlan) -> StepHandle: ...


@runtime_checkable
class BlockMemory(Protocol):
    """The memory of the pool's blocks, where it comes and goes while an engine serves. Block ids are int32 [n]."""

    def has_memory(self, num_blocks: int) -> np.ndarray:
        """Which of the first so many blocks have memory, bool [num_blocks]. Nothing runs."""
        ...

    def take_memory(self, block_ids: np.ndarray) -> int:
        """Gives blocks memory that have none. Returns how many got it: fewer, the first ones, if it has no more."""
        ...

    def give_memory_back(self, block_ids: np.ndarray, nothing_runs: bool) -> None:
        """Takes the memory of blocks that are not used before they have it again, except by steps in flight and by the
        next plan's copies to host memory.

        nothing_runs: the result of every step has been read, and the next plan has no such copies.
        """
        ...
