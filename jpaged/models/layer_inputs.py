"""Inputs of layers beside the residual stream: embeddings of tokens for each layer (Gemma 3n and 4).

    tokens ---> table [vocab, layers * size] -----+
                                                  +--> [T, size] of each layer     (`LayerInputs`)
    embeddings [T, hidden] ---> product, norm ----+

    x + norm(product(activation(gate(x)) * input))                                 (`LayerInput`)

The table is split over devices as an embedding is, by token id. The products are small and whole on each, so that a
layer's input costs no exchange between devices.
"""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.collectives import Collectives
from jpaged.models.layers import UNGATED_ACTIVATIONS
from jpaged.models.linear import Embedding, Linear, times
from jpaged.models.norms import Norm, WideRMSNorm
from jpaged.models.residual import Stream


class LayerInputs(nnx.Module):
    """What each layer reads of the tokens.

    vocab_size: of the table, or of a shard's part of it. size: columns of a layer's input.
    hidden_size: columns of the tokens' embeddings. eps: of the norm.
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
    ) -> None:
        self.scale = float(np.asarray(sqrt(size), dtype))  # rounded as transformers rounds it
        self.embedding = Embedding(vocab_size, num_layers * size, size**-0.5, dtype, rngs)
        self.projection = Linear((hidden_size,), (num_layers, size), hidden_size**-0.5, dtype, rngs)
        self.norm = WideRMSNorm(size, eps, dtype, rngs)

    def __call__(self, tokens: jax.Array, embedded: jax.Array, collectives: Collectives) -> jax.Array:
        """int32 tokens [T] and their embeddings [T, hidden], whole ones -> [layers, T, size]."""
        projected = self.projection(embedded)
        of_embeddings = self.norm(times(projected, embedded.shape[-1] ** -0.5))
        rows = collectives.all_reduce(self.embedding.lookup(tokens, collectives))
        of_tokens = times(rows, self.scale).reshape(projected.shape)
        return jnp.moveaxis(times(of_embeddings + of_tokens, 2**-0.5), 1, 0)


class LayerInput(nnx.Module):
    """Adds what a layer makes of its input to the stream. activation: a key of `UNGATED_ACTIVATIONS`."""

    def __init__(
        self, size: int, hidden_size: int, activation: str, norm: Norm, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.activation, self.norm = activation, norm
        self.gate = Linear((hidden_size,), (size,), hidden_size**-0.5, dtype, rngs)
        self.projection = Linear((size,), (hidden_size,), size**-0.5, dtype, rngs)

    def __call__(self, stream: Stream, read: jax.Array) -> None:
        """read: the layer's input, [T, size]."""
        x, backend = stream.value(), stream.backend
        gated = UNGATED_ACTIVATIONS[self.activation](self.gate(x, backend=backend)) * read
        stream.replace(x + self.norm(self.projection(gated, backend=backend)))
