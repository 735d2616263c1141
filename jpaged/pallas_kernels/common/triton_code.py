"""Small code for Triton's kernels in compiled programs: what a GPU runs, and nothing else.

jax-triton hands a kernel to jaxlib as one string, a compressed message with its PTX, its line numbers and its Triton
IR, by which jaxlib looks the kernel up, for each of its calls, whenever a program runs. `shrunk` leaves what the GPU
runs, and drops line numbers, comments and the IR, which are half to five sixths of it and name the folders of the
source, so that programs of one checkout would not be those of another.

    call (1)      kernel (1)      name (1), .., PTX (4), Triton IR (5), ..
                  grid, parameters
    name (4)

Numbers are those of the fields in jaxlib's `triton.proto`.
"""

import re
import zlib
from collections.abc import Iterator

_VARINT, _BYTES = 0, 2  # types of fields on the wire
_CALL = _KERNEL = 1
_PTX, _IR = 4, 5

_LINE_NUMBERS = re.compile(r"^[ \t]*(?:\.loc|\.file)[ \t].*\n|^\$L__(?:tmp|func_\w+?)\d+:[ \t]*\n", re.MULTILINE)
_COMMENT = re.compile(r"[ \t]*//.*$", re.MULTILINE)
_DEBUG_SECTION = re.compile(r"^[ \t]*\.section[ \t]+\.debug_\w+\s*\{[^}]*\}", re.MULTILINE)


def shrunk(opaque: bytes) -> bytes:
    """A kernel as jax-triton describes it, zlib's compression of a `TritonAnyKernelCall`, with nothing but what a GPU
    needs. One of several configurations, which are timed at the first launch, comes back as it is."""
    fields = list(_fields(zlib.decompress(opaque)))
    if [number for number, _ in fields].count(_CALL) != 1:
        return opaque
    return zlib.compress(_message((n, _smaller_call(x) if n == _CALL else x) for n, x in fields), level=9)


def bare_ptx(ptx: str) -> str:
    """PTX without comments, line numbers and sections for debuggers; ptxas makes the same instructions of it."""
    ptx = _DEBUG_SECTION.sub("", _COMMENT.sub("", _LINE_NUMBERS.sub("", ptx)))
    lines = (" ".join(line.split()) for line in ptx.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def _smaller_call(call: int | bytes) -> int | bytes:
    return _message((n, _smaller_kernel(x) if n == _KERNEL else x) for n, x in _fields(call))


def _smaller_kernel(kernel: int | bytes) -> int | bytes:
    def smaller(number: int, value: int | bytes) -> int | bytes:
        if number == _PTX and isinstance(value, bytes):
            return bare_ptx(value.decode()).encode()
        return value

    return _message((n, smaller(n, x)) for n, x in _fields(kernel) if n != _IR)


def _fields(message: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: an integer, or bytes.

    Raises:
        ValueError: a field is of another type, which jaxlib's messages have none of.
    """
    if not isinstance(message, bytes):
        raise ValueError(f"a message is bytes on the wire, got the integer {message}")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 not in (_VARINT, _BYTES):
            raise ValueError(f"field {tag >> 3} of a kernel's description has the unknown type {tag & 7}")
        value, at = _varint(message, at)
        if tag & 7 == _VARINT:
            yield tag >> 3, value
        else:
            yield tag >> 3, message[at : at + value]
            at += value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, lowest first, and where the next field begins."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _message(fields: Iterator[tuple[int, int | bytes]]) -> bytes:
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_as_varint(number << 3 | _VARINT), _as_varint(value)]
        else:
            parts += [_as_varint(number << 3 | _BYTES), _as_varint(len(value)), value]
    return b"".join(parts)


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
