"""Granite 3 and 4 (IBM), and HyperCLOVA X (NAVER): Llama's layers with multipliers of embeddings, scores, residuals and
logits.

    GraniteForCausalLM            an MLP in each layer
    GraniteSWAForCausalLM         likewise; windows in three layers of four, a RoPE or none for each layer, sinks
    HyperCLOVAXForCausalLM        likewise; norms of what attention and MLP give
    GraniteMoeForCausalLM         experts in each layer, chosen by a softmax over the best logits
    GraniteMoeSharedForCausalLM   and a shared expert, or none
    GraniteMoeSWAForCausalLM      likewise; windows, RoPE and sinks as GraniteSWA
    GraniteMoeHybridForCausalLM   Granite 4: an MLP, or experts and a shared one; Mamba-2 layers or none; RoPE or none

Checkpoints have one tensor for all experts of a layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.blocks import Decoder, DecoderConfig, Scales, SequentialBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, SparseMLP
from jpaged.models.layers import Attention, GatedMLP
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.mamba import Mamba2, mamba_pieces
from jpaged.models.mamba_config import PLAIN_MAMBA, MambaOptions, read_mamba_layers
from jpaged.models.norms import RMSNorm
from jpaged.models.states import MambaState

_NAMES = "router.layer.weight", "input_linear.weight", "output_linear.weight"
_NAMES_OF_SWA = "router.weight", "experts.gate_up_proj", "experts.down_proj"
"""What checkpoints call a layer's router, gates and ups, and downs."""


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig, SparseConfig):
    """attention_scale: multiplies the product of query and key. residual_scale: what layers add to the stream.
    scales: of embeddings and logits.
    attention_bias, mlp_bias: which products have biases. mamba: what Mamba-2 layers are like.
    sinks: as of `Attention`. norms_after: what attention and MLP give is normed, too.
    """

    attention_scale: float
    residual_scale: float
    scales: Scales
    attention_bias: bool
    mlp_bias: bool
    mamba: MambaOptions
    sinks: bool = False
    norms_after: bool = False


