"""Falcon-H1 (TII 2025, arXiv:2507.22448): in every layer a Mamba-2 mixer and attention side by side, then a gated MLP.

    x += mixer(norm(x)) + attention(norm(x));  x += mlp(other_norm(x))

Embeddings, logits, keys, gates and what the parts read and give are multiplied by numbers of config.json.

A layer keeps a state and tokens, too, and so counts as two layers of the `ModelConfig`: a recurrent one, then one of
attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.blocks import DecoderConfig, Scales, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.family import Attend
from jpaged.models.layers import Attention, GatedMLP, run_layers
from jpaged.models.linear import Embedding, PartialSum, Rows, times
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.mamba import Mamba2, mamba_pieces
from jpaged.models.mamba_config import MambaOptions, read_mamba
from jpaged.models.norms import RMSNorm
from jpaged.models.recurrence import Recurrence
from jpaged.models.residual import PLAIN_XLA, Kernels, Stream, begin_stream
from jpaged.models.states import MambaState


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """attention_bias, mlp_bias: which products have biases. mamba: what mixers are like.
    scales: of embeddings and logits. key_scale: of keys. gate_scale: of the MLPs' gates, before the activation.
    attention_scales, mixer_scales: of what a part reads, and of what it gives. mlp_scale: of what MLPs give.
    """

    attention_bias: bool
    mlp_bias: bool
    mamba: MambaOptions
    scales: Scales
    key_scale: float
    gate_scale: float
    attention_scales: tuple[float, float]
    mixer_scales: tuple[float, float]
    mlp_scale: float

    @property
    def mixer_state(self) -> MambaState:
        """What the mixer of each layer keeps."""
        state = self.layer_states[0]
        assert isinstance(state, MambaState)
        return state


class ScaledGatedMLP(GatedMLP):
    """`GatedMLP` whose gate is multiplied by a number before the activation, in XLA. It is not if the number is 1."""

    def __init__(self, config: FalconH1Config, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, config.activation, dtype, rngs, bias=config.mlp_bias)
        self.gate_scale = config.gate_scale

    def __call__(self, x: Rows, backend: str | None = "xla") -> PartialSum:
        if self.gate_scale == 1.0:
            return super().__call__(x, backend)
        both = self.gate_up(x, backend=backend)
        gate, up = both[:, 0].astype(jnp.float32), both[:, 1].astype(jnp.float32)
        return self.down.partial_sum((jax.nn.silu(gate * self.gate_scale) * up).astype(both.dtype), backend)


class Pairs(list[Any]):
    """For `run_layers` what each layer calls, its mixer and its attention, of a list of what the layers of the
    configuration call. A pair is taken when the one before has been put back, since attentions share their pool."""

    def __init__(self, attends: list[Any]) -> None:
        super().__init__([None] * (len(attends) // 2))
        self._attends = attends

    def __getitem__(self, layer: SupportsIndex) -> tuple[Any, Any]:  # type: ignore[override]  # one layer
        first = 2 * int(layer)
        return self._attends[first], self._attends[first + 1]

    def __setitem__(self, layer: SupportsIndex, called: tuple[Any, Any]) -> None:  # type: ignore[override]
        first = 2 * int(layer)
        self._attends[first], self._attends[first + 1] = called


class FalconH1Block(nnx.Module):
    """One layer. number: of its attention among the layers of the configuration."""

    def __init__(
        self, config: FalconH1Config, number: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> None:
        hidden, eps, bias = config.hidden_size, config.norm_eps, config.attention_bias
        scale = config.head_dim**-0.5 * config.key_scale
        self.norm = RMSNorm(hidden, eps, dtype, rngs)
        self.mixer = Mamba2(config.mixer_state, hidden, config.num_layers, eps, dtype, rngs, collectives, config.mamba)
        self.attention = Attention(config, number, dtype, rngs, scale=scale, qkv_bias=bias, output_bias=bias)
        self.mlp_norm = RMSNorm(hidden, eps, dtype, rngs)
        self.mlp = ScaledGatedMLP(config, dtype, rngs)
        self.attention_scales, self.mixer_scales = config.attention_scales, config.mixer_scales
        self.mlp_scale = config.mlp_scale

    def __call__(
        self, stream: Stream, cos: jax.Array, sin: jax.Array, attend: Attend | tuple[Recurrence, Attend]
    ) -> None:
        """attend: one for both parts; or that of the mixer and that of attention."""
        recurrence, attend = attend if isinstance(attend, tuple) else (attend, attend)
        normed, backend = stream.normed(self.norm), stream.backend
        (mixer_in, mixer_out), (attention_in, attention_out) = self.mixer_scales, self.attention_scales
        mixed = self.mixer(times(normed, mixer_in), recurrence, backend=backend).times(mixer_out)
        attended = self.attention(times(normed, attention_in), attend, (cos, sin), backend=backend)
        stream.add(mixed + attended.times(attention_out))
        read = stream.normed_for(self.mlp.rounding(stream.num_rows, backend), self.mlp_norm)
        stream.add(self.mlp(read, backend).times(self.mlp_scale))


class FalconH1ForCausalLM(nnx.Module):
    """The arguments are those of `Family.module`."""

    def __init__(self, config: FalconH1Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        (self.rope,), self.scales, self.collectives = config.ropes, config.scales, collectives
        self.embedding = Embedding(vocab, hidden, hidden**-0.5, dtype, rngs)
        self.layers = nnx.List(
            FalconH1Block(config, number, dtype, rngs, collectives) for number in range(1, config.num_layers, 2)
        )
        self.norm = RMSNorm(hidden, config.norm_eps, dtype, rngs)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(vocab, hidden, hidden**-0.5, dtype, rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | list[Any], kernels: Kernels = PLAIN_XLA
    ) -> jax.Array:
        rows = times(self.embedding.lookup(tokens, self.collectives), self.scales.embedding)
        stream = begin_stream(rows, self.collectives, kernels)
        rotation = self.rope.table(positions)
        run_layers(self.layers, stream, rotation, Pairs(attend) if isinstance(attend, list) else attend)
        return stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return (self.embedding if self.lm_head is None else self.lm_head).logits(hidden) * self.scales.logits


class FalconH1Family:
    """All sizes."""

    model_type = "falcon_h1"
    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$|\.mamba\.mup_vector$"

    def read_config(self, read: ConfigReader) -> FalconH1Config:
        read = read.with_defaults(num_key_value_heads=8)
        fields = decoder_fields(read, default_length=8192, default_eps=1e-5)
        inner = read.optional_positive("mamba_d_ssm", 1024)
        state, options = read_mamba(read, inner or read.integer("mamba_expand", 2) * fields["hidden_size"])
        before = read.flag("mamba_norm_before_gate", True)
        norm: Literal["of gated", "before gate"] | None = "before gate" if before else "of gated"
        gate_scale, mlp_scale = _multipliers(read, "mlp_multipliers", 2)
        layers = fields["num_layers"]
        return FalconH1Config(
            **fields
            | {"num_layers": 2 * layers, "layer_ropes": (None, 0) * layers, "layer_states": (state, None) * layers},
            attention_bias=read.flag("attention_bias", False),
            mlp_bias=read.flag("mlp_bias", False),
            mamba=replace(
                options,
                output_bias=read.flag("projectors_bias", False),
                norm=norm if read.flag("mamba_rms_norm", False) else None,
                multipliers=_multipliers(read, "ssm_multipliers", 5),
            ),
            scales=Scales(embedding=_number(read, "embedding"), logits=_number(read, "lm_head")),
            key_scale=_number(read, "key"),
            gate_scale=gate_scale,
            attention_scales=(_number(read, "attention_in"), _number(read, "attention_out")),
            mixer_scales=(_number(read, "ssm_in"), _number(read, "ssm_out")),
            mlp_scale=mlp_scale,
        )

    def module(
        self, config: FalconH1Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> FalconH1ForCausalLM:
        return FalconH1ForCausalLM(config, dtype, rngs, collectives)

    def tensors(self, config: FalconH1Config) -> Iterator[Piece | TiedTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        bias, mlp_bias = config.attention_bias, config.mlp_bias
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers // 2):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield pieces.norm(f"{theirs}.input_layernorm", f"{ours}.norm", hidden)
            yield from mamba_pieces(f"{theirs}.mamba", f"{ours}.mixer", hidden, config.mixer_state, config.mamba)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", attention, config, bias=bias)
            yield from pieces.output_projection(f"{theirs}.self_attn.o_proj", attention, config, bias=bias)
            yield pieces.norm(f"{theirs}.pre_ff_layernorm", f"{ours}.mlp_norm", hidden)
            yield from pieces.gate_and_up(f"{theirs}.feed_forward", mlp, config, bias=mlp_bias)
            down = f"{theirs}.feed_forward.down_proj"
            yield from pieces.linear(down, f"{mlp}.down", inner, hidden, bias=mlp_bias)
        yield pieces.norm("model.final_layernorm", "norm", hidden)
        yield pieces.head("lm_head.weight", "model.embed_tokens.weight", config)


def _number(read: ConfigReader, of: str) -> float:
    return read.number(f"{of}_multiplier", 1.0)


def _multipliers(read: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    """So many numbers; ones where config.json has none."""
    values = read.config.get(name)
    values = (1.0,) * count if values is None else values
    if not isinstance(values, list | tuple) or len(values) != count:
        raise CheckpointError(f"config.json: {name} must list {count} numbers, got {shown(values)}.")
    return tuple(read.with_entries(**{name: value}).number(name, 1.0) for value in values)
