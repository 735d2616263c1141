"""What a start says of the kernels' backend, on devices that are not there."""

import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.start.startup import _check_backend, start
from jpaged.pallas_kernels import devices, registry
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
