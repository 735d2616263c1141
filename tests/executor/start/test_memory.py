"""How many blocks a device gets, for devices of made-up sizes."""

from collections.abc import Callable

import jax
import pytest

from jpaged.api.errors import OutOfMemoryError
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
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
