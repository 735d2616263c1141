"""The options of an engine: `EngineArgs`."""

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jpaged.api.checks import check_bool, check_choice, check_integer, is_number, plain
from jpaged.api.errors import InvalidParameterError, shown
from jpaged.api.unknown_names import ENGINE, explains_unknown

Policy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
KVCacheLayout = Literal["paged", "virtual"]
VirtualPageLayout = Literal["sliced", "per-layer"]

INVARIANT_BACKENDS = ("hopper", "mosaic", "triton", "xla")
"""Kernel backends with an attention that computes each query by itself, for `batch_invariant`."""

_MAX_DEVICES = 4096
"""More than any machine or cluster has. It keeps a mistyped number from starting processes without end."""

DType = Literal["auto", "float32", "bfloat16", "float16", "half", "float"]
_DTYPE_NAMES = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
"""Other names, under which vLLM takes them too, and what they mean."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LoadFormat = Literal["auto", "safetensors", "orbax", "dummy"]
RerankerName = Literal["qwen3"]
CompilePrograms = Literal["auto", "at_start", "on_first_use"]
Quantization = Literal["fp8", "int8", "awq", "compressed-tensors", "fbgemm_fp8", "gptq", "modelopt", "mxfp4", "none"]

_FREE = {"free": True}
"""Marks a field whose value may differ between engines that use one runner (`EngineArgs.differs_from`)."""


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """The options that the scheduler takes as the user gave them; `EngineArgs` says what they mean.

    Raises:
        InvalidParameterError: a value of the wrong type or out of range.
    """

    enable_prefix_caching: bool = field(default=True, metadata=_FREE)
    shared_prefix_attention: bool = field(default=False, metadata=_FREE)
    watermark: float = field(default=0.01, metadata=_FREE)
    pipeline_depth: int = field(default=2, metadata=_FREE)
    preemption_mode: PreemptionMode = field(default="auto", metadata=_FREE)
    host_prefix_cache: bool = field(default=False, metadata=_FREE)
    state_snapshot_tokens: int = field(default=256, metadata=_FREE)

    def __post_init__(self) -> None:
        check_choice("preemption_mode", self.preemption_mode, PreemptionMode)
        check_integer("pipeline_depth", self.pipeline_depth, 0, 64)
        check_integer("state_snapshot_tokens", self.state_snapshot_tokens, 1, 2**31)
        _check_fraction("watermark", self.watermark, zero_allowed=True)
        for name in ("enable_prefix_caching", "shared_prefix_attention", "host_prefix_cache"):
            check_bool(name, getattr(self, name))

    def scheduling(self) -> dict[str, Any]:
        """These options, by name."""
        return {name: getattr(self, name) for name in SchedulingOptions.__dataclass_fields__}


@explains_unknown(ENGINE, "option")
@dataclass(frozen=True, kw_only=True)
class EngineArgs(SchedulingOptions):
    """What a user asks of an engine. None means: chosen to fit the model and the device.

    Args:
        model: a directory in Hugging Face layout or a hub id; the embedded demo model by default.
        tokenizer: the same for the tokenizer; the model's own by default.
        revision: the model's branch, tag or commit on the hub.
        generation_config: whose generation_config.json says how to sample where a request does not, and what ends a
            text. "auto": the model's. "vllm": the model's says what ends a text, none how to sample. Otherwise a
            directory that has one. Name and values as in vLLM.
        dtype: of weights, activations and KV pool; "auto" takes the checkpoint's (float32 on a CPU, whose
            arithmetic in 16 bits is slow). "half" is float16 and "float" float32; types of JAX, numpy and PyTorch go by
            their names.
        max_model_len: longest sequence, prompt and output, in tokens; by default what model and pool allow.
        block_size: tokens in a block of the KV pool; a power of two from 1 to 256 (the GPU kernels take 16 to 128).
        gpu_memory_utilization: fraction of the device's memory to use for everything, in (0, 1]. Other arrays of this
            process, a trainer's say, are part of it; what other processes have on the device is not used. JAX takes its
            memory when it first touches the device (XLA_PYTHON_CLIENT_MEM_FRACTION): in a process where it has, no more
            than it took then can be used. With XLA_PYTHON_CLIENT_PREALLOCATE=false the engine takes its part when it
            starts, or what it needs for a pool of num_gpu_blocks_override.
        num_gpu_blocks_override: blocks in the pool, instead of what memory allows.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: token budget of a step; longer prompts are computed in chunks. No more sequences than
            this decode at once.
        enable_prefix_caching: reuse the keys and values of equal prompt beginnings.
        shared_prefix_attention: in decode steps, read a beginning that many sequences share once for all of them, where
            that pays. Faster for long common prompts; but sums are then added in another order, so that a request's
            tokens may depend on who shares its batch. Needs enable_prefix_caching.
        scheduling_policy: "fcfs", or "priority": lower `priority` values first.
        watermark: fraction of the pool that must stay free when a request is admitted.
        pipeline_depth: steps dispatched before the first one's tokens are read; 0 reads each at once.
        swap_space: GiB of host memory for the blocks of preempted sequences, taken as they are needed.
        host_prefix_cache: let blocks of the prefix cache that the pool reuses go to the swap space, as far as preempted
            sequences leave room there, and come back when a prompt hits them. It pays with a swap_space that is large
            beside the pool; each block that is evicted crosses the link to the host once.
        preemption_mode: what to do with sequences for which there is no room any more. "swap": keep their keys and
            values in the swap space while it lasts; "recompute": compute them again; "auto": swap the sequences of a
            request for several (`n`, beam search), and compute single ones again.
        num_state_snapshots: of models with recurrent layers, how many copies of sequences' states are kept on the
            device for the prefix cache, which hits where there is one. By default an eighth of the memory that weights
            leave; 0: such models have no prefix cache. Without `enable_prefix_caching` there are none.
        state_snapshot_tokens: a copy is made where so many tokens, rounded up to whole blocks, are new since the last
            one of a sequence. A prompt that is so much longer than its hit takes a step more.
        kv_cache_layout: "paged": a pool of blocks, found through block tables. "virtual": contiguous addresses for each
            sequence, below which pages of the device's memory are mapped as it grows (`docs/virtual.md`); its blocks
            are pages, and num_gpu_blocks_override counts them.
        virtual_page_layout: what a page of the virtual layout holds: tokens of all layers ("sliced": small pages of few
            tokens), or of one layer ("per-layer": hundreds of tokens, of each layer a page).
        kv_idle_release_s: seconds after which pages of the virtual layout that no request has needed go back to the
            device, while the engine serves; others can have the memory, until requests need it again. The pool then
            begins small, and gpu_memory_utilization or num_gpu_blocks_override says how far it grows. None: it keeps
            all its memory.
        decode_buckets, token_buckets: ascending sizes that programs are compiled for.
        compile_programs: when the step programs are compiled. "at_start": all of them before the first request, so that
            none waits for one. "on_first_use": at start what nearly every request runs, and each other program when a
            step first needs it, with which that step waits for it; for CPUs alone. The engine starts sooner, and what
            no request asks for is never compiled. "auto": on first use on a CPU, at start elsewhere, and with a
            kernel_backend other than "xla", so that the start finds what it cannot do.
        seed: of sampling, for requests without one, and of random weights.
        kernel_backend: implementation of attention and cache writes: "hopper" (Mosaic kernels for Hopper, also called
            "mosaic"), "triton" (GPUs since Ampere), "cudnn" (GPUs since Hopper, for the virtual layout with per-layer
            pages; attention alone), "xla" (anywhere), or one registered by
            `jpaged.pallas_kernels.register_backend` in the process that starts the engine; by default the kernels where
            the device and the model's shapes allow. With "xla" MLPs and sampling have no kernels either; otherwise
            the backend's are taken where it has them and shapes allow, that of MLPs in steps of many rows.
        tensor_parallel_size: devices that the model is split over; a divisor of its attention heads.
        enable_expert_parallel: with a tensor_parallel_size above 1, give each device some experts whole, instead of a
            part of every expert; for mixtures of experts.
        one_shot_rows: rows of a step up to which sums over devices take the one-shot all-reduce kernel, instead of
            NCCL; 0 for none. By default, where GPUs and the model's shapes allow, 8,192 on two devices, 256 on four and
            64 on other numbers.
        data_parallel_size: replicas of the model, each on devices and in a process of its own (`LLM` only).
        coordinator_address, num_processes, process_id: of a model over several hosts, `docs/parallel.md`; by default
            what JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say.
        logprobs_mode: whose log-probabilities `SamplingParams.logprobs` gives. "raw_logprobs": the model's own
            distribution. "processed_logprobs": the distribution that the token was sampled from, after masks, biases,
            penalties, temperature, min_p, top_k and top_p, where a token that they leave out has minus infinity; for
            greedy requests the one after masks, biases and penalties. Those of prompts, scores and beam searches are
            always raw. Names as in vLLM.
        batch_invariant: give a token's logits and log-probabilities the same bits whatever shares its steps, however
            prompts are cut into chunks, and whatever comes from the prefix cache, from swap or from computing again.
            Each row is computed in a tile of fixed size (`docs/reinforcement_learning.md` says what that costs and what
            it cannot go with). Another tensor_parallel_size, kernel_backend, device or version may give other bits.
        expert_load: count the tokens of each expert of a mixture (`EngineStats.expert_load`, `/metrics`) on the device,
            in the steps that compute them.
        load_format: "safetensors" or "orbax" checkpoint, or "auto" for what is there; "dummy" makes random weights from
            its config.json.
        quantization: "fp8" or "int8" rounds the weights of a checkpoint that is not quantized to FP8 or to 8-bit
            integers while they are read (`docs/quantization.md`). A quantized checkpoint says itself what it is;
            another name than its own is refused. "none" makes plain numbers of experts in MXFP4 while they are read.
        reranker: the model judges pairs of texts by "yes" or "no", as Qwen3-Reranker does ("qwen3"): `LLM.score`,
            `/v1/score` and `/v1/rerank` then give the probability of "yes". None: they compare embeddings.
        kv_cache_dtype: of keys and values in the cache. "fp8" (or "fp8_e4m3"): e4m3, which takes half of the memory of
            16 bits; each layer's scales are those of the checkpoint (`k_scale`, `v_scale`), or 1. "auto": the model's
            dtype. Name as in vLLM.
        calculate_kv_scales: with kv_cache_dtype="fp8", compute the scales at start-up, from the keys and values of
            built-in token ids, instead of reading the checkpoint's. They stay for the engine's life, and an engine that
            is started again has the same. Name as in vLLM, which calibrates on the first requests.
        skip_tokenizer_init: take and give token ids only.
        verbose: print the start-up table and progress.

    Raises:
        InvalidParameterError: a value of the wrong type or out of range.
    """

    model: str | None = None
    tokenizer: str | None = field(default=None, metadata=_FREE)
    revision: str | None = None
    generation_config: str = field(default="auto", metadata=_FREE)
    dtype: DType = "auto"
    max_model_len: int | None = field(default=None, metadata=_FREE)
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = field(default=None, metadata=_FREE)
    max_num_seqs: int | None = field(default=None, metadata=_FREE)
    max_num_batched_tokens: int | None = field(default=None, metadata=_FREE)
    scheduling_policy: Policy = field(default="fcfs", metadata=_FREE)
    swap_space: float = field(default=4.0, metadata=_FREE)
    kv_cache_layout: KVCacheLayout = "paged"
    virtual_page_layout: VirtualPageLayout = "sliced"
    kv_idle_release_s: float | None = None
    decode_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None
    compile_programs: CompilePrograms = "auto"
    seed: int = field(default=0, metadata=_FREE)
    kernel_backend: str | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    one_shot_rows: int | None = None
    data_parallel_size: int = 1
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    batch_invariant: bool = False
    expert_load: bool = False
    num_state_snapshots: int | None = field(default=None, metadata=_FREE)
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    reranker: RerankerName | None = field(default=None, metadata=_FREE)
    kv_cache_dtype: KVCacheDType = "auto"
    calculate_kv_scales: bool = False
    skip_tokenizer_init: bool = field(default=False, metadata=_FREE)
    verbose: bool = field(default=True, metadata=_FREE)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "tokenizer", "generation_config"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name, what in (
            ("model", "a directory or a hub id"),
            ("tokenizer", "a directory or a hub id"),
            ("revision", "a branch, tag or commit, as a string"),
            ("kernel_backend", "the name of a backend, as a string"),
            ("coordinator_address", '"host:port"'),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidParameterError(f"{name} must be {what}, got {shown(value)}.")
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise InvalidParameterError(
                f"generation_config must be 'auto', 'vllm' or a directory, got {shown(self.generation_config)}."
            )
        object.__setattr__(self, "dtype", _type_name(self.dtype))
        check_choice("dtype", self.dtype, DType)
        object.__setattr__(self, "dtype", _DTYPE_NAMES.get(self.dtype, self.dtype))
        check_choice("load_format", self.load_format, LoadFormat)
        check_choice("logprobs_mode", self.logprobs_mode, LogprobsMode)
        if self.quantization is not None:
            check_choice("quantization", self.quantization, Quantization)
        if self.reranker is not None:
            check_choice("reranker", self.reranker, RerankerName)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KVCacheDType)
        object.__setattr__(self, "kv_cache_dtype", _DTYPE_NAMES.get(self.kv_cache_dtype, self.kv_cache_dtype))
        check_choice("compile_programs", self.compile_programs, CompilePrograms)
        check_bool("calculate_kv_scales", self.calculate_kv_scales)
        if self.calculate_kv_scales and self.kv_cache_dtype != "fp8":
            raise InvalidParameterError(
                f"calculate_kv_scales=True needs kv_cache_dtype='fp8', got {self.kv_cache_dtype!r}: no other cache has"
                " scales."
            )
        check_choice("scheduling_policy", self.scheduling_policy, Policy)
        check_choice("kv_cache_layout", self.kv_cache_layout, KVCacheLayout)
        check_choice("virtual_page_layout", self.virtual_page_layout, VirtualPageLayout)
        if self.virtual_page_layout != "sliced" and self.kv_cache_layout != "virtual":
            raise InvalidParameterError(
                f"virtual_page_layout={self.virtual_page_layout!r} needs kv_cache_layout='virtual', got"
                f" {self.kv_cache_layout!r}: only the virtual layout has pages."
            )
        if self.kv_cache_dtype != "auto" and self.kv_cache_layout == "virtual":
            raise InvalidParameterError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} needs kv_cache_layout='paged': the virtual layout keeps keys"
                " and values in the model's dtype."
            )
        _check_idle_release(self.kv_idle_release_s, self.kv_cache_layout)
        check_integer("block_size", self.block_size, 1)
        for name, least, most in (
            ("max_model_len", 2, 2**30),
            ("num_gpu_blocks_override", 2, 2**31 // self.block_size - 1),
            ("max_num_seqs", 1, 2**16),
            ("max_num_batched_tokens", 1, 2**20),
            ("num_processes", 1, 2**16),
            ("process_id", 0, 2**16),
            ("one_shot_rows", 0, 2**16),
        ):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least, most)
        if self.block_size > 256 or self.block_size & (self.block_size - 1):
            raise InvalidParameterError(
                f"block_size must be a power of two from 1 to 256, got {shown(self.block_size)}."
            )
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1, _MAX_DEVICES)
        check_integer("data_parallel_size", self.data_parallel_size, 1, _MAX_DEVICES)
        if self.one_shot_rows and self.tensor_parallel_size == 1:
            raise InvalidParameterError(
                f"one_shot_rows={self.one_shot_rows} needs a tensor_parallel_size above 1: one device adds nothing up."
            )
        check_bool("enable_expert_parallel", self.enable_expert_parallel)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise InvalidParameterError(
                "enable_expert_parallel=True needs a tensor_parallel_size above 1: one device has all experts."
            )
        check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        _check_fraction("gpu_memory_utilization", self.gpu_memory_utilization, one_allowed=True)
        _check_swap_space(self.swap_space)
        check_bool("batch_invariant", self.batch_invariant)
        check_bool("expert_load", self.expert_load)
        if self.num_state_snapshots is not None:
            check_integer("num_state_snapshots", self.num_state_snapshots, 0, 2**20)
        if self.batch_invariant:
            self._check_batch_invariant()
        check_bool("skip_tokenizer_init", self.skip_tokenizer_init)
        check_bool("verbose", self.verbose)
        if self.host_prefix_cache and not (self.enable_prefix_caching and self.swap_space):
            raise InvalidParameterError(
                f"host_prefix_cache=True needs enable_prefix_caching=True and a swap_space above 0, got "
                f"enable_prefix_caching={self.enable_prefix_caching} and swap_space={self.swap_space}."
            )
        if self.shared_prefix_attention and not self.enable_prefix_caching:
            raise InvalidParameterError(
                "shared_prefix_attention=True needs enable_prefix_caching=True: prompts share blocks through the cache."
            )
        for name in ("decode_buckets", "token_buckets"):
            _check_buckets(name, getattr(self, name))
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, plain(getattr(self, name)))

    def _check_batch_invariant(self) -> None:
        for name, is_given, why in (
            ("shared_prefix_attention", self.shared_prefix_attention, "it adds up in another order with who shares"),
            ("kv_cache_layout", self.kv_cache_layout == "virtual", "kernels' steps depend on its pages"),
            ("expert_load", self.expert_load, "its steps do not count"),
            ("one_shot_rows", self.one_shot_rows, "steps of other sizes sum in another order"),
            ("kv_cache_dtype", self.kv_cache_dtype == "fp8", "its attention reads the model's own type alone"),
            (
                "kernel_backend",
                self.kernel_backend not in (None, *INVARIANT_BACKENDS),
                "it has no attention that computes each query by itself",
            ),
        ):
            if is_given:
                raise InvalidParameterError(
                    f"batch_invariant=True cannot go with {name}={getattr(self, name)!r}: {why}; leave one of them out."
                )
        if self.block_size > 128:
            raise InvalidParameterError(
                f"batch_invariant=True needs a block_size of at most 128, the tokens that attention takes at once, got"
                f" {self.block_size}."
            )

    def differs_from(self, started: "EngineArgs") -> str | None:
        """The name of an option that must equal the one the runner was started with, and does not; None if an engine
        with these options can use that runner.
        """
        for one in fields(EngineArgs):
            if not one.metadata.get("free") and getattr(self, one.name) != getattr(started, one.name):
                return one.name
        return None


LEAST_STEP_TIMEOUT_S = 3
"""With less, processes that are well would count as hung: without work they come round once a second."""


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """When an engine process counts as hung, and how often one that ended is started again.

    Args:
        step_timeout_s: an engine process whose loop has not come round for so long hangs, and is killed; so is an API
            process of a server that has several. At least `LEAST_STEP_TIMEOUT_S`.
        start_timeout_s: seconds after its start by which an engine process must serve; otherwise it counts as hung and
            is killed.
        max_restarts: within ten minutes, of one engine process; 0: it stays down the first time.
        spare_processes: a process of each replica waits beside it, with everything imported, to take its place
            sooner, at 300 MiB of host memory each. None: where the model runs on GPUs.

    Raises:
        InvalidParameterError: a value of the wrong type or out of range.
    """

    step_timeout_s: float = 300.0
    start_timeout_s: float = 3600.0
    max_restarts: int = 10
    spare_processes: bool | None = None

    def __post_init__(self) -> None:
        if not (self.spare_processes is None or isinstance(self.spare_processes, bool)):
            raise InvalidParameterError(f"spare_processes must be a bool or None, got {shown(self.spare_processes)}.")
        seconds = self.step_timeout_s
        if not is_number(seconds) or not LEAST_STEP_TIMEOUT_S <= seconds < math.inf:
            raise InvalidParameterError(
                f"step_timeout must be a number of seconds from {LEAST_STEP_TIMEOUT_S} up, got {shown(seconds)}; a"
                f" process without work comes round once a second."
            )
        if not is_number(self.start_timeout_s) or not 0 < self.start_timeout_s < math.inf:
            raise InvalidParameterError(
                f"start_timeout must be a number of seconds above 0, got {shown(self.start_timeout_s)}."
            )
        check_integer("max_restarts", self.max_restarts, 0, 2**31)


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_fraction(name: str, value: object, *, zero_allowed: bool = False, one_allowed: bool = False) -> None:
    if not is_number(value):
        raise InvalidParameterError(f"{name} must be a number, got {shown(value)}.")
    inside = 0 < value < 1 or (zero_allowed and value == 0) or (one_allowed and value == 1)
    if not inside:
        interval = f"{'[' if zero_allowed else '('}0, 1{']' if one_allowed else ')'}"
        raise InvalidParameterError(f"{name} must be in {interval}, got {shown(value)}.")


def _check_idle_release(value: object, layout: KVCacheLayout) -> None:
    if value is None:
        return
    if not is_number(value) or not 0 < value < math.inf:
        raise InvalidParameterError(
            f"kv_idle_release_s must be None or a number of seconds above 0, got {shown(value)}."
        )
    if layout != "virtual":
        raise InvalidParameterError(
            f"kv_idle_release_s={shown(value)} needs kv_cache_layout='virtual', got {layout!r}: the paged layout keeps"
            f" its memory."
        )


def _check_swap_space(value: object) -> None:
    if not is_number(value) or not 0 <= value < math.inf:
        raise InvalidParameterError(f"swap_space must be a number of GiB from 0 up, got {shown(value)}.")
    memory = host_memory() / 2**30
    if value > memory:
        raise InvalidParameterError(
            f"swap_space={shown(value)} exceeds the {memory:.1f} GiB of memory that this machine has; lower it."
        )


def _type_name(dtype: object) -> object:
    """A type of JAX's, numpy's or PyTorch's by its name; anything else as it is."""
    if isinstance(dtype, str):
        return dtype
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    return getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)


def _check_buckets(name: str, buckets: object) -> None:
    if buckets is None:
        return
    if not isinstance(buckets, tuple) or not buckets:
        raise InvalidParameterError(f"{name} must be a tuple of sizes, got {shown(buckets)}.")
    for size in buckets:
        check_integer(name, size, 1)
    if list(buckets) != sorted(set(buckets)):
        raise InvalidParameterError(f"{name} must ascend, got {buckets}.")
