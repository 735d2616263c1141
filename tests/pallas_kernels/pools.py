"""Pools to move tokens and blocks in, and whether a program copies one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def random_pool(rng: np.random.Generator, dtype: str = "float32") -> jax.Array:
    """9 blocks of 16 tokens, of 2 heads of 16 numbers."""
    return jnp.asarray(rng.standard_normal((9, 2, 2, 16, 16)), dtype)


def check_no_copy(op: Callable[..., Any], arguments: tuple[Any, ...], pools: int, pool: jax.ShapeDtypeStruct) -> None:
    """That the program of `op`, whose first argument are so many pools like `pool`, updates them in place."""
    pool_bytes = int(np.prod(pool.shape)) * pool.dtype.itemsize
    compiled = jax.jit(lambda *a: op(*a, backend="xla"), donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pools * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 10
