"""What the families share that are a Llama with experts: Qwen2-MoE, Qwen3-MoE, Mixtral and dots.llm1."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, feed_forward
from jpaged.models.family import Attend
from jpaged.models.layers import Attention, run_layers
from jpaged.models.linear import Embedding
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import RMSNorm
from jpaged.models.residual import PLAIN_XLA, Kernels, Stream, begin_stream
from jpaged.models.rope import Rope, parse_rope


@dataclass(frozen=True, kw_only=True)
class SparseLlamaConfig(SparseConfig):
    """rope: the rotation of queries and keys.
    norm_eps: of all norms.
    qk_norm: queries and keys are RMS-normalised head by head before the rotation.
    qkv_bias, output_bias: which products of attention have biases.
    """

    rope: Rope
    norm_eps: float
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the parts of a sparse layer, behind "model.layers.0."."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


class SparseLlamaBlock(nnx.Module):
    """One layer: attention, and experts or an MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: SparseLlamaConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> None:
        hidden, dim, eps = config.hidden_size, config.head_dim, config.norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype, rngs)
        self.attention = Attention(
            config, layer, dtype, rngs, qkv_bias=config.qkv_bias, output_bias=config.output_bias
        )
        self.query_norm = RMSNorm(dim, eps, dtype, rngs) if config.qk_norm else None
        self.key_norm = RMSNorm(dim, eps, dtype, rngs) if config.qk_norm else None
        self.mlp_norm = RMSNorm(hidden, eps, dtype, rngs)
        self.mlp = feed_forward(config, layer, dtype, rngs, collectives)

    def __call__(self, stream: Stream, cos: jax.Array, sin: jax.Array, attend: Attend) -> None:
        norms = None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)
        stream.add(self.attention(stream.normed(self.attention_norm), attend, (cos, sin), norms))
        stream.add(self.mlp(stream.normed(self.mlp_norm), stream.backend))


class SparseLlamaForCausalLM(nnx.Module):
    """The arguments are those of `Family.module`."""

    def __init__(
        self, config: SparseLlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self.rope = config.rope
        self.collectives = collectives
        self.embedding = Embedding(vocab, hidden, hidden**-0.5, dtype, rngs)
        layers = range(config.num_layers)
        self.layers = nnx.List(SparseLlamaBlock(config, layer, dtype, rngs, collectives) for layer in layers)
        self.norm = RMSNorm(hidden, config.norm_eps, dtype, rngs)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(vocab, hidden, hidden**-0.5, dtype, rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | list[Any], kernels: Kernels = PLAIN_XLA
    ) -> jax.Array:
        stream = begin_stream(self.embedding.lookup(tokens, self.collectives), self.collectives, kernels)
        run_layers(self.layers, stream, self.rope.table(positions), attend)
        return stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return (self.embedding if self.lm_head is None else self.lm_head).logits(hidden)


@dataclass(frozen=True)
class SparseLlamaFamily:
    """One of the architectures. reads: its configuration. names: of its checkpoints' tensors."""

    model_type: str
    reads: Callable[[ConfigReader], SparseLlamaConfig]
    names: Names = Names()

    base_prefix = "model."
    derived_tensors = r"rotary_emb\.inv_freq$"

    def read_config(self, read: ConfigReader) -> SparseLlamaConfig:
        return self.reads(read)

    def module(
        self, config: SparseLlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> SparseLlamaForCausalLM:
        return SparseLlamaForCausalLM(config, dtype, rngs, collectives)

    def tensors(self, config: SparseLlamaConfig) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            yield pieces.as_is(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.scale", hidden)
            yield from pieces.separate_qkv(f"{theirs}.self_attn", f"{ours}.attention", config, bias=config.qkv_bias)
            yield from pieces.output_projection(
                f"{theirs}.self_attn.o_proj", f"{ours}.attention", config, bias=config.output_bias
            )
            if config.qk_norm:
                yield pieces.as_is(f"{theirs}.self_attn.q_norm.weight", f"{ours}.query_norm.scale", config.head_dim)
                yield pieces.as_is(f"{theirs}.self_attn.k_norm.weight", f"{ours}.key_norm.scale", config.head_dim)
            yield pieces.as_is(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.scale", hidden)
            if config.dense_layers[i]:
                yield from _gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            else:
                yield from self._experts(f"{theirs}.{self.names.block}", f"{ours}.mlp", config)
        yield pieces.as_is("model.norm.weight", "norm.scale", hidden)
        if config.tie_word_embeddings:
            yield TiedTensor("lm_head.weight", "model.embed_tokens.weight")
        else:
            yield pieces.as_is("lm_head.weight", "lm_head", config.vocab_size, hidden)

    def _experts(self, theirs: str, ours: str, config: SparseLlamaConfig) -> Iterator[Piece]:
        hidden, names = config.hidden_size, self.names
        yield pieces.transposed(f"{theirs}.gate.weight", f"{ours}.router.gate", hidden, config.num_experts)
        if config.routing.biased:
            correction = f"{theirs}.gate.e_score_correction_bias"
            yield pieces.as_is(correction, f"{ours}.router.correction", config.num_experts)
        yield from pieces.experts(
            f"{theirs}.experts",
            f"{ours}.experts",
            hidden,
            config.expert_size,
            config.num_experts,
            gate=names.gate,
            up=names.up,
            down=names.down,
        )
        if config.shared_size:
            yield from _gated_mlp(f"{theirs}.{names.shared}", f"{ours}.shared", hidden, config.shared_size)
        if config.shared_gate:
            yield pieces.transposed(f"{theirs}.{names.shared}_gate.weight", f"{ours}.shared_gate", hidden, 1)


def _gated_mlp(theirs: str, ours: str, hidden: int, inner: int) -> Iterator[Piece]:
    for slot, name in enumerate(("gate_proj", "up_proj")):
        split, start = (1, inner, hidden), (0, slot, 0)
        yield Piece(f"{theirs}.{name}.weight", (inner, hidden), f"{ours}.gate_up", split, (2, 0, 1), start)
    yield pieces.transposed(f"{theirs}.down_proj.weight", f"{ours}.down", inner, hidden)


def read_fields(
    read: ConfigReader,
    *,
    num_experts: int,
    routing: Routing,
    default_length: int,
    default_theta: float = 10000.0,
    default_head_dim: int | None = None,
) -> dict[str, Any]:
    """What the families spell alike of a `SparseLlamaConfig`.

    Raises:
        CheckpointError: a token is to have more experts than there are, or groups are not equal ones.
    """
    if routing.per_token > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok ({routing.per_token}) must be at most the number of experts"
            f" ({num_experts})."
        )
    if num_experts % routing.groups or not routing.per_token <= routing.kept_groups * (num_experts // routing.groups):
        raise CheckpointError(
            f"config.json: n_group ({routing.groups}) must divide the experts ({num_experts}), and topk_group"
            f" ({routing.kept_groups}) of these groups must have num_experts_per_tok ({routing.per_token}) of them."
        )
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    head_dim = read.head_dim("head_dim", default_head_dim or hidden_size // num_heads)
    stated = {"rope_theta": default_theta} | read.config
    rope, length = parse_rope(stated, head_dim, read.integer("max_position_embeddings", default_length))
    return read.common() | {
        "hidden_size": hidden_size,
        "num_layers": read.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": read.integer("intermediate_size"),
        "max_position_embeddings": length,
        "tie_word_embeddings": read.flag("tie_word_embeddings", False),
        "rope": rope,
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "activation": read.activation("hidden_act", "silu"),
        "num_experts": num_experts,
        "routing": routing,
    }
