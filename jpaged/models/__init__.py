"""Flax models, their configurations and their checkpoints.

From a checkpoint to logits:

    directory = resolve("Qwen/Qwen3-0.6B")
    model = build(ModelConfig.from_directory(directory), dtype="bfloat16")
    weights = load(model, directory)
    hidden = model.forward(weights, tokens, positions, dense_causal_attend)   # tokens, positions: int32 [T]
    logits = model.logits(weights, hidden)                                    # float32 [T, vocab]

A family of models that this package does not have is registered from outside: see `register`, `Family` and
docs/adding_a_model.md.

From training to a checkpoint that `load`, transformers and other engines read. The flat tuple of weights is a
pytree, so optax can train it as it is; who prefers a Flax module takes one and gives it back:

    model = build(ModelConfig.from_dict(config_json), dtype="float32")
    module = model.module(model.init(seed=0))
    ...                                                 # nnx.value_and_grad, nnx.Optimizer
    save_pretrained(model, model.flatten(module), "my-model", dtype="bfloat16")
"""

from jpaged.host.hub import resolve
from jpaged.models import families as _families  # registers those of this package
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.models.dense import dense_causal_attend
from jpaged.models.family import Attend, CausalLM, Family
from jpaged.models.loading.checkpoint import load, save_pretrained
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.model import Model, Weights, build, resolve_dtype
from jpaged.models.registry import register, supported_architectures

del _families

__all__ = [
    "Attend",
    "CausalLM",
    "ConfigReader",
    "Family",
    "Model",
    "ModelConfig",
    "Piece",
    "TiedTensor",
    "Weights",
    "build",
    "dense_causal_attend",
    "load",
    "register",
    "resolve",
    "resolve_dtype",
    "save_pretrained",
    "supported_architectures",
]
