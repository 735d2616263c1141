"""The kernel in Pallas' GPU interpreter, on a CPU, with its race detector. Needs JAX >= 0.11."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.rope_and_write import hopper, reference
from jpaged.pallas_kernels.rope_and_write.hopper_layout import thread_layout
from jpaged.pallas_kernels.rope_and_write.projection import Projection
from jpaged.pallas_kernels.round_rows.operands import Sums
from jpaged.pallas_kernels.write_kv.destination import Destination

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "rotated", "normed"),
    [(2, 3, 32, True, True), (2, 3, 32, True, "float32"), (4, 1, 64, False, False), (128, 1, 32, True, False)],
)
def test_queries_and_a_pool_written_from_a_projection_equal_the_reference(kv_heads, group, head_dim, rotated, normed):
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    pool, qkv = normal(6, 2, kv_heads, 16, head_dim), normal(4, kv_heads, group + 2, head_dim)
    angles = normal(4, head_dim // 2, dtype=jnp.float32)
    rotation = (jnp.cos(angles), jnp.sin(angles)) if rotated else None
    of_scales = jnp.float32 if normed == "float32" else jnp.bfloat16
    norms = (normal(head_dim, dtype=of_scales), normal(head_dim, dtype=of_scales)) if normed else None
    slots = Destination(jnp.asarray([17, 95, -1, 33], jnp.int32))
    arguments = (pool, Projection(qkv, rotation, norms), slots)
    run = jax.jit(lambda *a: hopper.rope_and_write(*a, norm_eps=1e-6, interpret=INTERPRET))
    want = reference.rope_and_write(*arguments, norm_eps=1e-6)
    for got, expected in zip(run(*arguments), want, strict=True):
        got, expected = (np.asarray(x).astype(np.float32) for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-6)
        assert (got == expected).mean() > 0.99  # a sum in another order moves a rounding here and there


@pytest.mark.parametrize("kept", [jnp.bfloat16, jnp.float32])
def test_scales_of_a_product_are_multiplied_on_the_way(kept):
    rng = np.random.default_rng(1)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    pool, angles = normal(6, 2, 2, 16, 32, dtype=jnp.bfloat16), normal(3, 16)
    scales = jnp.exp(normal(16, 1)).at[3:].set(jnp.nan), jnp.exp(normal(2 * 5 * 32))  # rows of padding hold anything
    sums = Sums(normal(16, 2 * 5 * 32, dtype=kept), *scales, 3, jnp.dtype(jnp.bfloat16))
    rotation, slots = (jnp.cos(angles), jnp.sin(angles)), Destination(jnp.asarray([17, -1, 33], jnp.int32))
    plain = Projection(sums.array().reshape(3, 2, 5, 32), rotation, None)
    given = Projection(sums.products.reshape(16, 2, 5, 32), rotation, None, (scales[0], scales[1].reshape(2, 5, 32)))
    run = jax.jit(lambda *a: hopper.rope_and_write(*a, norm_eps=1e-6, interpret=INTERPRET))
    for got, expected in zip(run(pool, given, slots), run(pool, plain, slots), strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), expected.astype(jnp.float32))


def test_as_many_threads_as_can_share_an_array_and_cover_it():
    shapes = [(a, b, c) for a in (1, 2, 3, 8) for b in (1, 4, 7) for c in (8, 32, 40, 64, 128)]
    for shape in [*shapes, (8, 64), (1, 64), (32, 40)]:
        layout = thread_layout(shape, 4).to_mgpu()
        registers = np.prod(layout.registers_shape(shape)) * layout.vector_length
        assert registers * 128 == np.prod(shape) * layout.replication_factor, shape
        rows = np.prod(shape[:-1])  # a row is at most a warp's
        columns = np.gcd(32, shape[-1])
        assert layout.replication_factor == 128 // (columns * np.gcd(128 // columns, rows)), shape
