"""Every kernel sees what those before it wrote, on a Hopper GPU.

A kernel may be launched while the one before it ends, so values go through all ops in turn here, each of which gives
on exactly what the one before it wrote:

    x --write--> blocks a --copy--> blocks b --attention to that one token--> out = x --draw--> token x --> x + 1 ..
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import pallas_kernels as ops
from tests.pallas_kernels.marks import on_gpu

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
    check_rounds(40, rows=300, head_dim=head_dim, backend="hopper", compiler_options=compiler_options)
