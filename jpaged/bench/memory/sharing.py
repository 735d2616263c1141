"""How many blocks beams save by sharing: the block pool's share, copy-on-write and free, driven by drawn beams.

    prompt of 40 tokens, blocks of 16, after the first new token of each of two beams:

    beam 0   [ block 1 ][ block 2 ][ block 4: copy of 3, 9 tokens ]
    beam 1   [ block 1 ][ block 2 ][ block 3:            9 tokens ]      6 blocks without sharing, 4 with: 33 % saved

Saved blocks are counted as in the paper's Figure 15: those that sharing spares, of those needed without, summed over
all steps of all requests.

Which beams survive depends on the model's probabilities, which a simulation does not have. Here each beam of a step
continues itself, or, with probability `jump`, is replaced by a child of a beam drawn evenly from all of the group.
Few jumps leave long separate tails, many keep the beams together. `BEAM_JUMP` is the one number fitted, to the three
widths that the paper shows for Alpaca; what ShareGPT saves then follows.
"""

from collections.abc import Sequence

import numpy as np

from jpaged.engine.block_pool import BlockPool

BEAM_JUMP = 0.14


class SharedTables:
    """The block tables of one request's sequences, which begin with the same prompt.

    Args:
        pool: without a prefix cache, large enough.
    """

    def __init__(self, pool: BlockPool, prompt_len: int, num_sequences: int) -> None:
        self._pool = pool
        prompt = pool.allocate(-(-prompt_len // pool.block_size))
        for _ in range(num_sequences - 1):
            pool.share(prompt)
        self._tables = [prompt.tolist() for _ in range(num_sequences)]
        self._num_tokens = prompt_len

    @property
    def tables(self) -> list[np.ndarray]:
        """int32 [blocks] of each sequence."""
        return [np.array(table, np.int32) for table in self._tables]

    @property
    def num_blocks(self) -> int:
        """Blocks that the sequences would take if each had its own."""
        return sum(map(len, self._tables))

    def append(self) -> None:
        """Makes room for one more token of each sequence, copying the last block where it is shared."""
        pool = self._pool
        grows = self._num_tokens % pool.block_size == 0
        for table in self._tables:
            if grows:
                table.append(int(pool.allocate(1)[0]))
            elif pool.ref_count(table[-1]) > 1:
                copy = int(pool.allocate(1)[0])
                pool.free(np.array(table[-1:], np.int32))
                table[-1] = copy
        self._num_tokens += 1

    def reorder(self, parents: Sequence[int]) -> None:
        """Sequence i becomes a fork of what sequence parents[i] is now."""
        old = self.tables
        for parent in parents:
            self._pool.share(old[parent])
        for table in old:
            self._pool.free(table)
        self._tables = [self._tables[parent].copy() for parent in parents]

    def free(self) -> None:
        """Gives all blocks back."""
        for table in self.tables:
            self._pool.free(table)
        self._tables = []


def beam_saving(
    lengths: Sequence[tuple[int, int]], width: int, block_size: int = 16, jump: float = BEAM_JUMP, seed: int = 0
) -> float:
    """The share of blocks that a request's beams save by sharing; without jumps they are samples of one prompt.

    lengths: prompt and output lengths of the requests.
    jump: probability that a beam of a step is replaced by a child of one drawn evenly.
    """
    rng = np.random.default_rng(seed)
    longest = max(prompt_len + output_len for prompt_len, output_len in lengths)
    pool = BlockPool(2 + (width + 1) * (longest // block_size + 2), block_size, enable_prefix_caching=False)
    without = used = 0
    for prompt_len, output_len in lengths:
        group = SharedTables(pool, prompt_len, width)
        jumps = rng.random((output_len, width)) < jump
        parents = np.where(jumps, rng.integers(0, width, jumps.shape), np.arange(width))
        changes = (parents != np.arange(width)).any(axis=1)
        for step in range(output_len):
            if changes[step]:
                group.reorder(parents[step].tolist())
            group.append()
            without += group.num_blocks
            used += pool.num_used
        group.free()
    return 1 - used / without
