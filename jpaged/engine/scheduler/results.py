"""What a step found, taken in: tokens stored, sequences ended, callers told.

Results are matched to tenants by slot and starting step: a row whose tenant has left its slot since is passed over, and
so is one of a slot that the device had ended before, which comes back as NO_TOKEN.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.constraints.dependent_rows import Dependents, Ended
from jpaged.engine.interface import NO_TOKEN, Chunk, FinishCode, StepPlan, StepResult
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.sequences.logprobs import store_logprobs, store_prompt_logprobs
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.slots import Slots
from jpaged.engine.stats import Counters


class RequestUpdate(NamedTuple):
    """Something that a step brought for a sequence of a request.

    new_token_ids: tokens since its last update: one a step for a sequence that reports each token, all of them at
        once, when it finishes, for another. `request.finished` says whether they are the last.
    """

    request: Request
    new_token_ids: list[int]


class Results:
    """Takes in the results of plans, in the order in which the plans were made."""

    def __init__(self, slots: Slots, tenants: Tenants, dependents: Dependents, counters: Counters) -> None:
        self._slots = slots
        self._tenants = tenants
        self._dependents = dependents
        self._counters = counters

    def take(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Returns an update for each sequence that finished, and for each that got a token and reports every one.

        Raises:
            EngineDeadError: the device and the scheduler disagree on what runs.
        """
        self._counters.num_shared_prefix_steps += result.read_shared_prefix
        rows_slots, owned, rows = self._sampled_rows(plan, result)
        self._counters.count_step(len(rows))
        now, of_chunks = time.monotonic(), owned[len(plan.decode_slots) :]
        self._note_prompts(plan, result, of_chunks, now)
        updates = self._take_scores(plan, result, of_chunks)
        if self._dependents.awaits(plan.step_id):
            rows, ended = self._dependents.take(plan.step_id, rows_slots, rows, result)
            updates += [self._end(one) for one in ended]
        return updates + self._take_tokens(result, rows_slots, rows, now)

    def _sampled_rows(self, plan: StepPlan, result: StepResult) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's slot, whether its tenant still has it, and which rows brought their tenants a token.

        Raises EngineDeadError: they are fewer or more than were due.
        """
        rows_slots = plan.decode_slots.astype(np.intp)
        if plan.chunks:
            rows_slots = np.concatenate([rows_slots, np.array([chunk.slot for chunk in plan.chunks], np.intp)])
        owned = self._slots.start_step[rows_slots] <= plan.step_id
        rows = np.flatnonzero(owned & (result.token_ids != NO_TOKEN))
        num_due = int(np.count_nonzero(owned)) - sum(
            not chunk.samples and bool(owned[len(plan.decode_slots) + i]) for i, chunk in enumerate(plan.chunks)
        )
        if len(rows) != num_due:
            raise EngineDeadError(f"Step {plan.step_id} returned {len(rows)} tokens for {num_due} running sequences.")
        return rows_slots, owned, rows

    def _tenants_of_chunks(self, plan: StepPlan, owned: np.ndarray) -> Iterator[tuple[int, Chunk, Request]]:
        """Chunks whose tenants still have their slots, with their rows in the step. owned: bool [chunks]; which do."""
        for i, chunk in enumerate(plan.chunks):
            request = self._slots.requests[chunk.slot] if owned[i] else None
            if request is not None:
                yield len(plan.decode_slots) + i, chunk, request

    def _note_prompts(self, plan: StepPlan, result: StepResult, owned: np.ndarray, now: float) -> None:
        """Takes in what chunks bring beside tokens. owned: as of `_tenants_of_chunks`."""
        for row, chunk, request in self._tenants_of_chunks(plan, owned):
            if chunk.samples and request.stats.first_token_time is None:
                request.stats.first_token_time = now
            if row in result.prompt_logprobs:
                store_prompt_logprobs(request, chunk, result.prompt_logprobs[row])

    def _take_scores(self, plan: StepPlan, result: StepResult, owned: np.ndarray) -> list[RequestUpdate]:
        """Stores the scores of chunks, and ends the requests that have all of theirs. owned: as of
        `_tenants_of_chunks`.
        """
        updates = []
        for row, chunk, request in self._tenants_of_chunks(plan, owned):
            if request.score_targets is None:
                continue
            stop = chunk.start + len(chunk.token_ids)
            scores = result.scores.get(row)
            if scores is not None:
                request.store_scores(stop, scores)
            if stop == request.prompt_len:
                updates.append(self._end(Ended(request, [], "length", None)))
        return updates

    def _take_tokens(
        self, result: StepResult, rows_slots: np.ndarray, rows: np.ndarray, now: float
    ) -> list[RequestUpdate]:
        """Takes in the tokens of these rows, ends the sequences whose last they are, and tells of those that report."""
        slots, tokens, codes = self._slots, result.token_ids, result.finish_codes
        live = rows_slots[rows]
        slots.append_tokens(live, tokens[rows])
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
                self._tenants.leave(request)
                if code == FinishCode.STOP:
                    self._tenants.end(request, "stop", request.stop_reason_of(token_id))
                else:
                    self._tenants.end(request, "length", None)
            updates.append(
                RequestUpdate(request, [token_id] if request.reports_each_token else request.output_token_ids)
            )
        return updates

    def _end(self, ended: Ended) -> RequestUpdate:
        """Ends a sequence for which the host knows that it is over."""
        request = ended.request
        self._tenants.give_up(request)
        request.output_token_ids = ended.token_ids
        self._tenants.end(request, ended.reason, ended.stop_reason)
        return RequestUpdate(request, ended.token_ids)
