"""How many blocks a device gets, for devices of made-up sizes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import pytest

from jpaged.api.errors import OutOfMemoryError
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start import memory
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.memory import CPU_POOL_BYTES, MemoryPlan, plan_memory
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build
from tests.tiny_models import tiny_model

CONFIG = ExecutorConfig(
    max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=64, decode_buckets=(4,), token_buckets=(16,)
)
pytestmark = pytest.mark.xdist_group("memory")  # one worker, which compiles once

MODEL = build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "bfloat16")
SETUP = Setup.of(MODEL, CONFIG)
GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Callable[..., MemoryPlan]:
    """Plans with the same programs."""
    compiler = Compiler(SETUP, DeviceMesh(jax.devices()[:1]))

    def plan(limit: int | None, num_blocks: int | None = None, depth: int = 2) -> MemoryPlan:
        return plan_memory(compiler, limit, num_blocks, depth)

    return plan


def test_a_block_holds_keys_and_values_of_every_layer():
    assert SETUP.cache.block_bytes == 2 * 2 * 2 * 16 * 64 * 2  # layers, K and V, heads, tokens, head_dim


def test_the_pool_takes_what_is_left_and_no_more(plan):
    memory = plan(GIB)
    used = memory.weights + memory.state + memory.programs + memory.pool
    assert GIB - memory.block < used <= GIB
    assert memory.weights == 2 * MODEL.num_parameters
    assert memory.programs > 0
    assert plan(2 * GIB).num_blocks - memory.num_blocks == GIB // memory.block


def test_blocks_that_only_count_tokens_are_no_more_than_sequences_and_snapshots_have():
    model = build(ModelConfig.from_dict(tiny_model("codestral-mamba-style").config), "bfloat16")
    setup = Setup.of(model, replace(CONFIG, num_state_snapshots=3))
    compiler: Any = SimpleNamespace(setup=setup, state_bytes=0)
    with mock.patch.object(memory, "_program_bytes", return_value=0):
        found = plan_memory(compiler, GIB, None, 2)
    assert found.num_blocks == (4 + 3) * setup.cache.sequence_blocks(64) + 1 < GIB // found.block


def test_deeper_pipelines_keep_more_results_alive(plan):
    assert plan(GIB, depth=8).programs > plan(GIB, depth=0).programs


def test_blocks_that_do_not_fit_are_refused_with_what_would_fit(plan):
    most = plan(GIB).num_blocks
    assert plan(GIB, most).num_blocks == most
    with pytest.raises(OutOfMemoryError, match=f"leaves {most} blocks .* num_gpu_blocks_override={most + 1} does not"):
        plan(GIB, most + 1)
    with pytest.raises(OutOfMemoryError, match="no room for a KV pool"):
        plan(2**20)


def test_a_cpu_gives_what_its_slots_can_use_up_to_a_bound(plan):
    assert plan(None).num_blocks == 4 * 4 + 1
    assert plan(None, 7).num_blocks == 7
    assert plan(None).pool <= CPU_POOL_BYTES


class FakeGPU:
    """A device of 80 GiB. limit, reserved, in_use: of this process's JAX, in GiB; others: what other processes have.

    An array goes where memory is reserved and free, in one piece; otherwise the device gives it, of what others leave,
    up to `takes` in all.
    """

    platform = "gpu"
    local_hardware_id = 3

    def __init__(self, limit: float, reserved: float, in_use: float, others: float = 0.0, takes: float = 80.0) -> None:
        self.limit, self.reserved, self.in_use, self.others, self.takes = limit, reserved, in_use, others, takes
        self.asked: list[float] = []

    def memory_stats(self) -> dict[str, int]:
        values = {"bytes_limit": self.limit, "bytes_in_use": self.in_use, "pool_bytes": self.reserved}
        return {name: int(value * GIB) for name, value in values.items()}

    def free_and_total(self, ordinal: int) -> tuple[int, int]:
        assert ordinal == 3
        return int((80 - self.others - self.reserved) * GIB), 80 * GIB

    def zeros(self, shape: tuple[int, int], dtype: object, device: object) -> mock.Mock:
        assert device is self
        size = shape[0] * shape[1] / GIB
        self.asked.append(size)
        if size > self.reserved - self.in_use:
            if size > min(self.takes, 80 - self.others - self.reserved):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
            self.reserved, self.takes = self.reserved + size, self.takes - size
        self.in_use += size
        array = mock.Mock(nbytes=shape[0] * shape[1], delete=partial(self.free, size))
        array.block_until_ready.return_value = array
        return array

    def free(self, size: float) -> None:
        self.in_use -= size

    def room(self, utilization: float, *, at_once: bool = False) -> float:
        with mock.patch.object(memory, "free_and_total", self.free_and_total), mock.patch.object(memory, "jnp", self):
            room = memory.free_device_memory(self, utilization, at_once=at_once)
        assert room is not None
        return round(room / GIB, 3)

    uint8 = "uint8"


def test_an_engine_has_its_share_of_the_device_less_what_the_process_has_on_it():
    assert FakeGPU(72, 72, 0).room(0.9) == 72
    assert FakeGPU(72, 0, 0).room(0.9) == 72, "JAX has touched nothing yet"
    assert FakeGPU(72, 72, 20).room(0.9) == 52, "a trainer's arrays"
    assert FakeGPU(72, 72, 20).room(0.5) == 20
    assert FakeGPU(60, 60, 10).room(0.9) == 50, "JAX ran before with 75 percent, or MEM_FRACTION"
    assert FakeGPU(60, 60, 10).room(0.4) == 22, "of the device, not of what JAX has"
    assert FakeGPU(60, 60, 30).room(0.25) == 0


def test_an_engine_plans_with_no_memory_that_other_processes_have():
    assert FakeGPU(72, 5, 5, others=30).room(0.9) == 80 - 30 - 5 - 0.5
    assert FakeGPU(72, 40, 5, others=30).room(0.9) == 35 + 10 - 0.5, "what JAX has taken is its own"
    assert FakeGPU(40, 5, 5, others=30).room(0.45) == 31, "two engines of half a device each"
    assert FakeGPU(72, 5, 5, others=75).room(0.9) == 0


def test_without_preallocation_what_is_missing_is_taken_in_one_piece(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    gpu = FakeGPU(72, 8, 6)
    assert gpu.room(0.9) == 66
    assert gpu.asked == []
    assert gpu.room(0.9, at_once=True) == 66
    assert gpu.asked == [64]
    assert (gpu.reserved, gpu.in_use) == (72, 6)
    scarce = FakeGPU(72, 8, 6, takes=56)
    assert scarce.room(0.9, at_once=True) == 2 + 56
    assert scarce.asked[:3] == [64, 60, 56]
    assert (scarce.reserved, scarce.in_use) == (64, 6)
    assert FakeGPU(72, 8, 6, takes=1).room(0.9, at_once=True) == 2
    half = FakeGPU(72, 40, 4)
    assert half.room(0.9, at_once=True) == 68
    assert half.asked == [32, 32], "the first fits what JAX has, which makes it take nothing"
    assert (half.reserved, half.in_use) == (72, 4)
    settled = FakeGPU(72, 71.9, 6)
    assert settled.room(0.9, at_once=True) == 66
    assert settled.asked == []
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    assert gpu.room(0.9, at_once=True) == 66
    assert gpu.asked == [64], "JAX takes it by itself"


def test_a_pool_of_a_given_size_takes_what_its_plan_needs_and_leaves_the_rest(monkeypatch):
    def asked(gpu: FakeGPU) -> list[float]:
        with mock.patch.object(memory, "free_and_total", gpu.free_and_total), mock.patch.object(memory, "jnp", gpu):
            memory.take_planned(gpu, MemoryPlan(6 * GIB, GIB, 2 * GIB, GIB // 4, 20))
        return gpu.asked

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert asked(FakeGPU(72, 6, 6)) == [8], "state, programs and pool, beside the weights"
    assert asked(gpu := FakeGPU(72, 10, 6)) == [4, 4], "the first fits what JAX has, which makes it take nothing"
    assert (gpu.reserved, gpu.in_use) == (14, 6)
    assert asked(FakeGPU(72, 14, 6)) == []
    with pytest.raises(OutOfMemoryError, match=r"needs 8.00 GiB of the device, of which 1.00 GiB are not there"):
        asked(FakeGPU(72, 6, 6, others=67))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    assert asked(FakeGPU(72, 6, 6)) == []


def test_where_the_driver_says_nothing_jaxs_own_fraction_tells_the_size_of_the_device(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    gpu = FakeGPU(40, 40, 10)
    monkeypatch.setattr(gpu, "free_and_total", lambda ordinal: None)
    assert gpu.room(0.9) == 30
    assert gpu.room(0.25) == 10
    assert memory.free_device_memory(jax.devices()[0], 0.9) is None
    monkeypatch.setattr(memory, "free_and_total", lambda ordinal: None)
    assert memory.unreserved_device_memory(gpu) == 40 * GIB
