"""jpaged: an LLM serving engine for JAX on NVIDIA GPUs.

from jpaged import LLM, SamplingParams

outputs = LLM("path/to/model").generate(["Once upon a time"], SamplingParams(max_tokens=100))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.outputs import CompletionOutput, EmbeddingRequestOutput, Logprob, RequestOutput, ScoringRequestOutput
from jpaged.api.pooling_params import PoolingParams
from jpaged.api.prompts import TextPrompt, TokensPrompt
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.api.version import __version__

if TYPE_CHECKING:
    from jpaged.frontend.llm_engine import LLMEngine
    from jpaged.llm import LLM
    from jpaged.processes.async_llm_engine import AsyncLLMEngine

_LAZY = {  # `LLM` and `LLMEngine` import jax, which takes a second or two
    "LLM": "jpaged.llm",
    "LLMEngine": "jpaged.frontend.llm_engine",
    "AsyncLLMEngine": "jpaged.processes.async_llm_engine",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
