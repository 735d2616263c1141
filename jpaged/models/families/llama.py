"""The Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3.

They differ in what `ModelConfig` says (biases, windows, RoPE, norms of queries and keys), not in structure.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import ALONE, Collectives, Exchange, embedding_part
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Attend, Attention, GatedMLP, Normal, RMSNorm, logits_of, parameter, run_layers
from jpaged.models.loading import parts
from jpaged.models.loading.parts import Part
from jpaged.models.residual import Stream, begin


class LlamaBlock(nnx.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        eps = config.norm_eps
        self.attention_norm = RMSNorm(config.hidden_size, eps, dtype, rngs)
        self.attention = Attention(config, layer, dtype, rngs)
        self.query_norm = RMSNorm(config.head_dim, eps, dtype, rngs) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, eps, dtype, rngs) if config.qk_norm else None
        self.mlp_norm = RMSNorm(config.hidden_size, eps, dtype, rngs)
        self.mlp = GatedMLP(config, dtype, rngs)

    def __call__(self, stream: Stream, cos: jax.Array, sin: jax.Array, attend: Attend) -> None:
        norms = None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)
        stream.add(*self.attention(stream.normed(self.attention_norm), attend, (cos, sin), norms))
        stream.add(*self.mlp(stream.normed(self.mlp_norm)))


class LlamaForCausalLM(nnx.Module):
    """config: of the family "llama". dtype: of the weights and of the residual stream.

    collectives: of the shards the model is split into; config is then one shard's (`sharding.shard_config`).
    """

    base_prefix = "model."

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives = ALONE) -> None:
        if config.rope is None:
            raise ValueError(f"{config.architecture} needs RoPE parameters.")
        table, std = (config.vocab_size, config.hidden_size), config.hidden_size**-0.5
        self.rope = config.rope
        self.collectives = collectives
        self.embedding = parameter(rngs, Normal(std), table, dtype, shard_axis=0)
        self.layers = nnx.List(LlamaBlock(config, layer, dtype, rngs) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, rngs)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else parameter(rngs, Normal(std), table, dtype, shard_axis=0)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | list[Any],
        exchange: Exchange | None = None,
    ) -> jax.Array:
        """int32 tokens [T] and their positions [T] -> hidden states [T, hidden], after the final norm."""
        cos, sin = self.rope.table(positions)
        part = embedding_part(self.embedding[...], tokens, self.collectives)
        stream = begin(part, self.collectives, exchange)
        run_layers(self.layers, stream, (cos, sin), attend)
        return stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return logits_of(hidden, head[...])

    @staticmethod
    def parts(config: ModelConfig) -> Iterator[Part]:
        """Every tensor of the checkpoint, in order."""
        hidden, inner = config.hidden_size, config.intermediate_size
        yield parts.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            yield parts.as_is(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.scale", hidden)
            yield from parts.separate_qkv(f"{theirs}.self_attn", f"{ours}.attention", config)
            yield from parts.output_projection(f"{theirs}.self_attn.o_proj", f"{ours}.attention", config)
            if config.qk_norm:
                yield parts.as_is(f"{theirs}.self_attn.q_norm.weight", f"{ours}.query_norm.scale", config.head_dim)
                yield parts.as_is(f"{theirs}.self_attn.k_norm.weight", f"{ours}.key_norm.scale", config.head_dim)
            yield parts.as_is(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.scale", hidden)
            for slot, name in enumerate(("gate_proj", "up_proj")):
                weight, fused = f"{theirs}.mlp.{name}.weight", f"{ours}.mlp.gate_up"
                yield Part(weight, (inner, hidden), fused, (1, inner, hidden), (2, 0, 1), (0, slot, 0))
                if config.mlp_bias:
                    bias = f"{theirs}.mlp.{name}.bias"
                    yield Part(bias, (inner,), f"{fused}_bias", (1, inner), (0, 1), (slot, 0))
            yield parts.transposed(f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.down", inner, hidden)
            if config.mlp_bias:
                yield parts.as_is(f"{theirs}.mlp.down_proj.bias", f"{ours}.mlp.down_bias", hidden)
        yield parts.as_is("model.norm.weight", "norm.scale", hidden)
        if not config.tie_word_embeddings:
            yield parts.as_is("lm_head.weight", "lm_head", config.vocab_size, hidden)
