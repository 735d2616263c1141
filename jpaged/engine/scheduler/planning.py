"""Which sequences run in the next step.

One rule: each sequence's computed tokens catch up with its known tokens under a token budget. A decoding sequence is
one token behind; a prompt, or what a preempted sequence has to compute again, is many behind and is computed in
chunks. Each step serves, in this order and until the budget is spent:

    1. decode rows                one token each
    2. chunks of running prompts  as many tokens as the budget leaves
    3. waiting requests           in policy order, never past the first that does not fit

A sequence gets the blocks for all its known tokens when it is admitted, so a prompt once begun is never preempted
for its own blocks; only decode rows ask for more, one block at a time.

A request for several sequences is a group (`sequences/group.py`). It is admitted when there are slots for all of them;
the first computes the prompt, and in the step that ends it the others are forked and sample beside it. Each of them
takes one token of that step's budget, as each decodes from the next step on.

Rows that wait for their last result (`constraints/dependent_rows.py`), such as beams, are planned only when it has been
read, while other sequences go on in the steps between. What they need of a step's budget is kept free in all steps.

Plans run ahead of results: a decoding sequence advances by one token a plan, and only the device knows which. Lengths
are known exactly, so no row is planned past the greatest length; a stop token shows late, and what was planned past it
comes back as NO_TOKEN. A slot and its blocks can be handed out again at once: the device runs plans in order, and a
slot that ended writes to the null block.

When decode rows need more blocks than are free, what is in flight is read first; that alone often ends a sequence. Then
others give way (`preemption.py`).
"""

from collections import deque
from enum import Enum

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.constraints.dependent_rows import Dependents
from jpaged.engine.interface import NO_TOKEN, Chunk, SamplingVariant, StepPlan
from jpaged.engine.kv.block_manager import BlockManager, Growth
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.swap_space import SwapSpace
from jpaged.engine.plan_in_progress import PlanInProgress, slot_start
from jpaged.engine.scheduler.admission import Admission
from jpaged.engine.scheduler.preemption import Preemption
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.scheduler.waiting_queue import WaitingQueue
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.slots import Slots


class NoPlan(Enum):
    """Why there is no next step."""

    BLOCKED = "nothing can run before a result in flight is read"
    IDLE = "nothing is in flight, and nothing can run"


