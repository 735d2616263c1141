"""Which sequences run in the next step.

One rule: each sequence's computed tokens catch up with its known tokens under a token budget. A decoding sequence is
one token behind; a prompt, or what a preempted sequence has to compute again, is many behind and is computed in
chunks. Each step serves, in this order and until the budget is spent:

    1. decode rows                one token each
    2. chunks of running prompts  as many tokens as the budget leaves
    3. waiting requests           in policy order, never past the first that does not fit

A sequence gets the blocks for all its known tokens when it is admitted, so a prompt once begun is never preempted
for its own blocks; only decode rows ask for more, one block at a time.

A request for several sequences is a group (`sequence_group.py`). It is admitted when there are slots for all of them;
the first computes the prompt, and in the step that ends it the others are forked and sample beside it. Each of them
takes one token of that step's budget, as each decodes from the next step on.

The next step of a beam search (`beam_search.py`) depends on what the last one found, so its rows are planned only when
that has been read; all searches move in the same steps, while other sequences go on in the steps between. What a beam
search needs of a step's budget is kept free for it in all of them.

Plans run ahead of results. `schedule` may be called again before the results of earlier plans are given to `update`:
a decoding sequence advances by one token a plan, and only the device knows which. Lengths are known exactly, so no
row is planned past the greatest length; a stop token shows late, and what was planned past it comes back as
NO_TOKEN. Results are matched to tenants by slot and starting step, so a slot and its blocks can be handed out again
at once: the device runs plans in order, and a slot that ended writes to the null block.

When decode rows need more blocks than are free, what is in flight is read first (`schedule` returns None); that
alone often ends a sequence. Then the last group in policy order is preempted: its sequences give up their blocks, keep
their tokens and wait. Their blocks go to host memory and come back later (`swap_space.py`), or, where that is full or
not asked for, they are computed again. The first in policy order is never preempted while another runs, and if
it does not fit alone it gives up its sequences one by one, last first. One sequence always fits alone, so there is
always progress.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jpaged.api.errors import EngineDeadError, InvalidParameterError
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.interface import (
    NO_TOKEN,
    SWAP_CHUNK_BLOCKS,
    Chunk,
    FinishCode,
    SamplingVariant,
    StepPlan,
    StepResult,
)
from jpaged.engine.kv.block_manager import BlockManager, Growth
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.host_tier import HostTier
from jpaged.engine.kv.pins import PinnedPrefixes
from jpaged.engine.kv.swap_space import SwapRecord, SwapSpace
from jpaged.engine.limits import RequestLimits, num_blocks_alone
from jpaged.engine.scheduler.admission import NO_BLOCKS, Admission, PlanInProgress, slot_start
from jpaged.engine.scheduler.waiting_queue import WaitingQueue
from jpaged.engine.sequences.beam_search import BeamGroup
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.logprobs import store_logprobs, store_prompt_logprobs
from jpaged.engine.sequences.request import FinishReason, Request, RequestStatus
from jpaged.engine.sequences.seeds import request_seed
from jpaged.engine.sequences.slots import NEVER, Slots
from jpaged.engine.stats import Counters, EngineStats


class RequestUpdate(NamedTuple):
    """Something that a step brought for a sequence of a request.

    new_token_ids: tokens since its last update: one a step for a sequence that reports each token, all of them at
        once, when it finishes, for another. `request.finished` says whether they are the last.
    """

    request: Request
    new_token_ids: list[int]


class Scheduler:
    """Owns the block pool, the slots and the waiting queue.

    Args:
        config: what it may use.
        seed: of the engine; requests without a seed get one from it and their arrival number, so runs reproduce.
        pool: hands out the blocks; one made to the configuration if not given.
    """

    def __init__(self, config: SchedulerConfig, seed: int = 0, pool: BlockPool | None = None) -> None:
        self.config = config
        self.pool = pool or BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.slots = Slots(config)
        self.swap_space = SwapSpace(config.num_swap_chunks, HostTier() if config.host_prefix_cache else None)
        if self.pool.cache is not None:
            self.pool.cache.host = self.swap_space.tier
        self._blocks = BlockManager(self.pool, self.slots)
        self._seed = seed
        self._waiting = WaitingQueue(by_priority=config.policy == "priority")
        self._groups: dict[str, SequenceGroup] = {}
        self._admission = Admission(config, self.pool, self.slots, self.swap_space)
        self._searches = Searches(self.slots, self._blocks)
        self._prefilling: list[Request] = []
        self._in_flight: deque[StepPlan] = deque()
        self._pending_ends: list[int] = []
        self._num_arrived = 0
        self._next_step_id = 0
        self._pins = PinnedPrefixes(self.pool)
        self._blocked: tuple[Request, int, int] | None = None
        self._counters = Counters()

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._groups)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been given to `update`."""
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        """Puts a request in the queue. A refused one leaves no trace.

        Raises:
            InvalidPromptError: its prompt leaves no room for a token within max_model_len.
            OutOfMemoryError: its prompt leaves no room for a token within the whole pool; or beams, which must run
                together, might not fit it.
            InvalidParameterError: its id belongs to an unfinished request; it is for more sequences than can run.
        """
        if request.request_id in self._groups:
            raise InvalidParameterError(f"request_id={request.request_id!r} is in use by an unfinished request.")
        params = request.sampling if request.beam is None else request.beam
        request.max_len = self.limits.max_len(request.prompt_len, params)
        request.arrival_number = self._num_arrived
        self._num_arrived += 1
        request.seed = request_seed(request.sampling.seed, self._seed, request.arrival_number)
        group = SequenceGroup(request) if request.beam is None else BeamGroup(request)
        self._groups[request.request_id] = group
        self._waiting.push(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state, with what it has generated so far, and frees its blocks.

        Returns: the request (its first sequence), or None if there is none unfinished of this id.
        """
        group = self._groups.get(request_id)
        if group is None:
            return None
        for _ in group.waiting():
            self._waiting.count_out()
        for member in group.members:
            if member.swap is not None:
                self.swap_space.discard(member.swap)
            if member.status == RequestStatus.RUNNING:
                self._give_up_slot(member)
            if not member.finished:
                self._set_finished(member, "abort", None)
        return group.leader

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None, index: int = 0
    ) -> Request | None:
        """Ends a sequence of a request for a reason that only the host sees, such as a stop string. Tokens in flight
        are dropped.

        Returns: the sequence, or None if there is none unfinished of this id and index.
        """
        group = self._groups.get(request_id)
        if group is None or group.members[index].finished:
            return None
        request = group.members[index]
        if request.status == RequestStatus.RUNNING:
            self._give_up_slot(request)
        elif request.swap is not None:
            self._leave_swap(request.swap, request)
        else:
            self._waiting.count_out()
        self._set_finished(request, reason, stop_reason)
        return request

    def _leave_swap(self, record: SwapRecord, request: Request) -> None:
        """A sequence ends while it is swapped out; another one stands in the queue for the rest, if it did."""
        stood = record.members[0] is request
        if len(record.members) == 1:
            self.swap_space.discard(record)
        else:
            record.drop(request)
        if stood:
            self._waiting.count_out()
            if record.members[0] is not request:
                self._waiting.push(record.members[0])

    def pin_prefix(self, token_ids: np.ndarray, cache_salt: str | None = None) -> int:
        """Keeps the blocks of a prefix that is in the prefix cache from being reused, until `unpin_prefix`.

        Args:
            token_ids: int32 [n]; as many of its full blocks are kept as are in the cache.
        Returns:
            The number of tokens kept.
        Raises:
            InvalidParameterError: the engine was started without prefix caching.
            OutOfMemoryError: what is left of the pool would not hold the longest sequence, or an unfinished request.
        """
        longest = -(-self.config.max_model_len // self.config.block_size)
        unfinished = (num_blocks_alone(group.leader, self.config.block_size) for group in self._groups.values())
        return self._pins.pin(token_ids, cache_salt, num_needed=max([longest, *unfinished]))

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

    def schedule(self) -> StepPlan | None:
        """Plans the next step and takes it as executed: the caller dispatches plans in the order it gets them.

        Returns: None when nothing can run before a result is read (`num_in_flight` > 0), or nothing is there to run.
        """
        if self.pool.cache is not None:
            self.pool.cache.step_id = self._next_step_id
        growth = self._growth_that_fits()
        if growth is None:
            return None
        rows = growth.rows
        table_updates, copies = self._blocks.append(growth)
        self.slots.num_computed[rows] += 1
        num_beams = self._searches.take_rows(self._next_step_id)
        budget = self.config.max_num_batched_tokens - (len(rows) - num_beams) - self._searches.num_due
        plan = PlanInProgress(self._next_step_id, budget, runs_beams=num_beams > 0)
        self._plan_chunks(plan)
        self._admit_waiting(plan)
        if plan.copies:
            copies = np.concatenate([copies, np.array(plan.copies, np.int32)])
            for source, _ in plan.copies:  # held until nothing more is allocated in this plan
                self.pool.free(np.array([source], np.int32))
        if not len(rows) and not plan.chunks and not plan.starts:
            return None  # a start goes out even without rows: the device must know of it
        self.swap_space.keep_evicted(self.pool)
        ends = np.array(self._pending_ends, np.int32)
        self._pending_ends.clear()
        beam_starts, beams = self._searches.take_changes()
        plan.starts += [slot_start(r, self.slots.known(r.slot).copy(), NO_BLOCKS, 0) for r in beam_starts]
        num_sharing = shared_blocks = 0
        if self.slots.shared_prefixes is not None and not plan.chunks:
            rows, num_sharing, shared_blocks = self.slots.shared_prefixes.group(rows)
        step = StepPlan(
            step_id=plan.step_id,
            variant=self._variant(plan.runs_beams),
            ends=ends,
            starts=tuple(plan.starts),
            swap_outs=self.swap_space.end_plan(),
            swap_ins=tuple(plan.swap_ins),
            beams=beams,
            copies=copies,
            table_updates=table_updates,
            decode_slots=rows.astype(np.int32),
            num_sharing=num_sharing,
            shared_len=shared_blocks * self.config.block_size,
            chunks=tuple(plan.chunks),
        )
        self._next_step_id += 1
        self._in_flight.append(step)
        return step

    def _growth_that_fits(self) -> Growth | None:
        """The slots that decode in this step and what they need, after preempting where more blocks are needed than
        are free.

        None, and nothing changed, when blocks are short and there are results to read first. The budget has room for
        all rows, since each was a row of an earlier step and took a token of its budget.
        """
        growth = self._blocks.growth(self._decodable())
        if growth.num_blocks <= self.pool.num_free:
            return growth
        if self._in_flight:
            return None
        return self._preempt_until_fits()

    def _decodable(self) -> np.ndarray:
        """The slots that can decode, int64 [d]: those that need no result for it, then the beams whose turn it is."""
        rows, beams = self.slots.decodable(), self._searches.rows()
        return np.concatenate([rows, np.array(beams, np.int64)]) if beams else rows

    def _plan_chunks(self, plan: PlanInProgress) -> None:
        """Continues the prompts that are being computed."""
        prefilling = self._prefilling
        self._prefilling = []
        for request in prefilling:
            if plan.budget:
                self._plan_chunk(plan, request)
            else:
                self._prefilling.append(request)

    def _plan_chunk(self, plan: PlanInProgress, request: Request) -> None:
        slots, slot = self.slots, request.slot
        siblings = request.group.siblings_to_fork
        start, known = int(slots.num_computed[slot]), int(slots.num_known[slot])
        stop = min(known, start + plan.budget)
        if siblings and stop == known and known - start + len(siblings) > plan.budget:
            # The prompt cannot end in this step, where its siblings would have no rows. Nobody else gets what is left
            # of the budget, or it might never come to be enough for all of them.
            stop, plan.budget = known - 1, known - 1 - start
            if stop == start:
                self._prefilling.append(request)
                return
        targets = None
        if request.wants_prompt_logprobs:
            targets = np.full((stop - start,), NO_TOKEN, np.int32)
            following = request.prompt_token_ids[start + 1 : stop + 1]
            targets[: len(following)] = following
        token_ids = slots.token_ids[slot, start:stop].copy()
        plan.chunks.append(
            Chunk(
                slot,
                start,
                token_ids,
                samples=stop == known and request.score_targets is None,
                prompt_logprob_targets=targets,
                score_targets=request.targets_of(start, stop),
            )
        )
        plan.budget -= stop - start
        slots.num_computed[slot] = stop
        self._register(request, stop)
        if stop < known:
            self._prefilling.append(request)
            return
        if isinstance(request.group, BeamGroup):
            request.group.num_due += 1 + len(siblings)
            plan.budget -= len(siblings)
            plan.runs_beams = True
            return
        slots.compute_limit[slot] = request.max_len - 1
        if siblings:
            self._fork(plan, request, siblings)
        request.group.forked = True

    def _fork(self, plan: PlanInProgress, parent: Request, children: list[Request]) -> None:
        """Starts siblings, whose slots are kept, at the end of the prompt that their parent computes in this step."""
        self._blocks.fork(parent.slot, [child.slot for child in children])
        known, block_ids = self.slots.known(parent.slot).copy(), self.slots.blocks(parent.slot).copy()
        for child in children:
            self.slots.compute_limit[child.slot] = child.max_len - 1
            child.block_digests = parent.block_digests.copy()
            child.num_registered_blocks = parent.num_registered_blocks
            plan.starts.append(slot_start(child, known, block_ids, len(known)))
            plan.chunks.append(Chunk(child.slot, len(known), known[:0], samples=True))
            plan.budget -= 1

    def _admit_waiting(self, plan: PlanInProgress) -> None:
        while plan.budget and self.slots.num_free:
            request = self._waiting.peek()
            if request is None:
                return
            # If it did not fit, and nothing happened since that could make room, it is not looked at again.
            registrations = self.pool.cache.num_registrations if self.pool.cache is not None else 0
            state = (request, self.pool.num_releases, registrations)
            if state == self._blocked:
                return
            admitted = self._admission.admit(plan, request)
            if not admitted and request.swap is not None and not self.slots.num_used:
                self._give_up_swap(request.swap)
                continue
            if not admitted:
                self._blocked = state
                return
            self._waiting.pop()
            if isinstance(request.group, BeamGroup):
                self._searches.add(request.group)
            for member in admitted:
                if plan.budget:
                    self._plan_chunk(plan, member)
                else:
                    self._prefilling.append(member)

    def _give_up_swap(self, record: SwapRecord) -> None:
        """Lets sequences that do not fit the pool together come back one by one, and compute their tokens again: in the
        swap space each has a last block of its own.
        """
        self._waiting.pop()
        members = record.members.copy()
        self.swap_space.discard(record)
        for member in members[0].group.waiting():
            if member in members:
                self._waiting.push(member)

    def _variant(self, runs_beams: bool) -> SamplingVariant:
        """The least program that does for every running request, and for beams if some run in the step."""
        variant = max((v for v in SamplingVariant if self.slots.variant_counts[v]), default=SamplingVariant.GREEDY)
        if not runs_beams:
            return variant
        return SamplingVariant.BEAM if variant == SamplingVariant.GREEDY else SamplingVariant.FULL

    def _in_policy_order(self, slots: np.ndarray) -> np.ndarray:
        """Sorts slots, those that are preempted last first; the sequences of a group stand together, by index."""
        keys = [self.slots.index[slots], self.slots.arrival[slots]]
        if self.config.policy == "priority":
            keys.append(self.slots.priority[slots])
        return slots[np.lexsort(keys)]

    def _preempt_until_fits(self) -> Growth:
        """Preempts from the end of the policy's order until each decoding row can have its blocks.

        What is left over then is less than the last one preempted held, so it does not start again in the same plan.
        """
        running = self._in_policy_order(self.slots.used())
        first = self.slots.requests[running[0]]
        for slot in running[::-1].tolist():
            request = self.slots.requests[slot]
            if request is None:  # preempted with its group
                continue
            alone = first is not None and request.group is first.group and request.group.forked and not request.beam
            self._preempt([request] if alone else request.group.running())
            growth = self._blocks.growth(self._decodable())
            if growth.num_blocks <= self.pool.num_free:
                return growth
        raise EngineDeadError("Blocks are short, though nothing runs that could hold them.")

    def _preempt(self, members: list[Request]) -> None:
        """Takes the slots and blocks of sequences of one group, with nothing in flight, and lets them wait: with their
        blocks in host memory, if the mode says so, their blocks hold what they count as computed, and there is room;
        or with their tokens only.
        """
        mode, group = self.config.preemption_mode, members[0].group
        if (mode == "swap" or (mode == "auto" and len(members) > 1)) and group.can_be_stored:
            started = [member for member in members if self.slots.capacity[member.slot]]
            stored = self.swap_space.store(started, self.slots, self.config.block_size)
            self._counters.num_swap_preemptions += stored
        for request in members:
            self._give_up_slot(request)
            request.status = RequestStatus.PREEMPTED
        for request in group.waiting():
            if request in members:
                self._waiting.push(request)
        members[0].stats.num_preemptions += 1
        self._counters.num_preemptions += 1

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Takes in what a step found. Plans come back in the order in which they were made.

        Returns: an update for each sequence that finished, and for each that got a token and reports every one.

        Raises:
            EngineDeadError: plans out of order, or the device and the scheduler disagree on what runs.
        """
        if not self._in_flight or self._in_flight.popleft() is not plan:
            raise EngineDeadError(f"The results of step {plan.step_id} do not belong to the oldest plan in flight.")
        self._counters.num_shared_prefix_steps += result.read_shared_prefix
        rows_slots, owned, rows = self._sampled_rows(plan, result)
        self._counters.count_step(len(rows))
        now, of_chunks = time.monotonic(), owned[len(plan.decode_slots) :]
        self._note_prompts(plan, result, of_chunks, now)
        updates = self._take_scores(plan, result, of_chunks)
        if self._searches.is_awaited(plan.step_id):
            of_beams = self.slots.is_beam[rows_slots[rows]]
            for group in self._searches.update(plan.step_id, rows_slots, rows[of_beams], result):
                updates += self._finish_search(group)
            rows = rows[~of_beams]
        return updates + self._take_tokens(result, rows_slots, rows, now)

    def _sampled_rows(self, plan: StepPlan, result: StepResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's slot, whether its tenant still has it, and which rows brought their tenants a token.

        Raises EngineDeadError: they are fewer or more than were due.
        """
        rows_slots = plan.decode_slots.astype(np.intp)
        if plan.chunks:
            rows_slots = np.concatenate([rows_slots, np.array([chunk.slot for chunk in plan.chunks], np.intp)])
        owned = self.slots.start_step[rows_slots] <= plan.step_id
        rows = np.flatnonzero(owned & (result.token_ids[:, 0] != NO_TOKEN))
        num_due = int(np.count_nonzero(owned)) - sum(
            not chunk.samples and bool(owned[len(plan.decode_slots) + i]) for i, chunk in enumerate(plan.chunks)
        )
        if len(rows) != num_due:
            raise EngineDeadError(f"Step {plan.step_id} returned {len(rows)} tokens for {num_due} running sequences.")
        return rows_slots, owned, rows

    def _tenants_of_chunks(self, plan: StepPlan, owned: np.ndarray) -> Iterator[tuple[int, Chunk, Request]]:
        """Chunks whose tenants still have their slots, with their rows in the step. owned: bool [chunks]; which do."""
        for i, chunk in enumerate(plan.chunks):
            request = self.slots.requests[chunk.slot] if owned[i] else None
            if request is not None:
                yield len(plan.decode_slots) + i, chunk, request

    def _note_prompts(self, plan: StepPlan, result: StepResult, owned: np.ndarray, now: float) -> None:
        """Takes in what chunks bring beside tokens. owned: as of `_tenants_of_chunks`."""
        for row, chunk, request in self._tenants_of_chunks(plan, owned):
            if chunk.samples and request.stats.first_token_time is None:
                request.stats.first_token_time = now
            if row in result.prompt_logprobs:
                store_prompt_logprobs(request, chunk, result.prompt_logprobs[row])

    def _take_tokens(
        self, result: StepResult, rows_slots: np.ndarray, rows: np.ndarray, now: float
    ) -> list[RequestUpdate]:
        """Takes in the tokens of these rows, ends the sequences whose last they are, and tells of those that report."""
        slots, tokens, codes = self.slots, result.token_ids[:, 0], result.finish_codes
        live = rows_slots[rows]
        slots.token_ids[live, slots.num_known[live]] = tokens[rows]
        slots.num_known[live] += 1
        if result.logprobs is not None:
            for row in rows[slots.wants_logprobs[live]].tolist():
                if (request := slots.requests[rows_slots[row]]) is not None:
                    store_logprobs(request, int(tokens[row]), result.logprobs, row)
        updates = []
        heard = rows[slots.reports[live] | (codes[rows] != FinishCode.RUNNING)]
        for slot, token_id, code in zip(
            rows_slots[heard].tolist(), tokens[heard].tolist(), codes[heard].tolist(), strict=True
        ):
            request = slots.requests[slot]
            if request is None:
                continue
            request.stats.last_token_time = now
            if request.reports_each_token:
                request.output_token_ids.append(token_id)
            if code != FinishCode.RUNNING:
                self._release(request)
                if code == FinishCode.STOP:
                    self._set_finished(request, "stop", request.stop_reason_of(token_id))
                else:
                    self._set_finished(request, "length", None)
            updates.append(
                RequestUpdate(request, [token_id] if request.reports_each_token else request.output_token_ids)
            )
        return updates

    def _finish_search(self, group: BeamGroup) -> list[RequestUpdate]:
        """Ends a search: its members become its hypotheses."""
        updates = []
        for member, found in zip(group.members, group.search.hypotheses, strict=True):
            self._give_up_slot(member)
            member.output_token_ids = found.token_ids
            member.cumulative_logprob, member.score = found.cumulative_logprob, found.score
            member.stats.last_token_time = time.monotonic()
            stop_reason = member.stop_reason_of(found.token_ids[-1]) if found.stopped else None
            self._set_finished(member, "stop" if found.stopped else "length", stop_reason)
            updates.append(RequestUpdate(member, found.token_ids))
        return updates

    def _take_scores(self, plan: StepPlan, result: StepResult, owned: np.ndarray) -> list[RequestUpdate]:
        """Stores the scores of chunks, and ends the requests that have all of theirs. owned: as of
        `_tenants_of_chunks`."""
        updates = []
        for row, chunk, request in self._tenants_of_chunks(plan, owned):
            if request.score_targets is None:
                continue
            stop = chunk.start + len(chunk.token_ids)
            scores = result.scores.get(row)
            if scores is not None:
                request.store_scores(stop, scores)
            if stop == request.prompt_len:
                self._give_up_slot(request)
                self._set_finished(request, "length", None)
                updates.append(RequestUpdate(request, []))
        return updates

    def _register(self, request: Request, num_tokens: int) -> None:
        """Names the full blocks among the first `num_tokens` tokens of a running request, known and computed."""
        cache, slot = self.pool.cache, request.slot
        stop = num_tokens // self.config.block_size
        if cache is None or stop <= request.num_registered_blocks:
            return
        cache.register(
            request.block_digests,
            self.slots.known(slot),
            self.slots.blocks(slot),
            request.num_registered_blocks,
            stop,
            request.cache_salt,
        )
        request.num_registered_blocks = stop

    def _give_up_slot(self, request: Request) -> None:
        """Takes a request out of its slot and tells the device, if it knows of it."""
        if self.slots.capacity[request.slot]:
            self._pending_ends.append(request.slot)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Takes a request out of its slot: keeps its tokens, names its full blocks and frees them.

        Generated blocks get their names here, all at once, rather than one by one in the middle of decode steps:
        nobody can ask for a continuation before it has been returned. A sequence's last known token need not have
        been computed, so a block that ends with it gets none.
        """
        slots, slot = self.slots, request.slot
        known = slots.known(slot)
        self._register(request, min(int(slots.num_computed[slot]), len(known) - 1))
        if not request.reports_each_token:
            request.output_token_ids = known[request.prompt_len :].tolist()
        self._blocks.free(slot)
        slots.release(slot)
        if request in self._prefilling:
            self._prefilling.remove(request)
        if isinstance(request.group, BeamGroup):
            self._searches.discard(request.group)

    def _set_finished(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.stats.finished_time = time.monotonic()
        request.block_digests = []
        if request.group.finished:
            del self._groups[request.request_id]
            self._counters.num_finished += 1

    def stats(self) -> EngineStats:
        """A snapshot of counters and occupancy."""
        counters, slots, pool = self._counters, self.slots, self.pool
        token_slots = pool.num_used * self.config.block_size
        return EngineStats(
            num_running=slots.num_used,
            num_waiting=len(self._waiting),
            num_steps=counters.num_steps,
            num_preemptions=counters.num_preemptions,
            num_swap_preemptions=counters.num_swap_preemptions,
            num_finished=counters.num_finished,
            prompt_tokens=self._admission.num_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_cache_queries=pool.cache.num_queried_tokens if pool.cache is not None else 0,
            prefix_cache_hits=pool.cache.num_hit_tokens if pool.cache is not None else 0,
            prefix_cache_host_hits=pool.cache.num_host_hit_tokens if pool.cache is not None else 0,
            num_blocks=pool.capacity,
            num_used_blocks=pool.num_used,
            num_cached_blocks=len(pool.cache) if pool.cache is not None else 0,
            num_host_cached_blocks=len(self.swap_space.tier) if self.swap_space.tier is not None else 0,
            num_swap_blocks=self.swap_space.num_chunks * SWAP_CHUNK_BLOCKS,
            num_used_swap_blocks=self.swap_space.num_used * SWAP_CHUNK_BLOCKS,
            num_swapped_out=self.swap_space.num_swapped_out,
            num_swapped_in=self.swap_space.num_swapped_in,
            tokens_held=token_slots - self._num_empty_token_slots(),
            token_slots=token_slots,
            num_shared_prefix_steps=counters.num_shared_prefix_steps,
            step_tokens=tuple(counters.step_tokens),
        )

    def _num_empty_token_slots(self) -> int:
        """Token slots of referenced blocks that hold nothing. Sequences that share a last block are equally long."""
        slots = self.slots
        used = slots.used()
        used = used[slots.capacity[used] > 0]
        last_blocks = slots.block_table[used, slots.capacity[used] // self.config.block_size - 1]
        _, distinct = np.unique(last_blocks, return_index=True)
        return int((slots.capacity - slots.num_computed)[used[distinct]].sum())

    def check_integrity(self) -> None:
        """Checks that blocks, tables, slots and queue agree; for tests and for idle moments: it reads everything.

        Raises:
            EngineDeadError: they do not.
        """
        slots = self.slots
        used = slots.used().tolist()
        self.pool.check_integrity([*(slots.blocks(slot) for slot in used), *self._pins.tables()])
        records = {id(m.swap): m.swap for g in self._groups.values() for m in g.members if m.swap is not None}
        self.swap_space.check_integrity(records.values())
        for record in records.values():
            for member, num_computed in zip(record.members, record.num_computed, strict=True):
                if num_computed >= member.prompt_len + len(member.output_token_ids):
                    raise EngineDeadError(f"Request {member.request_id!r} is swapped out with nothing left to compute.")
        running = [request for request in slots.requests if request is not None]
        if [request.slot for request in running] != used or slots.num_used != len(used):
            raise EngineDeadError(f"Slots in use are {used}, tenants hold {[request.slot for request in running]}.")
        groups = self._groups.values()
        states = (sum(len(group.running()) for group in groups), sum(len(list(group.waiting())) for group in groups))
        if (len(running), len(self._waiting)) != states:
            raise EngineDeadError(f"{len(running)} sequences run and {len(self._waiting)} wait, instead of {states}.")
        if (slots.num_computed > slots.capacity).any() or (slots.start_step[slots.capacity > 0] == NEVER).any():
            raise EngineDeadError("A slot has computed more tokens than its blocks hold, or is empty and has blocks.")
