"""The public ops: check the arguments, pick the backend, call it."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels import arguments as check
from jpaged.pallas_kernels import reference, sample_reference
from jpaged.pallas_kernels.backends import pick


def decode_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one query token a sequence over the sequence's paged keys and values.

    Args:
        q: [B, heads, head_dim], of the pool's dtype.
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim]; heads is a multiple of kv_heads, and query head h
            reads KV head h // (heads / kv_heads).
        block_tables: int32 [B, M].
        kv_lens: int32 [B]; tokens to attend to, the query's own included, at most M * block_size. A row of 0 tokens
            gives 0 (and a log-sum-exp of -inf).
        scale: multiplies the scores; 1 / sqrt(head_dim) by default.
        sliding_window: the query at position p sees keys p - sliding_window + 1 .. p only.
        logit_softcap: scores become cap * tanh(score / cap), before ALiBi and the mask.
        alibi_slopes: float [heads]; adds slope * (key position - query position) to the scores.
        return_lse: also return the log-sum-exp, by which partial results are merged.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        [B, heads, head_dim] of q's dtype; with return_lse also float32 [B, heads], natural logarithm.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool)
    check.check_queries(q, kv_pool)
    check.check_int32("block_tables", block_tables, "B, M", (q.shape[0], None))
    check.check_int32("kv_lens", kv_lens, "B", (q.shape[0],))
    features = _features(q, block_tables, scale, sliding_window, logit_softcap)
    slopes = check.check_alibi(alibi_slopes, q.shape[1])
    kernel = _implementation("decode_attention", "decode_attention_mosaic", backend, q, kv_pool)
    if q.shape[0] == 0:
        out, lse = jnp.zeros_like(q), jnp.zeros(q.shape[:2], jnp.float32)
    else:
        out, lse = kernel(q, kv_pool, block_tables, kv_lens, slopes, **features)
    return (out, lse) if return_lse else out


def ragged_attention(
    q: jax.Array,
    kv_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    causal: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of any mix of prefill chunks and decode rows over paged keys and values.

    The queries of all rows stand one after another. Row r's are q[query_starts[r]:query_starts[r + 1]]; they are the
    last of its kv_lens[r] tokens, whose keys and values are in the pool already.

    Args:
        q: [T, heads, head_dim], of the pool's dtype.
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim].
        block_tables: int32 [R, M].
        kv_lens: int32 [R]; tokens of each row in all, at least its queries, at most M * block_size.
        query_starts: int32 [R + 1]; non-decreasing, at most T. A row may have no queries. Queries from
            query_starts[R] on are padding and come out as 0 (log-sum-exp -inf); those before query_starts[0] are
            nobody's, and what comes out for them is undefined.
        causal: False lets every query of a row stand at the row's last token, as if each were its one decode query:
            they all see its kv_lens[r] tokens, which may then be fewer than the queries, or none.
        scale, sliding_window, logit_softcap, alibi_slopes, return_lse, backend: as in `decode_attention`.
    Returns:
        [T, heads, head_dim] of q's dtype; with return_lse also float32 [T, heads], natural logarithm.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool)
    check.check_queries(q, kv_pool)
    check.check_int32("block_tables", block_tables, "R, M", (None, None))
    rows = block_tables.shape[0]
    check.check_int32("kv_lens", kv_lens, "R", (rows,))
    check.check_int32("query_starts", query_starts, "R + 1", (rows + 1,))
    features = _features(q, block_tables, scale, sliding_window, logit_softcap)
    features["causal"] = check.check_flag("causal", causal)
    slopes = check.check_alibi(alibi_slopes, q.shape[1])
    kernel = _implementation("ragged_attention", "ragged_attention_mosaic", backend, q, kv_pool)
    if q.shape[0] == 0 or rows == 0:
        out, lse = jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    else:
        out, lse = kernel(q, kv_pool, block_tables, kv_lens, query_starts, slopes, **features)
    return (out, lse) if return_lse else out


def write_kv(
    kv_pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, backend: str | None = None
) -> jax.Array:
    """Puts new keys and values into their slots; in place when the caller's jit donates the pool.

    Args:
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim].
        k, v: [T, kv_heads, head_dim], of the pool's dtype.
        slot_mapping: int32 [T]; block * block_size + offset. No slot twice, save those of block 0 (the null block),
            which stand for padding. num_blocks * block_size must be below 2**31.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        The pool.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool)
    _, _, kv_heads, _, head_dim = kv_pool.shape
    for name, x in (("k", k), ("v", v)):
        check.check_rank(name, x, "T, kv_heads, head_dim")
        if x.dtype != kv_pool.dtype:
            raise ValueError(f"{name} must have the pool's dtype {kv_pool.dtype}, got {x.dtype}")
        if x.shape != (k.shape[0], kv_heads, head_dim):
            raise ValueError(f"{name} must be [T, {kv_heads}, {head_dim}] like the pool, got shape {tuple(x.shape)}")
    check.check_int32("slot_mapping", slot_mapping, "T", (k.shape[0],))
    check.check_slots("kv_pool", kv_pool)
    kernel = _implementation("write_kv", "write_kv_mosaic", backend, kv_pool)
    return kernel(kv_pool, k, v, slot_mapping) if k.shape[0] else kv_pool


