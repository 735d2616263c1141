"""Snapshots of sequences' states, for a prefix cache where layers keep states.

A block holds the keys and values of its own tokens, whoever wrote them. A state holds all tokens before it in one, and
only its latest form is there, in the sequence's slot. So a prompt can go on after cached blocks only where the state
was copied when it stood at their end:

    blocks       [ 7 ][ 1 ][ 4 ][ 9 ][ 3 ]         cached, by name
    snapshots            (0)       (2)             the state after four tokens' blocks is in snapshot 2
    hit          [ 7 ][ 1 ][ 4 ][ 9 ]              four blocks; the slot gets a copy of snapshot 2

A snapshot is named by the digest of the block that it stands behind, and goes with it: when the block loses its name,
the snapshot is free. Else the one that nobody has hit or made for longest gives way. Those of other prefixes of the
same prompt are not refreshed by a hit, so a conversation's earlier turns go first.

It is taken, where `interval` tokens at least are new since the last one of the prompt:

    branch    where a prompt parts from cached blocks that no snapshot stands behind: others will part from them there
    prompt    at the last block boundary before the prompt's end
    answer    at every multiple of `interval` tokens, while a sequence decodes

An answer's tokens are not known when its step is planned. Its snapshots are held for its slot, two at most: the last
one that is known to be right, and one after it. They get their names with the answer's blocks, when it has ended.

Nothing waits for a copy: steps run in the order of their plans. A plan's loads come before its rows and its saves after
them, so a snapshot can be loaded from the next plan on, and be saved anew in the one that loads it.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence

from jpaged.api.errors import EngineDeadError

_DIGEST_BYTES = 32


class StateSnapshots:
    """Which snapshot holds the state after which blocks.

    Args:
        num_snapshots: that there are.
        block_size: tokens in a block.
        interval: new tokens that are worth a snapshot; rounded up to whole blocks.

    Attributes:
        step_id: the step being planned; set by the scheduler.
        interval: in tokens, a multiple of block_size.
    """

    def __init__(self, num_snapshots: int, block_size: int, interval: int) -> None:
        self.num_snapshots = num_snapshots
        self.interval = -(-interval // block_size) * block_size
        self.step_id = 0
        self._block_size = block_size
        self._free = list(range(num_snapshots))[::-1]
        self._named: OrderedDict[bytes, int] = OrderedDict()  # by digest, the least recently used first
        self._saved_in = [-1] * num_snapshots
        self._held: dict[int, list[tuple[int, int]]] = {}  # by slot: (blocks, snapshot), the earlier first
        self._num_held = 0

    @property
    def num_used(self) -> int:
        """Snapshots that hold something."""
        return self.num_snapshots - len(self._free)

    def deepest(self, digests: Sequence[bytes]) -> int:
        """How many of these blocks, of one sequence, stand before the last snapshot that can be loaded; 0 for none."""
        for num_blocks in range(len(digests), 0, -1):
            snapshot = self._named.get(digests[num_blocks - 1])
            if snapshot is not None and self._saved_in[snapshot] < self.step_id:
                return num_blocks
        return 0

    def load(self, digest: bytes) -> int:
        """The snapshot behind the block of this digest, which `deepest` has found; it counts as just used."""
        self._named.move_to_end(digest)
        return self._named[digest]

    def stops(self, num_hits: int, num_matched: int, last: int) -> tuple[int, ...]:
        """Where the chunks of a prompt are to end, in tokens, ascending.

        Args, in blocks:
            num_hits: what it does not compute. num_matched: what would be a hit with a snapshot behind it.
            last: the greatest hit that the prompt itself could have.
        """
        stops, at = [], num_hits
        for num_blocks in (num_matched, last):
            if (num_blocks - at) * self._block_size >= self.interval:
                stops.append(num_blocks * self._block_size)
                at = num_blocks
        return tuple(stops)

    def save(self, digest: bytes) -> int | None:
        """A snapshot to be saved in this plan, behind the block of this digest, which has a name. None if there is one
        already, or none to be had.
        """
        if digest in self._named:
            return None
        snapshot = self._take()
        if snapshot is not None:
            self._named[digest] = snapshot
        return snapshot

    def hold(self, slot: int, num_computed: int, num_known: int) -> int | None:
        """A snapshot to be saved in this plan for a sequence that decodes; None if none is to be had.

        num_computed: tokens after which it stands, whole blocks. num_known: tokens of which the host knows.
        """
        held = self._held.setdefault(slot, [])
        if len(held) == 2:
            if held[1][0] * self._block_size >= num_known:  # it may have ended before that one
                return None
            self._free.append(held.pop(0)[1])
            self._num_held -= 1
        snapshot = self._take() if 2 * (self._num_held + 1) <= self.num_snapshots else None
        if snapshot is not None:
            held.append((num_computed // self._block_size, snapshot))
            self._num_held += 1
        return snapshot

    def leave(self, slot: int, digests: Sequence[bytes], names: Container[bytes]) -> None:
        """The slot's sequence ends or gives way; the last of the snapshots held for it that is right gets its name.

        digests: of its blocks whose tokens the host knows to have been computed. names: of blocks in the prefix cache.
        """
        kept = False
        for num_blocks, snapshot in reversed(self._held.pop(slot, ())):
            self._num_held -= 1
            digest = digests[num_blocks - 1] if num_blocks <= len(digests) else None
            if not kept and digest is not None and digest in names and digest not in self._named:
                self._named[digest] = snapshot
                kept = True
            else:
                self._free.append(snapshot)

    def forget(self, name: bytes) -> None:
        """A block loses its name. Those of several cache groups begin with the same digest."""
        snapshot = self._named.pop(name[:_DIGEST_BYTES], None)
        if snapshot is not None:
            self._free.append(snapshot)

    def check_integrity(self, names: Container[bytes]) -> None:
        """Raises EngineDeadError unless each snapshot is in one place, and stands behind a block with a name.

        names: of blocks in the prefix cache.
        """
        held = [snapshot for of_slot in self._held.values() for _, snapshot in of_slot]
        everywhere = sorted([*self._free, *self._named.values(), *held])
        if everywhere != list(range(self.num_snapshots)) or len(held) != self._num_held:
            raise EngineDeadError(f"Snapshots of states are lost or doubly owned: {everywhere}.")
        if not all(digest in names for digest in self._named):
            raise EngineDeadError("A snapshot of a state stands behind a block that no prefix can hit.")

    def _take(self) -> int | None:
        """A snapshot to be saved in this plan, which it does not save yet: a free one, or the least recently used."""
        snapshot = next((s for s in reversed(self._free) if self._saved_in[s] < self.step_id), None)
        if snapshot is not None:
            self._free.remove(snapshot)
        else:
            old = next((d for d, s in self._named.items() if self._saved_in[s] < self.step_id), None)
            if old is None:
                return None
            snapshot = self._named.pop(old)
        self._saved_in[snapshot] = self.step_id
        return snapshot
