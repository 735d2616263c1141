"""The grouped products: XLA anywhere, Triton and Mosaic kernels in their interpreters and on a GPU, against numpy."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jpaged.pallas_kernels import gated_grouped_product, sort_by_expert, weighted_grouped_product
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.grouped_product import hopper
from jpaged.pallas_kernels.grouped_product.api import tile_height
from jpaged.pallas_kernels.grouped_product.hopper_tiling import Tiling, pick_tiling
from jpaged.pallas_kernels.grouped_product.tiles import END, FIRST, GROUP, RowGroups, RowTiles, most_tiles, plan_tiles
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.marks import ON_GPU, WITH_TRITON, needs_mosaic, needs_triton, on_gpu

_ERROR = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


def draw_arguments(seed, sizes, depth, columns, *, dtype="bfloat16", behind=0):
    """x, gate and up, down, sizes, weights; `behind` rows belong to no group."""
    rng = np.random.default_rng(seed)
    rows, groups = sum(sizes) + behind, len(sizes)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    gate_up = jnp.asarray(rng.standard_normal((groups, depth, 2, columns)) / math.sqrt(depth), dtype)
    down = jnp.asarray(rng.standard_normal((groups, depth, 2 * columns)) / math.sqrt(depth), dtype)
    return x, gate_up, down, jnp.asarray(sizes, jnp.int32), jnp.asarray(rng.random(rows), jnp.float32)


def by_group(x, w, sizes):
    """float64 rows @ the matrix of their group; rows of no group are left out."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return np.concatenate([x[a:b] @ w[e] for e, (a, b) in enumerate(itertools.pairwise(starts))])


def expected(x, gate_up, down, sizes, weights, activation):
    """Both products in float64."""
    groups, depth, _, columns = gate_up.shape
    both = by_group(x, np.asarray(gate_up, np.float64).reshape(groups, depth, 2 * columns), sizes)
    gate, up = both[:, :columns], both[:, columns:]
    match activation:
        case "silu":
            gate = gate / (1 + np.exp(-gate))
        case "relu":
            gate = np.maximum(gate, 0)
        case "gelu":
            gate = gate / 2 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
        case "gelu_tanh":
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    weighted = by_group(x, down, sizes) * np.asarray(weights, np.float64)[: len(gate), None]
    return gate * up, weighted


def relative_error(got, want):
    got = np.asarray(got, np.float64)[: len(want)]
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def check(arguments, bound, activation="silu", gated=gated_grouped_product, weighted=weighted_grouped_product):
    x, gate_up, down, sizes, weights = arguments
    wanted = expected(x, gate_up, down, sizes, weights, activation)
    found = gated(x, gate_up, sizes, activation=activation), weighted(x, down, sizes, weights)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == x.dtype
        assert got.shape == (x.shape[0], want.shape[1])
        assert relative_error(got, want) <= bound
    return found


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.sampled_from([(3, 0, 1), (0, 70, 130), (1, 1, 1)]),
    dtype=st.sampled_from(list(_ERROR)),
    activation=st.sampled_from(list(ACTIVATIONS)),
    behind=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**31),
)
def test_xla_gives_what_float64_gives(sizes, dtype, activation, behind, seed):
    arguments = draw_arguments(seed, sizes, 40, 24, dtype=dtype, behind=behind)
    check(arguments, _ERROR[dtype], activation, *(partial(op, backend="xla") for op in OPS))


