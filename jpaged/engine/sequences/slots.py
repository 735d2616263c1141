"""The scheduler's side of the slots: one row of numpy per running sequence, so that a step is a few array operations.

    slot              0      1      2      3       4     ...
    num_computed     26      7      0     12       0      tokens whose keys and values are written, or planned to be
    num_known        25      8      0     40       0      tokens whose values the host knows
    capacity         32      8      0     48       0      token slots in its blocks
    compute_limit   100     63      0      0       0      decode until so many are computed; 0 in prefill and when empty
                  decode  decode  empty  prefill  kept for a sequence that is to be forked from slot 3

A decoding sequence has num_computed + 1 tokens, those in flight included: the last one is sampled and not yet
computed. So slot 0 has two steps in flight, whose tokens only the device knows, and slot 1 none. The very last token
is never computed, so compute_limit is the greatest length less one. A slot needs another block for its next decode
step when num_computed == capacity.
"""

import heapq
from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import NULL_BLOCK, SamplingVariant
from jpaged.engine.kv.shared_prefix import SharedPrefixes
from jpaged.engine.sequences.request import Request

NEVER = np.iinfo(np.int64).max


_CANDIDATES = 8
"""Free slots of either kind that a sequence is offered."""

ORDINARY = 0
"""`Slots.kind` of a sequence whose rows need no result to be planned."""


