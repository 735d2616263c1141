"""What the one-shot all-reduce takes, and its XLA implementation. That the kernel compiles is in `test_hopper_compile`,
what it sends and awaits in `test_protocol`; it runs on several GPUs only (`tests/drills/one_shot.py`,
`benchmarks/all_reduce.py`). Over several CPU devices the XLA implementation runs in `tests/parallel`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged.pallas_kernels import (
    all_reduce_add_norm,
    all_reduce_peers,
    all_reduce_unsupported,
    initial_all_reduce_state,
)
from jpaged.pallas_kernels.all_reduce.inbox import EMPTY, MAX_CTAS
from tests.pallas_kernels.marks import needs_mosaic

HIDDEN = 256


@needs_mosaic
@pytest.mark.parametrize("hidden", [256, 768, 1024, 2560, 4096, 5120, 8192])
def test_rows_of_common_models_are_taken(hidden):
    assert all_reduce_unsupported(hidden, "bfloat16", 4) is None
    assert all_reduce_unsupported(hidden, "float16", 2) is None


@needs_mosaic
@pytest.mark.parametrize(
    ("hidden", "dtype", "devices", "message"),
    [
        (4096, "bfloat16", 1, "1 device"),
        (4096, "float32", 2, "float32 is not of 16 bits"),
        (896, "bfloat16", 2, "rows of 896 do not divide"),
        (16384, "bfloat16", 2, "rows of 16384 do not fit"),
    ],
)
def test_what_is_not_taken_is_said(hidden, dtype, devices, message):
    assert message in all_reduce_unsupported(hidden, dtype, devices)


def test_every_other_device_has_two_places_for_each_row_and_each_block_of_threads_a_count():
    inbox, generations = initial_all_reduce_state(4, 2048, 4096, "bfloat16")
    assert (inbox.shape, inbox.dtype) == ((2, 3, 2048, 4096 // 2), jnp.int32)
    assert (generations.shape, generations.dtype) == ((MAX_CTAS,), jnp.int32)
    _, generations = initial_all_reduce_state(4, 64, 4096, "bfloat16")
    assert generations.shape == (64,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_empty_word_is_two_nans_and_so_is_what_is_sent_for_it(dtype):
    words = jnp.asarray([EMPTY, EMPTY - 1], jnp.int32)
    assert jnp.isnan(jax.lax.bitcast_convert_type(words, dtype)).all()


def add_norm(rows: int, max_rows: int = 512, **changes):
    """One call over the one device there is; what changes says of arguments replaces or breaks them."""
    inbox, generations = initial_all_reduce_state(1, max_rows, HIDDEN, "bfloat16")
    state = jnp.full(inbox.shape, EMPTY, inbox.dtype), jnp.zeros(generations.shape, generations.dtype)
    rng = np.random.default_rng(rows)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    arguments = {"parts": normal(rows, HIDDEN), "residual": normal(rows, HIDDEN)}
    arguments |= {"bias": normal(HIDDEN), "scale": normal(HIDDEN)} | changes

    def program(inbox: jax.Array, generations: jax.Array, arguments: dict) -> tuple:
        how = {"axis": "model", "num_devices": 1, "backend": "xla"}
        peers = all_reduce_peers(inbox, **how)
        return all_reduce_add_norm(inbox, generations, peers, norm_eps=1e-5, **how, **arguments)

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    spec = PartitionSpec()
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(program)
    return arguments, jax.jit(mapped)(*state, arguments)


@pytest.mark.parametrize("changes", [{}, {"bias": None}, {"scale": None}])
def test_the_sum_is_rounded_once_and_then_normed(changes):
    given, (_, _, summed, normed) = add_norm(5, **changes)
    exact = sum(
        np.asarray(given[name], np.float64) for name in ("parts", "residual", "bias") if given[name] is not None
    )
    rounded = exact.astype(jnp.bfloat16)
    np.testing.assert_array_equal(summed, rounded)
    if given["scale"] is None:
        assert normed is None
        return
    wide = rounded.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(given["scale"], np.float64)
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=2**-7)


def test_calls_are_counted_for_each_block_of_threads_that_has_rows():
    _, (_, generations, _, _) = add_norm(5)
    assert generations[:6].tolist() == [1, 1, 1, 1, 1, 0]
    _, (_, generations, _, _) = add_norm(MAX_CTAS + 3)
    assert generations.tolist() == [1] * MAX_CTAS


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (9, {"max_rows": 8}, "parts has 9 rows, more than the 8 that inbox has room for"),
        (4, {"residual": jnp.zeros((3, HIDDEN), jnp.bfloat16)}, "residual .* must have rows = 4"),
        (4, {"parts": jnp.zeros((4, HIDDEN), jnp.float32)}, "inbox .* must have words = 256"),
        (4, {"residual": jnp.zeros((4, HIDDEN), jnp.float16)}, "residual must be bfloat16, got float16"),
        (4, {"bias": jnp.zeros((HIDDEN + 1,), jnp.bfloat16)}, "bias .* must have hidden = 256"),
    ],
)
def test_arguments_that_do_not_fit_are_named(rows, changes, message):
    with pytest.raises(ValueError, match=message):
        add_norm(rows, **changes)


def test_an_inbox_with_more_words_than_can_be_counted_is_refused():
    state = initial_all_reduce_state(2, 2**19 + 1, 4096, "bfloat16")
    peers, part = jax.ShapeDtypeStruct((2, 2), jnp.int32), jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16)
    add = partial(all_reduce_add_norm, axis="model", num_devices=2, backend="xla")
    with pytest.raises(ValueError, match="inbox has room for 524289 rows of 4096, more than the 524288 that"):
        jax.eval_shape(add, *state, peers, part, part)
