"""What a start says of the kernels' backend, on devices that are not there."""

import os

import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.start.startup import _check_backend, _place_code_of_driver, start
from jpaged.pallas_kernels import devices, registry
from jpaged.pallas_kernels.common import cuda_driver, native_calls
from jpaged.pallas_kernels.devices import Device


@pytest.fixture
def a100_without_triton(monkeypatch):
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (8, 0)))
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    monkeypatch.setattr(registry.sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(registry, "_jax_version", lambda: (0, 11))
    registry._triton_missing.cache_clear()
    yield
    registry._triton_missing.cache_clear()


def test_a_gpu_without_its_kernels_is_told_what_it_loses_and_how_to_have_them(a100_without_triton, caplog):
    _check_backend(None)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    for part in ("GPU of compute capability 8.0", "plain XLA", "jax_triton and triton", "jpaged[cuda13]"):
        assert part in said


def test_nothing_is_said_where_xla_is_asked_for_or_nothing_is_lost(a100_without_triton, caplog, monkeypatch):
    _check_backend("xla")
    for device in (Device("cpu"), Device("gpu", (7, 5))):
        monkeypatch.setattr(devices, "default_device", lambda device=device: device)
        _check_backend(None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("backend", "reason"), [("triton", "jax_triton and triton cannot be imported"), ("hopper", "")]
)
def test_a_forced_backend_that_cannot_run_is_refused_with_the_reason(a100_without_triton, backend, reason):
    with pytest.raises(InvalidParameterError, match=f"kernel_backend='{backend}' cannot serve this: .*{reason}"):
        _check_backend(backend)


def test_a_wrong_word_for_calls_of_triton_kernels_is_refused_at_the_start_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("JPAGED_TRITON_CALLS", "fast")
    with pytest.raises(InvalidParameterError, match="JPAGED_TRITON_CALLS must be ffi or native, got 'fast'; unset it"):
        start(EngineArgs(model=str(tmp_path)), tmp_path)


@pytest.fixture
def refused_native_calls(monkeypatch):
    """An A100 whose driver may not compile Triton's kernels."""
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (8, 0)))
    monkeypatch.setattr(registry, "lost_here", lambda: None)  # as with jax-triton installed, which 3.11 cannot have
    monkeypatch.setattr(registry, "preferred_here", lambda: "triton")
    monkeypatch.setattr(native_calls, "why_not_default", lambda: "CUDA_CACHE_DISABLE=1 is set; unset it")
    monkeypatch.delenv(native_calls.VARIABLE, raising=False)


def test_a_gpu_whose_triton_kernels_jaxlib_has_to_launch_is_told_why(refused_native_calls, caplog):
    _check_backend(None)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "CUDA_CACHE_DISABLE=1 is set; unset it. JPAGED_TRITON_CALLS=ffi silences this" in record.getMessage()


@pytest.mark.parametrize("way", ["ffi", "native"])
def test_nothing_is_said_of_calls_that_were_asked_for_by_name(refused_native_calls, monkeypatch, way):
    assert registry.slower_calls_here("triton") is not None
    monkeypatch.setenv("JPAGED_TRITON_CALLS", way)
    assert registry.slower_calls_here("triton") is None


def test_nothing_is_said_where_no_triton_kernel_runs(refused_native_calls, monkeypatch):
    assert registry.slower_calls_here("xla") is None
    monkeypatch.setattr(devices, "default_device", lambda: Device("cpu"))
    assert registry.slower_calls_here("triton") is None


def test_the_driver_keeps_its_code_beside_the_programs_where_it_has_no_place(monkeypatch, tmp_path):
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_CACHE_PATH", raising=False)
    monkeypatch.setattr(cuda_driver, "wants_code_directory", lambda: False)
    _place_code_of_driver()
    assert "CUDA_CACHE_PATH" not in os.environ
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(cuda_driver, "wants_code_directory", lambda: True)
    _place_code_of_driver()
    assert os.environ.pop("CUDA_CACHE_PATH") == str(tmp_path / "cuda")
    monkeypatch.setenv("JPAGED_CACHE_DIR", "")
    _place_code_of_driver()
    assert "CUDA_CACHE_PATH" not in os.environ
