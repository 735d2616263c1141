"""Who gets slots and blocks: requests that start, and sequences that come back after a preemption.

    start           a request, or a sequence that computes its tokens again: prefix hits, and blocks for the rest
    resume          a group that runs together, such as the beams of a search, to compute its tokens again
    swap in         sequences that were swapped out together, with the blocks they had

All of a group or none of it: a new one needs slots for all its members, a preempted one blocks for all of them. Unless
nothing else runs, the watermark stays free.
"""

import time

import numpy as np

from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import NULL_BLOCK
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.prefix_cache import root_digest
from jpaged.engine.kv.swap_record import SwapRecord
from jpaged.engine.kv.swap_space import SwapSpace
from jpaged.engine.plan_in_progress import NO_BLOCKS, PlanInProgress, slot_start
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.engine.sequences.slots import Slots


class Admission:
    """Decides whether what comes next has room, and gives it its slots and blocks.

    num_prompt_tokens: of requests started, prefix hits included.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, slots: Slots, swap_space: SwapSpace) -> None:
        self._config = config
        self._pool = pool
        self._slots = slots
        self._swap_space = swap_space
        self.num_prompt_tokens = 0

    def admit(self, plan: PlanInProgress, request: Request) -> list[Request]:
        """Starts a waiting sequence and those that stand behind it.

        Returns: those that have tokens to compute, in this order; none if there is no room, and nothing has changed.
        """
        if request.swap is not None:
            return self._swap_in(plan, request.swap)
        if request.group.runs_together and request.group.forked:
            return self._resume_together(plan, request)
        return self._start(plan, request)

    def _start(self, plan: PlanInProgress, request: Request) -> list[Request]:
        """Starts a request, or one that is to compute its tokens again."""
        pool, config = self._pool, self._config
        cache = pool.cache
        siblings = request.group.siblings_to_fork
        others = [member for member in request.group.waiting() if member is not request]
        if self._slots.num_free <= len(siblings) + len(others) and self._slots.num_used:
            return []
        token_ids = request.known_token_ids()
        hits = self._prefix_hits(request, token_ids)
        in_pool = hits[hits != NULL_BLOCK]
        num_new = pool.blocks_to_admit(len(token_ids), request.prompt_len, request.max_len) - len(in_pool)
        part, num_part = self._part_hit(request, token_ids, len(hits))
        reserve = 0
        if self._slots.num_used:  # siblings need a block each as soon as they are forked
            reserve = int(config.watermark * pool.capacity) + len(siblings) + self._num_blocks_to_resume(others)
        num_needed = num_new + pool.num_unreferenced(in_pool) + reserve
        if num_needed > pool.num_free:
            return []
        if num_needed + pool.num_unreferenced(part) > pool.num_free:
            part, num_part = NO_BLOCKS, 0
        pool.share(part)  # before anything is allocated, or it might be reused
        block_ids = self._table(plan, request, token_ids, hits, num_new)
        plan.copies += [(source, int(block_ids[len(hits)])) for source in part.tolist()]
        num_computed = len(hits) * config.block_size + num_part
        self._slots.acquire(request, plan.step_id, token_ids, block_ids, num_computed)
        plan.starts.append(slot_start(request, token_ids, block_ids, num_computed))
        for sibling in siblings:
            self._slots.acquire(sibling, plan.step_id, token_ids[:0], block_ids[:0], 0)
            sibling.status = RequestStatus.RUNNING
        if request.status == RequestStatus.WAITING:
            self.num_prompt_tokens += request.prompt_len
            request.stats.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = num_computed
            if cache is not None:
                cache.count(request.prompt_len, num_computed, (len(hits) - len(in_pool)) * config.block_size)
        request.status = RequestStatus.RUNNING
        request.num_registered_blocks = len(hits)
        return [request]

    def _swap_in(self, plan: PlanInProgress, record: SwapRecord[Request]) -> list[Request]:
        """Starts sequences again that were swapped out together, where they were; none if they have no room."""
        members = record.members.copy()
        siblings = members[0].group.siblings_to_fork
        reserve = int(self._config.watermark * self._pool.capacity) + len(siblings) if self._slots.num_used else 0
        tokens = [member.known_token_ids() for member in members]
        new = self._num_new_blocks(record)
        if record.num_places + sum(new) + reserve > self._pool.num_free:
            return []
        if self._slots.num_free < len(members) + len(siblings):
            return []
        num_computed = record.num_computed.copy()
        restored = self._swap_space.restore(record, self._pool)
        plan.swap_ins += restored.copies
        for i, member in enumerate(members):
            block_ids = np.concatenate([restored.tables[i], self._pool.allocate(new[i])])
            self._slots.acquire(member, plan.step_id, tokens[i], block_ids, num_computed[i])
            plan.starts.append(slot_start(member, tokens[i], block_ids, num_computed[i]))
            member.num_registered_blocks = 0  # names are of blocks, and these are others
        for sibling in siblings:
            self._slots.acquire(sibling, plan.step_id, NO_BLOCKS, NO_BLOCKS, 0)
        for member in (*members, *siblings):
            member.status = RequestStatus.RUNNING
        return members

    def _resume_together(self, plan: PlanInProgress, leader: Request) -> list[Request]:
        """Starts all members of a preempted group again; none if not all of them have room. They share the prompt's
        full blocks, which the leader computes before any other member has its turn.
        """
        size, members = self._config.block_size, leader.group.members
        if self._slots.num_free < len(members):
            return []
        tokens = [member.known_token_ids() for member in members]
        shared = leader.prompt_len // size
        hits = self._prefix_hits(leader, tokens[0])
        in_pool = hits[hits != NULL_BLOCK]
        new = [-(-len(known) // size) - shared for known in tokens]
        new[0] += shared - len(in_pool)
        reserve = int(self._config.watermark * self._pool.capacity) if self._slots.num_used else 0
        if sum(new) + self._pool.num_unreferenced(in_pool) + reserve > self._pool.num_free:
            return []
        have = hits
        for member, known, num_new in zip(members, tokens, new, strict=True):
            block_ids = self._table(plan, leader, tokens[0], have, num_new)
            self._slots.acquire(member, plan.step_id, known, block_ids, len(have) * size)
            plan.starts.append(slot_start(member, known, block_ids, len(have) * size))
            member.status = RequestStatus.RUNNING
            member.num_registered_blocks = len(have)
            if member is leader:
                have = block_ids[:shared]
        return members

    def _table(
        self, plan: PlanInProgress, request: Request, token_ids: np.ndarray, hits: np.ndarray, num_new: int
    ) -> np.ndarray:
        """A block table that begins with `hits`, as `PrefixCache.match` gives them, with so many new blocks. The hits
        in host memory get the first of these, the plan brings them back, and they can be hit in the pool again.
        """
        on_host = np.flatnonzero(hits == NULL_BLOCK)
        self._pool.share(hits if not len(on_host) else hits[hits != NULL_BLOCK])
        block_ids = np.concatenate([hits, self._pool.allocate(num_new)])
        cache = self._pool.cache
        if len(on_host) and cache is not None and cache.host is not None:
            block_ids[on_host] = block_ids[len(hits) : len(hits) + len(on_host)]
            block_ids = np.delete(block_ids, np.s_[len(hits) : len(hits) + len(on_host)])
            digests = request.block_digests
            plan.swap_ins += cache.host.fetch([digests[i] for i in on_host.tolist()], block_ids[on_host])
            cache.register(digests, token_ids, block_ids, int(on_host[0]), int(on_host[-1]) + 1, request.cache_salt)
        return block_ids

    def _prefix_hits(self, request: Request, token_ids: np.ndarray) -> np.ndarray:
        """Blocks in the prefix cache for the beginning of a request's known tokens, as `PrefixCache.match`."""
        cache = self._pool.cache
        reusable = request.num_skippable_tokens(len(token_ids)) // self._config.block_size
        if cache is None or not reusable:
            return NO_BLOCKS
        return cache.match(request.block_digests, token_ids, reusable, request.cache_salt)

    def _part_hit(self, request: Request, token_ids: np.ndarray, num_hits: int) -> tuple[np.ndarray, int]:
        """A cached block that begins as the one after the request's hits, int32 [0 or 1], and how many of its tokens
        are the same. With less than half a block, copying it would cost more than computing them.
        """
        cache, size = self._pool.cache, self._config.block_size
        if cache is None:
            return NO_BLOCKS, 0
        first, stop = num_hits * size, request.num_skippable_tokens(len(token_ids))
        parent = request.block_digests[num_hits - 1] if num_hits else root_digest(request.cache_salt)
        block_id, num_same = cache.match_part(parent, token_ids[first : min(first + size, stop)])
        return (np.array([block_id], np.int32), num_same) if num_same else (NO_BLOCKS, 0)

    def _num_blocks_to_resume(self, members: list[Request]) -> int:
        """Blocks that preempted members of a group will need besides those of the first one to come back, which come
        back when all of them fit; none if some run already. They share the prompt's blocks through the prefix cache.
        """
        if not members or members[0].group.running():
            return 0
        shared = members[0].prompt_len // self._config.block_size if self._pool.cache is not None else 0
        lengths = [member.prompt_len + len(member.output_token_ids) for member in members]
        return sum(-(-length // self._config.block_size) - shared for length in lengths)

    def _num_new_blocks(self, record: SwapRecord[Request]) -> list[int]:
        """Blocks that each of these sequences needs for its known tokens besides those that are swapped out."""
        lengths = [member.prompt_len + len(member.output_token_ids) for member in record.members]
        return [-(-n // self._config.block_size) - len(p) for n, p in zip(lengths, record.places, strict=True)]
