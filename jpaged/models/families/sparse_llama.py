"""The Llama family with experts: Mixtral, Qwen2-MoE, Qwen3-MoE, dots.llm1 and GLM-4.5.

They differ in what `SparseLlamaConfig` says (routers, shared experts, dense layers, norms of queries and keys), and in
the names of their checkpoints' tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing, SparseConfig, SparseMLP, feed_forward, sigmoid_routing
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


class SparseLlamaBlock(nnx.Module):
    """One layer: attention, and experts or an MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: SparseLlamaConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> None:
        hidden, dim, eps = config.hidden_size, config.head_dim, config.norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype, rngs)
        self.attention = Attention(config, layer, dtype, rngs, qkv_bias=config.qkv_bias, output_bias=config.output_bias)
        self.query_norm = RMSNorm(dim, eps, dtype, rngs) if config.qk_norm else None
        self.key_norm = RMSNorm(dim, eps, dtype, rngs) if config.qk_norm else None
        self.mlp_norm = RMSNorm(hidden, eps, dtype, rngs)
        self.mlp = feed_forward(config, layer, dtype, rngs, collectives)

    def __call__(self, stream: Stream, cos: jax.Array, sin: jax.Array, attend: Attend) -> None:
        norms = None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)
        read: Any = stream.normed_for(self.attention, self.attention_norm)
        stream.add(self.attention(read, attend, (cos, sin), norms, stream.backend))
        read = stream.normed_for(self.mlp, self.mlp_norm)
        if isinstance(self.mlp, SparseMLP):
            stream.add(self.mlp(read, stream.backend, stream.live, stream.counts))
        else:
            stream.add(self.mlp(read, stream.backend))


