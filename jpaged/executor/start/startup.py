"""From a model directory to a runner that is ready: plan memory, load weights and compile side by side, warm up."""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError, shown
from jpaged.executor.cache.virtual.layout import VirtualCache
from jpaged.executor.cache.virtual.memory import VirtualMemory
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh, fewest_anywhere, pick_devices
from jpaged.executor.start.cache_directories import cache_directories, cache_directory, enable_persistent_cache
from jpaged.executor.start.cache_limit import cache_limit_bytes, remove_least_used
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.compile_processes import (
    LEAST_SHARED,
    CompileProcesses,
    Setting,
    chosen_processes,
    helpful_processes,
)
from jpaged.executor.start.executable_cache import KEPT_PLATFORMS, ExecutableCache
from jpaged.executor.start.invariance import check_attention
from jpaged.executor.start.jax_settings import jax_settings
from jpaged.executor.start.kv_scales import kv_scales_of
from jpaged.executor.start.memory import (
    free_device_memory,
    plan_memory,
    reserve_device_memory,
    take_planned,
    unreserved_device_memory,
)
from jpaged.executor.start.on_first_use import OnFirstUse, compiles_on_first_use
from jpaged.executor.start.one_shot import one_shot_rows
from jpaged.executor.start.room import with_room
from jpaged.executor.start.shapes import (
    cut_into_pages,
    executor_config,
    fit_to_pool,
    most_sequences,
    needed_pages,
    one_call_rows,
    refuse_for_hybrids,
    refuse_skew,
    with_snapshots,
)
from jpaged.executor.start.started import Startup, whence
from jpaged.executor.start.weights import CheckpointReader, fill_weights
from jpaged.executor.start.worker_threads import WorkerThreads
from jpaged.executor.step.compiled import CompiledProgram
from jpaged.executor.step.held import initial_held
from jpaged.executor.step.kinds import first_programs
from jpaged.executor.step.program import Setup
from jpaged.executor.step.runner import Runner
from jpaged.host.cores import usable_cores
from jpaged.host.garbage import set_objects_apart, without_collections
from jpaged.host.interrupt import KeptInterrupt
from jpaged.models import Model, ModelConfig, Weights, build
from jpaged.models.experts import split_by_experts
from jpaged.models.loading.live import WeightUpdater
from jpaged.pallas_kernels import registry
from jpaged.pallas_kernels.common import cuda_driver, native_calls

log = logging.getLogger("jpaged.startup")


def start(args: EngineArgs, directory: Path, weights: Any = None) -> Startup:
    """Builds a runner for the model in `directory`.

    weights: instead of those of a checkpoint, as `WeightUpdater.match` takes them; the directory needs a config.json
        only.

    Raises:
        CheckpointError, UnsupportedModelError: the model cannot be loaded.
        OutOfMemoryError: it does not fit, or max_model_len does not.
        InvalidParameterError: max_model_len exceeds the model's context; there is no such kernel_backend, or it cannot
            run here; an environment variable has no such value.
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
    cache_limit = cache_limit_bytes(os.environ)
    _check_triton_calls()
    _place_code_of_driver()
    with _timed(seconds, "open devices"):
        mesh = DeviceMesh(pick_devices(args.tensor_parallel_size))
    _check_backend(args.kernel_backend)
    with without_collections(), mesh.as_default(), KeptInterrupt() as interrupt:
        startup = _start_on(mesh, args, directory, weights, seconds, progress, interrupt)
        set_objects_apart()
        if set(startup.origins) - {"kept"}:  # a warm start leaves the directories as they were
            remove_least_used(cache_directories(), cache_limit)
        return startup


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


def _check_triton_calls() -> None:
    """Also where no Triton kernel is used, so that a wrong word is found on any machine.

    Raises:
        InvalidParameterError: the environment variable has no such value.
    """
    try:
        native_calls.asked_for()
    except ValueError as wrong:
        raise InvalidParameterError(str(wrong)) from None


def _place_code_of_driver() -> None:
    """If the GPU's driver cannot write its own directory, has it keep what it compiles beside our compiled programs."""
    if cuda_driver.wants_code_directory() and (directory := cache_directory("cuda")) is not None:
        os.environ[cuda_driver.PATH] = str(directory)


