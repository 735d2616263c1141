"""What layers call that keep a state of each sequence instead of its tokens.

    x --products--> channels --convolve--> queries, keys, values --gated_delta_rule--> out     `delta_net.GatedDeltaNet`
                                           inputs, b, c          --state_space_dual--> out     `mamba.Mamba2`
                                           out                                                 `families.lfm2`

A `RecurrentLayer` is called as `Attention` is. A `Recurrence` stands where attention has its `Attend`, and knows where
the states are. A family says in `ModelConfig.layer_states` which layers have one.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jpaged.models.family import Attend
from jpaged.models.linear import PartialSum, Reader
from jpaged.models.norms import HeadNorms, Norm
from jpaged.pallas_kernels.gated_delta_rule.reference import gated_delta_sequences
from jpaged.pallas_kernels.short_convolution.reference import convolved_sequences
from jpaged.pallas_kernels.state_space_dual.reference import state_space_sequences


class Recurrence:
    """The contract of what a recurrent layer calls; the caller decides where states live.

    A layer calls `convolve` at most once, and one of the others at most once. T: tokens; other arguments and results
    are as of the ops in `pallas_kernels`.
    """

    def convolve(
        self,
        channels: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
        activation: Literal["silu"] | None = "silu",
    ) -> jax.Array:
        """`short_convolution` of [T, channels]."""
        raise NotImplementedError

    def gated_delta_rule(
        self, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
    ) -> jax.Array:
        """-> [T, heads, value_dim]."""
        raise NotImplementedError

    def state_space_dual(
        self, x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array
    ) -> jax.Array:
        """-> [T, heads, head_dim]."""
        raise NotImplementedError


@dataclass(frozen=True)
class WholeSequences(Recurrence):
    """Over whole sequences, without slots: for training and for tests, as `dense_causal_attend` is.

    segment_ids: int32 [T], as of that; None for one sequence.
    """

    segment_ids: jax.Array | None = None

    def convolve(
        self,
        channels: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
        activation: Literal["silu"] | None = "silu",
    ) -> jax.Array:
        index = jnp.arange(channels.shape[0], dtype=jnp.int32)
        position = index - jax.lax.cummax(jnp.where(self._begins(channels.shape[0]), index, 0))
        return convolved_sequences(channels, kernel, position, bias, activation)

    def gated_delta_rule(
        self, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
    ) -> jax.Array:
        return gated_delta_sequences(q, k, v, log_decay, beta, self._rows(q.shape[0]))

    def state_space_dual(
        self, x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array
    ) -> jax.Array:
        return state_space_sequences(x, dt, a, b, c, d, self._rows(x.shape[0]))

    def _begins(self, tokens: int) -> jax.Array:
        """bool [T]: whether a token is its sequence's first."""
        ids = jnp.zeros((tokens,), jnp.int32) if self.segment_ids is None else self.segment_ids
        return jnp.concatenate([jnp.ones((1,), bool), ids[1:] != ids[:-1]])

    def _rows(self, tokens: int) -> jax.Array:
        return jnp.cumsum(self._begins(tokens), dtype=jnp.int32)


def recurrence_of(attend: Attend | Recurrence) -> Recurrence:
    """What a recurrent layer calls, given what its model was called with."""
    if isinstance(attend, Recurrence):
        return attend
    bound: dict[str, Any] = getattr(attend, "keywords", {})  # of a functools.partial
    return WholeSequences(bound.get("segment_ids"))


class RecurrentLayer(Reader):
    """A layer that keeps a state of each sequence, without the norm before it."""

    def __call__(
        self,
        x: jax.Array,
        attend: Attend | Recurrence,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norms: tuple[Norm, ...] | HeadNorms | None = None,
        backend: str | None = "xla",
    ) -> PartialSum:
        """[T, hidden] -> [T, hidden]; called as `Attention` is.

        attend: a `Recurrence`, or `dense_causal_attend`, for whole sequences. backend: of products (`Linear`).

        Raises:
            ValueError: a rotation or norms are given, of which there are none here.
        """
        if rotation is not None or norms is not None:
            raise ValueError(f"{type(self).__name__} takes no rotation, and no norms of queries and keys.")
        return self.mix(x, recurrence_of(attend), backend)

    def mix(self, x: jax.Array, recurrence: Recurrence, backend: str | None) -> PartialSum:
        """What a call returns."""
        raise NotImplementedError
