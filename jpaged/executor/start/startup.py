"""From a model directory to a runner that is ready: plan memory, load weights and compile side by side, warm up."""

import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import ReferenceType

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError, shown
from jpaged.engine.interface import CacheGroup, Executor
from jpaged.executor.buckets import fine_buckets, geometric_buckets
from jpaged.executor.cache.spec import kernel_block_bytes
from jpaged.executor.cache.virtual.arrays import CpuRanges
from jpaged.executor.cache.virtual.cuda import CudaDriver
from jpaged.executor.cache.virtual.geometry import Geometry
from jpaged.executor.cache.virtual.layout import VirtualCache
from jpaged.executor.cache.virtual.memfd import LEAST_ADOPTED, MemfdDriver
from jpaged.executor.cache.virtual.memory import VirtualMemory
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh, fewest_anywhere, pick_devices
from jpaged.executor.start.cache_directories import cache_directory, enable_persistent_cache
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.compile_processes import (
    LEAST_SHARED,
    CompileProcesses,
    Setting,
    chosen_processes,
    helpful_processes,
)
from jpaged.executor.start.executable_cache import KEPT_PLATFORMS, ExecutableCache
from jpaged.executor.start.jax_settings import jax_settings
from jpaged.executor.start.memory import (
    MemoryPlan,
    free_device_memory,
    plan_memory,
    reserve_device_memory,
    unreserved_device_memory,
)
from jpaged.executor.start.one_shot import one_shot_rows
from jpaged.executor.start.weights import fill_weights, read_weights, zero_weights
from jpaged.executor.start.worker_threads import WorkerThreads
from jpaged.executor.step.compiled import CompiledProgram, Origin
from jpaged.executor.step.held import empty_pools, initial_held
from jpaged.executor.step.program import Setup
from jpaged.executor.step.runner import Runner
from jpaged.host.cores import usable_cores
from jpaged.host.garbage import set_objects_apart
from jpaged.host.interrupt import KeptInterrupt
from jpaged.models import Model, ModelConfig, Weights, build
from jpaged.models.experts import split_by_experts
from jpaged.models.loading.kv_scales import read_kv_scales
from jpaged.models.loading.live import Update, WeightsForm, WeightUpdater
from jpaged.pallas_kernels import registry

log = logging.getLogger("jpaged.startup")

NOMINAL_BLOCKS = 1024
"""Blocks of the pool that programs are analysed with, before its size is known."""


class Leader(Executor, Protocol):
    """Runs plans here and in all other processes."""

    def close(self) -> None:
        """Ends these, and closes the runner here."""


