"""LFM2 (Liquid AI 2025, arXiv:2511.23404): gated short convolutions with attention layers among them.

Lfm2ForCausalLM       an MLP in each layer
Lfm2MoeForCausalLM    experts in each layer but the first ones, chosen by a sigmoid with a bias
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, feed_forward, sigmoid_routing
from jpaged.models.layers import Attention
from jpaged.models.linear import Linear, PartialSum
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.models.recurrence import Recurrence, RecurrentLayer
from jpaged.models.states import ConvolutionState

_NAMES = pieces.ExpertNames(block="feed_forward", gate="w1", up="w3", down="w2", correction="expert_bias")


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(DecoderConfig, SparseConfig):
    """convolution_bias: convolutions and the products around them have biases."""

    convolution_bias: bool


class ShortConvolution(RecurrentLayer):
    """A gated short convolution, without the norm before it: c * convolution(b * x), between two products.

        bcx   [hidden, 3, channels]     b, then c, then x
        taps  [width, channels]         the last tap meets the token itself

    Channels are split over devices. num_layers: of the model, for the scale of random weights.
    """

    def __init__(
        self, state: ConvolutionState, hidden: int, num_layers: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, bias: bool
    ) -> None:
        channels = state.channels
        self.bcx = Linear((hidden,), (3, channels), hidden**-0.5, dtype, rngs, shard_axis=2, bias=bias)
        self.taps = parameter(rngs, Normal(state.width**-0.5), (state.width, channels), dtype, 1)
        self.taps_bias = parameter(rngs, Constant(0.0), (channels,), dtype, 0) if bias else None
        std = (hidden * 2 * num_layers) ** -0.5
        self.out = Linear((channels,), (hidden,), std, dtype, rngs, shard_axis=0, bias=bias)

    def mix(self, x: jax.Array, recurrence: Recurrence, backend: str | None) -> PartialSum:
        bcx = self.bcx(x, backend=backend)
        bias = None if self.taps_bias is None else self.taps_bias[...]
        mixed = recurrence.convolve(bcx[:, 0] * bcx[:, 2], self.taps[...], bias, activation=None)
        return self.out.partial_sum(bcx[:, 1] * mixed, backend)


@dataclass(frozen=True)
class Lfm2Family:
    """One of the architectures. has_experts: in the layers behind the first ones."""

    model_type: str
    has_experts: bool

    base_prefix = "model."
    derived_tensors = r"(rotary|pos)_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> Lfm2Config:
        read = read.with_entries(hidden_act="silu")
        inner = 7168 if self.has_experts else 12288
        read = read.with_defaults(num_key_value_heads=8, tie_word_embeddings=True, intermediate_size=inner)
        if read.config.get("tie_embedding") is not None:
            read = read.with_entries(tie_word_embeddings=read.flag("tie_embedding", True))
        sparse: dict[str, Any] = {"num_experts": 0, "routing": Routing(per_token=1), "expert_size": 0}
        if self.has_experts:
            experts, biased = read.integer("num_experts", 32), read.flag("use_expert_bias", True)
            plain = sigmoid_routing(read.with_entries(n_group=1, topk_group=1), per_token=4, renormalized=True)
            routing = replace(plain, biased=biased, added_to_sum=1e-6)
            routing.check(experts)
            size = read.integer("moe_intermediate_size", 1792)
            sparse = {"num_experts": experts, "routing": routing, "expert_size": size}
        else:
            read = read.with_entries(intermediate_size=_inner_size(read))
        rope = {"theta": 1e6}
        fields = decoder_fields(read, default_length=128000, eps="norm_eps", default_eps=1e-5, rope=rope)
        layers = fields["num_layers"]
        state = ConvolutionState(fields["hidden_size"], read.integer("conv_L_cache", 3))
        if state.width < 2:
            raise UnsupportedModelError(f"config.json: conv_L_cache={state.width} is not supported, only 2 and more.")
        num_dense = read.number("num_dense_layers", 2) if self.has_experts else layers
        return Lfm2Config(
            **fields | sparse,
            layer_states=tuple(state if kind == "conv" else None for kind in _layer_kinds(read, layers)),
            dense_layers=tuple(layer < num_dense for layer in range(layers)),
            convolution_bias=read.flag("conv_bias", False),
        )

    def module(self, config: Lfm2Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        hidden, layers = config.hidden_size, config.num_layers
        norm = partial(RMSNorm, hidden, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            state, mlp = config.layer_states[layer], feed_forward(config, layer, dtype, rngs, collectives)
            if isinstance(state, ConvolutionState):
                mixer = ShortConvolution(state, hidden, layers, dtype, rngs, bias=config.convolution_bias)
                return SequentialBlock(mixer, mlp, attention_norm=norm(), mlp_norm=norm(), rope=None)
            of_heads = partial(RMSNorm, config.head_dim, config.norm_eps, dtype, rngs)
            return SequentialBlock(
                Attention(config, layer, dtype, rngs),
                mlp,
                attention_norm=norm(),
                mlp_norm=norm(),
                query_norm=of_heads(),
                key_norm=of_heads(),
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: Lfm2Config) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            yield pieces.norm(f"{theirs}.operator_norm", f"{ours}.attention_norm", hidden)
            state = config.layer_states[i]
            if isinstance(state, ConvolutionState):
                yield from _convolution(f"{theirs}.conv", f"{ours}.attention", state, config)
            else:
                yield from pieces.separate_qkv(f"{theirs}.self_attn", f"{ours}.attention", config, bias=False)
                out = f"{theirs}.self_attn.out_proj"
                yield from pieces.output_projection(out, f"{ours}.attention", config, bias=False)
                yield pieces.norm(f"{theirs}.self_attn.q_layernorm", f"{ours}.query_norm", config.head_dim)
                yield pieces.norm(f"{theirs}.self_attn.k_layernorm", f"{ours}.key_norm", config.head_dim)
            yield pieces.norm(f"{theirs}.ffn_norm", f"{ours}.mlp_norm", hidden)
            if config.dense_layers[i]:
                inner = config.intermediate_size
                yield from pieces.gated_mlp(f"{theirs}.feed_forward", f"{ours}.mlp", hidden, inner, _NAMES)
            else:
                yield from pieces.sparse_mlp(f"{theirs}.feed_forward", f"{ours}.mlp", config, _NAMES)
        yield pieces.norm("model.embedding_norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _convolution(theirs: str, ours: str, state: ConvolutionState, config: Lfm2Config) -> Iterator[Piece]:
    hidden, bias = config.hidden_size, config.convolution_bias
    split = (3, hidden, hidden)
    yield Piece(f"{theirs}.in_proj.weight", (3 * hidden, hidden), f"{ours}.bcx", split, (2, 0, 1))
    shape = (hidden, 1, state.width)
    yield Piece(f"{theirs}.conv.weight", shape, f"{ours}.taps", (hidden, state.width), (1, 0))
    if bias:
        yield Piece(f"{theirs}.in_proj.bias", (3 * hidden,), f"{ours}.bcx_bias", split[:2], (0, 1))
        yield pieces.as_is(f"{theirs}.conv.bias", f"{ours}.taps_bias", hidden)
    yield from pieces.linear(f"{theirs}.out_proj", f"{ours}.out", hidden, hidden, bias=bias)


def _inner_size(read: ConfigReader) -> int:
    """The inner width of an MLP: what config.json says; or, with block_auto_adjust_ff_dim, two thirds of that, times
    block_ffn_dim_multiplier and rounded up to block_multiple_of.
    """
    inner = read.integer("block_ff_dim", read.integer("intermediate_size"))
    if not read.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner, factor = int(2 * inner / 3), read.optional_number("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return inner
    unit = read.integer("block_multiple_of", 256)
    return unit * -(-int(factor * inner) // unit)


def _layer_kinds(read: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer, "conv" or a name of attention: from layer_types, or else from full_attn_idxs."""
    kinds = read.layer_kinds(num_layers, ("full_attention", "attention", "conv"))
    if kinds is None:
        attention = read.config.get("full_attn_idxs")
        attention = range(num_layers) if attention is None else attention
        if not isinstance(attention, list | tuple | range) or not all(type(layer) is int for layer in attention):
            raise CheckpointError(f"config.json: full_attn_idxs must list layers by number, got {shown(attention)}.")
        kinds = tuple("full_attention" if layer in attention else "conv" for layer in range(num_layers))
    if all(kind == "conv" for kind in kinds):
        raise UnsupportedModelError(
            "config.json: layer_types of conv layers alone are not supported, only with attention among them."
        )
    return kinds


LFM2 = Lfm2Family("lfm2", has_experts=False)
LFM2_MOE = Lfm2Family("lfm2_moe", has_experts=True)
