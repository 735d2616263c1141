"""Compiles the step programs ahead of time, in parallel, from shapes alone.

    kept on disk?  --yes-->  load                                          (ExecutableCache)
         | no
    a body that other processes can compile as well?  --yes-->  wait, load (CompileProcesses)
         | no
    lower in the caller's thread, compile in a pool of threads

After this nothing compiles: the runner holds executables, and an executable refuses inputs of another shape.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jpaged.engine.interface import SWAP_CHUNK_BLOCKS, SamplingVariant
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import EXCHANGE, POOL, STAGING, TOKEN_COUNTS, WHOLE, DeviceMesh, Specs
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import sampler
from jpaged.executor.sampling import state as sampling_state
from jpaged.executor.start.compile_processes import CompileProcesses, Key, are_many
from jpaged.executor.start.executable_cache import KEPT_PLATFORMS, ExecutableCache
from jpaged.executor.start.worker_threads import WorkerThreads
from jpaged.executor.step import programs
from jpaged.executor.step.beams import beams_layout, move_beams_step
from jpaged.executor.step.buckets import bucket_for
from jpaged.executor.step.copies import copy_blocks_step, copy_layout
from jpaged.executor.step.state import initial_slot_state
from jpaged.executor.step.swap import abstract_staging, gather_step, scatter_step
from jpaged.host.cores import usable_cores
from jpaged.models import Model
from jpaged.models.collectives import ExchangeState
from jpaged.pallas_kernels import initial_all_reduce_state

_Takes = Literal["weights", "head", None]
Origin = Literal["compiled", "shared", "kept"]

CACHE_DIR_VARIABLE = "JPAGED_CACHE_DIR"

_AUTOTUNED_ROWS = 16
_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Products of more rows go to cuBLASLt, by its own heuristics. Trying algorithms out, as XLA does by default, takes
twice as long to compile, chooses differently from start to start when many threads compile at once, and on an H200
won nothing: a decode step of 256 rows took 6.0 ms instead of 6.4 (Qwen3-0.6B), 12.8 instead of 12.8 (Llama-3.1-8B).
Up to 16 rows XLA's own kernels win: 4.5 ms instead of 4.7 for one row of Llama-3.1-8B."""

_PATIENCE_S = 120.0
"""Longest to wait for other processes to compile their shares: tens of times what one takes."""


@dataclass(frozen=True)
class Program:
    """An executable, and whether its first argument is the model's weights, or those of its head.

    origin: "compiled" by this process, "shared" by a helper, or "kept" in the cache by an earlier start or a replica.
    lowering_s, compiling_s, loading_s: what that took here.
    """

    executable: jax.stages.Compiled
    takes: _Takes = None
    origin: Origin = "compiled"
    lowering_s: float = 0.0
    compiling_s: float = 0.0
    loading_s: float = 0.0

    @cached_property
    def _memory(self) -> Any:
        return self.executable.memory_analysis()

    @property
    def temp_bytes(self) -> int:
        """Device memory it needs while it runs, beyond its arguments and results."""
        return self._memory.temp_size_in_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of its results."""
        return self._memory.output_size_in_bytes

    @property
    def alias_bytes(self) -> int:
        """Bytes of results that are arguments updated in place."""
        return self._memory.alias_size_in_bytes


def cache_directory(name: str) -> Path | None:
    """Where compiled programs are kept between runs: "xla" by JAX, "programs" by `ExecutableCache`.

    `JPAGED_CACHE_DIR` chooses the directory above ($XDG_CACHE_HOME/jpaged, else ~/.cache/jpaged); empty means None.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = (Path(chosen) if chosen else base / "jpaged") / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a read-only home: start a little slower rather than not at all
    return directory


def enable_persistent_cache() -> Path | None:
    """Points JAX's compilation cache at a directory of the user's, unless one is set already."""
    if directory := jax.config.values["jax_compilation_cache_dir"]:
        return Path(directory)
    directory = cache_directory("xla")
    if directory is None:
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


def abstract_pools(config: ExecutorConfig, model: Model, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the KV pool: for each layer [num_blocks, 2, kv_heads, block_size, head_dim]; a shard's for a shard."""
    shape = (config.num_blocks, 2, model.config.num_kv_heads, config.block_size, model.config.head_dim)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for _ in range(model.config.num_layers))