class Slots:
    """Per-slot arrays and the free slots. Row `slot` of each array belongs to `requests[slot]`.

    Everybody reads the arrays; only the methods here write them.

    end: int32 [slots]; tokens that are computed when the greatest length is reached.
    start_step: int64 [slots]; the step that started the tenant, NEVER when empty. A result row of an earlier step
        is a former tenant's.
    reports, wants_logprobs: bool [slots]; whether every token of it is something that the caller hears of.
    kind: int8 [slots]; ORDINARY, or the number of a kind of rows that wait for their last result
        (`constraints/dependent_rows.py`). These keep a compute_limit of 0.
    priority, arrival, index: int64 [slots]; its place in the policy's order.
    variant_counts: tenants by the sampling variant that they need.
    block_tables: int32 [groups, slots, max_blocks_per_seq]; a table for each cache group. Where a group has a window,
        an entry is NULL_BLOCK unless the sequence holds a block there.
    capacity: int32 [slots]; token slots in its blocks. Groups with a window get their blocks chunk by chunk: while a
        prompt is computed, it is what all groups have room for.
    first_held: int32 [groups, slots]; the first block that a group with a window still holds.
    token_ids: int32 [slots, max_model_len]; pages of zeros come into being when they are written.
    shared_prefixes: who begins alike, by the first group without a window, where decode steps are to know it; None
        otherwise.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        n = config.max_num_seqs
        self._block_size = config.block_size
        self.num_computed = np.zeros((n,), np.int32)
        self.num_known = np.zeros((n,), np.int32)
        self.capacity = np.zeros((n,), np.int32)
        self.compute_limit = np.zeros((n,), np.int32)
        self.end = np.zeros((n,), np.int32)
        self.start_step = np.full((n,), NEVER, np.int64)
        self.reports = np.zeros((n,), np.bool_)
        self.wants_logprobs = np.zeros((n,), np.bool_)
        self.kind = np.full((n,), ORDINARY, np.int8)
        self.priority = np.zeros((n,), np.int64)
        self.arrival = np.zeros((n,), np.int64)
        self.index = np.zeros((n,), np.int64)
        self.windows = config.windows
        self.has_windows = any(window is not None for window in self.windows)
        self.block_tables = np.zeros((len(self.windows), n, config.max_blocks_per_seq), np.int32)
        self._tables = list(self.block_tables)  # views, one a group
        self.first_held = np.zeros((len(self.windows), n), np.int32)
        self._wants_same_blocks = config.plans_ahead and self.windows == (None,)
        self.token_ids = np.zeros((n, config.max_model_len), np.int32)
        self.shared_prefixes: SharedPrefixes | None = None
        if config.shared_prefix_attention and None in self.windows:
            self.shared_prefixes = SharedPrefixes(self.block_tables[self.windows.index(None)], config.num_blocks)
        self.requests: list[Request | None] = [None] * n
        self.variant_counts = [0] * len(SamplingVariant)
        self._free = list(range(n))
        self._freed = dict.fromkeys(range(n))  # the free slots, in the order in which they came to be

    @property
    def windowed_groups(self) -> list[int]:
        """The cache groups that have windows."""
        return [group for group, window in enumerate(self.windows) if window is not None]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def wanted(self, slots: np.ndarray | int, indices: np.ndarray) -> np.ndarray | None:
        """The blocks that were promised to these slots at these indices of their tables, or that they had there when a
        former tenant ended, for a sequence that gets there now: int32 [n]. None where that is of no use: see
        `SchedulerConfig.plans_ahead`.
        """
        return self._tables[0][slots, indices] if self._wants_same_blocks else None

    def expect(self, slots: np.ndarray, indices: np.ndarray, block_ids: np.ndarray) -> None:
        """Puts blocks that these slots do not hold behind those that they do, for `wanted`: int [n] each."""
        self._tables[0][slots, indices] = block_ids

    def forget_former_tenants(self) -> None:
        """The blocks of former tenants are no longer where they were, as after the executor gave back its memory."""
        self.block_tables[:, self._free] = NULL_BLOCK

    def free_candidates(self, others: Collection[int]) -> np.ndarray:
        """Some free slots, of which there are any: those that were freed first, and those that were freed last, in this
        order. Slots among `others` only if there are no more.
        """
        first = list(islice((slot for slot in self._freed if slot not in others), _CANDIDATES))
        if not first:
            return np.array([next(iter(self._freed))])
        last = list(islice((slot for slot in reversed(self._freed) if slot not in others), _CANDIDATES))
        return np.array(list(dict.fromkeys([*first, *reversed(last)])))

    @property
    def next_free(self) -> int:
        """The slot that `acquire` gives where none is named; there is a free one."""
        return self._free[0]

    @property
    def num_used(self) -> int:
        return len(self.requests) - len(self._free)

    def used(self) -> np.ndarray:
        """The slots that have a tenant, int64 [used], ascending."""
        return np.flatnonzero(self.start_step != NEVER)

    def decodable(self) -> np.ndarray:
        """The slots that can compute their last token and sample the next, int64 [d], ascending."""
        return np.flatnonzero(self.num_computed < self.compute_limit)

    def table(self, slot: int) -> np.ndarray:
        """The slot's block tables as far as all groups have room, int32 [groups, n], a view."""
        return self.block_tables[:, slot, : self.capacity[slot] // self._block_size]

    def blocks(self, slot: int) -> np.ndarray:
        """The blocks that the slot's sequence holds, in the order of its tables, int32 [n]."""
        if len(self._tables) == 1 and not self.has_windows:
            return self._tables[0][slot, : self.capacity[slot] // self._block_size]
        tables = self.block_tables[:, slot]
        return tables[tables != NULL_BLOCK] if self.has_windows else self.table(slot).reshape(-1)

    def known(self, slot: int) -> np.ndarray:
        """The slot's known tokens, int32 [n], a view."""
        return self.token_ids[slot, : self.num_known[slot]]

    def holds_tokens(self, slot: int) -> bool:
        """Whether the tenant has started: not one whose slot is kept for it until it is forked."""
        return bool(self.num_known[slot])

    def acquire(
        self,
        request: Request,
        step_id: int,
        token_ids: np.ndarray,
        block_ids: np.ndarray,
        num_computed: int,
        num_blocks: int | None = None,
        slot: int | None = None,
    ) -> int:
        """Gives a free slot to a request that is to compute its known tokens, and returns the slot.

        Args:
            token_ids: int32 [known]; its known tokens, none for a sequence that only has its slot kept for it.
            block_ids: int32 [groups, n], or [n] for one group; its block tables.
            num_computed: tokens whose keys and values are in them.
            num_blocks: how many entries of its table each group has blocks for; n if None.
            slot: which is free; the lowest free one if None.
        """
        if slot is None or slot == self._free[0]:
            slot = heapq.heappop(self._free)
        else:
            self._free.remove(slot)
            heapq.heapify(self._free)
        del self._freed[slot]
        n = block_ids.shape[-1]
        self.num_computed[slot] = num_computed
        self.num_known[slot] = len(token_ids)
        self.capacity[slot] = (n if num_blocks is None else num_blocks) * self._block_size
        self.end[slot] = request.max_len - 1
        self.start_step[slot] = step_id
        self.reports[slot] = request.reports_each_token
        self.wants_logprobs[slot] = request.logprobs is not None
        self.priority[slot] = request.priority
        self.arrival[slot] = request.arrival_number
        self.index[slot] = request.index
        if len(self._tables) == 1:  # at half the cost
            self._tables[0][slot, :n] = block_ids
        else:
            self.block_tables[:, slot, :n] = block_ids
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.requests[slot] = request
        self.variant_counts[request.variant] += 1
        if self.shared_prefixes is not None:
            self.shared_prefixes.add(slot, min(n, request.prompt_len // self._block_size))
        if self.has_windows and self.capacity[slot]:
            held = self.block_tables[:, slot, : self.capacity[slot] // self._block_size] != NULL_BLOCK
            self.first_held[:, slot] = np.where(held.any(axis=1), held.argmax(axis=1), held.shape[1])
        request.slot = slot
        return slot

    def advance(self, rows: np.ndarray, num_tokens: int = 1) -> None:
        """Each of these slots computes `num_tokens` tokens in the step being planned, starting with its last one; fewer
        if it reaches its end.

        rows: distinct slots, int64 [r].
        """
        self.num_computed[rows] += 1 if num_tokens == 1 else self.num_ahead(rows, num_tokens)

    def num_ahead(self, rows: np.ndarray, num_tokens: int) -> np.ndarray:
        """How many tokens each of these slots computes in a step that brings `num_tokens` a row: int32 [r]."""
        return np.minimum(self.end[rows] - self.num_computed[rows], num_tokens)

    def take_back(self, slot: int) -> None:
        """Drops the token that the slot sampled last and that was never stored: the one before it is computed again."""
        self.num_computed[slot] -= 1

    def compute_up_to(self, slot: int, stop: int) -> None:
        """The slot's tokens up to stop-1 are computed once the step being planned has run."""
        self.num_computed[slot] = stop

    def begin_decoding(self, slot: int) -> None:
        """The slot's known tokens are computed, and it goes on from here to its end without the host."""
        self.compute_limit[slot] = self.end[slot]

    def begin_waiting(self, slot: int, kind: int) -> None:
        """The slot's known tokens are computed, and from here its rows wait for results, as the kind of this number
        says.
        """
        self.kind[slot] = kind

    def append_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """The host learns of a token of each of these distinct slots: int64 [n], int32 [n]."""
        known = self.num_known[slots]
        self.token_ids[slots, known] = token_ids
        self.num_known[slots] = known + 1

    def append_forced(self, slot: int, token_ids: Sequence[int]) -> None:
        """The slot's sequence goes on with these tokens, which nobody samples."""
        known = int(self.num_known[slot])
        self.token_ids[slot, known : known + len(token_ids)] = token_ids
        self.num_known[slot] = known + len(token_ids)

    def append_several(self, slots: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """The host learns of several tokens of each of these distinct slots. Those that wait for their results have
        computed all that is known but the last token, however many were planned.

        slots, counts: int64 [n]. token_ids: int32 [n, k]; the first `counts` of each row.
        """
        brought = np.arange(token_ids.shape[1]) < counts[:, None]
        known = self.num_known[slots]
        places = known[:, None] + np.arange(token_ids.shape[1])
        self.token_ids[np.repeat(slots, counts), places[brought]] = token_ids[brought]
        self.num_known[slots] = known + counts
        waiting = slots[self.kind[slots] != ORDINARY]
        self.num_computed[waiting] = self.num_known[waiting] - 1

    def append_blocks(
        self, slots: np.ndarray, block_ids: np.ndarray, stride: int, may_repeat: bool = False
    ) -> np.ndarray:
        """Appends blocks to the tables of these slots: int64 [n].

        block_ids: int32; those of group g are the n from g * stride on.
        may_repeat: a slot may get several, and is named as often, one after another.

        Returns: where each stands in the table, int32 [n].
        """
        index = self.capacity[slots] // self._block_size
        if may_repeat:
            is_first = np.concatenate([[True], slots[1:] != slots[:-1]])
            places = np.arange(len(slots), dtype=np.int32)
            index += places - np.maximum.accumulate(np.where(is_first, places, 0))
            np.add.at(self.capacity, slots, self._block_size)
        else:
            self.capacity[slots] += self._block_size
        for group, table in enumerate(self._tables):
            table[slots, index] = block_ids[group * stride : group * stride + len(slots)]
        return index

    def append_windowed(self, slot: int, block_ids: np.ndarray) -> int:
        """Appends blocks to the slot's tables of the groups with windows: int32 [groups with windows, n].

        Returns: where the first of them stands.
        """
        first = int(self.capacity[slot]) // self._block_size
        stop = first + block_ids.shape[1]
        for group, of_group in zip(self.windowed_groups, block_ids, strict=True):
            self.block_tables[group, slot, first:stop] = of_group
        self.capacity[slot] += block_ids.shape[1] * self._block_size
        return first

    def give_back(self, group: int, slots: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Takes the blocks before the `first` out of the tables of a group with a window.

        Args:
            slots: int64 [n]; distinct. first: int32 [n]; all above `first_held`.
        Returns:
            The blocks, int32; one that several of the slots held is named as often.
        """
        held = self.first_held[group, slots]
        counts = first - held
        index, rows = held, slots
        if int(counts.max()) > 1:
            rows = np.repeat(slots, counts)
            index = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - held, counts)
        block_ids = self.block_tables[group, rows, index]
        self.block_tables[group, rows, index] = NULL_BLOCK
        self.first_held[group, slots] = first
        return block_ids

    def replace_last_blocks(self, slots: Sequence[int], block_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Puts other blocks, int32 [groups, n], in place of the last ones of these distinct slots.

        Returns: where they stand in the tables, int32 [n], and the blocks that stood there, int32 [groups, n].
        """
        last = self.capacity[slots] // self._block_size - 1
        replaced = self.block_tables[:, slots, last]
        self.block_tables[:, slots, last] = block_ids
        return last, replaced

    def fork(self, parent: int, children: Sequence[int]) -> tuple[np.ndarray, bool]:
        """Gives `children`, slots whose tenants have computed nothing, all that the tenant of `parent` has.

        Returns: the blocks that it holds, int32 [n], and whether the last of them is full.
        """
        computed, known, capacity = self.num_computed[parent], self.num_known[parent], self.capacity[parent]
        n = capacity // self._block_size
        token_ids = self.token_ids[parent, :known]
        for child in children:
            self.num_computed[child] = computed
            self.num_known[child] = known
            self.capacity[child] = capacity
            for table in self._tables:
                table[child, :n] = table[parent, :n]
            self.token_ids[child, :known] = token_ids
            if self.has_windows:
                self.first_held[:, child] = self.first_held[:, parent]
            if self.shared_prefixes is not None:
                self.shared_prefixes.add_fork(parent, child)
        return self.blocks(parent), bool(computed == capacity)

    def release(self, slot: int) -> None:
        """Empties a slot; its blocks are the caller's to free."""
        request = self.requests[slot]
        if self.shared_prefixes is not None:
            self.shared_prefixes.remove(slot)
        if request is not None:
            request.slot = -1
            self.variant_counts[request.variant] -= 1
        self.requests[slot] = None
        self.num_computed[slot] = self.num_known[slot] = self.capacity[slot] = self.compute_limit[slot] = 0
        self.start_step[slot] = NEVER
        if self.has_windows:
            self.block_tables[:, slot] = NULL_BLOCK
            self.first_held[:, slot] = 0
        self.reports[slot] = self.wants_logprobs[slot] = False
        self.kind[slot] = ORDINARY
        heapq.heappush(self._free, slot)
        self._freed[slot] = None