OPS = (gated_grouped_product, weighted_grouped_product)


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.sampled_from([1, 7, 700]),
    each=st.integers(1, 4),
    experts=st.sampled_from([1, 5, 64]),
    seed=st.integers(0, 2**31),
)
def test_assignments_are_sorted_stably_and_those_of_no_expert_go_last(tokens, each, experts, seed):
    drawn = np.random.default_rng(seed).integers(-2, experts + 2, (tokens, each)).astype(np.int32)
    flat = np.where((drawn < 0) | (drawn >= experts), experts, drawn).ravel()
    found = jax.jit(sort_by_expert, static_argnums=1)(drawn, experts)
    np.testing.assert_array_equal(found.assignments, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(np.asarray(found.assignments)[found.places.ravel()], np.arange(flat.size))
    np.testing.assert_array_equal(found.group_sizes, np.bincount(flat, minlength=experts + 1)[:experts])


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=9), behind=st.integers(0, 3))
def test_every_row_of_a_group_is_in_one_tile(sizes, behind):
    rows, height = sum(sizes) + behind, 64
    planned = jax.jit(partial(plan_tiles, rows=rows, height=height))
    listed, ends = map(np.asarray, planned(np.asarray(sizes, np.int32)))
    count = ends[-1]
    assert count <= len(listed) == most_tiles(rows, len(sizes), height)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    seen = [(row, tile[GROUP]) for tile in listed[:count] for row in range(tile[FIRST], tile[END])]
    assert seen == list(enumerate(groups))
    assert all(0 < tile[END] - tile[FIRST] <= height for tile in listed[:count])


@pytest.mark.parametrize(
    ("rows", "tiling"),
    [
        (8, (64, 1, False)),
        (128, (64, 1, False)),
        (2048, (128, 1, False)),
        (8192, (128, 2, True)),
        (65_536, (128, 2, True)),
    ],
)
def test_the_tiling_follows_the_rows_of_a_group_and_fits_a_multiprocessor(rows, tiling):
    picked = pick_tiling(rows, 128, 768)
    assert picked == Tiling(*tiling)
    assert picked.stages >= 4
    assert picked.stages * 128 * (picked.rows + 2 * picked.columns) <= 227 << 10
    assert 128 * (picked.consumers * picked.registers[0] + picked.registers[1]) <= 65536


@pytest.mark.parametrize("bad", [{"columns": 96}, {"consumers": 3}])
def test_a_tiling_that_the_kernel_cannot_have_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Tiling(**bad)


def test_what_hopper_refuses_it_names():
    x, gate_up, down, _, _ = draw_arguments(0, (1, 3), 16, 8)
    assert hopper.unsupported(x, gate_up) is None
    assert hopper.unsupported(x, down) is None
    assert "float32" in hopper.unsupported(x.astype(jnp.float32), gate_up)
    assert "multiples of 8" in hopper.unsupported(x, jnp.zeros((2, 16, 2, 12), jnp.bfloat16))
    assert "multiples of 8" in hopper.unsupported(x, jnp.zeros((2, 16, 24), jnp.bfloat16))


