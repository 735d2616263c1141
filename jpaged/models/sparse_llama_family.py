"""What families of Llama's layers with experts share: a configuration, its entries, a module and a map of checkpoints.

A family says how its config.json is read, and what its checkpoints call things; it may override `attention` and
`sparse_mlp`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, feed_forward
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm, RMSNormOfAllHeads, WideRMSNorm


@dataclass(frozen=True, kw_only=True)
class SparseLlamaConfig(DecoderConfig, SparseConfig):
    """qk_norm: queries and keys are RMS-normalised head by head before the rotation.
    norms_of_all: all queries of a token are RMS-normalised together, and all keys.
    qkv_bias, output_bias: which products of attention have biases.
    norms_after: norms are of what attention and experts give, not of what they read.
    fused_experts: the axes of the tensor that has gate and up of all experts of a layer, of which the gate's come first
        (Qwen3-VL): "inputs, outputs" behind the experts, as published, or "outputs, inputs", as transformers saves new
        models. None: checkpoints have tensors for each expert.
    """

    qk_norm: bool = False
    norms_of_all: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    norms_after: bool = False
    fused_experts: Literal["inputs, outputs", "outputs, inputs"] | None = None


@dataclass(frozen=True)
class SparseLlamaFamily:
    """One of the architectures. reads: its configuration. names, derived_tensors: of its checkpoints' tensors.
    looks_ahead: checkpoints have one layer more, which predicts a token further.
    """

    model_type: str
    reads: Callable[[ConfigReader], SparseLlamaConfig]
    names: pieces.ExpertNames = pieces.USUAL_NAMES
    looks_ahead: bool = False
    derived_tensors: str = r"rotary_emb\.inv_freq$"

    base_prefix = "model."
    attention = Attention
    norm_names = "q_norm", "k_norm"

    def passed_over(self, config: SparseLlamaConfig) -> str:
        return rf"^model\.layers\.{config.num_layers}\." if self.looks_ahead else ""

    def read_config(self, read: ConfigReader) -> SparseLlamaConfig:
        return self.reads(read)

    def module(self, config: SparseLlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        kind = WideRMSNorm if config.norms_after else RMSNorm
        norm = partial(kind, config.hidden_size, config.norm_eps, dtype, rngs)
        after = config.norms_after
        of_heads = partial(RMSNorm, config.head_dim, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                self.attention(
                    config,
                    layer,
                    dtype,
                    rngs,
                    qkv_bias=config.qkv_bias,
                    output_bias=config.output_bias,
                    collectives=collectives,
                ),
                feed_forward(config, layer, dtype, rngs, collectives),
                query_norm=of_heads() if config.qk_norm else None,
                key_norm=of_heads() if config.qk_norm else None,
                head_norms=RMSNormOfAllHeads(config, config.norm_eps, dtype, rngs) if config.norms_of_all else None,
                rope=config.layer_ropes[layer],
                attention_norm=None if after else norm(),
                mlp_norm=None if after else norm(),
                after_attention=norm() if after else None,
                after_mlp=norm() if after else None,
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: SparseLlamaConfig) -> Iterator[Piece | TiedTensor]:
        hidden, order = config.hidden_size, config.columns
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            if not config.norms_after:
                yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            attention = f"{theirs}.self_attn"
            biases = {"qkv": config.qkv_bias, "out": config.output_bias}
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=biases["qkv"], order=order)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=biases["out"])
            for norm, name in zip(("query", "key"), self.norm_names, strict=True) if config.qk_norm else ():
                scale = pieces.norm(f"{attention}.{name}", f"{ours}.{norm}_norm", config.head_dim)
                yield replace(scale, order=order)
            if config.norms_of_all:
                norms = f"{attention}.q_norm", f"{attention}.k_norm"
                yield from pieces.head_norms(norms, f"{ours}.head_norms", config, flat=True, order=order)
            behind = "after_attention" if config.norms_after else "mlp_norm"
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.{behind}", hidden)
            if config.dense_layers[i]:
                yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            else:
                yield from self.sparse_mlp(f"{theirs}.{self.names.block}", f"{ours}.mlp", config)
            if config.norms_after:
                yield pieces.norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.after_mlp", hidden)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)

    def sparse_mlp(self, theirs: str, ours: str, config: SparseLlamaConfig) -> Iterator[Piece]:
        """The tensors of a layer's router and experts."""
        yield from pieces.sparse_mlp(theirs, ours, config, self.names)


def sparse_fields(
    read: ConfigReader,
    *,
    num_experts: int,
    routing: Routing,
    default_length: int,
    default_theta: float = 10000.0,
    default_eps: float = 1e-6,
    rotated_fraction: float | None = None,
    interleaved: bool = False,
    layers: str | None = None,
) -> dict[str, Any]:
    """What the families spell alike of a `SparseLlamaConfig`.

    default_length: as of `decoder_fields`. default_theta, rotated_fraction, interleaved, layers: `theta` and those of
        `parse_rope`.

    Raises:
        CheckpointError: a token is to have more experts than there are, or groups are not equal ones.
    """
    routing.check(num_experts)
    rope: dict[str, Any] = {"theta": default_theta, "rotated_fraction": rotated_fraction, "interleaved": interleaved}
    rope |= {"layers": layers}
    head_dim = read.integer("hidden_size") // read.integer("num_attention_heads")
    sizes: dict[str, Any] = {"default_length": default_length, "head_dim": head_dim, "default_eps": default_eps}
    fields = decoder_fields(read, **sizes, rope=rope)
    return fields | {"num_experts": num_experts, "routing": routing}