def abstract_exchange(config: ExecutorConfig, model: Model, mesh: DeviceMesh) -> ExchangeState | None:
    """Shapes of the one-shot all-reduce's state on all devices; None where no body takes it."""
    if not config.one_shot_rows:
        return None
    state = initial_all_reduce_state(mesh.size, config.one_shot_rows, model.config.hidden_size, model.dtype)
    return jax.tree.map(partial(mesh.split, spec=EXCHANGE), ExchangeState(*state))


@dataclass(frozen=True)
class _Task:
    """A program to compile.

    devices: what it runs on. path: where it is kept, if anywhere. autotuned: whether XLA tries algorithms out for it.
    """

    key: Key
    jitted: Any
    args: tuple
    options: dict[str, Any]
    takes: _Takes
    devices: tuple[jax.Device, ...]
    path: Path | None
    autotuned: bool

    @property
    def is_kept(self) -> bool:
        return self.path is not None and self.path.exists()

    def load(self, origin: Origin) -> Program | None:
        """None if there is none, or it cannot be used."""
        begun = time.perf_counter()
        loaded = None if self.path is None else ExecutableCache.load(self.path, self.devices)
        seconds = time.perf_counter() - begun
        return None if loaded is None else Program(loaded, self.takes, origin, loading_s=seconds)

    def lower(self) -> Callable[[], Program | None]:
        """Returns what compiles it."""
        begun = time.perf_counter()
        lowered = self.jitted.lower(*self.args)
        return partial(self._compile, lowered, time.perf_counter() - begun)

    def _compile(self, lowered: jax.stages.Lowered, lowering_s: float) -> Program:
        begun = time.perf_counter()
        compiled = lowered.compile(compiler_options=self.options)
        if self.path is not None:
            ExecutableCache.save(self.path, compiled)
        return Program(compiled, self.takes, "compiled", lowering_s, time.perf_counter() - begun)


@dataclass
class _Pending:
    """A program on its way. elsewhere: done when another process has left it in the cache, or will not."""

    task: _Task
    future: Future[Program | None] | None
    elsewhere: Future[None] | None = None

    def wait(self) -> Program | None:
        return None if self.future is None else self.future.result()


