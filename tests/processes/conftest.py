"""Engine processes that break where a test says so, and a device whose memory they share with this process."""

import os
from collections.abc import Iterator

import pytest

from jpaged.host import device_memory
from jpaged.processes import launch
from tests.support import fake_cuda

UUID = bytes(range(16, 32))


@pytest.fixture
def fragile_processes(monkeypatch):
    """Engine processes are those of `tests.support.fragile_engine`, which variables tell where to break."""

    def command(module, *arguments):
        return real(module.replace("jpaged.processes.engine_process", "tests.support.fragile_engine"), *arguments)

    real = launch.python_command
    monkeypatch.setattr(launch, "python_command", command)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


@pytest.fixture
def cuda(monkeypatch) -> Iterator[fake_cuda.FakeCuda]:
    """The driver of this process, whose CPU is the device `UUID`; it is that of fragile processes, too."""
    made = fake_cuda.FakeCuda(UUID)
    monkeypatch.setattr(device_memory, "BY_PLATFORM", dict(device_memory.BY_PLATFORM))
    monkeypatch.setenv(fake_cuda.VARIABLE, UUID.hex())
    fake_cuda.install(made)
    yield made
    assert (made.num_current, made.mapped, made.handles) == (0, {}, {})
    made.free()
