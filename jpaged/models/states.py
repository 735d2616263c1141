"""What recurrent layers keep of a sequence: sizes alone, which configurations and caches share."""

from dataclasses import dataclass, replace
from math import prod
from typing import Self

import jax

from jpaged.api.errors import InvalidParameterError


class LayerState:
    """What a recurrent layer keeps of a sequence: a matrix for each head, and the last inputs of its convolution.

    matrices   float32 [heads, rows, columns]
    history    [width - 1, channels], of the model's dtype

    A layer may keep only one of the two, or nothing. width: taps of the convolution.
    """

    width: int

    @property
    def matrices(self) -> tuple[int, int, int] | None:
        """The shape of a sequence's; None for none."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Of the convolution."""
        raise NotImplementedError

    @property
    def history(self) -> tuple[int, int] | None:
        """The shape of a sequence's; None for none."""
        return self.width - 1, self.channels

    def num_bytes(self, itemsize: int) -> int:
        """Of one sequence. itemsize: bytes of a number of the model's dtype."""
        wide = 0 if self.matrices is None else 4 * prod(self.matrices)
        return wide + (0 if self.history is None else prod(self.history) * itemsize)

    def shard(self, shards: int) -> Self:
        """What one of so many shards keeps.

        Raises:
            InvalidParameterError: they do not divide the heads.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NoState(LayerState):
    """Of a layer that keeps neither tokens nor a state: one that is only an MLP or experts (Nemotron-H)."""

    @property
    def matrices(self) -> None:
        return None

    @property
    def history(self) -> None:
        return None

    def shard(self, shards: int) -> Self:
        return self


@dataclass(frozen=True)
class ConvolutionState(LayerState):
    """What a gated short convolution keeps of a sequence: the last inputs (LFM2).

    size: channels of the convolution. width: its taps.
    """

    size: int
    width: int

    @property
    def matrices(self) -> None:
        return None

    @property
    def channels(self) -> int:
        return self.size

    def shard(self, shards: int) -> Self:
        _check_divides(shards, self.size, "channels")
        return replace(self, size=self.size // shards)


@dataclass(frozen=True)
class DeltaState(LayerState):
    """What a gated delta net keeps of a sequence.

    matrices   float32 [value_heads, key_dim, value_dim]
    history    channels by key head: query, key, its group's values

    value_heads: a multiple of key_heads; consecutive ones share a key head. width: taps of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def split(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[T, channels] -> queries and keys [T, key_heads, key_dim], values [T, value_heads, value_dim]."""
        tokens, size = channels.shape[0], self.key_dim
        by_head = channels.reshape(tokens, self.key_heads, -1)
        values = by_head[..., 2 * size :].reshape(tokens, self.value_heads, self.value_dim)
        return by_head[..., :size], by_head[..., size : 2 * size], values

    def shard(self, shards: int) -> Self:
        _check_divides(shards, self.key_heads, "key heads")
        return replace(self, key_heads=self.key_heads // shards, value_heads=self.value_heads // shards)


@dataclass(frozen=True)
class MambaState(LayerState):
    """What a Mamba-2 layer keeps of a sequence.

    matrices   float32 [heads, head_dim, state_dim]
    history    channels: the inputs of each head, then b of each group, then c of each group

    groups: of heads that share b and c. group_heads: heads of a group, of all shards together. A shard has some of the
        heads, and computes b and c of all groups: they are few columns, one group's in most models.
    """

    heads: int
    groups: int
    group_heads: int
    head_dim: int
    state_dim: int
    width: int

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_dim

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    @property
    def own_groups(self) -> int:
        """Groups that the heads are of: whole ones, or a part of one."""
        return max(1, self.heads // self.group_heads)

    def split(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[T, channels] -> inputs [T, heads, head_dim], b and c [T, groups, state_dim]."""
        tokens, inner, shared = channels.shape[0], self.heads * self.head_dim, self.groups * self.state_dim
        by_group = tokens, self.groups, self.state_dim
        x, b, c = channels[:, :inner], channels[:, inner : inner + shared], channels[:, inner + shared :]
        return x.reshape(tokens, self.heads, self.head_dim), b.reshape(by_group), c.reshape(by_group)

    def shard(self, shards: int) -> Self:
        _check_divides(shards, self.heads, "heads")
        if self.groups % shards and shards % self.groups:
            fits = [
                n for n in range(1, self.heads + 1) if not (self.heads % n or (self.groups % n and n % self.groups))
            ]
            raise InvalidParameterError(
                f"tensor_parallel_size={shards} neither divides the {self.groups} groups of heads of the model's"
                f" recurrent layers, nor do they divide it; use one of {', '.join(map(str, fits))}."
            )
        return replace(self, heads=self.heads // shards)


def _check_divides(shards: int, heads: int, what: str) -> None:
    if heads % shards:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise InvalidParameterError(
            f"tensor_parallel_size={shards} does not divide the {heads} {what} of the model's recurrent layers; use one"
            f" of {fitting}."
        )
