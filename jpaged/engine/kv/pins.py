"""Prefixes that stay in the pool though nobody runs with them.

pin "system"            [ 3 ][ 7 ]             a reference to each block, as a running sequence has
pin "system, example"   [ 3 ][ 7 ][ 9 ]        what begins alike shares blocks, which count once: 3 are pinned

In a cache group with a window, a hit of n blocks needs only the last window before its end, so where it begins depends
on n. A pin of n blocks keeps what hits of n, n - 1 and n - 2 blocks need. The pinned prompt itself then hits, whose
last token is always computed; so does one that parts from it in its last block, or ends a block before it:

    group with a window of 8 tokens, blocks of 4
    a hit of 5 blocks needs    [ - ][ - ][ - ][ 6 ][ 2 ]        prompts that go on after the pin
    a hit of 4 blocks needs    [ - ][ - ][ 5 ][ 6 ]             the pinned prompt
    a hit of 3 blocks needs    [ - ][ 9 ][ 5 ]                  the pinned prompt, a block shorter
    pinned                     [ - ][ 9 ][ 5 ][ 6 ][ 2 ]
"""

from collections.abc import Iterable

import numpy as np

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.engine.interface import NULL_BLOCK
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.prefix_cache import PrefixCache

_SHORTER_HITS = 2
"""How many blocks a hit may be shorter than the pin and still find all that it needs."""


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

    def pin(self, token_ids: np.ndarray, cache_salt: str | None, num_available: int, num_needed: int) -> int:
        """Pins as many full blocks of a prefix as are in the pool's prefix cache; pinned again, those that are there
        now.

        Args:
            token_ids: int32 [n].
            num_available: blocks that are free and reserved for nobody; a pin takes no others of the free ones.
            num_needed: blocks that must be left to others in the end.
        Returns:
            The number of tokens kept.
        Raises:
            InvalidParameterError: there is no prefix cache.
            OutOfMemoryError: fewer blocks would be left, or more would be taken; nothing is changed.
        """
        cache = self._pool.cache
        if cache is None:
            raise InvalidParameterError("Prefixes are pinned in the prefix cache: set enable_prefix_caching=True.")
        found = self._blocks_to_pin(cache, token_ids, cache_salt)
        hits = found[found != NULL_BLOCK]
        key = (cache_salt, token_ids.tobytes())
        others = (block_ids for other, block_ids in self._blocks.items() if other != key)
        left = self._pool.capacity - _num_distinct([*others, hits])
        if left < num_needed:
            raise OutOfMemoryError(
                f"Pinning {len(hits)} blocks leaves {left} of {self._pool.capacity} to others, but {num_needed} are "
                f"needed for one of them to finish; pin a shorter prefix, unpin another, or enlarge the pool."
            )
        num_taken = self._pool.num_unreferenced(hits)
        if num_taken > num_available:
            raise OutOfMemoryError(
                f"Pinning takes {num_taken} free blocks, but all except {num_available} are reserved for prompts that "
                f"are being computed; pin again when they have been, or enlarge the pool."
            )
        self._pool.share(hits)
        self.unpin(token_ids, cache_salt)
        self._blocks[key] = hits
        return found.shape[1] * self._pool.block_size

    def _blocks_to_pin(self, cache: PrefixCache, token_ids: np.ndarray, cache_salt: str | None) -> np.ndarray:
        """The blocks of the longest hit and of those a little shorter, int32 [groups, hits]; NULL_BLOCK where none of
        them needs one.
        """
        digests: list[bytes] = []
        most = len(token_ids) // self._pool.block_size
        found = cache.match(digests, token_ids, most, cache_salt, use_host=False)
        longest = found.shape[1]
        for num_blocks in range(longest - 1, max(longest - _SHORTER_HITS, 1) - 1, -1):
            shorter = cache.match(digests, token_ids, num_blocks, cache_salt, use_host=False)
            if shorter.shape[1] == num_blocks:
                found[:, :num_blocks] = np.maximum(found[:, :num_blocks], shorter)
        return found

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
