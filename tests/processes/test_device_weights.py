"""Weights that engine processes read where the sender has them, on a device that is the host's memory."""

import itertools
import logging
import os
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jpaged.api.errors import InvalidParameterError
from jpaged.host import device_memory
from jpaged.host.device_memory import MemoryNotSharedError, SharedMemoryDevice
from jpaged.processes import opened_weights, wire
from jpaged.processes.descriptors import DescriptorServer, take_descriptors
from jpaged.processes.device_weights import DeviceWeights
from jpaged.processes.opened_weights import opened
from jpaged.processes.weight_delivery import WeightDelivery
from tests.processes.conftest import UUID
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda, on_device


@pytest.fixture
def other() -> FakeCuda:
    """The driver of another process, which `fake_cuda.install` makes this one's."""
    return FakeCuda(UUID, is_other_process=True)


def message(weights: DeviceWeights) -> wire.UpdateWeightsOnDevice:
    """As it arrives."""
    sent = wire.UpdateWeightsOnDevice(weights.address, weights.allocations, weights.arrays, False, "recompute")
    [call] = wire.FrameReader(wire.ToEngine).feed(wire.frame(wire.Call(1, sent)))
    return call.question


@pytest.mark.parametrize("created", [True, False], ids=["cuMemCreate", "cuMemAlloc"])
def test_arrays_are_read_where_the_sender_has_them(cuda, other, created):
    rng = np.random.default_rng()
    given = {
        "bf16": jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16),
        "nested.half": rng.normal(size=(7,)).astype(np.float16),
        "number": np.float32(rng.normal()),
    }
    arrays = on_device(cuda, given, created)
    before = len(os.listdir("/proc/self/fd"))
    sent = DeviceWeights(
        {"bf16": arrays["bf16"], "nested": {"half": arrays["nested.half"]}, "number": arrays["number"]}
    )
    assert len(sent.allocations) == 1, "what lies in one allocation is exported once"
    fake_cuda.install(other)
    with opened(message(sent)) as views:
        assert len(other.mapped) == 1
        for name, view in views.items():
            assert view.dtype == arrays[name].dtype
            np.testing.assert_array_equal(np.asarray(view), np.asarray(given[name]))
        [base] = other.mapped
        assert views["bf16"].unsafe_buffer_pointer() == base, "nothing was copied"
        assert "cuCtxSynchronize" not in other.calls
    ends = "cuMemUnmap" if created else "cuIpcCloseMemHandle"
    assert other.calls.index("cuCtxSynchronize") < other.calls.index(ends), "a program may be reading until then"
    assert all(view.is_deleted() for view in views.values())
    assert (other.mapped, other.handles) == ({}, {})
    sent.close()
    sent.close()
    assert len(os.listdir("/proc/self/fd")) == before
    if created:
        with pytest.raises(MemoryNotSharedError, match="no descriptors can be had"), opened(message(sent)):
            pass


def test_a_process_that_cannot_have_the_memory_keeps_nothing_of_it(cuda, other, monkeypatch):
    sent = DeviceWeights(on_device(cuda, {"a": np.ones(3, np.float32)}))
    fake_cuda.install(other)
    other.failing = {"cuMemSetAccess"}
    with pytest.raises(MemoryNotSharedError, match="cuMemSetAccess"), opened(message(sent)):
        pass
    other.failing = set()
    with monkeypatch.context() as patch:
        patch.setattr(opened_weights, "view", Mock(side_effect=RuntimeError("no such layout")))
        with pytest.raises(MemoryNotSharedError, match="JAX does not take 'a': no such layout"), opened(message(sent)):
            pass
    elsewhere = FakeCuda(bytes(16))
    fake_cuda.install(elsewhere)
    unseen = f"does not see the GPU with UUID {UUID.hex()}"
    with pytest.raises(MemoryNotSharedError, match=unseen), opened(message(sent)):
        pass
    sent.close()
    for driver in (other, elsewhere):
        assert (driver.mapped, driver.handles) == ({}, {})


