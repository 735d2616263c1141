"""Which sequences run in the next step.

One rule: each sequence's computed tokens catch up with its known tokens under a token budget. A decoding sequence is
one token behind; a prompt, or what a preempted sequence has to compute again, is many behind and is computed in
chunks. Each step serves, in this order and until the budget is spent:

    1. decode rows                one token each of the budget
    2. chunks of running prompts  as many tokens as the budget leaves
    3. waiting requests           in policy order, never past the first that does not fit

A sequence gets the blocks for all its known tokens when it is admitted, or, in cache groups with a window, has as many
reserved as it will hold at once (`kv/block_manager.py`). So a prompt once begun is not preempted for its own blocks;
only decode rows ask for more, one block at a time. Exception: a prompt in a windowed group counts on its old blocks
becoming free. If another sequence shares them by then, the prompt waits for free blocks. If nothing else can run, the
last group in policy order is preempted.

A request for several sequences is a group (`sequences/group.py`). It is admitted when there are slots for all of them;
the first computes the prompt, and in the step that ends it the others are forked and sample beside it. Each of them
takes one token of that step's budget, as each decodes from the next step on.

Rows that wait for their last result (`constraints/dependent_rows.py`), such as beams, are planned only when it has been
read, while other sequences go on in the steps between. What they need of a step's budget is kept free in all steps.

Steps without chunks may bring several tokens a row (`SchedulerConfig.tokens_per_row`): a row then claims room for all
of them, and if blocks are short for that, for one.

Plans run ahead of results: a decoding sequence advances by so many tokens a plan, and only the device knows which.
Lengths are known exactly, so no row is planned past the greatest length; a stop token shows late, and what was planned
past it comes back as NO_TOKEN. A slot and its blocks can be handed out again at once: the device runs plans in order,
and a slot that ended writes to the null block.

When decode rows need more blocks than are free, what is in flight is read first; that alone often ends a sequence. Then
others give way (`preemption.py`).
"""

from collections import deque
from enum import Enum

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.interface import NO_TOKEN, Chunk, SamplingVariant, StepPlan
from jpaged.engine.kv.block_manager import Growth
from jpaged.engine.kv.swap_record import SwapRecord
from jpaged.engine.plan_in_progress import PlanInProgress, slot_start
from jpaged.engine.scheduler.admission import Admission
from jpaged.engine.scheduler.preemption import Preemption
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.sequences.request import Request

_MOST_ABLE_FIRST = tuple(reversed(SamplingVariant))
_NO_ENDS, _NO_BEAMS = np.zeros((0,), np.int32), np.zeros((0, 3), np.int32)


class NoPlan(Enum):
    """Why there is no next step."""

    BLOCKED = "nothing can run before a result in flight is read"
    WAITING = "nothing is in flight, and what can run waits for something that is made elsewhere"
    IDLE = "nothing is in flight, and nothing can run"


