"""Where a sequence's tokens are in arrays that hold each sequence in one stretch."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Addresses:
    """How an array of keys, or of values, [tokens, kv_heads, head_dim], is cut into stretches of equal length.

        stretch r    [ page 0: tokens 0 .. n-1 |gap| page 1: tokens n .. 2n-1 |gap| ... ]

    Static, so one argument of a jit.

    num_stretches: in the array.
    pages: of a stretch. page_tokens: of a page. page_stride: entries from one page to the next; where it exceeds
        page_tokens there are gaps, and a stretch is not contiguous.
    """

    num_stretches: int
    pages: int
    page_tokens: int
    page_stride: int

    @property
    def stretch(self) -> int:
        """Entries of a stretch."""
        return self.pages * self.page_stride

    @property
    def num_entries(self) -> int:
        """Of all stretches: what the array has at the least."""
        return self.num_stretches * self.stretch

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.pages * self.page_tokens

    @property
    def has_gaps(self) -> bool:
        return self.page_stride != self.page_tokens

    def entries(self, stretches: jax.Array, positions: jax.Array) -> jax.Array:
        """int32: where the tokens at these positions of these stretches are."""
        page, offset = positions // self.page_tokens, positions % self.page_tokens
        return (stretches * self.pages + page) * self.page_stride + offset
