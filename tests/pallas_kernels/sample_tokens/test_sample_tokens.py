"""`sample_tokens`: XLA anywhere, kernels in their interpreters and on a GPU, against numpy's sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jpaged.pallas_kernels import sample_tokens
from jpaged.pallas_kernels.sample_tokens import noise as sample_noise
from tests.pallas_kernels.marks import needs_mosaic, needs_triton, on_gpu, on_gpu_with_triton

xla = jax.jit(lambda *arguments: sample_tokens(*arguments, backend="xla"))
hopper_draws = jax.jit(lambda *arguments: sample_tokens(*arguments, backend="hopper"))
triton_draws = jax.jit(lambda *arguments: sample_tokens(*arguments, backend="triton"))

on_gpus_of_its_own = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(hopper_draws, marks=(on_gpu, pytest.mark.gpu), id="hopper"),
        pytest.param(triton_draws, marks=(on_gpu_with_triton, pytest.mark.gpu), id="triton"),
    ],
)


def draw_batch(seed, rows, vocab):
    """Arguments of `sample_tokens`: rows of all kinds, ties, masks, NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * 10.0 ** rng.uniform(-1.5, 1, (rows, 1)) + rng.normal(size=(rows, 1)) * 5
    logits[::3] = np.round(logits[::3])
    logits[1::5, ::2] = -np.inf
    logits[2::7, ::3] = np.nan
    logits[-4], logits[-3], logits[-2], logits[-1, 5] = -np.inf, np.nan, np.inf, np.inf
    temperature = rng.uniform(0.3, 3, rows)
    temperature[3::8] = 0
    top_k = np.where(rng.random(rows) < 0.7, rng.integers(0, vocab + 50, rows), 0)
    top_k[::2] = np.minimum(top_k[::2], 9)
    top_p = np.where(rng.random(rows) < 0.7, rng.uniform(0.02, 0.999, rows), 1.0)
    top_p[0] = 1e-30
    min_p = np.where(rng.random(rows) < 0.3, rng.uniform(0, 0.3, rows), 0.0)
    return (
        logits.astype(np.float32),
        temperature.astype(np.float32),
        top_k.astype(np.int32),
        top_p.astype(np.float32),
        min_p.astype(np.float32),
        rng.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        rng.integers(0, 10**6, rows).astype(np.int32),
    )


def expected_tokens(logits, temperature, top_k, top_p, min_p, seeds, positions):
    """By sorting, in float64, under the same noise; rows whose tokens are all masked come out as 0."""
    noise = np.asarray(sample_noise.gumbel(seeds, positions, logits.shape[1]), np.float64)
    cleaned = np.where(np.isnan(logits), -np.inf, np.minimum(logits, np.finfo(np.float32).max)).astype(np.float64)
    tokens = []
    for x, t, k, p, m, g in zip(cleaned, temperature, top_k, top_p, min_p, noise, strict=True):
        if t == 0 or x.max() == -np.inf:
            tokens.append(int(x.argmax()))
            continue
        mass = np.exp((x - x.max()) / np.float64(t))
        order = np.sort(x)[::-1]
        keep = (mass >= m) & (x >= order[min(k, len(x)) - 1 if k > 0 else -1])
        if p < 1:
            above = np.array([mass[keep & (x > logit)].sum() for logit in x])
            keep &= (above < np.float64(p) * mass[keep].sum()) | (x == x.max())
        tokens.append(int(np.where(keep, (x - x.max()) / np.float64(t) + g, -np.inf).argmax()))
    return np.array(tokens)


def without_truncation(arguments):
    logits, temperature, _, _, _, seeds, positions = arguments
    return (logits, temperature, None, None, None, seeds, positions)


def keeping_all(arguments):
    logits, temperature, top_k, top_p, min_p, seeds, positions = arguments
    return (logits, temperature, 0 * top_k, 0 * top_p + 1, 0 * min_p, seeds, positions)


def test_xla_draws_what_sorting_draws():
    arguments = draw_batch(1, 200, 300)
    np.testing.assert_array_equal(xla(*arguments), expected_tokens(*arguments))
    np.testing.assert_array_equal(xla(*without_truncation(arguments)), expected_tokens(*keeping_all(arguments)))


@needs_mosaic
@pytest.mark.parametrize(("seed", "vocab"), [(2, 700), (3, 130)])
def test_the_kernel_draws_what_sorting_draws(seed, vocab):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jpaged.pallas_kernels.sample_tokens import hopper
    from jpaged.pallas_kernels.sample_tokens.operands import Operands

    config = hopper.Config(ctas=1, warpgroups=2, tile=128, ahead=2)
    options = {"config": config, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    arguments = draw_batch(seed, 14, vocab)
    np.testing.assert_array_equal(hopper.sample_tokens(Operands(*arguments), **options), expected_tokens(*arguments))
    np.testing.assert_array_equal(
        hopper.sample_tokens(Operands(*without_truncation(arguments)), **options),
        expected_tokens(*keeping_all(arguments)),
    )


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("seed", "vocab"), [(2, 700), (3, 130)])
def test_triton_s_kernels_draw_what_sorting_draws(seed, vocab):
    arguments = draw_batch(seed, 14, vocab)
    np.testing.assert_array_equal(triton_draws(*arguments), expected_tokens(*arguments))
    np.testing.assert_array_equal(
        triton_draws(*without_truncation(arguments)), expected_tokens(*keeping_all(arguments))
    )


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("room", [16, 64])
def test_triton_s_kernels_read_the_kept_tokens_again_where_they_cannot_hold_them(room):
    from jpaged.pallas_kernels.sample_tokens import triton
    from jpaged.pallas_kernels.sample_tokens.operands import Operands

    arguments = draw_batch(9, 14, 700)
    top_k = arguments[2]
    assert top_k[top_k > 0].min() < room < top_k.max()
    np.testing.assert_array_equal(triton.sample_tokens(Operands(*arguments), room=room), expected_tokens(*arguments))


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("seed", "room"), [(7, 8), (8, 1024)])
def test_triton_s_kernels_split_a_row_over_many_programs(seed, room):
    from jpaged.pallas_kernels.sample_tokens import triton
    from jpaged.pallas_kernels.sample_tokens.operands import Operands

    rng = np.random.default_rng(seed)
    logits, temperature, _, _, min_p, seeds, positions = draw_batch(seed, 12, 800)
    logits[:8] = rng.normal(size=(8, 800)) * rng.uniform(0.3, 3, (8, 1))
    logits[0] = np.round(logits[0])
    top_p = np.tile([0.1, 0.5, 0.9, 0.98], 3).astype(np.float32)
    whole = (np.zeros(12, np.int32), np.ones(12, np.float32), 0 * min_p, seeds, positions)
    arguments = (logits, temperature, whole[0], top_p, *whole[2:])
    expected = expected_tokens(*arguments)
    np.testing.assert_array_equal(triton.sample_tokens(Operands(*arguments), tile=64, part=128, room=room), expected)
    refused = expected != expected_tokens(logits, temperature, *whole)
    assert refused[:8].any()  # rows whose first draw is not kept,
    assert not refused[:8].all()  # and others


