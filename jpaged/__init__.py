"""jpaged: an LLM serving engine for JAX on NVIDIA GPUs."""

from jpaged.version import __version__

__all__ = ["__version__"]