class Planner:
    """Makes plans, and takes each as executed when it is made.

    in_flight: plans whose results have not been read, oldest first.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        slots: Slots,
        blocks: BlockManager,
        swap_space: SwapSpace,
        waiting: WaitingQueue,
        tenants: Tenants,
        dependents: Dependents,
        preemption: Preemption,
    ) -> None:
        self._config = config
        self._pool = pool
        self._slots = slots
        self._blocks = blocks
        self._swap_space = swap_space
        self._waiting = waiting
        self._tenants = tenants
        self._dependents = dependents
        self._preemption = preemption
        self.admission = Admission(config, pool, slots, swap_space)
        self.in_flight: deque[StepPlan] = deque()
        self._next_step_id = 0
        self._did_not_fit: tuple[Request, int, int] | None = None

    def plan(self) -> StepPlan | NoPlan:
        """The next step, or why there is none."""
        if self._pool.cache is not None:
            self._pool.cache.step_id = self._next_step_id
        while True:
            growth = self._growth_that_fits()
            step = None if growth is None else self._plan_with(growth)
            if step is not None:
                return step
            if self.in_flight:
                return NoPlan.BLOCKED
            if not self._dependents.wait():
                return NoPlan.IDLE

    def _plan_with(self, growth: Growth) -> StepPlan | None:
        """A step with these decode rows and what else there is room for; None if it would be empty."""
        rows, dependent = growth.rows, self._dependents.rows()
        plan = PlanInProgress(self._next_step_id, budget=0, kinds=set(dependent))
        table_updates, copies = self._blocks.append(growth)
        self._slots.advance(rows)
        self._dependents.planned(plan.step_id, dependent)
        num_ordinary = len(rows) - sum(map(len, dependent.values()))
        plan.budget = self._config.max_num_batched_tokens - num_ordinary - self._dependents.num_due()
        self._plan_chunks(plan)
        self._admit_waiting(plan)
        if plan.copies:
            copies = np.concatenate([copies, np.array(plan.copies, np.int32)])
            for source, _ in plan.copies:  # held until nothing more is allocated in this plan
                self._pool.free(np.array([source], np.int32))
        if not len(rows) and not plan.chunks and not plan.starts:
            return None  # a start goes out even without rows: the device must know of it
        self._swap_space.keep_evicted(self._pool)
        self._dependents.contribute(plan)
        num_sharing = shared_blocks = 0
        if self._slots.shared_prefixes is not None and not plan.chunks:
            rows, num_sharing, shared_blocks = self._slots.shared_prefixes.group(rows)
        step = StepPlan(
            step_id=plan.step_id,
            variant=self._variant(plan),
            ends=np.array(self._tenants.take_ends(), np.int32),
            starts=tuple(plan.starts),
            swap_outs=self._swap_space.end_plan(),
            swap_ins=tuple(plan.swap_ins),
            beams=np.array(plan.beams, np.int32).reshape(-1, 3),
            copies=copies,
            table_updates=table_updates,
            decode_slots=rows.astype(np.int32),
            num_sharing=num_sharing,
            shared_len=shared_blocks * self._config.block_size,
            chunks=tuple(plan.chunks),
        )
        self._next_step_id += 1
        self.in_flight.append(step)
        return step

    def _growth_that_fits(self) -> Growth | None:
        """The slots that decode in this step and what they need, after preempting where more blocks are needed than
        are free.

        None, and nothing changed, when blocks are short and there are results to read first. The budget has room for
        all rows, since each was a row of an earlier step and took a token of its budget.
        """
        growth = self._growth()
        if growth.num_blocks <= self._pool.num_free:
            return growth
        if self.in_flight:
            return None
        for _ in self._preemption.one_by_one():
            growth = self._growth()
            if growth.num_blocks <= self._pool.num_free:
                return growth
        raise EngineDeadError("Blocks are short, though nothing runs that could hold them.")

    def _growth(self) -> Growth:
        """What the slots need that can decode: those that need no result for it, then those that are ready."""
        rows, dependent = self._slots.decodable(), self._dependents.rows()
        return self._blocks.growth(np.concatenate([rows, *dependent.values()]) if dependent else rows)

    def _plan_chunks(self, plan: PlanInProgress) -> None:
        """Continues the prompts that are being computed."""
        prefilling = self._tenants.prefilling
        self._tenants.prefilling = []
        for request in prefilling:
            if plan.budget:
                self._plan_chunk(plan, request)
            else:
                self._tenants.prefilling.append(request)

    def _plan_chunk(self, plan: PlanInProgress, request: Request) -> None:
        slots, slot = self._slots, request.slot
        siblings = request.group.siblings_to_fork
        start, known = int(slots.num_computed[slot]), int(slots.num_known[slot])
        stop = min(known, start + plan.budget)
        if siblings and stop == known and known - start + len(siblings) > plan.budget:
            # The prompt cannot end in this step, where its siblings would have no rows. Nobody else gets what is left
            # of the budget, or it might never come to be enough for all of them.
            stop, plan.budget = known - 1, known - 1 - start
            if stop == start:
                self._tenants.prefilling.append(request)
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
        slots.compute_up_to(slot, stop)
        self._tenants.register(request, stop)
        if stop < known:
            self._tenants.prefilling.append(request)
        else:
            self._end_prefill(plan, request, siblings)

    def _end_prefill(self, plan: PlanInProgress, request: Request, siblings: list[Request]) -> None:
        """All that a sequence knows is computed in this step. Its siblings are forked from it, now or by their kind; a
        token of this step's budget is kept for each.
        """
        plan.budget -= len(siblings)
        going_on = [request]
        if not request.group.forks_itself:
            going_on += siblings
            if siblings:
                self._fork(plan, request, siblings)
            request.group.forked = True
        kind = self._dependents.of(request)
        if kind is not None:
            kind.begins(request.group, [member.slot for member in going_on])
            plan.kinds.add(kind.number)
            return
        for member in going_on:
            self._slots.begin_decoding(member.slot, member.max_len)

    def _fork(self, plan: PlanInProgress, parent: Request, children: list[Request]) -> None:
        """Starts siblings, whose slots are kept, at the end of the prompt that their parent computes in this step."""
        self._blocks.fork(parent.slot, [child.slot for child in children])
        known, block_ids = self._slots.known(parent.slot).copy(), self._slots.blocks(parent.slot).copy()
        for child in children:
            child.block_digests = parent.block_digests.copy()
            child.num_registered_blocks = parent.num_registered_blocks
            plan.starts.append(slot_start(child, known, block_ids, len(known)))
            plan.chunks.append(Chunk(child.slot, len(known), known[:0], samples=True))

    def _admit_waiting(self, plan: PlanInProgress) -> None:
        while plan.budget and self._slots.num_free:
            request = self._waiting.peek()
            if request is None:
                return
            # If it did not fit, and nothing happened since that could make room, it is not looked at again.
            registrations = self._pool.cache.num_registrations if self._pool.cache is not None else 0
            state = (request, self._pool.num_releases, registrations)
            if state == self._did_not_fit:
                return
            admitted = self.admission.admit(plan, request)
            if not admitted and request.swap is not None and not self._slots.num_used:
                self._give_up_swap(request)
                continue
            if not admitted:
                self._did_not_fit = state
                return
            self._waiting.pop()
            kind = self._dependents.of(request)
            if kind is not None:
                kind.admitted(request.group)
            for member in admitted:
                if plan.budget:
                    self._plan_chunk(plan, member)
                else:
                    self._tenants.prefilling.append(member)

    def _give_up_swap(self, request: Request) -> None:
        """Lets sequences that do not fit the pool together come back one by one, and compute their tokens again: in the
        swap space each has a last block of its own.
        """
        record = request.swap
        if record is None:
            return
        self._waiting.pop()
        members = record.members.copy()
        self._swap_space.discard(record)
        for member in request.group.waiting():
            if member in members:
                self._waiting.push(member)

    def _variant(self, plan: PlanInProgress) -> SamplingVariant:
        """The least program that does for every running sequence, and for the kinds of rows that run in the step."""
        variant = max((v for v in SamplingVariant if self._slots.variant_counts[v]), default=SamplingVariant.GREEDY)
        return self._dependents.variant(variant, plan.kinds)