def _check_backend(kernel_backend: str | None) -> None:
    """Warns if a device that has kernels will do without, or launch them the slower way.

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
    if (slower := registry.slower_calls_here(kernel_backend)) is not None:
        log.warning(slower)


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
    waits_for_use = compiles_on_first_use(args.compile_programs, mesh, args.kernel_backend)
    model_config = ModelConfig.from_directory(directory, args.max_model_len, args.quantization)
    refuse_skew(model_config, are_random=args.load_format == "dummy" and given is None)
    if args.enable_expert_parallel:
        model_config = split_by_experts(model_config)
    # Arithmetic in 16 bits is slow on a CPU, so "auto" means float32 there.
    model = build(model_config, "float32" if args.dtype == "auto" and device.platform == "cpu" else args.dtype)
    shard = mesh.shard_of(model)
    updater = WeightUpdater(model, shard, mesh.mesh if mesh.size > 1 else None)
    reader = CheckpointReader(mesh, model, shard, directory, args)
    load_weights: Callable[[bool], Weights] = reader
    if given is not None:
        update = updater.match(given)
        load_weights = partial(fill_weights, mesh, shard, updater, update)
    # A pool of a given size takes what it needs once that is known; pages of the virtual layout are not JAX's to take.
    at_once = args.kv_cache_layout == "paged" and args.num_gpu_blocks_override is None
    limits = [free_device_memory(one, args.gpu_memory_utilization, at_once=at_once) for one in mesh.local_devices]
    limit = min((one for one in limits if one is not None), default=None)
    refuse_for_hybrids(args, model_config)
    config = executor_config(args, model_config, limit, most_sequences(shard, limit))
    config = with_snapshots(config, args, shard, limit)
    if args.batch_invariant:
        check_attention(shard, config.kernel_backend, config.block_size)
    rows = 0 if args.batch_invariant else one_shot_rows(args.one_shot_rows, config.kernel_backend, shard, mesh)
    one_call = one_call_rows(limit)
    config = replace(config, one_shot_rows=config.largest_body(rows), one_call_rows=one_call)
    if args.kv_cache_dtype == "fp8":
        loaded = None
        if args.calculate_kv_scales:
            with _timed(seconds, "load weights"):
                loaded = load_weights(progress)
            load_weights = partial(_as_loaded, loaded)
        # Weights that somebody gives come without scales; those of the directory are another checkpoint's.
        described = args if given is None else replace(args, load_format="dummy")
        with _timed(seconds, "calibrate") if loaded is not None else nullcontext():
            config = replace(config, kv_scales=kv_scales_of(described, shard, mesh, directory, loaded))
        del loaded
    if args.kv_cache_layout == "virtual":
        config = cut_into_pages(config, args, shard, device)

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
            with _refusals_of(args.kernel_backend):
                if limit is not None:
                    nominal.call_helpers()
                    nominal.submit_largest()
                    nominal.submit_other_programs()  # lowered while the largest ones compile
                memory = plan_memory(nominal, limit, args.num_gpu_blocks_override, args.pipeline_depth)
            memory = replace(memory, num_blocks=fewest_anywhere(memory.num_blocks))
            setup = fit_to_pool(shard, config, memory.num_blocks, args.max_model_len)
            fitted = setup.config
        with _timed(seconds, "compile"):
            compiler = Compiler(setup, mesh, threads=threads, helpers=helpers, kept_on=kept_on)
            heads_are_ready = limit is not None and fitted.max_model_len == config.max_model_len
            with _refusals_of(args.kernel_backend):
                if waits_for_use:
                    compiler.submit(first_programs(setup))
                else:
                    compiler.submit_pool_programs()
                    if not heads_are_ready:
                        compiler.submit_other_programs()
            programs = (nominal.results() if heads_are_ready else {}) | compiler.results(progress=progress)
        with _timed(seconds, "load weights"):  # what loading takes beyond the phases it ran beside
            weights = loading.result()

    on_first_use = OnFirstUse(compiler, mesh, programs) if waits_for_use else None
    if args.kv_cache_layout == "paged" and args.num_gpu_blocks_override is not None:
        for one in mesh.local_devices:
            take_planned(one, memory)
    with _timed(seconds, "warm up"):
        pages = VirtualMemory(setup.cache, mesh) if isinstance(setup.cache, VirtualCache) else None
        pools = None if pages is None else pages.pools
        make = partial(initial_held, setup, mesh, pools=pools)
        held = with_room(make, weights, memory.pool, args)
        runner = Runner(setup, programs, held, pages, on_first_use)
        runner.warm_up()
        if pages is not None:
            memory = replace(memory, num_blocks=_back_pages(pages, setup, memory.num_blocks, args))
    kind = device.device_kind if mesh.size == 1 else f"{mesh.size} x {device.device_kind}, tensor parallel"
    _log_costs(programs.values())
    origins = Counter(program.origin for program in programs.values())
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
        reader,
        updater,
        seconds,
        has_given_weights=has_given,
        on_first_use=on_first_use,
    )


def _as_loaded(weights: Weights, progress: bool) -> Weights:
    """progress: as of `CheckpointReader`; there is none to show any more."""
    del progress
    return weights


def _log_costs(programs: Collection[CompiledProgram]) -> None:
    log.info(
        "%s: lowering them took %.1f s and compiling %.1f s of this process's threads, loading %.1f s",
        whence(Counter(program.origin for program in programs)),
        sum(program.lowering_s for program in programs),
        sum(program.compiling_s for program in programs),
        sum(program.loading_s for program in programs),
    )


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


def _back_pages(pages: VirtualMemory, setup: Setup, planned: int, args: EngineArgs) -> int:
    """Gives pages their memory. Returns how many the pool may have: JAX takes more than its arrays need, and others use
    the device, too. With kv_idle_release_s those of the longest sequence get theirs now, the others when they are
    needed.

    Raises:
        OutOfMemoryError: not as many as the user asked for, or as the longest sequence needs.
    """
    needed = needed_pages(setup)
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
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    taken = time.perf_counter() - begun
    seconds[phase] = seconds.get(phase, 0.0) + taken
    log.info("%s took %.1f s", phase, taken)
