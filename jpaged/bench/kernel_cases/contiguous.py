"""Attention over keys and values that each sequence has in one stretch, as the virtual layout keeps them: cuDNN's, and
our kernels' by a table that counts up.

Beside the cases of the same lengths over block tables. Where cuDNN has no such attention, a case's error says why.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import pallas_kernels as ops
from jpaged.bench.kernel_cases.attention import Setting, attention_case, calls_and_work
from jpaged.bench.kernel_cases.case import Built, Case, normal


def contiguous_case(lens: np.ndarray, queries: np.ndarray | None, s: Setting, backend: str = "cudnn") -> Built:
    """As `attention_case`, over stretches as long as the longest sequence, in any order."""
    rows, copies, rng = len(lens), s.copies(lens), np.random.default_rng(0)
    addresses = ops.Addresses(rows, 1, int(lens.max()), int(lens.max()))
    shape = (addresses.num_entries, s.kv_heads, s.head_dim)
    kv = [(normal(2 * i, shape, s.dtype), normal(2 * i + 1, shape, s.dtype)) for i in range(copies)]
    stretches = jnp.asarray(rng.permutation(rows), jnp.int32)
    q = normal(2 * copies, (rows if queries is None else int(queries.sum()), s.heads, s.head_dim), s.dtype)
    chunks = {}
    if queries is not None:
        starts = jnp.asarray(np.concatenate([[0], np.cumsum(queries)]), jnp.int32)
        chunks = {"query_starts": starts, "num_decodes": jnp.int32(0)}
    attend: Callable[..., jax.Array] = partial(ops.contiguous_attention, addresses=addresses, backend=backend)
    calls, work = calls_and_work(lens, queries, s, copies)

    @jax.jit
    def program(
        q: jax.Array,
        kv: list[tuple[jax.Array, jax.Array]],
        stretches: jax.Array,
        lens: jax.Array,
        chunks: dict[str, jax.Array],
    ) -> jax.Array:
        for i in range(calls):
            q = attend(q, *kv[i % copies], stretches, lens, **chunks)
        return q

    return program, (q, kv, stretches, jnp.asarray(lens, jnp.int32), chunks), calls, work


def cases(backend: str | None) -> Iterator[Case]:
    def both(name: str, unit: str, lens: np.ndarray, queries: np.ndarray | None) -> Iterator[Case]:
        yield Case(f"cuDNN {name}, contiguous", unit, None, partial(contiguous_case, lens, queries, Setting()))
        ours = partial(attention_case, lens, queries, Setting(), backend, is_contiguous=True)
        yield Case(f"{name}, contiguous", unit, None, ours)

    for rows, length in ((64, 4096), (256, 1024), (8, 16_384), (32, 1024)):
        yield from both(f"decode {rows} x {length:,}", "GB/s", np.full(rows, length), None)
    whole = np.array([16_384])
    yield from both("prefill 1 x 16,384", "TFLOP/s", whole, whole)
    yield from both("chunk of 2,048 on a 14,336 prefix", "TFLOP/s", whole, np.array([2048]))
