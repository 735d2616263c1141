"""Room for a KV pool in memory that loading and compiling have left in pieces.

While weights are loaded, rounded or drawn, products are tried out beside them, and what is temporary then leaves holes
below weights that stay. The pool's arrays are gigabytes each and fill the memory to some 0.5 GiB, so holes of more than
that can keep the last of them out. Weights are moved together then, by way of the free memory behind them:

    | w0 |    | w1 |  | w2 |              free                 |
    | w0 |####| w1 |##| w2 |                                   |     plugs fill the holes,
    | w0 |####| w1 |##| w2 | w0 | w1 | w2 |                    |     so that copies go behind,
    |                      | w0 | w1 | w2 |                    |
    | w0 | w1 | w2 |                                           |     and copies of these to the beginning

JAX's allocator (BFC) puts an array into the smallest free piece that takes it, at its beginning, and gives it all of a
piece that is not much larger.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.api.config import EngineArgs
from jpaged.api.errors import OutOfMemoryError
from jpaged.executor.start.memory import allocates_on_demand
from jpaged.executor.step.held import Held
from jpaged.models import Weights

log = logging.getLogger("jpaged.startup")

T = TypeVar("T")

_LARGEST_PLUG, _SMALLEST_PLUG = 2**30, 2**20


def with_room(make: Callable[[Weights], Held], weights: Weights, pool_bytes: int, args: EngineArgs) -> Held:
    """What a runner begins with, on the device.

    Args:
        make: makes it of the weights, which may take memory.
        weights: nobody else's: where they are moved, these are deleted, and it gets copies.
        pool_bytes: of its KV pool, a device.
    Raises:
        OutOfMemoryError: the pool does not fit, although it should: others have taken memory, or it is in pieces that
            could not be closed up.
    """
    held = _unless_out_of_memory(lambda: _made(make, weights))
    if held is None and _is_movable(weights):
        log.info("no room for a KV pool of %.2f GiB in one piece: moving weights together", pool_bytes / 2**30)
        held = _unless_out_of_memory(lambda: _made(make, moved_together(weights)))
    if held is None:
        raise OutOfMemoryError(
            f"The device has no room for a KV pool of {pool_bytes / 2**30:.2f} GiB any more, or not in large enough"
            f" pieces. Lower gpu_memory_utilization, which is {args.gpu_memory_utilization:g}, or stop what else uses"
            " the device."
        )
    return held


def moved_together(weights: Weights) -> Weights:
    """Copies of the weights without holes between them, if as much memory as they take is free in one piece behind
    them. Holes are those of the first device; where others have other ones, less is closed up there. The weights are
    deleted.

    Raises:
        jax.errors.JaxRuntimeError: there is not so much memory. The weights are as they were.
    """
    if not weights:
        return weights
    plugs = _plugs_below(max(weights, key=_address))
    copies: list[jax.Array] = []
    try:
        for one in weights:
            copies.append(_copied(one))
    except jax.errors.JaxRuntimeError:
        _delete(copies)
        raise
    finally:
        _delete(plugs)
    _delete(weights)
    moved = []
    for one in copies:
        moved.append(_copied(one))
        one.delete()
    return tuple(moved)


def _is_movable(weights: Weights) -> bool:
    """Whether moving may help: on a GPU whose memory JAX took at once, and in one process: several would have to agree
    on what moves."""
    on_gpu = all(device.platform == "gpu" for one in weights[:1] for device in one.devices())
    return on_gpu and not allocates_on_demand() and jax.process_count() == 1


def _plugs_below(last: jax.Array) -> list[jax.Array]:
    """Arrays of 1 GiB to 1 MiB in the free memory below an array, on all of its devices."""
    end, found = _address(last), []
    size = _LARGEST_PLUG
    while size >= _SMALLEST_PLUG:
        plug = _bytes_beside(last, size)
        if plug is not None and _address(plug) < end:
            found.append(plug)
        else:  # there is no such hole any more
            _delete([] if plug is None else [plug])
            size //= 2
    return found


def _copied(array: jax.Array) -> jax.Array:
    return jax.block_until_ready(jnp.copy(array))


def _delete(arrays: Weights | list[jax.Array]) -> None:
    for one in arrays:
        one.delete()


def _bytes_beside(array: jax.Array, size: int) -> jax.Array | None:
    """An array of so many bytes on each of an array's devices; None if they have no room for it."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return _unless_out_of_memory(lambda: jax.block_until_ready(jnp.zeros(size, jnp.uint8, device=sharding)))


def _address(array: jax.Array) -> int:
    """Where the array begins, in the memory of the first of this process's devices that have a part of it."""
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def _made(make: Callable[[Weights], Held], weights: Weights) -> Held:
    held = make(weights)
    jax.block_until_ready(held["pools"])
    return held


def _unless_out_of_memory(make: Callable[[], T]) -> T | None:
    """None if the device has no memory for it. What was made of it is free again once this returns: the error, whose
    frames keep it, is gone."""
    try:
        return make()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        log.info("%s", str(error).splitlines()[0])
    return None
