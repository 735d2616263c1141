"""The control plane's face: requests go in, plans come out, and the plans' results go in again.

    add(request)                  the queue          `waiting_queue.py`
    schedule() -> StepPlan        planning           `planning.py`, which names the files of its parts
    update(plan, result)          results            `results.py`

`schedule` may be called again before the results of earlier plans are given to `update`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jpaged.api.errors import EngineDeadError, InvalidParameterError, JPagedError, OutOfMemoryError
from jpaged.api.weights import InFlight
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.constraints.dependent_rows import Dependents, MakeRows
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.interface import BlockMemory, StepPlan, StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.elastic import ElasticPool
from jpaged.engine.kv.host_tier import HostTier
from jpaged.engine.kv.pins import PinnedPrefixes
from jpaged.engine.kv.snapshots import StateSnapshots
from jpaged.engine.kv.swap_space import SwapSpace
from jpaged.engine.limits import RequestLimits
from jpaged.engine.scheduler.inspection import Inspection
from jpaged.engine.scheduler.planning import NoPlan, Planner
from jpaged.engine.scheduler.preemption import Preemption
from jpaged.engine.scheduler.results import RequestUpdate, Results, joined
from jpaged.engine.scheduler.state import SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.scheduler.waiting_queue import WaitingQueue
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import FinishReason, Request, RequestStatus
from jpaged.engine.sequences.seeds import request_seed
from jpaged.engine.sequences.slots import Slots
from jpaged.engine.stats import Counters, EngineStats

__all__ = ["NoPlan", "RequestUpdate", "Scheduler"]


class Scheduler:
    """Owns the block pool, the slots and the waiting queue.

    Args:
        config: what it may use.
        seed: of the engine; requests without a seed get one from it and their arrival number, so runs reproduce.
        pool: hands out the blocks; one made to the configuration if not given.
        kinds: of rows that wait for their last result (`constraints/dependent_rows.py`).
        memory: of the pool's blocks, for `SchedulerConfig.kv_idle_release_s`.

    Raises:
        OutOfMemoryError: the device has no memory for the blocks of the longest sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        seed: int = 0,
        pool: BlockPool | None = None,
        kinds: Sequence[MakeRows] = (Searches,),
        memory: BlockMemory | None = None,
    ) -> None:
        self.config = config
        self.pool = pool or BlockPool(
            config.num_blocks, config.block_size, config.enable_prefix_caching, config.windows
        )
        self.slots = Slots(config)
        self.swap_space = SwapSpace(config.num_swap_chunks, HostTier() if config.host_prefix_cache else None)
        if self.pool.cache is not None:
            self.pool.cache.host = self.swap_space.tier
            if config.num_state_snapshots:
                self.pool.cache.snapshots = StateSnapshots(
                    config.num_state_snapshots, config.block_size, config.state_snapshot_tokens
                )
        self._seed = seed
        self._num_arrived = 0
        self._pins = PinnedPrefixes(self.pool)
        self._waiting = WaitingQueue(by_priority=config.policy == "priority")
        self.elastic: ElasticPool | None = None
        if memory is not None and config.kv_idle_release_s is not None:
            longest = config.footprint.alone(config.max_model_len, config.max_model_len)
            self.elastic = ElasticPool(self.pool, memory, config.kv_idle_release_s, min(longest, self.pool.capacity))
        self._blocks = BlockManager(self.pool, self.slots, self.elastic)
        self._dependents = Dependents(kinds, self.slots, self._blocks)
        self._on_hold: list[Request] = []  # they need something before they may wait for slots
        self._updates: list[RequestUpdate] = []  # that no result of a step has brought
        state = SchedulerState(
            config, self.pool, self.slots, self._blocks, self.swap_space, self._waiting, self._dependents, Counters()
        )
        self._tenants = Tenants(state)
        self.preemption = Preemption(state, self._tenants)
        self._planner = Planner(state, self._tenants, self.preemption)
        self._inspection = Inspection(state, self._tenants, self._pins)
        self._results = Results(state, self._tenants, self.preemption)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._tenants.groups)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been given to `update`."""
        return len(self._planner.in_flight)

    def add(self, request: Request, generated: Sequence[Sequence[int] | None] | None = None) -> None:
        """Puts a request in the queue. A refused one leaves no trace.

        generated: of a request that ran in another engine: the tokens of each sequence, None for one that has ended. It
            goes on from them, with the tokens that it would have had there.

        Raises:
            InvalidPromptError: its prompt leaves no room for a token within max_model_len.
            OutOfMemoryError: its prompt leaves no room for a token within the whole pool; or beams, which must run
                together, might not fit it, or not the memory that the device has at this time.
            InvalidParameterError: its id belongs to an unfinished request; it is for more sequences than can run.
        """
        groups = self._tenants.groups
        if request.request_id in groups:
            raise InvalidParameterError(f"request_id={request.request_id!r} is in use by an unfinished request.")
        request.max_len = self.limits.max_len(request.prompt_len, request.params)
        request.arrival_number = self._num_arrived
        self._num_arrived += 1
        request.seed = request_seed(request.sampling.seed, self._seed, request.arrival_number)
        group = self._dependents.group_of(request)
        if self.elastic is not None:
            try:
                self.elastic.secure(self._num_needed(group) + self._pins.num_blocks)
            except OutOfMemoryError:
                self._dependents.forget(request)
                self._num_arrived -= 1
                raise
        groups[request.request_id] = group
        if generated is not None:
            group.resume(generated)
        for sequence in group.waiting():
            if self._dependents:
                self._waiting.hold(sequence)
                self._on_hold.append(sequence)
            else:
                self._waiting.push(sequence)
        if self._dependents:
            self._release()

    def schedule(self, num_queued: Callable[[], int] = lambda: 0) -> StepPlan | NoPlan:
        """Plans the next step and takes it as executed: the caller dispatches plans in the order it gets them.

        num_queued: how many steps the device has not ended yet; asked only where that matters.
        Returns: the plan; `NoPlan.BLOCKED` when nothing can run before a result is read; `NoPlan.WAITING` when no
            result is awaited, but something that is made elsewhere; `NoPlan.IDLE` when only a new request makes a
            difference.
        """
        if self._on_hold:
            self._release()
        if self._dependents:
            self._take_confirmed()
            is_due = bool(self._tenants.prefilling) or bool(len(self.slots.decodable()))
            self._tenants.prefilling[:0] = self._dependents.prepare(None if is_due else num_queued())
            failed = self._dependents.failed()
            for ended, unreported in failed:
                update = self._results.end(ended)
                self._updates.append(
                    update._replace(new_token_ids=unreported) if update.request.reports_each_token else update
                )
            if failed:  # some of which may have got a token just now
                self._updates = joined(self._updates)
        return self._planner.plan()

    @property
    def has_updates(self) -> bool:
        """Whether `take_updates` would return any."""
        return bool(self._updates)

    def take_updates(self) -> list[RequestUpdate]:
        """What came to be known since the last call without a step's result: tokens that were held back until then, and
        sequences that ended because they cannot go on.
        """
        updates, self._updates = self._updates, []
        return updates

    def collect(self) -> list[RequestUpdate]:
        """Takes in what has been made elsewhere; returns as `take_updates`."""
        if self._dependents.has_news:
            self._take_confirmed()
        return self.take_updates()

    @property
    def awaits_news(self) -> bool:
        """Whether something is made elsewhere, of which `collect` may have to tell."""
        return self._dependents.awaits_news

    def settle(self) -> None:
        """Waits until it is known of all tokens that were read whether they count."""
        self._dependents.settle()
        self._take_confirmed()

    def _take_confirmed(self) -> None:
        for confirmed in self._dependents.collect():
            self._updates += self._results.take_confirmed(confirmed)

    @property
    def has_news(self) -> bool:
        """Whether `schedule` may find rows to plan that it did not find before, with no result read since."""
        return self._dependents.has_news

    def awaits(self, plan: StepPlan) -> bool:
        """Whether rows of a plan in flight are planned again only when its results have been read."""
        return self._dependents.awaits(plan.step_id)

    def wait_for_news(self) -> bool:
        """Waits for something that is made elsewhere, for a moment. False: nothing is."""
        return self.awaits_news and self._dependents.wait()

    def close(self) -> None:
        """Ends what works for the scheduler in other threads."""
        self._dependents.close()

    def _release(self) -> None:
        """Lets those requests wait for slots that have what they needed before."""
        on_hold, self._on_hold = self._on_hold, []
        for request in on_hold:
            try:
                if request.finished:
                    continue
                if self._dependents.may_queue(request):
                    self._waiting.release(request)
                else:
                    self._on_hold.append(request)
            except JPagedError as error:
                for _ in request.group.waiting():
                    self._waiting.count_out()
                for member in [member for member in request.group.members if not member.finished]:
                    self._tenants.end(member, "abort", str(error))
                    self._updates.append(RequestUpdate(member, []))

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Takes in what a step found. Plans come back in the order in which they were made.

        Returns: an update for each sequence that finished, and for each that got a token and reports every one.

        Raises:
            EngineDeadError: plans out of order, or the device and the scheduler disagree on what runs.
        """
        in_flight = self._planner.in_flight
        if not in_flight or in_flight.popleft() is not plan:
            raise EngineDeadError(f"The results of step {plan.step_id} do not belong to the oldest plan in flight.")
        return self._results.take(plan, result)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state, with what it has generated so far, and frees its blocks.

        Returns: the request (its first sequence), or None if there is none unfinished of this id.
        """
        if self._updates:
            self._updates = [update for update in self._updates if update.request.request_id != request_id]
        group = self._tenants.groups.get(request_id)
        if group is None:
            return None
        self._tenants.end_all(group, "abort")
        return group.leader

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None, index: int = 0
    ) -> Request | None:
        """Ends a sequence of a request for a reason that only the host sees, such as a stop string. Tokens in flight
        are dropped.

        Returns: the sequence, or None if there is none unfinished of this id and index.
        """
        group = self._tenants.groups.get(request_id)
        if group is None or group.members[index].finished:
            return None
        request = group.members[index]
        if self._updates:
            self._updates = [update for update in self._updates if update.request is not request]
        if request.status == RequestStatus.RUNNING:
            self._tenants.give_up(request)
        elif request.swap is not None:
            self._leave_swap(request)
        else:
            self._waiting.count_out()
        self._tenants.end(request, reason, stop_reason)
        return request

    def _leave_swap(self, request: Request) -> None:
        """A sequence ends while it is swapped out; another one stands in the queue for the rest, if it did."""
        members = request.swap.members if request.swap is not None else []
        stood = members[0] is request
        self.swap_space.drop(request)
        if stood:
            self._waiting.count_out()
            if members[0] is not request:
                self._waiting.push(members[0])

    def pin_prefix(self, token_ids: np.ndarray, cache_salt: str | None = None) -> int:
        """Keeps the blocks of a prefix that is in the prefix cache from being reused, until `unpin_prefix`.

        Args:
            token_ids: int32 [n]; as many of its full blocks are kept as are in the cache.
        Returns:
            The number of tokens kept.
        Raises:
            InvalidParameterError: the engine was started without prefix caching.
            OutOfMemoryError: what is left of the pool would not hold the longest sequence, or an unfinished request;
                or the pin would take blocks that are reserved for prompts being computed, so it can be had later.
        """
        longest = self.config.max_model_len
        needed = max(self.config.footprint.alone(longest, longest), self._most_needed())
        num_tokens = self._pins.pin(token_ids, cache_salt, self._blocks.num_available, num_needed=needed)
        if self.elastic is not None:
            try:
                self.elastic.secure(needed + self._pins.num_blocks)
            except OutOfMemoryError:
                self._pins.unpin(token_ids, cache_salt)
                raise
        return num_tokens

    def _most_needed(self) -> int:
        """The most blocks that one of the unfinished requests needs to finish."""
        return max(map(self._num_needed, self._tenants.groups.values()), default=0)

    def _num_needed(self, group: SequenceGroup) -> int:
        """Blocks that a request needs at once to finish."""
        leader = group.leader
        return self.config.footprint.alone(leader.prompt_len, leader.max_len, group.num_together)

    def take_memory_anew(self) -> None:
        """Learns which blocks have memory, which others may have changed, and that none is mapped in any slot, nor any
        constraint's table on the device. No block is referenced.

        Raises:
            OutOfMemoryError: the device has no memory for the blocks of the longest sequence.
        """
        self.slots.forget_former_tenants()
        self._dependents.forget_device()
        if self.elastic is not None:
            self.elastic.restart()

    def give_back_idle(self) -> bool:
        """Gives back some of the memory that nobody has needed for `kv_idle_release_s`, if that is set.

        Returns: whether there is more that can go back at once.
        """
        if self.elastic is None:
            return False
        nothing_runs = not self._planner.in_flight and not self.num_unfinished
        return self.elastic.give_back_idle(
            self._blocks.num_available, lambda: self._most_needed() + self._pins.num_blocks, nothing_runs
        )

    def unpin_prefix(self, token_ids: np.ndarray, cache_salt: str | None = None) -> bool:
        """Lets a pinned prefix go its way again. Returns whether it was pinned."""
        return self._pins.unpin(token_ids, cache_salt)

    @property
    def limits(self) -> RequestLimits:
        """What a request must keep to, now: prefixes that are pinned take blocks from all others."""
        config = self.config
        return RequestLimits(
            config.max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.block_size,
            self.capacity,
            config.windows,
            config.tokens_per_row,
        )

    @property
    def capacity(self) -> int:
        """Blocks that requests can have at most: those of the pool that are not pinned."""
        return self.pool.capacity - self._pins.num_blocks

    def reset_prefix_cache(self) -> bool:
        """Forgets all prefixes, pinned ones and those in host memory included, as after a change of weights. Returns
        False, and does nothing, while requests run or are swapped out: these go on from keys and values that they have.
        """
        if self.slots.num_used or self.swap_space.num_used:
            return False
        self._pins.unpin_all()
        if self.pool.cache is not None:
            self.pool.cache.reset()
        self.swap_space.drop_prefixes()
        return True

    def take_new_weights(self, in_flight: InFlight) -> None:
        """The model's weights change, and no plan is in flight: forgets all prefixes, pinned ones and those in host
        memory included. Running requests, and those that are swapped out, keep their tokens; in_flight says what they
        do about their keys and values.
        """
        for group in list(self._tenants.groups.values()):
            if in_flight == "continue":
                for member in group.members:
                    member.has_stale_blocks |= member.swap is not None or member.status == RequestStatus.RUNNING
                continue
            if running := group.running():
                self.preemption.preempt(running, "recompute")
            for member in group.members:
                if member.swap is not None:
                    stood, others = member.swap.members[0], list(member.swap.members)
                    self.swap_space.discard(member.swap)
                    for other in group.waiting():  # of a group that runs together the leader stands for all
                        if other in others and other is not stood:
                            self._waiting.push(other)
        self._pins.unpin_all()
        if self.pool.cache is not None:
            self.pool.cache.reset()
        self.swap_space.drop_prefixes()

    def stats(self) -> EngineStats:
        """A snapshot of counters and occupancy."""
        return self._inspection.stats()

    def check_integrity(self) -> None:
        """Checks that blocks, tables, slots and queue agree; for tests and for idle moments: it reads everything.

        Raises:
            EngineDeadError: they do not.
        """
        self._inspection.check_integrity()
