"""Gemma, Gemma 2 and Gemma 3 (Gemma Team 2024, arXiv:2403.08295, arXiv:2408.00118; 2025, arXiv:2503.19786), text only.

What they add to Llama's layers, each to the one before:

    Gemma    norms times 1 + w, embeddings times the root of their width, gated GELU, tied head
    Gemma 2  norms after attention and MLP, soft caps of scores and logits, every second layer with a window
    Gemma 3  norms of queries and keys, five layers in six with a window and a rotation of their own; no soft caps

VaultGemma (Google 2025, arXiv:2510.15001) is Gemma 2 without the norms after attention and MLP.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, Scales, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import OTHER_PARTS, TEXT_PART_NAMES
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import OnePlusRMSNorm
from jpaged.models.rope import window_rope


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """attention_scale: multiplies the product of query and key.
    attention_softcap, logit_softcap: None for none.
    norms_after: attention and MLP have a norm behind them. qk_norm: queries and keys have norms.
    bias: the products of attention have biases.
    """

    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norms_after: bool = False
    qk_norm: bool = False
    bias: bool = False


def _decoder(config: GemmaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
    norm = partial(OnePlusRMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)
    of_heads = partial(OnePlusRMSNorm, config.head_dim, config.norm_eps, dtype, rngs)

    def block(layer: int) -> SequentialBlock:
        attention = Attention(
            config,
            layer,
            dtype,
            rngs,
            scale=config.attention_scale,
            logit_softcap=config.attention_softcap,
            qkv_bias=config.bias,
            output_bias=config.bias,
        )
        return SequentialBlock(
            attention,
            GatedMLP(config, config.activation, dtype, rngs),
            attention_norm=norm(),
            after_attention=norm() if config.norms_after else None,
            mlp_norm=norm(),
            after_mlp=norm() if config.norms_after else None,
            query_norm=of_heads() if config.qk_norm else None,
            key_norm=of_heads() if config.qk_norm else None,
            rope=config.layer_ropes[layer],
        )

    embedding_scale = float(np.asarray(sqrt(config.hidden_size), dtype))  # rounded as transformers rounds it
    scales = Scales(embedding=embedding_scale, softcap=config.logit_softcap)
    return Decoder(config, block, norm, dtype, rngs, collectives, scales=scales)


@dataclass(frozen=True)
class GemmaFamily:
    """One of the architectures. reads: its configuration. other_types: see `Family`. mlp_norm: what checkpoints call
    the norm of what the MLP reads."""

    model_type: str
    reads: Callable[[ConfigReader], GemmaConfig]
    other_types: tuple[str, ...] = ()
    mlp_norm: str = "pre_feedforward_layernorm"

    base_prefix = "model."
    derived_tensors = rf"rotary_emb\.inv_freq$|{OTHER_PARTS}"
    aliases = TEXT_PART_NAMES

    def read_config(self, read: ConfigReader) -> GemmaConfig:
        return self.reads(read)

    def module(self, config: GemmaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        return _decoder(config, dtype, rngs, collectives)

    def tensors(self, config: GemmaConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{theirs}.self_attn", f"{ours}.mlp"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=config.bias)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=config.bias)
            if config.qk_norm:
                yield pieces.norm(f"{attention}.q_norm", f"{ours}.query_norm", dim)
                yield pieces.norm(f"{attention}.k_norm", f"{ours}.key_norm", dim)
            yield pieces.norm(f"{theirs}.{self.mlp_norm}", f"{ours}.mlp_norm", hidden)
            if config.norms_after:
                yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.after_attention", hidden)
                yield pieces.norm(f"{theirs}.post_feedforward_layernorm", f"{ours}.after_mlp", hidden)
            yield from pieces.gate_and_up(f"{theirs}.mlp", mlp, config)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{mlp}.down", inner, hidden, bias=False)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _fields(read: ConfigReader, activation: str = "hidden_activation", **options: Any) -> dict[str, Any]:
    """What all spell alike, but for `activation`, the entry's name."""
    read = read.with_entries(**{activation: read.config.get(activation) or "gelu_pytorch_tanh"})
    fields = decoder_fields(read, head_dim=256, tied=True, activation=activation, **options)
    read.refuse(("use_bidirectional_attention", False))
    return fields | {"bias": read.flag("attention_bias", False), "attention_scale": fields["head_dim"] ** -0.5}


def _read_gemma(read: ConfigReader) -> GemmaConfig:
    """The first checkpoints say "gelu" and mean the approximation by tanh."""
    if read.config.get("hidden_act") == "gelu":
        read = read.with_entries(hidden_act="gelu_pytorch_tanh")
    read = read.with_defaults(num_key_value_heads=16)
    return GemmaConfig(**_fields(read, "hidden_act", default_length=8192))


def _read_gemma2(read: ConfigReader, norms_after: bool = True) -> GemmaConfig:
    read = read.with_defaults(num_key_value_heads=4)
    fields = _fields(read, default_length=8192) | {"attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5}
    every = 2  # whatever a "sliding_window_pattern" says, as in transformers
    kinds = read.with_entries(sliding_window_pattern=every).kinds_of_layers(fields["num_layers"], every)
    return GemmaConfig(
        **fields,
        norms_after=norms_after,
        attention_softcap=read.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=read.optional_number("final_logit_softcapping", 30.0),
        layer_windows=read.layer_windows(kinds, 4096),
    )


def _read_gemma3(read: ConfigReader) -> GemmaConfig:
    """Of a text model, or the text part of a multimodal one, whose config.json leaves out what is usual."""
    if "text_config" in read.config:
        read = read.text_part("Gemma3ForCausalLM")
    usual = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
    read = read.with_usual(**usual)
    whole = {"theta": 1e6, "layers": "full_attention"}
    fields = _fields(read, default_length=131072, rope=whole) | {
        "max_position_embeddings": read.integer("max_position_embeddings", 131072),  # stretched already
        "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
    }
    kinds = read.kinds_of_layers(fields["num_layers"], every=6)
    local = window_rope(read.config, fields["head_dim"], read.config.get("rope_local_base_freq", 10000.0))
    fields |= {
        "ropes": (*fields["ropes"], local),
        "layer_ropes": tuple(int(kind == "sliding_attention") for kind in kinds),
        "layer_windows": read.layer_windows(kinds, 4096),
    }
    return GemmaConfig(
        **fields,
        norms_after=True,
        qk_norm=True,
        logit_softcap=read.optional_number("final_logit_softcapping"),  # attention's is ignored, as in transformers
    )


GEMMA = GemmaFamily("gemma", _read_gemma, mlp_norm="post_attention_layernorm")
GEMMA2 = GemmaFamily("gemma2", _read_gemma2)
VAULT_GEMMA = GemmaFamily("vaultgemma", partial(_read_gemma2, norms_after=False))
GEMMA3 = GemmaFamily("gemma3_text", _read_gemma3, other_types=("gemma3",))
