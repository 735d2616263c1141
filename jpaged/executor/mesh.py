"""The devices that one engine runs on, and how its programs and arrays are laid over them.

    one device     programs are plain `jax.jit`; nothing here changes them
    N devices      one mesh axis; a program runs on every device at once inside `shard_map`, on its shard of

                   weights            split as `models.sharding` says
                   KV pool            over the key-value heads (`cache/paged.py`)
                   token counts       over the vocabulary
                   inbox, generations each device's own (`pallas_kernels.all_reduce`)
                   everything else    whole on each: slot state, block tables, sampling parameters, packed buffers

Every shard computes the same slot state from the same sampled tokens, so one block table and one packed buffer serve
all of them.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from jpaged.api.errors import InvalidParameterError, NoDeviceError
from jpaged.executor.jax_settings import default_jax_settings
from jpaged.host.devices import missing_for_gpus, no_device_message, visible_gpus
from jpaged.models import Model
from jpaged.models.sharding import MODEL_AXIS, shard_of, split_over_mesh, stored_weights

Specs = Any
"""A tree of `PartitionSpec`s that is a prefix of a program's results."""

WHOLE = PartitionSpec()
EXCHANGE = PartitionSpec(MODEL_AXIS)
"""Inbox and generations of the one-shot all-reduce, each device's own, side by side."""
TOKEN_COUNTS = PartitionSpec(None, MODEL_AXIS)
"""[slots, vocab]"""

_NO_MESH = Mesh(np.empty((), object), ())


class DeviceMesh:
    """One or more devices. `devices`: in the order of the shards; those of all processes together."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self._mesh = Mesh(np.array(self.devices), (MODEL_AXIS,)) if len(self.devices) > 1 else None

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def key(self) -> tuple[int, ...]:
        """What an executable for these devices, in this process, depends on beside their kind."""
        return (jax.process_index(), *(device.id for device in self.devices))

    @property
    def mesh(self) -> Mesh:
        """The JAX mesh; only of several devices."""
        assert self._mesh is not None
        return self._mesh

    @property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices that this process can reach."""
        return tuple(device for device in self.devices if device.process_index == jax.process_index())

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Within it, what names no device goes to the first of this process's. What the caller has set for code of its
        own does not count: a mesh (`jax.set_mesh`), over which arrays would be spread, and what
        `default_jax_settings` lifts.
        """
        with ExitStack() as settings:
            settings.enter_context(jax.default_device(self.local_devices[0]))
            settings.enter_context(default_jax_settings())
            if not jax.sharding.get_abstract_mesh().empty:
                settings.enter_context(jax.set_mesh(_NO_MESH))
            yield

    def shard_of(self, model: Model) -> Model:
        """What each device runs."""
        return shard_of(model, self.size)

    def weights(self, shard: Model) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The weights' shapes, and their shardings where there are several devices."""
        return shard.abstract_weights if self._mesh is None else stored_weights(shard, self._mesh)

    def split(self, part: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """The array whose shards look like `part`, by the spec of the whole."""
        if self._mesh is None:
            return part
        axis = spec.index(MODEL_AXIS) if MODEL_AXIS in spec else None
        return split_over_mesh(part, axis, self._mesh)

    def jit(
        self, function: Callable[..., Any], args: Sequence[Any], results: Specs, donate: tuple[int, ...] = ()
    ) -> Any:
        """`jax.jit`, on several devices around `shard_map`.

        args: trees of ShapeDtypeStructs; those with a sharding are split by it, the others whole on each device.
        results: how the results are split.
        """
        if self._mesh is None:
            return jax.jit(function, donate_argnums=donate)
        specs = jax.tree.map(lambda leaf: getattr(leaf.sharding, "spec", WHOLE), tuple(args))
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=results, check_vma=False)
        mapped.__name__ = function.__name__
        in_shardings = jax.tree.map(partial(jax.sharding.NamedSharding, self._mesh), specs)
        return jax.jit(mapped, in_shardings=in_shardings, donate_argnums=donate)

    def full(self, leaf: jax.ShapeDtypeStruct, value: int) -> jax.Array:
        """An array of this value everywhere; no device holds more of it than its shard."""
        if self._mesh is None:
            return jnp.full(leaf.shape, value, leaf.dtype)
        return jax.jit(partial(jnp.full, leaf.shape, value, leaf.dtype), out_shardings=leaf.sharding)()

    def joined(self, parts: Sequence[jax.Array], spec: PartitionSpec) -> jax.Array:
        """One array of parts that lie on the devices, in their order; spec: of the whole. All are in this process."""
        if self._mesh is None:
            return parts[0]
        shape = [
            size * (self.size if i < len(spec) and spec[i] == MODEL_AXIS else 1)
            for i, size in enumerate(parts[0].shape)
        ]
        sharding = jax.sharding.NamedSharding(self._mesh, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))

    def whole(self, tree: Any) -> Any:
        """Arrays, each on every device."""
        if self._mesh is None:
            return tree
        sharding = jax.sharding.NamedSharding(self._mesh, WHOLE)
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree)


def pick_devices(tensor_parallel_size: int) -> tuple[jax.Device, ...]:
    """The first devices that JAX shows, of all processes.

    Raises:
        InvalidParameterError: there are fewer. NoDeviceError: there is none of the kind that JAX was told to use.
    """
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts that there is one
        raise NoDeviceError(no_device_message(os.environ, str(error))) from error
    if devices[0].platform == "cpu" and (gpus := visible_gpus(os.environ)):
        warnings.warn(
            f"This machine has {len(gpus)} GPU(s), but JAX runs on the CPU: {missing_for_gpus()}.", stacklevel=2
        )
    if tensor_parallel_size > len(devices):
        raise InvalidParameterError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices, but JAX has"
            f" {len(devices)} ({devices[0].device_kind}); lower it, or make more visible (CUDA_VISIBLE_DEVICES)."
        )
    picked = tuple(devices[:tensor_parallel_size])
    idle = set(range(jax.process_count())) - {device.process_index for device in picked}
    if idle:
        raise InvalidParameterError(
            f"tensor_parallel_size={tensor_parallel_size} leaves process {min(idle)} without a device; raise it to"
            f" {len(devices)}, the devices of all {jax.process_count()} processes, or start fewer."
        )
    return picked


def fewest_anywhere(count: int) -> int:
    """The smallest count that any process has; the same in each."""
    return count if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.array(count)).min())
