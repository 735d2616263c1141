"""Gemma 4 (Google DeepMind 2026), text only: what it adds to Gemma 3's layers, each in some of its sizes.

all          norms times w, of values too; unscaled scores; a number that multiplies each layer's output; layers
             without a window have heads of another size, and rotate a quarter of their pairs
E2B, E4B     embeddings of tokens for each layer; the last layers read the keys and values of earlier ones
12B and up   layers without a window have fewer key-value heads, and one projection for keys and values
26B-A4B      experts beside each MLP, with norms of their own
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, Places, Scales, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config import KVHeads
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, SparseMLP
from jpaged.models.family import SIGHT_AND_SOUND, TEXT_PART_NAMES, Attend, unread_keys_and_values
from jpaged.models.layer_inputs import LayerInput, layer_input_pieces, layer_inputs_pieces
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm, UnscaledRMSNorm, WideRMSNorm
from jpaged.models.parameters import Constant, parameter
from jpaged.models.residual import Stream
from jpaged.models.rope import parse_rope

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(SparseConfig, DecoderConfig):
    """keys_are_values, wide_mlps: per layer; keys and values are one projection, the MLP is twice as wide.
    logit_softcap: None for none. bias: the products of attention have biases.
    """

    may_list_experts: ClassVar[bool] = True

    keys_are_values: tuple[bool, ...]
    wide_mlps: tuple[bool, ...]
    logit_softcap: float | None
    bias: bool

    def inner_size(self, layer: int) -> int:
        """Columns of a layer's MLP."""
        return self.intermediate_size * (2 if self.wide_mlps[layer] else 1)


class RouterNorm(RMSNorm):
    """Of what routers read: divided by the root of its width, once scaled."""

    def multiplier(self) -> jax.Array:
        scale = self.scale[...].astype(jnp.float32)
        return scale * scale.size**-0.5


