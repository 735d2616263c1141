"""Flax models, their configurations and their checkpoints.

From a checkpoint to logits:

    directory = resolve("Qwen/Qwen3-0.6B")
    model = build(ModelConfig.from_directory(directory), dtype="bfloat16")
    weights = load(model, directory)
    hidden = model.forward(weights, tokens, positions, dense_causal_attend)   # tokens, positions: int32 [T]
    logits = model.logits(weights, hidden)                                    # float32 [T, vocab]

A family of models that this package does not have is registered from outside: see `register`, `Family` and
docs/adding_a_model.md. All that the families of this package are made of is exported here for those from outside.

From training to a checkpoint that `load`, transformers and other engines read. The flat tuple of weights is a
pytree, so optax can train it as it is; who prefers a Flax module takes one and gives it back:

    model = build(ModelConfig.from_dict(config_json), dtype="float32")
    module = model.module(model.init(seed=0))
    ...                                                 # nnx.value_and_grad, nnx.Optimizer
    save_pretrained(model, model.flatten(module), "my-model", dtype="bfloat16")
"""

from jpaged.host.hub import resolve
from jpaged.models import families as _families  # registers those of this package
from jpaged.models.alibi import alibi_slopes
from jpaged.models.altup import AltUp, AltUpStreams
from jpaged.models.blocks import (
    Block,
    Decoder,
    DecoderConfig,
    ParallelBlock,
    Places,
    Scales,
    SequentialBlock,
    decoder_fields,
)
from jpaged.models.collectives import Collectives
from jpaged.models.config import KVHeads, ModelConfig, inner_columns
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.delta_net import GatedDeltaNet, delta_net_pieces, separate_delta_net_pieces
from jpaged.models.dense import dense_causal_attend
from jpaged.models.experts import ClampedSwiGLU, Routing, SparseConfig, SparseMLP, feed_forward, sigmoid_routing
from jpaged.models.family import (
    OTHER_PARTS,
    SIGHT_AND_SOUND,
    TEXT_PART_NAMES,
    Attend,
    CausalLM,
    Family,
    unread_keys_and_values,
)
from jpaged.models.latent import LatentAttention, LatentConfig
from jpaged.models.layer_inputs import LayerInput, LayerInputs, layer_input_pieces, layer_inputs_pieces
from jpaged.models.layers import MLP, Attention, GatedMLP, TopGatesMLP, run_layers
from jpaged.models.linear import Embedding, Linear, PartialSum, Rows, times
from jpaged.models.loading import pieces
from jpaged.models.loading.checkpoint import load, save_pretrained
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.loading.quantize import quantize_checkpoint
from jpaged.models.mamba import Mamba2, mamba_pieces
from jpaged.models.mamba_config import PLAIN_MAMBA, MambaOptions, read_mamba, read_mamba_layers
from jpaged.models.model import Model, Weights, build, resolve_dtype
from jpaged.models.norms import (
    HeadNorms,
    LayerNorm,
    LayerNormOfHeads,
    Norm,
    OnePlusLayerNorm,
    OnePlusRMSNorm,
    RMSNorm,
    RMSNormOfAllHeads,
    UnscaledLayerNorm,
    UnscaledRMSNorm,
    WideRMSNorm,
)
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.models.recurrence import Recurrence, RecurrentLayer
from jpaged.models.registry import About, described_architectures, register, supported_architectures
from jpaged.models.residual import PLAIN_XLA, Kernels, Stream, begin_stream
from jpaged.models.rope import Rope, parse_rope, window_rope, without_image_sections, yarn_temperature
from jpaged.models.sparse_llama_family import SparseLlamaConfig, SparseLlamaFamily, sparse_fields
from jpaged.models.states import ConvolutionState, DeltaState, LayerState, MambaState, NoState
from jpaged.models.temperature import Temperature

del _families

__all__ = [
    "MLP",
    "OTHER_PARTS",
    "PLAIN_MAMBA",
    "PLAIN_XLA",
    "SIGHT_AND_SOUND",
    "TEXT_PART_NAMES",
    "About",
    "AltUp",
    "AltUpStreams",
    "Attend",
    "Attention",
    "Block",
    "CausalLM",
    "ClampedSwiGLU",
    "Collectives",
    "ConfigReader",
    "Constant",
    "ConvolutionState",
    "Decoder",
    "DecoderConfig",
    "DeltaState",
    "Embedding",
    "Family",
    "GatedDeltaNet",
    "GatedMLP",
    "HeadNorms",
    "KVHeads",
    "Kernels",
    "LatentAttention",
    "LatentConfig",
    "LayerInput",
    "LayerInputs",
    "LayerNorm",
    "LayerNormOfHeads",
    "LayerState",
    "Linear",
    "Mamba2",
    "MambaOptions",
    "MambaState",
    "Model",
    "ModelConfig",
    "NoState",
    "Norm",
    "Normal",
    "OnePlusLayerNorm",
    "OnePlusRMSNorm",
    "ParallelBlock",
    "PartialSum",
    "Piece",
    "Places",
    "RMSNorm",
    "RMSNormOfAllHeads",
    "Recurrence",
    "RecurrentLayer",
    "Rope",
    "Routing",
    "Rows",
    "Scales",
    "SequentialBlock",
    "SparseConfig",
    "SparseLlamaConfig",
    "SparseLlamaFamily",
    "SparseMLP",
    "Stream",
    "Temperature",
    "TiedTensor",
    "TopGatesMLP",
    "UnscaledLayerNorm",
    "UnscaledRMSNorm",
    "Weights",
    "WideRMSNorm",
    "alibi_slopes",
    "begin_stream",
    "build",
    "decoder_fields",
    "delta_net_pieces",
    "dense_causal_attend",
    "described_architectures",
    "divide_into_heads",
    "feed_forward",
    "inner_columns",
    "layer_input_pieces",
    "layer_inputs_pieces",
    "load",
    "mamba_pieces",
    "parameter",
    "parse_rope",
    "pieces",
    "quantize_checkpoint",
    "read_mamba",
    "read_mamba_layers",
    "register",
    "resolve",
    "resolve_dtype",
    "run_layers",
    "save_pretrained",
    "separate_delta_net_pieces",
    "sigmoid_routing",
    "sparse_fields",
    "supported_architectures",
    "times",
    "unread_keys_and_values",
    "window_rope",
    "without_image_sections",
    "yarn_temperature",
]
