"""GPT-2 (Radford et al. 2019), GPT-Neo (Black et al. 2021) and GPTBigCode (Li et al. 2023, arXiv:2305.06161).

GPT-2       checkpoints keep kernels as [inputs, outputs], and q, k, v in one
GPT-Neo     scores are not scaled; windows in every second layer; q, k, v have no biases
GPTBigCode  one key-value head, or as many as query heads; checkpoints keep q, k, v in one
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.collectives import Collectives
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.family import Attend
from jpaged.models.layers import MLP, Attention, run_layers
from jpaged.models.linear import Embedding
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm
from jpaged.models.parameters import Normal, parameter
from jpaged.models.residual import PLAIN_XLA, Kernels, Stream, begin_stream


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """norm_eps: of all norms. activation: of the MLPs.
    attention_scales: per layer; what multiplies the product of query and key.
    qkv_bias: queries, keys and values have biases.
    """

    norm_eps: float
    activation: str
    attention_scales: tuple[float, ...]
    qkv_bias: bool = True


class GPT2Block(nnx.Module):
    """One layer."""

    def __init__(self, config: GPT2Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, eps, scale = config.hidden_size, config.norm_eps, config.attention_scales[layer]
        self.attention_norm = LayerNorm(hidden, eps, dtype, rngs)
        bias = config.qkv_bias
        self.attention = Attention(config, layer, dtype, rngs, scale=scale, qkv_bias=bias, output_bias=True)
        self.mlp_norm = LayerNorm(hidden, eps, dtype, rngs)
        self.mlp = MLP(config, config.activation, dtype, rngs, bias=True)

    def __call__(self, stream: Stream, attend: Attend) -> None:
        stream.add(self.attention(stream.normed(self.attention_norm), attend, backend=stream.backend))
        stream.add(self.mlp(stream.normed(self.mlp_norm), stream.backend))


class GPT2LMHeadModel(nnx.Module):
    """The arguments are those of `Family.module`."""

    def __init__(self, config: GPT2Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        std = hidden**-0.5
        self.collectives = collectives
        self.embedding = Embedding(vocab, hidden, std, dtype, rngs)
        self.positions = parameter(rngs, Normal(std), (config.max_position_embeddings, hidden), dtype)
        self.layers = nnx.List(GPT2Block(config, layer, dtype, rngs) for layer in range(config.num_layers))
        self.norm = LayerNorm(hidden, config.norm_eps, dtype, rngs)
        self.lm_head = None if config.tie_word_embeddings else Embedding(vocab, hidden, std, dtype, rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | list[Any], kernels: Kernels = PLAIN_XLA
    ) -> jax.Array:
        rows = self.embedding.lookup(tokens, self.collectives)
        stream = begin_stream(rows, self.collectives, kernels, self.positions[...][positions])
        run_layers(self.layers, stream, (), attend)
        return stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return (self.embedding if self.lm_head is None else self.lm_head).logits(hidden)


class GPT2Family:
    """All sizes."""

    model_type = "gpt2"
    base_prefix = "transformer."
    derived_tensors = r"\.attn\.(masked_)?bias$"

    def read_config(self, read: ConfigReader) -> GPT2Config:
        by_layer = read.flag("scale_attn_by_inverse_layer_idx", False)
        return _read_gpt2(read, "gelu_new", scaled_by_layer=by_layer)

    def module(self, config: GPT2Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> GPT2LMHeadModel:
        return GPT2LMHeadModel(config, dtype, rngs, collectives)

    def tensors(self, config: GPT2Config) -> Iterator[Piece | TiedTensor]:
        hidden, inner, heads, dim = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim
        yield pieces.as_is("transformer.wte.weight", "embedding", config.vocab_size, hidden)
        yield pieces.as_is("transformer.wpe.weight", "positions", config.max_position_embeddings, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"transformer.h.{i}", f"layers.{i}"
            yield from pieces.layer_norm(f"{theirs}.ln_1", f"{ours}.attention_norm", hidden)
            attention = f"{theirs}.attn.c_attn"
            split = (3, heads, dim)
            weight_shape, qkv = (hidden, 3 * hidden), f"{ours}.attention.qkv"
            yield Piece(f"{attention}.weight", weight_shape, qkv, (hidden, *split), (0, 2, 1, 3))
            yield Piece(f"{attention}.bias", (3 * hidden,), f"{qkv}_bias", split, (1, 0, 2))
            out = f"{ours}.attention.out"
            yield Piece(f"{theirs}.attn.c_proj.weight", (hidden, hidden), out, (heads, dim, hidden), (0, 1, 2))
            yield pieces.as_is(f"{theirs}.attn.c_proj.bias", f"{out}_bias", hidden)
            yield from pieces.layer_norm(f"{theirs}.ln_2", f"{ours}.mlp_norm", hidden)
            yield pieces.as_is(f"{theirs}.mlp.c_fc.weight", f"{ours}.mlp.up", hidden, inner)
            yield pieces.as_is(f"{theirs}.mlp.c_fc.bias", f"{ours}.mlp.up_bias", inner)
            yield pieces.as_is(f"{theirs}.mlp.c_proj.weight", f"{ours}.mlp.down", inner, hidden)
            yield pieces.as_is(f"{theirs}.mlp.c_proj.bias", f"{ours}.mlp.down_bias", hidden)
        yield from pieces.layer_norm("transformer.ln_f", "norm", hidden)
        if config.tie_word_embeddings:
            yield TiedTensor("lm_head.weight", "transformer.wte.weight")
        else:
            yield pieces.as_is("lm_head.weight", "lm_head", config.vocab_size, hidden)


class GPTBigCodeFamily:
    """StarCoder and SantaCoder."""

    model_type = "gpt_bigcode"
    base_prefix = "transformer."
    derived_tensors = r"\.attn\.(masked_)?bias$"

    def read_config(self, read: ConfigReader) -> GPT2Config:
        return _read_gpt2(read, "gelu_pytorch_tanh", num_kv_heads=1 if read.flag("multi_query", True) else None)

    def module(self, config: GPT2Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> GPT2LMHeadModel:
        return GPT2LMHeadModel(config, dtype, rngs, collectives)

    def tensors(self, config: GPT2Config) -> Iterator[Piece | TiedTensor]:
        is_multi_query = config.num_kv_heads == config.kv_head_copies
        qkv = pieces.joined_qkv if is_multi_query else pieces.grouped_qkv
        return _torch_tensors(config, qkv, "attn.c_attn", "attn.c_proj")


class GPTNeoFamily:
    """All sizes."""

    model_type = "gpt_neo"
    base_prefix = "transformer."
    derived_tensors = r"\.attn\.attention\.(masked_)?bias$"

    def read_config(self, read: ConfigReader) -> GPT2Config:
        read = read.with_other_names(num_heads="num_attention_heads", num_layers="num_hidden_layers")
        hidden_size, num_heads = read.integer("hidden_size", 2048), read.integer("num_heads", 16)
        num_layers, window = read.integer("num_layers", 24), read.integer("window_size", 256)
        return GPT2Config(
            **read.common(),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=divide_into_heads(hidden_size, num_heads),
            intermediate_size=read.integer("intermediate_size", 4 * hidden_size),
            max_position_embeddings=read.integer("max_position_embeddings", 2048),
            layer_windows=tuple(window if is_local else None for is_local in _local_layers(read, num_layers)),
            tie_word_embeddings=read.flag("tie_word_embeddings", True),
            norm_eps=read.number("layer_norm_epsilon", 1e-5),
            activation=read.activation("activation_function", "gelu_new"),
            attention_scales=(1.0,) * num_layers,
            qkv_bias=False,
        )

    def module(self, config: GPT2Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> GPT2LMHeadModel:
        return GPT2LMHeadModel(config, dtype, rngs, collectives)

    def tensors(self, config: GPT2Config) -> Iterator[Piece | TiedTensor]:
        return _torch_tensors(config, pieces.separate_qkv, "attn.attention", "attn.attention.out_proj")


def _torch_tensors(
    config: GPT2Config, qkv: Callable[..., Iterator[Piece]], inputs: str, output: str
) -> Iterator[Piece | TiedTensor]:
    """Of a checkpoint whose layers are torch's, which GPT-2's own is not.

    qkv: what reads attention's inputs. inputs, output: what its tensors are called.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    yield pieces.as_is("transformer.wte.weight", "embedding", config.vocab_size, hidden)
    yield pieces.as_is("transformer.wpe.weight", "positions", config.max_position_embeddings, hidden)
    for i in range(config.num_layers):
        theirs, ours = f"transformer.h.{i}", f"layers.{i}"
        attention, mlp = f"{ours}.attention", f"{ours}.mlp"
        yield from pieces.layer_norm(f"{theirs}.ln_1", f"{ours}.attention_norm", hidden)
        yield from qkv(f"{theirs}.{inputs}", attention, config, bias=config.qkv_bias)
        yield from pieces.output_projection(f"{theirs}.{output}", attention, config, bias=True)
        yield from pieces.layer_norm(f"{theirs}.ln_2", f"{ours}.mlp_norm", hidden)
        yield from pieces.linear(f"{theirs}.mlp.c_fc", f"{mlp}.up", hidden, inner, bias=True)
        yield from pieces.linear(f"{theirs}.mlp.c_proj", f"{mlp}.down", inner, hidden, bias=True)
    yield from pieces.layer_norm("transformer.ln_f", "norm", hidden)
    yield pieces.head("lm_head.weight", "transformer.wte.weight", config)


