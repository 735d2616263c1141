"""Small weights in bundles. A call of an executable pays for each argument, so bodies take vectors of a length as one.

    the model's flat tuple      [4096] [4096, 6144] [4096] [4096, 28672] ... [4096]
                                   |                   |                        |
    what a body takes: "large"     |   [4096, 6144]    |   [4096, 28672] ...    |
                       "small"     '--- [n, 4096] -----'------------------------'

Models, `sleep`, `update_weights` and `weights_as` know the flat tuple alone. A bundle is a copy of what is small, made
anew when weights change; a body takes it apart before it calls the model.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.models import Model, Weights

MOST_BYTES = 2**15
"""Of a small weight: a body copies them in each step."""

LEAST_COUNT = 4
"""Of a bundle: to take one apart costs a kernel."""


class Bundles:
    """Which weights of a model are bundled: small vectors, whole on each device, of a length that some others have."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the weights in each bundle."""
        model, found = self._model, defaultdict(list)
        for index, (leaf, axis) in enumerate(zip(model.abstract_weights, model.shard_axes, strict=True)):
            is_whole = axis is None or model.collectives.size == 1
            if is_whole and leaf.ndim == 1 and leaf.size * leaf.dtype.itemsize <= MOST_BYTES:
                found[leaf.shape, leaf.dtype].append(index)
        return tuple(tuple(group) for group in found.values() if len(group) >= LEAST_COUNT)

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """The indices of the other weights."""
        bundled = {index for group in self.groups for index in group}
        return tuple(index for index in range(len(self._model.abstract_weights)) if index not in bundled)

    def shapes(self, weights: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the bundles. weights: of all weights, with their shardings where there are several devices."""
        firsts = [(len(group), weights[group[0]]) for group in self.groups]
        return tuple(
            jax.ShapeDtypeStruct((count, *first.shape), first.dtype, sharding=first.sharding) for count, first in firsts
        )

    def bundled(self, weights: Weights) -> Weights:
        """The bundles, on the devices where the weights are. Put together on the host, which compiles nothing."""
        return tuple(_bundle([weights[index] for index in group]) for group in self.groups)

    def taken_apart(self, large: Sequence[jax.Array], small: Sequence[jax.Array]) -> Weights:
        """The flat tuple, while a program is traced.

        One kernel writes the arrays of a bundle (a second one those beyond the hundred that XLA lets a kernel write),
        and programs are otherwise what they are without bundles. If XLA knew the rows' numbers, each array would be a
        copy of its own. If it could fuse the copies with what reads them, layers would not share kernels any more, and
        rounding could differ.
        """
        found: dict[int, jax.Array] = dict(zip(self.alone, large, strict=True))
        first = lax.optimization_barrier(jnp.int32(0))
        for group, bundle in zip(self.groups, small, strict=True):
            rows = [lax.dynamic_index_in_dim(bundle, first + row, keepdims=False) for row in range(len(group))]
            found |= zip(group, lax.optimization_barrier(rows), strict=True)
        return tuple(found[index] for index in range(len(found)))


def _bundle(arrays: Sequence[jax.Array]) -> jax.Array:
    stacked = np.stack(jax.device_get(arrays))
    return jax.make_array_from_callback(stacked.shape, arrays[0].sharding, lambda index: stacked[index])
