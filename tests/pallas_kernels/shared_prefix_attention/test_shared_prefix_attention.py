"""A shared prefix read once: dense attention of many queries to it, each row's own part, and the merge."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import decode_attention, merge_attention, ragged_attention, shared_prefix_attention
from jpaged.pallas_kernels.shared_prefix_attention.api import num_parts
from tests.pallas_kernels.marks import ON_GPU, WITH_TRITON
from tests.pallas_kernels.paged import (
    assert_close,
    assert_lse_close,
    attend,
    expected_decode,
    make_world,
    random_queries,
)

few = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])

attend_shared = jax.jit(
    partial(shared_prefix_attention, return_lse=True), static_argnames=("scale", "logit_softcap", "backend")
)


def slopes(heads):
    return np.geomspace(0.5, 0.02, heads, dtype=np.float32)


def check(seed, lens, num_sharing, shape, prefix, dtype, backend, **chosen):
    """Compares with float64; rows from num_sharing on share the prefix's blocks or not, but are not told to."""
    heads, kv_heads, head_dim = shape
    block_size, shared_blocks = prefix
    world = make_world(
        seed,
        lens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        shared_prefix=shared_blocks,
        width=shared_blocks + 6,
        least_blocks=(len(lens) + 1) * (shared_blocks + 6),
    )
    q = random_queries(seed, len(lens), heads, head_dim, dtype)
    shared = (np.int32(num_sharing), np.int32(shared_blocks * block_size))
    out, lse = attend_shared(q, world.pool, world.tables, world.lens, *shared, backend=backend, **chosen)
    want, want_lse = expected_decode(world, np.asarray(q).astype(np.float32), **chosen)
    assert out.dtype == q.dtype
    assert_close(out, want, dtype)
    assert_lse_close(lse, want_lse, dtype)


# (heads, kv_heads, head_dim), (tokens of a block, blocks that the rows share), dtype: each is compiled once, and
# lengths and contents are drawn.
@pytest.mark.parametrize(
    ("shape", "prefix", "dtype", "chosen"),
    [
        ((8, 2, 64), (16, 20), "bfloat16", {}),
        ((4, 1, 80), (128, 3), "float16", {"logit_softcap": 1.5, "scale": 0.3}),
        ((4, 4, 16), (32, 9), "float32", {"alibi_slopes": slopes(4), "sinks": np.float32([-3.0, 1.0, 5.0, 40.0])}),
    ],
)
@pytest.mark.parametrize("backend", WITH_TRITON)
@few
@given(data=st.data(), num_sharing=st.integers(0, 4), seed=st.integers(0, 2**31))
def test_rows_that_share_a_prefix_and_others_get_what_each_gets_alone(
    backend, shape, prefix, dtype, chosen, data, num_sharing, seed
):
    shared_len = prefix[0] * prefix[1]
    behind = st.integers(1, 6 * prefix[0])
    sharing = st.one_of(st.just(0), behind.map(lambda n: shared_len + n))  # a row that has ended is empty
    others = st.one_of(st.integers(0, shared_len), sharing)
    lens = [data.draw(sharing) for _ in range(num_sharing)] + [data.draw(others) for _ in range(6 - num_sharing)]
    if num_sharing:
        lens[0] = max(lens[0], shared_len + 1)  # its table is the prefix's
    check(seed, lens, num_sharing, shape, prefix, dtype, backend, **chosen)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize(("num_sharing", "shared_blocks"), [(0, 4), (3, 0)])