def _read_gpt2(
    read: ConfigReader, activation: str, *, num_kv_heads: int | None = None, scaled_by_layer: bool = False
) -> GPT2Config:
    """What GPT-2 and GPTBigCode spell alike.

    activation: where config.json has none. num_kv_heads: as many as query heads if None.
    scaled_by_layer: scores are divided by the number of their layer, from 1 on.
    """
    read = read.with_other_names(
        n_embd="hidden_size",
        n_head="num_attention_heads",
        n_layer="num_hidden_layers",
        n_positions="max_position_embeddings",
    )
    hidden_size, num_heads = read.integer("n_embd", 768), read.integer("n_head", 12)
    num_layers, head_dim = read.integer("n_layer", 12), divide_into_heads(hidden_size, num_heads)
    if read.flag("add_cross_attention", False):
        raise UnsupportedModelError("config.json: add_cross_attention=true is not supported.")
    scale = head_dim**-0.5 if read.flag("scale_attn_weights", True) else 1.0
    return GPT2Config(
        **read.common(),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=head_dim,
        intermediate_size=read.integer("n_inner", 4 * hidden_size),
        max_position_embeddings=read.integer("n_positions", 1024),
        tie_word_embeddings=read.flag("tie_word_embeddings", True),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        activation=read.activation("activation_function", activation),
        attention_scales=tuple(scale / (i + 1) if scaled_by_layer else scale for i in range(num_layers)),
    )


def _local_layers(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has a window. "attention_types" has pairs of a list of kinds and how often it is repeated."""
    said = read.config.get("attention_types")
    said = [[["global", "local"], 12]] if said is None else said
    try:
        kinds = [kind for kinds, times in said for kind in list(kinds) * min(times, num_layers + 1)]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or any(kind not in ("global", "local") for kind in kinds):
        raise CheckpointError(
            f"config.json: attention_types must give 'global' or 'local' for {num_layers} layers, got {shown(said)}."
        )
    return tuple(kind == "local" for kind in kinds)
