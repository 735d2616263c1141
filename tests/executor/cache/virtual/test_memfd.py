"""The driver for CPUs: what is mapped where, and that a stray read or write ends the process."""

import ctypes
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError, OutOfMemoryError
from jpaged.executor.cache.virtual.arrays import CpuRanges
from jpaged.executor.cache.virtual.memfd import LEAST_ADOPTED, MemfdDriver, Memory

PAGE = MemfdDriver.granularity


@pytest.fixture
def driver():
    driver = MemfdDriver(Memory(16 * PAGE))
    yield driver
    driver.close()


def put(address: int, value: int) -> None:
    ctypes.c_int64.from_address(address).value = value


def get(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def test_one_page_below_two_addresses_is_the_same_memory(driver):
    base, page = driver.reserve(8 * PAGE), driver.create(PAGE)
    for address in (base, base + 5 * PAGE):
        driver.map(address, page, PAGE)
        driver.allow(address, PAGE, read_only=False)
    put(base + 8, 42)
    assert get(base + 5 * PAGE + 8) == 42
    driver.unmap(base, PAGE)
    assert get(base + 5 * PAGE + 8) == 42


def test_released_memory_comes_back_as_zeros_and_counts_no_more(driver):
    base, page = driver.reserve(PAGE), driver.create(PAGE)
    driver.map(base, page, PAGE)
    driver.allow(base, PAGE, read_only=False)
    put(base, 7)
    driver.unmap(base, PAGE)
    driver.release(page)
    assert driver.memory.num_used == 0
    driver.map(base, driver.create(PAGE), PAGE)
    driver.allow(base, PAGE, read_only=False)
    assert get(base) == 0


def test_more_memory_than_there_is_is_refused(driver):
    pages = [driver.create(PAGE) for _ in range(16)]
    with pytest.raises(OutOfMemoryError, match="65536 of 65536 bytes are in use"):
        driver.create(PAGE)
    driver.release(pages[3])
    driver.create(PAGE)


def test_mapping_twice_and_unmapping_nothing_are_refused(driver):
    base, page = driver.reserve(2 * PAGE), driver.create(PAGE)
    driver.map(base, page, PAGE)
    with pytest.raises(EngineDeadError, match="mapped already"):
        driver.map(base, page, PAGE)
    with pytest.raises(EngineDeadError, match="no map"):
        driver.unmap(base + PAGE, PAGE)


FAULTS = {
    "read of nothing": "get(base + PAGE)",
    "write to nothing": "put(base + PAGE, 1)",
    "read after unmap": "driver.unmap(base, PAGE); get(base)",
    "write to a page that may be read": "driver.allow(base, PAGE, read_only=True); get(base); put(base, 1)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stray_access_ends_the_process(fault):
    program = f"""
from tests.executor.cache.virtual.test_memfd import *
driver = MemfdDriver(Memory(4 * PAGE))
base = driver.reserve(4 * PAGE)
driver.map(base, driver.create(PAGE), PAGE)
driver.allow(base, PAGE, read_only=False)
put(base, 1)
print(get(base), flush=True)
{FAULTS[fault]}
print("survived")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "1\n"
    assert ended.returncode == -signal.SIGSEGV


def test_an_adopted_array_is_updated_in_place_where_it_has_pages():
    """XLA touches no other part of it, though the array is hundreds of times what is mapped."""
    ranges = CpuRanges(jax.devices()[0], 8 * PAGE)
    rows = LEAST_ADOPTED // PAGE + 2
    array, begin = ranges.array((rows, PAGE // 4), np.dtype(np.float32))
    address = array.unsafe_buffer_pointer()
    pages = [ranges.driver.create(PAGE) for _ in range(3)]
    for place, page in ((0, pages[0]), (100, pages[1]), (7000, pages[1])):
        ranges.driver.map(begin + place * PAGE, page, PAGE)
        ranges.driver.allow(begin + place * PAGE, PAGE, read_only=False)

    def write(array, row, value):
        return array.at[row, :8].set(value)

    step = jax.jit(write, donate_argnums=0)
    for row, value in ((0, 1.0), (100, 2.0), (0, 3.0)):
        array = step(array, row, value)
    assert array.block_until_ready().unsafe_buffer_pointer() == address
    read = jax.jit(lambda array, row: jax.lax.dynamic_slice(array, (row, 0), (1, 8)))
    assert jnp.all(read(array, 7000) == 2.0)
    assert jnp.all(read(array, 0) == 3.0)
    for place in (0, 100, 7000):
        ranges.driver.unmap(begin + place * PAGE, PAGE)
    ranges.free()
    array.delete()
    ranges.driver.close()


_FULL_HEAP = """
import ctypes

import jax
import numpy as np

from jpaged.executor.cache.virtual.arrays import CpuRanges
from jpaged.executor.cache.virtual.memfd import LEAST_ADOPTED

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
TRIM_THRESHOLD, MMAP_MAX = -1, -4
assert libc.mallopt(TRIM_THRESHOLD, 2**31 - 1) and libc.mallopt(MMAP_MAX, 0)
libc.free(libc.malloc(8 * LEAST_ADOPTED))  # the heap keeps it, and has room for several arrays
assert libc.mallopt(MMAP_MAX, 65536)
ranges = CpuRanges(jax.devices()[0], LEAST_ADOPTED)
array, begin = ranges.array((LEAST_ADOPTED // 4,), np.dtype(np.float32))
assert begin % 4096 == 0
print("adopted")
"""


def test_an_array_is_adopted_though_the_heap_has_room_for_it():
    found = subprocess.run([sys.executable, "-c", _FULL_HEAP], capture_output=True, text=True, check=False)
    assert "adopted" in found.stdout, found.stderr
