"""Gemma 3n (Google DeepMind 2025), text only: what it adds to Gemma 3's layers.

streams     several residual streams, of which each layer computes one and corrects the others (`models.altup`)
residual    a product of low rank of what attention reads, normed, and that itself, beside what attention gives
            (LAuReL, Menghani et al. 2024, arXiv:2411.07501)
MLPs        in the first layers only the largest gates count; layers may have MLPs of different widths
inputs      embeddings of tokens for each layer, which reach all streams but the first
attention   norms times w, of values too; unscaled scores; the last layers read the keys and values of earlier ones

altup_coef_clip limits weights while they are trained with transformers, and nothing that is computed of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import NormalDist
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.altup import AltUp, AltUpStreams
from jpaged.models.blocks import Decoder, DecoderConfig, Places, Scales, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config import inner_columns
from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import SIGHT_AND_SOUND, TEXT_PART_NAMES, Attend, unread_keys_and_values
from jpaged.models.layer_inputs import LayerInput, layer_input_pieces, layer_inputs_pieces
from jpaged.models.layers import Attention, GatedMLP, TopGatesMLP
from jpaged.models.linear import Linear, times
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import Norm, UnscaledRMSNorm, WideRMSNorm
from jpaged.models.residual import Stream
from jpaged.models.rope import window_rope

_SLIDING, _FULL = "sliding_attention", "full_attention"
_USUAL = {"vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35}
_USUAL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(DecoderConfig):
    """inner_sizes: per layer; the columns of its MLP, of all shards. cutoffs: per layer; of the gates that count, in
    standard deviations above their mean (`TopGatesMLP`), or None for all gates.
    streams, active_stream: how many residual streams, and the one that layers compute. scaled_inputs: the active stream
    has a scale for who reads it beside its layer's input. laurel_rank: of the learned residual.
    logit_softcap: None for none. bias: the products of attention have biases. shards: that the model is split into.
    """

    inner_sizes: tuple[int, ...]
    cutoffs: tuple[float | None, ...]
    streams: int
    active_stream: int
    scaled_inputs: bool
    laurel_rank: int
    logit_softcap: float | None
    bias: bool
    shards: int = 1

    def shard(self, shards: int) -> Self:
        """As `ModelConfig.shard`."""
        return replace(super().shard(shards), shards=shards)


class Laurel(nnx.Module):
    """x + norm(right(left(x)))."""

    def __init__(self, hidden_size: int, rank: int, norm: Norm, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.left = Linear((hidden_size,), (rank,), hidden_size**-0.5, dtype, rngs)
        self.right = Linear((rank,), (hidden_size,), rank**-0.5, dtype, rngs)
        self.norm = norm

    def __call__(self, x: jax.Array, backend: str | None) -> jax.Array:
        """[T, hidden] -> [T, hidden]. backend: of products (`Linear`)."""
        return x + self.norm(self.right(self.left(x, backend=backend), backend=backend))


class Gemma3nBlock(SequentialBlock):
    """Attention and an MLP on the active stream; then all streams are corrected, and get the layer's input."""

    def __init__(
        self, config: Gemma3nConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> None:
        hidden, eps, dim = config.hidden_size, config.norm_eps, config.head_dim
        norm = partial(WideRMSNorm, hidden, eps, dtype, rngs)
        keeps = config.layer_keeps_tokens[layer]
        super().__init__(
            Attention(config, layer, dtype, rngs, scale=1.0, qkv_bias=config.bias, output_bias=config.bias),
            _mlp(config, layer, dtype, rngs, collectives),
            attention_norm=norm(),
            after_attention=norm(),
            mlp_norm=norm(),
            after_mlp=norm(),
            query_norm=WideRMSNorm(dim, eps, dtype, rngs),
            key_norm=WideRMSNorm(dim, eps, dtype, rngs) if keeps else None,
            value_norm=UnscaledRMSNorm(dim, eps, dtype) if keeps else None,
            rope=config.layer_ropes[layer],
        )
        streams = config.streams, config.active_stream, hidden
        self.altup = AltUp(*streams, norm(), dtype, rngs, scaled=config.scaled_inputs)
        self.laurel = Laurel(hidden, config.laurel_rank, norm(), dtype, rngs)
        self.input = LayerInput(config.input_size, hidden, config.activation, norm(), dtype, rngs)

    def __call__(self, stream: Stream, places: Places, attend: Attend) -> None:
        predicted = self.altup.predict(stream.value())
        stream.replace(predicted[:, self.altup.active])
        super().__call__(stream, places, attend)
        corrected = self.altup.correct(predicted, stream.value())
        assert places.layer_input is not None
        given = self.input.of(self.altup.active_part(corrected), places.layer_input, stream.backend)
        # All streams but the first, whichever is active.
        stream.replace(jnp.concatenate([corrected[:, :1], corrected[:, 1:] + given[:, None]], axis=1))

    def _attend(self, stream: Stream, places: Places, attend: Attend) -> None:
        assert self.attention_norm is not None
        learned = self.laurel(stream.normed(self.attention_norm), stream.backend)
        super()._attend(stream, places, attend)
        stream.replace(times(stream.value() + learned, 2**-0.5))


def _mlp(
    config: Gemma3nConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
) -> GatedMLP | TopGatesMLP:
    columns, cutoff = config.inner_sizes[layer], config.cutoffs[layer]
    made_of = replace(config, intermediate_size=inner_columns(columns, config.shards)), config.activation, dtype, rngs
    if cutoff is None:
        return GatedMLP(*made_of)
    return TopGatesMLP(*made_of, cutoff=cutoff, columns=columns, collectives=collectives)


class Gemma3nFamily:
    model_type = "gemma3n_text"
    other_types = ("gemma3n",)
    base_prefix = "model."
    derived_tensors = SIGHT_AND_SOUND
    aliases = TEXT_PART_NAMES

    def passed_over(self, config: Gemma3nConfig) -> str:
        """What checkpoints hold and nothing reads: keys and values of some layers, scales that are switched off."""
        scales = "" if config.scaled_inputs else r"altup\.correct_output_scale$"
        return "|".join(filter(None, (unread_keys_and_values(config.layer_sources), scales)))

    def read_config(self, read: ConfigReader) -> Gemma3nConfig:
        if "text_config" in read.config:
            read = read.text_part("Gemma3nForCausalLM")
        usual = _USUAL | {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768}
        read = read.with_usual(**usual)
        num_layers = read.integer("num_hidden_layers")
        inner_sizes = _inner_sizes(read, num_layers)
        read = read.with_entries(intermediate_size=max(inner_sizes))
        rope = {"theta": 1e6, "layers": _FULL}
        fields = decoder_fields(read, activation="hidden_activation", head_dim=256, tied=True, rope=rope)
        kinds = read.layer_kinds(num_layers)
        kinds = kinds or tuple(_SLIDING if (i + 1) % 5 else _FULL for i in range(num_layers))
        local = window_rope(read.config, fields["head_dim"], read.config.get("rope_local_base_freq", 10000.0))
        streams, active = read.integer("altup_num_inputs", 4), read.count("altup_active_idx", 0)
        if active >= streams:
            raise CheckpointError(
                f"config.json: altup_active_idx ({active}) must be below altup_num_inputs ({streams})."
            )
        input_vocab = read.integer("vocab_size_per_layer_input", 262144)
        fields |= {
            "max_position_embeddings": read.integer("max_position_embeddings"),  # stretched already
            "ropes": (*fields["ropes"], local),
            "layer_ropes": tuple(int(kind == _SLIDING) for kind in kinds),
            "layer_windows": read.layer_windows(kinds, 512),
            "layer_sources": read.layer_sources(kinds, 15),
        }
        return Gemma3nConfig(
            **fields,
            inner_sizes=inner_sizes,
            cutoffs=_cutoffs(read, num_layers),
            streams=streams,
            active_stream=active,
            scaled_inputs=read.flag("altup_correct_scale", True),
            laurel_rank=read.integer("laurel_rank", 64),
            logit_softcap=read.optional_number("final_logit_softcapping", 30.0),
            bias=read.flag("attention_bias", False),
            input_size=read.integer("hidden_size_per_layer_input", 256),
            input_vocab=input_vocab,
            input_tokens=input_vocab if input_vocab < fields["vocab_size"] else None,
        )

    def module(self, config: Gemma3nConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        embedding_scale = float(np.asarray(sqrt(config.hidden_size), dtype))  # rounded as transformers rounds it
        return Decoder(
            config,
            lambda layer: Gemma3nBlock(config, layer, dtype, rngs, collectives),
            partial(WideRMSNorm, config.hidden_size, config.norm_eps, dtype, rngs),
            dtype,
            rngs,
            collectives,
            scales=Scales(embedding=embedding_scale, softcap=config.logit_softcap),
            streams=AltUpStreams(config.streams, config.hidden_size, dtype, rngs),
        )

    def tensors(self, config: Gemma3nConfig) -> Iterator[Piece | TiedTensor]:
        hidden, layers = config.hidden_size, config.num_layers
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(layers):
            yield from _layer(f"model.layers.{i}", f"layers.{i}", config, i)
        yield pieces.norm("model.norm", "norm", hidden)
        yield from layer_inputs_pieces(config.input_vocab, layers, config.input_size, hidden)
        for theirs, ours in ("projections", "first_products"), ("unembed_projections", "last_products"):
            for i in range(config.streams - 1):
                yield pieces.transposed(f"model.altup_{theirs}.{i}.weight", f"streams.{ours}.{i}", hidden, hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _layer(theirs: str, ours: str, config: Gemma3nConfig, layer: int) -> Iterator[Piece]:
    hidden, streams, attention = config.hidden_size, config.streams, f"{theirs}.self_attn"
    if config.layer_keeps_tokens[layer]:
        yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=config.bias)
        yield pieces.norm(f"{attention}.k_norm", f"{ours}.key_norm", config.head_dim)
    else:
        yield from pieces.query_projection(f"{attention}.q_proj", f"{ours}.attention", config, bias=config.bias)
    yield pieces.norm(f"{attention}.q_norm", f"{ours}.query_norm", config.head_dim)
    yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=config.bias)
    yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.inner_sizes[layer])
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "after_attention"}
    norms |= {"pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "after_mlp"}
    norms |= {"laurel.post_laurel_norm": "laurel.norm", "altup.router_norm": "altup.norm"}
    for name, norm in norms.items():
        yield pieces.norm(f"{theirs}.{name}", f"{ours}.{norm}", hidden)
    for name, product, inputs, outputs in (
        ("laurel.linear_left", "laurel.left", hidden, config.laurel_rank),
        ("laurel.linear_right", "laurel.right", config.laurel_rank, hidden),
        ("altup.modality_router", "altup.router", hidden, streams),
        ("altup.correction_coefs", "altup.coefficients", streams, streams),
    ):
        yield pieces.transposed(f"{theirs}.{name}.weight", f"{ours}.{product}", inputs, outputs)
    split, mixture = (streams, streams, streams), f"{theirs}.altup.prediction_coefs.weight"
    yield Piece(mixture, (streams * streams, streams), f"{ours}.altup.mixture", split, (2, 0, 1))
    if config.scaled_inputs:
        yield pieces.as_is(f"{theirs}.altup.correct_output_scale", f"{ours}.altup.scale", hidden)
    yield from layer_input_pieces(theirs, f"{ours}.input", config.input_size, hidden)


def _inner_sizes(read: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Of each layer's MLP: a list, or one number for all."""
    sizes = read.config["intermediate_size"]
    if not isinstance(sizes, list | tuple):
        return (read.integer("intermediate_size"),) * num_layers
    if len(sizes) != num_layers:
        raise CheckpointError(f"config.json: intermediate_size must list {num_layers} layers, got {shown(sizes)}.")
    return tuple(read.with_entries(intermediate_size=size).integer("intermediate_size") for size in sizes)


def _cutoffs(read: ConfigReader, num_layers: int) -> tuple[float | None, ...]:
    """ "activation_sparsity_pattern": for each layer which share of its gates, taken as normal, counts nothing."""
    name = "activation_sparsity_pattern"
    said = read.config.get(name)
    if said is None:
        sparse = 10 if num_layers > 10 else 0
        said = [0.95] * sparse + [0.0] * (num_layers - sparse)
    listed = isinstance(said, list | tuple) and len(said) == num_layers
    shares = [read.with_entries(**{name: share}).number(name, 0.0) for share in said] if listed else []
    if not listed or max(shares) >= 1:
        raise CheckpointError(
            f"config.json: {name} must list numbers from 0 to below 1 for {num_layers} layers, got {shown(said)}."
        )
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


GEMMA3N = Gemma3nFamily()
