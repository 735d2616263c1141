"""Carries out plans on the device: packs what changed, dispatches the step's programs, hands back a handle.

    plan --> [gather] --> [update] --> [move_beams[N]] --> [scatter] --> [copy_blocks[N]]
                          (`plan_changes.py`; of recurrent layers `copy_states[N]` after starts that a prefix hits,
                          after beams, after forks, and after steps that snapshots are taken of)
                                            |
             decode[B], shared_decode[B] or mixed[T] --> [set_masks[W]] --> [sample[B, variant]] --> handle
                                                    '--> [score[T] ..., pool[T]] --------------------'

With JPAGED_ONE_CALL_ROWS, a decode step of few rows and a usual variant is one program, decode_and_sample[B, variant].

Masks are sent with a masked variant's sample; set_masks is for masks that do not fit there, and for other variants.

With `StepPlan.run_ahead` the next plan's decode[B] follows at once, and its hidden states wait for that plan's sample.

A handle's tokens are on their way to the host. Nothing here waits for the device, and nothing compiles where all
programs were compiled at start; `DispatchedStep.result` is the only place that blocks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np

from jpaged.api.errors import EngineDeadError, InvalidParameterError
from jpaged.engine.interface import Chunk, SamplingVariant, StepPlan
from jpaged.executor.buckets import bucket_for
from jpaged.executor.cache.paged import Pools
from jpaged.executor.cache.states import States
from jpaged.executor.cache.virtual.memory import VirtualMemory
from jpaged.executor.jax_settings import default_jax_settings
from jpaged.executor.sampling.logprobs import DeviceScores, TokenLogprobs
from jpaged.executor.step.blocks import GatherBlocks, ScatterBlocks
from jpaged.executor.step.bodies import Decode, Mixed, RowFlags, Rows, SharedDecode
from jpaged.executor.step.calls import Calls, CompileOnFirstUse
from jpaged.executor.step.changes import InitFull
from jpaged.executor.step.compiled import CompiledProgram
from jpaged.executor.step.expert_load import ReadExpertTokens
from jpaged.executor.step.handle import DispatchedStep
from jpaged.executor.step.heads import (
    Pool,
    PromptLogprobs,
    Sample,
    SampleResult,
    Score,
    WidenRows,
    WidenTokens,
    sampled_words,
)
from jpaged.executor.step.held import WEIGHTS, Held, held_weights
from jpaged.executor.step.one_call import DecodeAndSample
from jpaged.executor.step.plan_changes import PlanChanges
from jpaged.executor.step.program import PACKED, Setup, StepProgram
from jpaged.executor.step.renewals import Renewals
from jpaged.models import Weights


class Runner:
    """Owns the weights, the KV pool and the slot state of one device, and runs plans on them (`Executor`).

    Args:
        setup: what the programs were made for.
        programs: all of them, as `Compiler.results` gives them; or some, and `compile_others`.
        held: what they read and update (`initial_held`); the runner takes it over, and donates to each program what
            it updates.
        memory: what is below the pools in the virtual layout; None in the paged one.
        compile_others: compiles a program when a step first needs it.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(
        self,
        setup: Setup,
        programs: Mapping[StepProgram, CompiledProgram],
        held: Held,
        memory: VirtualMemory | None = None,
        compile_others: CompileOnFirstUse | None = None,
    ) -> None:
        self._setup = setup
        self._config = setup.config
        calls = Calls(programs, held, compile_others)
        self._programs, self._held, self._dispatch = calls.programs, calls.held, calls.dispatch
        self._packed, self._run = calls.packed, calls.run
        self._changes = PlanChanges(setup, calls)
        self._variants = {v: setup.program_variant(v) for v in SamplingVariant}
        self._num_groups = len(setup.cache.groups)
        self._ahead: tuple[np.ndarray, jax.Array, Rows] | None = None  # slots, and what was computed of them
        self._tokens_read: defaultdict[tuple[int, ...], list[jax.Array]] = defaultdict(list)
        self.memory = memory
        self.closed = False

    @property
    def pools(self) -> Pools:
        """The KV pool, as of the last step dispatched."""
        return self._held["pools"]

    def execute(self, plan: StepPlan) -> DispatchedStep:
        """Dispatches `plan` and returns at once.

        Raises:
            EngineDeadError: the runner was closed.
            InvalidParameterError: the plan wants more than one token a row, or speaks of other cache groups.
        """
        self._check(plan)
        with default_jax_settings():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> DispatchedStep:
        if self.memory is None:
            return self._dispatch_plan(plan)
        mapper = self.memory.mapper
        mapper.prepare(plan, self._wait)
        step = self._dispatch_plan(plan)
        step.when_run = partial(mapper.has_run, mapper.num_steps)
        mapper.dispatched(plan)
        return step

    def _dispatch_plan(self, plan: StepPlan) -> DispatchedStep:
        self._changes.dispatch(plan)
        ahead, self._ahead = self._ahead, None
        if not plan.num_rows:
            self._changes.set_masks(plan, range(len(plan.masks)))
            return DispatchedStep(0, None)
        renewals = Renewals.of(plan)
        if plan.chunks:
            step = self._run_mixed(plan, renewals)
        elif plan.has_run_ahead:
            assert ahead is not None
            step = self._sample_ahead(plan, *ahead)
        else:
            step = self._run_decode(plan, renewals)
        if len(plan.run_ahead):
            # What has not been sent with a step's own body is sent with this one.
            updates = plan.table_updates
            if not plan.has_run_ahead:
                updates, renewals = updates[:0], renewals.without(_slots_of(plan))
            self._ahead = plan.run_ahead, *self._run_body(plan.run_ahead, updates, renewals)
        elif plan.has_run_ahead and len(plan.table_updates):
            self._changes.update_tables(plan.table_updates)
        return step

    def close(self) -> None:
        """Frees all that it holds on the device, and in host memory for it. The second time it does nothing."""
        if self.closed:
            return
        self.closed = True
        with suppress(Exception):  # of a step that failed: what it was to bring is freed like the rest
            jax.block_until_ready(self._held.get("exchange"))  # peers write to it until their steps are done
        if self.memory is not None:
            self.memory.close(self._wait)
        for array in jax.tree.leaves((self._held, list(self._tokens_read.values()))):
            array.delete()
        self._tokens_read.clear()
        self._ahead = None
        self._programs.clear()
        self._changes.forget_host_chunks()

    def sleep(self, level: int) -> None:
        """Gives the memory of the KV pool back, and at level 2 that of the weights. Nothing may be in flight, and
        nothing is dispatched until `wake_up`.
        """
        self._wait()
        self._changes.forget_host_chunks()
        if self.memory is not None:
            self.memory.withdraw_all()
        else:
            self._delete("pools")
        self._delete("recurrent")
        if level == 2:
            self._delete(*WEIGHTS)

    def wake_up(
        self, num_blocks: int, pools: Pools | None, states: States, weights: tuple[jax.Array, ...] | None
    ) -> None:
        """Goes on where `sleep` left off. num_blocks: that have memory in the virtual layout. pools: of zeros, in the
        paged one. states: of zeros, where there are recurrent layers. weights: if they were given back.

        Raises:
            OutOfMemoryError: the device has not the memory for the virtual layout's pages.
            JaxRuntimeError: nor for bundles of weights. Either way the runner is as it was.
        """
        woken = {} if weights is None else held_weights(self._setup, weights)
        if self.memory is not None:
            self.memory.back_first(num_blocks)
        if pools is not None:
            woken["pools"] = pools
        if states:
            woken["recurrent"] = states
        self._held |= woken

    def update_weights(self, change: Callable[[Weights], Weights], start: Weights | None = None) -> None:
        """Lets `change` make the weights anew, which it may donate. Steps that were dispatched had the old ones.

        start: what it begins with, where `sleep` has given the weights back.
        """
        old = self.weights if start is None else start
        assert old is not None
        with self._dispatch:
            weights = change(old)
        self._held |= held_weights(self._setup, weights)

    @property
    def weights(self) -> Weights | None:
        """The weights, as of the last update; None while `sleep` has given them back."""
        weights: Weights | None = self._held.get("weights")
        return weights

    def copy_expert_tokens(self) -> jax.Array:
        """`expert_tokens` as of the last step dispatched; of a runner with `expert_load`."""
        counts: jax.Array = self._run(ReadExpertTokens())
        return counts

    def has_memory(self, num_blocks: int) -> np.ndarray:
        """As `BlockMemory.has_memory`."""
        if self.memory is None:
            return np.ones((num_blocks,), np.bool_)
        self._wait()
        self.memory.mapper.withdraw_all()  # what an engine before gave back
        return self.memory.are_backed(num_blocks)

    def take_memory(self, block_ids: np.ndarray) -> int:
        """As `BlockMemory.take_memory`."""
        return 0 if self.memory is None else self.memory.take(block_ids)

    def give_memory_back(self, block_ids: np.ndarray, nothing_runs: bool) -> None:
        """As `BlockMemory.give_memory_back`."""
        if self.memory is None:
            return
        if len(block_ids):
            self.memory.mapper.retire(block_ids)
        if nothing_runs:  # what only copies blocks has no result to be read, but may still be on its way
            self._wait()
            self.memory.mapper.withdraw_all()

    def _delete(self, *names: str) -> None:
        for array in jax.tree.leaves([self._held.pop(name, ()) for name in names]):
            array.delete()

    def warm_up(self) -> None:
        """Runs every program that is compiled once on padding, so that modules are loaded and graphs built before the
        first request.

        With the one-shot all-reduce one body at a time: what a first run still has to load may take a lock or an idle
        device, and no sum of another program should wait for a peer meanwhile.
        """
        if InitFull() in self._programs:
            self._changes.ensure_full_state()
        for program, compiled in self._programs.items():
            if isinstance(program, InitFull | GatherBlocks | ScatterBlocks):
                continue
            inputs = program.inputs(self._setup)
            idle = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), inputs)
            if compiled.signature.layout is not None:
                idle[PACKED] = self._packed(program)[0]
            self._run(program, **idle)
            if "exchange" in compiled.signature.updates:
                jax.block_until_ready((self._held["pools"], self._held["exchange"]))
        self._changes.swap_nothing()
        jax.block_until_ready((self._held["pools"], self._held["state"], self._held.pop("full", None)))

    def _wait(self) -> None:
        """Until all that was dispatched has run, or failed."""
        with suppress(Exception):
            jax.block_until_ready((self._held.get("pools"), self._held["state"]))

    def _check(self, plan: StepPlan) -> None:
        if self.closed:
            raise EngineDeadError("The runner was closed, by another engine on it; start a new one.")
        if plan.tokens_per_row != 1:
            raise InvalidParameterError(f"tokens_per_row={plan.tokens_per_row} is not supported; a step samples 1.")
        for start in plan.starts:
            if len(start.block_ids) != self._num_groups:
                raise InvalidParameterError(
                    f"block_ids of slot {start.slot} are of {len(start.block_ids)} cache groups, but the model's layers"
                    f" form {self._num_groups}."
                )

    def _run_decode(self, plan: StepPlan, renewals: Renewals) -> DispatchedStep:
        """A step of decode rows alone."""
        slots, config = plan.decode_slots, self._config
        shared = config.shared_prefix_bucket(len(slots), plan.num_sharing, plan.shared_len)
        if shared is None:
            batch = bucket_for(len(slots), config.decode_buckets)
            if config.is_one_call(batch, plan.variant):
                return self._run_one_call(plan, batch, renewals)
            program = Decode(batch)
        else:
            program = SharedDecode(shared)
        buffer, host = self._packed(program)
        if shared is not None:
            host["num_sharing"][...], host["shared_len"][...] = plan.num_sharing, plan.shared_len
        self._fill_decode(host, slots, plan.table_updates, renewals)
        hidden, rows = self._run(program, packed=buffer)
        if len(plan.state_saves):
            self._changes.copy_states(self._saves(plan))
        sampled = self._run_sample(hidden, rows, plan)
        return DispatchedStep(len(slots), sampled, read_shared_prefix=shared is not None, when_read=self._keep_tokens)

    def _run_one_call(self, plan: StepPlan, batch: int, renewals: Renewals) -> DispatchedStep:
        """A step of decode rows alone, body and head in one program. Masks in the plan are for later steps."""
        slots = plan.decode_slots
        program = DecodeAndSample(batch, self._variants[plan.variant])
        buffer, host = self._packed(program)
        self._fill_decode(host, slots, plan.table_updates, renewals)
        if plan.masks:
            self._changes.set_masks(plan, range(len(plan.masks)))
        sampled = self._run(program, packed=buffer, earlier=self._earlier_tokens(sampled_words(program.variant), batch))
        if len(plan.state_saves):  # of what the body has left; the head changes no states
            self._changes.copy_states(self._saves(plan))
        return DispatchedStep(len(slots), sampled, when_read=self._keep_tokens)

    def _run_body(self, slots: np.ndarray, table_updates: np.ndarray, renewals: Renewals) -> tuple[jax.Array, Rows]:
        """Computes the last tokens of these slots; returns hidden states and rows for a head."""
        program = Decode(bucket_for(len(slots), self._config.decode_buckets))
        buffer, host = self._packed(program)
        self._fill_decode(host, slots, table_updates, renewals)
        hidden, rows = self._run(program, packed=buffer)
        return hidden, rows

    def _fill_decode(
        self, host: dict[str, np.ndarray], slots: np.ndarray, table_updates: np.ndarray, renewals: Renewals
    ) -> None:
        host["slots"][: len(slots)] = slots
        self._changes.fill_table_updates(host["table_updates"], table_updates)
        if len(renewals.slots):
            rows, own = renewals.among(slots)
            host["last_tokens"][rows], host["backs"][rows] = own.tokens, own.backs

    def _sample_ahead(self, plan: StepPlan, slots: np.ndarray, hidden: jax.Array, rows: Rows) -> DispatchedStep:
        """A step whose rows were computed behind the one before, among other `slots`."""
        samples: Any = np.zeros((hidden.shape[0],), np.bool_)
        row_of = dict(zip(slots.tolist(), range(len(slots)), strict=True))
        places = np.array([row_of[slot] for slot in plan.decode_slots.tolist()], np.intp)
        samples[places] = True
        sampled = self._run_sample(hidden, rows._replace(samples=samples), plan)
        return DispatchedStep(len(places), sampled, places=places, when_read=self._keep_tokens)

    def _run_mixed(self, plan: StepPlan, renewals: Renewals) -> DispatchedStep:
        """A step with chunks of prompts."""
        chunks, num_decodes = plan.chunks, len(plan.decode_slots)
        num_tokens = num_decodes + sum(max(1, len(chunk.token_ids)) for chunk in chunks)  # no more rows than tokens
        program = Mixed(bucket_for(num_tokens, self._config.token_buckets))
        buffer, host = self._packed(program)
        host["slots"][:num_decodes] = plan.decode_slots
        host["query_lens"][:num_decodes] = 1
        host["flags"][:num_decodes] = RowFlags.DECODE | RowFlags.SAMPLES
        first = num_decodes
        for row, chunk in enumerate(chunks, start=num_decodes):
            host["slots"][row] = chunk.slot
            host["query_lens"][row] = len(chunk.token_ids)
            host["flags"][row] = RowFlags.SAMPLES if chunk.samples else 0
            host["tokens"][first : first + len(chunk.token_ids)] = chunk.token_ids
            first += len(chunk.token_ids)
        if len(renewals.slots):
            rows_renewed, own = renewals.among(_slots_of(plan))
            host["flags"][rows_renewed] |= RowFlags.RENEWED
            host["backs"][rows_renewed] = own.backs
            are_decode = rows_renewed < num_decodes  # their place among rows is that among tokens
            host["tokens"][rows_renewed[are_decode]] = own.tokens[are_decode]
        self._changes.fill_table_updates(host["table_updates"], plan.table_updates)
        hidden, rows, all_hidden = self._run(program, packed=buffer)
        if self._setup.states:
            self._changes.copy_states(np.concatenate([_forks(chunks), self._saves(plan)]))
        prompt_scores = self._run_prompt_logprobs(plan, all_hidden)
        target_scores = self._run_score(plan, all_hidden)
        pooled = self._run_pool(plan, all_hidden)
        sampled = None
        if num_decodes or any(chunk.samples for chunk in chunks):
            sampled = self._run_sample(hidden, rows, plan)
        else:
            self._changes.set_masks(plan, range(len(plan.masks)))
        return DispatchedStep(plan.num_rows, sampled, prompt_scores, target_scores, pooled, when_read=self._keep_tokens)

    def _saves(self, plan: StepPlan) -> np.ndarray:
        """The plan's snapshots, int32 [n, 2]: entries (from, to)."""
        pairs: np.ndarray = plan.state_saves + np.array([0, self._config.max_num_seqs], np.int32)
        return pairs

    def _run_sample(self, hidden: jax.Array, rows: Rows, plan: StepPlan) -> SampleResult:
        batch, variant = hidden.shape[0], plan.variant
        size = bucket_for(batch, self._config.sample_buckets(variant))
        if size != batch:
            hidden, rows = self._run(WidenRows(batch, size), hidden=hidden, rows=rows)
        if variant == SamplingVariant.FULL:
            self._changes.ensure_full_state()
        program = Sample(size, self._variants[variant])
        inputs = {"hidden": hidden, "rows": rows, "earlier": self._earlier_tokens(program.words, size)}
        which: Sequence[int] = range(len(plan.masks))
        room = program.mask_room(self._setup)
        if room is not None:
            inputs[PACKED], host = self._packed(program)
            which = room.fill(host, plan.mask_slots, plan.masks, which)
        self._changes.set_masks(plan, which)
        return self._run(program, **inputs)

    def _earlier_tokens(self, words: int, rows: int) -> jax.Array | np.ndarray:
        """Tokens and codes [words, rows] that the host has read, for those of another step to be written over.

        There are as many as steps in flight and one more. New buffers would come and go as steps are read, whenever
        that is, and with them the place of what a program needs while it runs. Its CUDA graph has addresses built in:
        each kernel that uses a buffer which has moved since the last run is updated, nearly all of them.
        """
        kept = self._tokens_read[words, rows]
        return kept.pop() if kept else np.zeros((words, rows), np.int32)

    def _keep_tokens(self, tokens_and_codes: jax.Array) -> None:
        if self.closed:  # a step that outlived it is read
            tokens_and_codes.delete()
            return
        self._tokens_read[tokens_and_codes.shape].append(tokens_and_codes)

    def _run_prompt_logprobs(
        self, plan: StepPlan, hidden: jax.Array
    ) -> tuple[TokenLogprobs, list[tuple[int, int, int]]] | None:
        """`prompt_scores` of the step's handle. None where no chunk asks for log-probabilities of its prompt."""
        if all(chunk.prompt_logprob_targets is None for chunk in plan.chunks):
            return None
        hidden = self._widened_tokens(hidden)
        program = PromptLogprobs(hidden.shape[0])
        buffer, host = self._packed(program)
        scored, start = [], len(plan.decode_slots)
        for row, chunk in enumerate(plan.chunks, start=len(plan.decode_slots)):
            end = start + len(chunk.token_ids)
            if chunk.prompt_logprob_targets is not None:
                scored.append((row, start, end))
                host["targets"][start:end] = chunk.prompt_logprob_targets
            start = end
        return self._run(program, hidden=hidden, packed=buffer), scored

    def _run_score(self, plan: StepPlan, hidden: jax.Array) -> tuple[list[DeviceScores], list[tuple[int, int]]] | None:
        """`target_scores` of the step's handle. None where no chunk has targets."""
        tokens, targets, rows = [], [], []
        end = len(plan.decode_slots)
        for row, chunk in enumerate(plan.chunks, start=end):
            end += len(chunk.token_ids)
            if chunk.score_targets is not None:
                count = len(chunk.score_targets)
                tokens.append(np.arange(end - count, end, dtype=np.int32))
                targets.append(chunk.score_targets)
                rows.append((row, count))
        if not rows:
            return None
        all_tokens, all_targets = np.concatenate(tokens), np.concatenate(targets)
        hidden = self._widened_tokens(hidden)
        program = Score(hidden.shape[0])
        calls = []
        for first in range(0, len(all_tokens), program.at_once):
            some = all_tokens[first : first + program.at_once]
            buffer, host = self._packed(program)
            host["tokens"][: len(some)] = some
            host["targets"][: len(some)] = all_targets[first : first + program.at_once]
            calls.append(self._run(program, hidden=hidden, packed=buffer))
        return calls, rows

    def _run_pool(self, plan: StepPlan, hidden: jax.Array) -> tuple[jax.Array, list[int]] | None:
        """`pooled` of the step's handle. None where no chunk is pooled."""
        if not any(chunk.num_pooled for chunk in plan.chunks):
            return None
        hidden = self._widened_tokens(hidden)
        program = Pool(hidden.shape[0])
        buffer, host = self._packed(program)
        rows, end = [], len(plan.decode_slots)
        for row, chunk in enumerate(plan.chunks, start=end):
            end += len(chunk.token_ids)
            if chunk.num_pooled:
                host["rows"][end - chunk.num_pooled : end] = row
                rows.append(row)
        return self._run(program, hidden=hidden, packed=buffer), rows

    def _widened_tokens(self, hidden: jax.Array) -> jax.Array:
        """Hidden states of a step's tokens, padded to a size that the programs that score them exist for."""
        tokens = hidden.shape[0]
        size = bucket_for(tokens, self._config.scored_buckets)
        return hidden if size == tokens else self._run(WidenTokens(tokens, size), hidden=hidden)


def _slots_of(plan: StepPlan) -> np.ndarray:
    """The slots of a plan's rows, int32 [rows]: those that decode, then those of chunks."""
    return np.concatenate([plan.decode_slots, np.array([chunk.slot for chunk in plan.chunks], np.int32)])


def _forks(chunks: Sequence[Chunk]) -> np.ndarray:
    """The slots that a step's chunks fork, int32 [n, 2]: (from, to). A chunk without tokens follows the one that it was
    forked from, or another such chunk.
    """
    pairs, parent = [], -1
    for chunk in chunks:
        if len(chunk.token_ids):
            parent = chunk.slot
        else:
            pairs.append((parent, chunk.slot))
    return np.array(pairs, np.int32).reshape(-1, 2)
