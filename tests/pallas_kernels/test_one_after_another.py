"""Every kernel sees what those before it wrote, and decode attention is right, on a Hopper GPU.

A kernel may be launched while the one before it ends, so values go through all ops in turn here, each of which gives
on exactly what the one before it wrote:

    x --write--> blocks a --copy--> blocks b --attention to that one token--> out = x --draw--> token x --> x + 1 ..
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import pallas_kernels as ops
from jpaged.pallas_kernels.backends import device_runs_mosaic
from tests.pallas_kernels.paged import assert_close, assert_lse_close, expected_decode, make_world, random_queries

on_gpu = pytest.mark.skipif(not device_runs_mosaic(), reason="needs a Hopper GPU")

GROUP, KV_HEADS, BLOCK_SIZE, VOCAB = 4, 2, 16, 512


def go_round(rounds: int, head_dim: int, backend: str, x: jax.Array, pool: jax.Array) -> jax.Array:
    """x + rounds. x: int32 [rows], of numbers from 0 that with `rounds` stay below 256; pool: two blocks a row."""
    (rows,) = x.shape
    blocks_a = jnp.arange(rows, dtype=jnp.int32) + 1
    blocks_b = blocks_a + rows
    slots, ones = blocks_a * BLOCK_SIZE, jnp.ones(rows, jnp.int32)
    for i in range(rounds):
        kv = jnp.broadcast_to(x[:, None, None], (rows, KV_HEADS, head_dim)).astype(pool.dtype)
        if i % 2:
            q = jnp.zeros((rows, KV_HEADS * GROUP, head_dim), pool.dtype)
            pool = ops.write_kv(pool, kv, kv, slots, backend=backend)
            (pool,) = ops.copy_blocks((pool,), blocks_a, blocks_b, backend=backend)
        else:
            qkv = jnp.broadcast_to(kv[:, :, None], (rows, KV_HEADS, GROUP + 2, head_dim))
            q, pool = ops.rope_and_write(pool, qkv, slots, backend=backend)
            staging = ops.gather_blocks((pool,), blocks_a, backend=backend)
            (pool,) = ops.scatter_blocks((pool,), staging, blocks_b, backend=backend)
        if i % 3:
            out = ops.decode_attention(q, pool, blocks_b[:, None], ones, backend=backend)
        else:
            starts = jnp.arange(rows + 1, dtype=jnp.int32)
            out = ops.ragged_attention(q, pool, blocks_b[:, None], ones, starts, backend=backend)
        logits = jax.nn.one_hot(out.astype(jnp.float32).mean((1, 2)).astype(jnp.int32), VOCAB)
        seeds = jnp.zeros((rows, 2), jnp.uint32)
        x = ops.sample_tokens(logits, jnp.zeros(rows), None, None, None, seeds, ones, backend=backend) + 1
    return x


def check_rounds(rounds: int, rows: int, head_dim: int, backend: str, compiler_options: dict[str, str]) -> None:
    x = np.arange(rows, dtype=np.int32) % 100
    pool = jnp.zeros((2 * rows + 1, 2, KV_HEADS, BLOCK_SIZE, head_dim), jnp.bfloat16)
    run = jax.jit(go_round, static_argnums=(0, 1, 2), compiler_options=compiler_options)
    for _ in range(3):
        np.testing.assert_array_equal(run(rounds, head_dim, backend, jnp.asarray(x), pool), x + rounds)


def test_values_go_through_all_ops_unchanged():
    check_rounds(3, rows=5, head_dim=32, backend="xla", compiler_options={})


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("graphs", [True, False])
def test_on_the_gpu_no_kernel_begins_too_early(head_dim, graphs):
    # Outside of CUDA graphs kernels overlap wherever they can.
    compiler_options = {} if graphs else {"xla_gpu_enable_command_buffer": ""}
    check_rounds(40, rows=300, head_dim=head_dim, backend="mosaic", compiler_options=compiler_options)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"dtype": "float16"},
        {"block_size": 128},
        {"head_dim": 64},
        {"head_dim": 64, "block_size": 64},
        {"head_dim": 256},
        {"head_dim": 80},
        {"heads": 8},
        {"heads": 14, "kv_heads": 2},
        {"heads": 32, "kv_heads": 1},
        {"lens": [5000, 2500, 0, 700]},
        {"lens": [300] * 700, "heads": 8, "kv_heads": 2},
        {"sliding_window": 200, "logit_softcap": 3.0, "head_dim": 64},
    ],
    ids=str,
)
def test_on_the_gpu_decode_is_right_where_unowned_slots_are_nan_and_gives_the_same_bits(case):
    rest = dict(case)
    shape = {"kv_heads": rest.pop("kv_heads", 8), "head_dim": rest.pop("head_dim", 128)}
    heads, dtype = rest.pop("heads", 32), rest.pop("dtype", "bfloat16")
    lens = rest.pop("lens", [2500, 0, 1, 16, 17, 700, 2048, 2049, 64, 1023])
    window = rest.get("sliding_window")
    world = make_world(3, lens, block_size=rest.pop("block_size", 16), dtype=dtype, window=window, **shape)
    q = random_queries(3, len(lens), heads, shape["head_dim"], dtype)
    arguments = (q, world.pool, jnp.asarray(world.tables), jnp.asarray(world.lens))
    runs = [ops.decode_attention(*arguments, return_lse=True, backend="mosaic", **rest) for _ in range(3)]
    want, want_lse = expected_decode(world, np.asarray(q.astype(jnp.float32)), **rest)
    assert_close(runs[0][0], want, dtype)
    assert_lse_close(runs[0][1], want_lse, dtype)
    for run in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, run, runs[0])