def test_what_cannot_stay_on_the_device_goes_through_host_memory_and_says_why(cuda, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "jpaged.engine")
    array = on_device(cuda, {"a": np.ones((2, 3), np.float32)})["a"]
    [device] = array.devices()
    fortran = jax.device_put(jnp.ones((2, 3)), Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(device)))
    other_order = fortran.format.layout.major_to_minor == (1, 0)
    for weights, reason in (
        ({"a": array, "b": np.ones(2)}, "'b' is a ndarray, not an array of JAX"),
        ({"a": on_device(cuda, {"a": np.ones(2, np.float32)})["a"].astype(jnp.int32)}, "'a' has type int32"),
        ({"a": jnp.zeros((0, 2))}, "'a' has no memory of the device"),
        ({"a": jnp.ones(2)}, "cuMemGetAddressRange_v2 failed"),
        *([({"a": fortran}, "'a' is not in C order")] if other_order else []),
    ):
        caplog.clear()
        delivery = WeightDelivery(weights, False, "recompute", keep=False)
        assert isinstance(delivery.first(), wire.UpdateWeights)
        assert reason in caplog.text
        assert delivery.seconds.keys() == {"copy"}
        delivery.close()
    with monkeypatch.context() as patch:
        patch.setattr(type(array), "is_fully_replicated", False)
        with pytest.raises(MemoryNotSharedError, match="'a' is split over devices"):
            DeviceWeights({"a": array})
    before = len(os.listdir("/proc/self/fd"))
    for call in ("cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuCtxPushCurrent_v2"):
        cuda.failing = {call, "cuIpcGetMemHandle"}
        delivery = WeightDelivery({"a": array}, False, "recompute", keep=False)
        assert isinstance(delivery.first(), wire.UpdateWeights), call
        delivery.close()
        assert len(os.listdir("/proc/self/fd")) == before
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(InvalidParameterError, match=r"'a' cannot be copied to the host: .*deleted"):
        WeightDelivery({"a": gone}, False, "recompute", keep=False).first()


def test_memory_of_arrays_that_are_donated_meanwhile_stays_until_nobody_reads_it(cuda, monkeypatch):
    class OwnMemory(SharedMemoryDevice):
        """For which an array of JAX's own is an allocation."""

        def allocation_of(self, address: int) -> tuple[int, int]:
            return address, 4096

        def export(self, base: int) -> bytes:
            return bytes(64)

    device = OwnMemory(cuda, 0)
    monkeypatch.setitem(device_memory.BY_PLATFORM, "cpu", lambda ordinal: device)
    add_in_place = jax.jit(lambda array: array + 1, donate_argnums=0)
    array = jnp.full(1024, 7.0) + 0
    address = array.unsafe_buffer_pointer()
    sent = DeviceWeights({"a": array})
    assert add_in_place(array).unsafe_buffer_pointer() != address
    sent.close()
    assert add_in_place(array).unsafe_buffer_pointer() == address


def test_weights_that_nobody_has_any_more_are_let_go_of(cuda):
    arrays = on_device(cuda, {"a": np.ones(3, np.float32)})
    before = len(os.listdir("/proc/self/fd"))
    address = DeviceWeights(arrays).address
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match="refused"):
        take_descriptors(address)


def test_descriptors_come_in_order_however_many_and_not_after_the_end():
    pipes = [os.pipe() for _ in range(150)]
    server = DescriptorServer([read for read, _ in pipes])
    taken = [take_descriptors(server.address) for _ in range(2)]
    assert not any(os.get_inheritable(fd) for fds in taken for fd in fds)
    assert take_descriptors(server.address[:-1] + "g") == [], "the name alone, which all may read, is not enough"
    server.close()
    server.close()
    for fds in taken:
        assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(read).st_ino for read, _ in pipes]
    for fd in itertools.chain(*taken, *pipes):
        os.close(fd)
    with pytest.raises(OSError, match="refused"):
        take_descriptors(server.address)
