"""Carries out plans on the device: packs what changed, dispatches the step's programs, hands back a handle.

    plan --> [update] --> [move_beams[N]] --> [copy_blocks[N]] --> decode[B], shared_decode[B] or mixed[T]
                                                                        |
                                                                        |--> [sample[R, variant]] --> handle
                                                                        '--> [score[T] ...]       --'

A handle's tokens are on their way to the host.
Nothing here waits for the device and nothing compiles; `Step.result` is the only place that blocks.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import jax
import numpy as np

from jpaged.api.errors import EngineDeadError, InvalidParameterError
from jpaged.engine.interface import (
    NO_TOKEN,
    NULL_BLOCK,
    SWAP_CHUNK_BLOCKS,
    FinishCode,
    HostCopy,
    Logprobs,
    SamplingVariant,
    SlotStart,
    StepPlan,
    StepResult,
    TargetScores,
)
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import state as sampling_state
from jpaged.executor.sampling.logprobs import TargetScores as DeviceScores
from jpaged.executor.sampling.logprobs import TokenLogprobs
from jpaged.executor.start.compilation import Key, Program
from jpaged.executor.step import programs
from jpaged.executor.step.beams import beams_layout
from jpaged.executor.step.buckets import bucket_for
from jpaged.executor.step.copies import copy_layout
from jpaged.executor.step.programs import STARTS_PER_UPDATE, TABLE_UPDATES_PER_UPDATE, Pools, RowKind
from jpaged.executor.step.state import SlotState
from jpaged.executor.step.swap import HostChunks
from jpaged.models.collectives import ExchangeState

_IN_ONE_ORDER = threading.Lock()
"""Held while a program of several devices is dispatched. Each of them runs one program at a time, and in the middle of
it waits for its peers: two that come to the devices in different orders, from engines in threads of their own, would
wait for each other for ever."""


class Step:
    """A dispatched step (`StepHandle`). Its arrays started on their way to the host when it was dispatched.

    when_read: called with the sampled tokens and codes on the device, once the host has them.
    """

    def __init__(
        self,
        num_rows: int,
        sampled: programs.SampleResult | None,
        prompt_scores: tuple[TokenLogprobs, list[tuple[int, int, int]]] | None = None,
        target_scores: tuple[list[DeviceScores], list[tuple[int, int]]] | None = None,
        read_shared_prefix: bool = False,
        when_read: Callable[[jax.Array], None] = lambda _: None,
    ) -> None:
        self._num_rows = num_rows
        self._read_shared_prefix = read_shared_prefix
        self._sampled = sampled
        self._when_read = when_read
        self._tokens_and_codes: np.ndarray | None = None
        self._prompt_scores = prompt_scores
        self._target_scores = target_scores
        arrays = (sampled, prompt_scores and prompt_scores[0], target_scores and target_scores[0])
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        if self._sampled is None or self._tokens_and_codes is not None:
            return True
        return self._sampled.tokens_and_codes.is_ready()  # type: ignore[attr-defined]  # JAX's stubs leave it out

    def result(self) -> StepResult:
        """Each row brings one token at most: the arrays by row and token have a second axis of size 1."""
        tokens = np.full((self._num_rows,), NO_TOKEN, np.int32)
        codes = np.full((self._num_rows,), FinishCode.RUNNING, np.int32)
        logprobs = None
        if self._sampled is not None:
            tokens, codes = self._read(self._sampled.tokens_and_codes)[:, : self._num_rows]
            if self._sampled.logprobs is not None:
                logprobs = _host_logprobs(self._sampled.logprobs, np.s_[: self._num_rows, None])
        prompt_logprobs = {}
        if self._prompt_scores is not None:
            scores, scored_rows = self._prompt_scores
            prompt_logprobs = {row: _host_logprobs(scores, np.s_[start:end]) for row, start, end in scored_rows}
        return StepResult(
            tokens[:, None],
            codes.astype(np.uint8),
            logprobs,
            prompt_logprobs,
            self._host_scores(),
            self._read_shared_prefix,
        )

    def _read(self, tokens_and_codes: jax.Array) -> np.ndarray:
        """A copy of them, which stands when a later step's are written over those on the device."""
        if self._tokens_and_codes is None:
            self._tokens_and_codes = np.array(tokens_and_codes)
            self._when_read(tokens_and_codes)
        return self._tokens_and_codes

    def _host_scores(self) -> dict[int, TargetScores]:
        if self._target_scores is None:
            return {}
        calls, rows = self._target_scores
        logprobs = np.concatenate([np.asarray(call.logprobs) for call in calls])
        greedy = np.concatenate([np.asarray(call.greedy) for call in calls])
        scores, start = {}, 0
        for row, count in rows:
            scores[row] = TargetScores(logprobs[start : start + count], greedy[start : start + count])
            start += count
        return scores


