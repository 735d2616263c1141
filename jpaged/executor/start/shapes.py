"""The shapes of programs and pool: from the options, the model and the device; then for the pool's real size."""

import os
from dataclasses import replace
from math import lcm

import jax

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.executor.buckets import fine_buckets, geometric_buckets
from jpaged.executor.cache.spec import kernel_block_bytes
from jpaged.executor.cache.virtual.arrays import CpuRanges
from jpaged.executor.cache.virtual.cuda import CudaDriver
from jpaged.executor.cache.virtual.geometry import Geometry
from jpaged.executor.cache.virtual.layout import VirtualCache
from jpaged.executor.cache.virtual.memfd import LEAST_ADOPTED, MemfdDriver
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import fewest_anywhere
from jpaged.executor.start.memory import CPU_POOL_BYTES
from jpaged.executor.step.expert_load import sparse_layers
from jpaged.executor.step.program import Setup
from jpaged.models import Model, ModelConfig
from jpaged.models.config import ROUTER_SKEW
from jpaged.models.row_tiles import check_rows_are_apart
from jpaged.pallas_kernels.contiguous_attention.api import READ_BEHIND, TILE_TOKENS, is_for_contiguous

NOMINAL_BLOCKS = 1024
"""Blocks of the pool that programs are analysed with, before its size is known."""

ONE_CALL_ROWS = "JPAGED_ONE_CALL_ROWS"
"""The environment variable that says up to how many rows a decode step is one program."""


def one_call_rows(limit: int | None) -> int:
    """Rows up to which a decode step is one program (`ExecutorConfig.one_call_rows`): 0 unless the environment asks for
    some, as the gain on a GPU is not measured. Always 0 on a CPU, where most programs are compiled while requests wait,
    and a call is little of a step.

    limit: bytes of a device's memory, None on a CPU.

    Raises:
        InvalidParameterError: the variable is not a whole number from 0 up.
    """
    value = os.environ.get(ONE_CALL_ROWS, "").strip()
    if value and not value.isdecimal():
        raise InvalidParameterError(
            f"{ONE_CALL_ROWS} must be a number of rows, 0 for none, got {value!r}; unset it for none."
        )
    return 0 if limit is None else int(value or 0)


def refuse_for_hybrids(args: EngineArgs, model: ModelConfig) -> None:
    """Raises InvalidParameterError for options that models with recurrent layers do without."""
    if not model.is_hybrid:
        return
    for name, refused, why in (
        ("shared_prefix_attention", True, "their steps read each sequence by itself"),
        ("host_prefix_cache", True, "a prefix is of no use there without the states behind it"),
        ("preemption_mode", "swap", 'preempted sequences are computed again; use "auto" or "recompute"'),
    ):
        if getattr(args, name) == refused:
            raise InvalidParameterError(
                f"{name}={refused!r} is not supported for models with recurrent layers such as"
                f" {model.architecture}, whose states stay on the device: {why}."
            )


def refuse_skew(model: ModelConfig, are_random: bool) -> None:
    """Raises InvalidParameterError if routers are skewed though their weights are not random."""
    if model.router_skew and not are_random:
        raise InvalidParameterError(
            f"{ROUTER_SKEW}={model.router_skew:g} in config.json is for benchmarks of random weights, and would spoil"
            " what the routers of others pick; remove it, or use load_format='dummy' without weights."
        )