@dataclass
class Startup:
    """A runner and what is known of it.

    setup: what its programs were made for.
    memory: of each device. seconds: by phase; loading and compiling overlap. origins: how many programs of each.
    mesh: what it runs on. load_weights: reads the checkpoint again. updater: knows the places of weights by name.
    has_given_weights: it has weights that somebody gave, and that no checkpoint holds.
    leader: what runs plans here and in all other processes, where there are several.
    user: the engine whose keys and values the pool holds: the last one that ran on it.
    asleep: the level of `sleep`; 0 while awake.
    """

    args: EngineArgs
    runner: Runner
    model: Model
    setup: Setup
    memory: MemoryPlan
    origins: Mapping[Origin, int]
    device: str
    mesh: DeviceMesh
    load_weights: Callable[[], Weights]
    updater: WeightUpdater
    seconds: dict[str, float] = field(default_factory=dict)
    leader: Leader | None = None
    user: ReferenceType[Any] | None = None
    asleep: int = 0
    has_given_weights: bool = False

    @property
    def config(self) -> ExecutorConfig:
        """Shapes of the device state and of the programs."""
        return self.setup.config

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that have block tables of their own."""
        return self.setup.cache.groups

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that have memory, the null block included."""
        return self.memory.num_blocks

    @property
    def _num_backed(self) -> int:
        """Blocks that must have memory before the first request."""
        return self.num_blocks if self.args.kv_idle_release_s is None else _needed_pages(self.setup)

    @property
    def _blocks(self) -> str:
        """What the pool is made of, in words."""
        geometry = self.config.geometry
        if geometry is None:
            return "blocks"
        return f"pages of {geometry.page_tokens} tokens ({geometry.page_layout}, {_size(self.memory.block)})"

    def close(self) -> None:
        """Frees what the runner holds on the device, and ends the other processes. The second time it does nothing."""
        (self.leader or self.runner).close()

    def sleep(self, level: int) -> None:
        """Gives memory back: 1 that of the KV pool, 2 that of the weights, too. Nothing runs, and what is in the pool
        is lost.

        Raises:
            InvalidParameterError: the model spans several hosts.
        """
        if self.leader is not None:
            raise InvalidParameterError("sleep is for a model on one host; this one spans several processes.")
        if level > self.asleep:
            self.runner.sleep(level)
            self.asleep = level

    def wake_up(self) -> None:
        """Takes the memory again that `sleep` gave back; weights are read from the checkpoint. Nothing if awake.

        Raises:
            OutOfMemoryError: others have it. The engine sleeps on.
            InvalidParameterError: the weights that it gave back are in no checkpoint. The engine sleeps on.
        """
        if not self.asleep:
            return
        if self.asleep == 2 and self.has_given_weights:
            raise InvalidParameterError(
                "The engine gave back weights that it had from its caller, which no checkpoint holds; call"
                " update_weights before wake_up."
            )
        with self.mesh.as_default():
            try:
                weights = self.load_weights() if self.asleep == 2 else None
                pools = empty_pools(self.setup, self.mesh) if self.runner.memory is None else None
                jax.block_until_ready((weights, pools))
            except jax.errors.JaxRuntimeError as error:
                wanted = f"the KV pool of {_size(self.memory.pool)}"
                if self.asleep == 2:
                    wanted = f"the weights of {_size(self.memory.weights)} and {wanted}"
                raise OutOfMemoryError(f"There is no room for {wanted}; let others give memory back.") from error
            self.runner.wake_up(self._num_backed, pools, weights)
        self.asleep = 0

    def check_weights(self, weights: Any, *, partial: bool = False) -> Update:
        """Finds the places of weights, and changes nothing; as `WeightUpdater.match`.

        Raises:
            InvalidParameterError: they do not fit; or the model spans several hosts; or some are to be kept that
                `sleep` has given back.
        """
        if self.leader is not None:
            raise InvalidParameterError("update_weights is for a model on one host; this one spans several processes.")
        update = self.updater.match(weights, partial=partial)
        if self.asleep == 2 and not update.is_complete:
            raise InvalidParameterError(
                "The engine sleeps at level 2 and has no weights to keep the others of; give all of them."
            )
        return update

    def update_weights(self, update: Update) -> None:
        """Writes weights in place. An engine that had given its weights back sleeps on at level 1.

        Raises:
            OutOfMemoryError: it had given its weights back, and others have the memory. It sleeps on at level 2.
            JaxRuntimeError: the device failed in the middle; the weights are of no more use.
        """
        with self.mesh.as_default():
            try:
                start = zero_weights(self.setup.model, self.mesh) if self.asleep == 2 else None
                self.runner.update_weights(lambda old: jax.block_until_ready(self.updater.apply(old, update)), start)
            except jax.errors.JaxRuntimeError as error:
                if self.asleep != 2:
                    raise
                raise OutOfMemoryError(
                    f"There is no room for the weights of {_size(self.memory.weights)}; let others give memory back."
                ) from error
        self.asleep = min(self.asleep, 1)
        self.has_given_weights = True

    def weights_as(self, form: WeightsForm) -> Any:
        """Copies of the weights, as `WeightUpdater.read`.

        Raises:
            InvalidParameterError: there is no such form; or the model spans several hosts; or `sleep` has given the
                weights back.
        """
        if self.leader is not None:
            raise InvalidParameterError("weights_as is for a model on one host; this one spans several processes.")
        weights = self.runner.weights
        if weights is None:
            raise InvalidParameterError("The engine sleeps at level 2 and has no weights; wake it up first.")
        with self.mesh.as_default():
            return self.updater.read(weights, form)

    def table(self, name: str) -> str:
        """What a user wants to know at start, in a few lines."""
        num_blocks, length = self.num_blocks - 1, self.config.max_model_len
        concurrency = num_blocks / self.setup.cache.sequence_blocks(length)
        tokens = num_blocks * self.config.block_size // len(self.cache_groups)
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
        reserved = f", {_size(self.memory.programs)} reserved for them to run" if self.memory.programs else ""
        in_fp8 = " in FP8" if self.config.kv_scales is not None else ""
        rows = [
            (
                "model",
                f"{name} ({self.model.config.architecture}, {self.model.num_parameters / 1e6:,.1f} M parameters)",
            ),
            ("device", self.device),
            ("kernels", self.args.kernel_backend or registry.preferred_here()),
            ("weights", f"{_size(self.memory.weights)} in {_types(self.model)}"),
            ("KV pool", f"{_size(self.memory.pool)}{in_fp8}: {self.num_blocks:,} {self._blocks}, {tokens:,} tokens"),
            ("max_model_len", f"{self.config.max_model_len:,} tokens; {concurrency:,.1f} such sequences fit the pool"),
            ("programs", f"{_whence(self.origins)}{reserved}"),
            ("start-up", f"{sum(self.seconds.values()):.1f} s: {phases}"),
        ]
        if self.config.one_shot_rows:
            rows.insert(-1, ("all-reduce", f"one-shot in steps of up to {self.config.one_shot_rows} rows"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"  {label:<{width}}  {text}" for label, text in rows)


def start(args: EngineArgs, directory: Path, weights: Any = None) -> Startup:
    """Builds a runner for the model in `directory`.

    weights: instead of those of a checkpoint, as `WeightUpdater.match` takes them; the directory needs a config.json
        only.

    Raises:
        CheckpointError, UnsupportedModelError: the model cannot be loaded.
        OutOfMemoryError: it does not fit, or max_model_len does not.
        InvalidParameterError: max_model_len exceeds the model's context; there is no such kernel_backend, or it cannot
            run here.
    """
    args = with_known_backend(args)
    seconds: dict[str, float] = {}
    progress = args.verbose and sys.stderr.isatty()
    if args.verbose and not progress:  # a terminal gets progress bars instead
        print(
            "Compiling programs and loading weights; a model's first start takes longest.", file=sys.stderr, flush=True
        )
    reserve_device_memory(args.gpu_memory_utilization, at_once=args.kv_cache_layout == "paged")
    enable_persistent_cache()
    mesh = DeviceMesh(pick_devices(args.tensor_parallel_size))
    _check_backend(args.kernel_backend)
    with mesh.as_default(), _without_collections(), KeptInterrupt() as interrupt:
        return _start_on(mesh, args, directory, weights, seconds, progress, interrupt)


def with_known_backend(args: EngineArgs) -> EngineArgs:
    """The same with the own name of its kernel backend, where it gives an alias.

    Raises:
        InvalidParameterError: this process knows no such backend.
    """
    if args.kernel_backend is None:
        return args
    try:
        return replace(args, kernel_backend=registry.canonical(args.kernel_backend))
    except ValueError:
        names = ", ".join(map(repr, registry.backends()))
        raise InvalidParameterError(
            f"kernel_backend must be None or one of {names}, got {shown(args.kernel_backend)}. Correct the name, or "
            f"register the backend first, in the process that runs the engine "
            f"(jpaged.pallas_kernels.register_backend)."
        ) from None


def _check_backend(kernel_backend: str | None) -> None:
    """Warns if a device that has kernels will do without.

    Raises:
        InvalidParameterError: the forced backend cannot run here.
    """
    if kernel_backend is not None:
        if (reason := registry.refuses_here(kernel_backend)) is not None:
            raise InvalidParameterError(
                f"kernel_backend={kernel_backend!r} cannot serve this: {reason}. Leave it out to choose by device."
            )
    elif (lost := registry.lost_here()) is not None:
        log.warning(lost)


def _start_on(
    mesh: DeviceMesh,
    args: EngineArgs,
    directory: Path,
    given: Any,
    seconds: dict[str, float],
    progress: bool,
    interrupt: KeptInterrupt,
) -> Startup:
    device = mesh.local_devices[0]
    model_config = ModelConfig.from_directory(directory, args.max_model_len, args.quantization)
    if args.enable_expert_parallel:
        model_config = split_by_experts(model_config)
    # Arithmetic in 16 bits is slow on a CPU, so "auto" means float32 there.
    model = build(model_config, "float32" if args.dtype == "auto" and device.platform == "cpu" else args.dtype)
    shard = mesh.shard_of(model)
    updater = WeightUpdater(model, shard, mesh.mesh if mesh.size > 1 else None)
    load_weights = partial(read_weights, mesh, model, shard, directory, args)
    if given is not None:
        update = updater.match(given)
        load_weights = partial(fill_weights, mesh, shard, updater, update)
    at_once = args.kv_cache_layout == "paged"
    limits = [free_device_memory(one, args.gpu_memory_utilization, at_once=at_once) for one in mesh.local_devices]
    limit = min((one for one in limits if one is not None), default=None)
    config = executor_config(args, model_config, limit)
    rows = one_shot_rows(args.one_shot_rows, args.kernel_backend, shard, mesh)
    config = replace(config, one_shot_rows=config.largest_body(rows))
    if args.kv_cache_dtype == "fp8":
        config = replace(config, kv_scales=read_kv_scales(args.load_format, directory, len(model_config.layer_windows)))
    if args.kv_cache_layout == "virtual":
        config = _cut_into_pages(config, args, shard, device)

    cores = usable_cores()
    kept_on = _kept_on()
    with (
        WorkerThreads(1) as loader,
        WorkerThreads(cores, interrupt.check) as threads,
        _helpers(mesh, model, config) as helpers,
    ):
        with _timed(seconds, "plan memory"):
            loading = loader.submit(load_weights, progress)
            nominal = Compiler(Setup.of(shard, config), mesh, threads=threads, helpers=helpers, kept_on=kept_on)
            with _refusals_of(config.kernel_backend):
                if limit is not None:
                    nominal.call_helpers()
                    nominal.submit_largest()
                    nominal.submit_other_programs()  # lowered while the largest ones compile
                memory = plan_memory(nominal, limit, args.num_gpu_blocks_override, args.pipeline_depth)
            memory = replace(memory, num_blocks=fewest_anywhere(memory.num_blocks))
            setup = _fit_to_pool(shard, config, memory.num_blocks, args.max_model_len)
            fitted = setup.config
        with _timed(seconds, "compile"):
            compiler = Compiler(setup, mesh, threads=threads, helpers=helpers, kept_on=kept_on)
            heads_are_ready = limit is not None and fitted.max_model_len == config.max_model_len
            with _refusals_of(config.kernel_backend):
                compiler.submit_pool_programs()
                if not heads_are_ready:
                    compiler.submit_other_programs()
            programs = (nominal.results() if heads_are_ready else {}) | compiler.results(progress=progress)
        with _timed(seconds, "load weights"):  # what loading takes beyond the phases it ran beside
            weights = loading.result()

    with _timed(seconds, "warm up"):
        pages = VirtualMemory(setup.cache, mesh) if isinstance(setup.cache, VirtualCache) else None
        pools = None if pages is None else pages.pools
        runner = Runner(setup, programs, initial_held(setup, mesh, weights, pools), pages)
        runner.warm_up()
        if pages is not None:
            memory = replace(memory, num_blocks=_back_pages(pages, setup, memory.num_blocks, args))
    kind = device.device_kind if mesh.size == 1 else f"{mesh.size} x {device.device_kind}, tensor parallel"
    _log_costs(programs.values())
    origins = Counter(program.origin for program in programs.values())
    load_again = partial(read_weights, mesh, model, shard, directory, args, False)
    has_given = given is not None
    return Startup(
        args,
        runner,
        model,
        setup,
        memory,
        origins,
        kind,
        mesh,
        load_again,
        updater,
        seconds,
        has_given_weights=has_given,
    )


def _log_costs(programs: Collection[CompiledProgram]) -> None:
    log.info(
        "%s: lowering them took %.1f s and compiling %.1f s of this process's threads, loading %.1f s",
        _whence(Counter(program.origin for program in programs)),
        sum(program.lowering_s for program in programs),
        sum(program.compiling_s for program in programs),
        sum(program.loading_s for program in programs),
    )


def _whence(origins: Mapping[Origin, int]) -> str:
    said: dict[Origin, str] = {
        "compiled": "compiled here",
        "shared": "compiled by other processes",
        "kept": "found in the cache",
        "jax": "lowered here and found in JAX's cache",
    }
    return ", ".join(f"{origins[origin]} {text}" for origin, text in said.items() if origins.get(origin))


def _kept_on() -> tuple[str, ...]:
    """Platforms whose programs are kept on disk: none where a kernel backend from outside is registered. Kept programs
    are told apart by this package's sources, to which its kernels do not belong, and no other process knows it.
    """
    return () if registry.has_registered() else KEPT_PLATFORMS


def _helpers(mesh: DeviceMesh, model: Model, config: ExecutorConfig) -> AbstractContextManager[CompileProcesses | None]:
    """The helper processes for a cold start. None if programs cannot be cached or the model spans several hosts.

    The result starts no process for few programs, nor on a CPU unless some are asked for.
    """
    count = chosen_processes(os.environ)
    if count is None:
        spare = [unreserved_device_memory(device) for device in mesh.local_devices]
        count = helpful_processes(usable_cores(), min(spare))
    directory = cache_directory("programs")
    kept_on = _kept_on()
    if not kept_on or directory is None or not ExecutableCache.has_room(directory) or jax.process_count() > 1:
        return nullcontext()
    ExecutableCache.sweep(directory)
    if len(config.token_buckets) + len(config.decode_buckets) < LEAST_SHARED:
        count = 0
    dtype = np.dtype(model.dtype).name
    return CompileProcesses(count, Setting(model.config, dtype, mesh.size, kept_on, jax_settings()))


def executor_config(args: EngineArgs, model: ModelConfig, limit: int | None) -> ExecutorConfig:
    """Shapes for this model and device, the number of blocks nominal."""
    if args.max_model_len is not None and args.max_model_len > model.max_position_embeddings:
        raise InvalidParameterError(
            f"max_model_len={args.max_model_len} exceeds the {model.max_position_embeddings} positions the model has; "
            f"lower it."
        )
    on_cpu, large = limit is None, (limit or 0) > 64 * 2**30
    max_num_seqs = args.max_num_seqs or (64 if on_cpu else 1024 if large else 256)
    budget = args.max_num_batched_tokens or (512 if on_cpu else 8192)
    if on_cpu:  # which compiles as slowly as it runs: few programs with much padding in each
        token_buckets = args.token_buckets or geometric_buckets(16, budget, 4)
        decode_buckets = args.decode_buckets or geometric_buckets(1, max_num_seqs, 4)
    else:
        token_buckets = args.token_buckets or fine_buckets(64, budget)
        decode_buckets = args.decode_buckets or fine_buckets(8, max_num_seqs)
    for name, buckets, last, what in (
        ("token_buckets", token_buckets, budget, "max_num_batched_tokens"),
        ("decode_buckets", decode_buckets, max_num_seqs, "max_num_seqs"),
    ):
        if buckets[-1] != last:
            raise InvalidParameterError(f"{name} must end with {what}={last}, got {buckets}.")
    if args.shared_prefix_attention and None not in model.layer_windows:
        raise InvalidParameterError(
            "shared_prefix_attention=True is of no use to this model, all of whose layers have a sliding window; leave "
            "it out."
        )
    return ExecutorConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=args.max_model_len or model.max_position_embeddings,
        block_size=args.block_size,
        num_blocks=args.num_gpu_blocks_override or NOMINAL_BLOCKS,
        decode_buckets=decode_buckets,
        token_buckets=token_buckets,
        kernel_backend=args.kernel_backend,
        shared_prefix_attention=args.shared_prefix_attention,
        logprobs_mode=args.logprobs_mode,
    )