class Compiler:
    """Lowers programs one by one and compiles them in a pool of threads (XLA releases the interpreter lock).

    Lowering is always done by the caller's thread, whose JAX settings it depends on.

    model: what each device of the mesh runs (`DeviceMesh.shard_of`).
    threads: the pool; one of its own by default.
    helpers: processes that compile a share of the bodies, where there are any.
    kept_on: platforms whose programs are kept on disk (`ExecutableCache`).
    """

    def __init__(
        self,
        model: Model,
        config: ExecutorConfig,
        kv_dtype: Any,
        mesh: DeviceMesh,
        *,
        threads: WorkerThreads | None = None,
        helpers: CompileProcesses | None = None,
        kept_on: Collection[str] = KEPT_PLATFORMS,
    ) -> None:
        self._model = model
        self._config = config
        self._mesh = mesh
        pools = abstract_pools(config, model, kv_dtype)
        self._pools = tuple(mesh.split(pool, POOL) for pool in pools)
        self._staging = mesh.split(abstract_staging(pools), STAGING)
        self._state = jax.eval_shape(partial(initial_slot_state, config))
        self._exchange = abstract_exchange(config, model, mesh)
        self._weights = mesh.weights(model)
        self._sampling = jax.eval_shape(partial(sampling_state.init_state, config.max_num_seqs))
        self._full_of_shard = jax.eval_shape(self._init_full_state)
        counts = mesh.split(self._full_of_shard.token_counts, TOKEN_COUNTS)
        self._full = self._full_of_shard._replace(token_counts=counts)
        self._full_specs = jax.tree.map(lambda _: WHOLE, self._full)._replace(token_counts=TOKEN_COUNTS)
        self._helpers = helpers
        self._threads = threads or WorkerThreads(usable_cores())
        depends_on = (model.config, model.vocab_size, model.dtype, model.source_digest, config, mesh.key)
        self._cache = ExecutableCache(cache_directory("programs"), depends_on, kept_on)
        self._pending: dict[Key, _Pending] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes of the slot state, both sampling states and the all-reduce's state together, on one device."""
        leaves = jax.tree.leaves((self._state, self._sampling, self._full_of_shard))
        split = jax.tree.leaves(self._exchange)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + sum(
            leaf.size * leaf.dtype.itemsize // self._mesh.size for leaf in split
        )

    def submit_all(self) -> None:
        """Every program the runner may need."""
        self.submit_bodies()
        self.submit_heads()

    def submit_bodies(self) -> None:
        """The programs that depend on the size of the pool."""
        steps = self._steps()
        if self._helpers is not None:
            # What is autotuned stays here: processes that time kernels at once on one device spoil each other's clock.
            shared = [task.key for task in self._claim(steps) if not task.autotuned]
            elsewhere = self._helpers.share_out(self._config, shared)
            for task in steps:
                if task.key in elsewhere and task.key not in self._pending:
                    self._pending[task.key] = _Pending(task, None, elsewhere[task.key])
        for task in steps:
            self._start(task)
        self.submit_forks()
        self.submit_swaps()

    def submit_heads(self) -> None:
        """The programs that do not."""
        for key, task in self._heads():
            self._start(task, key)

    def call_helpers(self) -> None:
        """Starts the helpers if so many heads have to be compiled that the bodies are likely to be missing as well.

        They are ready seconds later. Which bodies are missing is known only when the size of the pool is; if by then
        they have not been started, and are worth it, they will be.
        """
        if self._helpers is not None and are_many(self._claim([task for _, task in self._heads()])):
            self._helpers.start()

    def _claim(self, tasks: Sequence[_Task]) -> list[_Task]:
        """Those that are to be compiled for the cache.

        If they are many, only one process does so at a time. This one waits for its turn, and then claims what the
        other one has not left there.
        """
        missing = _missing(tasks)
        if self._helpers is not None and self._cache.claim is not None and are_many(missing):
            self._helpers.turns.take(self._cache.claim)
            missing = _missing(tasks)
            if not are_many(missing):
                self._helpers.turns.end(self._cache.claim)
        return missing

    def submit_largest(self) -> tuple[Key, ...]:
        """The programs that need most memory while they run, or have the largest results. Returns their keys."""
        tokens, rows = self._config.token_buckets[-1], self._config.decode_buckets[-1]
        self.submit_mixed(tokens)
        self.submit_sample(rows, SamplingVariant.FULL)
        self._start(self._prompt_logprobs(tokens))
        self._start(self._score(tokens))
        heads: tuple[Key, ...] = ("sample", rows, SamplingVariant.FULL), ("prompt_logprobs", tokens), ("score", tokens)
        return ("mixed", tokens), *heads

    def result(self, key: Key) -> Program:
        """Waits for one of the programs submitted."""
        self._compile_what_is_missing([self._pending[key]])
        program = self._pending[key].wait()
        assert program is not None
        return program

    def results(self, *, progress: bool = False) -> dict[Key, Program]:
        """Waits for everything submitted."""
        distinct = {id(one): one for one in self._pending.values()}.values()
        with tqdm(total=len(distinct), desc="compiling", unit="program", disable=not progress, leave=False) as bar:
            self._compile_what_is_missing(distinct, bar.update)
        results = {key: self.result(key) for key in self._pending}
        if self._helpers is not None and self._cache.claim is not None:
            self._helpers.turns.end(self._cache.claim)
        return results

    def _compile_what_is_missing(
        self, pending: Collection[_Pending], done: Callable[[], object] = lambda: None
    ) -> None:
        """Waits for them. What others fail to leave in the cache, or cannot be loaded from it, is submitted again."""
        shared = [(one, one.elsewhere) for one in pending if one.elsewhere is not None]
        for one in pending:
            if one.elsewhere is None:
                if one.wait() is None:
                    one.future = self._threads.submit(one.task.lower())
                done()
        until = time.monotonic() + _PATIENCE_S
        for one, elsewhere in shared:
            with suppress(TimeoutError):
                elsewhere.result(max(0.0, until - time.monotonic()))
            one.future, one.elsewhere = self._threads.submit(one.task.load, "shared"), None
            done()
        for one, _ in shared:
            if one.wait() is None:
                one.future = self._threads.submit(one.task.lower())

    def compile_steps(self, keys: Collection[Key]) -> Iterator[Key]:
        """Compiles those of the bodies for the cache alone: yields each when it is there.

        Ends at the first that cannot be kept: the others, of the same kind, would be compiled in vain.
        """
        tasks = {task.key: task for task in self._steps() if task.key in keys}
        for task in tasks.values():
            self._start(task)
        for key in keys:
            self.result(key)
            if not tasks[key].is_kept:
                return
            yield key

    def _heads(self) -> Iterator[tuple[Key, _Task]]:
        """The programs that do not depend on the size of the pool, each by its name; some have several."""
        yield from _by_key(self._update())
        for variant in SamplingVariant:
            sizes = self._config.sample_buckets(variant)
            for batch in sizes:
                yield ("sample", batch, variant), self._sample(batch, variant)
            for batch in set(self._config.decode_buckets) - set(sizes):
                yield from _by_key(self._widen(batch, bucket_for(batch, sizes), of_tokens=False))
        sizes = self._config.scored_buckets
        for tokens in sizes:
            yield from _by_key(self._prompt_logprobs(tokens), self._score(tokens))
        for tokens in set(self._config.token_buckets) - set(sizes):
            yield from _by_key(self._widen(tokens, bucket_for(tokens, sizes), of_tokens=True))
        yield from _by_key(*self._full_state())

    def submit_update(self) -> None:
        self._start(self._update())

    def _update(self) -> _Task:
        step = partial(programs.update_step, self._config)
        packed = _int32(programs.update_layout().size)
        return self._task(("update",), step, self._state, self._sampling, packed, donate=(0, 1))

    def submit_decode(self, batch: int, *, shares_prefix: bool = False) -> None:
        self._start(self._decode(batch, shares_prefix))

    def _decode(self, batch: int, shares_prefix: bool = False) -> _Task:
        step = partial(programs.decode_step, self._model, self._config, batch, shares_prefix)
        packed = _int32(programs.decode_layout(batch, shares_prefix).size)
        args = (self._pools, self._state, self._exchange_for(batch), packed)
        results = (POOL, WHOLE, EXCHANGE, WHOLE, WHOLE)
        key = ("shared_decode" if shares_prefix else "decode", batch)
        return self._task(key, step, *args, donate=(1, 2, 3), takes="weights", rows=batch, results=results)

    def _exchange_for(self, rows: int) -> ExchangeState | None:
        """What a body of so many rows gets."""
        return self._exchange if rows <= self._config.one_shot_rows else None

    def _steps(self) -> list[_Task]:
        """The bodies that compute a step's tokens."""
        config = self._config
        shared = [self._decode(batch, shares_prefix=True) for batch in config.shared_prefix_buckets]
        return [*map(self._mixed, config.token_buckets), *map(self._decode, config.decode_buckets), *shared]

    def submit_mixed(self, tokens: int) -> None:
        self._start(self._mixed(tokens))

    def _mixed(self, tokens: int) -> _Task:
        step = partial(programs.mixed_step, self._model, self._config, tokens)
        packed = _int32(programs.mixed_layout(self._config, tokens).size)
        args = (self._pools, self._state, self._exchange_for(tokens), packed)
        results = (POOL, WHOLE, EXCHANGE, WHOLE, WHOLE, WHOLE)
        key = ("mixed", tokens)
        return self._task(key, step, *args, donate=(1, 2, 3), takes="weights", rows=tokens, results=results)

    def submit_sample(self, batch: int, variant: SamplingVariant) -> None:
        self._start(self._sample(batch, variant), ("sample", batch, variant))

    def _sample(self, batch: int, variant: SamplingVariant) -> _Task:
        """Of the variant that serves this one."""
        variant = sampler.program_variant(variant, self._model.vocab_size, self._model.collectives)
        step = partial(programs.sample_step, self._model, variant)
        rows = jax.eval_shape(lambda slots: programs.Rows(slots, slots > 0), _int32(batch))
        full = self._full if variant == SamplingVariant.FULL else None
        key = ("sample", batch, variant)
        args = (self._hidden(batch), rows, self._state, self._sampling, full, _int32(2, batch))
        results = (WHOLE, None if full is None else self._full_specs, WHOLE)
        return self._task(key, step, *args, donate=(3, 5, 6), takes="head", rows=batch, results=results)

    def _prompt_logprobs(self, tokens: int) -> _Task:
        step = partial(programs.prompt_logprobs_step, self._model)
        args = (self._hidden(tokens), _int32(tokens))
        return self._task(("prompt_logprobs", tokens), step, *args, takes="head", rows=tokens)

    def _widen(self, rows: int, size: int, *, of_tokens: bool) -> _Task:
        step = partial(programs.widen_step, self._config.null_slot, size)
        of_rows = None if of_tokens else jax.eval_shape(lambda slots: programs.Rows(slots, slots > 0), _int32(rows))
        return self._task(("widen", rows, size, of_tokens), step, self._hidden(rows), of_rows)

    def _score(self, tokens: int) -> _Task:
        step = partial(programs.score_step, self._model)
        args = (self._hidden(tokens), _int32(programs.score_layout(tokens).size))
        return self._task(("score", tokens), step, *args, takes="head", rows=programs.score_rows(tokens))

    def _full_state(self) -> Iterator[_Task]:
        """The programs that make and fill `FullSamplingState`, which exists once some request asks for it."""
        specs = self._full_specs
        yield self._task(("init_full",), self._init_full_state, results=specs)
        record = _int32(sampling_records.full_record_words(self._model.vocab_size))
        args = (self._full, _int32(), record)
        yield self._task(("start_full",), sampling_state.start_full_slot, *args, donate=(0,), results=specs)
        known = _int32(programs.known_tokens_layout().size)
        step = partial(programs.known_tokens_step, self._model)
        yield self._task(("known_tokens",), step, self._full, known, donate=(0,), results=specs)

    def _init_full_state(self) -> sampling_state.FullSamplingState:
        slots, model = self._config.max_num_seqs, self._model
        return sampling_state.init_full_state(slots, model.vocab_size, model.config.vocab_size)

    def submit_forks(self) -> None:
        """The programs that copy shared blocks and that let beams go on from others."""
        for size in self._config.copy_buckets:
            copy = partial(copy_blocks_step, self._config, size)
            packed = _int32(copy_layout(size).size)
            self._submit(("copy_blocks", size), copy, self._pools, packed, donate=(0,), results=POOL)
            move = partial(move_beams_step, size)
            self._submit(("move_beams", size), move, self._state, _int32(beams_layout(size).size), donate=(0,))

    def submit_swaps(self) -> None:
        """The programs that take blocks out of the pool, to host memory, and put them back."""
        block_ids = _int32(SWAP_CHUNK_BLOCKS)
        gather, scatter = partial(gather_step, self._config), partial(scatter_step, self._config)
        self._submit(("gather_blocks",), gather, self._pools, block_ids, results=STAGING)
        args = (self._pools, self._staging, block_ids)
        self._submit(("scatter_blocks",), scatter, *args, donate=(0,), results=POOL)

    def _hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self._model.config.hidden_size), self._model.dtype)

    def _submit(self, key: Key, function: Callable[..., Any], *args: Any, **how: Any) -> None:
        """As `_task`."""
        self._start(self._task(key, function, *args, **how))

    def _task(
        self,
        key: Key,
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        takes: _Takes = None,
        rows: int = 0,
        results: Specs = WHOLE,
    ) -> _Task:
        """rows: of the program's matrix products, if it has any. results: how they are split over the mesh."""
        if takes is not None:
            args = (self._weights if takes == "weights" else self._model.head_weights(self._weights), *args)

        def named(*args: Any) -> Any:
            return function(*args)

        named.__name__ = "_".join(str(int(part) if isinstance(part, int) else part) for part in key)  # for profiles
        jitted = self._mesh.jit(named, args, results, donate)
        autotuned = 0 < rows <= _AUTOTUNED_ROWS
        options = _GPU_OPTIONS if jax.default_backend() == "gpu" and rows > _AUTOTUNED_ROWS else {}
        path = self._cache.path((key, options), args)
        return _Task(key, jitted, args, options, takes, self._mesh.devices, path, autotuned)

    def _start(self, task: _Task, name: Key | None = None) -> None:
        """name: by which it is asked for, beside its key."""
        if task.key not in self._pending:
            future = self._threads.submit(task.load, "kept") if task.is_kept else self._threads.submit(task.lower())
            self._pending[task.key] = _Pending(task, future)
        if name is not None:
            self._pending[name] = self._pending[task.key]


def _by_key(*tasks: _Task) -> Iterator[tuple[Key, _Task]]:
    return ((task.key, task) for task in tasks)


def _missing(tasks: Iterable[_Task]) -> list[_Task]:
    """Those to be compiled for the cache, each once."""
    return list({task.key: task for task in tasks if task.path is not None and not task.is_kept}.values())


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
