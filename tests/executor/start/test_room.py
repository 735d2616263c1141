"""Room for a pool in memory that is in pieces."""

import logging
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import OutOfMemoryError
from jpaged.executor.start import room
from jpaged.executor.start.room import closed_up, with_room

GIB = 2**30
ARGS = EngineArgs(model="model", gpu_memory_utilization=0.9)


def fail() -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.00GiB")


def weights_of(number: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.full((3, i + 1), i, jnp.float32) for i in range(number))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_pool_without_room_is_an_error_that_says_what_to_do(at_once):
    """Whether JAX says so when the pool is made, or when it is waited for."""

    def make(weights: Any) -> dict[str, Any]:
        return fail() if at_once else {"pools": SimpleNamespace(block_until_ready=fail)}

    with pytest.raises(OutOfMemoryError, match=r"3\.00 GiB .* gpu_memory_utilization, which is 0\.9"):
        with_room(make, (), 3 * GIB, ARGS)


def test_weights_are_moved_together_for_a_pool_that_finds_no_room_between_them(monkeypatch, caplog):
    """As if there was a hole below all of them."""
    weights = weights_of(3)
    values = [np.asarray(one) for one in weights]
    plug, address, tried = jnp.zeros(1), room._address, []
    monkeypatch.setattr(room, "_plugs_below", lambda last: [plug])
    monkeypatch.setattr(room, "_address", lambda array: -1 if array is plug else address(array))

    def make(given: Any) -> dict[str, Any]:
        tried.append(given)
        return fail() if given is weights else {"pools": jnp.zeros(1), "weights": given}

    with caplog.at_level(logging.INFO, "jpaged.startup"):
        held = with_room(make, weights, 3 * GIB, ARGS)
    assert len(tried) == 2
    assert "moving weights together" in caplog.text
    assert all(old.is_deleted() for old in (plug, *weights))
    for value, one in zip(values, held["weights"], strict=True):
        np.testing.assert_array_equal(one, value)


def test_a_pool_that_fits_moves_nothing():
    weights = weights_of(2)
    held = with_room(lambda given: {"pools": jnp.zeros(1), "weights": given}, weights, GIB, ARGS)
    assert held["weights"] is weights
    assert not any(one.is_deleted() for one in weights)


def test_other_errors_of_the_device_are_not_taken_for_a_lack_of_memory():
    def make(weights: Any) -> dict[str, Any]:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    with pytest.raises(jax.errors.JaxRuntimeError, match="is lost"):
        with_room(make, (), GIB, ARGS)


class Memory:
    """An allocator as JAX's: the smallest free piece that takes an array, from its beginning."""

    def __init__(self, size: int) -> None:
        self.free = {0: size}

    def take(self, size: int) -> "Piece":
        at = min((at for at, free in self.free.items() if free >= size), key=lambda at: (self.free[at], at))
        rest = self.free.pop(at) - size
        if rest:
            self.free[at + size] = rest
        return Piece(self, at, size)


class Piece:
    def __init__(self, memory: Memory, at: int, size: int) -> None:
        self.memory, self.at, self.size = memory, at, size

    def delete(self) -> None:
        free = sorted({**self.memory.free, self.at: self.size}.items())
        self.memory.free = {}
        for at, size in free:
            last = max(self.memory.free, default=None)
            if last is not None and last + self.memory.free[last] == at:
                self.memory.free[last] += size
            else:
                self.memory.free[at] = size


@pytest.mark.parametrize("seed", range(20))
def test_no_hole_is_left_between_weights(monkeypatch, seed):
    """Layers of equal weights, and what loading had beside them and has no more, of any size and order; in units of
    1 MiB."""
    monkeypatch.setattr(room, "_address", lambda piece: piece.at)
    monkeypatch.setattr(room, "_copied", lambda piece: piece.memory.take(piece.size))
    monkeypatch.setattr(room, "_bytes_beside", lambda piece, size: piece.memory.take(size))
    monkeypatch.setattr(room, "_LARGEST_PLUG", 1024)
    monkeypatch.setattr(room, "_SMALLEST_PLUG", 1)
    memory, drawn = Memory(120_000), random.Random(seed)
    sizes = [1050, *(size for _ in range(32) for size in (50, 34, 235, 118)), 1050]
    weights, temporary = [], []
    for size in sizes:
        temporary += [memory.take(drawn.choice((100, 235, 470, 940))) for _ in range(drawn.randrange(3))]
        weights.append(memory.take(size))
        while len(temporary) > 3:
            temporary.pop(drawn.randrange(len(temporary))).delete()
    for one in temporary:
        one.delete()
    assert len(memory.free) > 2
    moved = closed_up(tuple(weights))
    assert [one.size for one in moved] == sizes
    assert memory.free == {sum(sizes): 120_000 - sum(sizes)}


def test_closing_up_without_weights_or_holes_moves_nothing(monkeypatch):
    assert closed_up(()) == ()
    memory = Memory(1000)
    monkeypatch.setattr(room, "_address", lambda piece: piece.at)
    monkeypatch.setattr(room, "_bytes_beside", lambda piece, size: piece.memory.take(size))
    monkeypatch.setattr(room, "_LARGEST_PLUG", 64)
    monkeypatch.setattr(room, "_SMALLEST_PLUG", 1)
    weights = tuple(memory.take(size) for size in (30, 10, 20))
    assert closed_up(weights) == weights
    assert memory.free == {60: 940}
