"""Names for full blocks, so that equal prefixes share them.

    tokens     [ the block's first ... ][ the second ...       ]
    digest 0 = sha256(salt, tokens 0)    digest 1 = sha256(digest 0, tokens 1)    ...

A block's digest stands for all tokens up to its end, since its keys and values depend on all of them. What a digest
finds is believed only after its parent and its own tokens have been compared, so a collision is a miss, never a
wrong answer. Requests share blocks only with requests of the same salt.

Where a prompt parts from cached tokens in the middle of a block, the block is copied, and what is equal is kept. To
find such blocks, each block remembers its first child. Further children, and first blocks of prompts, are indexed by
parent and the first half of their tokens. Most blocks have one child, so this costs almost nothing.

Blocks that the pool reuses may go to host memory and be hit there (`host_tier.py`).

Cache groups keep different things of the same tokens, so a block's name is its digest and its group. A hit of so many
tokens needs every block of the groups without a window, and of those with one the last window before its end:

    group 0              [ 7 ][ 1 ][ 4 ][ 9 ]          hit: four blocks
    group 1, window      [ - ][ - ][ 5 ][ 2 ]          what its next query sees is here; the rest need not be

A block is registered when the step that fills it has been planned: steps run in the order of their plans, and in
every layer a step writes the keys and values of all its rows before any row attends, so whoever hits the block
later, even in the same plan, reads what was written.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Container, Iterator

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.interface import NULL_BLOCK, HostCopy
from jpaged.engine.kv.host_tier import HostTier, NamedBlock
from jpaged.engine.kv.snapshots import StateSnapshots

ON_HOST = -1
"""Stands in `PrefixCache.match` for a block that is in host memory only."""

_ABSENT = -2

_NO_BLOCKS = np.zeros((0,), np.int32)

_PARTS_LOOKED_AT = 8
"""Blocks with the same first half that are compared token by token: a popular one costs no more than another."""

_RECENT_BEGINNINGS, _RECENT_PROMPTS = 64, 4
"""First blocks of prompts whose digests are kept, and how many prompts of each."""

_LEAST_BLOCKS, _MOST_BLOCKS = 8, 1024
"""A prompt with fewer blocks is hashed in no time, so its digests are not kept; of a longer one the first are kept."""


def block_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """Names the block of these tokens after the blocks that `parent` names."""
    return hashlib.sha256(parent + token_bytes).digest()


def root_digest(salt: str | None) -> bytes:
    """What stands for the parent of a first block. Its length differs from every digest's, so a salt is never mistaken
    for a block.
    """
    return b"" if salt is None else b"salt" + hashlib.sha256(salt.encode()).digest()


class _RecentPrompts:
    """Digests of prompts that came lately: one that begins like another is hashed from where they part.

    Of prompts with the same first block, by a chat template say, the last few are kept: where many such conversations
    take turns, they are hashed anew.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By salt and first block, the latest last: prompts' tokens, int32 [n], and their digests, the latest last.
        self._latest: OrderedDict[tuple[str | None, bytes], deque[tuple[np.ndarray, list[bytes]]]] = OrderedDict()

    def digests(self, token_ids: np.ndarray, num_blocks: int, salt: str | None) -> list[bytes]:
        """The known digests of the first blocks of these tokens, `num_blocks` at most."""
        key = self._key(token_ids, salt)
        found: list[bytes] = []
        for tokens, known in self._latest.get(key, ()):
            most = min(num_blocks, len(known))
            differs = tokens[: most * self._block_size] != token_ids[: most * self._block_size]
            same = int(differs.argmax()) // self._block_size if differs.any() else most
            if same > len(found):
                found = known[:same]
        if found:
            self._latest.move_to_end(key)
        return found

    def remember(self, token_ids: np.ndarray, digests: list[bytes], salt: str | None) -> None:
        """Keeps the digests of the first of these tokens."""
        if len(digests) < _LEAST_BLOCKS:
            return
        kept = digests[:_MOST_BLOCKS]
        key = self._key(token_ids, salt)
        prompts = self._latest.setdefault(key, deque(maxlen=_RECENT_PROMPTS))
        prompts.append((token_ids[: len(kept) * self._block_size].copy(), kept))
        self._latest.move_to_end(key)
        if len(self._latest) > _RECENT_BEGINNINGS:
            self._latest.popitem(last=False)

    def _key(self, token_ids: np.ndarray, salt: str | None) -> tuple[str | None, bytes]:
        return salt, token_ids[: self._block_size].astype(np.int32, copy=False).tobytes()


