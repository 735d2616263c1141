"""Room for a pool in memory that is in pieces."""

import gc
import logging
import random
from types import SimpleNamespace
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import OutOfMemoryError
from jpaged.executor.start import room
from jpaged.executor.start.room import moved_together, with_room

GIB = 2**30
ARGS = EngineArgs(model="model", gpu_memory_utilization=0.9)


class Made:
    """What a pool is made of."""


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
    """On a GPU; the second pool is made when the first one's arrays are gone."""
    weights, first = weights_of(3), []
    values = [np.asarray(one) for one in weights]
    monkeypatch.setattr(room, "_is_movable", lambda weights: True)
    monkeypatch.setattr(room, "_plugs_below", lambda last: [])

    def make(given: Any) -> dict[str, Any]:
        if given is weights:
            made = Made()
            first.append(ref(made))
            return fail()
        assert first[0]() is None
        return {"pools": jnp.zeros(1), "weights": given}

    gc.disable()
    try:
        with caplog.at_level(logging.INFO, "jpaged.startup"):
            held = with_room(make, weights, 3 * GIB, ARGS)
    finally:
        gc.enable()
    assert "moving weights together" in caplog.text
    assert "while trying to allocate 3.00GiB" in caplog.text, "what JAX said"
    assert all(old.is_deleted() for old in weights)
    for value, one in zip(values, held["weights"], strict=True):
        np.testing.assert_array_equal(one, value)


def test_nothing_is_moved_where_it_cannot_help(monkeypatch):
    """Here: on a CPU. Nor where there is no memory for it, and then weights stay as they are."""
    weights = weights_of(3)
    monkeypatch.setattr(room, "_plugs_below", lambda last: pytest.fail("moved") if movable == "never" else [])
    movable = "never"
    with pytest.raises(OutOfMemoryError):
        with_room(lambda given: fail(), weights, GIB, ARGS)
    movable, copied = "always", []

    def copy(array: jax.Array) -> jax.Array:
        if len(copied) == 2:
            fail()
        copied.append(jnp.copy(array))
        return copied[-1]

    monkeypatch.setattr(room, "_is_movable", lambda weights: True)
    monkeypatch.setattr(room, "_copied", copy)
    with pytest.raises(OutOfMemoryError):
        with_room(lambda given: fail(), weights, GIB, ARGS)
    assert [one.is_deleted() for one in copied] == [True, True]
    assert not any(one.is_deleted() for one in weights)


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
    """An allocator as JAX's (`tsl::BFCAllocator`), in units of 1 MiB: the smallest free piece that takes an array, of
    which the rest is free if it is as large as the array, or 128 at least."""

    def __init__(self, size: int) -> None:
        self.free = {0: size}

    def take(self, size: int) -> "Piece":
        fitting = [at for at, free in self.free.items() if free >= size]
        if not fitting:
            fail()
        at = min(fitting, key=lambda at: (self.free[at], at))
        free = self.free.pop(at)
        taken = size if free >= 2 * size or free - size >= 128 else free
        if free > taken:
            self.free[at + taken] = free - taken
        return Piece(self, at, size, taken)


class Piece:
    def __init__(self, memory: Memory, at: int, size: int, taken: int) -> None:
        self.memory, self.at, self.size, self.taken = memory, at, size, taken

    def delete(self) -> None:
        free = sorted({**self.memory.free, self.at: self.taken}.items())
        self.memory.free = {}
        for at, size in free:
            last = max(self.memory.free, default=None)
            if last is not None and last + self.memory.free[last] == at:
                self.memory.free[last] += size
            else:
                self.memory.free[at] = size


@pytest.fixture
def in_units(monkeypatch):
    """Has pieces in place of arrays."""
    monkeypatch.setattr(room, "_address", lambda piece: piece.at)
    monkeypatch.setattr(room, "_copied", lambda piece: piece.memory.take(piece.size))

    def beside(piece: Piece, size: int) -> Piece | None:
        try:
            return piece.memory.take(size)
        except jax.errors.JaxRuntimeError:
            return None

    monkeypatch.setattr(room, "_bytes_beside", beside)
    monkeypatch.setattr(room, "_LARGEST_PLUG", 1024)
    monkeypatch.setattr(room, "_SMALLEST_PLUG", 1)


SIZES = [1050, *(size for _ in range(32) for size in (50, 34, 235, 118)), 1050]
"""Of weights: layers alike between an embedding and a head."""


def loaded(memory: Memory, seed: int) -> tuple[Piece, ...]:
    """Weights, and the holes of what loading had beside them and has no more, of any size and order."""
    drawn = random.Random(seed)
    weights: list[Piece] = []
    temporary: list[Piece] = []
    for size in SIZES:
        temporary += [memory.take(drawn.choice((100, 235, 470, 940))) for _ in range(drawn.randrange(3))]
        weights.append(memory.take(size))
        while len(temporary) > 3:
            temporary.pop(drawn.randrange(len(temporary))).delete()
    for one in temporary:
        one.delete()
    return tuple(weights)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("in_units")
def test_no_hole_is_left_between_weights(seed):
    drawn = random.Random(seed)
    memory = Memory(drawn.randrange(2 * sum(SIZES) + 9_000, 120_000))
    size = sum(memory.free.values())
    moved = moved_together(loaded(memory, seed))
    assert [one.size for one in moved] == SIZES
    behind = max(memory.free.values())
    assert size - behind - sum(SIZES) <= 128, "what the allocator gave to one of them"
    assert sum(memory.free.values()) - behind <= 2 * 34, "behind the last"


@pytest.mark.usefixtures("in_units")
def test_weights_without_as_much_memory_behind_them_stay_where_they_are():
    memory = Memory(sum(SIZES) + 16_000)
    weights = loaded(memory, 0)
    before, places = dict(memory.free), [one.at for one in weights]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        moved_together(weights)
    assert (memory.free, [one.at for one in weights]) == (before, places)
    assert moved_together(()) == ()
