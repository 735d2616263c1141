"""Command R (Cohere 2024) and Command A, R7B (2025, arXiv:2504.00698): attention and MLP side by side behind one layer
norm without bias, RoPE in neighbouring pairs, scaled logits. The newer ones have windows in three layers of four, and
RoPE in those alone.

North Mini Code and Command A+ (2026) are Command A with experts, of which some may be shared. The first layers may have
MLPs, and RoPE without a window. Norms may be RMS norms.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, ParallelBlock, Scales, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, feed_forward
from jpaged.models.layers import Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm, LayerNormOfHeads, RMSNorm

_IMPLEMENTED = (
    ("use_parallel_block", True),
    ("use_gated_activation", True),
    ("use_qk_norm", False),
    ("rotary_pct", 1.0),
    ("position_embedding_type", "rope_gptj"),
)
"""Entries that transformers does not read where there are experts, and the values whose layers it computes."""


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig, SparseConfig):
    """logit_scale: multiplies logits. bias: the products of attention have biases. qk_norm: each head of queries and
    keys has a layer norm. rms_norm: the other norms are RMS norms, not layer norms. experts_scale: multiplies what
    experts give, shared ones included.
    """

    logit_scale: float
    bias: bool
    qk_norm: bool
    rms_norm: bool
    experts_scale: float = 1.0


@dataclass(frozen=True)
class CohereFamily:
    """One of the architectures. has_windows: Command A, R7B and those with experts. has_experts: North Mini Code and
    Command A+."""

    model_type: str
    has_windows: bool
    has_experts: bool = False

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> CohereConfig:
        rms_norm = self.has_experts and read.config.get("rms_norm_eps") is not None
        fields = decoder_fields(
            read,
            default_length=8192,
            head_dim=128 if self.has_experts else None,
            eps="rms_norm_eps" if rms_norm else "layer_norm_eps",
            default_eps=1e-5,
            tied=True,
            rope={"interleaved": True, "theta": 10000.0 if self.has_windows else 500000.0},
        )
        num_layers = fields["num_layers"]
        without = {"routing": Routing(per_token=1), "expert_size": 0, "dense_layers": (True,) * num_layers}
        fields |= _experts(read, num_layers) if self.has_experts else without
        if self.has_windows:
            kinds = (
                _kinds_of_layers(read, num_layers) if self.has_experts else read.kinds_of_layers(num_layers, every=4)
            )
            rotates_mlps = self.has_experts and read.integer("prefix_dense_sliding_window_pattern", 1) == 1
            both = zip(kinds, fields["dense_layers"], strict=True)
            rotated = (kind == "sliding_attention" or (rotates_mlps and is_dense) for kind, is_dense in both)
            fields |= {
                "layer_ropes": tuple(0 if is_rotated else None for is_rotated in rotated),
                "layer_windows": read.layer_windows(kinds, 4096),
            }
        return CohereConfig(
            **fields,
            logit_scale=read.number("logit_scale", 0.0625),
            bias=read.flag("attention_bias", False),
            qk_norm=not self.has_windows and read.flag("use_qk_norm", False),
            rms_norm=rms_norm,
        )

    def module(self, config: CohereConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        kind = RMSNorm if config.rms_norm else partial(LayerNorm, bias=False)
        norm = partial(kind, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> ParallelBlock:
            return ParallelBlock(
                Attention(config, layer, dtype, rngs, qkv_bias=config.bias, output_bias=config.bias),
                feed_forward(config, layer, dtype, rngs, collectives),
                attention_norm=norm(),
                head_norms=LayerNormOfHeads(config, config.norm_eps, dtype, rngs) if config.qk_norm else None,
                rope=config.layer_ropes[layer],
                mlp_scale=1.0 if config.dense_layers[layer] else config.experts_scale,
            )

        scales = Scales(logits=config.logit_scale)
        return Decoder(config, block, norm, dtype, rngs, collectives, scales=scales)

    def tensors(self, config: CohereConfig) -> Iterator[Piece | TiedTensor]:
        hidden, bias, order = config.hidden_size, config.bias, config.columns
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{theirs}.self_attn"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=bias, order=order)
            if config.qk_norm:
                norms = f"{attention}.q_norm", f"{attention}.k_norm"
                yield from pieces.head_norms(norms, f"{ours}.head_norms", config, order=order)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=bias)
            if config.dense_layers[i]:
                yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            else:
                yield from pieces.sparse_mlp(f"{theirs}.mlp", f"{ours}.mlp", config)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _experts(read: ConfigReader, num_layers: int) -> dict[str, Any]:
    """The fields of a `SparseConfig`. A softmax is over a token's own experts, a sigmoid's weights are as they are or
    divided by their sum."""
    read.refuse(*_IMPLEMENTED)
    if read.config.get("rope_scaling"):  # which transformers passes over
        raise UnsupportedModelError(
            f"config.json: rope_scaling is not supported for {read.architecture}; say it as rope_parameters."
        )
    score: Any = _one_of(read, "expert_selection_fn", "softmax", "sigmoid")
    renormalized = read.flag("norm_topk_prob", True) or score == "softmax"
    num_experts, inner = read.integer("num_experts", 8), read.integer("intermediate_size")
    routing = Routing(per_token=read.integer("num_experts_per_tok", 2), score=score, renormalized=renormalized)
    routing.check(num_experts)
    shared, first = read.count("num_shared_experts", 0), read.count("first_k_dense_replace", 0)
    is_mean = _one_of(read, "shared_expert_combination_strategy", "average", "sum") == "average"
    return {
        "num_experts": num_experts,
        "routing": routing,
        "intermediate_size": read.integer("prefix_dense_intermediate_size", inner),
        "expert_size": inner,
        "shared_size": inner * shared,
        "dense_layers": read.dense_layers(num_layers) or tuple(layer < first for layer in range(num_layers)),
        "experts_scale": 0.5 if shared and is_mean else 1.0,
    }


def _kinds_of_layers(read: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """`ConfigReader.kinds_of_layers`; where they are not said, the first layers, which have MLPs in place of experts,
    are counted by themselves."""
    if (said := read.layer_kinds(num_layers)) is not None:
        return said
    first = min(read.count("first_k_dense_replace", 0), num_layers)
    every = read.integer("prefix_dense_sliding_window_pattern", 1)
    of_first = read.with_entries(sliding_window_pattern=every).kinds_of_layers(first, every)
    return of_first + read.kinds_of_layers(num_layers - first, every=4)


def _one_of(read: ConfigReader, name: str, *supported: str) -> str:
    """One of some words; the first of them where config.json has none.

    Raises:
        UnsupportedModelError: it is another one.
    """
    value = read.config.get(name)
    if value is not None and value not in supported:
        raise UnsupportedModelError(
            f"config.json: {name}={shown(value)} is not supported; supported: {', '.join(supported)}."
        )
    return value or supported[0]


COHERE = CohereFamily("cohere", False)
COHERE2 = CohereFamily("cohere2", True)
COHERE2_MOE = CohereFamily("cohere2_moe", True, has_experts=True)
