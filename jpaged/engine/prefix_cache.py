"""Names for full blocks, so that equal prefixes share them.

    tokens     [ the block's first ... ][ the second ...       ]
    digest 0 = sha256(salt, tokens 0)    digest 1 = sha256(digest 0, tokens 1)    ...

A block's digest stands for all tokens up to its end, since its keys and values depend on all of them. What a digest
finds is believed only after its parent and its own tokens have been compared, so a collision is a miss, never a
wrong answer. Requests share blocks only with requests of the same salt.

A block is registered when the step that fills it has been planned: steps run in the order of their plans, and in
every layer a step writes the keys and values of all its rows before any row attends, so whoever hits the block
later, even in the same plan, reads what was written.
"""

import hashlib

import numpy as np

from jpaged.errors import EngineDeadError


def block_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """Names the block of these tokens after the blocks that `parent` names."""
    return hashlib.sha256(parent + token_bytes).digest()


def root_digest(salt: str | None) -> bytes:
    """What stands for the parent of a first block."""
    return b"" if salt is None else salt.encode()


class PrefixCache:
    """Which block holds the keys and values of which tokens.

    It holds no references: a registered block may be in use or free. The pool calls `forget` when it reuses one.

    num_queried_tokens, num_hit_tokens: counted by the scheduler through `count`, once per request.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._digests: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self._registered = np.zeros((num_blocks,), np.bool_)
        self.num_registrations = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __len__(self) -> int:
        """Blocks that can be hit."""
        return len(self._block_of)

    def registered(self) -> np.ndarray:
        """Which blocks a prefix could hit, bool [num_blocks]: a copy."""
        return self._registered.copy()

    def extend_digests(self, digests: list[bytes], token_ids: np.ndarray, num_blocks: int, salt: str | None) -> None:
        """Appends to a sequence's digests until there is one for each of its first `num_blocks` blocks."""
        if len(digests) >= num_blocks:
            return
        parent = digests[-1] if digests else root_digest(salt)
        first = len(digests) * self._block_size
        data = token_ids[first : num_blocks * self._block_size].astype(np.int32, copy=False).tobytes()
        width = 4 * self._block_size
        for at in range(0, len(data), width):
            parent = block_digest(parent, data[at : at + width])
            digests.append(parent)

    def match(self, digests: list[bytes], token_ids: np.ndarray, num_blocks: int, salt: str | None) -> np.ndarray:
        """Finds the longest run of blocks, from the first on, that hold these tokens.

        Args:
            digests: of the sequence's blocks; extended where needed.
            token_ids: int32 [n]; its tokens.
            num_blocks: look at no more blocks than this.

        Returns: int32 [hits]; the block ids.
        """
        self.extend_digests(digests, token_ids, num_blocks, salt)
        found: list[int] = []
        parent = root_digest(salt)
        for digest in digests[:num_blocks]:
            block_id = self._block_of.get(digest)
            if block_id is None or self._parents[block_id] != parent:
                break
            found.append(block_id)
            parent = digest
        block_ids = np.array(found, np.int32)
        wanted = token_ids[: len(found) * self._block_size].reshape(len(found), self._block_size)
        differs = (self._tokens[block_ids] != wanted).any(axis=1)
        return block_ids[: int(differs.argmax())] if differs.any() else block_ids

    def register(
        self,
        digests: list[bytes],
        token_ids: np.ndarray,
        block_ids: np.ndarray,
        start: int,
        stop: int,
        salt: str | None,
    ) -> None:
        """Names blocks start .. stop-1 of a sequence, all full. Where equal content is named already, that stays.

        Args:
            digests: of the sequence's blocks; extended where needed.
            token_ids: int32 [n]; its tokens, at least up to the end of block stop-1.
            block_ids: int32 [m]; its block table.
        """
        if stop <= start:
            return
        self.extend_digests(digests, token_ids, stop, salt)
        parent = digests[start - 1] if start else root_digest(salt)
        new = []
        for index, block_id in enumerate(block_ids[start:stop].tolist(), start):
            digest = digests[index]
            if digest not in self._block_of:
                self._block_of[digest] = block_id
                self._digests[block_id] = digest
                self._parents[block_id] = parent
                new.append(index)
            parent = digest
        named = block_ids[new]
        self._tokens[named] = token_ids[: stop * self._block_size].reshape(stop, self._block_size)[new]
        self._registered[named] = True
        self.num_registrations += len(new)

    def forget(self, block_ids: np.ndarray) -> None:
        """Drops the names of blocks that are about to hold something else."""
        for block_id in block_ids[self._registered[block_ids]].tolist():
            digest = self._digests[block_id]
            if digest is not None:
                del self._block_of[digest]
            self._digests[block_id] = self._parents[block_id] = None
            self._registered[block_id] = False

    def reset(self) -> None:
        """Drops every name; the statistics go on."""
        self.forget(np.flatnonzero(self._registered))

    def count(self, queried_tokens: int, hit_tokens: int) -> None:
        """Adds an admitted request to the hit statistics."""
        self.num_queried_tokens += queried_tokens
        self.num_hit_tokens += hit_tokens

    def check_integrity(self) -> None:
        """Raises EngineDeadError unless names and blocks correspond one to one."""
        named = {block_id: digest for digest, block_id in self._block_of.items()}
        held = {block_id: self._digests[block_id] for block_id in np.flatnonzero(self._registered).tolist()}
        if named != held or len(named) != len(self._block_of):
            raise EngineDeadError("The prefix cache's names and blocks do not correspond.")
