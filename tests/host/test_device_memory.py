"""Device memory that two processes share, with a fake driver whose device memory is the host's."""

import ctypes
import os
from collections.abc import Iterator

import jax
import pytest

from jpaged.host.device_memory import MemoryNotSharedError, SharedMemoryDevice, gpu, shared_memory_device
from tests.support.fake_cuda import FakeCuda

UUID = bytes(range(16))


@pytest.fixture
def drivers() -> Iterator[list[FakeCuda]]:
    """Of who exports, and of who opens."""
    made = [FakeCuda(UUID), FakeCuda(UUID, is_other_process=True)]
    yield made
    made[0].free()
    for driver in made:
        assert (driver.num_current, driver.mapped, driver.handles) == (0, {}, {})


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("created", [True, False], ids=["cuMemCreate", "cuMemAlloc"])
def test_what_one_process_exports_another_reads_while_it_has_it_open(drivers, created):
    exporting, opening = (SharedMemoryDevice(driver, 0) for driver in drivers)
    drivers[1].peers = {0: True, 1: True, 2: False}  # all that can read the memory may
    address = drivers[0].allocate(8192, created)
    ctypes.memmove(address + 4096, b"weights", 7)
    before = _descriptors()
    assert exporting.uuid == opening.uuid == UUID
    assert exporting.allocation_of(address + 4096) == (address, 8192)
    exported = exporting.export(address)
    assert isinstance(exported, int) == created
    assert not (created and os.get_inheritable(exported))
    base = opening.open(exported, 8192)
    if isinstance(exported, int):
        os.close(exported)
    assert ctypes.string_at(base + 4096, 7) == b"weights"
    opening.synchronize()
    opening.close(base)
    assert _descriptors() == before


@pytest.mark.parametrize("created", [True, False], ids=["cuMemCreate", "cuMemAlloc"])
def test_a_call_that_fails_is_named_and_leaves_nothing_behind(drivers, created):
    exporting, opening = (SharedMemoryDevice(driver, 0) for driver in drivers)
    address = drivers[0].allocate(4096, created)
    exported = exporting.export(address)
    if created:
        exports = "cuMemExportToShareableHandle"
        opens = [
            "cuMemImportFromShareableHandle",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuDeviceGetCount",
            "cuMemSetAccess",
        ]
    else:
        exports, opens = "cuIpcGetMemHandle", ["cuIpcOpenMemHandle_v2"]
    for name in ("cuCtxPushCurrent_v2", *opens):
        drivers[1].failing = {name}
        with pytest.raises(MemoryNotSharedError, match=f"{name} failed: CUDA_ERROR_OUT_OF_MEMORY"):
            opening.open(exported, 4096)
        assert (drivers[1].num_current, drivers[1].mapped, drivers[1].handles) == (0, {}, {})
    drivers[0].failing = {exports}
    with pytest.raises(MemoryNotSharedError, match=exports):
        exporting.export(address)
    with pytest.raises(MemoryNotSharedError, match=r"cuMemGetAddressRange_v2 failed: CUDA_ERROR_INVALID_VALUE"):
        exporting.allocation_of(1)
    for name in ("cuInit", "cuDeviceGet", "cuDeviceGetUuid_v2", "cuDevicePrimaryCtxRetain"):
        drivers[0].failing = {name}
        with pytest.raises(MemoryNotSharedError, match=name):
            SharedMemoryDevice(drivers[0], 0)
    if isinstance(exported, int):
        os.close(exported)


def test_a_handle_is_not_opened_in_its_own_process(drivers):
    device = SharedMemoryDevice(drivers[0], 0)
    handle = device.export(drivers[0].allocate(4096, created=False))
    with pytest.raises(MemoryNotSharedError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_CONTEXT"):
        device.open(handle, 4096)


def test_a_driver_without_the_calls_is_too_old():
    class Old(FakeCuda):
        _cuDeviceGetUuid_v2 = None

    with pytest.raises(MemoryNotSharedError, match=r"driver is too old: undefined symbol: cuDeviceGetUuid_v2"):
        SharedMemoryDevice(Old(UUID), 0)


def test_without_a_driver_or_with_another_device_memory_is_not_shared(monkeypatch):
    with pytest.raises(MemoryNotSharedError, match="is no GPU"):
        shared_memory_device(jax.devices("cpu")[0])

    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("jpaged.host.device_memory.ctypes.CDLL", missing)
    gpu.cache_clear()
    with pytest.raises(MemoryNotSharedError, match=r"there is no NVIDIA driver: libcuda\.so\.1"):
        gpu(0)
    gpu.cache_clear()
