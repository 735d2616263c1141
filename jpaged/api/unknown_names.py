"""What is said of a name that does not exist: what takes its place, or why nothing does.

Most of those listed are vLLM's; some are SGLang's and transformers'.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from jpaged.api.errors import UnknownParameterError, suggestion

_T = TypeVar("_T")

_ADAPTERS = "adapters are not loaded; merge the adapter into the checkpoint"
_BUCKETS = "programs are compiled for the sizes in decode_buckets and token_buckets"
_CHUNKS = "prompts beyond max_num_batched_tokens, a step's budget, are computed in chunks"
_CONFIG = "change config.json, in a copy of the model's directory"
_DRAFTS = "there is no speculative decoding; leave it out"
_GRAMMARS = "llguidance is the only backend; leave it out"
_MULTIMODAL = "prompts are text alone; leave it out"
_NO_CODE = "no code of the caller's runs in a step; use logit_bias, allowed_token_ids, bad_words or structured_outputs"
_ONE_PROCESS = "a model's devices are driven by one process; leave it out"
_QUIET = "nothing is logged by default; leave it out"
_TASKS = "any decoder model generates and embeds, and `reranker` makes one judge pairs; leave it out"

ENGINE = {
    "allowed_local_media_path": _MULTIMODAL,
    "async_scheduling": "pipeline_depth says how many steps are dispatched ahead",
    "attention_backend": "it is kernel_backend",
    "attention_config": "kernel_backend chooses the kernels of attention",
    "compilation_config": _BUCKETS,
    "convert": _TASKS,
    "cpu_offload_gb": "weights stay on the device; quantization or tensor_parallel_size make them fit",
    "cuda_graph_sizes": _BUCKETS,
    "cudagraph_capture_sizes": _BUCKETS,
    "device": "JAX_PLATFORMS chooses the device",
    "disable_custom_all_reduce": "one_shot_rows=0 leaves sums over devices to NCCL",
    "disable_log_requests": _QUIET,
    "disable_log_stats": _QUIET,
    "distributed_executor_backend": _ONE_PROCESS,
    "download_dir": "HF_HOME says where files of the hub are kept",
    "enable_chunked_prefill": f"{_CHUNKS}; leave it out",
    "enable_lora": _ADAPTERS,
    "enable_sleep_mode": "every engine can sleep; leave it out",
    "enforce_eager": "steps are always compiled programs; decode_buckets and token_buckets make them fewer",
    "guided_decoding_backend": _GRAMMARS,
    "hf_config_path": _CONFIG,
    "hf_overrides": _CONFIG,
    "hf_token": "HF_TOKEN in the environment is the hub's token",
    "kv_cache_memory_bytes": "num_gpu_blocks_override sets the pool's blocks, gpu_memory_utilization all memory",
    "kv_events_config": "events of the KV cache are not published",
    "kv_transfer_config": "keys and values are not passed between engines",
    "limit_mm_per_prompt": _MULTIMODAL,
    "logits_processors": _NO_CODE,
    "long_prefill_token_threshold": _CHUNKS,
    "max_logprobs": "the most is fixed, as SamplingParams says of logprobs; leave it out",
    "max_long_partial_prefills": _CHUNKS,
    "max_lora_rank": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_num_partial_prefills": _CHUNKS,
    "max_seq_len_to_capture": _BUCKETS,
    "mm_processor_cache_gb": _MULTIMODAL,
    "mm_processor_kwargs": _MULTIMODAL,
    "model_impl": "models run on jpaged's own code alone; `jpaged models` lists them",
    "model_path": "it is model",
    "override_generation_config": "give SamplingParams, or generation_config a directory of your own",
    "pipeline_parallel_size": "tensor_parallel_size splits every layer over devices; there are no stages",
    "prefix_caching_hash_algo": "prefixes go by SHA-256; leave it out",
    "random_seed": "it is seed",
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "runner": _TASKS,
    "served_model_name": "it is an option of `jpaged serve`",
    "speculative_config": _DRAFTS,
    "speculative_model": _DRAFTS,
    "stream_interval": "AsyncLLMEngine joins what comes before the caller takes it; leave it out",
    "structured_outputs_config": "llguidance is the only backend, and StructuredOutputsParams has what it can be told",
    "task": _TASKS,
    "tokenizer_mode": "tokenizers are read by transformers; `tokenizer` names another one",
    "tokenizer_revision": "give `tokenizer` a directory that has that revision",
    "tp_size": "it is tensor_parallel_size",
    "trust_remote_code": "code of a checkpoint is never run; leave it out",
    "worker_cls": _ONE_PROCESS,
    "worker_extension_cls": _ONE_PROCESS,
}
"""Options of engines."""

_CUT = "give token ids that are cut already"

SAMPLING = {
    "do_sample": "temperature=0 is greedy",
    "early_stopping": "it is one of BeamSearchParams, for LLM.beam_search",
    "ebnf": "give structured_outputs={'grammar': ...}",
    "extra_args": "there are no plug-ins that read them",
    "flat_logprobs": "log-probabilities are a dictionary for each token; leave it out",
    "guided_decoding": "it is structured_outputs",
    "json_schema": "give structured_outputs={'json': ...}",
    "length_penalty": "it is one of BeamSearchParams, for LLM.beam_search",
    "logits_processors": _NO_CODE,
    "logprob_token_ids": "logprobs gives the likeliest tokens, and LLMEngine.add_score_request scores given ones",
    "max_new_tokens": "it is max_tokens",
    "min_new_tokens": "it is min_tokens",
    "no_stop_trim": "it is include_stop_str_in_output",
    "num_beams": "LLM.beam_search searches, with BeamSearchParams",
    "regex": "give structured_outputs={'regex': ...}",
    "repetition_detection": "repetition_penalty and frequency_penalty keep a text from going round",
    "sampling_seed": "it is seed",
    "skip_reading_prefix_cache": "a prompt with a cache_salt of its own hits nothing",
    "spaces_between_special_tokens": "the text has the tokenizer's own spaces; leave it out",
    "stop_regex": "stop takes strings alone",
    "stream_interval": ENGINE["stream_interval"],
    "thinking_token_budget": "the server takes it, in chats",
    "truncate_prompt_tokens": _CUT,
    "use_beam_search": "LLM.beam_search searches, with BeamSearchParams",
}
"""Sampling parameters."""

BEAM_SEARCH = {
    "include_stop_str_in_output": "the text of a stop token is left out",
    "num_beams": "it is beam_width",
    "structured_outputs": "a search is not constrained",
    "temperature": "a search goes by the model's own probabilities; leave it out",
}
"""Parameters of beam search."""

_CLASSIFYING = "models that classify or reward are not supported"

POOLING = {
    "activation": _CLASSIFYING,
    "pooling_type": "it is pooling",
    "softmax": _CLASSIFYING,
    "step_tag_id": _CLASSIFYING,
    "task": "LLM.embed gives vectors, LLM.score similarities; leave it out",
    "truncate_prompt_tokens": _CUT,
    "use_activation": "of an embedding it is normalize",
}
"""Parameters of pooling."""

STRUCTURED_OUTPUTS = {
    "backend": _GRAMMARS,
    "disable_additional_properties": 'say "additionalProperties": false in the schema',
    "disable_fallback": _GRAMMARS,
}
"""Parameters of structured output."""


class ExplainsMissing:
    """For a class that has a namesake in vLLM: the error of a method or property that only that one has says what takes
    its place here, as `_elsewhere` has it by name.
    """

    _elsewhere: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # or no checker would find a misspelt name

        def __getattr__(self, name: str) -> NoReturn:
            instead, kind = self._elsewhere.get(name), type(self).__name__
            raise AttributeError(f"{kind} has no {name!r}{f'; {instead}' if instead else ''}.", name=name, obj=self)


def check_known(
    owner: str, kind: str, given: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]
) -> None:
    """Raises UnknownParameterError for the first name in `given` that is not in `known`.

    owner, kind: what has parameters, and what these are called there. elsewhere: by name, what to say.
    """
    names = list(known)
    for name in given:
        if name in names:
            continue
        if name in elsewhere:
            raise UnknownParameterError(f"{owner} has no {kind} {name!r}: {elsewhere[name]}.")
        meant = suggestion(name, names) or f"it has {', '.join(names)}."
        raise UnknownParameterError(f"{owner} has no {kind} {name!r}; {meant}")


def explains_unknown(elsewhere: Mapping[str, str], kind: str = "parameter") -> Callable[[type[_T]], type[_T]]:
    """Decorates a dataclass: a keyword that is no field of it raises UnknownParameterError, which says what to do.

    elsewhere, kind: as of `check_known`.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        construct: Callable[..., None] = cls.__init__

        @wraps(construct)
        def __init__(self: _T, *args: Any, **values: Any) -> None:
            try:
                construct(self, *args, **values)
            except TypeError:
                known = [one.name for one in fields(cls)]  # type: ignore[arg-type]
                check_known(cls.__name__, kind, values, known, elsewhere)
                raise

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate
