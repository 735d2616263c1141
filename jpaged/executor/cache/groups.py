"""Which layers share block tables, and which part of which array of the pool each layer uses.

    layers  F W F W        group 0: F, layers 0 and 2        group 1: W, layers 1 and 3
    arrays  A0 A1          layer 0 -> (0, A0)   layer 1 -> (1, A0)   layer 2 -> (0, A1)   layer 3 -> (1, A1)

Array k serves the k-th layer of every group. A block belongs to one group while it is held, and it means that block in
every array; so all groups draw on one pool, and memory that one group does not need serves another (the idea of Jenga,
arXiv:2503.18292). Groups have equally many layers: kinds of unequal numbers are cut into groups of the smallest number,
and the last group of a kind may use fewer arrays than there are.

Where a token takes more memory in one kind of layer than in another, an array's block is as large as that of the larger
one, and has several layers of the smaller one side by side, its parts:

    layers  F w w F w w    F takes 2 units a token, w takes 1        group 0: F, layers 0 and 3      group 1: all w
    arrays  A0 A1          layer 1 -> (1, A0, part 0)   layer 2 -> (1, A0, part 1)   layer 4 -> (1, A1, part 0)   ...

A layer that reads what another keeps is in that one's place, and takes nothing.
"""

from math import lcm, prod
from typing import NamedTuple

from jpaged.api.errors import UnsupportedModelError
from jpaged.engine.interface import CacheGroup
from jpaged.executor.cache.spec import LayerCache, TokenSpec

_MOST_PARTS = 64
"""Layers of one array. Sizes that need more have hardly a common divisor."""


class Place(NamedTuple):
    """Where a layer keeps its tokens: a group, an array of the pool, and which of the `parts` of its blocks."""

    group: int
    array: int
    part: int = 0
    parts: int = 1


class Grouping(NamedTuple):
    """groups: in the order of their first layers. places: of each layer. num_arrays: of the pool."""

    groups: tuple[CacheGroup, ...]
    places: tuple[Place, ...]
    num_arrays: int


def group_layers(spec: TokenSpec) -> Grouping:
    """Cuts the layers into groups.

    Raises:
        UnsupportedModelError: layers keep keys and values of different types, or of sizes that no block fits.
    """
    if len({(layer.dtype, layer.value_dim) for layer in spec}) > 1:
        raise UnsupportedModelError("Layers with keys and values of different types cannot share a pool of blocks.")
    keeping = [_kind(layer) for layer in spec if layer.source is None]
    whole = lcm(*(kind.token_size for kind in keeping))
    parts = {kind: whole // kind.token_size for kind in keeping}
    if max(parts.values()) > _MOST_PARTS:
        raise UnsupportedModelError(
            f"Layers with {', '.join(str(size) for size in sorted({kind.token_size for kind in keeping}))} numbers a"
            f" token cannot share a pool of blocks: {_MOST_PARTS} of the smallest are no multiple of all."
        )
    num_arrays = min(-(-keeping.count(kind) // parts[kind]) for kind in parts)
    groups: list[CacheGroup] = []
    filling: dict[_Kind, Place] = {}  # the next free place
    places: list[Place] = []
    for layer in spec:
        if layer.source is not None:
            places.append(places[layer.source])
            continue
        kind = _kind(layer)
        place = filling.get(kind)
        if place is None or place.array == num_arrays:
            place = Place(len(groups), 0, 0, parts[kind])
            groups.append(CacheGroup(layer.window))
        places.append(place)
        filling[kind] = _after(place)
    return Grouping(tuple(groups), tuple(places), num_arrays)


class _Kind(NamedTuple):
    """What layers of a group have in common. block: of one token."""

    window: int | None
    block: tuple[int, ...]

    @property
    def token_size(self) -> int:
        """Numbers that a token takes."""
        return prod(self.block)


def _kind(layer: LayerCache) -> _Kind:
    return _Kind(layer.window, layer.block(1))


def _after(place: Place) -> Place:
    """The place behind one, in its group; an array that there is not behind the last."""
    if place.part + 1 < place.parts:
        return place._replace(part=place.part + 1)
    return place._replace(array=place.array + 1, part=0)
