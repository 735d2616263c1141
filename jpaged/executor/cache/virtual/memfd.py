"""Pages on a CPU: offsets in an anonymous file (`memfd_create`), which `mmap` puts below any number of addresses.

Addresses with nothing below are PROT_NONE, so a stray read or write ends the process as CUDA ends a kernel.

JAX updates an array of a CPU in place only if the memory is its own. So an array is allocated as usual, and its pages
are then taken away (`adopt`). Large arrays are mmapped by the C library, with its bookkeeping in the 64 bytes before
the data: pages begin there, 64 bytes before the blocks that they hold, and each needs as many spare bytes at its end.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.api.errors import EngineDeadError, OutOfMemoryError, UnsupportedModelError

LEAST_ADOPTED = 33 * 2**20
"""Bytes of an array that can be adopted: glibc mmaps whatever is larger than 32 MiB."""

_NONE, _READ, _READ_WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_IS_MMAPPED = 2
"""In the size that glibc keeps before an allocation."""


class _Piece(NamedTuple):
    """Memory: its offset in the file."""

    offset: int
    num_bytes: int


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc


@dataclass
class Memory:
    """What there is, which drivers may share as those of several engines share a GPU.

    num_bytes: that can be had in all; `create` refuses more. num_used: of handles that were not released.
    """

    num_bytes: int
    num_used: int = 0


class MemfdDriver:
    """`Driver` for a CPU.

    Args:
        memory: that handles are taken from.
    """

    granularity = mmap.PAGESIZE

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._libc = _libc()
        self._file = os.memfd_create("jpaged-kv-pages")
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._maps: dict[int, int] = {}  # sizes by address
        self._heads: dict[int, bytes] = {}  # the C library's bytes before adopted arrays, by page

    def close(self) -> None:
        """Gives the file back. What is mapped keeps its memory until it is unmapped."""
        os.close(self._file)

    def free_bytes(self) -> int:
        """Memory that `create` can give yet."""
        return self.memory.num_bytes - self.memory.num_used

    def reserve(self, num_bytes: int) -> int:
        """Addresses with nothing below them."""
        return self._mmap(None, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1, 0)

    def give_up(self, address: int, num_bytes: int) -> None:
        """Gives reserved addresses back."""
        for at in [at for at in self._maps if address <= at < address + num_bytes]:
            del self._maps[at]
        self._check(self._libc.munmap(address, num_bytes), "munmap")

    def can_adopt(self, address: int) -> bool:
        """Whether the data at this address, which glibc allocated, are a mapping of their own: not part of its heap."""
        size = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
        return address % self.granularity == 64 and bool(size & _IS_MMAPPED)

    def adopt(self, address: int, num_bytes: int) -> int:
        """Takes the memory below an array that JAX allocated.

        Args:
            address: of the array's data. num_bytes: LEAST_ADOPTED at least.
        Returns:
            Where its pages begin, less than a page before the data. The last page that begins in the array is left.
        Raises:
            UnsupportedModelError: another C library than glibc allocated it.
        """
        begin = address // self.granularity * self.granularity
        if not self.can_adopt(address):
            raise UnsupportedModelError(
                "kv_cache_layout='virtual' on a CPU needs glibc's allocator, which another one replaces here "
                "(LD_PRELOAD?); use kv_cache_layout='paged'."
            )
        self._heads[begin] = ctypes.string_at(begin, address - begin)
        self._replace_by_nothing(begin, num_bytes // self.granularity * self.granularity)
        return begin

    def abandon(self, begin: int) -> None:
        """Lets JAX free an adopted array."""
        head = self._heads.pop(begin)
        self._maps.pop(begin, None)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        self._mmap(begin, self.granularity, flags, -1, 0, _READ_WRITE)
        ctypes.memmove(begin, head, len(head))

    def create(self, num_bytes: int) -> _Piece:
        memory = self.memory
        if num_bytes > self.free_bytes():
            raise OutOfMemoryError(
                f"{memory.num_used} of {memory.num_bytes} bytes are in use, {num_bytes} more wanted."
            )
        free = self._free.get(num_bytes)
        if free:
            offset = free.pop()
        else:
            offset = self._end
            self._end += num_bytes
            os.ftruncate(self._file, self._end)
        self.memory.num_used += num_bytes
        return _Piece(offset, num_bytes)

    def release(self, handle: _Piece) -> None:
        failed = self._libc.fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, handle.offset, handle.num_bytes)
        self._check(failed, "fallocate")
        self._free.setdefault(handle.num_bytes, []).append(handle.offset)
        self.memory.num_used -= handle.num_bytes

    def map(self, address: int, handle: _Piece, num_bytes: int) -> None:
        if address in self._maps or num_bytes != handle.num_bytes:
            raise EngineDeadError(f"{num_bytes} bytes at {address:#x} are mapped already, or no whole handle.")
        self._mmap(address, num_bytes, mmap.MAP_SHARED | _FIXED, self._file, handle.offset)
        self._maps[address] = num_bytes

    def allow(self, address: int, num_bytes: int, read_only: bool) -> None:
        self._covered(address, num_bytes)
        self._check(self._libc.mprotect(address, num_bytes, _READ if read_only else _READ_WRITE), "mprotect")
        if address in self._heads:
            ctypes.memmove(address, self._heads[address], len(self._heads[address]))

    def unmap(self, address: int, num_bytes: int) -> None:
        for at in self._covered(address, num_bytes):
            del self._maps[at]
        self._replace_by_nothing(address, num_bytes)

    def clear(self, address: int, num_bytes: int) -> None:
        head = len(self._heads.get(address, b""))
        ctypes.memset(address + head, 0, num_bytes - head)

    def settle(self) -> None:
        """`clear` is done when it returns."""

    def begin_thread(self) -> None:
        """Nothing belongs to a thread here."""

    def _covered(self, address: int, num_bytes: int) -> list[int]:
        """The maps that make up a range."""
        found, at = [], address
        while at < address + num_bytes:
            if at not in self._maps:
                raise EngineDeadError(f"There is no map at {at:#x}.")
            found.append(at)
            at += self._maps[at]
        return found

    def _replace_by_nothing(self, address: int, num_bytes: int) -> None:
        self._mmap(address, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | _FIXED, -1, 0)

    def _mmap(
        self, address: int | None, num_bytes: int, flags: int, file: int, offset: int, access: int = _NONE
    ) -> int:
        found = self._libc.mmap(address, num_bytes, access, flags, file, offset)
        if found is None or found == ctypes.c_void_p(-1).value:
            self._check(-1, "mmap")
        return int(found)

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            error = ctypes.get_errno()
            raise OutOfMemoryError(f"{what} failed: {os.strerror(error)} (vm.max_map_count bounds the maps).")
