"""What a plan changes before its step: slots that end and start, beams, swaps and copies of blocks.

[load_classes] --> [load_table] --> [gather] --> [update]
     --> [copy_states[N]] --> [move_beams[N]] --> [scatter] --> [copy_blocks[N]]

Masks go to the device with the step's sampling; `set_masks[W]` runs before it for those that do not fit.
"""

from collections.abc import Sequence

import numpy as np

from jpaged.engine.interface import NO_PLACE, NULL_BLOCK, HostCopy, SlotStart, StepPlan, TablePart
from jpaged.executor.buckets import bucket_for
from jpaged.executor.cache.host_chunks import HostChunks
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.step.blocks import CopyBlocks, GatherBlocks, ScatterBlocks
from jpaged.executor.step.calls import Calls
from jpaged.executor.step.changes import (
    KNOWN_TOKENS_PER_CALL,
    STARTS_PER_UPDATE,
    TABLE_UPDATES_PER_UPDATE,
    InitFull,
    KnownTokens,
    MoveBeams,
    SetMasks,
    StartFull,
    Update,
)
from jpaged.executor.step.copy_states import CopyStates
from jpaged.executor.step.program import Setup
from jpaged.executor.step.tables import LoadClasses, LoadTable, fill

_UPDATE, _INIT_FULL, _START_FULL, _KNOWN_TOKENS = Update(), InitFull(), StartFull(), KnownTokens()
_LOAD_TABLE, _LOAD_CLASSES = LoadTable(), LoadClasses()
_GATHER, _SCATTER = GatherBlocks(), ScatterBlocks()


