"""Triton kernels in Triton's interpreter, on a CPU, as a callback of the jitted function that calls them.

The interpreter takes PyTorch's tensors; `_HostArray` has as much of their interface as it asks for, over numpy.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_builder

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bool": "i1", "int32": "i32", "uint32": "u32"}
_TYPES |= {"uint8": "u8", "int8": "i8", "float8_e4m3fn": "fp8e4nv"}
"""Triton's names of numpy's types."""

_BITS = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn}
"""numpy's types of those that the interpreter holds as bits."""

_thread = ThreadPoolExecutor(1)
"""Runs the interpreter: one kernel at a time, as it keeps in one place which CTA it runs, and with subnormal numbers,
which a thread of XLA's, or one that it starts, takes for zeros."""
_thread.submit(int).result()  # starts it here


def call(
    kernel: Any,
    grid: tuple[int, ...],
    arrays: tuple[jax.Array, ...],
    updated: tuple[jax.Array, ...],
    out: Sequence[jax.ShapeDtypeStruct],
    constants: dict[str, Any],
) -> tuple[jax.Array, ...]:
    """`triton_call.call`; arrays that are written begin as NaN, or the largest integers, as if they were not theirs."""
    results = [*out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated)]

    def run(*operands: Any) -> tuple[np.ndarray, ...]:
        read = [np.array(x) for x in operands[: len(arrays)]]
        in_place = [np.array(x) for x in operands[len(arrays) :]]
        written = [_unwritten(x) for x in out]
        _thread.submit(kernel[grid], *map(_HostArray, (*read, *in_place, *written)), **constants).result()
        return (*written, *in_place)

    return tuple(jax.pure_callback(run, results, *arrays, *updated))


def _unwritten(x: jax.ShapeDtypeStruct) -> np.ndarray:
    value = np.nan if x.dtype.kind in "fV" else np.iinfo(x.dtype).max  # numpy's kind of bfloat16 is V
    return np.full(x.shape, value, x.dtype)


class _HostArray:
    """An array of numpy's as the tensor that the interpreter expects, in host memory already."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.dtype = _TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def untyped_storage(self) -> "_HostArray":
        return self

    def cpu(self) -> "_HostArray":
        return self

    def new_empty(self, *arguments: Any, **options: Any) -> "_HostArray":
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self._array.shape

    def stride(self) -> tuple[int, ...]:
        return self._array.strides

    def set_(self, *arguments: Any) -> None:
        """Nothing: it is in place."""

    def copy_(self, source: "_HostArray") -> None:
        """Nothing: it is in place."""


def _floats(x: TensorHandle) -> np.ndarray:
    """The numbers of a tensor; the interpreter holds bfloat16 and FP8 as their bits."""
    kind = _BITS.get(x.dtype.scalar)
    return x.data if kind is None else x.data.view(kind)


def _cast(src: TensorHandle, dst_type: Any, of_triton: Any = interpreter_builder.cast_impl) -> TensorHandle:
    """A conversion; to bfloat16 it rounds to the nearest, as GPUs do, where Triton's own drops bits."""
    types = (src.dtype.scalar, dst_type.scalar)
    if types == (tl.float32, tl.bfloat16):
        return TensorHandle(src.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
    if types == (tl.bfloat16, tl.float32):
        return TensorHandle(_floats(src).astype(np.float32), tl.float32)
    return of_triton(src, dst_type)


def _dot(a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
    """A product in the accumulator's type, where Triton's own would multiply bfloat16's bits.

    Row by row: on some CPUs the order of a BLAS's sums depends on where in the tile a row stands. On a GPU it does not.
    """
    x, y = (_floats(one).astype(d.data.dtype) for one in (a, b))
    product = np.matmul(x[..., :, None, :], y[..., None, :, :])[..., 0, :]
    return TensorHandle(product + d.data, d.dtype.scalar)


def _binary(lhs: TensorHandle, rhs: TensorHandle, op: Any, of_triton: Any = interpreter_builder.binary_op) -> Any:
    """An operation of two tensors; of bfloat16 on its numbers, where Triton's own would take its bits."""
    if lhs.dtype.scalar != tl.bfloat16 or rhs.dtype.scalar != tl.bfloat16:
        return of_triton(lhs, rhs, op)
    found = op(_floats(lhs), _floats(rhs))
    if found.dtype == np.bool_:
        return TensorHandle(found, tl.int1)
    return TensorHandle(found.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)


interpreter_builder.cast_impl = _cast
interpreter_builder.binary_op = _binary
interpreter_builder.create_dot = _dot
