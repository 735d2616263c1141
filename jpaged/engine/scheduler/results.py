"""What a step found, taken in: tokens stored, sequences ended, callers told.

Results are matched to tenants by slot and starting step: a row whose tenant has left its slot since is passed over, and
so is one of a slot that the device had ended before, which comes back as NO_TOKEN.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.constraints.dependent_rows import Confirmed, Ended
from jpaged.engine.interface import NO_TOKEN, Chunk, FinishCode, Logprobs, StepPlan, StepResult
from jpaged.engine.scheduler.preemption import Preemption
from jpaged.engine.scheduler.state import SchedulerPart, SchedulerState
from jpaged.engine.scheduler.tenants import Tenants
from jpaged.engine.sequences.logprobs import store_logprobs, store_prompt_logprobs
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.slots import ORDINARY

_NOT_FINITE = int(FinishCode.NOT_FINITE)
"""As an int: comparing an array with the member of the enumeration takes three times as long."""


class RequestUpdate(NamedTuple):
    """Something that a step brought for a sequence of a request.

    new_token_ids: tokens since its last update: those of a step for a sequence that reports each token, all of them at
        once, when it finishes, for another. `request.finished` says whether they are the last.
    """

    request: Request
    new_token_ids: list[int]


def joined(updates: Sequence[RequestUpdate]) -> list[RequestUpdate]:
    """The updates of several steps as one for each sequence. A request says already how it has ended, so a caller would
    take the first of two for the last."""
    found: dict[int, RequestUpdate] = {}
    for request, new_token_ids in updates:
        before = found.get(id(request))
        found[id(request)] = RequestUpdate(request, (before.new_token_ids if before else []) + new_token_ids)
    return list(found.values())


_update = partial(tuple.__new__, RequestUpdate)
"""Makes one of a pair in half the time that the class takes."""


def _tell(requests: Sequence[Request | None], brought: list[list[int]], now: float) -> list[RequestUpdate]:
    """The updates of sequences that report each token and go on: what most rows of most steps come to."""
    told = []
    for pair in zip(requests, brought, strict=True):
        request, token_ids = pair
        if request is not None:
            request.stats.last_token_time = now
            request.output_token_ids += token_ids
            told.append(_update(pair))
    return told


class Results(SchedulerPart):
    """Takes in the results of plans, in the order in which the plans were made."""

    def __init__(self, state: SchedulerState, tenants: Tenants, preemption: Preemption) -> None:
        super().__init__(state)
        self._tenants = tenants
        self._preemption = preemption

    def take(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Returns an update for each sequence that finished, and for each that got a token and reports every one.

        Raises:
            EngineDeadError: the device and the scheduler disagree on what runs.
        """
        self._counters.num_shared_prefix_steps += result.read_shared_prefix
        rows_slots, owned, rows, counts = self._sampled_rows(plan, result)
        num_prefilled = sum([len(chunk.token_ids) for chunk in plan.chunks])
        self._counters.count_step(len(rows) if counts is None else int(counts.sum()), num_prefilled)
        now, of_chunks = time.monotonic(), owned[len(plan.decode_slots) :]
        self._note_prompts(plan, result, of_chunks, now)
        updates, before = self._take_unsampled(plan, result, of_chunks), None
        if np.count_nonzero(result.finish_codes) and (result.finish_codes == _NOT_FINITE).any():
            updates += self._end_not_finite(result, rows_slots, rows)
            left = self._slots.start_step[rows_slots[rows]] <= plan.step_id
            rows, counts = rows[left], None if counts is None else counts[left]
        if self._dependents.awaits(plan.step_id):
            rows, ended, before, num_held, stopped = self._dependents.take(plan.step_id, rows_slots, rows, result)
            if stopped:
                result = self._stop(stopped, rows_slots, result)
            updates += [self.end(one) for one in ended]
            self._counters.generated_tokens += sum(map(len, before.values())) - num_held
            self._counters.num_guesses += num_held
        if counts is not None:
            counts = np.count_nonzero(result.token_ids[rows] != NO_TOKEN, axis=1)
        return updates + self._take_tokens(result, rows_slots, rows, counts, now, before or {})

    def _stop(self, rows: Sequence[int], rows_slots: np.ndarray, result: StepResult) -> StepResult:
        """Has these rows' tokens stop their sequences, as the device did not. Returns the result with that."""
        codes = result.finish_codes.copy()
        for row in rows:
            if codes[row] == FinishCode.RUNNING:
                self._tenants.end_on_device(int(rows_slots[row]))
            codes[row] = FinishCode.STOP
        return replace(result, finish_codes=codes)

    def take_confirmed(self, confirmed: Confirmed) -> list[RequestUpdate]:
        """Takes in tokens that a kind of rows has held back; returns updates as `take` does."""
        slots, token_ids, codes, before, ended = confirmed
        for slot in ended:
            self._tenants.end_on_device(slot)
        self._counters.num_kept_guesses += len(slots)
        self._counters.generated_tokens += len(slots) + sum(map(len, before.values()))
        result = StepResult(token_ids[:, np.newaxis], codes)
        return self._take_tokens(result, slots, np.arange(len(slots)), None, time.monotonic(), before)

    def _sampled_rows(
        self, plan: StepPlan, result: StepResult
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Each row's slot, whether its tenant still has it, which rows were due to bring their tenants tokens, and how
        many each of these brought; None for one each.

        Raises EngineDeadError: a row brought fewer than were due.
        """
        rows_slots = plan.decode_slots.astype(np.intp)
        if plan.chunks:
            rows_slots = np.concatenate([rows_slots, np.array([chunk.slot for chunk in plan.chunks], np.intp)])
        owned = self._slots.start_step[rows_slots] <= plan.step_id
        brought, counts = owned & (result.token_ids[:, 0] != NO_TOKEN), None
        due = owned
        if plan.chunks:
            due = owned.copy()
            due[len(plan.decode_slots) :] &= [chunk.samples for chunk in plan.chunks]
        if plan.tokens_per_row > 1 or self._dependents.counts_vary:
            # Of ordinary rows one that goes on has brought all; others may have brought none.
            ordinary = self._slots.kind[rows_slots] == ORDINARY
            counts = np.count_nonzero(result.token_ids != NO_TOKEN, axis=1)
            is_short = (counts < plan.tokens_per_row) & (result.finish_codes == FinishCode.RUNNING)
            brought = np.where(ordinary, brought & ~is_short, due)
        rows, num_due = np.flatnonzero(brought), int(np.count_nonzero(due))
        if len(rows) != num_due:
            raise EngineDeadError(f"Step {plan.step_id} returned {len(rows)} tokens for {num_due} running sequences.")
        return rows_slots, owned, rows, None if counts is None else counts[rows]

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

    def _take_unsampled(self, plan: StepPlan, result: StepResult, owned: np.ndarray) -> list[RequestUpdate]:
        """Stores scores and pooled states of chunks, and ends the requests that have all of theirs. owned: as of
        `_tenants_of_chunks`.
        """
        updates = []
        for row, chunk, request in self._tenants_of_chunks(plan, owned):
            if request.samples:
                continue
            stop = chunk.start + len(chunk.token_ids)
            scores = result.scores.get(row)
            if scores is not None:
                request.store_scores(stop, scores)
            if row in result.pooled:
                request.store_pooled(chunk.start, result.pooled[row])
            if stop == request.prompt_len:
                if request.end_pooling():
                    updates.append(self.end(Ended(request, [], "length", None)))
                else:
                    updates += self._end_pooling_not_finite(request)
        return updates

    def _end_pooling_not_finite(self, request: Request) -> list[RequestUpdate]:
        """As `_end_not_finite`, of a request whose pooled states are not finite."""
        if request.num_cached_tokens > 0 and not request.distrusts_cache:
            request.pooled = None
            self._preemption.start_over([request])
            return []
        written = self._slots.blocks(request.slot).copy()
        self._counters.num_not_finite += 1
        digests = request.block_digests
        update = self.end(Ended(request, [], "error", None))
        self._tenants.drop_cached(written, digests)
        return [update]

    def _end_not_finite(self, result: StepResult, rows_slots: np.ndarray, rows: np.ndarray) -> list[RequestUpdate]:
        """Ends the requests whose logits in these rows are not finite. Their tokens mean nothing and are dropped.

        One that read cached blocks is computed again first, without them: where the request that wrote them is such a
        one, attention's products may have spread its NaN to all tokens that it computed in a step.
        """
        updates = []
        slots = rows_slots[rows[result.finish_codes[rows] == FinishCode.NOT_FINITE]].tolist()
        for slot in slots:
            request = self._slots.requests[slot]
            if request is None:  # ended with another row of its group
                continue
            running = request.group.running()
            started = [member.slot for member in running if self._slots.holds_tokens(member.slot)]
            has_hit = request.group.leader.num_cached_tokens > 0 and not request.distrusts_cache
            if has_hit and set(started) <= set(slots):  # the device has ended them all
                self._preemption.start_over(running)
                continue
            open_members = [member for member in request.group.members if not member.finished]
            self._tenants.end_all(self._tenants.groups[request.request_id], "error")
            self._counters.num_not_finite += 1
            updates += [
                RequestUpdate(member, [] if member.reports_each_token else member.output_token_ids)
                for member in open_members
            ]
        return updates

    def _take_tokens(
        self,
        result: StepResult,
        rows_slots: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray | None,
        now: float,
        before: dict[int, list[int]],
    ) -> list[RequestUpdate]:
        """Takes in the tokens of these rows, ends the sequences whose last they are, and tells of those that report.

        counts: int64 [rows]; how many tokens each brought, None for one each. before: as in `Taken`.
        """
        slots, codes = self._slots, result.finish_codes
        live, tokens = rows_slots[rows], result.token_ids
        if counts is None:
            slots.append_tokens(live, tokens[rows, 0])
        else:
            slots.append_several(live, tokens[rows], counts)
        if result.logprobs is not None:
            self._store_logprobs(result.logprobs, rows_slots, rows[slots.wants_logprobs[live]], tokens)
        updates: list[RequestUpdate] = []
        running = int(FinishCode.RUNNING)
        is_heard = slots.reports[live]
        if some_end := bool(np.count_nonzero(codes)):
            is_heard |= codes[rows] != running
        if counts is not None:
            is_heard &= counts > 0
        if not is_heard.any():
            return updates
        heard = rows[is_heard]
        brought = tokens[heard].tolist()
        if counts is not None:
            brought = [of_row[:count] for of_row, count in zip(brought, counts[is_heard].tolist(), strict=True)]
        requests = slots.requests
        if not some_end and not before:
            return _tell([requests[slot] for slot in live[is_heard].tolist()], brought, now)
        for slot, token_ids, code in zip(live[is_heard].tolist(), brought, codes[heard].tolist(), strict=True):
            request = requests[slot]
            if request is None:
                continue
            request.stats.last_token_time = now
            if reports := request.reports_each_token:
                request.output_token_ids.extend(token_ids)
            if code != running:
                self._tenants.leave(request)
                if code == FinishCode.STOP:
                    self._tenants.end(request, "stop", request.stop_reason_of(token_ids[-1]))
                else:
                    self._tenants.end(request, "length", None)
            if before:
                token_ids = [*before.get(slot, ()), *token_ids]
            updates.append(RequestUpdate(request, token_ids if reports else request.output_token_ids))
        return updates

    def _store_logprobs(
        self, logprobs: Logprobs, rows_slots: np.ndarray, rows: np.ndarray, token_ids: np.ndarray
    ) -> None:
        """Stores those of the tokens of these rows, all of which want them."""
        for row in rows.tolist():
            request = self._slots.requests[rows_slots[row]]
            for k, token_id in enumerate(token_ids[row].tolist()):
                if request is not None and token_id != NO_TOKEN:
                    store_logprobs(request, token_id, logprobs, (row, k))

    def end(self, ended: Ended) -> RequestUpdate:
        """Ends a sequence for which the host knows that it is over."""
        request = ended.request
        self._tenants.give_up(request)
        request.output_token_ids = ended.token_ids
        self._tenants.end(request, ended.reason, ended.stop_reason)
        return RequestUpdate(request, ended.token_ids)
