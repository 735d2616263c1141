"""How many blocks a sequence needs, by what its cache groups keep.

    window 8, blocks of 4, chunks of 8      tokens   0...|4...|8...|12..|16..|20..|24..|
    prompt, second chunk                             [  held  ][  chunk  ]               all of it, or all that is seen
    prompt, third chunk                                   given back [ held  ][ chunk  ]
    decoding token 26                                                     [   ][   ][   ]

A group without a window keeps every block. One with a window keeps what the next query sees, and what the step
computes: while a prompt is computed, in chunks, that is the window and a chunk; afterwards the window and a block.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """What sequences need of a pool.

    block_size: tokens a block holds.
    windows: of each cache group; None for a group that keeps all.
    step_tokens: the most tokens of a sequence that a step computes. tokens_per_row: of one that decodes.
    """

    block_size: int
    windows: tuple[int | None, ...]
    step_tokens: int
    tokens_per_row: int = 1

    def peak(self, window: int | None, start: int, stop: int, step_tokens: int | None = None) -> int:
        """The most blocks that a group holds at once while tokens start .. stop-1 are computed in steps of so many
        tokens, `self.step_tokens` if None.
        """
        if window is None:
            return self._blocks_for(stop)
        step = min(step_tokens or max(self.step_tokens, self.tokens_per_row), stop - start)
        return min(self._blocks_for(stop) - self.first_seen(window, start), self._blocks_for(window - 1 + step) + 1)

    def windowed_peak(self, start: int, stop: int) -> int:
        """`peak` of all groups with a window together."""
        return sum(self.peak(window, start, stop) for window in self.windows if window is not None)

    def first_seen(self, window: int, position: int) -> int:
        """The first block of which the query at this position sees a token."""
        return max(0, position - window + 1) // self.block_size

    def alone(self, prompt_len: int, max_len: int, together: int = 1) -> int:
        """The most blocks that a request needs at once to finish: one of its sequences, or so many that run together,
        which may come to share no more than the full blocks of the prompt.
        """
        shared = prompt_len // self.block_size
        total = 0
        for window in self.windows:
            if window is None:
                total += shared + together * (self._blocks_for(max_len) - shared)
            else:
                decoding = self.peak(window, 0, max_len, step_tokens=self.tokens_per_row)
                # At the fork all but one copy the last block, while the prompt's last chunk is still held.
                total += max(self.peak(window, 0, max_len) + together - 1, together * decoding)
        return total

    def longest(self, num_blocks: int, max_len: int) -> int:
        """Tokens of the longest sequence that finishes with so many blocks, in whole blocks; no more blocks than
        `max_len` tokens take are looked at where there are windows.
        """
        if self.windows == (None,):
            return num_blocks * self.block_size
        low, high = 0, self._blocks_for(max_len)
        while low < high:
            middle = (low + high + 1) // 2
            tokens = middle * self.block_size
            low, high = (middle, high) if self.alone(tokens, tokens) <= num_blocks else (low, middle - 1)
        return low * self.block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
