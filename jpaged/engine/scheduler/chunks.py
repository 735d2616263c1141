"""The part of a plan that computes prompts, and what preempted sequences compute again, chunk by chunk.

plan_one    a chunk of one sequence's known tokens; its full blocks get their names
a halt      where layers keep states, a chunk may end early, with a block, for a snapshot of them (`kv/snapshots.py`)
the last    the step that computes the last known token samples the next one. The siblings of the sequence are
            forked in that step and sample beside it, and all decode from the next step on
"""

import numpy as np

from jpaged.engine.interface import NO_TOKEN, Chunk
from jpaged.engine.plan_in_progress import PlanInProgress, slot_start
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.sequences.request import Request


class Chunks(SchedulerPart):
    """Adds chunks to plans."""

    def __init__(self, state: SchedulerState, tenants: Tenants) -> None:
        super().__init__(state)
        self._tenants = tenants

    def plan_running(self, plan: PlanInProgress) -> None:
        """Continues the prompts that are being computed."""
        prefilling = self._tenants.prefilling
        self._tenants.prefilling = []
        for request in prefilling:
            if plan.budget:
                self.plan_one(plan, request)
            else:
                self._tenants.prefilling.append(request)

    def plan_one(self, plan: PlanInProgress, request: Request) -> None:
        """Computes as much of a running prompt in this step as the budget and its blocks allow. What is left of it
        stands with the tenants that are prefilling.
        """
        slots, slot = self._slots, request.slot
        siblings = request.group.siblings_to_fork
        start, known = int(slots.num_computed[slot]), int(slots.num_known[slot])
        halt = next((at for at in request.snapshot_stops if at > start), known)
        stop = self._blocks.reach(slot, min(known, start + plan.budget, halt))
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
                samples=stop == known and request.samples,
                prompt_logprob_targets=targets,
                score_targets=request.targets_of(start, stop),
                num_pooled=request.num_pooled_of(start, stop),
            )
        )
        plan.budget -= stop - start
        updates = self._blocks.extend(slot, stop, known)
        if len(updates):
            plan.table_updates.append(updates)
        slots.compute_up_to(slot, stop)
        self._tenants.register(request, stop)
        if stop in request.snapshot_stops:
            self._save_state(plan, request, stop // self._config.block_size)
        if stop < known:
            self._tenants.prefilling.append(request)
        else:
            self._end_prefill(plan, request, siblings)

    def _save_state(self, plan: PlanInProgress, request: Request, num_blocks: int) -> None:
        """Keeps a copy of a sequence's states as they are when it has computed so many blocks, in this step."""
        cache, snapshots = self._pool.cache, self._snapshots
        if cache is None or snapshots is None or request.num_registered_blocks < num_blocks:
            return
        digest = request.block_digests[num_blocks - 1]
        snapshot = snapshots.save(digest) if digest in cache.names else None
        if snapshot is not None:
            plan.state_saves.append((request.slot, snapshot))

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
