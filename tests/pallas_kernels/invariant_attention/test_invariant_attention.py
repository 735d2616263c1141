"""Attention by query: right, and with the same bits however a sequence's queries are cut into chunks."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import invariant_attention
from tests.pallas_kernels.marks import WITH_TRITON
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


def test_backends_that_cannot_promise_it_are_refused():
    world = make_world(1, [5], kv_heads=1, head_dim=16, block_size=16)
    q, starts = random_queries(1, 1, 1, 16, "float32"), np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="backend must be None or one of triton, xla, got 'hopper'"):
        invariant_attention(q, world.pool, world.tables, world.lens, starts, backend="hopper")
    with pytest.raises(ValueError, match="blocks of at most 128 tokens, got 256"):
        invariant_attention(q, jnp.zeros((2, 2, 1, 256, 16)), world.tables, world.lens, starts)
