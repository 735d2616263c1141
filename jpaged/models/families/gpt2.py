"""GPT-2 (Radford et al. 2019). Its checkpoints keep kernels as [inputs, outputs], and q, k, v in one."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import ALONE, Collectives, Exchange, embedding_part
from jpaged.models.config import ModelConfig
from jpaged.models.layers import MLP, Attend, Attention, LayerNorm, Normal, logits_of, parameter, run_layers
from jpaged.models.loading import parts
from jpaged.models.loading.parts import Part
from jpaged.models.residual import Stream, begin


class GPT2Block(nnx.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_eps, dtype, rngs)
        self.attention = Attention(config, layer, dtype, rngs)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, stream: Stream, attend: Attend) -> None:
        stream.add(*self.attention(stream.normed(self.attention_norm), attend))
        stream.add(*self.mlp(stream.normed(self.mlp_norm)))


class GPT2LMHeadModel(nnx.Module):
    """config: of the family "gpt2". dtype: of the weights and of the residual stream.

    collectives: of the shards the model is split into; config is then one shard's (`sharding.shard_config`).
    """

    base_prefix = "transformer."

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives = ALONE) -> None:
        hidden = config.hidden_size
        std = hidden**-0.5
        self.collectives = collectives
        table = (config.vocab_size, hidden)
        self.embedding = parameter(rngs, Normal(std), table, dtype, shard_axis=0)
        self.positions = parameter(rngs, Normal(std), (config.num_learned_positions, hidden), dtype)
        self.layers = nnx.List(GPT2Block(config, layer, dtype, rngs) for layer in range(config.num_layers))
        self.norm = LayerNorm(hidden, config.norm_eps, dtype, rngs)
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
        part = embedding_part(self.embedding[...], tokens, self.collectives)
        stream = begin(part, self.collectives, exchange, self.positions[...][positions])
        run_layers(self.layers, stream, (), attend)
        return stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return logits_of(hidden, head[...])

    @staticmethod
    def parts(config: ModelConfig) -> Iterator[Part]:
        """Every tensor of the checkpoint, in order."""
        hidden, inner, heads, dim = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim
        yield parts.as_is("transformer.wte.weight", "embedding", config.vocab_size, hidden)
        yield parts.as_is("transformer.wpe.weight", "positions", config.num_learned_positions, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"transformer.h.{i}", f"layers.{i}"
            yield from parts.layer_norm(f"{theirs}.ln_1", f"{ours}.attention_norm", hidden)
            attention = f"{theirs}.attn.c_attn"
            split = (3, heads, dim)
            weight_shape, qkv = (hidden, 3 * hidden), f"{ours}.attention.qkv"
            yield Part(f"{attention}.weight", weight_shape, qkv, (hidden, *split), (0, 2, 1, 3))
            yield Part(f"{attention}.bias", (3 * hidden,), f"{qkv}_bias", split, (1, 0, 2))
            out = f"{ours}.attention.out"
            yield Part(f"{theirs}.attn.c_proj.weight", (hidden, hidden), out, (heads, dim, hidden), (0, 1, 2))
            yield parts.as_is(f"{theirs}.attn.c_proj.bias", f"{out}_bias", hidden)
            yield from parts.layer_norm(f"{theirs}.ln_2", f"{ours}.mlp_norm", hidden)
            yield parts.as_is(f"{theirs}.mlp.c_fc.weight", f"{ours}.mlp.up", hidden, inner)
            yield parts.as_is(f"{theirs}.mlp.c_fc.bias", f"{ours}.mlp.up_bias", inner)
            yield parts.as_is(f"{theirs}.mlp.c_proj.weight", f"{ours}.mlp.down", inner, hidden)
            yield parts.as_is(f"{theirs}.mlp.c_proj.bias", f"{ours}.mlp.down_bias", hidden)
        yield from parts.layer_norm("transformer.ln_f", "norm", hidden)
        if not config.tie_word_embeddings:
            yield parts.as_is("lm_head.weight", "lm_head", config.vocab_size, hidden)
