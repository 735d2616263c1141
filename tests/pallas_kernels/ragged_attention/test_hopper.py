"""The ragged attention kernels: their work list anywhere, Hopper's in the interpreter, and both on a GPU."""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import ragged_attention
from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.ragged_attention import hopper as kernel
from tests.pallas_kernels.marks import ON_GPU, needs_mosaic


def dense(q, pool, tables, kv_lens, starts, slopes, *, scale, sliding_window, logit_softcap, causal=True):
    """Float64, one row and head at a time: (output, log-sum-exp)."""
    heads, kv_heads, block_size = q.shape[1], pool.shape[2], pool.shape[3]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for r, kv_len in enumerate(kv_lens):
        begin, end = starts[r], starts[r + 1]
        if end == begin or not kv_len:
            continue
        kv = np.concatenate([pool[b] for b in tables[r, : -(-kv_len // block_size)]], axis=2)[:, :, :kv_len]
        stands = np.arange(kv_len - (end - begin), kv_len) if causal else np.full(end - begin, kv_len - 1)
        ahead = np.arange(kv_len)[None, :] - stands[:, None]
        seen = ahead <= 0
        if sliding_window is not None:
            seen &= ahead > -sliding_window
        for h in range(heads):
            k, v = kv[:, h // (heads // kv_heads)]
            s = q[begin:end, h] @ k.T * scale
            if logit_softcap is not None:
                s = logit_softcap * np.tanh(s / logit_softcap)
            if slopes is not None:
                s = s + slopes[h] * ahead
            s = np.where(seen, s, -np.inf)
            top = s.max(axis=1, keepdims=True)
            p = np.exp(s - top)
            out[begin:end, h] = p @ v / p.sum(axis=1, keepdims=True)
            lse[begin:end, h] = top[:, 0] + np.log(p.sum(axis=1))
    return out, lse


def run_case(
    rows,
    *,
    heads=8,
    kv_heads=2,
    head_dim=128,
    block_size=16,
    dtype=jnp.bfloat16,
    padding=0,
    scale=None,
    sliding_window=None,
    logit_softcap=None,
    alibi=False,
    causal=True,
    backend="hopper",
    **options,
):
    """Runs a backend's kernel on `rows` of (queries, tokens) and compares. Returns (relative error, lse error).

    Slots that no token owns hold NaN, and table entries past a row's blocks are wild.
    """
    rng = np.random.default_rng(sum(n + kv for n, kv in rows) + head_dim)
    blocks = [-(-kv // block_size) for _, kv in rows]
    ids = 1 + rng.permutation(sum(blocks) + 2)
    tables = rng.integers(-(2**31), 2**31 - 1, (len(rows), max(blocks) + 1)).astype(np.int32)
    pool = np.full((sum(blocks) + 3, 2, kv_heads, block_size, head_dim), np.nan, np.float32)
    for r, (_, kv) in enumerate(rows):
        tables[r, : blocks[r]], ids = ids[: blocks[r]], ids[blocks[r] :]
        for j, block in enumerate(tables[r, : blocks[r]]):
            n = min(block_size, kv - j * block_size)
            pool[block, :, :, :n] = rng.standard_normal((2, kv_heads, n, head_dim))
    starts = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    kv_lens = np.array([kv for _, kv in rows], np.int32)
    pool = jnp.asarray(pool, dtype)
    q = jnp.asarray(rng.standard_normal((starts[-1] + padding, heads, head_dim)), dtype)
    slopes = (2.0 ** -np.linspace(1, 8, heads)).astype(np.float32) if alibi else None
    features = {
        "scale": head_dim**-0.5 if scale is None else scale,
        "sliding_window": sliding_window,
        "logit_softcap": logit_softcap,
    }
    module = import_module(f"jpaged.pallas_kernels.ragged_attention.{backend}")
    assert module.unsupported(q, pool) is None
    operands = Operands(
        q,
        pool,
        jnp.asarray(tables),
        jnp.asarray(kv_lens),
        None if slopes is None else jnp.asarray(slopes),
    )
    out, lse = module.ragged_attention(operands, jnp.asarray(starts), Features(**features), causal=causal, **options)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    want, want_lse = dense(
        np.asarray(q, np.float64),
        np.asarray(pool, np.float64),
        tables,
        kv_lens,
        starts,
        slopes,
        causal=causal,
        **features,
    )
    assert np.isfinite(out).all()
    assert (out[starts[-1] :] == 0).all()
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(want_lse))
    seen = np.isfinite(want_lse)
    return np.linalg.norm(out - want) / np.linalg.norm(want), np.abs(lse[seen] - want_lse[seen]).max()


def plan(rows, *, tokens=None, window, block_kv, sliding_window=None, causal=True):
    starts = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    tokens = int(starts[-1]) if tokens is None else tokens
    planned = partial(
        kernel.plan_tiles,
        tokens=tokens,
        window=window,
        block_kv=block_kv,
        sliding_window=sliding_window,
        causal=causal,
    )
    work, count = jax.jit(planned)(jnp.asarray(starts), jnp.asarray([kv for _, kv in rows], jnp.int32))
    return starts, tokens, np.asarray(work)[: int(count[0])]


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 70), st.integers(0, 100)).map(lambda r: (r[0], r[0] + r[1])), min_size=1, max_size=6
    ),
    padding=st.integers(1, 40),
    window=st.sampled_from([16, 32]),
    sliding_window=st.sampled_from([None, 1, 20, 1000]),
    causal=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_the_plan_computes_every_token_once_with_all_the_keys_it_sees(rows, padding, window, sliding_window, causal):
    block_kv = 32
    if not causal:  # there may be fewer keys than queries
        rows = [(n, kv_len - n) for n, kv_len in rows]
    starts, tokens, work = plan(
        rows,
        tokens=sum(n for n, _ in rows) + padding,
        window=window,
        block_kv=block_kv,
        sliding_window=sliding_window,
        causal=causal,
    )
    done = np.zeros(tokens, int)
    steps_before = None
    for row, token, first, end, shift, kv_len, lo, lo_full, hi_full, hi in work[:, :10]:
        assert token % window == 0
        assert token <= first < end <= token + window
        done[first:end] += 1
        assert lo <= lo_full <= hi_full <= hi
        assert steps_before is None or hi - lo <= steps_before  # longest first
        steps_before = hi - lo
        if first >= starts[-1]:
            assert hi == lo  # padding sees nothing
            continue
        assert starts[row] <= first
        assert end <= starts[row + 1]
        assert kv_len == rows[row][1]
        positions = np.arange(first, end) + shift
        assert positions[0] == kv_len - (starts[row + 1] - first)
        if not causal:
            positions = np.full(end - first, kv_len - 1)
        keys = np.arange(kv_len)
        seen = keys <= positions[:, None]
        if sliding_window is not None:
            seen &= keys > positions[:, None] - sliding_window
        steps = keys // block_kv
        assert set(steps[seen.any(axis=0)]) == set(range(lo, hi))
        unmasked = (steps >= lo_full) & (steps < hi_full)
        assert seen[:, unmasked].all()
    assert (done == 1).all()


def test_the_plan_needs_no_mask_below_the_diagonal():
    _, _, work = plan([(512, 512)], window=32, block_kv=128)
    masked = [hi - hi_full for *_, hi_full, hi in work[:, :10]]
    assert masked == [1] * 16


def test_the_plan_masks_no_more_than_the_last_step_where_nothing_is_causal():
    _, _, work = plan([(512, 300), (40, 256), (3, 0)], window=32, block_kv=128, causal=False)
    assert [(row, hi, hi - hi_full) for row, *_, hi_full, hi in work[:, :10]][::8] == [(0, 3, 1), (0, 3, 1), (1, 2, 0)]


def test_what_the_kernel_refuses_it_names():
    q, pool = jnp.zeros((4, 4, 128)), jnp.zeros((3, 2, 2, 16, 128))
    assert "float32" in kernel.unsupported(q, pool)
    q, pool = q.astype(jnp.bfloat16), pool.astype(jnp.bfloat16)
    assert kernel.unsupported(q, pool) is None
    assert "head_dim" in kernel.unsupported(q[..., :72], pool[..., :72])
    assert "block size" in kernel.unsupported(q, jnp.zeros((3, 2, 2, 4, 128), jnp.bfloat16))


@needs_mosaic
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"sliding_window": 20, "logit_softcap": 5.0, "alibi": True},
        {"causal": False},
        {"causal": False, "alibi": True, "sliding_window": 70},
    ],
    ids=["plain", "features", "dense", "dense with features"],
)
def test_the_interpreter_agrees_and_finds_no_race(features):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows = [(5, 5), (1, 77), (20, 90), (0, 9)]
    if not features.get("causal", True):
        rows = [(20, 96), (9, 0), (20, 130), (3, 1)]  # keys for each of its queries, or for none
    error, lse_error = run_case(
        rows,
        heads=2,
        kv_heads=1,
        head_dim=64,
        padding=6,
        ctas=2,
        tiling=kernel.Tiling(block_kv=64),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        **features,
    )
    assert error <= 5e-3
    assert lse_error <= 1e-4


