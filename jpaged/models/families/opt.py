"""OPT (Zhang et al. 2022), all sizes: learned positions, layer norms, and for 350m a projected embedding and
norms after the residual sums."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import ALONE, Collectives, Exchange, embedding_part
from jpaged.models.config import ModelConfig
from jpaged.models.layers import MLP, Attend, Attention, LayerNorm, Normal, logits_of, parameter, product, run_layers
from jpaged.models.loading import parts
from jpaged.models.loading.parts import Part
from jpaged.models.residual import Stream, begin


class OPTBlock(nnx.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.pre_norm = config.pre_norm
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_eps, dtype, rngs)
        self.attention = Attention(config, layer, dtype, rngs)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, stream: Stream, attend: Attend) -> None:
        if self.pre_norm:
            stream.add(*self.attention(stream.normed(self.attention_norm), attend))
            stream.add(*self.mlp(stream.normed(self.mlp_norm)))
            return
        stream.add(*self.attention(stream.value(), attend))
        stream.x = stream.normed(self.attention_norm)
        stream.add(*self.mlp(stream.value()))
        stream.x = stream.normed(self.mlp_norm)


class OPTForCausalLM(nnx.Module):
    """config: of the family "opt". dtype: of the weights and of the residual stream.

    collectives: of the shards the model is split into; config is then one shard's (`sharding.shard_config`).
    """

    base_prefix = "model."

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives = ALONE) -> None:
        hidden, width = config.hidden_size, config.embedding_size
        std = width**-0.5
        self.position_offset = config.position_offset
        self.collectives = collectives
        table = (config.vocab_size, width)
        self.embedding = parameter(rngs, Normal(std), table, dtype, shard_axis=0)
        self.positions = parameter(rngs, Normal(std), (config.num_learned_positions, hidden), dtype)
        projected = width != hidden
        self.project_in = parameter(rngs, Normal(width**-0.5), (width, hidden), dtype) if projected else None
        self.project_out = parameter(rngs, Normal(hidden**-0.5), (hidden, width), dtype) if projected else None
        self.layers = nnx.List(OPTBlock(config, layer, dtype, rngs) for layer in range(config.num_layers))
        self.norm = LayerNorm(hidden, config.norm_eps, dtype, rngs) if config.final_norm else None
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else parameter(rngs, Normal(std), table, dtype, shard_axis=0)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | list[Any],
        exchange: Exchange | None = None,
    ) -> jax.Array:
        """int32 tokens [T] and their positions [T] -> hidden states [T, hidden], after the final norm if any."""
        part = embedding_part(self.embedding[...], tokens, self.collectives)
        if self.project_in is not None:  # linear, so that the parts' products add up as well
            part = product("tw,wh->th", part, self.project_in)
        stream = begin(part, self.collectives, exchange, self.positions[...][positions + self.position_offset])
        run_layers(self.layers, stream, (), attend)
        return stream.value() if self.norm is None else stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden] -> float32 [R, vocab]."""
        if self.project_out is not None:
            hidden = product("rh,hw->rw", hidden, self.project_out)
        head = self.embedding if self.lm_head is None else self.lm_head
        return logits_of(hidden, head[...])

    @staticmethod
    def parts(config: ModelConfig) -> Iterator[Part]:
        """Every tensor of the checkpoint, in order."""
        hidden, inner, width = config.hidden_size, config.intermediate_size, config.embedding_size
        decoder = "model.decoder"
        yield parts.as_is(f"{decoder}.embed_tokens.weight", "embedding", config.vocab_size, width)
        yield parts.as_is(f"{decoder}.embed_positions.weight", "positions", config.num_learned_positions, hidden)
        if width != hidden:
            yield parts.transposed(f"{decoder}.project_in.weight", "project_in", width, hidden)
            yield parts.transposed(f"{decoder}.project_out.weight", "project_out", hidden, width)
        for i in range(config.num_layers):
            theirs, ours = f"{decoder}.layers.{i}", f"layers.{i}"
            yield from parts.layer_norm(f"{theirs}.self_attn_layer_norm", f"{ours}.attention_norm", hidden)
            yield from parts.separate_qkv(f"{theirs}.self_attn", f"{ours}.attention", config)
            yield from parts.output_projection(f"{theirs}.self_attn.out_proj", f"{ours}.attention", config)
            yield from parts.layer_norm(f"{theirs}.final_layer_norm", f"{ours}.mlp_norm", hidden)
            yield parts.transposed(f"{theirs}.fc1.weight", f"{ours}.mlp.up", hidden, inner)
            yield parts.transposed(f"{theirs}.fc2.weight", f"{ours}.mlp.down", inner, hidden)
            if config.mlp_bias:
                yield parts.as_is(f"{theirs}.fc1.bias", f"{ours}.mlp.up_bias", inner)
                yield parts.as_is(f"{theirs}.fc2.bias", f"{ours}.mlp.down_bias", hidden)
        if config.final_norm:
            yield from parts.layer_norm(f"{decoder}.final_layer_norm", "norm", hidden)
        if not config.tie_word_embeddings:
            yield parts.as_is("lm_head.weight", "lm_head", config.vocab_size, width)
