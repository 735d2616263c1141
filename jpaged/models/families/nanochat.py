"""nanochat (Karpathy 2025): norms without weights, of the embeddings as well; squared ReLU without gates; soft-capped
logits.

Queries and keys are rotated backwards. Seen with the halves of each head exchanged that is the usual rotation, so their
columns are stored so (`Rope.column_order` is another such order). They are normed after the rotation, which changes
no root mean square but by the rotation's scale (YaRN's): they are normed before it, without that scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, Scales, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import UnscaledRMSNorm


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """softcap: of the logits; None for none. bias: the products of attention have biases.
    head_eps: of the norms of queries and keys.
    """

    softcap: float | None
    bias: bool
    head_eps: float

    @property
    def columns(self) -> tuple[int, ...]:
        half = self.head_dim // 2
        return (*range(half, self.head_dim), *range(half))


class NanoChatFamily:
    """All sizes."""

    model_type = "nanochat"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> NanoChatConfig:
        is_squared = read.config.get("hidden_act", "relu2") == "relu2"
        fields = decoder_fields(read.with_entries(hidden_act="relu") if is_squared else read)
        (rope,) = fields["ropes"]
        fields["ropes"] = (replace(rope, attention_scale=1.0),)
        return NanoChatConfig(
            **fields | ({"activation": "relu2"} if is_squared else {}),
            head_eps=fields["norm_eps"] / rope.attention_scale**2,
            softcap=read.optional_number("final_logit_softcapping", 15.0),
            bias=read.flag("attention_bias", False),
        )

    def module(self, config: NanoChatConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(UnscaledRMSNorm, config.hidden_size, config.norm_eps, dtype)
        of_heads = partial(UnscaledRMSNorm, config.head_dim, config.head_eps, dtype)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                Attention(config, layer, dtype, rngs, qkv_bias=config.bias, output_bias=config.bias),
                MLP(config, config.activation, dtype, rngs),
                attention_norm=norm(),
                mlp_norm=norm(),
                query_norm=of_heads(),
                key_norm=of_heads(),
            )

        scales = Scales(softcap=config.softcap)
        return Decoder(config, block, norm, dtype, rngs, collectives, scales=scales, embedding_norm=norm())

    def tensors(self, config: NanoChatConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias, order=config.columns)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield from pieces.linear(f"{theirs}.mlp.fc1", f"{mlp}.up", hidden, inner, bias=False)
            yield from pieces.linear(f"{theirs}.mlp.fc2", f"{mlp}.down", inner, hidden, bias=False)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)
