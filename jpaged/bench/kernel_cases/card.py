"""The card's own bandwidth, matrix rate and launches."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.bench.kernel_cases.case import Built, Case, normal


def _read_case() -> Built:
    x = normal(0, (1 << 14, 1 << 17), jnp.bfloat16)  # 4 GiB
    return jax.jit(lambda x: jnp.max(x)), (x,), 1, float(x.nbytes)


def _card_copy_case() -> Built:
    x = normal(0, (1 << 13, 1 << 17), jnp.bfloat16)
    return jax.jit(lambda x: -x, donate_argnums=()), (x,), 1, 2.0 * x.nbytes


def _launch_case() -> Built:
    """Nearly empty kernels in a row: the least that a small kernel costs."""

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        for _ in range(128):
            x = lax.optimization_barrier(-x)
        return x

    return program, (normal(0, (128,), jnp.float32),), 128, 0.0


def _matmul_case() -> Built:
    n = 8192
    x, y = (normal(i, (n, n), jnp.bfloat16) * 0.01 for i in range(2))

    @jax.jit
    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 8, lambda _, x: x @ y, x)

    return program, (x, y), 8, 2.0 * n**3


def cases() -> Iterator[Case]:
    """Those of the card itself; they have no aim."""
    yield Case("card: read", "GB/s", None, _read_case)
    yield Case("card: copy", "GB/s", None, _card_copy_case)
    yield Case("card: kernel of 128 numbers", "us", None, _launch_case)
    yield Case("card: 8192^3 bf16 product", "TFLOP/s", None, _matmul_case)
