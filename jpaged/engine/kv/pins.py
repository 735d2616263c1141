"""Prefixes that stay in the pool though nobody runs with them.

pin "system"            [ 3 ][ 7 ]             a reference to each block, as a running sequence has
pin "system, example"   [ 3 ][ 7 ][ 9 ]        what begins alike shares blocks, which count once: 3 are pinned
"""

from collections.abc import Iterable

import numpy as np

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.engine.interface import NULL_BLOCK
from jpaged.engine.kv.block_pool import BlockPool


class PinnedPrefixes:
    """Holds references to the blocks of prefixes, by their tokens and salt."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[tuple[str | None, bytes], np.ndarray] = {}

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are pinned."""
        return _num_distinct(self._blocks.values())

    def tables(self) -> list[np.ndarray]:
        """The blocks of each pinned prefix, int32 [n] each."""
        return list(self._blocks.values())

    def pin(self, token_ids: np.ndarray, cache_salt: str | None, num_needed: int) -> int:
        """Pins as many full blocks of a prefix as are in the pool's prefix cache; pinned again, those that are there
        now.

        Args:
            token_ids: int32 [n].
            num_needed: blocks that must be left to others.
        Returns:
            The number of tokens kept.
        Raises:
            InvalidParameterError: there is no prefix cache.
            OutOfMemoryError: fewer blocks would be left; nothing is changed.
        """
        cache, size = self._pool.cache, self._pool.block_size
        if cache is None:
            raise InvalidParameterError("Prefixes are pinned in the prefix cache: set enable_prefix_caching=True.")
        found = cache.match([], token_ids, len(token_ids) // size, cache_salt, use_host=False)
        hits = found[found != NULL_BLOCK]
        key = (cache_salt, token_ids.tobytes())
        others = (block_ids for other, block_ids in self._blocks.items() if other != key)
        left = self._pool.capacity - _num_distinct([*others, hits])
        if left < num_needed:
            raise OutOfMemoryError(
                f"Pinning {len(hits)} blocks leaves {left} of {self._pool.capacity} to others, but {num_needed} are "
                f"needed for one of them to finish; pin a shorter prefix, unpin another, or enlarge the pool."
            )
        self.unpin(token_ids, cache_salt)
        self._pool.share(hits)
        self._blocks[key] = hits
        return found.shape[1] * size

    def unpin(self, token_ids: np.ndarray, cache_salt: str | None) -> bool:
        """Gives a prefix's references back. Returns whether it was pinned."""
        block_ids = self._blocks.pop((cache_salt, token_ids.tobytes()), None)
        if block_ids is not None:
            self._pool.free(block_ids)
        return block_ids is not None

    def unpin_all(self) -> None:
        """Gives all references back."""
        while self._blocks:
            self._pool.free(self._blocks.popitem()[1])


def _num_distinct(tables: Iterable[np.ndarray]) -> int:
    return len(set().union(*(table.tolist() for table in tables)))
