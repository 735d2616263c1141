"""OPT (Zhang et al. 2022), all sizes: learned positions, layer norms, and for 350m a projected embedding and
norms after the residual sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import UnsupportedModelError
from jpaged.models.collectives import Collectives
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.family import Attend
from jpaged.models.layers import MLP, Attention, run_layers
from jpaged.models.linear import Embedding, Linear
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm
from jpaged.models.parameters import Normal, parameter
from jpaged.models.residual import PLAIN_XLA, Kernels, Stream, begin_stream

_NORM_EPS = 1e-5
_POSITION_OFFSET = 2
"""The row of position 0 in the table of learned positions."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """activation: of the MLPs.
    embedding_size: width of the token embedding; projected where it differs from hidden_size (350m).
    pre_norm: norms stand before attention and MLP; False puts them after the residual sums (350m).
    final_norm: a norm follows the last layer.
    bias: all products of the layers have biases, or none has.
    """

    activation: str
    embedding_size: int
    pre_norm: bool
    final_norm: bool
    bias: bool


class OPTBlock(nnx.Module):
    """One layer."""

    def __init__(self, config: OPTConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, bias = config.hidden_size, config.bias
        self.pre_norm = config.pre_norm
        self.attention_norm = LayerNorm(hidden, _NORM_EPS, dtype, rngs)
        self.attention = Attention(config, layer, dtype, rngs, qkv_bias=bias, output_bias=bias)
        self.mlp_norm = LayerNorm(hidden, _NORM_EPS, dtype, rngs)
        self.mlp = MLP(config, config.activation, dtype, rngs, bias=bias)

    def __call__(self, stream: Stream, attend: Attend) -> None:
        if self.pre_norm:
            stream.add(self.attention(stream.normed(self.attention_norm), attend, backend=stream.backend))
            stream.add(self.mlp(stream.normed(self.mlp_norm), stream.backend))
            return
        stream.add(self.attention(stream.value(), attend, backend=stream.backend))
        stream.replace(stream.normed(self.attention_norm))
        stream.add(self.mlp(stream.value(), stream.backend))
        stream.replace(stream.normed(self.mlp_norm))


class OPTForCausalLM(nnx.Module):
    """The arguments are those of `Family.module`."""

    def __init__(self, config: OPTConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
        vocab, hidden, width = config.vocab_size, config.hidden_size, config.embedding_size
        std = width**-0.5
        num_positions = config.max_position_embeddings + _POSITION_OFFSET
        self.collectives = collectives
        self.embedding = Embedding(vocab, width, std, dtype, rngs)
        self.positions = parameter(rngs, Normal(std), (num_positions, hidden), dtype)
        projected = width != hidden
        self.project_in = Linear((width,), (hidden,), width**-0.5, dtype, rngs) if projected else None
        self.project_out = Linear((hidden,), (width,), hidden**-0.5, dtype, rngs) if projected else None
        self.layers = nnx.List(OPTBlock(config, layer, dtype, rngs) for layer in range(config.num_layers))
        self.norm = LayerNorm(hidden, _NORM_EPS, dtype, rngs) if config.final_norm else None
        self.lm_head = None if config.tie_word_embeddings else Embedding(vocab, width, std, dtype, rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | list[Any], kernels: Kernels = PLAIN_XLA
    ) -> jax.Array:
        rows = self.embedding.lookup(tokens, self.collectives)
        if self.project_in is not None:  # linear, so that the products of the shards' terms add up as well
            rows = self.project_in(rows)
        learned = self.positions[...][positions + _POSITION_OFFSET]
        stream = begin_stream(rows, self.collectives, kernels, learned)
        run_layers(self.layers, stream, (), attend)
        return stream.value() if self.norm is None else stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return (self.embedding if self.lm_head is None else self.lm_head).logits(hidden)


class OPTFamily:
    """All sizes."""

    model_type = "opt"
    base_prefix = "model."
    derived_tensors = ""

    def read_config(self, read: ConfigReader) -> OPTConfig:
        hidden_size = read.integer("hidden_size")
        num_heads = read.integer("num_attention_heads")
        length = read.integer("max_position_embeddings", 2048)
        bias = read.flag("enable_bias", True)
        pre_norm = read.flag("do_layer_norm_before", True)
        if not read.flag("layer_norm_elementwise_affine", True):
            raise UnsupportedModelError("config.json: layer_norm_elementwise_affine=false is not supported.")
        return OPTConfig(
            **read.common(),
            hidden_size=hidden_size,
            num_layers=read.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=divide_into_heads(hidden_size, num_heads),
            intermediate_size=read.integer("ffn_dim"),
            max_position_embeddings=length,
            tie_word_embeddings=read.flag("tie_word_embeddings", True),
            activation=read.activation("activation_function", "relu"),
            embedding_size=read.integer("word_embed_proj_dim", hidden_size),
            pre_norm=pre_norm,
            final_norm=pre_norm and not read.flag("_remove_final_layer_norm", False),
            bias=bias,
        )

    def module(self, config: OPTConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> OPTForCausalLM:
        return OPTForCausalLM(config, dtype, rngs, collectives)

    def tensors(self, config: OPTConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, width = config.hidden_size, config.intermediate_size, config.embedding_size
        decoder, bias = "model.decoder", config.bias
        num_positions = config.max_position_embeddings + _POSITION_OFFSET
        yield pieces.as_is(f"{decoder}.embed_tokens.weight", "embedding", config.vocab_size, width)
        yield pieces.as_is(f"{decoder}.embed_positions.weight", "positions", num_positions, hidden)
        if width != hidden:
            yield pieces.transposed(f"{decoder}.project_in.weight", "project_in", width, hidden)
            yield pieces.transposed(f"{decoder}.project_out.weight", "project_out", hidden, width)
        for i in range(config.num_layers):
            theirs, ours = f"{decoder}.layers.{i}", f"layers.{i}"
            yield from pieces.layer_norm(f"{theirs}.self_attn_layer_norm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", f"{ours}.attention", config, bias=bias)
            yield from pieces.output_projection(f"{theirs}.self_attn.out_proj", f"{ours}.attention", config, bias=bias)
            yield from pieces.layer_norm(f"{theirs}.final_layer_norm", f"{ours}.mlp_norm", hidden)
            yield pieces.transposed(f"{theirs}.fc1.weight", f"{ours}.mlp.up", hidden, inner)
            yield pieces.transposed(f"{theirs}.fc2.weight", f"{ours}.mlp.down", inner, hidden)
            if bias:
                yield pieces.as_is(f"{theirs}.fc1.bias", f"{ours}.mlp.up_bias", inner)
                yield pieces.as_is(f"{theirs}.fc2.bias", f"{ours}.mlp.down_bias", hidden)
        if config.final_norm:
            yield from pieces.layer_norm(f"{decoder}.final_layer_norm", "norm", hidden)
        if config.tie_word_embeddings:
            yield TiedTensor("lm_head.weight", f"{decoder}.embed_tokens.weight")
        else:
            yield pieces.as_is("lm_head.weight", "lm_head", config.vocab_size, width)
