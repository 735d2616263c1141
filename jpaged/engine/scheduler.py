"""Which sequences run in the next step.

One rule: each sequence's computed tokens catch up with its known tokens under a token budget. A decoding sequence is
one token behind; a prompt, or what a preempted sequence has to compute again, is many behind and is computed in
chunks. Each step serves, in this order and until the budget is spent:

    1. decode rows                one token each
    2. chunks of running prompts  as many tokens as the budget leaves
    3. waiting requests           in policy order, never past the first that does not fit

A sequence gets the blocks for all its known tokens when it is admitted, so a prompt once begun is never preempted
for its own blocks; only decode rows ask for more, one block at a time.

Plans run ahead of results. `schedule` may be called again before the results of earlier plans are given to `update`:
a decoding sequence advances by one token a plan, and only the device knows which. Lengths are known exactly, so no
row is planned past the greatest length; a stop token shows late, and what was planned past it comes back as
NO_TOKEN. Results are matched to tenants by slot and starting step, so a slot and its blocks can be handed out again
at once: the device runs plans in order, and a slot that ended writes to the null block.

When decode rows need more blocks than are free, what is in flight is read first (`schedule` returns None); that
alone often ends a sequence. Then the last in policy order is preempted: it gives up its blocks, keeps its tokens and
waits, to compute them again. The first in policy order is never preempted while another runs, and one sequence
always fits alone, so there is always progress. Swapping blocks to host memory, and preempting the sequences of a
group together, would take the place of `_preempt`; forked sequences are slots whose block tables share blocks.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jpaged.config import SchedulerConfig
from jpaged.engine.block_pool import BlockPool
from jpaged.engine.interface import (
    NO_TOKEN,
    Chunk,
    FinishCode,
    Logprobs,
    SamplingVariant,
    SlotStart,
    StepPlan,
    StepResult,
)
from jpaged.engine.request import FinishReason, Request, RequestStatus
from jpaged.engine.slots import NEVER, Slots
from jpaged.engine.stats import Counters, EngineStats
from jpaged.engine.waiting_queue import WaitingQueue
from jpaged.errors import EngineDeadError, InvalidParameterError, InvalidPromptError, OutOfMemoryError
from jpaged.outputs import Logprob, PositionLogprobs

_UINT64 = 2**64


class RequestUpdate(NamedTuple):
    """Something that a step brought for a request.

    new_token_ids: tokens since its last update: one a step for a request that reports each token, all of them at
        once, when it finishes, for another. `request.finished` says whether they are the last.
    """

    request: Request
    new_token_ids: list[int]


@dataclass(slots=True)
class _PlanInProgress:
    """The parts of a plan whose number is not known beforehand."""

    step_id: int
    budget: int
    starts: list[SlotStart] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class Scheduler:
    """Owns the block pool, the slots and the waiting queue.

    Args:
        config: what it may use.
        seed: of the engine; requests without a seed get one from it and their arrival number, so runs reproduce.
    """

    def __init__(self, config: SchedulerConfig, seed: int = 0) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.slots = Slots(config)
        self._seed = seed
        self._waiting = WaitingQueue(by_priority=config.policy == "priority")
        self._requests: dict[str, Request] = {}
        self._prefilling: list[Request] = []
        self._in_flight: deque[StepPlan] = deque()
        self._pending_ends: list[int] = []
        self._num_arrived = 0
        self._next_step_id = 0
        self._variant_counts = [0] * len(SamplingVariant)
        self._blocked: tuple[Request, int, int] | None = None
        self._counters = Counters()

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been given to `update`."""
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        """Puts a request in the queue. A refused one leaves no trace.

        Raises:
            InvalidPromptError: its prompt leaves no room for a token within max_model_len.
            OutOfMemoryError: its prompt leaves no room for a token within the whole pool.
            InvalidParameterError: its id belongs to an unfinished request.
        """
        config = self.config
        if request.request_id in self._requests:
            raise InvalidParameterError(f"request_id={request.request_id!r} is in use by an unfinished request.")
        if request.prompt_len >= config.max_model_len:
            raise InvalidPromptError(
                f"The prompt of request {request.request_id!r} has {request.prompt_len} tokens; with "
                f"max_model_len={config.max_model_len} at most {config.max_model_len - 1} leave room for a new one."
            )
        pool_tokens = self.pool.capacity * config.block_size
        if request.prompt_len >= pool_tokens:
            raise OutOfMemoryError(
                f"The prompt of request {request.request_id!r} has {request.prompt_len} tokens, but the KV pool holds "
                f"{pool_tokens} ({self.pool.capacity} blocks of {config.block_size}); shorten it or enlarge the pool."
            )
        request.max_len = min(config.max_model_len, pool_tokens)
        if request.sampling.max_tokens is not None:
            request.max_len = min(request.max_len, request.prompt_len + request.sampling.max_tokens)
        request.arrival_number = self._num_arrived
        self._num_arrived += 1
        request.seed = resolve_seed(request.sampling.seed, self._seed, request.arrival_number)
        self._waiting.push(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state, with what it has generated so far, and frees its blocks.

        Returns: the request, or None if there is none unfinished of this id.
        """
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> Request | None:
        """Ends a request for a reason that only the host sees, such as a stop string. Tokens in flight are dropped.

        Returns: the request, or None if there is none unfinished of this id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status == RequestStatus.RUNNING:
            self._pending_ends.append(request.slot)
            self._release(request)
        else:
            self._waiting.count_out()
        self._set_finished(request, reason, stop_reason)
        return request

    def reset_prefix_cache(self) -> bool:
        """Forgets all prefixes, as after a change of weights. Returns False, and does nothing, while requests run."""
        if self.slots.num_used:
            return False
        if self.pool.cache is not None:
            self.pool.cache.reset()
        return True

    def schedule(self) -> StepPlan | None:
        """Plans the next step and takes it as executed: the caller dispatches plans in the order it gets them.

        Returns: None when nothing can run before a result is read (`num_in_flight` > 0), or nothing is there to run.
        """
        grown = self._plan_decode()
        if grown is None:
            return None
        rows, table_updates = grown
        plan = _PlanInProgress(self._next_step_id, self.config.max_num_batched_tokens - len(rows))
        self._plan_chunks(plan)
        self._admit_waiting(plan)
        if not len(rows) and not plan.chunks:
            return None
        ends = np.array(self._pending_ends, np.int32)
        self._pending_ends.clear()
        step = StepPlan(
            step_id=plan.step_id,
            variant=self._variant(),
            ends=ends,
            starts=tuple(plan.starts),
            table_updates=table_updates,
            decode_slots=rows.astype(np.int32),
            chunks=tuple(plan.chunks),
        )
        self._next_step_id += 1
        self._in_flight.append(step)
        return step

    def _plan_decode(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Advances the decoding slots by one token, and returns them and the table updates, int32 [u, 3].

        None, and nothing changed, when blocks are short and there are results to read first. The budget has room for
        all of them, since each was a row of an earlier step and took a token of its budget.
        """
        slots = self.slots
        rows = slots.decodable()
        growing = rows[slots.num_computed[rows] == slots.capacity[rows]]
        if len(growing) > self.pool.num_free:
            if self._in_flight:
                return None
            rows, growing = self._preempt_until_fits(rows, growing)
        table_updates = np.zeros((len(growing), 3), np.int32)
        if len(growing):
            index = slots.capacity[growing] // self.config.block_size
            block_ids = self.pool.allocate(len(growing))
            slots.block_table[growing, index] = block_ids
            slots.capacity[growing] += self.config.block_size
            table_updates[:, 0], table_updates[:, 1], table_updates[:, 2] = growing, index, block_ids
        slots.num_computed[rows] += 1
        return rows, table_updates

    def _plan_chunks(self, plan: _PlanInProgress) -> None:
        """Continues the prompts that are being computed."""
        prefilling = self._prefilling
        self._prefilling = []
        for request in prefilling:
            if plan.budget:
                self._plan_chunk(plan, request)
            else:
                self._prefilling.append(request)

    def _plan_chunk(self, plan: _PlanInProgress, request: Request) -> None:
        slots, slot = self.slots, request.slot
        start, known = int(slots.num_computed[slot]), int(slots.num_known[slot])
        stop = min(known, start + plan.budget)
        targets = None
        if request.wants_prompt_logprobs:
            targets = np.full((stop - start,), NO_TOKEN, np.int32)
            following = request.prompt_token_ids[start + 1 : stop + 1]
            targets[: len(following)] = following
        token_ids = slots.token_ids[slot, start:stop].copy()
        plan.chunks.append(Chunk(slot, start, token_ids, samples=stop == known, prompt_logprob_targets=targets))
        plan.budget -= stop - start
        slots.num_computed[slot] = stop
        self._register(request, stop)
        if stop == known:
            slots.compute_limit[slot] = request.max_len - 1
        else:
            self._prefilling.append(request)

    def _admit_waiting(self, plan: _PlanInProgress) -> None:
        while plan.budget and self.slots.num_free:
            request = self._waiting.peek()
            if request is None or not self._admit(plan, request):
                return
            self._waiting.pop()
            self._plan_chunk(plan, request)

    def _admit(self, plan: _PlanInProgress, request: Request) -> bool:
        """Starts a waiting request in a slot if its known tokens, and the watermark above them, have room."""
        pool, config = self.pool, self.config
        cache = pool.cache
        state = (request, pool.num_releases, cache.num_registrations if cache is not None else 0)
        if state == self._blocked:  # it did not fit, and nothing happened since that could make room
            return False
        token_ids = request.known_token_ids()
        hits = np.zeros((0,), np.int32)
        if cache is not None and not request.wants_prompt_logprobs:
            reusable = (len(token_ids) - 1) // config.block_size  # one token at least is computed, to sample after
            hits = cache.match(request.block_digests, token_ids, reusable, request.cache_salt)
        num_new = -(-len(token_ids) // config.block_size) - len(hits)
        reserve = int(config.watermark * pool.capacity) if self.slots.num_used else 0
        if num_new + pool.num_unreferenced(hits) + reserve > pool.num_free:
            self._blocked = state
            return False
        pool.share(hits)
        block_ids = np.concatenate([hits, pool.allocate(num_new)])
        num_computed = len(hits) * config.block_size
        slot = self.slots.acquire(request, plan.step_id, token_ids, block_ids, num_computed)
        plan.starts.append(
            SlotStart(
                slot=slot,
                token_ids=token_ids,
                prompt_len=request.prompt_len,
                block_ids=block_ids,
                num_computed_tokens=num_computed,
                max_len=request.max_len,
                sampling=request.sampling,
                seed=request.seed,
                stop_token_ids=request.stop_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
            )
        )
        if request.status == RequestStatus.WAITING:
            request.stats.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = num_computed
            self._counters.prompt_tokens += request.prompt_len
            if cache is not None:
                cache.count(request.prompt_len, num_computed)
        request.status = RequestStatus.RUNNING
        request.num_registered_blocks = len(hits)
        self._variant_counts[request.variant] += 1
        return True

    def _variant(self) -> SamplingVariant:
        """The least program that does for every running request."""
        return max((v for v in SamplingVariant if self._variant_counts[v]), default=SamplingVariant.GREEDY)

    def _in_policy_order(self, slots: np.ndarray) -> np.ndarray:
        """Sorts slots, those that are preempted last first."""
        arrival = self.slots.arrival[slots]
        if self.config.policy == "fcfs":
            return slots[np.argsort(arrival)]
        return slots[np.lexsort((arrival, self.slots.priority[slots]))]

    def _preempt_until_fits(self, rows: np.ndarray, growing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Preempts from the end of the policy's order until each growing row can have a block.

        What is left over then is less than the last one preempted held, so it does not start again in the same plan.
        """
        victims = self._in_policy_order(self.slots.used())[::-1].tolist()
        for slot in victims:
            if len(growing) <= self.pool.num_free:
                break
            request = self.slots.requests[slot]
            if request is not None:
                self._preempt(request)
            rows, growing = rows[rows != slot], growing[growing != slot]
        return rows, growing

    def _preempt(self, request: Request) -> None:
        """Takes the slot and the blocks of a request that has nothing in flight, and lets it wait to start again."""
        self._pending_ends.append(request.slot)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.stats.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._waiting.push(request)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Takes in what a step found. Plans come back in the order in which they were made.

        Returns: an update for each request that finished, and for each that got a token and reports every one.

        Raises:
            EngineDeadError: plans out of order, or the device and the scheduler disagree on what runs.
        """
        if not self._in_flight or self._in_flight.popleft() is not plan:
            raise EngineDeadError(f"The results of step {plan.step_id} do not belong to the oldest plan in flight.")
        self._counters.num_steps += 1
        slots = self.slots
        tokens, codes, rows_slots = result.token_ids, result.finish_codes, plan.decode_slots
        if plan.chunks:
            self._store_prompt_logprobs(plan, result)
            rows_slots = np.concatenate([rows_slots, np.array([chunk.slot for chunk in plan.chunks], np.int32)])
        owned = slots.start_step[rows_slots] <= plan.step_id
        sampled = tokens != NO_TOKEN
        rows = np.flatnonzero(owned & sampled)
        num_due = int(np.count_nonzero(owned)) - sum(
            not chunk.samples and bool(owned[len(plan.decode_slots) + i]) for i, chunk in enumerate(plan.chunks)
        )
        if len(rows) != num_due:
            raise EngineDeadError(f"Step {plan.step_id} returned {len(rows)} tokens for {num_due} running sequences.")
        live = rows_slots[rows]
        slots.token_ids[live, slots.num_known[live]] = tokens[rows]
        slots.num_known[live] += 1
        self._counters.generated_tokens += len(rows)

        updates: list[RequestUpdate] = []
        now = time.monotonic()
        for i, chunk in enumerate(plan.chunks, start=len(plan.decode_slots)):
            request = slots.requests[chunk.slot] if owned[i] else None
            if request is not None and chunk.samples and request.stats.first_token_time is None:
                request.stats.first_token_time = now
        if result.logprobs is not None:
            for row in rows[slots.wants_logprobs[live]].tolist():
                self._store_logprobs(int(rows_slots[row]), result.logprobs, row)
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

    def _store_logprobs(self, slot: int, logprobs: Logprobs, row: int) -> None:
        request = self.slots.requests[slot]
        if request is not None and request.logprobs is not None:
            token_id = int(self.slots.token_ids[slot, self.slots.num_known[slot] - 1])
            request.logprobs.append(_position_logprobs(logprobs, row, token_id, request.sampling.logprobs or 0))

    def _store_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        """Appends what is new: a chunk computed again after a preemption brings some positions twice."""
        for row, logprobs in result.prompt_logprobs.items():
            chunk = plan.chunks[row - len(plan.decode_slots)]
            request = self.slots.requests[chunk.slot]
            if request is None or self.slots.start_step[chunk.slot] > plan.step_id or request.prompt_logprobs is None:
                continue
            stop = min(chunk.start + len(chunk.token_ids), request.prompt_len - 1)
            for position in range(len(request.prompt_logprobs), stop + 1):
                request.prompt_logprobs.append(
                    _position_logprobs(
                        logprobs,
                        position - 1 - chunk.start,
                        int(request.prompt_token_ids[position]),
                        request.sampling.prompt_logprobs or 0,
                    )
                )

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
        self.pool.free(slots.blocks(slot))
        slots.release(slot)
        if request in self._prefilling:
            self._prefilling.remove(request)
        self._variant_counts[request.variant] -= 1

    def _set_finished(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.stats.finished_time = time.monotonic()
        request.block_digests = []
        del self._requests[request.request_id]
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
            num_finished=counters.num_finished,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_cache_queries=pool.cache.num_queried_tokens if pool.cache is not None else 0,
            prefix_cache_hits=pool.cache.num_hit_tokens if pool.cache is not None else 0,
            num_blocks=pool.capacity,
            num_used_blocks=pool.num_used,
            num_cached_blocks=len(pool.cache) if pool.cache is not None else 0,
            tokens_held=token_slots - int((slots.capacity - slots.num_computed).sum()),
            token_slots=token_slots,
        )

    def check_integrity(self) -> None:
        """Checks that blocks, tables, slots and queue agree; for tests and for idle moments: it reads everything.

        Raises:
            EngineDeadError: they do not.
        """
        slots = self.slots
        used = slots.used().tolist()
        self.pool.check_integrity(slots.blocks(slot) for slot in used)
        running = [request for request in slots.requests if request is not None]
        if [request.slot for request in running] != used or slots.num_used != len(used):
            raise EngineDeadError(f"Slots in use are {used}, tenants hold {[request.slot for request in running]}.")
        if len(running) + len(self._waiting) != len(self._requests):
            raise EngineDeadError(
                f"{len(running)} requests run and {len(self._waiting)} wait, of {len(self._requests)} unfinished."
            )
        if (slots.num_computed > slots.capacity).any() or (slots.start_step[slots.capacity > 0] == NEVER).any():
            raise EngineDeadError("A slot has computed more tokens than its blocks hold, or is empty and has blocks.")


def resolve_seed(seed: int | None, engine_seed: int, arrival_number: int) -> int:
    """A request's own seed, or one derived from the engine's; an unsigned 64-bit integer.

    The derivation is the SplitMix64 generator's output function (Steele, Lea, Flood 2014), once for each number.
    """
    if seed is not None:
        return seed % _UINT64
    return _mix(_mix(engine_seed % _UINT64) + arrival_number)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % _UINT64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % _UINT64
    return x ^ (x >> 31)


def _position_logprobs(logprobs: Logprobs, row: int, token_id: int, num_top: int) -> PositionLogprobs:
    """The token that is there and the `num_top` most likely ones."""
    position = {token_id: Logprob(float(logprobs.token_logprobs[row]), int(logprobs.token_ranks[row]))}
    top_ids, top_logprobs = logprobs.top_ids[row, :num_top].tolist(), logprobs.top_logprobs[row, :num_top].tolist()
    for rank, (top_id, logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
        position.setdefault(top_id, Logprob(logprob, rank))
    return position
