"""Who gets slots and blocks: requests that start, and sequences that come back after a preemption.

    start           a request, or a sequence that computes its tokens again: prefix hits, and blocks for the rest
    resume          a group that runs together, such as the beams of a search, to compute its tokens again
    swap in         sequences that were swapped out together, with the blocks they had

All of a group or none of it: a new one needs slots for all its members, a preempted one blocks for all of them. Unless
nothing else runs, the watermark stays free.
"""

import time

import numpy as np

from jpaged.engine.interface import NULL_BLOCK
from jpaged.engine.kv.prefix_cache import ON_HOST, root_digest
from jpaged.engine.kv.swap_record import SwapRecord
from jpaged.engine.plan_in_progress import NO_BLOCKS, PlanInProgress, slot_start
from jpaged.engine.scheduler.foresight import Foresight
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.sequences.request import Request, RequestStatus


class Admission(SchedulerPart):
    """Decides whether what comes next has room, and gives it its slots and blocks.

    Groups without a window get blocks for all known tokens at once. For those with one, as many as they will hold at
    most are reserved; they get them chunk by chunk (`BlockManager`).
    """

    def __init__(self, state: SchedulerState, foresight: Foresight) -> None:
        super().__init__(state)
        self._foresight = foresight
        self._footprint = state.config.footprint
        self._is_full = np.array([window is None for window in state.config.windows])
        self._num_full, self._num_windowed = int(self._is_full.sum()), int((~self._is_full).sum())

    def admit(self, plan: PlanInProgress, request: Request) -> list[Request]:
        """Starts a waiting sequence and those that stand behind it.

        Returns: those that have tokens to compute, in this order; none if there is no room, and nothing has changed.
        """
        if request.swap is not None:
            return self._swap_in(plan, request.swap)
        if request.group.runs_together and request.group.forked:
            if not self._num_windowed and not self._config.keeps_states:
                return self._resume_together(plan, request)
            # Its members would need blocks in which a window has passed the prompt's end, which nobody holds any more;
            # or the state at the prompt's end, which is the leader's alone.
            request.group.restart()
        return self._start(plan, request)

    def _start(self, plan: PlanInProgress, request: Request) -> list[Request]:
        """Starts a request, or one that is to compute its tokens again."""
        pool, size = self._pool, self._config.block_size
        cache = pool.cache
        siblings = request.group.siblings_to_fork
        others = [member for member in request.group.waiting() if member is not request]
        if self._slots.num_free <= len(siblings) + len(others) and self._slots.num_used:
            return []
        token_ids = request.known_token_ids()
        hits, matched = self._prefix_match(request, token_ids)
        num_hits = hits.shape[1]
        in_pool = hits[hits > NULL_BLOCK] if num_hits else NO_BLOCKS
        num_entries = pool.blocks_to_admit(len(token_ids), request.prompt_len, request.max_len)
        num_on_host = int(np.count_nonzero(hits == ON_HOST)) if num_hits else 0
        num_new = self._num_full * (num_entries - num_hits) + num_on_host
        num_reserved = self._num_to_reserve(hits, len(token_ids))
        part, num_part = self._part_hit(request, token_ids, num_hits)
        margin = 0
        if self._slots.num_used:  # siblings need a block each as soon as they are forked
            margin = int(self._config.watermark * pool.capacity) + len(siblings) * len(hits)
            margin += self._num_blocks_to_resume(others)
        num_needed = num_new + pool.num_unreferenced(in_pool) + num_reserved + margin
        if not self._blocks.can_have(num_needed):
            return []
        num_of_part = pool.num_unreferenced(part) + (self._num_windowed if num_part else 0)
        if num_needed + num_of_part > self._blocks.num_available:
            part, num_part = NO_BLOCKS, 0
        if matched is not hits:  # a state is to be kept behind them, for others to hit
            pool.touch(matched[:, num_hits:].reshape(-1))
        pool.share(part)  # before anything is allocated, or it might be reused
        slot = self._foresight.slot_for(request, num_hits, num_entries)
        tables = self._tables(plan, request, token_ids, hits, num_entries, slot)
        if num_part:
            if self._num_windowed:
                tables[~self._is_full, num_hits] = pool.allocate(self._num_windowed)
            plan.copies += zip(part.tolist(), tables[:, num_hits].tolist(), strict=True)
        num_computed = num_hits * size + num_part
        held = num_hits + bool(num_part)
        num_held = held if self._num_windowed else num_entries
        self._acquire(plan, request, token_ids, tables, num_computed, num_held, slot)
        self._blocks.reserve(request.slot, num_reserved)
        if self._snapshots is not None:
            if num_hits:
                snapshot = self._snapshots.load(request.block_digests[num_hits - 1])
                plan.state_loads.append((snapshot, request.slot))
            last = self._num_reusable(request, len(token_ids))
            request.snapshot_stops = self._snapshots.stops(num_hits, matched.shape[1], last)
        for sibling in siblings:
            self._slots.acquire(sibling, plan.step_id, NO_BLOCKS, NO_BLOCKS, 0)
            sibling.status = RequestStatus.RUNNING
        if request.status == RequestStatus.WAITING:
            self._counters.prompt_tokens += request.prompt_len
            self._counters.num_requests_by_table += request.table is not None
            request.stats.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = num_computed
            if cache is not None:
                of_host = int(np.count_nonzero((hits == ON_HOST).any(axis=0))) if num_on_host else 0
                stateless = (matched.shape[1] - num_hits) * size
                cache.count(request.prompt_len, num_computed, of_host * size, stateless)
        request.status = RequestStatus.RUNNING
        request.num_registered_blocks = num_hits
        return [request]

    def _swap_in(self, plan: PlanInProgress, record: SwapRecord[Request]) -> list[Request]:
        """Starts sequences again that were swapped out together, where they were; none if they have no room."""
        members = record.members.copy()
        siblings = members[0].group.siblings_to_fork
        margin = 0
        if self._slots.num_used:
            margin = int(self._config.watermark * self._pool.capacity) + len(siblings) * len(self._is_full)
        tokens = [member.known_token_ids() for member in members]
        num_entries = [-(-len(known) // self._config.block_size) for known in tokens]
        num_held = [places.shape[1] for places in record.places]
        new = [self._num_full * (n - held) for n, held in zip(num_entries, num_held, strict=True)]
        reserved = [
            max(0, self._footprint.windowed_peak(computed, len(known)) - int(np.count_nonzero(p[~self._is_full] >= 0)))
            for known, computed, p in zip(tokens, record.num_computed, record.places, strict=True)
        ]
        if not self._blocks.can_have(record.num_places + sum(new) + sum(reserved) + margin):
            return []
        if self._slots.num_free < len(members) + len(siblings):
            return []
        num_computed = record.num_computed.copy()
        restored = self._swap_space.restore(record, self._pool)
        plan.swap_ins += restored.copies
        for i, member in enumerate(members):
            tables = np.full((len(self._is_full), num_entries[i]), NULL_BLOCK, np.int32)
            tables[:, : num_held[i]] = restored.tables[i]
            own = self._pool.allocate(new[i]).reshape(self._num_full, num_entries[i] - num_held[i])
            tables[self._is_full, num_held[i] :] = own
            held = num_held[i] if self._num_windowed else num_entries[i]
            self._acquire(plan, member, tokens[i], tables, num_computed[i], held)
            self._blocks.reserve(member.slot, reserved[i])
            member.num_registered_blocks = 0  # names are of blocks, and these are others
        for sibling in siblings:
            self._slots.acquire(sibling, plan.step_id, NO_BLOCKS, NO_BLOCKS, 0)
        for member in (*members, *siblings):
            member.status = RequestStatus.RUNNING
        return members

    def _resume_together(self, plan: PlanInProgress, leader: Request) -> list[Request]:
        """Starts all members of a preempted group again, where no cache group has a window; none if not all of them
        have room. They share the prompt's full blocks, which the leader computes before any other member has its turn.
        """
        size, members = self._config.block_size, leader.group.members
        if self._slots.num_free < len(members):
            return []
        tokens = [member.known_token_ids() for member in members]
        shared = leader.prompt_len // size
        hits = self._prefix_hits(leader, tokens[0])
        in_pool = hits[hits > NULL_BLOCK]
        num_entries = [-(-len(known) // size) for known in tokens]
        num_new = self._num_full * (sum(num_entries) - shared * (len(members) - 1)) - len(in_pool)
        margin = int(self._config.watermark * self._pool.capacity) if self._slots.num_used else 0
        if not self._blocks.can_have(num_new + self._pool.num_unreferenced(in_pool) + margin):
            return []
        have = hits
        for member, known, n in zip(members, tokens, num_entries, strict=True):
            tables = self._tables(plan, leader, tokens[0], have, n)
            self._acquire(plan, member, known, tables, have.shape[1] * size, n)
            member.status = RequestStatus.RUNNING
            member.num_registered_blocks = have.shape[1]
            if member is leader:
                have = tables[:, :shared]
        return members

    def _acquire(
        self,
        plan: PlanInProgress,
        request: Request,
        token_ids: np.ndarray,
        tables: np.ndarray,
        num_computed: int,
        num_blocks: int,
        slot: int | None = None,
    ) -> None:
        """Gives a sequence its slot, and lets the device know. Arguments as of `Slots.acquire`."""
        self._slots.acquire(request, plan.step_id, token_ids, tables, num_computed, num_blocks, slot)
        if request.table is not None:
            plan.table_parts += request.table.take_parts()
        plan.starts.append(slot_start(request, token_ids, tables, num_computed))

    def _tables(
        self,
        plan: PlanInProgress,
        request: Request,
        token_ids: np.ndarray,
        hits: np.ndarray,
        num_entries: int,
        slot: int | None = None,
    ) -> np.ndarray:
        """Block tables, int32 [groups, num_entries], that begin with `hits`, as `PrefixCache.match` gives them. Groups
        without a window have new blocks behind these, others none yet. The plan brings back the hits in host memory to
        new blocks, and they can be hit in the pool again. slot: that it will have; the lowest free one if None.
        """
        num_hits = hits.shape[1]
        if num_hits:
            self._pool.share(hits[hits > NULL_BLOCK])
        cache = self._pool.cache
        if not self._num_windowed and (cache is None or cache.host is None):
            slot = self._slots.next_free if slot is None else slot
            wanted = self._slots.wanted(slot, np.arange(num_hits, num_entries))
            own = self._pool.allocate(self._num_full * (num_entries - num_hits), wanted, slot)
            own = own.reshape(self._num_full, -1)
            return np.concatenate([hits, own], axis=1) if num_hits else own
        groups, on_host = np.nonzero(hits == ON_HOST)
        block_ids = self._pool.allocate(len(on_host) + self._num_full * (num_entries - num_hits))
        tables = np.full((len(hits), num_entries), NULL_BLOCK, np.int32)
        tables[:, :num_hits] = hits
        tables[self._is_full, num_hits:] = block_ids[len(on_host) :].reshape(self._num_full, num_entries - num_hits)
        if len(on_host) and cache is not None:
            tables[groups, on_host] = block_ids[: len(on_host)]
            digests = request.block_digests
            plan.swap_ins += cache.fetch(digests, groups, on_host, block_ids[: len(on_host)])
            first, stop = int(on_host.min()), int(on_host.max()) + 1
            cache.register(digests, token_ids, tables, first, stop, request.cache_salt)
        return tables

    def _part_hit(self, request: Request, token_ids: np.ndarray, num_hits: int) -> tuple[np.ndarray, int]:
        """A cached block of each group that begins as the one after the request's hits, int32 [groups] or [0], and how
        many of its tokens are the same. With less than half a block, copying would cost more than computing them.
        """
        cache, size = self._pool.cache, self._config.block_size
        if cache is None or self._snapshots is not None:  # no state stands in the middle of a block
            return NO_BLOCKS, 0
        first, stop = num_hits * size, request.num_skippable_tokens(len(token_ids))
        parent = request.block_digests[num_hits - 1] if num_hits else root_digest(request.cache_salt)
        return cache.match_part(parent, token_ids[first : min(first + size, stop)])

    def _num_to_reserve(self, hits: np.ndarray, num_known: int) -> int:
        """Blocks that the groups with windows will yet take while they compute what is known, after these hits. Hits
        that others have are not counted on: giving them back makes no room.
        """
        if not self._num_windowed:
            return 0
        of_windows = hits[~self._is_full]
        own = self._pool.num_unreferenced(of_windows[of_windows > NULL_BLOCK])
        own += int(np.count_nonzero(of_windows == ON_HOST))
        size, num_hits = self._config.block_size, hits.shape[1]
        most = self._num_windowed * (-(-num_known // size) - num_hits)
        return min(most, max(0, self._footprint.windowed_peak(num_hits * size, num_known) - own))

    def _num_blocks_to_resume(self, members: list[Request]) -> int:
        """Blocks that preempted members of a group will need besides those of the first one to come back, which come
        back when all of them fit; none if some run already. They share the prompt's blocks through the prefix cache.
        """
        if not members or members[0].group.running():
            return 0
        shared = members[0].prompt_len // self._config.block_size if self._pool.cache is not None else 0
        lengths = [member.prompt_len + len(member.output_token_ids) for member in members]
        full = sum(-(-length // self._config.block_size) - shared for length in lengths)
        return self._num_full * full + sum(self._footprint.windowed_peak(0, length) for length in lengths)