def most_sequences(shard: Model, limit: int | None) -> int | None:
    """The most sequences that run at once where the user does not say, for a model with recurrent layers: as many as
    have their states in half of the memory that weights leave. None without such layers, or without a limit.
    """
    size = sum(state.num_bytes(shard.dtype.itemsize) for state in shard.config.layer_states if state is not None)
    if limit is None or not size:
        return None
    fitting = max(1, (limit - shard.num_bytes) // 2 // size)
    return fitting if fitting < 8 else fitting // 8 * 8


def with_snapshots(config: ExecutorConfig, args: EngineArgs, shard: Model, limit: int | None) -> ExecutorConfig:
    """The same with snapshots of states, for a model with recurrent layers: as many as are asked for. By default as
    many as fit an eighth of what weights leave of the memory (of `CPU_POOL_BYTES` on a CPU), four for each slot at
    most. None without a prefix cache.

    Raises:
        InvalidParameterError: some are asked for, and no layer has states.
    """
    size = sum(state.num_bytes(shard.dtype.itemsize) for state in shard.config.layer_states if state is not None)
    if not size and args.num_state_snapshots:
        raise InvalidParameterError(
            f"num_state_snapshots={args.num_state_snapshots} is for models with recurrent layers, and"
            f" {shard.config.architecture} has none; leave it out."
        )
    if not size or not args.enable_prefix_caching:
        return config
    room = CPU_POOL_BYTES if limit is None else limit - shard.num_bytes
    count = args.num_state_snapshots
    if count is None:
        count = fewest_anywhere(max(0, min(room // 8 // size, 4 * config.max_num_seqs)))
    return replace(config, num_state_snapshots=count)


def executor_config(
    args: EngineArgs, model: ModelConfig, limit: int | None, most_seqs: int | None = None
) -> ExecutorConfig:
    """Shapes for this model and device, the number of blocks nominal. most_seqs: of max_num_seqs by default."""
    if args.max_model_len is not None and args.max_model_len > model.max_position_embeddings:
        raise InvalidParameterError(
            f"max_model_len={args.max_model_len} exceeds the {model.max_position_embeddings} positions the model has; "
            f"lower it."
        )
    if args.batch_invariant:
        check_rows_are_apart(model)
    if args.kv_cache_dtype == "fp8" and model.value_dim is not None:
        raise InvalidParameterError(
            f"kv_cache_dtype='fp8' is not supported for {model.architecture}, which keeps latents; leave it out."
        )
    if args.expert_load:
        sparse_layers(model)  # or refuses it
        if jax.process_count() > 1:
            raise InvalidParameterError(
                f"expert_load=True is for a model within one process, got {jax.process_count()} of them; leave it out."
            )
    on_cpu, large = limit is None, (limit or 0) > 64 * 2**30
    max_num_seqs = args.max_num_seqs or min(64 if on_cpu else 1024 if large else 256, most_seqs or 1024)
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
    contiguous_backend = asks_for_contiguous(args)
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
        kernel_backend=None if contiguous_backend else args.kernel_backend,
        contiguous_backend=contiguous_backend,
        shared_prefix_attention=args.shared_prefix_attention,
        logprobs_mode=args.logprobs_mode,
        batch_invariant=args.batch_invariant,
        expert_load=args.expert_load,
    )


def asks_for_contiguous(args: EngineArgs) -> str | None:
    """The kernel backend that is asked for, if its attention is for contiguous keys and values; None if it is not.

    Raises:
        InvalidParameterError: it is, and another option cannot go with it.
    """
    backend = args.kernel_backend
    if backend is None or not is_for_contiguous(backend):
        return None
    layout = args.kv_cache_layout if args.kv_cache_layout == "paged" else args.virtual_page_layout
    if layout != "per-layer":
        raise InvalidParameterError(
            f"kernel_backend={backend!r} knows no block tables, and attends to the virtual layout with pages of one"
            f" layer alone, got {layout!r}; give kv_cache_layout='virtual' and virtual_page_layout='per-layer', or"
            " leave kernel_backend out."
        )
    if args.shared_prefix_attention:
        raise InvalidParameterError(
            f"kernel_backend={backend!r} cannot go with shared_prefix_attention=True: it reads each sequence by itself;"
            " leave one of them out."
        )
    return backend


def cut_into_pages(config: ExecutorConfig, args: EngineArgs, shard: Model, device: jax.Device) -> ExecutorConfig:
    """The same for the virtual layout, whose blocks are pages of the device."""
    if jax.process_count() > 1:
        raise InvalidParameterError(
            f"kv_cache_layout='virtual' is for a model within one process, got {jax.process_count()} of them; use "
            f"kv_cache_layout='paged', or replicas (data_parallel_size)."
        )
    cache = Setup.of(shard, config).cache
    if cache.spec[0].value_dim is not None:
        raise InvalidParameterError(
            f"kv_cache_layout='virtual' is not supported for {shard.config.architecture}, whose latents of"
            f" {cache.spec[0].head_dim} columns fill pages of memory only in thousands of tokens; use"
            " kv_cache_layout='paged'."
        )
    is_cpu = device.platform == "cpu"
    layer, is_contiguous = cache.whole, config.contiguous_backend is not None
    block_size = 1 if is_contiguous else args.block_size
    block_bytes = kernel_block_bytes(layer, block_size) // (2 if is_contiguous else 1)
    granularity = MemfdDriver.granularity if is_cpu else CudaDriver(int(device.local_hardware_id or 0)).granularity
    if is_contiguous and not is_cpu:
        granularity = whole_tiles(granularity, block_bytes)
    geometry = Geometry.fit(
        args.virtual_page_layout,
        cache.grouping.num_arrays,
        block_size,
        block_bytes,
        granularity,
        spare_bytes=CpuRanges.spare_bytes if is_cpu else 0,
    )
    geometry = replace(geometry, least_bytes=LEAST_ADOPTED if is_cpu else 0)
    if is_contiguous:  # whose offsets count elements
        most_tokens = geometry.most_tokens // (layer.kv_heads * layer.head_dim)
        geometry = replace(geometry, most_tokens=most_tokens, read_behind=READ_BEHIND)
    config = replace(config, geometry=geometry, block_size=geometry.page_tokens)
    if args.max_model_len is not None:
        return config
    cut = Setup.of(shard, config).cache
    assert isinstance(cut, VirtualCache)
    longest = geometry.longest(config.num_blocks, cut.num_stretches)
    return replace(config, max_model_len=min(config.max_model_len, longest))


def whole_tiles(granularity: int, token_bytes: int) -> int:
    """The least bytes of a page of keys that holds whole tiles of kernels, so that no tile counted from a sequence's
    first token reaches behind its last page. token_bytes: of a layer's keys."""
    return lcm(granularity, TILE_TOKENS * token_bytes)


def fit_to_pool(shard: Model, nominal: ExecutorConfig, num_blocks: int, asked: int | None) -> Setup:
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
        groups = cache.sequence_blocks(1)
        shared = f", which {groups} groups of layers share" if groups > 1 else ""
        raise OutOfMemoryError(
            f"max_model_len={asked} does not fit the KV pool, which holds {capacity} tokens "
            f"({num_blocks - 1} blocks of {config.block_size}{shared}). Lower max_model_len, or enlarge the pool by "
            f"gpu_memory_utilization or num_gpu_blocks_override."
        )
    return Setup.of(shard, replace(config, max_model_len=capacity))


def needed_pages(setup: Setup) -> int:
    """Pages that the longest sequence needs, and the null block."""
    return setup.cache.sequence_blocks(setup.config.max_model_len) + 1