@pytest.mark.gpu
@needs_triton
def test_a_row_s_token_is_the_same_with_few_rows_whose_parts_triton_s_kernels_quarter():
    from jpaged.pallas_kernels.sample_tokens import triton
    from jpaged.pallas_kernels.sample_tokens.operands import Operands

    cut = {"tile": 64, "part": 256}
    arguments = draw_batch(12, 10, 540)  # three parts, the last one of one quarter
    arguments[0][:3] = np.random.default_rng(12).normal(size=(3, 540))
    arguments[2][:2], arguments[4][:2] = 0, 0  # top_p alone
    expected = expected_tokens(*arguments)
    np.testing.assert_array_equal(triton.sample_tokens(Operands(*arguments), **cut), expected)
    few = [x[:4] for x in arguments]
    np.testing.assert_array_equal(triton.sample_tokens(Operands(*few), **cut), expected[:4])
    all_kept = triton.sample_tokens(Operands(*without_truncation(few)), **cut)
    np.testing.assert_array_equal(all_kept, expected_tokens(*keeping_all(few)))


@needs_triton
def test_a_first_draw_that_seemed_surely_kept_and_is_not_is_replaced(monkeypatch):
    """The winners' estimate saves work and decides nothing."""
    if jax.default_backend() != "cpu":
        pytest.skip("Only the interpreter takes another function for a compiled kernel's.")
    from jpaged.pallas_kernels.sample_tokens import triton
    from jpaged.pallas_kernels.sample_tokens.operands import Operands

    def only_the_first(x, mass, logit, share):
        return triton.tl.where(triton.tl.arange(0, triton.LEVELS) == 0, logit, np.inf)

    monkeypatch.setattr(triton, "levels_around", only_the_first)
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(6, 700)).astype(np.float32)
    seeds, positions = rng.integers(0, 2**32, (6, 2), dtype=np.uint32), np.arange(6, dtype=np.int32)
    ones, whole = np.ones(6, np.float32), np.zeros(6, np.int32)
    arguments = (logits, ones, whole, 0.6 * ones, 0 * ones, seeds, positions)
    expected = expected_tokens(*arguments)
    assert (expected != expected_tokens(*keeping_all(arguments))).any()
    tokens = triton.sample_tokens(Operands(*arguments), tile=64, part=128, room=16)
    np.testing.assert_array_equal(tokens, expected)


def test_no_rows_give_no_tokens():
    arguments = [x[:0] for x in draw_batch(4, 8, 40)]
    assert sample_tokens(*arguments).shape == (0,)


@on_gpus_of_its_own
@pytest.mark.parametrize("vocab", [151_936, 128_256, 50_257, 300])
def test_backends_draw_the_same_tokens_on_the_gpu(kernel, vocab):
    arguments = draw_batch(5, 256, vocab)
    tokens = np.asarray(kernel(*arguments))
    # A share of 1e-6 of the rows or so is decided by rounding.
    assert (tokens != np.asarray(xla(*arguments))).sum() <= 1
    np.testing.assert_array_equal(kernel(*arguments), tokens)
    for row in (0, 100, 255):
        assert kernel(*[x[row : row + 1] for x in arguments])[0] == tokens[row]


@on_gpus_of_its_own
def test_a_kernel_s_draws_have_the_reference_distribution_on_the_gpu(kernel):
    draws, vocab, top_k, top_p = 40_000, 2000, 50, 0.9
    x = np.random.default_rng(6).normal(size=vocab).astype(np.float32) * 1.5
    tokens = kernel(
        jnp.broadcast_to(x, (draws, vocab)),
        jnp.ones(draws),
        jnp.full(draws, top_k, jnp.int32),
        jnp.full(draws, top_p),
        jnp.zeros(draws),
        jnp.zeros((draws, 2), jnp.uint32),
        jnp.arange(draws, dtype=jnp.int32),
    )
    order = np.argsort(-x)[:top_k]
    mass = np.exp(x[order].astype(np.float64))
    kept = order[: int(np.argmax(np.cumsum(mass) >= top_p * mass.sum())) + 1]
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    assert counts[kept].sum() == draws
    expected = mass[: len(kept)] / mass[: len(kept)].sum() * draws
    assert stats.chisquare(counts[kept], expected).pvalue > 1e-3
