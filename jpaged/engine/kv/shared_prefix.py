"""Which prefix of the running sequences a decode step reads once for many of them: the one that saves most reading.

    slot 0   [ 7 ][ 1 ][ 4 ][ 9 ]          block     7   1   4   9   5   2
    slot 1   [ 7 ][ 1 ][ 4 ][ 5 ]          owners    4   3   3   1   1   1      running sequences that have it
    slot 2   [ 7 ][ 1 ][ 4 ]               depth     1   2   3   4   4   2      blocks up to it, itself included
    slot 3   [ 7 ][ 2 ]                    saving    3   4   6   0   0   0      (owners - 1) * depth, in blocks

The full blocks of its prompt stay in a sequence's table while it runs, and a block is had by none but sequences that
begin with all the tokens up to its end: so those that have block 4 share three blocks. Counts change when sequences
start and end, by array operations on their own blocks. A step looks at one bool a row.
"""

import numpy as np

_STALE = 0.75
"""The share of the greatest saving that the chosen prefix has at least. Only below it are all blocks looked at, so that
of many sequences that end few cause it."""


class SharedPrefixes:
    """Counts who has which block, and knows one whose saving is at least three quarters of the greatest.

    Args:
        block_table: int32 [slots, max_blocks_per_seq]; the slots' own, read here.
        num_blocks: of the pool.
    """

    def __init__(self, block_table: np.ndarray, num_blocks: int) -> None:
        self._block_table = block_table
        self._num_counted = np.zeros((len(block_table),), np.int64)
        self._owners = np.zeros((num_blocks,), np.int64)
        self._depth = np.zeros((num_blocks,), np.int64)
        self._has_best = np.zeros((len(block_table),), np.bool_)
        self._best = 0  # the null block, which saves nothing, if nothing is shared
        self._most_saved = 0  # by the best ones since all were looked at: no other block can save more

    def add(self, slot: int, num_blocks: int) -> None:
        """A sequence has taken the slot; so many blocks at the beginning of its table are full ones of its prompt."""
        if not num_blocks:
            return
        block_ids = self._block_table[slot, :num_blocks]
        self._num_counted[slot] = num_blocks
        self._owners[block_ids] += 1
        self._depth[block_ids] = np.arange(1, num_blocks + 1)
        savings = self._savings(block_ids)
        deepest = int(savings.argmax())
        if savings[deepest] > self._savings(self._best):
            self._choose(int(block_ids[deepest]))
        else:
            self._has_best[slot] = self._have_best(slot)
        self._most_saved = max(self._most_saved, int(self._savings(self._best)))

    def add_fork(self, parent: int, child: int) -> None:
        """The child's table has become the parent's. A beam's that goes on from another changes behind the prompt only,
        and is counted already.
        """
        if not self._num_counted[child]:
            self.add(child, int(self._num_counted[parent]))

    def remove(self, slot: int) -> None:
        """The sequence leaves the slot, whose table is as it was."""
        self._owners[self._block_table[slot, : self._num_counted[slot]]] -= 1
        self._num_counted[slot] = 0
        self._has_best[slot] = False
        if self._savings(self._best) < _STALE * self._most_saved:
            self._choose(int(self._savings(slice(None)).argmax()))
            self._most_saved = int(self._savings(self._best))

    def group(self, rows: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Puts rows that share the chosen prefix first.

        Args:
            rows: int64 [r]; slots.
        Returns:
            The rows, how many of them share, and how many blocks; as they are, 0 and 0 if no two of them do.
        """
        shares = self._has_best[rows]
        num_sharing = int(np.count_nonzero(shares))
        if num_sharing < 2:
            return rows, 0, 0
        return np.concatenate([rows[shares], rows[~shares]]), num_sharing, int(self._depth[self._best])

    def _savings(self, block_ids: int | slice | np.ndarray) -> np.ndarray:
        """Blocks that need not be read; negative for a block that nobody has any more."""
        return (self._owners[block_ids] - 1) * self._depth[block_ids]

    def _choose(self, block_id: int) -> None:
        self._best = block_id
        self._has_best[:] = self._have_best(slice(None))

    def _have_best(self, slots: int | slice) -> np.ndarray:
        depth = int(self._depth[self._best])
        if not depth:
            return np.zeros_like(self._has_best[slots])
        return (self._num_counted[slots] >= depth) & (self._block_table[slots, depth - 1] == self._best)
