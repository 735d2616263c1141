"""Weights in MXFP4, and what they are in bfloat16 (Open Compute Project, "OCP Microscaling Formats (MX)", version 1.0).

    name_blocks   uint8 [experts, outputs, groups, 16]    32 numbers a group: the low half of each byte, then the high
    name_scales   uint8 [experts, outputs, groups]        a power of two for each group, 127 more than its exponent

    name          bfloat16 [experts, inputs, outputs]     inputs = 32 * groups

A number is one bit of sign, two of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Times its power of two
it is exact in bfloat16, except where that overflows to infinity (scales 253 and 254, some numbers of which are beyond
its range), as in transformers. A scale of 255 makes all 32 numbers NaN.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import jax.numpy as jnp
import numpy as np

from jpaged.api.errors import CheckpointError
from jpaged.models.loading.safetensors_file import StoredTensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
"""Of a group."""

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_SCALE = 255


@dataclass(frozen=True, slots=True)
class PackedTensor(StoredTensor):
    """A tensor [experts, inputs, outputs] that two stored ones make; it reads as bfloat16.

    path, offset: of the blocks. num_bytes: of both, as they are stored.
    """

    blocks: StoredTensor
    scales: StoredTensor

    def read(self) -> np.ndarray:
        blocks, scales = self.blocks.read_bytes(), self.scales.read_bytes()
        return dequantize(blocks, scales)

    def rows(self, first: int, count: int) -> Self:
        blocks, scales = self.blocks.rows(first, count), self.scales.rows(first, count)
        shape, total = (count, *self.shape[1:]), blocks.num_bytes + scales.num_bytes
        return replace(self, shape=shape, offset=blocks.offset, num_bytes=total, blocks=blocks, scales=scales)


def join_packed(found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with one in the place of each pair of blocks and scales.

    Raises CheckpointError, naming the tensor, when one of the two is missing, or their shapes do not fit.
    """
    joined: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        if tensor.type_name != "U8" or not name.endswith((_BLOCKS, _SCALES)):
            joined[name] = tensor
            continue
        whole = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        other = whole + (_SCALES if name.endswith(_BLOCKS) else _BLOCKS)
        if other not in found:
            raise CheckpointError(
                f"{tensor.path} holds {name!r} but no file holds {other!r}, without which MXFP4 weights cannot be read;"
                " download the checkpoint again."
            )
        if name.endswith(_BLOCKS):
            joined[whole] = _joined(whole, tensor, found[other])
    return joined


def _joined(name: str, blocks: StoredTensor, scales: StoredTensor) -> PackedTensor:
    if len(blocks.shape) != 4 or blocks.shape[-1] != _BYTES:
        raise CheckpointError(
            f"{blocks.path}: tensor {blocks.name!r} has shape {blocks.shape}; MXFP4 blocks are [experts, outputs,"
            f" groups, {_BYTES}]."
        )
    if scales.type_name != "U8" or scales.shape != blocks.shape[:-1]:
        raise CheckpointError(
            f"{scales.path}: tensor {scales.name!r} has type {scales.type_name} and shape {scales.shape}; the scales of"
            f" MXFP4 blocks of shape {blocks.shape} are U8 {blocks.shape[:-1]}."
        )
    experts, outputs, groups, _ = blocks.shape
    shape = (experts, groups * _BYTES * 2, outputs)
    total = blocks.num_bytes + scales.num_bytes
    return PackedTensor(blocks.path, name, "BF16", shape, blocks.offset, total, blocks, scales)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 [experts, inputs, outputs].

    blocks: uint8 [experts, outputs, groups, 16]. scales: uint8 [experts, outputs, groups].
    """
    experts, outputs, groups, _ = blocks.shape
    numbers = np.empty((experts, groups * _BYTES * 2, outputs), np.uint16)

    def one(expert: int) -> None:
        index = (scales[expert, ..., None].astype(np.uint16) << 8) | blocks[expert]
        numbers[expert] = _pairs()[index].view(np.uint16).reshape(outputs, -1).T

    with ThreadPoolExecutor() as pool:  # numpy lets other threads run while it looks up and copies
        list(pool.map(one, range(experts)))
    return numbers.view(np.dtype(jnp.bfloat16))


@cache
def _pairs() -> np.ndarray:
    """uint32 [65536]: the two bfloat16 numbers, the first one lowest, of each scale (times 256) and byte."""
    values = np.array([*_VALUES, *(-value for value in _VALUES)])
    byte = np.arange(256)
    numbers = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)  # [256, 2]
    scaled = np.ldexp(numbers, np.arange(256)[:, None, None] - 127)
    scaled[_NAN_SCALE] = np.nan
    with np.errstate(over="ignore"):
        rounded = scaled.astype(np.float32).astype(np.dtype(jnp.bfloat16))
    return np.ascontiguousarray(rounded).view(np.uint16).astype("<u2").view("<u4").astype(np.uint32).reshape(-1)
