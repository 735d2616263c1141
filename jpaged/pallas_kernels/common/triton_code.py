"""Small code for Triton's kernels in compiled programs: what a GPU runs, and nothing else.

jax-triton hands a kernel to jaxlib as one string, a compressed message with its PTX, its line numbers and its Triton
IR, by which jaxlib looks the kernel up, for each of its calls, whenever a program runs. `shrunk` leaves what the GPU
runs, and drops line numbers, comments and the IR, which are half to five sixths of it and name the folders of the
source, so that programs of one checkout would not be those of another.

    call (1)      kernel (1)      name (1), .., PTX (4), Triton IR (5), ..
                  grid, parameters
    name (4)

Numbers are those of the fields in jaxlib's `triton.proto`. `kernel_of` reads what XLA needs to launch the kernel
without jaxlib (`native_calls`).
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _BYTES = 0, 2  # types of fields on the wire
_CALL = _KERNEL = 1
_NAME, _WARPS, _SHARED, _PTX, _IR, _CAPABILITY, _CTAS = 1, 2, 3, 4, 5, 6, 10  # of a kernel
_GRID, _PARAMETER = (2, 3, 4), 5  # of a call
_ARRAY = 1  # of a parameter
_BYTES_TO_ZERO, _DIVISIBILITY = 1, 2  # of an array

_KERNEL_FIELDS = {_NAME, _WARPS, _SHARED, _PTX, _IR, _CAPABILITY, _CTAS}
_THREADS_PER_WARP = 32

_LINE_NUMBERS = re.compile(r"^[ \t]*(?:\.loc|\.file)[ \t].*\n|^\$L__(?:tmp|func_\w+?)\d+:[ \t]*\n", re.MULTILINE)
_COMMENT = re.compile(r"[ \t]*//.*$", re.MULTILINE)
_ENTRY = re.compile(r"(\.visible\s+\.entry\s+(\w+)\s*\()([^)]*)(\)\s*((?:\.[\w\s,]*+)*+)\{)")
_REQUIRED_THREADS = re.compile(r"\.reqntid\s+(\d+(?:\s*,\s*\d+)*)")
_POINTER = re.compile(r"\.param\s+\.[ubs]64\s+(?:\.ptr\s+(?:\.global\s+)?(?:\.align\s+\d+\s+)?)?(\w+)")
_DEBUG_SECTION = re.compile(r"^[ \t]*\.section[ \t]+\.debug_\w+\s*\{[^}]*\}", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """A compiled Triton kernel and how a call launches it.

    Attributes:
        name: of the entry in `ptx`.
        ptx: its code, as text. The entry's parameters are 64-bit pointers: to the arrays that the kernel is given, then
            `scratch` more that no instruction reads.
        arrays: how many arrays the kernel is given.
        scratch: how many pointers follow them; Triton adds some to every kernel, for memory that these kernels do not
            ask for.
        grid: CTAs along three axes.
        threads: of a CTA.
        shared_bytes: dynamic shared memory of a CTA.
    """

    name: str
    ptx: str
    arrays: int
    scratch: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int

    def ptx_with(self, buffers: int) -> str:
        """The code with as many parameters as a launch passes.

        CUDA takes as many pointers from a launch's list as the entry has parameters, so the two must be equal.

        Args:
            buffers: that the launch passes, those of the arrays first; at least `arrays`.
        Raises:
            ValueError: there are fewer buffers than arrays.
        """
        if buffers < self.arrays:
            raise ValueError(f"the kernel {self.name} has {self.arrays} arrays, the call passes {buffers} buffers")
        entry = _ENTRY.search(self.ptx)
        assert entry is not None  # `kernel_of` found it
        kept = [one.strip() for one in entry[3].split(",")][: self.arrays]
        unread = [f".param .u64 {self.name}_unread_{i}" for i in range(buffers - self.arrays)]
        return self.ptx[: entry.end(1)] + "\n" + ",\n".join(kept + unread) + "\n" + self.ptx[entry.start(4) :]


def kernel_of(opaque: bytes) -> Kernel:
    """The kernel that jax-triton describes, and its launch.

    Args:
        opaque: zlib's compression of a `TritonAnyKernelCall`.
    Raises:
        ValueError: its launch needs more than pointers to arrays: it has several configurations, clusters, scalars,
            TMA descriptors, arrays to fill with zeros or scratch memory; or its description or code is of an unknown
            kind. The message says which.
        zlib.error: the bytes are not zlib's.
    """
    call = _single(zlib.decompress(opaque), _CALL, "a kernel in several configurations, or none")
    kernel_message = _single(call, _KERNEL, "a call without a kernel")
    fields = list(_fields(kernel_message))
    if unknown := {number for number, _ in fields} - _KERNEL_FIELDS:
        raise ValueError(f"a kernel with the unknown fields {sorted(unknown)}, such as scratch memory")
    kernel = dict(fields)
    if (ctas := _integer(kernel, _CTAS, 1)) != 1:
        raise ValueError(f"a kernel in clusters of {ctas} CTAs")
    name, ptx = (_text(kernel, number) for number in (_NAME, _PTX))
    arrays = _arrays(call)
    entries = list(_ENTRY.finditer(ptx))
    if len(entries) != 1 or entries[0][2] != name:
        raise ValueError(f"PTX whose entries are {[one[2] for one in entries]}, not {name} alone")
    return Kernel(
        name=name,
        ptx=ptx,
        arrays=arrays,
        scratch=_scratch(entries[0], arrays, ptx),
        grid=_grid(call),
        threads=_threads(entries[0], _integer(kernel, _WARPS)),
        shared_bytes=_integer(kernel, _SHARED),
    )


def _single(message: int | bytes, number: int, otherwise: str) -> bytes:
    """The only field of that number, a message.

    Raises:
        ValueError: there is another count of them.
    """
    found = [value for n, value in _fields(message) if n == number and isinstance(value, bytes)]
    if len(found) != 1:
        raise ValueError(otherwise)
    return found[0]


def _text(fields: dict[int, int | bytes], number: int) -> str:
    value = fields.get(number)
    if not isinstance(value, bytes):
        raise ValueError(f"a kernel without the text of field {number}")
    return value.decode()


def _integer(fields: dict[int, int | bytes], number: int, default: int = 0) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"a kernel whose field {number} is no integer")
    return value


def _grid(call: bytes) -> tuple[int, int, int]:
    fields = dict(_fields(call))
    x, y, z = (_integer(fields, number) for number in _GRID)
    return x, y, z


def _arrays(call: bytes) -> int:
    """How many parameters a call has, all of them pointers to arrays."""
    parameters = [dict(_fields(value)) for number, value in _fields(call) if number == _PARAMETER]
    for parameter in parameters:
        if parameter.keys() != {_ARRAY}:
            raise ValueError(f"a parameter that is no array (kinds {sorted(parameter)})")
        array = dict(_fields(parameter[_ARRAY]))
        if array.keys() - {_BYTES_TO_ZERO, _DIVISIBILITY} or array.get(_BYTES_TO_ZERO, 0):
            raise ValueError("an array to be filled with zeros first")
    return len(parameters)


def _scratch(entry: re.Match[str], arrays: int, ptx: str) -> int:
    """How many pointers an entry has beyond those to its arrays; no instruction may read them."""
    parameters = [one.strip() for one in entry[3].split(",") if one.strip()]
    if len(parameters) < arrays:
        raise ValueError(f"an entry of {len(parameters)} parameters for {arrays} arrays")
    names = [match and match[1] for match in map(_POINTER.fullmatch, parameters)]
    if None in names:
        raise ValueError(f"an entry with parameters that are no pointers: {entry[3].strip()}")
    body = ptx[entry.end() :]
    if read := [name for name in names[arrays:] if re.search(rf"\b{name}\b", body)]:
        raise ValueError(f"code that reads scratch memory ({', '.join(map(str, read))})")
    return len(parameters) - arrays


def _threads(entry: re.Match[str], warps: int) -> int:
    """The threads of a CTA: those of its warps, which its code must not require otherwise."""
    threads = warps * _THREADS_PER_WARP
    required = _REQUIRED_THREADS.search(entry[5])
    if required is None or [int(one) for one in required[1].split(",")] not in ([threads], [threads, 1, 1]):
        raise ValueError(f"code that is not for CTAs of {threads} threads ({entry[5].strip() or 'it names none'})")
    return threads


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