class Gemma4Block(SequentialBlock):
    """Attention, an MLP and experts beside it, the layer's input; then the whole stream is multiplied."""

    def __init__(
        self, config: Gemma4Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> None:
        hidden, eps, head_dim = config.hidden_size, config.norm_eps, config.of_layer(layer).head_dim
        norm = partial(WideRMSNorm, hidden, eps, dtype, rngs)
        keeps = config.layer_keeps_tokens[layer]
        keys_are_values = config.keys_are_values[layer]
        attention: dict[str, Any] = {"scale": 1.0, "qkv_bias": config.bias, "output_bias": config.bias}
        super().__init__(
            Attention(config, layer, dtype, rngs, keys_are_values=keys_are_values, **attention),
            GatedMLP(replace(config, intermediate_size=config.inner_size(layer)), config.activation, dtype, rngs),
            attention_norm=norm(),
            after_attention=norm(),
            mlp_norm=norm(),
            after_mlp=norm(),
            query_norm=WideRMSNorm(head_dim, eps, dtype, rngs),
            key_norm=WideRMSNorm(head_dim, eps, dtype, rngs) if keeps else None,
            value_norm=UnscaledRMSNorm(head_dim, eps, dtype) if keeps else None,
            rope=config.layer_ropes[layer],
        )
        self.experts = SparseMLP(config, dtype, rngs, collectives) if config.num_experts else None
        if config.num_experts:
            self.router_norm = RouterNorm(hidden, eps, dtype, rngs)
            self.experts_norm, self.after_experts, self.after_dense = norm(), norm(), norm()
        of_input = config.input_size, hidden, config.activation
        self.input = LayerInput(*of_input, norm(), dtype, rngs) if config.input_size else None
        self.scalar = parameter(rngs, Constant(1.0), (1,), dtype)

    def __call__(self, stream: Stream, places: Places, attend: Attend) -> None:
        super().__call__(stream, places, attend)
        if self.input is not None:
            assert places.layer_input is not None
            self.input(stream, places.layer_input)
        stream.replace(stream.value() * self.scalar[...])

    def _feed_forward(self, stream: Stream) -> None:
        if self.experts is None:
            super()._feed_forward(stream)
            return
        assert isinstance(self.mlp, GatedMLP)
        assert self.mlp_norm is not None
        assert self.after_mlp is not None
        x, backend = stream.value(), stream.backend
        dense = self.mlp(self.mlp_norm(x), backend)
        experts = self.experts(self.experts_norm(x), backend, stream.live, stream.counts, routed_by=self.router_norm(x))
        both = stream.collectives.all_reduce(jnp.stack([dense.array, experts.array]))
        stream.replace(x + self.after_mlp(self.after_dense(both[0]) + self.after_experts(both[1])))


@dataclass(frozen=True)
class Gemma4Family:
    """One of the architectures. text: that of its text model. input_size, length, window: where config.json leaves them
    out. other_types: see `Family`."""

    model_type: str
    text: str
    input_size: int
    length: int
    window: int
    other_types: tuple[str, ...]

    base_prefix = "model."
    derived_tensors = rf"rotary_emb\.\w*inv_freq$|{SIGHT_AND_SOUND}"
    aliases = TEXT_PART_NAMES

    def passed_over(self, config: Gemma4Config) -> str:
        return unread_keys_and_values(config.layer_sources)

    def read_config(self, read: ConfigReader) -> Gemma4Config:
        if "text_config" in read.config:
            read = read.text_part(self.text)
        usual: dict[str, Any] = {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
        }
        usual |= {"num_attention_heads": 8, "num_key_value_heads": 4, "eos_token_id": 1, "bos_token_id": 2}
        usual |= {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": self.window}
        read = read.with_usual(**usual)
        if read.config.get("rope_parameters") is None:
            whole = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
            read = read.with_entries(rope_parameters={_SLIDING: {"rope_theta": 1e4}, _FULL: whole})
        if read.config.get("use_bidirectional_attention"):  # "vision" concerns images alone
            read.refuse(("use_bidirectional_attention", "vision"))
        options: dict[str, Any] = {"default_length": self.length, "head_dim": 256, "tied": True}
        fields = decoder_fields(read, activation="hidden_activation", rope={"layers": _SLIDING}, **options)
        num_layers = fields["num_layers"]
        # The last layer never has a window, whatever config.json says.
        kinds = read.layer_kinds(num_layers) or [_FULL if (i + 1) % 6 == 0 else _SLIDING for i in range(num_layers)]
        kinds = (*kinds[:-1], _FULL)
        heads = _heads(read, kinds, KVHeads(fields["num_kv_heads"], fields["head_dim"]))
        sources = read.layer_sources(kinds)
        shares_keys = read.flag("attention_k_eq_v", False)
        length = read.integer("max_position_embeddings", self.length)
        rotation: dict[str, Any] = {"max_model_len": read.max_model_len, "layers": _FULL}
        whole_rope, whole_length = parse_rope(read.config, heads[kinds.index(_FULL)].dim, length, **rotation)
        has_experts = read.flag("enable_moe_block", False)
        num_experts = read.integer("num_experts") if has_experts else 0
        per_token = read.integer("top_k_experts") if has_experts else 1
        routing = Routing(per_token=per_token, renormalized=True, scaled=has_experts)
        if has_experts:
            routing.check(num_experts)
        input_size = read.count("hidden_size_per_layer_input", self.input_size)
        input_vocab = read.integer("vocab_size_per_layer_input", 262144)
        if input_size and input_vocab < fields["vocab_size"]:
            raise UnsupportedModelError(
                f"config.json: vocab_size_per_layer_input ({input_vocab}) must be at least vocab_size"
                f" ({fields['vocab_size']})."
            )
        wide = read.flag("use_double_wide_mlp", False)
        fields |= {
            "max_position_embeddings": min(fields["max_position_embeddings"], whole_length),
            "ropes": (*fields["ropes"], whole_rope),
            "layer_ropes": tuple(int(kind == _FULL) for kind in kinds),
            "layer_windows": read.layer_windows(kinds),
        }
        return Gemma4Config(
            **fields,
            layer_heads=heads,
            layer_sources=sources,
            keys_are_values=tuple(shares_keys and kind == _FULL for kind in kinds),
            wide_mlps=tuple(wide and source is not None for source in sources),
            logit_softcap=read.optional_number("final_logit_softcapping"),
            bias=read.flag("attention_bias", False),
            input_size=input_size,
            input_vocab=input_vocab if input_size else 0,
            num_experts=num_experts,
            routing=routing,
            expert_size=read.integer("moe_intermediate_size") if has_experts else 0,
            dense_layers=(not has_experts,) * num_layers,
        )

    def module(self, config: Gemma4Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        embedding_scale = float(np.asarray(sqrt(config.hidden_size), dtype))  # rounded as transformers rounds it
        return Decoder(
            config,
            lambda layer: Gemma4Block(config, layer, dtype, rngs, collectives),
            partial(WideRMSNorm, config.hidden_size, config.norm_eps, dtype, rngs),
            dtype,
            rngs,
            collectives,
            scales=Scales(embedding=embedding_scale, softcap=config.logit_softcap),
        )

    def tensors(self, config: Gemma4Config) -> Iterator[Piece | TiedTensor]:
        hidden, layers, size = config.hidden_size, config.num_layers, config.input_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(layers):
            yield from _layer(f"model.layers.{i}", f"layers.{i}", config, i)
        yield pieces.norm("model.norm", "norm", hidden)
        if size:
            yield from layer_inputs_pieces(config.input_vocab, layers, size, hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _layer(theirs: str, ours: str, config: Gemma4Config, layer: int) -> Iterator[Piece]:
    hidden, of_layer, attention = config.hidden_size, config.of_layer(layer), f"{theirs}.self_attn"
    options: dict[str, Any] = {"bias": config.bias, "order": config.ropes[config.layer_ropes[layer] or 0].column_order}
    yield pieces.as_is(f"{theirs}.layer_scalar", f"{ours}.scalar", 1)
    if config.layer_keeps_tokens[layer]:
        values = not config.keys_are_values[layer]
        yield from pieces.separate_qkv(attention, f"{ours}.attention", of_layer, values=values, **options)
        yield pieces.norm(f"{attention}.k_norm", f"{ours}.key_norm", of_layer.head_dim)
    else:
        yield from pieces.query_projection(f"{attention}.q_proj", f"{ours}.attention", of_layer, **options)
    yield pieces.norm(f"{attention}.q_norm", f"{ours}.query_norm", of_layer.head_dim)
    yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", of_layer, bias=config.bias)
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "after_attention"}
    norms |= {"pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "after_mlp"}
    if config.num_experts:
        norms |= {"pre_feedforward_layernorm_2": "experts_norm", "post_feedforward_layernorm_1": "after_dense"}
        norms |= {"post_feedforward_layernorm_2": "after_experts"}
        router, experts = f"{ours}.experts.router", config.num_experts
        yield pieces.transposed(f"{theirs}.router.proj.weight", f"{router}.gate", hidden, experts)
        yield pieces.as_is(f"{theirs}.router.scale", f"{ours}.router_norm.scale", hidden)
        yield pieces.as_is(f"{theirs}.router.per_expert_scale", f"{router}.scales", experts)
        both = f"{theirs}.experts", f"{ours}.experts.experts"
        yield from pieces.joined_experts(*both, hidden, config.expert_size, experts)
    if config.input_size:
        yield from layer_input_pieces(theirs, f"{ours}.input", config.input_size, hidden)
    for name, norm in norms.items():
        yield pieces.norm(f"{theirs}.{name}", f"{ours}.{norm}", hidden)
    yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.inner_size(layer))


def _heads(read: ConfigReader, kinds: tuple[str, ...], usual: KVHeads) -> tuple[KVHeads, ...]:
    """Of each layer, as published checkpoints say it, or as transformers saves it."""
    if "per_layer_config" not in read.config:
        number = usual.number
        if read.flag("attention_k_eq_v", False):
            number = read.integer("num_global_key_value_heads", number)
        whole = KVHeads(number, read.head_dim("global_head_dim", 512))
        return tuple(whole if kind == _FULL else usual for kind in kinds)
    by_layer = read.config["per_layer_config"]
    by_layer = {} if by_layer is None else by_layer
    if not isinstance(by_layer, Mapping) or not all(str(layer).isdecimal() for layer in by_layer):
        raise CheckpointError(
            f"config.json: per_layer_config must map numbers of layers to objects, or be null, got {shown(by_layer)}."
        )
    by_number = {int(layer): changes for layer, changes in by_layer.items()}  # "05" where layers are 10 or more
    heads = []
    for layer in range(len(kinds)):
        changes = by_number.get(layer, {})
        if not isinstance(changes, Mapping) or not changes.keys() <= {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(
                f"config.json: per_layer_config may say head_dim and num_key_value_heads of a layer, not"
                f" {shown(changes)}."
            )
        of_layer = read.with_entries(**changes)
        number = of_layer.integer("num_key_value_heads", usual.number)
        heads.append(KVHeads(number, of_layer.head_dim("head_dim", usual.dim)))
    if len({*zip(kinds, heads, strict=True)}) > len({*kinds}):
        raise UnsupportedModelError("config.json: per_layer_config must be equal for all layers of a type.")
    return tuple(heads)


_DENSE = {"input_size": 0, "length": 262144, "window": 1024}
GEMMA4 = Gemma4Family("gemma4_text", "Gemma4ForCausalLM", 256, 131072, 512, ("gemma4",))
GEMMA4_UNIFIED = Gemma4Family(
    "gemma4_unified_text", "Gemma4UnifiedForCausalLM", other_types=("gemma4_unified",), **_DENSE
)
