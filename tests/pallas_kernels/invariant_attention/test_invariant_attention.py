"""Attention by query: right, and with the same bits however a sequence's queries are cut into chunks."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import invariant_attention
from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from tests.pallas_kernels.marks import ON_GPU, WITH_TRITON, needs_mosaic
from tests.pallas_kernels.paged import assert_close, expected_ragged, make_world, random_queries

LENS = (150, 40, 1)
FEATURES: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 30, "logit_softcap": 20.0})


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("backend", WITH_TRITON)
def test_chunks_of_any_size_give_the_bits_of_queries_alone(backend, features):
    world = make_world(1, list(LENS), kv_heads=2, head_dim=16, block_size=16)
    starts = np.array([0, 60, 100, 101], np.int32)
    q = random_queries(1, 101, 4, 16, "float32")
    whole = invariant_attention(q, world.pool, world.tables, world.lens, starts, backend=backend, **features)
    expected, _ = expected_ragged(world, np.asarray(q), starts, **features)
    assert_close(whole, expected, "float32")
    # The first row's last 60 queries: the first of them alone, then some, then the rest beside another row's.
    for first, last in ((0, 1), (1, 18), (18, 60)):
        lens = jnp.asarray([LENS[1], LENS[0] - 60 + last], jnp.int32)
        tables = jnp.asarray(world.tables)[jnp.array([1, 0])]
        queries = jnp.concatenate([q[99:100], q[first:last]])
        cut = np.array([0, 1, 1 + last - first], np.int32)
        found = invariant_attention(queries, world.pool, tables, lens, cut, backend=backend, **features)
        assert (found[0] == whole[99]).all()
        assert (found[1:] == whole[first:last]).all()


@needs_mosaic
def test_on_hopper_each_query_is_a_row_of_decode_attention(monkeypatch):
    from jpaged.pallas_kernels.decode_attention import reference
    from jpaged.pallas_kernels.invariant_attention import hopper

    monkeypatch.setattr(hopper.decode, "decode_attention", reference.decode_attention)
    world = make_world(1, list(LENS), kv_heads=2, head_dim=64, block_size=16)
    starts = np.array([0, 60, 60, 61], np.int32)  # a chunk, a row without queries, a decoded row, and padding
    q = random_queries(1, 64, 4, 64, "float32")
    operands = Operands(q, world.pool, jnp.asarray(world.tables), jnp.asarray(world.lens), None)
    out, _ = hopper.invariant_attention(operands, jnp.asarray(starts), Features(0.125, None, None))
    expected, _ = expected_ragged(world, np.asarray(q[:61]), starts)
    assert_close(out[:61], expected, "float32")
    assert (out[61:] == 0).all()
    monkeypatch.setattr(hopper, "_slab", lambda bytes_of_query: 24)  # so that there are three, the last with padding
    in_slabs, _ = hopper.invariant_attention(operands, jnp.asarray(starts), Features(0.125, None, None))
    assert_close(in_slabs, out, "float32")
    assert "head_dim 80" in hopper.unsupported(q[..., :1].repeat(80, 2), jnp.zeros((2, 2, 2, 16, 80)))


@pytest.mark.parametrize(
    ("head_dim", "heads", "features"),
    [(128, 8, {}), (64, 14, {"sliding_window": 2100}), (256, 4, {"logit_softcap": 20.0})],
)
@pytest.mark.parametrize("backend", ON_GPU)
def test_on_a_gpu_queries_have_the_bits_of_each_alone_across_all_cuts(backend, head_dim, heads, features):
    lens, cuts = (5000, 2049, 300, 1), (0, 1, 700)  # several chunks of decode attention, leaves of all sizes
    world = make_world(1, list(lens), kv_heads=2, head_dim=head_dim, block_size=16, dtype="bfloat16")
    starts = np.array([0, 700, 702, 1002, 1003], np.int32)
    q = random_queries(1, 1003, heads, head_dim, "bfloat16")
    whole = invariant_attention(q, world.pool, world.tables, world.lens, starts, backend=backend, **features)
    expected, _ = expected_ragged(world, np.asarray(q, np.float32), starts, **features)
    assert_close(whole, expected, "bfloat16")
    wider = jnp.pad(jnp.asarray(world.tables), ((0, 0), (0, 300)))
    attend = jax.jit(partial(invariant_attention, backend=backend, **features))
    for first, last in pairwise(cuts):
        some = attend(q[first:last], world.pool, wider[:1], jnp.array([4300 + last]), jnp.array([0, last - first]))
        assert (some == whole[first:last]).all()
    for place in (0, 350, 699):  # each by itself
        alone = attend(q[place : place + 1], world.pool, wider[:1], jnp.array([4301 + place]), jnp.array([0, 1]))
        assert (alone[0] == whole[place]).all()


def test_bad_arguments_are_named():
    world = make_world(1, [5], kv_heads=1, head_dim=16, block_size=16)
    q, starts = random_queries(1, 1, 1, 16, "float32"), np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="backend='cudnn' cannot do this invariant_attention: there is no such"):
        invariant_attention(q, world.pool, world.tables, world.lens, starts, backend="cudnn")
    with pytest.raises(ValueError, match="blocks of at most 128 tokens, got 256"):
        invariant_attention(q, jnp.zeros((2, 2, 1, 256, 16)), world.tables, world.lens, starts)
