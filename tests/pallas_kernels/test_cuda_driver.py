"""Whether the GPU's driver is left to compile Triton's kernels, and where it keeps them."""

import ctypes
import re
from pathlib import Path

import pytest

from jpaged.pallas_kernels.common import cuda_driver

VARIABLES = ("CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE", "CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")


class MadeUpDriver:
    """libcuda, as far as it is asked. It refuses to count devices until it is started."""

    def __init__(self, version: int, is_started: bool = False) -> None:
        self.version, self.is_started = version, is_started

    def cuDriverGetVersion(self, found: object) -> int:  # CUDA's name
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return 0

    def cuDeviceGetCount(self, found: object) -> int:  # CUDA's name
        return 0 if self.is_started else 3


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty home, and no variable of CUDA's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def install(monkeypatch):
    """Installs a driver, or none."""

    def install(driver: MadeUpDriver | None) -> None:
        monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
        cuda_driver._version.cache_clear()

    yield install
    cuda_driver._version.cache_clear()


def test_a_driver_that_keeps_what_it_compiles_may_compile(home, install):
    install(MadeUpDriver(12040))
    assert cuda_driver.why_not_compiler() is None
    assert cuda_driver.code_directory() == home / ".nv/ComputeCache"
    assert list(cuda_driver.code_directory().iterdir()) == []  # what tried it left nothing
    assert not cuda_driver.wants_code_directory()


@pytest.mark.parametrize(
    ("driver", "reason"),
    [(None, "no NVIDIA driver"), (MadeUpDriver(12020), r"driver is of CUDA 12\.2; install one of CUDA 12\.4 or newer")],
)
def test_a_driver_that_is_missing_or_too_old_may_not(home, install, driver, reason):
    install(driver)
    assert re.search(reason, cuda_driver.why_not_compiler())


@pytest.mark.parametrize("name", VARIABLES[1:])
def test_a_variable_that_keeps_the_driver_from_it_is_named(home, install, monkeypatch, name):
    install(MadeUpDriver(13000))
    monkeypatch.setenv(name, "0")
    assert cuda_driver.why_not_compiler() is None
    monkeypatch.setenv(name, "1")
    assert cuda_driver.why_not_compiler() == f"{name}=1 keeps the driver from compiling kernels once for all; unset it"


def test_a_directory_that_cannot_be_written_is_named_with_the_fix(home, install, monkeypatch):
    install(MadeUpDriver(13000))
    (home / ".nv").write_text("a file in the way")
    assert f"{home / '.nv/ComputeCache'}; set CUDA_CACHE_PATH" in cuda_driver.why_not_compiler()
    monkeypatch.setenv("CUDA_CACHE_PATH", str(home / "elsewhere"))
    assert cuda_driver.why_not_compiler() is None
    assert cuda_driver.code_directory() == Path(home, "elsewhere")


def test_another_directory_helps_before_the_driver_is_started_and_where_nobody_chose_one(home, install, monkeypatch):
    (home / ".nv").write_text("a file in the way")
    install(None)
    assert not cuda_driver.wants_code_directory()
    install(MadeUpDriver(13000, is_started=True))
    assert not cuda_driver.wants_code_directory()
    install(MadeUpDriver(13000))
    assert cuda_driver.wants_code_directory()
    monkeypatch.setenv("CUDA_CACHE_PATH", str(home / ".nv" / "chosen"))
    assert not cuda_driver.wants_code_directory()
