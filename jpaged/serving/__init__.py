"""The OpenAI-compatible server: HTTP, its protocols, page and metrics. `jpaged.processes` has the engine processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.processes.async_llm_engine import AsyncLLMEngine
    from jpaged.serving.app import build_app
    from jpaged.serving.limits import ServerLimits
    from jpaged.serving.options import AppOptions, ServerOptions
    from jpaged.serving.server import serve

_LAZY = {  # what imports one module of the package shall not wait for all others
    "AppOptions": "jpaged.serving.options",
    "AsyncLLMEngine": "jpaged.processes.async_llm_engine",
    "ServerLimits": "jpaged.serving.limits",
    "ServerOptions": "jpaged.serving.options",
    "build_app": "jpaged.serving.app",
    "serve": "jpaged.serving.server",
}

__all__ = ["AppOptions", "AsyncLLMEngine", "ServerLimits", "ServerOptions", "build_app", "serve"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jpaged.serving' has no attribute {name!r}")