@dataclass(frozen=True)
class GraniteFamily:
    """One of the architectures. kind: what follows attention, see above. windows: and sinks, as GraniteSWA has them.
    usual: what config.json may leave out.
    """

    model_type: str
    kind: Literal["dense", "hyperclovax", "experts", "shared", "hybrid"]
    windows: bool = False
    usual: Mapping[str, Any] = field(default_factory=dict)

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> GraniteConfig:
        num_experts = 0 if self._is_dense else _num_experts(read)
        read = read.with_defaults(**self.usual)
        shared_size = 0
        if self.kind == "hybrid":
            shared_size = read.integer("shared_intermediate_size", 1024)
            if not num_experts:
                read = read.with_entries(intermediate_size=shared_size)
        elif self.kind == "shared" and read.config.get("shared_intermediate_size"):
            shared_size = read.integer("shared_intermediate_size")
        fields = decoder_fields(read)
        if self.kind == "hybrid" and read.config.get("position_embedding_type") != "rope":
            fields |= {"ropes": (), "layer_ropes": (None,) * fields["num_layers"]}
        mamba = PLAIN_MAMBA
        if self.kind == "hybrid":
            fields["layer_states"], mamba = read_mamba_layers(read, fields["num_layers"])
        if self.windows:
            fields |= _windows_and_ropes(read, fields["num_layers"])
        logits_scaling, attention_scale = read.optional_number("logits_scaling") or 1.0, 1.0
        norms_after = False
        if self.kind == "hyperclovax":
            norms_after, attention_scale = read.flag("use_post_norm", True), fields["head_dim"] ** -0.5
            if norms_after:
                read.refuse(("residual_multiplier", 1.0))
            if read.config.get("attention_multiplier") is None:
                read = read.with_entries(attention_multiplier=attention_scale)
        routing = Routing(per_token=read.integer("num_experts_per_tok", 2) if num_experts else 1)
        if num_experts:
            routing.check(num_experts)
        return GraniteConfig(
            **fields,
            num_experts=num_experts,
            routing=routing,
            expert_size=fields["intermediate_size"] if num_experts else 0,
            shared_size=shared_size if num_experts else 0,
            dense_layers=(not num_experts,) * fields["num_layers"],
            attention_scale=read.number("attention_multiplier", attention_scale),
            residual_scale=read.number("residual_multiplier", 1.0),
            scales=Scales(
                embedding=read.number("embedding_multiplier", 1.0),
                logits=logits_scaling if self.kind == "hyperclovax" else 1 / logits_scaling,
            ),
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=self._is_dense and read.flag("mlp_bias", False),
            mamba=mamba,
            sinks=self.windows,
            norms_after=norms_after,
        )

    @property
    def _is_dense(self) -> bool:
        return self.kind in ("dense", "hyperclovax")

    def module(self, config: GraniteConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def mlp() -> SparseMLP | GatedMLP:
            if config.num_experts:
                return SparseMLP(config, dtype, rngs, collectives)
            return GatedMLP(config, config.activation, dtype, rngs, bias=config.mlp_bias)

        def mixer(layer: int) -> Attention | Mamba2:
            state = config.layer_states[layer]
            if isinstance(state, MambaState):
                hidden, layers, eps = config.hidden_size, config.num_layers, config.norm_eps
                return Mamba2(state, hidden, layers, eps, dtype, rngs, collectives, config.mamba)
            bias, scale = config.attention_bias, config.attention_scale
            options: dict[str, Any] = {"qkv_bias": bias, "output_bias": bias, "sinks": config.sinks}
            return Attention(config, layer, dtype, rngs, scale=scale, **options)

        def block(layer: int) -> SequentialBlock:
            return SequentialBlock(
                mixer(layer),
                mlp(),
                attention_norm=norm(),
                mlp_norm=norm(),
                after_attention=norm() if config.norms_after else None,
                after_mlp=norm() if config.norms_after else None,
                rope=None if config.layer_states[layer] else config.layer_ropes[layer],
                residual_scale=config.residual_scale,
            )

        return Decoder(config, block, norm, dtype, rngs, collectives, scales=config.scales)

    def tensors(self, config: GraniteConfig) -> Iterator[Piece | TiedTensor]:
        hidden, bias = config.hidden_size, config.attention_bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention = f"{ours}.attention"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.attention_norm", hidden)
            state = config.layer_states[i]
            if isinstance(state, MambaState):
                yield from mamba_pieces(f"{theirs}.mamba", attention, hidden, state, config.mamba)
            else:
                yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias)
                yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            if config.sinks:
                yield pieces.as_is(f"{theirs}.self_attn.sinks", f"{attention}.sinks", config.num_heads)
            if config.norms_after:
                yield pieces.norm(f"{theirs}.post_norm1", f"{ours}.after_attention", hidden)
                yield pieces.norm(f"{theirs}.post_norm2", f"{ours}.after_mlp", hidden)
            yield pieces.norm(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm", hidden)
            yield from self._mlp(theirs, f"{ours}.mlp", config)
        yield pieces.norm("model.norm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)

    def _mlp(self, theirs: str, ours: str, config: GraniteConfig) -> Iterator[Piece]:
        hidden, inner = config.hidden_size, config.intermediate_size
        if self._is_dense:
            yield from pieces.gate_and_up(f"{theirs}.mlp", ours, config, bias=config.mlp_bias)
            yield from pieces.linear(f"{theirs}.mlp.down_proj", f"{ours}.down", inner, hidden, bias=config.mlp_bias)
        elif not config.num_experts:
            yield from _shared(f"{theirs}.shared_mlp", ours, hidden, inner)
        else:
            sparse, count, size = f"{theirs}.block_sparse_moe", config.num_experts, config.expert_size
            router, gate_up, down = (f"{sparse}.{name}" for name in (_NAMES_OF_SWA if self.windows else _NAMES))
            yield pieces.transposed(router, f"{ours}.router.gate", hidden, count)
            both, one = (count, 2 * size, hidden), (count, hidden, size)
            split, axes = (count, 2, size, hidden), (0, 3, 1, 2)
            yield Piece(gate_up, both, f"{ours}.experts.gate_up", split, axes)
            yield Piece(down, one, f"{ours}.experts.down", one, (0, 2, 1))
            if config.shared_size:
                yield from _shared(f"{theirs}.shared_mlp", f"{ours}.shared", hidden, config.shared_size)


def _shared(theirs: str, ours: str, hidden: int, inner: int) -> Iterator[Piece]:
    """What checkpoints call a shared MLP, whose gate and up are one tensor, into a `GatedMLP`."""
    split = (2, inner, hidden)
    yield Piece(f"{theirs}.input_linear.weight", (2 * inner, hidden), f"{ours}.gate_up", split, (2, 0, 1))
    yield pieces.transposed(f"{theirs}.output_linear.weight", f"{ours}.down", inner, hidden)


def _num_experts(read: ConfigReader) -> int:
    """0 is a number of experts here."""
    return 0 if read.config.get("num_local_experts") == 0 else read.integer("num_local_experts", 8)


def _windows_and_ropes(read: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Windows in three layers of four, or as config.json says, and a theta for each layer, of which 0 means no RoPE."""
    default = tuple("sliding_attention" if i % 4 else "full_attention" for i in range(num_layers))
    window = read.optional_positive("sliding_window", 128)
    kinds = read.layer_kinds(num_layers) or default
    found: dict[str, Any] = {"layer_windows": tuple(window if one == "sliding_attention" else None for one in kinds)}
    thetas = read.config.get("layer_rope_theta")
    if thetas is None:
        return found
    if not isinstance(thetas, list | tuple) or len(thetas) != num_layers:
        raise CheckpointError(f"config.json: layer_rope_theta must list {num_layers} numbers, got {shown(thetas)}.")
    thetas = [read.with_entries(layer_rope_theta=theta).number("layer_rope_theta", 0.0) for theta in thetas]
    given = read.config.get("rope_scaling") or read.config.get("rope_parameters")
    parameters = given if isinstance(given, Mapping) else {}
    different = sorted({theta for theta in thetas if theta})
    return found | {
        "ropes": tuple(
            decoder_fields(read.with_entries(rope_scaling={**parameters, "rope_theta": theta}))["ropes"][0]
            for theta in different
        ),
        "layer_ropes": tuple(different.index(theta) if theta else None for theta in thetas),
    }


GRANITE = GraniteFamily("granite", "dense")
_USUAL_SWA = {"num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
GRANITE_SWA = GraniteFamily("granite_swa", "dense", windows=True, usual={"tie_word_embeddings": True, **_USUAL_SWA})
HYPERCLOVAX = GraniteFamily("hyperclovax", "hyperclovax")
GRANITE_MOE = GraniteFamily("granitemoe", "experts")
GRANITE_MOE_SHARED = GraniteFamily("granitemoeshared", "shared")
GRANITE_MOE_SWA = GraniteFamily("granitemoe_swa", "shared", windows=True)
GRANITE_HYBRID = GraniteFamily("granitemoehybrid", "hybrid")
