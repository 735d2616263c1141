"""Flax models, their configurations and their checkpoints."""

from jpaged.models.checkpoint import load, save_pretrained
from jpaged.models.config import ModelConfig, supported_architectures
from jpaged.models.dense import dense_causal_attend
from jpaged.models.hub import resolve
from jpaged.models.layers import Attend
from jpaged.models.model import CausalLM, Model, Weights, build, resolve_dtype

__all__ = [
    "Attend",
    "CausalLM",
    "Model",
    "ModelConfig",
    "Weights",
    "build",
    "dense_causal_attend",
    "load",
    "resolve",
    "resolve_dtype",
    "save_pretrained",
    "supported_architectures",
]
