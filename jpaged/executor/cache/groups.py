"""Which layers share block tables, and which array of the pool each layer uses.

    layers  F W F W        group 0: F, layers 0 and 2        group 1: W, layers 1 and 3
    arrays  A0 A1          layer 0 -> (0, A0)   layer 1 -> (1, A0)   layer 2 -> (0, A1)   layer 3 -> (1, A1)

Array k serves the k-th layer of every group. A block belongs to one group while it is held, and it means that block in
every array; so all groups draw on one pool, and memory that one group does not need serves another (the idea of Jenga,
arXiv:2503.18292). Groups have equally many layers: kinds of unequal numbers are cut into groups of the smallest number,
and the last group of a kind may use fewer arrays than there are.
"""

from typing import NamedTuple

from jpaged.api.errors import UnsupportedModelError
from jpaged.engine.interface import CacheGroup
from jpaged.executor.cache.spec import TokenSpec


class Place(NamedTuple):
    """Where a layer keeps its tokens: a group, and an array of the pool."""

    group: int
    array: int


class Grouping(NamedTuple):
    """groups: in the order of their first layers. places: of each layer. num_arrays: layers of the largest group."""

    groups: tuple[CacheGroup, ...]
    places: tuple[Place, ...]
    num_arrays: int


def group_layers(spec: TokenSpec) -> Grouping:
    """Cuts the layers into groups.

    Raises:
        UnsupportedModelError: layers keep keys and values of different shapes or types.
    """
    if len({(layer.kv_heads, layer.head_dim, layer.dtype, layer.value_dim) for layer in spec}) > 1:
        raise UnsupportedModelError(
            "Layers with key-value heads of different numbers, sizes or types cannot share a pool of blocks."
        )
    windows = [layer.window for layer in spec]
    num_arrays = min(windows.count(window) for window in windows)
    groups: list[CacheGroup] = []
    filling: dict[int | None, Place] = {}  # by window: the next free place
    places: list[Place] = []
    for window in windows:
        place = filling.get(window)
        if place is None or place.array == num_arrays:
            place = Place(len(groups), 0)
            groups.append(CacheGroup(window))
        places.append(place)
        filling[window] = place._replace(array=place.array + 1)
    return Grouping(tuple(groups), tuple(places), num_arrays)