class PrefixCache:
    """Which block holds the keys and values of which tokens.

    It holds no references: a registered block may be in use or free. The pool calls `forget` when it reuses one.

    windows: of the cache groups (`CacheGroup.window`).

    step_id: the step being planned; set by the scheduler.
    host: where blocks go that the pool reuses; None where they are just forgotten.
    snapshots: of states behind blocks, where layers keep states; None where none do.
    num_queried_tokens, num_hit_tokens: counted by the scheduler through `count`, once per request.
    num_host_hit_tokens: of the hits, those in host memory.
    num_stateless_tokens: likewise; tokens that were here, but computed anew, since no snapshot stood behind them.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self._block_size = block_size
        self._windows = windows
        # A block's name is its digest and its group's suffix.
        # The names of two groups differ in length, so one is never mistaken for the other.
        self._suffixes = [b"" if group == 0 else group.to_bytes(1, "little") for group in range(len(windows))]
        self._block_of: dict[bytes, int] = {}
        self._digests: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self._registered = np.zeros((num_blocks,), np.bool_)
        self._registered_in = np.zeros((num_blocks,), np.int64)
        self._half = -(-block_size // 2)
        self._following = [NULL_BLOCK] * num_blocks  # believed if the block has this one for its parent
        self._by_half: dict[tuple[bytes, bytes], list[int]] = {}  # by parent and the first half of the tokens
        self._half_keys: list[tuple[bytes, bytes] | None] = [None] * num_blocks
        self._prompts = _RecentPrompts(block_size)
        self.step_id = 0
        self.host: HostTier | None = None
        self.snapshots: StateSnapshots | None = None
        self.num_registrations = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_stateless_tokens = 0

    def __len__(self) -> int:
        """Blocks that can be hit."""
        return len(self._block_of)

    @property
    def names(self) -> Container[bytes]:
        """Of the blocks that can be hit; one of the first cache group is its digest."""
        return self._block_of.keys()

    def are_named(self, block_ids: np.ndarray) -> np.ndarray:
        """Which of these blocks a prefix could hit, bool [n]."""
        named: np.ndarray = self._registered[block_ids]
        return named

    def registered(self) -> np.ndarray:
        """Which blocks a prefix could hit, bool [num_blocks]: a copy."""
        return self._registered.copy()

    def extend_digests(self, digests: list[bytes], token_ids: np.ndarray, num_blocks: int, salt: str | None) -> None:
        """Appends to a sequence's digests until there is one for each of its first `num_blocks` blocks."""
        if len(digests) >= num_blocks:
            return
        is_new = not digests
        if is_new:
            digests.extend(self._prompts.digests(token_ids, num_blocks, salt))
        num_known = len(digests)
        parent = digests[-1] if digests else root_digest(salt)
        first = len(digests) * self._block_size
        data = token_ids[first : num_blocks * self._block_size].astype(np.int32, copy=False).tobytes()
        width = 4 * self._block_size
        for at in range(0, len(data), width):
            parent = block_digest(parent, data[at : at + width])
            digests.append(parent)
        if is_new and num_known < min(len(digests), _MOST_BLOCKS):
            self._prompts.remember(token_ids, digests, salt)

    def match(
        self, digests: list[bytes], token_ids: np.ndarray, num_blocks: int, salt: str | None, use_host: bool = True
    ) -> np.ndarray:
        """Finds the longest beginning of these tokens, in whole blocks, that is here in all groups.

        Args:
            digests: of the sequence's blocks; extended where needed.
            token_ids: int32 [n]; its tokens.
            num_blocks: look at no more blocks than this.
            use_host: whether a block in host memory counts.

        Returns: int32 [groups, hits]; the block ids, ON_HOST for each that is in host memory only, and NULL_BLOCK where
            a group needs none.
        """
        self.extend_digests(digests, token_ids, num_blocks, salt)
        host = self.host if use_host else None
        found: list[np.ndarray] = []
        most = num_blocks
        for group, window in enumerate(self._windows):
            if window is None:
                found.append(self._find(group, digests[:most], token_ids, salt, host, stop_at_absent=True))
                most = min(most, len(found[-1]))
            else:
                found.append(self._find(group, digests[:most], token_ids, salt, host, stop_at_absent=False))
        if len(found) == 1 and self._windows[0] is None:
            return found[0][None]
        return self._longest_of_all(np.stack([of_group[:most] for of_group in found]))

    def match_with_state(
        self, digests: list[bytes], token_ids: np.ndarray, num_blocks: int, salt: str | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `match`, for a sequence whose layers keep states: the longest beginning with a snapshot behind it.

        Returns: its block ids, and those that `match` finds.
        """
        found = matched = self.match(digests, token_ids, num_blocks, salt)
        while self.snapshots is not None:
            longest = self.snapshots.deepest(digests[: found.shape[1]])
            if longest == found.shape[1]:
                break
            if not longest or all(window is None for window in self._windows):
                return found[:, :longest], matched
            found = self.match(digests, token_ids, longest, salt)  # a window needs the blocks before another end
        return found, matched

    def _find(
        self,
        group: int,
        digests: list[bytes],
        token_ids: np.ndarray,
        salt: str | None,
        host: HostTier | None,
        stop_at_absent: bool,
    ) -> np.ndarray:
        """A group's blocks that hold these tokens, int32 [n]: up to the first that is absent, or one for each digest,
        _ABSENT where there is none.
        """
        size, suffix, found = self._block_size, self._suffixes[group], list[int]()
        parent = root_digest(salt) + suffix
        for digest in digests:
            name = digest + suffix
            block_id = self._block_of.get(name)
            if block_id is None or self._parents[block_id] != parent:
                first = len(found) * size
                if host is not None and host.holds(name, parent, token_ids[first : first + size]):
                    block_id = ON_HOST
                elif stop_at_absent:
                    break
                else:
                    block_id = _ABSENT
            found.append(block_id)
            parent = name
        block_ids = np.array(found, np.int32)
        wanted = token_ids[: len(found) * size].reshape(len(found), size)
        differs = (self._tokens[block_ids] != wanted).any(axis=1) & (block_ids > NULL_BLOCK)
        if not differs.any():
            return block_ids
        if stop_at_absent:
            return block_ids[: int(differs.argmax())]
        block_ids[differs] = _ABSENT
        return block_ids

    def _longest_of_all(self, found: np.ndarray) -> np.ndarray:
        """The longest hit, as of `match`, where these are the blocks of each group: int32 [groups, n]."""
        lengths = np.arange(found.shape[1] + 1)
        is_hit = np.ones(lengths.shape, np.bool_)
        for of_group, window in zip(found, self._windows, strict=True):
            if window is not None:
                last_absent = np.maximum.accumulate(np.where(of_group == _ABSENT, lengths[1:], 0))
                is_hit[1:] &= last_absent <= self._first_needed(window, lengths[1:])
        longest = int(np.flatnonzero(is_hit)[-1])
        hits = found[:, :longest].copy()
        for of_group, window in zip(hits, self._windows, strict=True):
            if window is not None:
                of_group[: int(self._first_needed(window, lengths[longest]))] = NULL_BLOCK
        return hits

    def _first_needed(self, window: int, num_blocks: np.ndarray) -> np.ndarray:
        """The first block of which the query after so many blocks sees a token."""
        first: np.ndarray = np.maximum(num_blocks * self._block_size - (window - 1), 0) // self._block_size
        return first

    def match_part(self, parent: bytes, token_ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Finds blocks after `parent` that begin with at least half a block of these tokens, to be copied.

        A copy comes before the step, so blocks that this very step fills do not count.

        Args:
            parent: digest of the blocks before; they have been matched.
            token_ids: int32 [n], n at most a block.
        Returns:
            A block of each group, int32 [groups], and with how many of the tokens all of them begin; none, and 0,
            unless there is one in every group. It is the one with the most equal tokens of those named last.
        """
        if len(token_ids) < self._half:
            return _NO_BLOCKS, 0
        found = []
        for suffix in self._suffixes:
            block_id, same = self._match_part(parent + suffix, token_ids)
            if not same:
                return _NO_BLOCKS, 0
            found.append((block_id, same))
        return np.array([block_id for block_id, _ in found], np.int32), min(same for _, same in found)

    def _match_part(self, parent: bytes, token_ids: np.ndarray) -> tuple[int, int]:
        """As `match_part`, in one group: the block, and how many tokens are equal, 0 for none. parent: a name."""
        half = token_ids[: self._half].tobytes()
        found = self._by_half.get((parent, half), [])[-_PARTS_LOOKED_AT:]
        following = self._following[self._block_of.get(parent, NULL_BLOCK)]
        if self._parents[following] == parent and self._tokens[following, : self._half].tobytes() == half:
            found.append(following)
        if not found:
            return 0, 0
        block_ids = np.array(found, np.intp)
        block_ids = block_ids[self._registered[block_ids] & (self._registered_in[block_ids] < self.step_id)]
        if not len(block_ids):
            return 0, 0
        same = (self._tokens[block_ids, : len(token_ids)] == token_ids).cumprod(axis=1).sum(axis=1)
        best = int(same.argmax())
        return int(block_ids[best]), int(same[best])

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
            block_ids: int32 [groups, m]; its block tables. Where a group has no block, there is nothing to name.
        """
        if stop <= start:
            return
        self.extend_digests(digests, token_ids, stop, salt)
        for suffix, window, table in zip(self._suffixes, self._windows, block_ids, strict=True):
            first = start
            if window is not None:  # what it has given back comes first
                first = stop - int(np.count_nonzero(table[start:stop]))
            parent = (digests[first - 1] if first else root_digest(salt)) + suffix
            names = [digest + suffix for digest in digests[first:stop]]
            tokens = token_ids[: stop * self._block_size].reshape(stop, self._block_size)[first:]
            self._register_group(parent, names, tokens, table[first:stop])

    def _register_group(self, parent: bytes, names: list[bytes], tokens: np.ndarray, block_ids: np.ndarray) -> None:
        """Names consecutive blocks of a group; all of them are there.

        parent: the name of the block before the first. tokens: int32 [n, block_size].
        """
        block_of, parents, following = self._block_of, self._parents, self._following
        before = block_of.get(parent, NULL_BLOCK)
        new: list[int] = []
        others: list[int] = []
        for index, (digest, block_id) in enumerate(zip(names, block_ids.tolist(), strict=True)):
            named = block_of.get(digest)
            if named is None:
                if before and parents[following[before]] != parent:
                    following[before] = block_id
                else:
                    others.append(block_id)
                if (key := self._half_keys[block_id]) is not None:
                    self._unfile(block_id, key)
                block_of[digest] = named = block_id
                self._digests[block_id], parents[block_id], following[block_id] = digest, parent, NULL_BLOCK
                new.append(index)
            parent, before = digest, named
        block_ids = block_ids[new]
        self._tokens[block_ids] = tokens[new]
        for block_id in others:
            self._file(block_id)
        self._registered[block_ids] = True
        self._registered_in[block_ids] = self.step_id
        self.num_registrations += len(new)

    def fetch(
        self, digests: list[bytes], groups: np.ndarray, indices: np.ndarray, block_ids: np.ndarray
    ) -> list[HostCopy]:
        """Copies of blocks in host memory to the pool, for `StepPlan.swap_ins`.

        Args:
            digests: of a sequence's blocks. groups, indices: int64 [n]; which of them, all found in host memory.
            block_ids: int32 [n]; where each is to go.
        """
        if self.host is None:
            return []
        names = [digests[i] + self._suffixes[g] for g, i in zip(groups.tolist(), indices.tolist(), strict=True)]
        return self.host.fetch(names, block_ids)

    def named(self, block_ids: np.ndarray) -> Iterator[NamedBlock]:
        """The blocks among these that have names."""
        for block_id in block_ids[self._registered[block_ids]].tolist():
            digest, parent = self._digests[block_id], self._parents[block_id]
            if digest is not None and parent is not None:
                yield NamedBlock(block_id, digest, parent, self._tokens[block_id].copy())

    def forget(self, block_ids: np.ndarray) -> None:
        """Drops the names of blocks that are about to hold something else."""
        if self.host is not None:
            self.host.evict(self.named(block_ids))
        self.drop(block_ids)

    def drop(self, block_ids: np.ndarray) -> None:
        """Drops the names of blocks whose contents are of no use to anybody. Those without names are passed over."""
        for block_id in block_ids[self._registered[block_ids]].tolist():
            digest = self._digests[block_id]
            if digest is not None:
                del self._block_of[digest]
                if self.snapshots is not None:
                    self.snapshots.forget(digest)
                following = self._following[block_id]
                if self._parents[following] == digest:  # rarely: as a rule it has been reused before
                    self._file(following)
            self._digests[block_id] = self._parents[block_id] = None
            self._registered[block_id] = False

    def reset(self) -> None:
        """Drops every name; the statistics go on."""
        self.forget(np.flatnonzero(self._registered))

    def count(self, queried_tokens: int, hit_tokens: int, host_hit_tokens: int, stateless_tokens: int) -> None:
        """Adds an admitted request to the hit statistics."""
        self.num_stateless_tokens += stateless_tokens
        self.num_queried_tokens += queried_tokens
        self.num_hit_tokens += hit_tokens
        self.num_host_hit_tokens += host_hit_tokens

    def check_integrity(self) -> None:
        """Raises EngineDeadError unless names and blocks correspond one to one."""
        named = {block_id: digest for digest, block_id in self._block_of.items()}
        held = {block_id: self._digests[block_id] for block_id in np.flatnonzero(self._registered).tolist()}
        filed = {block_id: key for key, block_ids in self._by_half.items() for block_id in block_ids}
        kept = {block_id: key for block_id, key in enumerate(self._half_keys) if key is not None}
        noted = {b for a in held if self._parents[b := self._following[a]] == self._digests[a]}
        unfound = held.keys() - filed.keys() - noted
        if named != held or len(named) != len(self._block_of) or filed != kept or unfound:
            raise EngineDeadError("The prefix cache's names and blocks do not correspond.")
        if self.snapshots is not None:
            self.snapshots.check_integrity(self._block_of)

    def _file(self, block_id: int) -> None:
        """Files a block that is not noted with its parent. It stays filed when it is forgotten, which happens in the
        middle of decode steps, until it is named anew.
        """
        key = (self._parents[block_id] or b"", self._tokens[block_id, : self._half].tobytes())
        self._half_keys[block_id] = key
        self._by_half.setdefault(key, []).append(block_id)

    def _unfile(self, block_id: int, key: tuple[bytes, bytes]) -> None:
        self._half_keys[block_id] = None
        filed = self._by_half[key]
        filed.remove(block_id)
        if not filed:
            del self._by_half[key]