def _cut_into_pages(config: ExecutorConfig, args: EngineArgs, shard: Model, device: jax.Device) -> ExecutorConfig:
    """The same for the virtual layout, whose blocks are pages of the device."""
    if jax.process_count() > 1:
        raise InvalidParameterError(
            f"kv_cache_layout='virtual' is for a model within one process, got {jax.process_count()} of them; use "
            f"kv_cache_layout='paged', or replicas (data_parallel_size)."
        )
    cache = Setup.of(shard, config).cache
    is_cpu = device.platform == "cpu"
    geometry = Geometry.fit(
        args.virtual_page_layout,
        cache.grouping.num_arrays,
        args.block_size,
        kernel_block_bytes(cache.spec[0], args.block_size),
        MemfdDriver.granularity if is_cpu else CudaDriver(int(device.local_hardware_id or 0)).granularity,
        spare_bytes=CpuRanges.spare_bytes if is_cpu else 0,
    )
    geometry = replace(geometry, least_bytes=LEAST_ADOPTED if is_cpu else 0)
    longest = geometry.longest(config.num_blocks, len(cache.groups) * config.max_num_seqs)
    length = config.max_model_len if args.max_model_len is not None else min(config.max_model_len, longest)
    return replace(config, geometry=geometry, block_size=geometry.page_tokens, max_model_len=length)


