"""One int32 buffer for everything the host tells a program.

A jit call pays for each argument (about 0.4 us, and 28 us for the first on an H200), so a program takes one packed
buffer, whose layout both sides read:

    layout = PackedLayout(slots=Field((8,), null_slot), table_updates=Field((8, 4), (null_slot, 0, 0, NULL_BLOCK)))
    buffer, host = layout.new()         # numpy, all padding: write what there is to `host["slots"][:n]`
    fields = layout.unpack(buffer)      # the same fields, of the traced buffer
"""

from math import prod
from typing import NamedTuple, TypeVar

import jax
import numpy as np

ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array)


class Field(NamedTuple):
    """The shape of a field, and what stands in it where the host has nothing to say: values that make a program do
    nothing, one for all or one for each place of the last axis. None leaves a field unfilled, which saves
    time where it is large: for the last fields of a layout, of which programs read only as much as other fields say.
    """

    shape: tuple[int, ...]
    padding: int | tuple[int, ...] | None


class PackedLayout:
    """Named int32 fields of fixed shapes, one after the other in a flat buffer of `size` elements."""

    def __init__(self, **fields: Field) -> None:
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        end = padded = 0
        for name, field in fields.items():
            start, end = end, end + prod(field.shape)
            self._places[name] = slice(start, end), field.shape
            padded = padded if field.padding is None else end
        self.size = end
        padding: np.ndarray = np.zeros(end, np.int32)
        for name, view in self.unpack(padding).items():
            view[...] = 0 if (value := fields[name].padding) is None else value
        self._padding = padding[:padded]

    def new(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A buffer of its own (a step in flight may still be reading the last one), all padding, and views of its
        fields.
        """
        buffer = np.empty(self.size, np.int32)
        buffer[: len(self._padding)] = self._padding
        return buffer, self.unpack(buffer)

    def unpack(self, buffer: ArrayT) -> dict[str, ArrayT]:
        """Views (numpy) or slices (jax) of `buffer`, by name."""
        return {
            name: buffer[place] if len(shape) == 1 else buffer[place].reshape(shape)
            for name, (place, shape) in self._places.items()
        }