def _host_logprobs(arrays: TokenLogprobs, places: Any) -> Logprobs:
    """places: an index of their rows."""
    return Logprobs(*(np.asarray(array)[places] for array in arrays))


class Runner:
    """Owns the weights, the KV pool and the slot state of one device, and runs plans on them (`Executor`).

    Args:
        programs: every executable, by key, as `Compiler.results` gives them.
        weights, head: the model's flat tuple, and the part of it that `Model.head_logits` reads.
        pools, state, sampling, exchange: device arrays; the runner takes them over and donates them to each program.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        programs: dict[Key, Program],
        vocab_size: int,
        weights: Sequence[jax.Array],
        head: Sequence[jax.Array],
        pools: Pools,
        state: SlotState,
        sampling: sampling_state.SamplingState,
        exchange: ExchangeState | None = None,
    ) -> None:
        self._config = config
        self._programs = programs
        self._arguments = {"weights": tuple(weights), "head": head}
        self._pools = pools
        self._state = state
        self._sampling = sampling
        self._exchange = exchange
        self._full: sampling_state.FullSamplingState | None = None
        self._tokens_read: defaultdict[int, list[jax.Array]] = defaultdict(list)
        is_split = len(pools[0].sharding.device_set) > 1
        self._dispatch: AbstractContextManager[object] = _IN_ONE_ORDER if is_split else nullcontext()
        self._vocab_size = vocab_size
        self._host_chunks = HostChunks()
        self.closed = False

    @property
    def pools(self) -> Pools:
        """The KV pool, as of the last step dispatched."""
        return self._pools

    def execute(self, plan: StepPlan) -> Step:
        """Dispatches `plan` and returns at once.

        Raises:
            EngineDeadError: the runner was closed.
            InvalidParameterError: the plan wants more than one token a row.
        """
        if self.closed:
            raise EngineDeadError("The runner was closed, by another engine on it; start a new one.")
        if plan.tokens_per_row != 1:
            raise InvalidParameterError(f"tokens_per_row={plan.tokens_per_row} is not supported; a step samples 1.")
        for out in plan.swap_outs:
            self._swap_out(out)
        self._apply_changes(plan)
        if len(plan.beams):
            self._move_beams(plan.beams)
        for back in plan.swap_ins:
            self._swap_in(back)
        if len(plan.copies):
            self._copy_blocks(plan.copies)
        if not plan.num_rows:
            return Step(0, None)
        prompt_scores = target_scores = shared_bucket = None
        if plan.chunks:
            hidden, rows, all_hidden = self._run_mixed(plan)
            prompt_scores = self._run_prompt_logprobs(plan, all_hidden)
            target_scores = self._run_score(plan, all_hidden)
        else:
            shared_bucket = self._config.shared_prefix_bucket(len(plan.decode_slots), plan.num_sharing, plan.shared_len)
            hidden, rows = self._run_decode(plan, shared_bucket, shares_prefix=shared_bucket is not None)
        sampled = None
        if len(plan.decode_slots) or any(chunk.samples for chunk in plan.chunks):
            sampled = self._run_sample(hidden, rows, plan.variant)
        read_shared_prefix = shared_bucket is not None
        return Step(plan.num_rows, sampled, prompt_scores, target_scores, read_shared_prefix, self._keep_tokens)

    def close(self) -> None:
        """Frees all that it holds on the device, and in host memory for it. The second time it does nothing."""
        if self.closed:
            return
        self.closed = True
        with suppress(Exception):  # of a step that failed: what it was to bring is freed like the rest
            jax.block_until_ready(self._exchange)  # peers write to it until their steps are done
        held = (self._arguments, self._pools, self._state, self._sampling, self._exchange, self._full)
        for array in jax.tree.leaves((held, list(self._tokens_read.values()))):
            array.delete()
        self._tokens_read.clear()
        self._programs = {}
        self._host_chunks = HostChunks()

    def warm_up(self) -> None:
        """Runs every program once on padding, so that modules are loaded and graphs built before the first request.

        With the one-shot all-reduce one body at a time: what a first run still has to load may take a lock or an idle
        device, and no sum of another program should wait for a peer meanwhile.
        """
        nothing = StepPlan(step_id=-1, variant=SamplingVariant.GREEDY)
        self._update(np.zeros((0,), np.int32), (), nothing.table_updates)
        self._ensure_full_state()
        record = np.zeros((sampling_records.full_record_words(self._vocab_size),), np.int32)
        self._full = self._call(("start_full",), self._full, np.int32(self._config.null_slot), record)
        buffer, _ = programs.known_tokens_layout().new(slot=self._config.null_slot, start=0, prompt_len=0, token_ids=-1)
        self._full = self._call(("known_tokens",), self._full, buffer)
        for size in self._config.copy_buckets:
            self._move_beams(nothing.beams, size)
            self._copy_blocks(nothing.copies, size)
        empty = HostCopy(0, nothing.decode_slots)
        self._swap_out(empty)
        self._swap_in(empty)
        for batch in self._config.decode_buckets:
            hidden, rows = self._run_decode(nothing, batch)
            self._wait_for_exchange()
            for variant in SamplingVariant:
                self._run_sample(hidden, rows, variant)
        for batch in self._config.shared_prefix_buckets:
            self._run_decode(nothing, batch, shares_prefix=True)
            self._wait_for_exchange()
        for tokens in self._config.token_buckets:
            _, _, all_hidden = self._run_mixed(nothing, tokens)
            self._wait_for_exchange()
            all_hidden = self._widened_tokens(all_hidden)
            if (size := all_hidden.shape[0]) == tokens:
                self._call(("prompt_logprobs", size), all_hidden, np.zeros((size,), np.int32))
                self._call(("score", size), all_hidden, programs.score_layout(size).new(tokens=0, targets=0)[0])
        jax.block_until_ready((self._pools, self._state, self._full))
        self._full = None

    def _wait_for_exchange(self) -> None:
        if self._exchange is not None:
            jax.block_until_ready((self._pools, self._exchange))

    def _apply_changes(self, plan: StepPlan) -> None:
        """Ends, then starts with their first blocks; the running sequences' new blocks ride with the step itself."""
        if not len(plan.ends) and not plan.starts:
            return
        for start in plan.starts:
            self._start_full(start)
        entries = np.concatenate([plan.table_updates[:0], *map(_table_entries, plan.starts)])
        # All ends must come before any start, since a slot may end and start anew in one plan.
        ends, starts = plan.ends, plan.starts
        while len(ends) > STARTS_PER_UPDATE:
            self._update(ends[:STARTS_PER_UPDATE], (), entries[:0])
            ends = ends[STARTS_PER_UPDATE:]
        while True:
            self._update(ends, starts[:STARTS_PER_UPDATE], entries[:TABLE_UPDATES_PER_UPDATE])
            ends, starts, entries = ends[:0], starts[STARTS_PER_UPDATE:], entries[TABLE_UPDATES_PER_UPDATE:]
            if not starts and not len(entries):
                return

    def _update(self, ends: np.ndarray, starts: Sequence[SlotStart], entries: np.ndarray) -> None:
        null = self._config.null_slot
        buffer, host = programs.update_layout().new(
            ends=null, slots=null, num_computed_tokens=0, records=0, table_updates=0
        )
        host["ends"][: len(ends)] = ends
        for i, start in enumerate(starts):
            host["slots"][i] = start.slot
            host["num_computed_tokens"][i] = start.num_computed_tokens
            host["records"][i] = sampling_records.core_record(
                start.sampling,
                seed=start.seed,
                stop_token_ids=start.stop_token_ids,
                prompt_len=start.prompt_len,
                max_len=start.max_len,
            )
        _fill_table_updates(host["table_updates"], entries, null)
        self._state, self._sampling = self._call(("update",), self._state, self._sampling, buffer)

    def _start_full(self, start: SlotStart) -> None:
        """Writes the slot's row of the full sampling state, if the request asks for something kept there."""
        if not sampling_records.uses_extras(start.sampling):
            return
        self._ensure_full_state()
        record = sampling_records.full_record(
            start.sampling, vocab_size=self._vocab_size, bad_words_token_ids=start.bad_words_token_ids
        )
        self._full = self._call(("start_full",), self._full, np.int32(start.slot), record)
        for first in range(0, len(start.token_ids), programs.KNOWN_TOKENS_PER_CALL):
            known = start.token_ids[first : first + programs.KNOWN_TOKENS_PER_CALL]
            buffer, host = programs.known_tokens_layout().new(
                slot=start.slot, start=first, prompt_len=start.prompt_len, token_ids=NO_TOKEN
            )
            host["token_ids"][: len(known)] = known
            self._full = self._call(("known_tokens",), self._full, buffer)

    def _ensure_full_state(self) -> None:
        if self._full is None:
            self._full = self._call(("init_full",))

    def _move_beams(self, beams: np.ndarray, bucket: int | None = None) -> None:
        rows = bucket or bucket_for(len(beams), self._config.copy_buckets)
        null = self._config.null_slot
        buffer, host = beams_layout(rows).new()
        host["rows"][...] = (null, null, 0)
        host["rows"][: len(beams)] = beams
        self._state = self._call(("move_beams", rows), self._state, buffer)

    def _copy_blocks(self, copies: np.ndarray, bucket: int | None = None) -> None:
        pairs = bucket or bucket_for(len(copies), self._config.copy_buckets)
        buffer, host = copy_layout(pairs).new(pairs=NULL_BLOCK)
        host["pairs"][: len(copies)] = copies
        self._pools = self._call(("copy_blocks", pairs), self._pools, buffer)

    def _swap_out(self, copy: HostCopy) -> None:
        self._host_chunks.put(copy.chunk, self._call(("gather_blocks",), self._pools, _padded(copy.block_ids)))

    def _swap_in(self, copy: HostCopy) -> None:
        staging = self._host_chunks.take(copy.chunk, copy.keep)
        self._pools = self._call(("scatter_blocks",), self._pools, staging, _padded(copy.block_ids))

    def _run_decode(
        self, plan: StepPlan, bucket: int | None = None, *, shares_prefix: bool = False
    ) -> tuple[jax.Array, programs.Rows]:
        slots = plan.decode_slots
        batch = bucket or bucket_for(len(slots), self._config.decode_buckets)
        null = self._config.null_slot
        buffer, host = programs.decode_layout(batch, shares_prefix).new(slots=null)
        host["slots"][: len(slots)] = slots
        if shares_prefix:
            host["num_sharing"][...], host["shared_len"][...] = plan.num_sharing, plan.shared_len
        updates = self._table_updates_that_fit(plan.table_updates, len(host["table_updates"]))
        _fill_table_updates(host["table_updates"], updates, null)
        hidden, rows = self._run_body("shared_decode" if shares_prefix else "decode", batch, buffer)
        return hidden, rows

    def _run_mixed(self, plan: StepPlan, bucket: int | None = None) -> tuple[jax.Array, programs.Rows, jax.Array]:
        chunks, num_decodes = plan.chunks, len(plan.decode_slots)
        num_tokens = num_decodes + sum(max(1, len(chunk.token_ids)) for chunk in chunks)  # no more rows than tokens
        tokens = bucket or bucket_for(num_tokens, self._config.token_buckets)
        null = self._config.null_slot
        buffer, host = programs.mixed_layout(self._config, tokens).new(slots=null, query_lens=0, kinds=0, tokens=0)
        host["slots"][:num_decodes] = plan.decode_slots
        host["query_lens"][:num_decodes] = 1
        host["kinds"][:num_decodes] = RowKind.DECODE | RowKind.SAMPLES
        first = num_decodes
        for row, chunk in enumerate(chunks, start=num_decodes):
            host["slots"][row] = chunk.slot
            host["query_lens"][row] = len(chunk.token_ids)
            host["kinds"][row] = RowKind.SAMPLES if chunk.samples else 0
            host["tokens"][first : first + len(chunk.token_ids)] = chunk.token_ids
            first += len(chunk.token_ids)
        updates = self._table_updates_that_fit(plan.table_updates, len(host["table_updates"]))
        _fill_table_updates(host["table_updates"], updates, null)
        hidden, rows, all_hidden = self._run_body("mixed", tokens, buffer)
        return hidden, rows, all_hidden

    def _run_body(self, kind: str, rows: int, buffer: np.ndarray) -> list[Any]:
        """Runs a body and keeps what it was donated. Returns its other results."""
        exchange = self._exchange if rows <= self._config.one_shot_rows else None
        donated = (self._pools, self._state, exchange)
        self._pools, self._state, exchange, *results = self._call((kind, rows), *donated, buffer)
        self._exchange = exchange or self._exchange
        return results

    def _run_sample(self, hidden: jax.Array, rows: programs.Rows, variant: SamplingVariant) -> programs.SampleResult:
        hidden, rows = self._widened_rows(hidden, rows, variant)
        full = None
        if variant == SamplingVariant.FULL:
            self._ensure_full_state()
            full = self._full
        key = ("sample", hidden.shape[0], variant)
        earlier = self._earlier_tokens(hidden.shape[0])
        self._state, full, result = self._call(key, hidden, rows, self._state, self._sampling, full, earlier)
        if variant == SamplingVariant.FULL:
            self._full = full
        return result

    def _earlier_tokens(self, rows: int) -> jax.Array | np.ndarray:
        """Tokens and codes [2, rows] that the host has read, for those of another step to be written over.

        There are as many as steps in flight and one more. New buffers would come and go as steps are read, whenever
        that is, and with them the place of what a program needs while it runs. Its CUDA graph has addresses built in:
        each kernel that uses a buffer which has moved since the last run is updated, nearly all of them.
        """
        return self._tokens_read[rows].pop() if self._tokens_read[rows] else np.zeros((2, rows), np.int32)

    def _keep_tokens(self, tokens_and_codes: jax.Array) -> None:
        if self.closed:  # a step that outlived it is read
            tokens_and_codes.delete()
            return
        self._tokens_read[tokens_and_codes.shape[1]].append(tokens_and_codes)

    def _run_prompt_logprobs(
        self, plan: StepPlan, hidden: jax.Array
    ) -> tuple[TokenLogprobs, list[tuple[int, int, int]]] | None:
        """Scores of the step's tokens, and where in them the chunks that asked stand: (row, start, end) each."""
        if all(chunk.prompt_logprob_targets is None for chunk in plan.chunks):
            return None
        hidden = self._widened_tokens(hidden)
        targets = np.zeros((hidden.shape[0],), np.int32)
        scored, start = [], len(plan.decode_slots)
        for row, chunk in enumerate(plan.chunks, start=len(plan.decode_slots)):
            end = start + len(chunk.token_ids)
            if chunk.prompt_logprob_targets is not None:
                scored.append((row, start, end))
                targets[start:end] = chunk.prompt_logprob_targets
            start = end
        return self._call(("prompt_logprobs", hidden.shape[0]), hidden, targets), scored

    def _run_score(self, plan: StepPlan, hidden: jax.Array) -> tuple[list[DeviceScores], list[tuple[int, int]]] | None:
        """Scores of the chunks' targets, one behind the other, and whose they are: (row, count) each."""
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
        layout, room = programs.score_layout(hidden.shape[0]), programs.score_rows(hidden.shape[0])
        calls = []
        for first in range(0, len(all_tokens), room):
            part = slice(first, first + room)
            buffer, host = layout.new(tokens=0, targets=0)
            host["tokens"][: len(all_tokens[part])] = all_tokens[part]
            host["targets"][: len(all_tokens[part])] = all_targets[part]
            calls.append(self._call(("score", hidden.shape[0]), hidden, buffer))
        return calls, rows

    def _widened_rows(self, hidden: jax.Array, rows: programs.Rows, variant: SamplingVariant) -> tuple:
        """Both, padded to a size that the variant's programs exist for."""
        size = bucket_for(hidden.shape[0], self._config.sample_buckets(variant))
        if size == hidden.shape[0]:
            return hidden, rows
        return self._call(("widen", hidden.shape[0], size, False), hidden, rows)

    def _widened_tokens(self, hidden: jax.Array) -> jax.Array:
        """Hidden states of a step's tokens, padded to a size that the programs that score them exist for."""
        size = bucket_for(hidden.shape[0], self._config.scored_buckets)
        if size == hidden.shape[0]:
            return hidden
        return self._call(("widen", hidden.shape[0], size, True), hidden, None)[0]

    def _table_updates_that_fit(self, updates: np.ndarray, room: int) -> np.ndarray:
        """What a step's own buffer can carry; any surplus goes ahead through `update`."""
        while len(updates) > room:
            self._update(updates[:0, 0], (), updates[:TABLE_UPDATES_PER_UPDATE])
            updates = updates[TABLE_UPDATES_PER_UPDATE:]
        return updates

    def _call(self, key: Key, *args: object) -> Any:
        program = self._programs[key]
        if program.takes is not None:
            args = self._arguments[program.takes], *args
        with self._dispatch:
            return program.executable(*args)


def _padded(block_ids: np.ndarray) -> np.ndarray:
    """As many as a chunk has places, the surplus null blocks."""
    padded = np.full((SWAP_CHUNK_BLOCKS,), NULL_BLOCK, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded


def _fill_table_updates(field: np.ndarray, updates: np.ndarray, null_slot: int) -> None:
    field[: len(updates)] = updates
    field[len(updates) :] = (null_slot, 0, 0, NULL_BLOCK)


def _table_entries(start: SlotStart) -> np.ndarray:
    """The entries of a slot's first block tables, as in `StepPlan.table_updates`; none for places without a block."""
    groups, indices = np.nonzero(start.block_ids != NULL_BLOCK)
    return np.stack([np.full(len(groups), start.slot), groups, indices, start.block_ids[groups, indices]], axis=1)
