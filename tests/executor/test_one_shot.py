"""Which devices and models sum by the one-shot all-reduce, with devices that are not there."""

from types import SimpleNamespace

import pytest

from jpaged import EngineArgs
from jpaged.errors import InvalidParameterError
from jpaged.executor import one_shot
from jpaged.executor.one_shot import DEFAULT_ROWS, one_shot_rows

HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", core_count=132, local_hardware_id=0)


def mesh(devices: int = 2, **changes):
    return SimpleNamespace(size=devices, devices=[SimpleNamespace(**vars(HOPPER) | changes)] * devices)


def shard(hidden: int = 4096, dtype: str = "bfloat16"):
    return SimpleNamespace(config=SimpleNamespace(hidden_size=hidden), dtype=dtype)


@pytest.fixture(autouse=True)
def linked_hoppers(monkeypatch):
    def unsupported(hidden, dtype, num_devices):
        return "rows do not fit" if hidden > 8192 else "not of 16 bits" if dtype == "float32" else None

    monkeypatch.setattr(one_shot, "device_runs_mosaic", lambda: True)
    monkeypatch.setattr(one_shot, "all_reduce_unsupported", unsupported)
    monkeypatch.setattr(one_shot, "_are_linked", lambda gpus: True)


def test_linked_hopper_gpus_take_the_kernel_up_to_a_default_or_what_is_asked():
    assert one_shot_rows(None, None, shard(), mesh()) == DEFAULT_ROWS
    assert one_shot_rows(None, "mosaic", shard(), mesh(8)) == DEFAULT_ROWS
    assert one_shot_rows(512, None, shard(), mesh()) == 512
    assert one_shot_rows(0, None, shard(), mesh()) == 0


@pytest.mark.parametrize("cpu", [True, False])
def test_without_kernels_nothing_is_one_shot_unless_asked(cpu):
    devices, backend = (mesh(platform="cpu"), None) if cpu else (mesh(), "xla")
    assert one_shot_rows(None, backend, shard(), devices) == 0
    assert one_shot_rows(32, backend, shard(), devices) == 32


def test_one_device_adds_nothing():
    assert one_shot_rows(None, None, shard(), mesh(1)) == 0


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("float32", (shard(dtype="float32"), mesh()), "not of 16 bits"),
        ("wide", (shard(16384), mesh()), "rows do not fit"),
        ("few multiprocessors", (shard(), mesh(core_count=78)), "has 78 multiprocessors"),
        ("older", (shard(), mesh(device_kind="NVIDIA A100")), "NVIDIA A100 is not of the Hopper generation"),
        ("apart", (shard(), mesh()), "NVLink does not join"),
        ("several processes", (shard(), mesh()), "several processes"),
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_xla_and_refused_where_asked_for(monkeypatch, name, given, reason):
    if name == "older":
        monkeypatch.setattr(one_shot, "device_runs_mosaic", lambda: False)
    if name == "apart":
        monkeypatch.setattr(one_shot, "_are_linked", lambda gpus: False)
    if name == "several processes":
        monkeypatch.setattr(one_shot.jax, "process_count", lambda: 2)
    assert one_shot_rows(None, None, *given) == 0
    with pytest.raises(InvalidParameterError, match=f"one_shot_rows=64 cannot be had: .*{reason}"):
        one_shot_rows(64, None, *given)


def test_the_option_is_checked_at_the_door():
    with pytest.raises(InvalidParameterError, match="one_shot_rows must be at least 0"):
        EngineArgs(one_shot_rows=-1, tensor_parallel_size=2)
    with pytest.raises(InvalidParameterError, match="one_shot_rows=8 needs a tensor_parallel_size above 1"):
        EngineArgs(one_shot_rows=8)
    assert EngineArgs(one_shot_rows=0).one_shot_rows == 0