_MIXED = [(1, 1), (1, 2047), (300, 300), (5, 1000), (0, 64), (128, 128), (1, 16), (777, 1300), (64, 4096), (33, 33)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"dtype": jnp.float16},
        {"block_size": 32},
        {"block_size": 64},
        {"block_size": 128},
        {"head_dim": 64},
        {"head_dim": 80},
        {"head_dim": 96},
        {"head_dim": 32},
        {"head_dim": 112},
        {"head_dim": 192},
        {"head_dim": 256},
        {"head_dim": 256, "block_size": 128},
        {"heads": 4, "kv_heads": 4},
        {"heads": 14, "kv_heads": 2},
        {"heads": 6, "kv_heads": 2},
        {"heads": 12, "kv_heads": 1},
        {"heads": 32, "kv_heads": 1},
        {"sliding_window": 1},
        {"sliding_window": 200},
        {"logit_softcap": 3.0},
        {"alibi": True},
        {"scale": 0.3},
        {"scale": -0.05},
        {"alibi": True, "logit_softcap": 2.0, "sliding_window": 333, "head_dim": 64, "dtype": jnp.float16},
        {"causal": False},
        {"causal": False, "heads": 16, "kv_heads": 8, "block_size": 32},
        {"causal": False, "alibi": True, "logit_softcap": 2.0, "sliding_window": 333, "head_dim": 64},
        {"causal": False, "head_dim": 256},
    ],
    ids=str,
)
def test_on_the_gpu_any_mix_of_rows_is_right(case, backend):
    error, lse_error = run_case(_MIXED, padding=45, backend=backend, **case)
    assert error <= (1e-3 if case.get("dtype") == jnp.float16 else 5e-3)
    assert lse_error <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_on_the_gpu_drawn_rows_are_right(backend, data):
    # One shape for all draws, so that one compile serves them.
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=8, max_size=8))
    prefixes = data.draw(st.lists(st.integers(0, 700), min_size=8, max_size=8))
    rows = [(n, n + p) for n, p in zip(lengths, prefixes, strict=True)]
    rows[0] = (max(rows[0][0], 1), 1000)
    error, _ = run_case(rows, padding=1601 - sum(n for n, _ in rows), backend=backend)
    assert error <= 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_on_the_gpu_the_same_inputs_give_the_same_bits(backend):
    key = jax.random.key(0)
    q = jax.random.normal(key, (640, 32, 128), jnp.bfloat16)
    pool = jax.random.normal(key, (200, 2, 8, 16, 128), jnp.bfloat16)
    tables = jnp.asarray(np.random.default_rng(0).integers(0, 200, (3, 60)), jnp.int32)
    kv_lens, starts = jnp.asarray([900, 31, 600], jnp.int32), jnp.asarray([0, 100, 101, 600], jnp.int32)
    attend = partial(ragged_attention, scale=0.1, return_lse=True, backend=backend)
    runs = [attend(q, pool, tables, kv_lens, starts) for _ in range(5)]
    for out, lse in runs[1:]:
        np.testing.assert_array_equal(np.asarray(out), np.asarray(runs[0][0]))
        np.testing.assert_array_equal(np.asarray(lse), np.asarray(runs[0][1]))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_on_the_gpu_blocks_past_2_to_the_31_elements_are_found(backend):
    near = jax.random.normal(jax.random.key(0), (65, 2, 8, 16, 128), jnp.bfloat16)
    blocks = 72_000  # 2.4e9 elements, 4.7 GB
    pool = jnp.full((blocks, 2, 8, 16, 128), jnp.nan, jnp.bfloat16)
    pool = jax.jit(lambda pool, near: pool.at[-65:].set(near), donate_argnums=0)(pool, near)
    q = jax.random.normal(jax.random.key(1), (300, 8, 128), jnp.bfloat16)
    kv_lens, starts = jnp.asarray([64 * 16], jnp.int32), jnp.asarray([0, 300], jnp.int32)
    table = jnp.arange(1, 65, dtype=jnp.int32)[None]
    attend = partial(ragged_attention, scale=0.1, backend=backend)
    want = attend(q, near, table, kv_lens, starts)
    out = attend(q, pool, table + (blocks - 65), kv_lens, starts)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(want))
