"""Room for a KV pool in memory that loading and compiling have left in pieces.

JAX's allocator puts an array into the smallest free piece that takes it, at its beginning. While weights are loaded,
rounded or drawn, products are tried out beside them, and what is temporary then leaves holes below weights that stay.
The pool's arrays are gigabytes each and fill the memory to some 0.5 GiB, so holes of more than that can keep the last
of them out. Weights are closed up then:

    | w0 |    | w1 |  | w2 |         free          |
    | w0 |####| w1 |##| w2 |                       |     plugs fill the holes
    | w0 |    | w1 |##| w2 |                       |     from the lowest address on: a plug goes,
    | w0 | w1 |    |##| w2 |                       |     and what is behind it moves down
    | w0 | w1 | w2 |                               |

A weight that is larger than the hole before it moves by way of the free memory behind all.
"""

import logging
from collections import deque
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.api.config import EngineArgs
from jpaged.api.errors import OutOfMemoryError
from jpaged.executor.step.held import Held
from jpaged.models import Weights

log = logging.getLogger("jpaged.startup")

_LARGEST_PLUG, _SMALLEST_PLUG = 2**30, 2**20


def with_room(make: Callable[[Weights], Held], weights: Weights, pool_bytes: int, args: EngineArgs) -> Held:
    """What a runner begins with, on the device.

    Args:
        make: makes it of the weights, which may take memory.
        weights: nobody else's; if there is no room for what is made, these are deleted, and it gets copies.
        pool_bytes: of its KV pool, a device.
    Raises:
        OutOfMemoryError: the pool does not fit, although it should: others have taken memory.
    """
    held = _unless_out_of_memory(lambda: _made(make, weights))
    if held is None and jax.process_count() == 1:  # processes would have to agree on what moves
        log.info("no room for a KV pool of %.2f GiB in one piece: moving weights together", pool_bytes / 2**30)
        held = _unless_out_of_memory(lambda: _made(make, closed_up(weights)))
    if held is None:
        raise OutOfMemoryError(
            f"The device has no room for a KV pool of {pool_bytes / 2**30:.2f} GiB any more. Lower"
            f" gpu_memory_utilization, which is {args.gpu_memory_utilization:g}, or stop what else uses the device."
        )
    return held


def closed_up(weights: Weights) -> Weights:
    """Copies of the weights without holes between them, but for some below 1 MiB. Weights that move are deleted, one by
    one; at most one is there twice.

    Raises:
        jax.errors.JaxRuntimeError: there is no memory for that one.
    """
    if not weights:
        return weights
    moved, is_moving = list(weights), False
    in_order = sorted(range(len(weights)), key=lambda i: _address(weights[i]))
    plugs = deque(sorted(_plugs_below(weights[in_order[-1]]), key=_address))
    for i in in_order:
        while plugs and _address(plugs[0]) < _address(weights[i]):
            plugs.popleft().delete()
            is_moving = True
        if is_moving:
            moved[i] = _moved_down(weights[i])
    return tuple(moved)


def _plugs_below(last: jax.Array) -> list[jax.Array]:
    """Arrays of 1 GiB to 1 MiB in the free memory below an array, on all of its devices."""
    end, found = _address(last), []
    size = _LARGEST_PLUG
    while size >= _SMALLEST_PLUG:
        plug = _bytes_beside(last, size)
        if _address(plug) < end:
            found.append(plug)
        else:  # there is no such hole any more
            plug.delete()
            size //= 2
    return found


def _moved_down(array: jax.Array) -> jax.Array:
    """A copy in the hole before the array, which is deleted. One that does not fit there goes to other free memory
    first, and the array's own adds to the hole."""
    at, copy = _address(array), _copied(array)
    array.delete()
    if _address(copy) < at:
        return copy
    again = _copied(copy)
    copy.delete()
    return again


def _copied(array: jax.Array) -> jax.Array:
    return jax.block_until_ready(jnp.copy(array))


def _bytes_beside(array: jax.Array, size: int) -> jax.Array:
    """An array of so many bytes on each of an array's devices."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.block_until_ready(jnp.zeros(size, jnp.uint8, device=sharding))


def _address(array: jax.Array) -> int:
    """Where the array begins, in the memory of the first of this process's devices that have a part of it."""
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def _made(make: Callable[[Weights], Held], weights: Weights) -> Held:
    held = make(weights)
    jax.block_until_ready(held["pools"])
    return held


def _unless_out_of_memory(make: Callable[[], Held]) -> Held | None:
    """None if the device has no memory for it. What was made of it is free again once this returns: the error, whose
    frames keep it, is gone."""
    try:
        return make()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return None
