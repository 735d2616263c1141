"""Which devices and models sum by the one-shot all-reduce, with devices that are not there."""

from types import SimpleNamespace

import pytest

from jpaged import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.start import one_shot
from jpaged.executor.start.one_shot import one_shot_rows
from jpaged.pallas_kernels import all_reduce_unsupported, devices, registry
from jpaged.pallas_kernels.all_reduce import limits

HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", core_count=132, local_hardware_id=0)


def mesh(devices: int = 2, **changes):
    return SimpleNamespace(size=devices, devices=[SimpleNamespace(**vars(HOPPER) | changes)] * devices)


def shard(hidden: int = 4096, dtype: str = "bfloat16"):
    return SimpleNamespace(config=SimpleNamespace(hidden_size=hidden), dtype=dtype)


@pytest.fixture(autouse=True)
def linked_hoppers(monkeypatch):
    def unsupported(hidden, dtype, num_devices, among):
        return "rows do not fit" if hidden > 8192 else "not of 16 bits" if dtype == "float32" else None

    monkeypatch.setattr(one_shot, "kernels_here", lambda backend: (backend or "hopper",))
    monkeypatch.setattr(one_shot, "all_reduce_unsupported", unsupported)
    monkeypatch.setattr(limits, "_are_linked", lambda gpus: True)


def test_linked_hopper_gpus_take_the_kernel_up_to_what_was_measured_on_so_many_or_what_is_asked():
    assert one_shot_rows(None, None, shard(), mesh()) == 8192
    assert one_shot_rows(None, None, shard(), mesh(4)) == 256
    assert one_shot_rows(None, "hopper", shard(), mesh(8)) == 64
    for rows in (0, 512, 8192):
        assert one_shot_rows(rows, None, shard(), mesh()) == rows


def test_more_rows_than_the_kernel_can_count_are_refused_with_how_many_it_can():
    assert one_shot_rows(37_449, None, shard(8192), mesh(8)) == 37_449
    with pytest.raises(InvalidParameterError, match="one_shot_rows=37450 exceeds the 37449 rows of 8192"):
        one_shot_rows(37_450, None, shard(8192), mesh(8))


def test_the_limit_is_the_largest_step_within_it_so_that_no_memory_is_kept_for_rows_that_never_come():
    config = ExecutorConfig(
        max_num_seqs=48,
        max_model_len=64,
        block_size=16,
        num_blocks=8,
        decode_buckets=(8, 48),
        token_buckets=(64, 256),
    )
    assert [config.largest_body(rows) for rows in (0, 7, 8, 63, 100, 1024)] == [0, 0, 8, 48, 64, 256]


@pytest.mark.parametrize("cpu", [True, False])
def test_without_kernels_nothing_is_one_shot_unless_asked(cpu):
    devices, backend = (mesh(platform="cpu"), None) if cpu else (mesh(), "xla")
    assert one_shot_rows(None, backend, shard(), devices) == 0
    assert one_shot_rows(32, backend, shard(), devices) == 32


@pytest.mark.parametrize("forced", [None, "toy"])
def test_the_op_is_asked_whether_a_backend_from_outside_has_the_kernel(monkeypatch, forced):
    monkeypatch.setattr(one_shot, "kernels_here", registry.kernels_here)
    monkeypatch.setattr(one_shot, "all_reduce_unsupported", all_reduce_unsupported)
    monkeypatch.setattr(devices, "default_device", lambda: devices.Device("gpu", (8, 0)))
    registry.register_backend("toy", runs_on=lambda device: device.capability == (8, 0))
    try:
        assert one_shot_rows(None, forced, shard(), mesh()) == 0
        for op in ("all_reduce_peers", "all_reduce_add_norm"):
            with pytest.raises(InvalidParameterError, match="one_shot_rows=64 cannot be had: there is no such kernel"):
                one_shot_rows(64, forced, shard(), mesh())
            registry.register_implementation(op, "toy", print)
        assert one_shot_rows(None, forced, shard(), mesh()) == 8192
        with pytest.raises(InvalidParameterError, match="the backend 'hopper' are not made for NVIDIA H200"):
            one_shot_rows(64, "hopper", shard(), mesh())
    finally:
        registry.unregister_backend("toy")


def test_one_device_adds_nothing():
    assert one_shot_rows(None, None, shard(), mesh(1)) == 0


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("float32", (shard(dtype="float32"), mesh()), "not of 16 bits"),
        ("wide", (shard(16384), mesh()), "rows do not fit"),
        ("few multiprocessors", (shard(), mesh(core_count=78)), "has 78 multiprocessors"),
        ("older", (shard(), mesh(device_kind="NVIDIA A100")), "the kernels are not made for NVIDIA A100"),
        ("apart", (shard(), mesh()), "NVLink does not join"),
        ("several processes", (shard(), mesh()), "several processes"),
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_xla_and_refused_where_asked_for(monkeypatch, name, given, reason):
    if name == "older":
        monkeypatch.setattr(one_shot, "kernels_here", lambda backend: ())
    if name == "apart":
        monkeypatch.setattr(limits, "_are_linked", lambda gpus: False)
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
