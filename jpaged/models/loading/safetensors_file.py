"""The safetensors format, read and written one tensor at a time.

    8 bytes: n, little-endian | n bytes: JSON, name -> {dtype, shape, data_offsets} | the tensors' bytes

The `safetensors` package maps a file as a whole, and every page read stays resident: reading a shard of 5 GB
would cost 5 GB of memory. Reading each tensor into its own buffer costs the largest tensor.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Self

import jax.numpy as jnp
import numpy as np

from jpaged.api.errors import CheckpointError

_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_QUANTIZED_TYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""Types that only quantized layers are read from."""

_NAMES = {dtype: name for name, dtype in (_TYPES | _QUANTIZED_TYPES).items()}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor within a file. type_name: as in the file, "BF16". offset: of its first byte, from the file's start."""

    path: Path
    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def is_floating(self) -> bool:
        """Whether it is of a type that weights are read from."""
        return self.type_name in _TYPES

    @property
    def dtype(self) -> np.dtype:
        """Raises CheckpointError for a type that no supported model has weights in."""
        found = _TYPES.get(self.type_name) or _QUANTIZED_TYPES.get(self.type_name)
        if found is None:
            raise self.refusal()
        return found

    def refusal(self, supported: Iterable[str] = tuple(_TYPES)) -> CheckpointError:
        """What to raise where the tensor should be of another type."""
        return CheckpointError(
            f"{self.path}: tensor {self.name!r} has type {self.type_name}, which is not supported here; supported:"
            f" {', '.join(supported)}. What is quantized must be named in config.json's quantization_config."
        )

    @property
    def array_bytes(self) -> int:
        """Bytes of what `read` gives."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The tensor in a new array. Raises CheckpointError when the file has become shorter."""
        return self._read_as(self.dtype)

    def rows(self, first: int, count: int) -> Self:
        """So many entries of the first axis, as a tensor of their own."""
        each = self.num_bytes // self.shape[0]
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + first * each, num_bytes=count * each)

    def read_bytes(self) -> np.ndarray:
        """The tensor, of a type of one byte, as uint8. Raises as `read`."""
        return self._read_as(np.dtype(np.uint8))

    def read_stored(self) -> np.ndarray:
        """The bytes of a tensor of any type, uint8 [num_bytes]. Raises as `read`."""
        return replace(self, type_name="U8", shape=(self.num_bytes,)).read()

    def _read_as(self, dtype: np.dtype) -> np.ndarray:
        count = math.prod(self.shape)
        with self.path.open("rb") as file:
            array = np.fromfile(file, dtype, count, offset=self.offset)
        if array.size != count:
            raise CheckpointError(f"{self.path} ends within tensor {self.name!r}; download or write it again.")
        return array.reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, in the order of their bytes.

    Raises CheckpointError, naming the file, when it is missing, truncated or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            whole = 8 + length <= size and len(start) == 8
            text = file.read(length) if whole and length <= _MAX_HEADER_BYTES else b""
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; download the checkpoint again.") from None
    except (OSError, ValueError) as error:  # ValueError: an index may name a file as no file can be named
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from error
    if start == b"version ":
        raise CheckpointError(f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` in its directory.")
    if not text:
        raise CheckpointError(
            f"{path} ({size} bytes) is truncated or not a safetensors file: its header would take {length} bytes;"
            " download or write it again."
        )
    try:
        entries = json.loads(text)
        found = [
            StoredTensor(
                path,
                name,
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                8 + length + int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path} has a corrupt header ({error!r}); download or write it again.") from error
    for tensor in found:
        if tensor.num_bytes < 0 or min(tensor.shape, default=0) < 0:
            raise CheckpointError(
                f"{path} has a corrupt header: tensor {tensor.name!r} has shape {tensor.shape} and"
                f" {tensor.num_bytes} bytes; download or write it again."
            )
        if tensor.offset < 8 + length or tensor.offset + tensor.num_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: it has {size} bytes and tensor {tensor.name!r} ends at byte"
                f" {tensor.offset + tensor.num_bytes}; download or write it again."
            )
        known = _TYPES.get(tensor.type_name) or _QUANTIZED_TYPES.get(tensor.type_name)
        if known is not None and tensor.num_bytes != math.prod(tensor.shape) * known.itemsize:
            raise CheckpointError(
                f"{path} has a corrupt header: tensor {tensor.name!r} of shape {tensor.shape} and type"
                f" {tensor.type_name} cannot take {tensor.num_bytes} bytes; download or write it again."
            )
    found.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    for before, tensor in pairwise(found):
        if tensor.offset < before.offset + before.num_bytes:
            raise CheckpointError(
                f"{path} has a corrupt header: tensors {before.name!r} and {tensor.name!r} overlap; download or write"
                " it again."
            )
    return {tensor.name: tensor for tensor in found}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write. type_name: as `StoredTensor`'s."""

    type_name: str
    shape: tuple[int, ...]
    num_bytes: int

    @staticmethod
    def of(shape: tuple[int, ...], dtype: np.dtype) -> "NewTensor":
        return NewTensor(_NAMES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize)

    @property
    def item_bytes(self) -> int:
        return self.num_bytes // max(math.prod(self.shape), 1)


def write(path: Path, layout: Mapping[str, tuple[int, ...]], dtype: np.dtype, tensors: Iterable[np.ndarray]) -> None:
    """Writes a file whose tensors, all of one type, come one at a time, in the order of `layout` (name -> shape).

    The file appears under its name only when it is whole.
    """

    def named() -> Iterator[tuple[str, np.ndarray]]:
        for (name, shape), tensor in zip(layout.items(), tensors, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{name}: {tensor.dtype} {tensor.shape} is not {dtype} {shape}.")
            yield name, tensor

    write_mixed(path, {name: NewTensor.of(shape, dtype) for name, shape in layout.items()}, named())


def write_mixed(path: Path, layout: Mapping[str, NewTensor], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes a file whose tensors come one at a time, by name, in any order, each once.

    Those of wider types lie first in the file, so that all are aligned, as the format's own library has them. The file
    appears under its name only when it is whole.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, new in sorted(layout.items(), key=lambda item: -item[1].item_bytes):
        starts[name], end = end, end + new.num_bytes
        entries[name] = {"dtype": new.type_name, "shape": list(new.shape), "data_offsets": [starts[name], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name, tensor in tensors:
                if tensor.nbytes != layout[name].num_bytes:
                    raise ValueError(f"{name}: {tensor.dtype} {tensor.shape} is not {layout[name]}.")
                file.seek(8 + len(header) + starts.pop(name))
                np.ascontiguousarray(tensor).tofile(file)
            if starts:
                raise ValueError(f"{', '.join(starts)} did not come.")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
