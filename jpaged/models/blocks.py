"""Layers of attention and MLP between norms, and a decoder of such layers: what most families are.

    sequential   x += after(attention(norm(x)));  x += after(mlp(other_norm(x)))       each norm may be left out
    parallel     x += attention(norm(x)) + mlp(other_norm(x) or the same norm(x))      one sum over shards

A family makes the parts of a layer and gives them to a block:

    def block(layer):
        return SequentialBlock(Attention(config, layer, ...), GatedMLP(config, ...), attention_norm=..., mlp_norm=...)

    Decoder(config, block, norm, dtype, rngs, collectives)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.altup import AltUpStreams
from jpaged.models.collectives import Collectives
from jpaged.models.config import ModelConfig, token_rows
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.experts import SparseMLP
from jpaged.models.family import Attend
from jpaged.models.latent import LatentAttention
from jpaged.models.layer_inputs import LayerInputs
from jpaged.models.layers import MLP, Attention, GatedMLP, run_layers
from jpaged.models.linear import Embedding, PartialSum, Reader, times
from jpaged.models.norms import HeadNorms, Norm
from jpaged.models.recurrence import RecurrentLayer
from jpaged.models.residual import PLAIN_XLA, Kernels, Stream, begin_stream
from jpaged.models.rope import Rope, parse_rope
from jpaged.models.temperature import Temperature


class Places(NamedTuple):
    """What layers read of the tokens' positions.

    rotations: cos and sin, of each of a model's ropes (`Rope.table`).
    temperature: what queries are multiplied by (`Temperature.of`), where the model has one.
    layer_input: what the layer that gets this reads beside the stream, [T, size], where the model has `LayerInputs`.
    """

    rotations: tuple[tuple[jax.Array, jax.Array], ...]
    temperature: jax.Array | None
    layer_input: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """norm_eps: of all norms. activation: of the MLPs.
    ropes: the rotations that layers have. layer_ropes: which of them, for each layer; None for no rotation.
    temperature: of attention, in the layers whose blocks are `tempered`.
    input_size: columns of what each layer reads beside the stream (`LayerInputs`), from a table of `input_vocab` token
        ids; 0 for nothing. input_tokens: `LayerInputs`' num_tokens, where some ids have no row.
    """

    norm_eps: float
    activation: str
    ropes: tuple[Rope, ...] = ()
    layer_ropes: tuple[int | None, ...] = ()
    temperature: Temperature | None = None
    input_size: int = 0
    input_vocab: int = 0
    input_tokens: int | None = None

    def shard(self, shards: int) -> Self:
        """As `ModelConfig.shard`."""
        if shards == 1:
            return self
        return replace(super().shard(shards), input_vocab=token_rows(self.input_vocab, shards))

    @property
    def columns(self) -> tuple[int, ...]:
        """The order of the columns of queries and keys (`Rope.column_order`), equal in all layers."""
        return self.ropes[0].column_order if self.ropes else ()


def decoder_fields(
    read: ConfigReader,
    *,
    default_length: int = 2048,
    head_dim: int | None = None,
    eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    activation: str = "hidden_act",
    default_activation: str = "silu",
    tied: bool = False,
    rope: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields of a `DecoderConfig` as most families spell them, with one rotation for all layers.

    head_dim: where config.json has none; the hidden size divided by the heads if None.
    eps, activation: names of entries. tied: the default of tie_word_embeddings.
    rope: further arguments of `parse_rope`.
    """
    hidden_size, num_layers = read.integer("hidden_size"), read.integer("num_hidden_layers")
    num_heads = read.integer("num_attention_heads")
    if read.config.get("head_dim") is None and head_dim is None:
        head_dim = divide_into_heads(hidden_size, num_heads)
    size = read.head_dim("head_dim", head_dim)
    length = read.integer("max_position_embeddings", default_length)
    rotation, length = parse_rope(read.config, size, length, max_model_len=read.max_model_len, **(rope or {}))
    return read.common() | {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": read.integer("num_key_value_heads", num_heads),
        "head_dim": size,
        "intermediate_size": read.integer("intermediate_size"),
        "max_position_embeddings": length,
        "tie_word_embeddings": read.flag("tie_word_embeddings", tied),
        "norm_eps": read.number(eps, default_eps),
        "activation": read.activation(activation, default_activation),
        "ropes": (rotation,),
        "layer_ropes": (0,) * num_layers,
    }


