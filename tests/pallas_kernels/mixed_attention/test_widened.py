"""Chunks over a pool in FP8, whose first rows' blocks are widened: against float64 over what the pool holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import devices, mixed_attention, ragged_attention
from jpaged.pallas_kernels.common.attention_arguments import Operands
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.mixed_attention import widened
from jpaged.pallas_kernels.mixed_attention.widened import widened_attention, worthwhile
from tests.pallas_kernels.marks import needs_triton, on_gpu
from tests.pallas_kernels.paged import assert_close, assert_lse_close, expected_ragged, make_world, random_queries

FP8 = "float8_e4m3fn"
LENS, STARTS = [70, 40, 300, 1, 129, 33], np.array([0, 0, 30, 130, 131, 150, 183], np.int32)
"""In blocks of 16, rows with queries see 3, 19, 1, 9 and 3; the first has none, as one that decodes."""


@pytest.mark.parametrize("workspace", [None, 2, 3, 21, 22, 23, 32, 200])
def test_rows_that_fit_into_the_workspace_and_others_are_right(workspace):
    world = make_world(7, LENS, kv_heads=2, head_dim=16, block_size=16, dtype=FP8)
    q = random_queries(7, 190, 4, 16, "float32")
    operands = Operands(q, world.pool, world.tables, world.lens, None)
    attend = jax.jit(lambda operands, starts: widened_attention(operands, starts, workspace=workspace))
    out, lse = attend(operands, STARTS)
    want, want_lse = expected_ragged(world, np.asarray(q), STARTS)
    assert_close(out, want, "float32")
    assert_lse_close(lse, want_lse, "float32")


@pytest.mark.parametrize(
    ("workspace", "boundary"), [(2, 0), (3, 30), (21, 30), (22, 130), (23, 131), (32, 150), (35, 183), (None, 183)]
)
def test_as_many_first_rows_as_fit_are_attended_to_in_the_workspace(workspace, boundary, monkeypatch):
    calls = []

    def attend(q, pool, tables, lens, starts, **features):
        calls.append((pool.dtype, int(starts[0]), int(starts[-1])))
        return ragged_attention(q, pool, tables, lens, starts, **features)

    monkeypatch.setattr(widened, "ragged_attention", attend)
    world = make_world(7, LENS, kv_heads=2, head_dim=16, block_size=16, dtype=FP8)
    q = random_queries(7, 190, 4, 16, "float32")
    widened_attention(Operands(q, world.pool, world.tables, world.lens, None), STARTS, workspace=workspace)
    assert calls == [(q.dtype, 0, boundary), (world.pool.dtype, boundary, 183)]


@pytest.mark.parametrize("workspace", [2, 22, 200])
def test_queries_that_all_see_the_same_keys_and_sinks_are_as_over_the_pool_itself(workspace):
    lens = [70, 0, 300, 1, 129, 5]  # fewer than queries, or none
    world = make_world(9, lens, kv_heads=2, head_dim=16, block_size=16, dtype=FP8)
    q = random_queries(9, 183, 4, 16, "float32")
    operands = Operands(q, world.pool, world.tables, world.lens, None)
    options = {"causal": False, "sinks": jnp.asarray([0.5, -1.0, 2.0, 0.0], jnp.float32)}
    out, lse = widened_attention(operands, STARTS, workspace=workspace, **options)
    want, want_lse = ragged_attention(*operands[:4], STARTS, return_lse=True, **options)
    assert_close(out, np.asarray(want), "float32")
    assert_lse_close(lse, np.asarray(want_lse), "float32")


def test_features_are_right_in_both_parts():
    world = make_world(8, LENS, kv_heads=2, head_dim=16, block_size=16, dtype=FP8)
    q = random_queries(8, 183, 4, 16, "float32")
    slopes = jnp.asarray([0.5, 0.25, 0.125, 0.0625], jnp.float32)
    operands = Operands(q, world.pool, world.tables, world.lens, slopes)
    out, _ = widened_attention(operands, STARTS, workspace=22, logit_softcap=20.0, scale=0.3)
    want, _ = expected_ragged(world, np.asarray(q), STARTS, alibi_slopes=slopes, logit_softcap=20.0, scale=0.3)
    assert_close(out, want, "float32")


@needs_triton
def test_it_is_for_pools_in_fp8_on_hopper(monkeypatch):
    q = jax.ShapeDtypeStruct((2048, 8, 128), jnp.bfloat16)
    fp8, wide = (jax.ShapeDtypeStruct((8, 2, 2, 16, 128), dtype) for dtype in (FP8, "bfloat16"))
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (9, 0)))
    assert worthwhile(q, fp8, None, None)
    assert not worthwhile(q, wide, None, None)
    assert not worthwhile(q, fp8, 128, None)
    assert not worthwhile(q, fp8, None, "triton")
    assert not worthwhile(q, fp8, None, "triton,xla")
    assert worthwhile(q, fp8, None, "mosaic,triton,xla")
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (8, 9)))
    assert not worthwhile(q, fp8, None, None)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [([40] * 30 + [1, 900], [(90, 90)] * 10), ([], [(600, 5000)]), ([9, 70], [(700, 700), (40, 30_000)])],
    ids=["fit", "long", "one does not fit"],
)
def test_on_the_gpu_a_step_over_fp8_is_right(decodes, chunks, dtype, monkeypatch):
    calls = []
    monkeypatch.setattr(widened, "widened_attention", lambda *a, **b: calls.append(a) or widened_attention(*a, **b))
    lens, queries = [*decodes, *(kv for _, kv in chunks)], [1] * len(decodes) + [count for count, _ in chunks]
    world = make_world(5, lens, kv_heads=2, head_dim=128, block_size=16, dtype=FP8)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = random_queries(5, max(1024, starts[-1] + 7), 8, 128, dtype)
    tables = np.where((world.tables >= 0) & (world.tables < world.pool.shape[0]), world.tables, 0)
    out = jax.jit(mixed_attention)(q, world.pool, jnp.asarray(tables), world.lens, starts, jnp.int32(len(decodes)))
    want, _ = expected_ragged(world, np.asarray(q).astype(np.float32), starts)
    assert_close(out, want, dtype)
    assert len(calls) == 1