def _needed_pages(setup: Setup) -> int:
    """Pages that the longest sequence needs, and the null block."""
    return setup.cache.sequence_blocks(setup.config.max_model_len) + 1


def _back_pages(pages: VirtualMemory, setup: Setup, planned: int, args: EngineArgs) -> int:
    """Gives pages their memory. Returns how many the pool may have: JAX takes more than its arrays need, and others use
    the device, too. With kv_idle_release_s those of the longest sequence get theirs now, the others when they are
    needed.

    Raises:
        OutOfMemoryError: not as many as the user asked for, or as the longest sequence needs.
    """
    needed = _needed_pages(setup)
    if args.kv_idle_release_s is not None:
        pages.back_first(needed)
        return planned
    count = pages.back_most()
    if count < (args.num_gpu_blocks_override or needed):
        raise OutOfMemoryError(
            f"The device has memory for {count} pages, but {args.num_gpu_blocks_override or needed} are needed; lower "
            f"num_gpu_blocks_override or max_model_len, or stop what else uses the device."
        )
    if count < planned:
        log.info("%d of %d pages have memory", count, planned)
    return count


def _fit_to_pool(shard: Model, nominal: ExecutorConfig, num_blocks: int, asked: int | None) -> Setup:
    """With a pool of so many blocks, and sequences no longer than it holds."""
    config = replace(nominal, num_blocks=num_blocks)
    cache = Setup.of(shard, config).cache
    capacity = cache.longest_sequence()
    if isinstance(cache, VirtualCache) and asked is not None:
        cache.check_length(asked)
    if not capacity:
        raise OutOfMemoryError(
            f"The KV pool has {num_blocks - 1} blocks of {config.block_size} tokens, but a sequence needs "
            f"{cache.sequence_blocks(1)}, one for each group of layers; raise gpu_memory_utilization or "
            f"num_gpu_blocks_override."
        )
    if asked is not None and asked > capacity:
        raise OutOfMemoryError(
            f"max_model_len={asked} does not fit the KV pool, which holds {capacity} tokens "
            f"({num_blocks - 1} blocks of {config.block_size}). Lower max_model_len, or enlarge the pool by "
            f"gpu_memory_utilization or num_gpu_blocks_override."
        )
    return Setup.of(shard, replace(config, max_model_len=capacity))


@contextmanager
def _refusals_of(kernel_backend: str | None) -> Iterator[None]:
    """Turns what the ops say while they are traced into a word on the option that chose their backend."""
    try:
        yield
    except ValueError as error:
        if kernel_backend is None:
            raise
        raise InvalidParameterError(f"kernel_backend={kernel_backend!r} cannot serve this: {error}") from error


@contextmanager
def _without_collections() -> Iterator[None]:
    """Leaves garbage lie: lowering makes millions of objects, and looking through them took a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        set_objects_apart()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begun
    log.info("%s took %.1f s", phase, seconds[phase])


def _types(model: Model) -> str:
    scheme, dtype = model.config.quantization, np.dtype(model.dtype).name
    return dtype if scheme is None else f"{scheme.name} and {dtype}"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
