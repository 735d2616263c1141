"""What the scheduler's parts hold, read as a whole: figures for people, and a check that the parts agree."""

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.interface import NULL_BLOCK, SWAP_CHUNK_BLOCKS
from jpaged.engine.kv.pins import PinnedPrefixes
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.sequences.slots import NEVER
from jpaged.engine.stats import EngineStats


class Inspection(SchedulerPart):
    """Reads what the others write."""

    def __init__(self, state: SchedulerState, tenants: Tenants, pins: PinnedPrefixes) -> None:
        super().__init__(state)
        self._tenants = tenants
        self._pins = pins

    def stats(self) -> EngineStats:
        """A snapshot of counters and occupancy."""
        counters, slots, pool = self._counters, self._slots, self._pool
        token_slots = pool.num_used * self._config.block_size
        return EngineStats(
            num_running=slots.num_used,
            num_waiting=len(self._waiting),
            num_finished=counters.num_finished,
            num_not_finite=counters.num_not_finite,
            num_steps=counters.num_steps,
            num_shared_prefix_steps=counters.num_shared_prefix_steps,
            num_guesses=counters.num_guesses,
            num_kept_guesses=counters.num_kept_guesses,
            num_requests_by_table=counters.num_requests_by_table,
            step_tokens=tuple(counters.step_tokens),
            num_preemptions=counters.num_preemptions,
            num_swap_preemptions=counters.num_swap_preemptions,
            prompt_tokens=counters.prompt_tokens,
            prefilled_tokens=counters.prefilled_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_cache_queries=pool.cache.num_queried_tokens if pool.cache is not None else 0,
            prefix_cache_hits=pool.cache.num_hit_tokens if pool.cache is not None else 0,
            prefix_cache_host_hits=pool.cache.num_host_hit_tokens if pool.cache is not None else 0,
            prefix_cache_state_misses=pool.cache.num_stateless_tokens if pool.cache is not None else 0,
            num_blocks=pool.capacity,
            num_used_blocks=pool.num_used,
            num_cached_blocks=len(pool.cache) if pool.cache is not None else 0,
            num_host_cached_blocks=len(self._swap_space.tier) if self._swap_space.tier is not None else 0,
            num_swap_blocks=self._swap_space.num_chunks * SWAP_CHUNK_BLOCKS,
            num_used_swap_blocks=self._swap_space.num_used * SWAP_CHUNK_BLOCKS,
            num_swapped_out=self._swap_space.num_swapped_out,
            num_swapped_in=self._swap_space.num_swapped_in,
            tokens_held=token_slots - self._num_empty_token_slots(),
            token_slots=token_slots,
        )

    def _num_empty_token_slots(self) -> int:
        """Token slots of referenced blocks that hold nothing. Sequences that share a last block are equally long."""
        slots = self._slots
        used = slots.used()
        used = used[slots.num_known[used] > 0]
        return sum(self._num_empty_of_group(group, used) for group in range(len(slots.windows)))

    def _num_empty_of_group(self, group: int, used: np.ndarray) -> int:
        """As `_num_empty_token_slots`, in one cache group. While a prompt is computed, a group without a window already
        has blocks for all of it where others have none yet.
        """
        slots, size = self._slots, self._config.block_size
        room = slots.capacity[used]
        if slots.has_windows and slots.windows[group] is None:
            room = np.maximum(room, -(-slots.num_known[used] // size) * size)
        last_blocks = slots.block_tables[group, used, room // size - 1]
        _, distinct = np.unique(last_blocks, return_index=True)
        distinct = distinct[last_blocks[distinct] != NULL_BLOCK]
        return int((room - slots.num_computed[used])[distinct].sum())

    def check_integrity(self) -> None:
        """Checks that blocks, tables, slots and queue agree; for tests and for idle moments: it reads everything.

        Raises:
            EngineDeadError: they do not.
        """
        slots = self._slots
        used = slots.used().tolist()
        self._blocks.check_integrity()
        self._pool.check_integrity([*(slots.blocks(slot) for slot in used), *self._pins.tables()])
        records = {id(m.swap): m.swap for g in self._tenants.groups.values() for m in g.members if m.swap is not None}
        self._swap_space.check_integrity(records.values())
        for record in records.values():
            for member, num_computed in zip(record.members, record.num_computed, strict=True):
                if num_computed >= member.prompt_len + len(member.output_token_ids):
                    raise EngineDeadError(f"Request {member.request_id!r} is swapped out with nothing left to compute.")
        running = [request for request in slots.requests if request is not None]
        if [request.slot for request in running] != used or slots.num_used != len(used):
            raise EngineDeadError(f"Slots in use are {used}, tenants hold {[request.slot for request in running]}.")
        groups = self._tenants.groups.values()
        states = (sum(len(group.running()) for group in groups), sum(len(list(group.waiting())) for group in groups))
        if (len(running), len(self._waiting)) != states:
            raise EngineDeadError(f"{len(running)} sequences run and {len(self._waiting)} wait, instead of {states}.")
        if (slots.num_computed > slots.capacity).any() or (slots.start_step[slots.capacity > 0] == NEVER).any():
            raise EngineDeadError("A slot has computed more tokens than its blocks hold, or is empty and has blocks.")
