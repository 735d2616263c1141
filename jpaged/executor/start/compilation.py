"""Compiles the step programs ahead of time, in parallel, from shapes alone.

    kept on disk?  --yes-->  load                                          (ExecutableCache)
         | no
    a body that other processes can compile as well?  --yes-->  wait, load (CompileProcesses)
         | no
    lower in the caller's thread, compile in a pool of threads

After this nothing compiles: the runner holds executables, and an executable refuses inputs of another shape. On a CPU,
most programs are compiled later (`on_first_use.py`).
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.cache_directories import cache_directory
from jpaged.executor.start.compile_processes import CompileProcesses, are_many
from jpaged.executor.start.executable_cache import KEPT_PLATFORMS, ExecutableCache
from jpaged.executor.start.worker_threads import WorkerThreads
from jpaged.executor.step.compiled import CompiledProgram, Origin
from jpaged.executor.step.held import held_shapes
from jpaged.executor.step.kinds import largest_programs, step_programs
from jpaged.executor.step.packing import PackedLayout
from jpaged.executor.step.program import PACKED, Setup, Signature, StepProgram, int32
from jpaged.host.cores import usable_cores
from jpaged.models.row_tiles import tile_rows

AUTOTUNED_ROWS = 16
WEIGHTS_IN_PLACE = {"xla_gpu_dot_merger_threshold_mb": 0}
"""XLA would make one product of two that read the same rows, and join their weights for it in each step: 84 MB of a
layer of attention in Qwen3.5-9B, 15 MB of a layer in DeepSeek-V2-Lite."""

GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0, **WEIGHTS_IN_PLACE}
"""Products of more rows go to cuBLASLt, by its own heuristics. Trying algorithms out, as XLA does by default, takes
twice as long to compile, chooses differently from start to start when many threads compile at once, and on an H200
won nothing: a decode step of 256 rows took 6.0 ms instead of 6.4 (Qwen3-0.6B), 12.8 instead of 12.8 (Llama-3.1-8B).
Up to 16 rows XLA's own kernels win: 4.5 ms instead of 4.7 for one row of Llama-3.1-8B."""

_AUTOTUNED_OPTIONS = {"xla_gpu_redzone_padding_bytes": 2**16, **WEIGHTS_IN_PLACE}
"""Of programs whose algorithms are tried out. By default each buffer of a trial has 8 MiB before and behind it: many at
once take more than a GiB of the device, between weights that are loaded meanwhile, and leave holes there."""

_PATIENCE_S = 120.0
"""Longest to wait for other processes to compile their shares: tens of times what one takes."""


@dataclass(frozen=True)
class _Task:
    """A program to compile.

    devices: what it runs on. path: where it is kept, if anywhere.
    """

    program: StepProgram
    signature: Signature
    jitted: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    devices: tuple[jax.Device, ...]
    path: Path | None

    @property
    def is_kept(self) -> bool:
        return self.path is not None and self.path.exists()

    def load(self, origin: Origin) -> CompiledProgram | None:
        """None if there is none, or it cannot be used."""
        begun = time.perf_counter()
        loaded = None if self.path is None else ExecutableCache.load(self.path, self.devices)
        seconds = time.perf_counter() - begun
        return None if loaded is None else CompiledProgram(loaded, self.signature, origin, loading_s=seconds)

    def lower(self) -> Callable[[], CompiledProgram | None]:
        """Returns what compiles it."""
        begun = time.perf_counter()
        lowered = self.jitted.lower(*self.args)
        return partial(self._compile, lowered, time.perf_counter() - begun)

    def _compile(self, lowered: jax.stages.Lowered, lowering_s: float) -> CompiledProgram:
        begun, hits = time.perf_counter(), _cache_hits()
        compiled = lowered.compile(compiler_options=self.options)
        origin: Origin = "compiled" if _cache_hits() == hits else "jax"
        if self.path is not None and (origin == "compiled" or self.devices[0].platform != "cpu"):
            ExecutableCache.save(self.path, compiled)
        return CompiledProgram(compiled, self.signature, origin, lowering_s, time.perf_counter() - begun)


_hits = threading.local()


def _cache_hits() -> int:
    """How many programs this thread has got from JAX's own cache, which tells of them by events only."""
    return getattr(_hits, "count", 0)


