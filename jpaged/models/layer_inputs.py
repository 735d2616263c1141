"""Inputs of layers beside the residual stream: embeddings of tokens for each layer (Gemma 3n and 4).

    tokens ---> table [vocab, layers * size] -----+
                                                  +--> [T, size] of each layer     (`LayerInputs`)
    embeddings [T, hidden] ---> product, norm ----+

    norm(product(activation(gate(x)) * input)), added to the stream x              (`LayerInput`)

The table is split over devices as an embedding is, by token id. The products are small and whole on each, so that a
layer's input costs no exchange between devices.
"""

from collections.abc import Iterator
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.collectives import Collectives
from jpaged.models.layers import UNGATED_ACTIVATIONS
from jpaged.models.linear import Embedding, Linear, times
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece
from jpaged.models.norms import Norm, WideRMSNorm
from jpaged.models.residual import Stream


class LayerInputs(nnx.Module):
    """What each layer reads of the tokens.

    vocab_size: of the table, or of a shard's part of it. size: columns of a layer's input.
    hidden_size: columns of the tokens' embeddings. eps: of the norm.
    num_tokens: ids from this one on have no row, and read that of id 0; None where all have one.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        size: int,
        hidden_size: int,
        eps: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        num_tokens: int | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.scale = float(np.asarray(sqrt(size), dtype))  # rounded as transformers rounds it
        self.embedding = Embedding(vocab_size, num_layers * size, size**-0.5, dtype, rngs)
        self.projection = Linear((hidden_size,), (num_layers, size), hidden_size**-0.5, dtype, rngs)
        self.norm = WideRMSNorm(size, eps, dtype, rngs)

    def __call__(self, tokens: jax.Array, embedded: jax.Array, collectives: Collectives) -> jax.Array:
        """int32 tokens [T] and their embeddings [T, hidden], whole ones -> [layers, T, size]."""
        projected = self.projection(embedded)
        of_embeddings = self.norm(times(projected, embedded.shape[-1] ** -0.5))
        known = tokens if self.num_tokens is None else jnp.where(tokens < self.num_tokens, tokens, 0)
        rows = collectives.all_reduce(self.embedding.lookup(known, collectives))
        of_tokens = times(rows, self.scale).reshape(projected.shape)
        return jnp.moveaxis(times(of_embeddings + of_tokens, 2**-0.5), 1, 0)


class LayerInput(nnx.Module):
    """What a layer makes of its input, for the stream. activation: a key of `UNGATED_ACTIVATIONS`."""

    def __init__(
        self, size: int, hidden_size: int, activation: str, norm: Norm, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.activation, self.norm = activation, norm
        self.gate = Linear((hidden_size,), (size,), hidden_size**-0.5, dtype, rngs)
        self.projection = Linear((size,), (hidden_size,), size**-0.5, dtype, rngs)

    def __call__(self, stream: Stream, read: jax.Array) -> None:
        """Adds it to the stream. read: the layer's input, [T, size]."""
        x = stream.value()
        stream.replace(x + self.of(x, read, stream.backend))

    def of(self, x: jax.Array, read: jax.Array, backend: str | None) -> jax.Array:
        """[T, hidden], of x [T, hidden] and the layer's input, [T, size]. backend: of products (`Linear`)."""
        gated = UNGATED_ACTIVATIONS[self.activation](self.gate(x, backend=backend)) * read
        return self.norm(self.projection(gated, backend=backend))


def layer_inputs_pieces(vocab_size: int, num_layers: int, size: int, hidden_size: int) -> Iterator[Piece]:
    """A checkpoint's tensors of a `Decoder`'s `LayerInputs`; sizes as there."""
    width = num_layers * size
    yield pieces.as_is("model.embed_tokens_per_layer.weight", "inputs.embedding", vocab_size, width)
    tensor, split = "model.per_layer_model_projection.weight", (num_layers, size, hidden_size)
    yield Piece(tensor, (width, hidden_size), "inputs.projection", split, (2, 0, 1))
    yield pieces.norm("model.per_layer_projection_norm", "inputs.norm", size)


def layer_input_pieces(theirs: str, ours: str, size: int, hidden_size: int) -> Iterator[Piece]:
    """A checkpoint's tensors of a `LayerInput`. theirs, ours: what the layer is called, and its `LayerInput`."""
    yield pieces.transposed(f"{theirs}.per_layer_input_gate.weight", f"{ours}.gate", hidden_size, size)
    yield pieces.transposed(f"{theirs}.per_layer_projection.weight", f"{ours}.projection", size, hidden_size)
    yield pieces.norm(f"{theirs}.post_per_layer_input_norm", f"{ours}.norm", hidden_size)
