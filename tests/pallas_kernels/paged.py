"""Random paged caches to test on, and attention in float64 numpy to compare with.

Sequences are made whole, then scattered over shuffled blocks. Every pool slot that no live token owns is NaN, and so
are the table entries past a sequence's last block garbage: whoever reads them shows it. Numpy rounds and widens: each
shape would be a program to compile for JAX.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}


@dataclass
class World:
    """A paged cache of some sequences, and the same keys and values as plain arrays.

    pool: [num_blocks, 2, kv_heads, block_size, head_dim], or of latents 1 in place of 2. tables: int32 [rows, M]. lens:
        int32 [rows].
    keys, values: float64 [len, kv_heads, head_dim] a sequence, already rounded to the pool's dtype; of latents values
        are the first columns of keys.
    """

    pool: jnp.ndarray
    tables: np.ndarray
    lens: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]


def make_world(
    seed: int,
    lens: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str = "float32",
    shared_prefix: int = 0,
    width: int | None = None,
    window: int | None = None,
    garbage: bool = True,
    least_blocks: int = 0,
    value_dim: int | None = None,
) -> World:
    """Sequences of the given lengths. The first `shared_prefix` blocks of all (that are long enough) are the same.

    The pool has `least_blocks` blocks if these suffice, so that worlds of several lengths can have one shape.
    With `value_dim` the pool is one of latents.
    With `window`, tokens that no query at a sequence's end can see are NaN too, as if their blocks had been freed.
    """
    rng = np.random.default_rng(seed)
    need = [-(-n // block_size) for n in lens]
    width = max([*need, 1]) if width is None else width
    num_blocks = max(least_blocks, 1 + shared_prefix + sum(need) + 2)
    free = list(rng.permutation(num_blocks - 1) + 1)
    arrays = 2 if value_dim is None else 1
    pool = np.full((num_blocks, arrays, kv_heads, block_size, head_dim), np.nan, np.float32)
    shared = [free.pop() for _ in range(shared_prefix)]
    shared_kv = rng.standard_normal((arrays, shared_prefix * block_size, kv_heads, head_dim)).astype(np.float32)
    tables = np.zeros((len(lens), width), np.int32)
    if garbage:
        tables[:] = rng.choice([-5, 2**30, num_blocks + 7], tables.shape)
    keys, values = [], []
    for row, n in enumerate(lens):
        common = min(shared_prefix, n // block_size)
        blocks = shared[:common] + [free.pop() for _ in range(need[row] - common)]
        tables[row, : need[row]] = blocks
        kv = rng.standard_normal((arrays, n, kv_heads, head_dim)).astype(np.float32)
        kv[:, : common * block_size] = shared_kv[:, : common * block_size]
        first = 0 if window is None else max(0, n - window)
        for p in range(n):
            if p >= first or p < common * block_size:
                pool[blocks[p // block_size], :, :, p % block_size] = kv[:, p]
        rounded = kv.astype(jnp.dtype(dtype)).astype(np.float64)
        keys.append(rounded[0])
        values.append(rounded[-1, ..., :value_dim])
    return World(jnp.asarray(pool.astype(jnp.dtype(dtype))), tables, np.array(lens, np.int32), keys, values)


def random_queries(seed: int, rows: int, heads: int, head_dim: int, dtype: str) -> jnp.ndarray:
    drawn = np.random.default_rng(seed + 1).standard_normal((rows, heads, head_dim))
    return jnp.asarray(drawn.astype(jnp.dtype(dtype)))


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64, the textbook way. q: [n, heads, head_dim], of the positions from `first` on."""
    n, heads, head_dim = q.shape
    share = heads // keys.shape[1]
    keys, values = np.repeat(keys, share, 1), np.repeat(values, share, 1)
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), keys) * (head_dim**-0.5 if scale is None else scale)
    if logit_softcap is not None:
        scores = logit_softcap * np.tanh(scores / logit_softcap)
    at, key = first + np.arange(n)[:, None], np.arange(len(keys))[None]
    if alibi_slopes is not None:
        scores = scores + np.asarray(alibi_slopes, np.float64)[:, None, None] * (key - at)
    seen = key <= at
    if sliding_window is not None:
        seen &= key > at - sliding_window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:  # a key of their own, whose value is 0
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (heads, n, 1))
        scores, values = np.concatenate([scores, sink], -1), np.concatenate([values, np.zeros_like(values[:1])])
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    lse = (top + np.log(total))[..., 0].T
    return np.einsum("hqk,khd->qhd", weights / total, values), lse


def expected_decode(world: World, q: np.ndarray, **options: object) -> tuple[np.ndarray, np.ndarray]:
    out, lse = np.zeros((*q.shape[:2], world.values[0].shape[2])), np.full(q.shape[:2], -np.inf)
    for row, n in enumerate(world.lens):
        if n:
            o, s = attend(q[row : row + 1], world.keys[row], world.values[row], n - 1, **options)
            out[row], lse[row] = o[0], s[0]
    return out, lse


def expected_ragged(
    world: World, q: np.ndarray, starts: np.ndarray, **options: object
) -> tuple[np.ndarray, np.ndarray]:
    out, lse = np.zeros((*q.shape[:2], world.values[0].shape[2])), np.full(q.shape[:2], -np.inf)
    for row, n in enumerate(world.lens):
        a, b = starts[row], starts[row + 1]
        if b > a:
            out[a:b], lse[a:b] = attend(q[a:b], world.keys[row], world.values[row], n - (b - a), **options)
    return out, lse


def assert_close(got: jnp.ndarray, want: np.ndarray, dtype: str) -> None:
    """Relative error in the norm within the dtype's bound; nothing NaN."""
    got = np.asarray(got).astype(np.float64)
    assert np.isfinite(got).all(), "NaN or infinity in the output"
    error, size = np.linalg.norm(got - want), np.linalg.norm(want)
    assert error <= TOLERANCE[dtype] * size + 1e-30, f"relative error {error / max(size, 1e-30):.2e} in {dtype}"


def assert_lse_close(got: jnp.ndarray, want: np.ndarray, dtype: str) -> None:
    """Log-sum-exp: -inf exactly where the row saw nothing, near the true value elsewhere."""
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    seen = np.isfinite(want)
    np.testing.assert_allclose(got[seen], want[seen], atol=1e-4 if dtype == "float32" else 2e-3, rtol=1e-4)