class SequentialBlock(nnx.Module):
    """Attention, then MLP. Either may be None, in a layer of the other alone.

    attention_norm, mlp_norm: of what they read; None for none.
    after_attention, after_mlp: of what they give, before it is added; None for none.
    query_norm, key_norm, value_norm: of each query, key and value; each only with those before it. head_norms: instead
        of these. See `Attention`.
    rope: which of the rotations; None for none.
    tempered: queries are multiplied by the model's temperature, if it has one.
    residual_scale: multiplies what attention and MLP give.
    """

    def __init__(
        self,
        attention: Attention | LatentAttention | RecurrentLayer | None,
        mlp: MLP | GatedMLP | SparseMLP | None,
        *,
        attention_norm: Norm | None = None,
        mlp_norm: Norm | None = None,
        after_attention: Norm | None = None,
        after_mlp: Norm | None = None,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
        value_norm: Norm | None = None,
        head_norms: HeadNorms | None = None,
        rope: int | None = 0,
        tempered: bool = False,
        residual_scale: float = 1.0,
    ) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = attention_norm, mlp_norm
        self.after_attention, self.after_mlp = after_attention, after_mlp
        self.query_norm, self.key_norm, self.value_norm, self.head_norms = query_norm, key_norm, value_norm, head_norms
        self.rope, self.tempered, self.residual_scale = rope, tempered, residual_scale

    def __call__(self, stream: Stream, places: Places, attend: Attend) -> None:
        self._attend(stream, places, attend)
        self._feed_forward(stream)

    def _attend(self, stream: Stream, places: Places, attend: Attend) -> None:
        if self.attention is not None:
            rotation = None if self.rope is None else places.rotations[self.rope]
            norms = tuple(norm for norm in (self.query_norm, self.key_norm, self.value_norm) if norm is not None)
            read = self._read(stream, self.attention_norm, self.attention)
            tempered = {"temperature": places.temperature} if self.tempered else {}  # recurrent layers take none
            given = self.attention(read, attend, rotation, self.head_norms or norms or None, stream.backend, **tempered)
            self._add(stream, given, self.after_attention)

    def _feed_forward(self, stream: Stream) -> None:
        if self.mlp is not None:
            read = self._read(stream, self.mlp_norm, self.mlp)
            self._add(stream, _given_by(self.mlp, read, stream), self.after_mlp)

    def _read(self, stream: Stream, norm: Norm | None, reader: Reader) -> Any:
        """What a part reads: an array, or `Rows` where it takes them."""
        if norm is None:
            return stream.value()
        return stream.normed_for(reader.rounding(stream.num_rows, stream.backend), norm)

    def _add(self, stream: Stream, part: Any, norm: Norm | None) -> None:
        part = part.times(self.residual_scale)
        if norm is None:
            stream.add(part)
        else:
            stream.add_normed(part, norm)


