"""Which sequences run in the next step.

One rule: each sequence's computed tokens catch up with its known tokens under a token budget. A decoding sequence is
one token behind; a prompt, or what a preempted sequence has to compute again, is many behind and is computed in
chunks. Each step serves, in this order and until the budget is spent:

    1. decode rows                one token each of the budget
    2. chunks of running prompts  as many tokens as the budget leaves (`chunks.py`)
    3. waiting requests           in policy order, never past the first that does not fit (`waiting_requests.py`)

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
from jpaged.engine.interface import SamplingVariant, StepPlan
from jpaged.engine.kv.block_manager import Growth
from jpaged.engine.kv.snapshots import StateSnapshots
from jpaged.engine.plan_in_progress import PlanInProgress
from jpaged.engine.scheduler.chunks import Chunks
from jpaged.engine.scheduler.foresight import Foresight
from jpaged.engine.scheduler.preemption import Preemption
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.scheduler.waiting_requests import WaitingRequests
from jpaged.engine.sequences.slots import ORDINARY

_MOST_ABLE_FIRST = tuple(reversed(SamplingVariant))
_NO_SLOTS, _NO_BEAMS, _NO_UPDATES = np.zeros((0,), np.int32), np.zeros((0, 3), np.int32), np.zeros((0, 4), np.int32)
_NO_PAIRS = np.zeros((0, 2), np.int32)


class NoPlan(Enum):
    """Why there is no next step."""

    BLOCKED = "nothing can run before a result in flight is read"
    WAITING = "nothing is in flight, and what can run waits for something that is made elsewhere"
    IDLE = "nothing is in flight, and nothing can run"


class Planner(SchedulerPart):
    """Makes plans, and takes each as executed when it is made.

    in_flight: plans whose results have not been read, oldest first.
    """

    def __init__(self, state: SchedulerState, tenants: Tenants, preemption: Preemption) -> None:
        super().__init__(state)
        self._tenants = tenants
        self._preemption = preemption
        self._chunks = Chunks(state, tenants)
        self._foresight = Foresight(state)
        self._waiting_requests = WaitingRequests(state, tenants, self._chunks, self._foresight)
        self.in_flight: deque[StepPlan] = deque()
        self._next_step_id = 0

    def plan(self) -> StepPlan | NoPlan:
        """The next step, or why there is none."""
        if self._pool.cache is not None:
            self._pool.cache.step_id = self._next_step_id
        if self._snapshots is not None:
            self._snapshots.step_id = self._next_step_id
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
            self._chunks.plan_running(plan)
        self._waiting_requests.admit(plan)
        # A chunk ends with one token, so its step brings one a row; the room that rows have for more stays theirs.
        num_tokens = 1 if plan.chunks else min(growth.num_tokens, self._config.tokens_per_row)
        self._slots.advance(rows, num_tokens)
        if self._snapshots is not None:
            self._save_states(plan, rows, self._snapshots)
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
        if self._slots.shared_prefixes is not None and not plan.chunks and not plan.has_run_ahead:
            rows, num_sharing, shared_blocks = self._slots.shared_prefixes.group(rows)
        ends = self._tenants.take_ends()
        step = StepPlan(
            step_id=plan.step_id,
            variant=self._variant(plan),
            table_parts=tuple(plan.table_parts),
            ends=np.array(ends, np.int32) if ends else _NO_SLOTS,
            starts=tuple(plan.starts),
            swap_outs=self._swap_space.end_plan(),
            swap_ins=tuple(plan.swap_ins),
            beams=np.array(plan.beams, np.int32) if plan.beams else _NO_BEAMS,
            state_loads=np.array(plan.state_loads, np.int32) if plan.state_loads else _NO_PAIRS,
            state_saves=np.array(plan.state_saves, np.int32) if plan.state_saves else _NO_PAIRS,
            mask_slots=plan.mask_slots,
            masks=tuple(plan.masks),
            mask_tokens=plan.mask_tokens,
            mask_backs=plan.mask_backs,
            copies=copies,
            table_updates=table_updates,
            decode_slots=rows.astype(np.int32),
            has_run_ahead=plan.has_run_ahead,
            run_ahead=plan.run_ahead,
            num_sharing=num_sharing,
            shared_len=shared_blocks * self._config.block_size,
            chunks=tuple(plan.chunks),
            tokens_per_row=num_tokens,
            ahead=self._foresight.entries() if self._config.plans_ahead else _NO_UPDATES,
        )
        self._next_step_id += 1
        self.in_flight.append(step)
        return step

    def _save_states(self, plan: PlanInProgress, rows: np.ndarray, snapshots: StateSnapshots) -> None:
        """Keeps copies of the states of rows that come to the end of an interval in this step. Not of rows that wait
        for their results: which tokens these go on from is decided later.
        """
        slots = self._slots
        reach = rows[(slots.num_computed[rows] % snapshots.interval == 0) & (slots.kind[rows] == ORDINARY)]
        for slot in reach.tolist():
            snapshot = snapshots.hold(slot, int(slots.num_computed[slot]), int(slots.num_known[slot]))
            if snapshot is not None:
                plan.state_saves.append((slot, snapshot))

    def _growth_that_fits(self) -> Growth | None:
        """The slots that decode in this step and what they need, after preempting where more blocks are needed than
        are free.

        None, and nothing changed, when blocks are short and there are results to read first. The budget has room for
        all rows, since each was a row of an earlier step and took a token of its budget.
        """
        if self._config.tokens_per_row > 1 and not self._tenants.prefilling:
            growth = self._growth(self._config.tokens_per_row)
            if self._blocks.can_have(growth.num_blocks):
                return growth
        if self._dependents.run_ahead:
            growth = self._blocks.growth(self._rows()[0], 2)
            if self._blocks.can_have(growth.num_blocks):
                return growth
        growth = self._growth()
        if self._blocks.can_have(growth.num_blocks):
            return growth
        if self.in_flight:
            return None
        for _ in self._preemption.one_by_one():
            growth = self._growth()
            if self._blocks.can_have(growth.num_blocks):
                return growth
        raise EngineDeadError("Blocks are short, though nothing runs that could hold them.")

    def _growth(self, num_tokens: int = 1) -> Growth:
        """What the slots need that can decode, for so many tokens each or as many as kinds of rows among them can take:
        those slots that need no result for it, then those that are ready.
        """
        rows, dependent = self._rows()
        if dependent:
            num_tokens = min(num_tokens, self._dependents.most_tokens(dependent))
        return self._blocks.growth(rows, num_tokens)

    def _rows(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """The slots that can decode, int64 [r]; and those among them that wait for results, by kind."""
        rows = self._slots.decodable()
        dependent = self._dependents.rows() if self._dependents else {}
        return np.concatenate([rows, *dependent.values()]) if dependent else rows, dependent

    def _variant(self, plan: PlanInProgress) -> SamplingVariant:
        """The least program that does for every running sequence, and for the kinds of rows that run in the step."""
        counts = self._slots.variant_counts
        variant = next((v for v in _MOST_ABLE_FIRST if counts[v]), SamplingVariant.GREEDY)
        return self._dependents.variant(variant, plan.kinds) if plan.kinds else variant
