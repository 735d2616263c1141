"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3: a layer is either a Mamba-2 mixer,
attention without RoPE, an MLP, or experts.

    x += mixer(norm(x))

MLPs and experts have no gates: down(relu(up(x)) ** 2). Nemotron 3 Super's experts read a narrower product of the
stream (`SparseConfig.latent_size`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, SparseMLP, sigmoid_routing
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece
from jpaged.models.mamba import Mamba2, mamba_pieces
from jpaged.models.mamba_config import MambaOptions
from jpaged.models.norms import WideRMSNorm
from jpaged.models.states import LayerState, MambaState, NoState

_KINDS = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"-": "mlp", "mlp": "mlp", "E": "moe", "moe": "moe"},
}
"""Kinds of layers, by their letters in hybrid_override_pattern and by their names in layers_block_type."""

_OTHER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
"""Other names of entries in config.json, which count where it has both."""


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(DecoderConfig, SparseConfig):
    """kinds: of each layer "mamba", "attention", "mlp" or "moe". mlp_bias: the products of MLPs have biases.
    mamba: what Mamba-2 layers are like.
    """

    may_list_experts: ClassVar[bool] = True

    kinds: tuple[str, ...]
    mlp_bias: bool
    mamba: MambaOptions


class NemotronHFamily:
    """All versions."""

    model_type = "nemotron_h"
    base_prefix = "backbone."
    derived_tensors = r"^mtp\."
    aliases = (("model.", "backbone."),)

    def read_config(self, read: ConfigReader) -> NemotronHConfig:
        read = read.with_entries(**{new: read.config[old] for old, new in _OTHER_NAMES.items() if old in read.config})
        read.refuse(("mamba_hidden_act", "silu"))
        kinds = _layer_kinds(read)
        read = read.with_defaults(num_key_value_heads=8, intermediate_size=21504)
        # transformers ties no head, whatever config.json says, and counts the layers that are listed.
        read = read.with_entries(
            num_hidden_layers=len(kinds), tie_word_embeddings=False, rope_scaling=None, rope_parameters=None
        )
        is_squared = read.config.get("mlp_hidden_act", "relu2") == "relu2"
        options: dict[str, Any] = {"eps": "layer_norm_epsilon", "default_eps": 1e-5, "activation": "mlp_hidden_act"}
        read = read.with_entries(mlp_hidden_act="relu") if is_squared else read
        fields = decoder_fields(read, default_length=4096, head_dim=128, **options)
        fields |= {"ropes": (), "layer_ropes": (None,) * len(kinds)}
        fields |= {"activation": "relu2"} if is_squared else {}
        state = _mamba_state(read) if "mamba" in kinds else None
        states: dict[str, LayerState | None] = {"mamba": state, "attention": None}
        has_experts = "moe" in kinds
        return NemotronHConfig(
            **fields,
            **_sparse_fields(read) if has_experts else {"num_experts": 0, "routing": Routing(per_token=1)},
            expert_size=read.integer("moe_intermediate_size", 7688) if has_experts else 0,
            gated_experts=False,
            dense_layers=tuple(kind != "moe" for kind in kinds),
            layer_states=tuple(states.get(kind, NoState()) for kind in kinds),
            kinds=kinds,
            mlp_bias=read.flag("mlp_bias", False),
            mamba=MambaOptions(
                bias=read.flag("use_bias", False),
                convolution_bias=read.flag("use_conv_bias", True),
                dt_limits=(read.number("time_step_min", 0.001), inf),
            ),
        )

    def module(self, config: NemotronHConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        hidden, layers, eps = config.hidden_size, config.num_layers, config.norm_eps
        norm = partial(WideRMSNorm, hidden, eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            state = config.layer_states[layer]
            if isinstance(state, MambaState):
                mixer = Mamba2(state, hidden, layers, eps, dtype, rngs, collectives, config.mamba)
                return SequentialBlock(mixer, None, attention_norm=norm(), rope=None)
            if state is None:
                return SequentialBlock(Attention(config, layer, dtype, rngs), None, attention_norm=norm(), rope=None)
            if config.dense_layers[layer]:
                mlp = MLP(config, config.activation, dtype, rngs, bias=config.mlp_bias)
                return SequentialBlock(None, mlp, mlp_norm=norm())
            return SequentialBlock(None, SparseMLP(config, dtype, rngs, collectives), mlp_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: NemotronHConfig) -> Iterator[Piece]:
        hidden, inner = config.hidden_size, config.intermediate_size
        yield pieces.as_is("backbone.embeddings.weight", "embedding", config.vocab_size, hidden)
        for i, (kind, state) in enumerate(zip(config.kinds, config.layer_states, strict=True)):
            theirs, ours = f"backbone.layers.{i}.mixer", f"layers.{i}"
            part = f"{ours}.attention" if kind in ("mamba", "attention") else f"{ours}.mlp"
            yield pieces.norm(f"backbone.layers.{i}.norm", f"{part}_norm", hidden)
            if isinstance(state, MambaState):
                yield from mamba_pieces(theirs, part, hidden, state, config.mamba)
            elif kind == "attention":
                yield from pieces.separate_qkv(theirs, part, config, bias=False)
                yield from pieces.output_projection(f"{theirs}.o_proj", part, config, bias=False)
            elif kind == "mlp":
                yield from pieces.linear(f"{theirs}.up_proj", f"{part}.up", hidden, inner, bias=config.mlp_bias)
                yield from pieces.linear(f"{theirs}.down_proj", f"{part}.down", inner, hidden, bias=config.mlp_bias)
            else:
                yield from _experts(theirs, part, config)
        yield pieces.norm("backbone.norm_f", "norm", hidden)
        yield pieces.as_is("lm_head.weight", "lm_head", config.vocab_size, hidden)


def _experts(theirs: str, ours: str, config: NemotronHConfig) -> Iterator[Piece]:
    hidden, inner, width = config.hidden_size, config.expert_size, config.latent_size or config.hidden_size
    yield pieces.transposed(f"{theirs}.gate.weight", f"{ours}.router.gate", hidden, config.num_experts)
    yield pieces.as_is(f"{theirs}.gate.e_score_correction_bias", f"{ours}.router.correction", config.num_experts)
    if config.latent_size:
        yield pieces.transposed(f"{theirs}.fc1_latent_proj.weight", f"{ours}.into_latents", hidden, width)
        yield pieces.transposed(f"{theirs}.fc2_latent_proj.weight", f"{ours}.out_of_latents", width, hidden)
    for expert in range(config.num_experts):
        for name, part, inputs, outputs in (("up_proj", "up", width, inner), ("down_proj", "down", inner, width)):
            tensor, split = f"{theirs}.experts.{expert}.{name}.weight", (1, outputs, inputs)
            yield Piece(tensor, split[1:], f"{ours}.experts.{part}", split, (0, 2, 1), (expert, 0, 0))
    shared = f"{theirs}.shared_experts"
    yield pieces.transposed(f"{shared}.up_proj.weight", f"{ours}.shared.up", hidden, config.shared_size)
    yield pieces.transposed(f"{shared}.down_proj.weight", f"{ours}.shared.down", config.shared_size, hidden)


def _sparse_fields(read: ConfigReader) -> dict[str, Any]:
    read.refuse(("mlp_bias", False))
    experts = read.integer("n_routed_experts", read.integer("num_local_experts", 8))
    routing = sigmoid_routing(read, per_token=2, renormalized=True)
    routing.check(experts)
    latent_size = read.config.get("moe_latent_size")
    return {
        "num_experts": experts,
        "routing": routing,
        "shared_size": read.integer("moe_shared_expert_intermediate_size", 7688),
        "latent_size": 0 if latent_size is None else read.integer("moe_latent_size"),
    }


def _mamba_state(read: ConfigReader) -> MambaState:
    heads, groups = read.integer("mamba_num_heads", 128), read.integer("n_groups", 8)
    width = read.integer("conv_kernel", 4)
    if heads % groups or width < 2:
        raise CheckpointError(
            f"config.json: n_groups ({groups}) must divide mamba_num_heads ({heads}), and conv_kernel ({width}) must be"
            " at least 2."
        )
    return MambaState(
        heads=heads,
        groups=groups,
        group_heads=heads // groups,
        head_dim=read.integer("mamba_head_dim", 64),
        state_dim=read.integer("ssm_state_size", 128),
        width=width,
    )


def _layer_kinds(read: ConfigReader) -> tuple[str, ...]:
    """The kind of each layer: from the list of names, or else from hybrid_override_pattern."""
    said = read.config.get("layers_block_type") or read.config.get("layer_types")
    said = said or read.config.get("hybrid_override_pattern") or ("mamba", "moe", "attention", "mlp")
    if not isinstance(said, list | tuple | str):
        raise CheckpointError(f"config.json: layers_block_type must list layers by name, got {shown(said)}.")
    for kind in said:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise UnsupportedModelError(
                f"config.json: layer type {shown(kind)} is not supported; supported: {', '.join(_KINDS)}."
            )
    kinds = tuple(_KINDS[kind] for kind in said)
    if "attention" not in kinds:
        raise UnsupportedModelError("config.json: layers without attention among them are not supported.")
    return kinds
