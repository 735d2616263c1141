"""Apertus (Swiss AI 2025, arXiv:2509.14233): Llama's layers with norms of queries and keys, and MLPs without gates
whose activation, xIELU (Huang 2024, arXiv:2411.13010), has two learned numbers in each layer.

    x > 0    a x^2 + x / 2
    else     b (exp(x) - 1 - x) + x / 2         a = softplus(alpha_p), b = 1/2 + softplus(alpha_n)
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import MLP, Attention
from jpaged.models.linear import PartialSum, Rows
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm
from jpaged.models.parameters import Constant, parameter

_THETA = 12e6
_ROPE = {"rope_type": "llama3", "rope_theta": _THETA, "factor": 8.0, "original_max_position_embeddings": 8192}
_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Where config.json has none, as in transformers."""
_BETA, _EPS = 0.5, -1e-6


class XieluMLP(MLP):
    """Two products with xIELU in between."""

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, config.activation, dtype, rngs)
        self.alpha_p = parameter(rngs, Constant(0.2), (1,), dtype)
        self.alpha_n = parameter(rngs, Constant(-1.0), (1,), dtype)

    def __call__(self, x: Rows, backend: str | None = "xla") -> PartialSum:
        up = self.up(x, backend=backend)
        wide = up.astype(jnp.float32)
        a = jax.nn.softplus(self.alpha_p[...].astype(jnp.float32))
        b = _BETA + jax.nn.softplus(self.alpha_n[...].astype(jnp.float32))
        negative = b * (jnp.expm1(jnp.minimum(wide, _EPS)) - wide)
        inner = jnp.where(wide > 0, a * wide * wide, negative) + _BETA * wide
        return self.down.partial_sum(inner.astype(up.dtype), backend)


class ApertusFamily:
    """All sizes."""

    model_type = "apertus"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$|\.act_fn\.(beta|eps)$"

    def read_config(self, read: ConfigReader) -> DecoderConfig:
        read.refuse(("hidden_act", "xielu"), ("attention_bias", False), ("mlp_bias", False))
        read.refuse(("qk_norm", True), ("post_norm", False))
        if not (read.config.get("rope_scaling") or read.config.get("rope_parameters")):
            read = read.with_entries(rope_scaling=_ROPE)
        known = read.with_entries(hidden_act="relu")  # which other families' MLPs have
        sizes: dict[str, Any] = {"default_length": 65536, "default_eps": 1e-5, "rope": {"theta": _THETA}}
        return DecoderConfig(**decoder_fields(known, **sizes) | {"activation": "xielu"})

    def module(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)
        of_heads = partial(RMSNorm, config.head_dim, config.norm_eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(config, layer, dtype, rngs),
                XieluMLP(config, dtype, rngs),
                attention_norm=norm(),
                mlp_norm=norm(),
                query_norm=of_heads(),
                key_norm=of_heads(),
            )

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: DecoderConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield pieces.norm(f"{theirs}.attention_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=False, order=config.columns)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=False)
            yield pieces.norm(f"{theirs}.self_attn.q_norm", f"{ours}.query_norm", config.head_dim)
            yield pieces.norm(f"{theirs}.self_attn.k_norm", f"{ours}.key_norm", config.head_dim)
            yield pieces.norm(f"{theirs}.feedforward_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.linear(f"{theirs}.mlp.up_proj", f"{mlp}.up", hidden, inner, bias=False)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{mlp}.down", inner, hidden, bias=False)
            yield pieces.as_is(f"{theirs}.mlp.act_fn.alpha_p", f"{mlp}.alpha_p", 1)
            yield pieces.as_is(f"{theirs}.mlp.act_fn.alpha_n", f"{mlp}.alpha_n", 1)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