class PlanChanges:
    """Dispatches what comes before a plan's step. Owns the blocks that were swapped to host memory."""

    def __init__(self, setup: Setup, calls: Calls) -> None:
        self._setup, self._calls = setup, calls
        self._packed, self._run = calls.packed, calls.run
        self._host_chunks = HostChunks()

    def dispatch(self, plan: StepPlan) -> None:
        """Everything that `plan` changes before its step, but for what is sent with the step's own programs."""
        for part in plan.table_parts:
            self._load_table(part)
        for out in plan.swap_outs:
            self._swap_out(out)
        if len(plan.ends) or plan.starts:
            self._end_and_start(plan.ends, plan.starts)
        if len(plan.state_loads):
            self.copy_states(np.add(plan.state_loads, [self._setup.config.max_num_seqs, 0], dtype=np.int32))
        if len(plan.beams):
            self._move_beams(plan.beams)
        for back in plan.swap_ins:
            self._swap_in(back)
        if len(plan.copies):
            self._copy_blocks(plan.copies)

    def fill_table_updates(self, field: np.ndarray, updates: np.ndarray) -> None:
        """Writes what a step's own buffer can carry; any surplus goes ahead through `update`."""
        while len(updates) > len(field):
            self._update(updates[:0, 0], (), updates[:TABLE_UPDATES_PER_UPDATE])
            updates = updates[TABLE_UPDATES_PER_UPDATE:]
        field[: len(updates)] = updates

    def update_tables(self, updates: np.ndarray) -> None:
        """Writes entries of block tables that no step's own buffer carries."""
        for first in range(0, len(updates), TABLE_UPDATES_PER_UPDATE):
            self._update(updates[:0, 0], (), updates[first : first + TABLE_UPDATES_PER_UPDATE])

    def swap_nothing(self) -> None:
        """Runs the copies to and from host memory once, if there are such programs."""
        if _GATHER in self._calls.programs:
            empty = HostCopy(0, np.zeros((0,), np.int32))
            self._swap_out(empty)
            self._swap_in(empty)

    def forget_host_chunks(self) -> None:
        """Frees what was copied to host memory."""
        self._host_chunks = HostChunks()

    def _end_and_start(self, ends: np.ndarray, starts: Sequence[SlotStart]) -> None:
        """Ends, then starts with their first blocks; the running sequences' new blocks ride with the step itself."""
        for start in starts:
            self._start_full(start)
        entries = np.concatenate([np.zeros((0, 4), np.int32), *map(_table_entries, starts)])
        # All ends must come before any start, since a slot may end and start anew in one plan.
        while len(ends) > STARTS_PER_UPDATE:
            self._update(ends[:STARTS_PER_UPDATE], (), entries[:0])
            ends = ends[STARTS_PER_UPDATE:]
        while True:
            self._update(ends, starts[:STARTS_PER_UPDATE], entries[:TABLE_UPDATES_PER_UPDATE])
            ends, starts, entries = ends[:0], starts[STARTS_PER_UPDATE:], entries[TABLE_UPDATES_PER_UPDATE:]
            if not starts and not len(entries):
                return

    def _update(self, ends: np.ndarray, starts: Sequence[SlotStart], entries: np.ndarray) -> None:
        buffer, host = self._packed(_UPDATE)
        host["ends"][: len(ends)] = ends
        for i, start in enumerate(starts):
            host["slots"][i] = start.slot
            host["num_computed_tokens"][i] = start.num_computed_tokens
            host["records"][i] = sampling_records.core_record(
                start.sampling,
                seed=start.seed,
                stop_token_ids=start.stop_token_ids,
                prompt_len=start.prompt_len,
                max_len=start.max_len,
                has_table=start.place != NO_PLACE,
            )
            host["places"][i] = start.place
        host["table_updates"][: len(entries)] = entries
        self._run(_UPDATE, packed=buffer)

    def _load_table(self, part: TablePart) -> None:
        """Writes a part of a constraint's table."""
        if part.classes is not None:
            buffer, host = self._packed(_LOAD_CLASSES)
            host["table"][...], host["first_place"][...] = part.number, part.first_place
            host["classes"][...] = part.classes
            self._run(_LOAD_CLASSES, packed=buffer)
        buffer, host = self._packed(_LOAD_TABLE)
        fill(host, part)
        self._run(_LOAD_TABLE, packed=buffer)

    def _start_full(self, start: SlotStart) -> None:
        """Writes the slot's row of the full sampling state, if the request asks for something kept there."""
        if not sampling_records.uses_extras(start.sampling):
            return
        self.ensure_full_state()
        buffer, host = self._packed(_START_FULL)
        host["slot"][...] = start.slot
        host["record"][...] = sampling_records.full_record(
            start.sampling,
            vocab_size=self._setup.model.vocab_size,
            bad_words_token_ids=start.bad_words_token_ids,
        )
        self._run(_START_FULL, packed=buffer)
        for first in range(0, len(start.token_ids), KNOWN_TOKENS_PER_CALL):
            known = start.token_ids[first : first + KNOWN_TOKENS_PER_CALL]
            buffer, host = self._packed(_KNOWN_TOKENS)
            host["slot"][...], host["start"][...], host["prompt_len"][...] = start.slot, first, start.prompt_len
            host["token_ids"][: len(known)] = known
            self._run(_KNOWN_TOKENS, packed=buffer)

    def ensure_full_state(self) -> None:
        if "full" not in self._calls.held:
            self._run(_INIT_FULL)

    def _move_beams(self, beams: np.ndarray) -> None:
        program = MoveBeams(bucket_for(len(beams), self._setup.config.copy_buckets))
        buffer, host = self._packed(program)
        host["rows"][: len(beams)] = beams
        self._run(program, packed=buffer)
        if self._setup.states:
            self.copy_states(beams[beams[:, 0] != beams[:, 1]][:, 1::-1])

    def copy_states(self, pairs: np.ndarray) -> None:
        """pairs: int32 [n, 2]; entries (from, to). None is both, so calls need not be one."""
        sizes = self._setup.config.state_copy_buckets
        for first in range(0, len(pairs), sizes[-1]):
            some = pairs[first : first + sizes[-1]]
            program = CopyStates(bucket_for(len(some), sizes))
            buffer, host = self._packed(program)
            host["pairs"][: len(some)] = some
            self._run(program, packed=buffer)

    def set_masks(self, plan: StepPlan, which: Sequence[int]) -> None:
        """Writes some of a plan's masks. which: their indices. It takes as many calls as they need, since a program has
        few places for whole masks, each with a bit for every token of the vocabulary.
        """
        sizes = self._setup.config.whole_mask_buckets
        while which:
            num_whole = sum(plan.masks[i].dtype != np.int32 for i in which)
            program = SetMasks(bucket_for(min(num_whole, sizes[-1]), sizes))
            buffer, host = self._packed(program)
            which = program.room(self._setup).fill(host, plan.mask_slots, plan.masks, which)
            self._run(program, packed=buffer)

    def _copy_blocks(self, copies: np.ndarray) -> None:
        """In calls of at most the largest size, since each cache group may have a copy for each slot."""
        largest = self._setup.config.copy_buckets[-1]
        for first in range(0, len(copies), largest):
            some = copies[first : first + largest]
            program = CopyBlocks(bucket_for(len(some), self._setup.config.copy_buckets))
            buffer, host = self._packed(program)
            host["pairs"][: len(some)] = some
            self._run(program, packed=buffer)

    def _swap_out(self, copy: HostCopy) -> None:
        buffer, host = self._packed(_GATHER)
        host["block_ids"][: len(copy.block_ids)] = copy.block_ids
        self._host_chunks.put(copy.chunk, self._run(_GATHER, packed=buffer))

    def _swap_in(self, copy: HostCopy) -> None:
        staging = self._host_chunks.take(copy.chunk, copy.keep)
        buffer, host = self._packed(_SCATTER)
        host["block_ids"][: len(copy.block_ids)] = copy.block_ids
        self._run(_SCATTER, staging=staging, packed=buffer)


def _table_entries(start: SlotStart) -> np.ndarray:
    """The entries of a slot's first block tables, as in `StepPlan.table_updates`; none for places without a block."""
    groups, indices = np.nonzero(start.block_ids != NULL_BLOCK)
    return np.stack([np.full(len(groups), start.slot), groups, indices, start.block_ids[groups, indices]], axis=1)
