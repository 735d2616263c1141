"""The decode attention kernels in Pallas' GPU interpreter, on a CPU, with its race detector. Needs JAX >= 0.11."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.common.sinks import count_sinks
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.paged import assert_close, assert_lse_close, expected_decode, make_world, random_queries

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.decode_attention import hopper, hopper_rows

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def attend(kernel, config, lens, heads, kv_heads, block_size, head_dim, options):
    """Runs a decode kernel in the interpreter and compares it with float64 numpy."""
    options = dict(options)
    value_dim, scale = options.pop("value_dim", None), head_dim**-0.5
    slopes = np.linspace(0.01, 0.2, heads, dtype=np.float32) if options.pop("alibi", False) else None
    world = make_world(
        1,
        lens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype="bfloat16",
        window=options.get("sliding_window"),
        value_dim=value_dim,
    )
    q = random_queries(1, len(lens), heads, head_dim, "bfloat16")
    out, lse = kernel(
        Operands(
            q,
            world.pool,
            jnp.asarray(world.tables),
            jnp.asarray(world.lens),
            None if slopes is None else jnp.asarray(slopes),
        ),
        Features(scale, value_dim=value_dim, **options),
        config=config,
        interpret=INTERPRET,
    )
    for sinks in (None, np.linspace(-2.0, 6.0, heads, dtype=np.float32)):
        features = {"alibi_slopes": slopes, "sinks": sinks, **options}
        want, want_lse = expected_decode(world, np.asarray(q).astype(np.float32), **features)
        with_sinks, lse_with_sinks = count_sinks(out, lse, sinks)
        assert_close(with_sinks, want, "bfloat16")
        assert_lse_close(lse_with_sinks, want_lse, "bfloat16")
    return out, lse


def small_config(**fields):
    """Two leaves a chunk, each two tiles, on one CTA: what the interpreter can run."""
    fields = {"leaf": 128, "chunk": 256, "ctas": 1, **fields}
    return hopper.Config(tile=64, stages=2, **fields)


@pytest.fixture
def cut(monkeypatch):
    """Has `plan` cut every chunk into leaves, as if there were many CTAs; the interpreter has one."""
    monkeypatch.setattr(hopper.decode_plan, "max_cut_chunks", lambda batch, groups, slots, cuts: batch * slots)


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "block_size", "options"),
    [
        ([300, 0, 65], 8, 2, 16, {}),
        # groups of 3 heads start anywhere in a tile of queries
        ([300, 1, 256], 6, 2, 128, {"sliding_window": 100, "logit_softcap": 4.0, "alibi": True}),
        ([600], 4, 4, 64, {}),  # three chunks, the last of them less than a leaf
    ],
)
@pytest.mark.usefixtures("cut")
def test_decode_cut_into_leaves_is_right_where_unowned_slots_are_nan(lens, heads, kv_heads, block_size, options):
    attend(hopper.decode_attention, small_config(), lens, heads, kv_heads, block_size, 64, options)


def test_decode_of_whole_chunks_is_right_on_two_ctas_that_share_no_sequence():
    config = small_config(ctas=2)
    attend(hopper.decode_attention, config, [200, 129, 64], 4, 2, 16, 64, {})


@pytest.mark.parametrize(
    ("lens", "heads", "block_size", "head_dim", "options"),
    [
        ([300, 0, 65], 16, 16, 192, {"value_dim": 128}),
        ([260, 1], 20, 128, 128, {"value_dim": 128, "sliding_window": 100, "logit_softcap": 4.0, "alibi": True}),
        ([140], 16, 64, 576, {"value_dim": 512}),
    ],
)
@pytest.mark.usefixtures("cut")
def test_decode_over_latents_is_right_where_unowned_slots_are_nan(lens, heads, block_size, head_dim, options):
    attend(hopper.decode_attention, small_config(handovers=1), lens, heads, 1, block_size, head_dim, options)


@pytest.mark.parametrize("handovers", [1, 2])
def test_decode_over_whole_chunks_of_latents_is_right(handovers):
    """Chunks of two leaves, of which one is folded into what waits to be handed over."""
    config = small_config(handovers=handovers)
    attend(hopper.decode_attention, config, [250, 0, 140], 16, 1, 64, 192, {"value_dim": 128})


@pytest.mark.parametrize(("head_dim", "options"), [(64, {}), (192, {"value_dim": 128})])
def test_whole_chunks_and_leaves_give_the_same_bits(request, head_dim, options):
    run = partial(attend, hopper.decode_attention, heads=2, kv_heads=1, block_size=64, head_dim=head_dim)
    whole = run(small_config(), [250], options=options)
    request.getfixturevalue("cut")
    cut = run(small_config(q_stages=3), [250], options=options)  # another config, or the program of before runs again
    jax.tree.map(np.testing.assert_array_equal, cut, whole)


def test_decode_with_heads_as_rows_is_right_where_unowned_slots_are_nan():
    config = hopper_rows.Config(tile=64, stages=2, chunk=128, ctas=2)
    options = {"sliding_window": 100, "logit_softcap": 4.0, "alibi": True}
    attend(hopper_rows.decode_attention, config, [300, 0, 65], 8, 2, 16, 80, options)