class Planner(SchedulerPart):
    """Makes plans, and takes each as executed when it is made.

    in_flight: plans whose results have not been read, oldest first.
    """

    def __init__(self, state: SchedulerState, tenants: Tenants, preemption: Preemption, admission: Admission) -> None:
        super().__init__(state)
        self._tenants = tenants
        self._preemption = preemption
        self._admission = admission
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
            if self._dependents.wait():
                return NoPlan.WAITING
            if not self._tenants.prefilling:
                return NoPlan.IDLE
            next(self._preemption.one_by_one())  # prompts wait for blocks that other prompts hold

    def _plan_with(self, growth: Growth) -> StepPlan | None:
        """A step with these decode rows and what else there is room for; None if it would be empty."""
        rows = growth.rows
        plan = PlanInProgress(self._next_step_id, self._config.max_num_batched_tokens - len(rows))
        table_updates, copies = self._blocks.append(growth)
        if self._dependents:
            dependent = self._dependents.rows()
            plan.kinds.update(dependent)
            self._dependents.planned(plan.step_id, dependent)
            plan.budget += sum(map(len, dependent.values())) - self._dependents.num_due()
        if self._tenants.prefilling:
            self._plan_chunks(plan)
        self._admit_waiting(plan)
        # A chunk ends with one token, so its step brings one a row; the room that rows have for more stays theirs.
        num_tokens = 1 if plan.chunks else growth.num_tokens
        self._slots.advance(rows, num_tokens)
        if plan.table_updates:
            table_updates = np.concatenate([table_updates, *plan.table_updates])
        if plan.copies:
            copies = np.concatenate([copies, np.array(plan.copies, np.int32)])
            for source, _ in plan.copies:  # held until nothing more is allocated in this plan
                self._pool.free(np.array([source], np.int32))
        if not len(rows) and not plan.chunks and not plan.starts:
            return None  # a start goes out even without rows: the device must know of it
        self._swap_space.keep_evicted(self._pool)
        if self._dependents:
            self._dependents.contribute(plan)
        num_sharing = shared_blocks = 0
        if self._slots.shared_prefixes is not None and not plan.chunks:
            rows, num_sharing, shared_blocks = self._slots.shared_prefixes.group(rows)
        ends = self._tenants.take_ends()
        step = StepPlan(
            step_id=plan.step_id,
            variant=self._variant(plan),
            ends=np.array(ends, np.int32) if ends else _NO_ENDS,
            starts=tuple(plan.starts),
            swap_outs=self._swap_space.end_plan(),
            swap_ins=tuple(plan.swap_ins),
            beams=np.array(plan.beams, np.int32) if plan.beams else _NO_BEAMS,
            mask_slots=plan.mask_slots,
            masks=plan.masks,
            copies=copies,
            table_updates=table_updates,
            decode_slots=rows.astype(np.int32),
            num_sharing=num_sharing,
            shared_len=shared_blocks * self._config.block_size,
            chunks=tuple(plan.chunks),
            tokens_per_row=num_tokens,
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
        if self._config.tokens_per_row > 1 and not self._tenants.prefilling:
            growth = self._growth(self._config.tokens_per_row)
            if growth.num_blocks <= self._blocks.num_available:
                return growth
        growth = self._growth()
        if growth.num_blocks <= self._blocks.num_available:
            return growth
        if self.in_flight:
            return None
        for _ in self._preemption.one_by_one():
            growth = self._growth()
            if growth.num_blocks <= self._blocks.num_available:
                return growth
        raise EngineDeadError("Blocks are short, though nothing runs that could hold them.")

    def _growth(self, num_tokens: int = 1) -> Growth:
        """What the slots need that can decode, for so many tokens each or as many as kinds of rows among them can take:
        those slots that need no result for it, then those that are ready.
        """
        rows = self._slots.decodable()
        dependent = self._dependents.rows() if self._dependents else {}
        if dependent:
            rows = np.concatenate([rows, *dependent.values()])
            num_tokens = min(num_tokens, self._dependents.most_tokens(dependent))
        return self._blocks.growth(rows, num_tokens)

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
        stop = self._blocks.reach(slot, min(known, start + plan.budget))
        if stop == start:  # what it waits for is shared by others, who give it back when they have gone on
            self._tenants.prefilling.append(request)
            return
        tail = self._tail(request, siblings)
        if tail and stop == known and known - start + tail > plan.budget:
            # The prompt cannot end in this step, where its rows would not all have room. Nobody else gets what is left
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
        updates = self._blocks.extend(slot, stop, known)
        if len(updates):
            plan.table_updates.append(updates)
        slots.compute_up_to(slot, stop)
        self._tenants.register(request, stop)
        if stop < known:
            self._tenants.prefilling.append(request)
        else:
            self._end_prefill(plan, request, siblings)

    def _tail(self, request: Request, siblings: list[Request]) -> int:
        """Tokens of its budget that the step which ends a prompt keeps for the rows that go on from there, besides the
        last one of the prompt: each will take as many of the next step's.
        """
        kind = self._dependents.of(request)
        return (1 + len(siblings)) * (1 if kind is None else kind.most_tokens) - 1

    def _end_prefill(self, plan: PlanInProgress, request: Request, siblings: list[Request]) -> None:
        """All that a sequence knows is computed in this step. Its siblings are forked from it, now or by their kind; a
        token of this step's budget is kept for each.
        """
        plan.budget -= self._tail(request, siblings)
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
            self._slots.begin_decoding(member.slot)

    def _fork(self, plan: PlanInProgress, parent: Request, children: list[Request]) -> None:
        """Starts siblings, whose slots are kept, at the end of the prompt that their parent computes in this step."""
        self._blocks.fork(parent.slot, [child.slot for child in children])
        known, tables = self._slots.known(parent.slot).copy(), self._slots.table(parent.slot).copy()
        for child in children:
            child.block_digests = parent.block_digests.copy()
            child.num_registered_blocks = parent.num_registered_blocks
            plan.starts.append(slot_start(child, known, tables, len(known)))
            plan.chunks.append(Chunk(child.slot, len(known), known[:0], samples=True))

    def _admit_waiting(self, plan: PlanInProgress) -> None:
        while plan.budget and self._slots.num_free:
            request = self._waiting.peek()
            if request is None:
                return
            # If it did not fit, and nothing happened since that could make room, it is not looked at again.
            registrations = self._pool.cache.num_registrations if self._pool.cache is not None else 0
            state = (request, self._pool.num_releases + self._blocks.num_unreserved, registrations)
            if state == self._did_not_fit:
                return
            admitted = self._admission.admit(plan, request)
            if not admitted and request.swap is not None and not self._slots.num_used:
                self._give_up_swap(request, request.swap)
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

    def _give_up_swap(self, request: Request, record: SwapRecord[Request]) -> None:
        """Lets sequences that do not fit the pool together come back one by one, and compute their tokens again: in the
        swap space each has a last block of its own.
        """
        self._waiting.pop()
        members = record.members.copy()
        self._swap_space.discard(record)
        for member in request.group.waiting():
            if member in members:
                self._waiting.push(member)

    def _variant(self, plan: PlanInProgress) -> SamplingVariant:
        """The least program that does for every running sequence, and for the kinds of rows that run in the step."""
        counts = self._slots.variant_counts
        variant = next((v for v in _MOST_ABLE_FIRST if counts[v]), SamplingVariant.GREEDY)
        return self._dependents.variant(variant, plan.kinds) if plan.kinds else variant