class ParallelBlock(nnx.Module):
    """Attention and MLP side by side, added to the stream as one sum.

    mlp_norm: of what the MLP reads; the attention's norm if None.
    head_norms, rope: as of `SequentialBlock`.
    mlp_scale: multiplies what the MLP gives.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: MLP | GatedMLP | SparseMLP,
        *,
        attention_norm: Norm,
        mlp_norm: Norm | None = None,
        head_norms: HeadNorms | None = None,
        rope: int | None = 0,
        mlp_scale: float = 1.0,
    ) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm, self.head_norms = attention_norm, mlp_norm, head_norms
        self.rope, self.mlp_scale = rope, mlp_scale

    def __call__(self, stream: Stream, places: Places, attend: Attend) -> None:
        rotation = None if self.rope is None else places.rotations[self.rope]
        normed = stream.normed(self.attention_norm)
        of_mlp = normed if self.mlp_norm is None else stream.normed(self.mlp_norm)
        given = self.attention(normed, attend, rotation, self.head_norms, stream.backend)
        stream.add(given + _given_by(self.mlp, of_mlp, stream).times(self.mlp_scale))


def _given_by(mlp: MLP | GatedMLP | SparseMLP, read: Any, stream: Stream) -> PartialSum:
    """What an MLP or experts give for what they read."""
    if isinstance(mlp, SparseMLP):
        return mlp(read, stream.backend, stream.live, stream.counts)
    return mlp(read, stream.backend)


Block = SequentialBlock | ParallelBlock


class Scales(NamedTuple):
    """Numbers that a decoder multiplies by. embedding: of tokens. logits: of the head.
    softcap: logits then become softcap * tanh(logit / softcap); None for as they are.
    """

    embedding: float = 1.0
    logits: float = 1.0
    softcap: float | None = None


UNSCALED = Scales()


class Decoder(nnx.Module):
    """Embedding, blocks, norm and head.

    block: makes the layer of a number. norm: makes the last norm.
    embedding_norm: of the embeddings, before the first layer (BLOOM).
    streams: makes several residual streams of the embeddings, and one of them at the end (Gemma 3n). What a block finds
        in `Stream`, and leaves there, is then [T, streams, hidden].
    head_bias: of the head, tied or not.
    """

    def __init__(
        self,
        config: DecoderConfig,
        block: Callable[[int], Block],
        norm: Callable[[], Norm],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        collectives: Collectives,
        *,
        scales: Scales = UNSCALED,
        embedding_norm: Norm | None = None,
        streams: AltUpStreams | None = None,
        head_bias: bool = False,
    ) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self.ropes, self.temperature = config.ropes, config.temperature
        self.collectives, self.scales, self.sources = collectives, scales, config.layer_sources
        tied = config.tie_word_embeddings
        self.embedding = Embedding(vocab, hidden, hidden**-0.5, dtype, rngs, bias=head_bias and tied)
        self.embedding_norm, self.streams = embedding_norm, streams
        sizes = config.input_vocab, config.num_layers, config.input_size, hidden
        options: dict[str, Any] = {"num_tokens": config.input_tokens}
        self.inputs = LayerInputs(*sizes, config.norm_eps, dtype, rngs, **options) if config.input_size else None
        self.layers = nnx.List(block(layer) for layer in range(config.num_layers))
        self.norm = norm()
        self.lm_head = None if tied else Embedding(vocab, hidden, hidden**-0.5, dtype, rngs, bias=head_bias)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | list[Any], kernels: Kernels = PLAIN_XLA
    ) -> jax.Array:
        temperature = None if self.temperature is None else self.temperature.of(positions)
        places = Places(tuple(rope.table(positions) for rope in self.ropes), temperature)
        # A shard that does not have a token gives zeros for it, so scaling its part rounds as scaling the whole.
        rows = times(self.embedding.lookup(tokens, self.collectives), self.scales.embedding)
        stream = begin_stream(rows, self.collectives, kernels)
        if self.embedding_norm is not None:
            stream.replace(stream.normed(self.embedding_norm))
        own = None
        if self.inputs is not None:
            of_layers = self.inputs(tokens, stream.value(), self.collectives)
            own = [(places._replace(layer_input=one),) for one in of_layers]
        shared = (places,) if own is None else ()
        if self.streams is not None:
            stream.replace(self.streams.begin(stream.value(), stream.backend))
        run_layers(self.layers, stream, shared, attend, own=own, sources=self.sources)
        if self.streams is not None:
            stream.replace(self.streams.end(stream.value(), stream.backend))
        return stream.normed(self.norm)

    def logits(self, hidden: jax.Array) -> jax.Array:
        logits = (self.embedding if self.lm_head is None else self.lm_head).logits(hidden)
        scaled = logits if self.scales.logits == 1.0 else logits * self.scales.logits
        cap = self.scales.softcap
        return scaled if cap is None else jnp.tanh(scaled / cap) * cap
