"""`gated_product`: XLA anywhere, the Mosaic kernel in the interpreter and on a Hopper GPU, against float64 numpy."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels import gated_product
from jpaged.pallas_kernels.gated_product import hopper as kernel
from jpaged.pallas_kernels.gated_product import hopper_cta, hopper_tiling
from jpaged.pallas_kernels.gated_product.hopper_tiling import Tiling
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from tests.pallas_kernels.marks import needs_mosaic, on_gpu

TILINGS = list(hopper_tiling.tilings(1024))
_ERROR = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


def draw_arguments(seed, rows, depth, columns, *, dtype="bfloat16", biased=True):
    rng = np.random.default_rng(seed)
    shapes = {"x": (rows, depth), "w": (depth, 2, columns), "bias": (2, columns)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["w"] /= math.sqrt(depth)
    arguments = [jnp.asarray(array, dtype) for array in arrays.values()]
    return arguments if biased else [*arguments[:2], None]


def expected(x, w, bias, activation="silu"):
    """In float64, with activations written out anew."""
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    gate, up = (x @ w[:, half] + (0 if bias is None else np.asarray(bias, np.float64)[half]) for half in range(2))
    erf = np.vectorize(math.erf)
    match activation:
        case "silu":
            gate = gate / (1 + np.exp(-gate))
        case "relu":
            gate = np.maximum(gate, 0)
        case "gelu":
            gate = gate / 2 * (1 + erf(gate / math.sqrt(2)))
        case "gelu_tanh":
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return gate * up


def relative_error(got, want):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.sampled_from([1, 130]),
    shape=st.sampled_from([(8, 8), (100, 40)]),
    dtype=st.sampled_from(list(_ERROR)),
    activation=st.sampled_from(list(ACTIVATIONS)),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_xla_gives_what_float64_gives(rows, shape, dtype, activation, biased, seed):
    arguments = draw_arguments(seed, rows, *shape, dtype=dtype, biased=biased)
    got = jax.jit(partial(gated_product, activation=activation, backend="xla"))(*arguments)
    assert got.dtype == dtype
    assert relative_error(got, expected(*arguments, activation)) <= _ERROR[dtype]


def test_no_rows_give_no_rows():
    x, w, bias = draw_arguments(0, 4, 16, 8)
    assert gated_product(x[:0], w, bias).shape == (0, 8)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("x", {"x": jnp.zeros((4, 16, 1), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((16, 3, 8), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((8, 2, 8), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((16, 2, 8), jnp.float32)}),
        ("x", {"x": jnp.zeros((4, 16), jnp.int8), "w": jnp.zeros((16, 2, 8), jnp.int8)}),
        ("bias", {"bias": jnp.zeros((2, 16), jnp.bfloat16)}),
        ("bias", {"bias": jnp.zeros((2, 8), jnp.float32)}),
        ("activation", {"activation": "tanh"}),
        ("backend", {"backend": "cuda"}),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, changes):
    good = dict(zip(("x", "w", "bias"), draw_arguments(0, 4, 16, 8), strict=True))
    gated_product(**good)
    with pytest.raises(ValueError, match=name):
        gated_product(**good | changes)


def test_what_the_kernel_refuses_it_names():
    x, w, _ = draw_arguments(0, 4, 16, 8, biased=False)
    assert kernel.unsupported(x, w) is None
    assert "float32" in kernel.unsupported(x.astype(jnp.float32), w.astype(jnp.float32))
    assert "multiples of 8" in kernel.unsupported(x, jnp.zeros((16, 2, 12), jnp.bfloat16))
    assert "K > 0" in kernel.unsupported(x[:, :0], w[:0])


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"columns": 24}, "columns"),
        ({"columns": 144}, "columns"),
        ({"consumers": 4}, "consumers"),
        ({"columns": 128, "consumers": 3}, "columns"),
        ({"shared": "out"}, "shared"),
    ],
)
def test_a_tiling_that_the_kernel_cannot_have_is_refused(bad, named):
    with pytest.raises(ValueError, match=f"{named} must be"):
        Tiling(**bad)


def test_every_tiling_fits_a_multiprocessor():
    for tiling in TILINGS:
        consumer, producer = tiling.registers
        assert 128 * (tiling.consumers * consumer + producer) <= 65536, tiling
        assert tiling.stages >= 4, tiling
        assert tiling.stages * (tiling.stage_bytes + 16) <= 227 << 10, tiling


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "picked"),
    [
        (128, 4096, 14336, (128, 2, "x")),
        (192, 4096, 14336, (112, 3, "x")),
        (256, 4096, 14336, (128, 2, "w")),
        (384, 4096, 14336, (112, 3, "w")),
        (8192, 4096, 14336, (128, 2, "w")),
        (512, 1024, 3072, (96, 2, "w")),  # by the estimate as long as with 128 columns
        (1024, 1024, 3072, (96, 2, "w")),
    ],
)
def test_what_took_least_on_an_h200_is_picked(rows, depth, columns, picked):
    assert hopper_tiling.pick_tiling(rows, depth, columns, ctas=132) == Tiling(*picked)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 5000),
    columns=st.integers(1, 600).map(lambda n: 8 * n),
    depth=st.sampled_from([64, 4096, 1 << 16]),  # the deeper, the fewer rows in a group
    tiling=st.sampled_from([*TILINGS, Tiling(48, 3, "w")]),
    ctas=st.sampled_from([2, 7, 132]),
)
def test_every_output_is_of_one_tile(rows, columns, depth, tiling, ctas):
    shape = kernel._shape(tiling, ctas, rows, depth, columns, jnp.bfloat16, "silu", False)
    total = shape.row_tiles * shape.strips
    turns = -(-total // shape.clusters)
    each = np.indices((turns, shape.clusters, math.prod(tiling.cluster)), np.int32).reshape(3, -1)
    each = each[:, each[0] * shape.clusters + each[1] < total]
    turn, cluster, rank = np.pad(each, ((0, 0), (0, 8192 - each.shape[1])))  # of one shape, to be compiled once
    cta = hopper_cta.DenseCta(shape, None, None, True, cluster, rank, None, None)
    starts = np.stack(cta.tile(turn), axis=1)[: each.shape[1]]
    assert len(np.unique(starts, axis=0)) == len(starts)
    assert (starts % [tiling.rows, tiling.columns] == 0).all()
    inside = starts[(starts < [rows, columns]).all(axis=1)]
    assert len(inside) == -(-rows // tiling.rows) * -(-columns // tiling.columns)


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "tiling", "ctas", "activation"),
    [
        ((400, 200, 72), (48, 3, "w"), 2, "silu"),  # clusters; rows, depth and columns end inside tiles
        ((200, 280, 136), (80, 2, "x"), 2, "gelu_tanh"),  # more steps than stages
    ],
)
def test_the_interpreter_agrees_and_finds_no_race(shape, tiling, ctas, activation):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    arguments = draw_arguments(1, *shape)
    options = {"activation": activation, "tiling": Tiling(*tiling), "ctas": ctas}
    got = kernel.gated_product(*arguments, **options, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert got.shape == (shape[0], shape[2])
    assert relative_error(got, expected(*arguments, activation)) <= 3e-3


def assert_same_bits(got, want):
    np.testing.assert_array_equal(*(np.asarray(array).view(np.uint16) for array in (got, want)))


def run_between_guards(arguments, **options):
    """The kernel's result, in memory that was NaN before; what lay beside it must stay."""
    shape, dtype = (arguments[0].shape[0], arguments[1].shape[2]), arguments[0].dtype
    guards = [jnp.full(shape, value, dtype) for value in (1.0, jnp.nan, 2.0)]
    guards.pop(1).block_until_ready().delete()
    out = kernel.gated_product(*arguments, **{"activation": "silu"} | options)
    for guard, value in zip(guards, (1.0, 2.0), strict=True):
        assert (np.asarray(guard, np.float32) == value).all()
    return out


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "tiling",
    [
        *TILINGS,
        Tiling(48, 2, "w"),
        Tiling(80, 3, "x"),
    ],
    ids=str,
)
def test_on_the_gpu_every_tiling_gives_the_same_right_bits(tiling):
    arguments = draw_arguments(2, 1000, 1000, 1224)
    out = run_between_guards(arguments, tiling=tiling)
    assert relative_error(out, expected(*arguments)) <= 3e-3
    assert_same_bits(out, run_between_guards(arguments, tiling=tiling))
    assert_same_bits(out, kernel.gated_product(*arguments, activation="silu", tiling=Tiling()))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_the_gpu_every_activation_is_right(activation, dtype):
    for biased in (False, True):
        arguments = draw_arguments(3, 190, 520, 328, dtype=dtype, biased=biased)
        arguments[0] = arguments[0] * 4  # far into the tails
        out = run_between_guards(arguments, activation=activation)
        assert relative_error(out, expected(*arguments, activation)) <= 3e-3


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rows", [65, 128, 200, 256, 384, 777, 1024, 4096])
@pytest.mark.parametrize(("depth", "columns"), [(4096, 14336), (4096, 3584), (1024, 3072)])
def test_on_the_gpu_rows_of_models_are_right_whatever_is_beside_them(rows, depth, columns):
    keys = jax.random.split(jax.random.key(rows), 2)
    x = jax.random.normal(keys[0], (rows, depth), jnp.bfloat16)
    w = jax.random.normal(keys[1], (depth, 2, columns), jnp.bfloat16) * depth**-0.5
    x = x.at[rows // 2].set(jnp.nan)
    out = run_between_guards([x, w, None])
    assert_same_bits(out, run_between_guards([x, w, None]))
    assert jnp.isnan(out[rows // 2]).all()
    some = np.setdiff1d(np.r_[0:3, rows // 3, rows - 65, rows - 3 : rows], [rows // 2])
    ends = np.r_[0:130, columns - 130 : columns]
    assert relative_error(out[some][:, ends], expected(x[some], w[:, :, ends], None)) <= 3e-3
    others = jnp.delete(out, rows // 2, axis=0)
    assert jnp.isfinite(others).all()
    alone = kernel.gated_product(x[some], w, None, activation="silu")
    assert_same_bits(alone, out[some])
