"""What recurrent layers keep of a sequence: sizes alone, which configurations and caches share."""

from dataclasses import dataclass, replace
from typing import Self

import jax

from jpaged.api.errors import InvalidParameterError


@dataclass(frozen=True)
class DeltaState:
    """What a gated delta net keeps of a sequence: a matrix for each value head, and the convolution's last inputs.

    matrices   float32 [value_heads, key_dim, value_dim]
    history    [width - 1, channels], of the model's dtype; channels by key head: query, key, its group's values

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
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def num_bytes(self, itemsize: int) -> int:
        """Of one sequence. itemsize: bytes of a number of the model's dtype."""
        matrices = 4 * self.value_heads * self.key_dim * self.value_dim
        return matrices + (self.width - 1) * self.channels * itemsize

    def split(self, channels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[T, channels] -> queries and keys [T, key_heads, key_dim], values [T, value_heads, value_dim]."""
        tokens, size = channels.shape[0], self.key_dim
        by_head = channels.reshape(tokens, self.key_heads, -1)
        values = by_head[..., 2 * size :].reshape(tokens, self.value_heads, self.value_dim)
        return by_head[..., :size], by_head[..., size : 2 * size], values

    def shard(self, shards: int) -> Self:
        """What one of so many shards keeps.

        Raises:
            InvalidParameterError: they do not divide the key heads.
        """
        if self.key_heads % shards:
            fitting = ", ".join(str(n) for n in range(1, self.key_heads + 1) if self.key_heads % n == 0)
            raise InvalidParameterError(
                f"tensor_parallel_size={shards} does not divide the {self.key_heads} key heads of the model's recurrent"
                f" layers; use one of {fitting}."
            )
        return replace(self, key_heads=self.key_heads // shards, value_heads=self.value_heads // shards)