def _note(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.count = _cache_hits() + 1


jax.monitoring.register_event_listener(_note)


@dataclass
class _Pending:
    """A program on its way. elsewhere: done when another process has left it in the cache, or will not."""

    task: _Task
    future: Future[CompiledProgram | None] | None
    elsewhere: Future[None] | None = None

    def wait(self) -> CompiledProgram | None:
        return None if self.future is None else self.future.result()


class Compiler:
    """Lowers programs one by one and compiles them in a pool of threads (XLA releases the interpreter lock).

    Lowering is always done by the caller's thread, whose JAX settings it depends on.

    setup: what the programs are made for.
    threads: the pool; one of its own by default.
    helpers: processes that compile a share of the bodies, where there are any.
    kept_on: platforms whose programs are kept on disk (`ExecutableCache`).
    """

    def __init__(
        self,
        setup: Setup,
        mesh: DeviceMesh,
        *,
        threads: WorkerThreads | None = None,
        helpers: CompileProcesses | None = None,
        kept_on: Collection[str] = KEPT_PLATFORMS,
    ) -> None:
        self.setup = setup
        self._mesh = mesh
        self._held = held_shapes(setup, mesh)
        self._helpers = helpers
        self._threads = threads or WorkerThreads(usable_cores())
        model = setup.model
        depends_on = (model.config, model.vocab_size, model.dtype, model.source_digest, setup.config, mesh.key)
        self._cache = ExecutableCache(cache_directory("programs"), depends_on, kept_on)
        self._tasks: dict[StepProgram, _Task] = {}
        self._pending: dict[StepProgram, _Pending] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes on one device of what is held there beside weights and pool."""
        counted = ("weights", "head", "large", "pools")
        return sum(held.device_bytes for name, held in self._held.items() if name not in counted)

    def submit(self, programs: Iterable[StepProgram]) -> None:
        """Begins to compile these."""
        for program in programs:
            if program not in self._pending:
                self._start(self._task(program))

    def submit_pool_programs(self) -> None:
        """The programs that depend on the size of the pool."""
        programs = [program for program in step_programs(self.setup) if program.uses_pool(self.setup)]
        if self._helpers is not None:
            # What is autotuned stays here: processes that time kernels at once on one device spoil each other's clock.
            missing = self._claim([self._task(one) for one in programs if one.product_rows(self.setup)])
            worth_sharing = [task for task in missing if task.program.product_rows(self.setup) > AUTOTUNED_ROWS]
            elsewhere = self._helpers.share_out(self.setup.config, [task.program for task in worth_sharing])
            for task in worth_sharing:
                if task.program in elsewhere and task.program not in self._pending:
                    self._pending[task.program] = _Pending(task, None, elsewhere[task.program])
        self.submit(programs)

    def submit_other_programs(self) -> None:
        """The programs that do not depend on it."""
        self.submit(self._heads())

    def _heads(self) -> list[StepProgram]:
        return [program for program in step_programs(self.setup) if not program.uses_pool(self.setup)]

    def call_helpers(self) -> None:
        """Starts the helpers if so many heads have to be compiled that the bodies are likely to be missing as well.

        They are ready seconds later. Which bodies are missing is known only when the size of the pool is; if by then
        they have not been started, and are worth it, they will be.
        """
        if self._helpers is not None and are_many(self._claim([self._task(head) for head in self._heads()])):
            self._helpers.start()

    def _claim(self, tasks: Sequence[_Task]) -> list[_Task]:
        """The tasks among these that are to be compiled for the cache.

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

    def compile_now(self, program: StepProgram) -> CompiledProgram:
        """The program, compiled by the caller's thread if it is not kept."""
        task = self._new_task(program)
        compiled = (task.load("kept") if task.is_kept else None) or task.lower()()
        assert compiled is not None
        return compiled

    def submit_largest(self) -> list[StepProgram]:
        """The programs that need most memory while they run, or have the largest results. Returns them."""
        programs = largest_programs(self.setup)
        self.submit(programs)
        return programs

    def result(self, program: StepProgram) -> CompiledProgram:
        """Waits for one of the programs submitted."""
        self._compile_what_is_missing([self._pending[program]])
        compiled = self._pending[program].wait()
        assert compiled is not None
        return compiled

    def results(self, *, progress: bool = False) -> dict[StepProgram, CompiledProgram]:
        """Waits for everything submitted."""
        pending = self._pending.values()
        with tqdm(total=len(pending), desc="compiling", unit="program", disable=not progress, leave=False) as bar:
            self._compile_what_is_missing(pending, bar.update)
        results = {program: self.result(program) for program in self._pending}
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

    def compile_for_cache(self, programs: Collection[StepProgram]) -> Iterator[StepProgram]:
        """Compiles these for the cache alone: yields each when it is there.

        Ends at the first that cannot be kept: the others, of the same kind, would be compiled in vain.
        """
        self.submit(programs)
        for program in programs:
            self.result(program)
            if not self._pending[program].task.is_kept:
                return
            yield program

    def _task(self, program: StepProgram) -> _Task:
        """What compiles a program; made once for each."""
        if program not in self._tasks:
            self._tasks[program] = self._new_task(program)
        return self._tasks[program]

    def _new_task(self, program: StepProgram) -> _Task:
        setup, signature = self.setup, program.signature(self.setup)
        args = tuple(self._arguments(program, signature))
        specs = (*(self._held[name].spec for name in signature.updates), program.result_spec(setup))

        def named(*args: Any) -> Any:
            updated, result = program.body(setup, **dict(zip(signature.takes, args, strict=True)))
            return (*(updated[name] for name in signature.updates), result)

        named.__name__ = program.name  # for profiles
        donated = {*program.updates(setup), *program.consumes}
        donate = tuple(index for index, name in enumerate(signature.takes) if name in donated)
        jitted = self._mesh.jit(named, args, specs, donate)
        is_gpu = jax.default_backend() == "gpu"
        rows = tile_rows() if setup.config.batch_invariant else program.product_rows(setup)
        options = (GPU_OPTIONS if rows > AUTOTUNED_ROWS else _AUTOTUNED_OPTIONS) if is_gpu else {}
        path = self._cache.path((program.name, options), args)
        return _Task(program, signature, jitted, args, options, self._mesh.devices, path)

    def _arguments(self, program: StepProgram, signature: Signature) -> Iterator[Any]:
        """Shapes of what it takes, in order, on all devices together."""
        inputs, specs = program.inputs(self.setup), program.input_specs(self.setup)
        for name in signature.takes:
            if name == PACKED:
                assert isinstance(signature.layout, PackedLayout)
                yield int32(signature.layout.size)
            elif name in inputs:
                yield self._mesh.split(inputs[name], specs[name]) if name in specs else inputs[name]
            else:
                yield self._held[name].shapes

    def _start(self, task: _Task) -> None:
        future = self._threads.submit(task.load, "kept") if task.is_kept else self._threads.submit(task.lower())
        self._pending[task.program] = _Pending(task, future)


def _missing(tasks: Iterable[_Task]) -> list[_Task]:
    """The tasks among these that are to be compiled for the cache."""
    return [task for task in tasks if task.path is not None and not task.is_kept]