class SparseLlamaForCausalLM(nnx.Module):
    """The arguments are those of `Family.module`."""

    def __init__(self, config: SparseLlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
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
    """One of the architectures. reads: its configuration. names, derived_tensors: of its checkpoints' tensors."""

    model_type: str
    reads: Callable[[ConfigReader], SparseLlamaConfig]
    names: pieces.ExpertNames = pieces.USUAL_NAMES
    derived_tensors: str = r"rotary_emb\.inv_freq$"

    base_prefix = "model."

    def read_config(self, read: ConfigReader) -> SparseLlamaConfig:
        return self.reads(read)

    def module(
        self, config: SparseLlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives
    ) -> SparseLlamaForCausalLM:
        return SparseLlamaForCausalLM(config, dtype, rngs, collectives)

    def tensors(self, config: SparseLlamaConfig) -> Iterator[Piece | TiedTensor]:
        hidden, order = config.hidden_size, config.rope.column_order
        yield pieces.as_is("model.embed_tokens.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            yield pieces.as_is(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.scale", hidden)
            attention = f"{theirs}.self_attn"
            biases = {"qkv": config.qkv_bias, "out": config.output_bias}
            yield from pieces.separate_qkv(attention, f"{ours}.attention", config, bias=biases["qkv"], order=order)
            yield from pieces.output_projection(f"{attention}.o_proj", f"{ours}.attention", config, bias=biases["out"])
            for norm in ("query", "key") if config.qk_norm else ():
                scale = pieces.norm(f"{attention}.{norm[0]}_norm", f"{ours}.{norm}_norm", config.head_dim)
                yield replace(scale, order=order)
            yield pieces.as_is(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.scale", hidden)
            if config.dense_layers[i]:
                yield from pieces.gated_mlp(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.intermediate_size)
            else:
                yield from pieces.sparse_mlp(f"{theirs}.{self.names.block}", f"{ours}.mlp", config, self.names)
        yield pieces.as_is("model.norm.weight", "norm.scale", hidden)
        if config.tie_word_embeddings:
            yield TiedTensor("lm_head.weight", "model.embed_tokens.weight")
        else:
            yield pieces.as_is("lm_head.weight", "lm_head", config.vocab_size, hidden)


def _read_mixtral(read: ConfigReader) -> SparseLlamaConfig:
    """Jiang et al. 2024, arXiv:2401.04088: experts of the full inner width in every layer."""
    fields = _fields(
        read,
        num_experts=read.integer("num_local_experts", 8),
        routing=Routing(per_token=read.integer("num_experts_per_tok", 2)),
        default_length=131072,
        default_theta=1e6,
    )
    num_layers = fields["num_layers"]
    window = read.integer("sliding_window") if read.config.get("sliding_window") is not None else None
    return SparseLlamaConfig(
        **fields,
        expert_size=fields["intermediate_size"],
        dense_layers=(False,) * num_layers,
        layer_windows=(window,) * num_layers,
    )


def _read_qwen3_moe(read: ConfigReader) -> SparseLlamaConfig:
    """A window is one of all layers, as in transformers."""
    # transformers 5 writes "num_local_experts" where the published files have "num_experts".
    num_experts = read.integer("num_experts", read.integer("num_local_experts", 128))
    fields = _qwen_fields(read, num_experts, per_token=8, expert_size=768)
    bias = read.flag("attention_bias", False)
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    windows = (window,) * fields["num_layers"]
    return SparseLlamaConfig(**fields, qk_norm=True, qkv_bias=bias, output_bias=bias, layer_windows=windows)


def _read_qwen2_moe(read: ConfigReader) -> SparseLlamaConfig:
    num_experts = read.integer("num_experts", read.integer("num_local_experts", 60))
    fields = _qwen_fields(read, num_experts, per_token=4, expert_size=1408)
    num_layers = fields["num_layers"]
    window = read.optional_positive("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    first = read.number("max_window_layers", 28)
    default = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    kinds = read.layer_kinds(num_layers) or default
    return SparseLlamaConfig(
        **fields,
        qkv_bias=read.flag("qkv_bias", True),
        layer_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        shared_size=read.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )


def _qwen_fields(read: ConfigReader, num_experts: int, *, per_token: int, expert_size: int) -> dict[str, Any]:
    """What both spell alike. A layer has experts if its number, from 1 on, is a multiple of `decoder_sparse_step`, and
    it is none of `mlp_only_layers`, which are counted from 0.

    per_token, expert_size: what holds where config.json leaves it out.
    """
    routing = Routing(
        per_token=read.integer("num_experts_per_tok", per_token),
        renormalized=read.flag("norm_topk_prob", False),
    )
    fields = _fields(read, num_experts=num_experts, routing=routing, default_length=32768)
    step, dense = read.integer("decoder_sparse_step", 1), read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must list layers by number, got {shown(dense)}.")
    layers = range(fields["num_layers"])
    return fields | {
        "expert_size": read.integer("moe_intermediate_size", expert_size),
        "dense_layers": tuple(layer in dense or (layer + 1) % step != 0 for layer in layers),
    }


def _read_dots1(read: ConfigReader) -> SparseLlamaConfig:
    """Huo et al. 2025, arXiv:2506.05767: DeepSeek-V3's router and shared experts, and ordinary attention."""
    routing = sigmoid_routing(read)
    num_experts = read.integer("n_routed_experts")
    fields = _fields(read, num_experts=num_experts, routing=routing, default_length=2048)
    num_layers, expert_size = fields["num_layers"], read.integer("moe_intermediate_size", 1408)
    bias = read.flag("attention_bias", False)
    window, first = read.optional_positive("sliding_window", 4096), read.number("max_window_layers", 62)
    default = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    kinds = read.layer_kinds(num_layers) or default
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("n_shared_experts"),
        dense_layers=tuple(layer < read.number("first_k_dense_replace", 0) for layer in range(num_layers)),
        layer_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _read_glm4_moe(read: ConfigReader) -> SparseLlamaConfig:
    """GLM-4.5 Team 2025, arXiv:2508.06471: as dots.llm1, but half of each head is rotated."""
    routing = sigmoid_routing(read, per_token=8, renormalized=True)
    num_experts = read.integer("n_routed_experts", 128)
    fields = _fields(read, num_experts=num_experts, routing=routing, default_length=131072, rotated_fraction=0.5)
    num_layers, expert_size = fields["num_layers"], read.integer("moe_intermediate_size", 1408)
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * read.integer("n_shared_experts", 1),
        dense_layers=tuple(layer < read.number("first_k_dense_replace", 1) for layer in range(num_layers)),
        qk_norm=read.flag("use_qk_norm", False),
        qkv_bias=read.flag("attention_bias", False),
    )


def _fields(
    read: ConfigReader,
    *,
    num_experts: int,
    routing: Routing,
    default_length: int,
    default_theta: float = 10000.0,
    rotated_fraction: float | None = None,
) -> dict[str, Any]:
    """What the families spell alike of a `SparseLlamaConfig`.

    rotated_fraction: as of `parse_rope`.

    Raises:
        CheckpointError: a token is to have more experts than there are, or groups are not equal ones.
    """
    routing.check(num_experts)
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    head_dim = read.head_dim("head_dim", hidden_size // num_heads)
    stated = {"rope_theta": default_theta, **read.config}
    length = read.integer("max_position_embeddings", default_length)
    rope, length = parse_rope(stated, head_dim, length, rotated_fraction=rotated_fraction)
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


MIXTRAL = SparseLlamaFamily(
    "mixtral", _read_mixtral, pieces.ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
)
QWEN3_MOE = SparseLlamaFamily("qwen3_moe", _read_qwen3_moe)
QWEN2_MOE = SparseLlamaFamily("qwen2_moe", _read_qwen2_moe, pieces.ExpertNames(shared="shared_expert"))
DOTS1 = SparseLlamaFamily("dots1", _read_dots1)
GLM4_MOE = SparseLlamaFamily(
    # One layer more than there are, which predicts a token further; of GLM-4.5-Air and of GLM-4.5 and 4.6.
    *("glm4_moe", _read_glm4_moe),
    derived_tensors=r"rotary_emb\.inv_freq$|^model\.layers\.(46|92)\.",
)