def test_no_rows_give_no_rows():
    x, gate_up, down, sizes, weights = draw_arguments(0, (0, 0), 16, 8)
    assert gated_grouped_product(x, gate_up, sizes).shape == (0, 8)
    assert weighted_grouped_product(x, down, sizes, weights).shape == (0, 16)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("x", {"x": jnp.zeros((4, 16, 1), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((2, 16, 3, 8), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((2, 8, 2, 8), jnp.bfloat16)}),
        ("w", {"w": jnp.zeros((2, 16, 2, 8), jnp.float32)}),
        ("group_sizes", {"group_sizes": jnp.zeros(3, jnp.int32)}),
        ("group_sizes", {"group_sizes": jnp.zeros(2, jnp.float32)}),
        ("activation", {"activation": "tanh"}),
        ("backend", {"backend": "cuda"}),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, changes):
    x, gate_up, _, sizes, _ = draw_arguments(0, (1, 3), 16, 8)
    good = {"x": x, "w": gate_up, "group_sizes": sizes}
    gated_grouped_product(**good)
    with pytest.raises(ValueError, match=name):
        gated_grouped_product(**good | changes)


def test_weights_that_do_not_fit_are_named():
    x, _, down, sizes, weights = draw_arguments(0, (1, 3), 16, 8)
    for bad in (weights[1:], weights.astype(jnp.bfloat16)):
        with pytest.raises(ValueError, match="weights"):
            weighted_grouped_product(x, down, sizes, bad)


def check_rows_alone(gated, weighted, bound):
    """Rows of groups 4, 1, none, 2 and 4, against the same rows sorted."""
    x, gate_up, down, sizes, weights = draw_arguments(5, (0, 1, 1, 0, 2), 40, 24, behind=1)
    groups, order = jnp.asarray([4, 1, -1, 2, 4], jnp.int32), np.array([1, 3, 0, 4])  # rows by group
    wanted = expected(x[order], gate_up, down, sizes, weights[order], "silu")
    found = gated(x, gate_up, None, groups=groups), weighted(x, down, None, weights, groups=groups)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == (5, want.shape[1])
        assert relative_error(got[order], want) <= bound


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_rows_that_come_with_their_groups_may_be_in_any_order(backend):
    check_rows_alone(*(partial(op, backend=backend) for op in OPS), 6e-3)


@needs_mosaic
def test_the_interpreter_passes_over_rows_of_no_group():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    options = {"ctas": 2, "interpret": plgpu.InterpretGPUParams(detect_races=True)}

    def gated(x, w, sizes, groups):
        return hopper.gated_grouped_product(x, w, RowGroups(sizes, groups), activation="silu", **options)

    def weighted(x, w, sizes, weights, groups):
        return hopper.weighted_grouped_product(x, w, RowGroups(sizes, groups), weights, **options)

    check_rows_alone(gated, weighted, 6e-3)


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_known_tiles_and_longer_weights_change_nothing(backend):
    x, gate_up, down, sizes, weights = draw_arguments(5, (3, 0, 20), 40, 24, behind=1)
    height = tile_height(24, 3, backend)
    tiles = RowTiles(*plan_tiles(sizes, rows=24, height=height), height)
    for options in ({"backend": backend}, {"backend": backend, "tiles": tiles}):
        gated = gated_grouped_product(x, gate_up, sizes, **options)
        weighted = weighted_grouped_product(x, down, sizes, jnp.pad(weights, (0, 128)), **options)
        wanted = expected(x, gate_up, down, sizes, weights, "silu")
        for got, want in zip((gated, weighted), wanted, strict=True):
            assert got.shape == (24, want.shape[1])
            assert relative_error(got, want) <= 6e-3


@pytest.mark.parametrize("rows", [8, 64, 2048, 4096, 4097, 65_536])
@pytest.mark.parametrize("groups", [8, 128])
def test_tiles_are_made_of_the_height_that_kernels_take(rows, groups):
    assert tile_height(rows, groups, "hopper") == pick_tiling(rows, groups, 768).rows
    if missing("triton") is None:
        from jpaged.pallas_kernels.grouped_product import triton

        assert tile_height(rows, groups, "triton") == triton.default_config(rows, groups, 2).rows


def test_tiles_that_do_not_fit_are_named():
    x, gate_up, _, sizes, _ = draw_arguments(0, (1, 3), 16, 8)
    tiles = RowTiles(*plan_tiles(sizes, rows=6, height=2), 2)
    with pytest.raises(ValueError, match=r"tiles\.listed"):
        gated_grouped_product(x, gate_up, sizes, tiles=tiles)
    with pytest.raises(ValueError, match="tiles go with group_sizes"):
        gated_grouped_product(x, gate_up, None, groups=jnp.zeros(4, jnp.int32), tiles=tiles)


def test_either_sizes_or_groups_are_given():
    x, gate_up, down, sizes, weights = draw_arguments(0, (1, 1), 16, 8)
    groups = jnp.arange(2, dtype=jnp.int32)
    for bad in ({"group_sizes": None}, {"group_sizes": sizes, "groups": groups}):
        with pytest.raises(ValueError, match="one of group_sizes and groups"):
            gated_grouped_product(x, gate_up, **bad)
    with pytest.raises(ValueError, match="groups"):
        weighted_grouped_product(x, down, None, weights, groups=groups[:1])


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(
    ("sizes", "shape", "dtype", "activation"),
    [
        ((3, 0, 20), (100, 72), "bfloat16", "silu"),
        ((0, 40), (24, 40), "float16", "gelu"),
        ((5,), (40, 24), "float32", "gelu_tanh"),
    ],
)
def test_triton_gives_what_float64_gives(sizes, shape, dtype, activation):
    arguments = draw_arguments(4, sizes, *shape, dtype=dtype, behind=3)
    check(arguments, _ERROR[dtype] / 4, activation, *(partial(op, backend="triton") for op in OPS))


@pytest.mark.gpu
@needs_triton
def test_triton_keeps_what_is_no_number_behind_relu():
    x, gate_up, _, sizes, _ = draw_arguments(6, (4,), 24, 16)
    out = gated_grouped_product(x, gate_up.at[:, :, 0, 3].set(jnp.nan), sizes, activation="relu", backend="triton")
    np.testing.assert_array_equal(np.isnan(out).all(axis=0), np.arange(16) == 3)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("rows", [1, 9, 64, 200, 3000])
def test_on_the_gpu_rows_of_uneven_groups_are_right_whatever_is_beside_them(rows, backend):
    sizes = np.bincount(np.random.default_rng(rows).zipf(1.5, rows) % 40, minlength=40)
    arguments = draw_arguments(rows, sizes.tolist(), 520, 328, behind=7)
    ops = [partial(op, backend=backend) for op in OPS]
    found = check(arguments, 3e-3, "silu", *ops)
    bad = int(np.flatnonzero(sizes)[-1])  # a group whose matrices are NaN
    x, gate_up, down, *others = arguments
    spoilt = (x, gate_up.at[bad].set(jnp.nan), down.at[bad].set(jnp.nan), *others)
    again = ops[0](spoilt[0], spoilt[1], spoilt[3]), ops[1](spoilt[0], spoilt[2], spoilt[3], spoilt[4])
    others_end = int(sizes[:bad].sum())
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(*(np.asarray(out[:others_end]).view(np.uint16) for out in (one, other)))
        assert jnp.isnan(other[others_end : others_end + int(sizes[bad])]).all()


@on_gpu
@pytest.mark.gpu
def test_on_hopper_warpgroups_without_rows_keep_up_through_many_launches():
    """A warp of theirs that lagged behind by a whole ring of stages would wait for ever."""
    sizes = np.random.default_rng(0).integers(1, 200, 64)  # half of the last tiles have rows for one warpgroup of two
    x, gate_up, _, *others = draw_arguments(0, sizes.tolist(), 2048, 512)
    assert pick_tiling(len(x), 64, 512).consumers == 2
    product = partial(gated_grouped_product, activation="silu", backend="hopper")
    first = product(x, gate_up, others[0])

    @jax.jit
    def differing(x, gate_up, sizes):
        def launch(_, count):
            read, count = lax.optimization_barrier((x, count))  # or the product would be taken out of the loop
            return count + jnp.sum(product(read, gate_up, sizes) != first)

        return lax.fori_loop(0, 5_000, launch, jnp.int32(0))

    assert differing(x, gate_up, others[0]) == 0


@needs_mosaic
@pytest.mark.parametrize(
    ("sizes", "shape", "tiling"),
    [
        ((3, 0, 70), (200, 72), (64, 1, False)),  # few rows and many, no rows; depth and columns end inside tiles
        # clusters, one of whose CTAs has no columns; a tile with rows for one warpgroup of two
        ((0, 131), (72, 72), (128, 2, True)),
    ],
)
def test_the_interpreter_agrees_and_finds_no_race(sizes, shape, tiling):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    options = {"tiling": Tiling(*tiling), "ctas": 2, "interpret": plgpu.InterpretGPUParams(detect_races=True)}

    def gated(x, w, sizes, activation):
        return hopper.gated_grouped_product(x, w, RowGroups(sizes, None), activation=activation, **options)

    def weighted(x, w, sizes, weights):
        return hopper.weighted_grouped_product(x, w, RowGroups(sizes, None), weights, **options)

    check(draw_arguments(1, sizes, *shape), 3e-3, "silu", gated, weighted)