def rope_and_write(
    kv_pool: jax.Array,
    qkv: jax.Array,
    slot_mapping: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    norm_eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """From the projection's output to queries and a written pool: `split_qkv`, then `write_kv`, in one kernel.

    Args:
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim].
        qkv, rotation, norms, norm_eps: as in `split_qkv`; qkv of the pool's dtype.
        slot_mapping: int32 [T], as in `write_kv`.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        The queries [T, kv_heads * group, head_dim], and the pool, in place when the caller's jit donates it.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool)
    _, _, kv_heads, _, head_dim = kv_pool.shape
    norm_eps = check.check_qkv(qkv, rotation, norms, norm_eps)
    if qkv.dtype != kv_pool.dtype:
        raise ValueError(f"qkv must have kv_pool's dtype {kv_pool.dtype}, got {qkv.dtype}")
    if (qkv.shape[1], qkv.shape[3]) != (kv_heads, head_dim):
        raise ValueError(f"qkv must be [T, {kv_heads}, group + 2, {head_dim}] like kv_pool, got shape {qkv.shape}")
    check.check_int32("slot_mapping", slot_mapping, "T", (qkv.shape[0],))
    check.check_slots("kv_pool", kv_pool)
    kernel = _implementation("rope_and_write", "rope_and_write_mosaic", backend, kv_pool, qkv)
    if qkv.shape[0] == 0:
        return jnp.zeros((0, kv_heads * (qkv.shape[2] - 2), head_dim), qkv.dtype), kv_pool
    return kernel(kv_pool, qkv, slot_mapping, rotation, norms, norm_eps=norm_eps)


def split_qkv(
    qkv: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    norm_eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output of a product with q, k and v in one, as what attention takes. Plain XLA: differentiable, batchable.

    Args:
        qkv: [T, kv_heads, group + 2, head_dim]; of each KV head its `group` query heads, its key, its value.
        rotation: cos and sin, float32 [T, head_dim / 2] each, of the angles by which queries and keys are rotated
            (RoPE, arXiv:2104.09864); entries i and i + head_dim / 2 of a head are a pair. In float32, rounded once.
        norms: scales [head_dim] of the RMS norms of queries and of keys, before the rotation; in float32, rounded
            before the scale.
        norm_eps: added to those norms' mean squares.
    Returns:
        Queries [T, kv_heads * group, head_dim], keys and values [T, kv_heads, head_dim].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    norm_eps = check.check_qkv(qkv, rotation, norms, norm_eps)
    return reference.split_qkv(qkv, rotation, norms, norm_eps)


def copy_blocks(
    kv_pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array, *, backend: str | None = None
) -> tuple[jax.Array, ...]:
    """Copies whole blocks within every layer's pool: block dst[i] becomes block src[i] (copy-on-write).

    Args:
        kv_pools: one pool a layer, each [num_blocks, 2, kv_heads, block_size, head_dim].
        src, dst: int32 [n]. No block twice in dst, and none of src in dst, save (0, 0) pairs, which are padding.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        The pools, in place when the caller's jit donates them.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pools("kv_pools", kv_pools)
    check.check_int32("src", src, "n", (None,))
    check.check_int32("dst", dst, "n", src.shape)
    kernel = _implementation("copy_blocks", "move_blocks_mosaic", backend, kv_pools[0])
    return kernel(tuple(kv_pools), src, dst) if src.shape[0] else tuple(kv_pools)


def gather_blocks(kv_pools: tuple[jax.Array, ...], block_ids: jax.Array, *, backend: str | None = None) -> jax.Array:
    """Collects blocks of every layer in one contiguous array, to swap them out.

    Args:
        kv_pools: one pool a layer, each [num_blocks, 2, kv_heads, block_size, head_dim].
        block_ids: int32 [n]; 0 for padding.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        [layers, n, 2, kv_heads, block_size, head_dim].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pools("kv_pools", kv_pools)
    check.check_int32("block_ids", block_ids, "n", (None,))
    kernel = _implementation("gather_blocks", "move_blocks_mosaic", backend, kv_pools[0])
    if not block_ids.shape[0]:
        return jnp.zeros((len(kv_pools), 0, *kv_pools[0].shape[1:]), kv_pools[0].dtype)
    return kernel(tuple(kv_pools), block_ids)


def scatter_blocks(
    kv_pools: tuple[jax.Array, ...], staging: jax.Array, block_ids: jax.Array, *, backend: str | None = None
) -> tuple[jax.Array, ...]:
    """Puts blocks that `gather_blocks` collected into (other) blocks of every layer's pool.

    Args:
        kv_pools: one pool a layer, each [num_blocks, 2, kv_heads, block_size, head_dim].
        staging: [layers, n, 2, kv_heads, block_size, head_dim], of the pools' dtype.
        block_ids: int32 [n]; none twice, save 0, which is padding.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        The pools, in place when the caller's jit donates them.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pools("kv_pools", kv_pools)
    check.check_int32("block_ids", block_ids, "n", (None,))
    want = (len(kv_pools), block_ids.shape[0], *kv_pools[0].shape[1:])
    check.check_rank("staging", staging, "layers, n, 2, kv_heads, block_size, head_dim")
    if staging.shape != want or staging.dtype != kv_pools[0].dtype:
        raise ValueError(f"staging must be {kv_pools[0].dtype}{want}, got {staging.dtype}{tuple(staging.shape)}")
    kernel = _implementation("scatter_blocks", "move_blocks_mosaic", backend, kv_pools[0])
    return kernel(tuple(kv_pools), staging, block_ids) if block_ids.shape[0] else tuple(kv_pools)


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
    min_p: jax.Array | None,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Draws a token for every row: temperature, min_p, top_k and top_p, in this order, and one draw with keyed noise.

    min_p keeps the tokens with p >= min_p * p_max. top_k keeps the k most likely, and those tied with the k-th. top_p
    keeps the fewest most likely of what is left whose probabilities reach the share top_p, and those tied with the last
    of them; the most likely token always. The token is the argmax of logit / temperature + Gumbel noise over what is
    kept, and the noise a hash of (seed, position, token id): a row's token does not depend on the other rows. Backends
    draw the same token save where two scores, or a sum and its share, are within float32 rounding of each other (about
    1e-6).

    Args:
        logits: float32 [R, V]. NaN counts as minus infinity, and plus infinity as the largest float.
        temperature: float32 [R]; 0 takes the most likely token, the lowest id on ties, and heeds nothing else.
        top_k: int32 [R], 0 or less for all; None where no row has one.
        top_p: float32 [R], 1 for all; None where no row has one.
        min_p: float32 [R], 0 for all; None where no row has one.
        seeds: uint32 [R, 2]; the low and the high half of a 64-bit seed.
        positions: int32 [R]; the position that the new token will have.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        int32 [R], each in 0 .. V - 1. A row whose logits are all minus infinity gets token 0.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_rank("logits", logits, "R, V")
    rows = logits.shape[0]
    if logits.dtype != jnp.float32 or logits.shape[1] < 1:
        raise ValueError(f"logits must be float32 [R, V] with V > 0, got {logits.dtype}{tuple(logits.shape)}")
    check.check_array("temperature", temperature, jnp.float32, "R", (rows,))
    for name, x, dtype in (("top_k", top_k, jnp.int32), ("top_p", top_p, jnp.float32), ("min_p", min_p, jnp.float32)):
        if x is not None:
            check.check_array(name, x, dtype, "R", (rows,))
    check.check_array("seeds", seeds, jnp.uint32, "R, 2", (rows, 2))
    check.check_int32("positions", positions, "R", (rows,))
    kernel = _implementation("sample_tokens", "sample_mosaic", backend, logits)
    if rows == 0:
        return jnp.zeros(0, jnp.int32)
    return kernel(logits, temperature, top_k, top_p, min_p, seeds, positions)


def sample_tokens_backend(vocab_size: int) -> str:
    """The backend that `sample_tokens` takes by itself on this device, for this many tokens: "xla" or "mosaic"."""
    logits = jax.ShapeDtypeStruct((1, vocab_size), jnp.float32)
    return _backend("sample_tokens", "sample_mosaic", None, logits)


def runs_mosaic(backend: str | None, q: jax.Array, kv_pool: jax.Array) -> bool:
    """Whether both attention ops would take their kernels."""
    ops = ("decode_attention", "ragged_attention")
    return all(_backend(op, f"{op}_mosaic", backend, q, kv_pool) == "mosaic" for op in ops)


def _implementation(op: str, module: str, backend: str | None, *arguments: jax.Array) -> Callable[..., Any]:
    """The function that does `op` for these arguments: one named after it, in its backend's module."""
    if _backend(op, module, backend, *arguments) == "mosaic":
        return getattr(import_module(f"jpaged.pallas_kernels.{module}"), op)
    return getattr(sample_reference if op == "sample_tokens" else reference, op)


def _backend(op: str, module: str, backend: str | None, *arguments: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The backend that does `op` for these arguments.

    A Mosaic module is imported only where its op may run; it has a function named after the op and `unsupported`,
    which says why it refuses the arguments.
    """
    name = f"jpaged.pallas_kernels.{module}"

    def unsupported() -> str | None:
        if find_spec(name) is None:
            return "there is no such kernel"
        return import_module(name).unsupported(*arguments)

    return pick(op, backend, unsupported)


def _features(
    q: jax.Array,
    block_tables: jax.Array,
    scale: float | None,
    sliding_window: int | None,
    logit_softcap: float | None,
) -> dict:
    """The attention ops' options, checked, as keyword arguments of every backend."""
    if block_tables.shape[1] < 1:
        raise ValueError(f"block_tables must have at least one column, got shape {tuple(block_tables.shape)}")
    return {
        "scale": check.check_scale(scale, q.shape[2]),
        "sliding_window": check.check_window(sliding_window),
        "logit_softcap": check.check_softcap(logit_softcap),
    }