def test_without_a_shared_prefix_it_is_decode_attention_exactly(num_sharing, shared_blocks, backend):
    world = make_world(1, [70, 0, 65], kv_heads=2, head_dim=16, block_size=16, shared_prefix=4)
    q = random_queries(1, 3, 4, 16, "bfloat16").astype(jnp.float32)
    arguments = (q, world.pool, world.tables, world.lens)
    got = attend_shared(*arguments, np.int32(num_sharing), np.int32(16 * shared_blocks), backend=backend)
    for one, other in zip(got, decode_attention(*arguments, return_lse=True, backend=backend), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_empty_batch_gives_nothing():
    world = make_world(1, [4], kv_heads=2, head_dim=16, block_size=16)
    q = random_queries(1, 0, 4, 16, "float32")
    none = (q, world.pool, world.tables[:0], world.lens[:0], np.int32(0), np.int32(0))
    assert shared_prefix_attention(*none, backend="xla").shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("shape", "chosen"), [((8, 2, 64), {"alibi_slopes": slopes(8)}), ((4, 1, 80), {"sliding_window": 20})]
)
@pytest.mark.parametrize("backend", WITH_TRITON)
@few
@given(
    keys=st.lists(st.sampled_from([0, 1, 15, 16, 17, 130, 200]), min_size=3, max_size=3),
    queries=st.lists(st.sampled_from([0, 1, 5, 33, 70]), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_without_causality_every_query_stands_at_the_last_token(backend, shape, chosen, keys, queries, seed):
    heads, kv_heads, head_dim = shape
    world = make_world(seed, keys, kv_heads=kv_heads, head_dim=head_dim, block_size=16, width=13, least_blocks=45)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = random_queries(seed, 215, heads, head_dim, "float32")
    arguments = (q, world.pool, world.tables, world.lens, starts)
    out, lse = ragged_attention(*arguments, causal=False, return_lse=True, backend=backend, **chosen)
    want, want_lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, n in enumerate(keys):
        for token in range(starts[row], starts[row + 1]) if n else ():
            one = attend(np.asarray(q[token : token + 1]), world.keys[row], world.values[row], n - 1, **chosen)
            want[token], want_lse[token] = one[0][0], one[1][0]
    assert_close(out, want, "float32")
    assert_lse_close(lse, want_lse, "float32")


def test_merged_parts_are_the_softmax_over_all_of_them():
    rng = np.random.default_rng(0)
    scores, values = 5 * rng.standard_normal((3, 4, 60)), rng.standard_normal((3, 4, 60, 16))
    scores[0, 1, :20] = scores[1, 2, 20:] = scores[2, 3] = -np.inf  # a part or all of which it sees nothing
    outs, lses = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for part in (slice(0, 20), slice(20, 25), slice(25, 60)):
            weights = np.exp(scores[..., part])
            total = weights.sum(-1)
            outs.append(np.nan_to_num(np.einsum("rhk,rhkd->rhd", weights, values[:, :, part]) / total[..., None]))
            lses.append(np.log(total))
        weights = np.exp(scores)
        want = np.nan_to_num(np.einsum("rhk,rhkd->rhd", weights, values) / weights.sum(-1)[..., None])
        want_lse = np.log(weights.sum(-1))
    out, lse = merge_attention([jnp.float32(x) for x in outs], [jnp.float32(x) for x in lses])
    assert_close(out, want, "float32")
    assert_lse_close(lse, want_lse, "float32")
    np.testing.assert_array_equal(out[1, 2], jnp.float32(outs[0][1, 2]))  # it saw keys of that part alone


def test_the_prefix_is_cut_where_few_rows_would_leave_the_card_idle():
    assert [num_parts(rows, 32, 8) for rows in (64, 128, 256, 512, 1024)] == [8, 4, 2, 1, 1]
    assert [num_parts(rows, 16, 8) for rows in (64, 128, 256, 512, 1024)] == [8, 8, 4, 2, 1]
    assert num_parts(64, 32, 1) == 8  # MQA: a tile has two tokens' heads or four


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize(
    "case",
    [
        {"rows": 64, "shape": (32, 8, 128), "prefix": (16, 40)},
        {"rows": 320, "shape": (32, 8, 128), "prefix": (16, 9)},
        {"rows": 96, "shape": (8, 2, 128), "prefix": (64, 20)},
        {"rows": 64, "shape": (8, 8, 64), "prefix": (32, 33), "alibi": True},
        {"rows": 64, "shape": (28, 4, 80), "prefix": (16, 31), "logit_softcap": 30.0},
        {"rows": 64, "shape": (16, 4, 256), "prefix": (128, 5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_the_gpu_rows_that_share_a_prefix_and_others_are_right(case, dtype, backend):
    case = dict(case)
    if case.pop("alibi", False):
        case["alibi_slopes"] = slopes(case["shape"][0])
    rows, shape, prefix = case.pop("rows"), case.pop("shape"), case.pop("prefix")
    rng = np.random.default_rng(rows)
    shared_len = prefix[0] * prefix[1]
    lens = (shared_len + rng.integers(1, 6 * prefix[0], rows)).tolist()
    lens[3], lens[-1], lens[-2] = 0, 0, 1
    for num_sharing in (0, rows // 2 + 3, rows - 2):
        check(rows, lens, num_sharing, shape, prefix, dtype, backend, **case)
