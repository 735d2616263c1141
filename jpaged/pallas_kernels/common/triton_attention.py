"""What the attention kernels in Triton have in common: scores, the online softmax, and what they support."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.attention_arguments import Features
from jpaged.pallas_kernels.common.numerics import FP8
from jpaged.pallas_kernels.common.triton_assembly import runs_assembly
from jpaged.pallas_kernels.common.triton_fp8 import widen_pairs

BLOCK_SIZES = (16, 32, 64, 128)
MOST_HEAD_DIM = 512  # in 16 bits

LOG2E = math.log2(math.e)
"""Times which a score is in base 2."""

_NO_KEYS = tl.constexpr(-1e30)  # running maxima start here, so that no inf - inf is ever formed


def unsupported(q: jax.Array, kv_pool: jax.Array, value_dim: int | None = None) -> str | None:
    """Why the attention kernels cannot take these (checked) arguments; None if they can. value_dim: of latents."""
    _, _, _, block_size, head_dim = kv_pool.shape
    if kv_pool.dtype == FP8 and (q.dtype.itemsize != 2 or value_dim is not None):
        return f"queries in {q.dtype} or latents, which a pool in {kv_pool.dtype} does not go with"
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"dtype {q.dtype} is not bfloat16, float16 or float32"
    most = MOST_HEAD_DIM if q.dtype.itemsize == 2 else MOST_HEAD_DIM // 2
    if value_dim is None and (head_dim % 16 or head_dim > most):
        return f"head_dim {head_dim} is not a multiple of 16 of at most {most} in {q.dtype}"
    if value_dim is not None and (value_dim % 16 or head_dim % 8 or value_dim > most or head_dim > 2 * value_dim):
        return (
            f"head_dim {head_dim} is not a multiple of 8, or value_dim {value_dim} not one of 16 of at most {most} in"
            f" {q.dtype} and at least half of head_dim"
        )
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not one of {BLOCK_SIZES}"
    return None


def column_constants(head_dim: int, features: Features, kv_pool: jax.Array) -> dict[str, Any]:
    """The kernels' constants for what a pool has of a token: columns of a key and of a value, the latter rounded up to
    a power of two; and where keys have more than values, how many more, rounded up likewise.

    LATENT: values are columns of the keys. PAIRS: two numbers of the pool are a word (`products_and_values`).
    IN_REGISTERS: as of `triton_fp8.widen_pairs`.
    """
    value_dim = features.value_dim or head_dim
    tail = head_dim - value_dim
    pairs = kv_pool.dtype == FP8
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "DIM": max(32 if pairs else 16, triton.next_power_of_2(value_dim)),
        "LATENT": kv_pool.shape[1] == 1,
        "TAIL": max(16, triton.next_power_of_2(tail)) if tail else 0,
        "PAIRS": pairs,
        "IN_REGISTERS": runs_assembly(),
    }


def score_constants(features: Features, alibi_slopes: jax.Array | None) -> dict[str, Any]:
    """The kernels' constants for the options of a call."""
    return {
        "SCALE": features.scale * LOG2E,
        "CAP": None if features.logit_softcap is None else features.logit_softcap * LOG2E,
        "ALIBI": alibi_slopes is not None,
        "WINDOW": features.sliding_window,
    }


@triton.jit
def scores(products, SCALE: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores of products of queries and keys, and the factor (positive) that `add_keys` has yet to multiply them by to
    have them scaled, capped (CAP: in base 2 too, or None) and in base 2."""
    PLAIN: tl.constexpr = CAP is None and not ALIBI and SCALE > 0
    FACTOR: tl.constexpr = SCALE if PLAIN else 1.0
    x = products
    if not PLAIN:
        x = products * SCALE
        if CAP is not None:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)); e is the exponential in base 2
            e = tl.exp2(x * (2 * 1.4426950408889634 / CAP))
            x = CAP - (2 * CAP) / (1.0 + e)
    return x, FACTOR


@triton.jit
def load_queries(
    at, is_query, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Queries of the rows that begin at `at` [ROWS], 0 where there is none: [ROWS, DIM]; and where values are narrower
    than keys, the columns behind [ROWS, TAIL], else anything. PAIRS: the even columns [ROWS, DIM / 2] and the odd."""
    if PAIRS:
        even = 2 * tl.arange(0, DIM // 2)
        is_kept = is_query[:, None] & (even < HEAD_DIM)[None, :]
        queries = tl.load(at[:, None] + even[None, :], mask=is_kept, other=0.0)
        behind = tl.load(at[:, None] + even[None, :] + 1, mask=is_kept, other=0.0)
    else:
        d = tl.arange(0, DIM)
        queries = tl.load(at[:, None] + d[None, :], mask=is_query[:, None] & (d < VALUE_DIM)[None, :], other=0.0)
        behind = queries
        if TAIL > 0:
            e = tl.arange(0, TAIL)
            is_kept = is_query[:, None] & (e < HEAD_DIM - VALUE_DIM)[None, :]
            behind = tl.load(at[:, None] + VALUE_DIM + e[None, :], mask=is_kept, other=0.0)
    return queries, behind


@triton.jit
def products_and_values(
    queries, behind, at, VALUES: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM: tl.constexpr,
    LATENT: tl.constexpr, TAIL: tl.constexpr, PAIRS: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Products of queries (as `load_queries` gives them) with the keys that begin at `at` [keys], and their values
    [keys, DIM], which are VALUES numbers behind, or of latents the keys' own first columns.

    PAIRS: `at` are uint16, each two neighbouring columns in e4m3, and VALUES counts these. Even columns are multiplied
    apart from odd ones, so that words need not be taken apart before they are operands. Values come as even columns
    [keys, DIM / 2] and odd ones; else the second are the first.
    """
    if PAIRS:
        pair = tl.arange(0, DIM // 2)
        k_at = at[:, None] + pair[None, :]
        if DIM == HEAD_DIM:
            k_words, v_words = tl.load(k_at), tl.load(k_at + VALUES)
        else:
            is_kept = (2 * pair < HEAD_DIM)[None, :]
            k_words, v_words = tl.load(k_at, mask=is_kept, other=0), tl.load(k_at + VALUES, mask=is_kept, other=0)
        even, odd = widen_pairs(k_words, queries.dtype, IN_REGISTERS)
        products = tl.dot(queries, tl.trans(even))
        products = tl.dot(behind, tl.trans(odd), products)
        v, more = widen_pairs(v_words, queries.dtype, IN_REGISTERS)
    else:
        d = tl.arange(0, DIM)
        k_at = at[:, None] + d[None, :]
        if DIM == VALUE_DIM:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(d < VALUE_DIM)[None, :], other=0)
        if LATENT:
            v = k
        elif DIM == VALUE_DIM:
            v = tl.load(k_at + VALUES)
        else:
            v = tl.load(k_at + VALUES, mask=(d < VALUE_DIM)[None, :], other=0)
        products = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if TAIL > 0:
            e = tl.arange(0, TAIL)
            tail_at = at[:, None] + VALUE_DIM + e[None, :]
            if VALUE_DIM + TAIL == HEAD_DIM:
                tail = tl.load(tail_at)
            else:
                tail = tl.load(tail_at, mask=(e < HEAD_DIM - VALUE_DIM)[None, :], other=0.0)
            products = tl.dot(behind, tl.trans(tail), products, input_precision="ieee")
        more = v
    return products, v, more


@triton.jit
def no_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state of a softmax over no keys: sums of values [ROWS, DIM], maxima and sums [ROWS], in base 2."""
    acc = tl.zeros([ROWS, DIM], tl.float32)
    top = tl.full([ROWS], _NO_KEYS, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    return acc, top, total


@triton.jit
def no_keys(ROWS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """`no_state` as `add_keys` takes it: its sums in one part, or in the even columns and the odd."""
    acc, top, total = no_state(ROWS, DIM // 2 if PAIRS else DIM)
    return acc, acc, top, total


@triton.jit
def add_keys(acc, more_acc, top, total, x, v, more, FACTOR: tl.constexpr, PAIRS: tl.constexpr):
    """The state, with scores x * FACTOR [ROWS, keys] and values (as `products_and_values` gives them) added."""
    new_top = tl.maximum(top, tl.max(x, 1) * FACTOR)
    p = tl.exp2(x * FACTOR - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    if PAIRS:
        more_acc = tl.dot(p.to(v.dtype), more, more_acc * shrink[:, None])
    else:
        more_acc = acc
    return acc, more_acc, new_top, total * shrink + tl.sum(p, 1)


@triton.jit
def whole(acc, more_acc, PAIRS: tl.constexpr):
    """Sums of values [ROWS, DIM], of their parts."""
    return tl.interleave(acc, more_acc) if PAIRS else acc


@triton.jit
def fold(acc, top, total, other_acc, other_top, other_total):
    """The state over the keys of two states. Every operation is told apart from its neighbours, so that the compiler
    cannot round one call of it differently from another."""
    new_top = tl.maximum(top, other_top)
    shrink, other_shrink = tl.exp2(top - new_top), tl.exp2(other_top - new_top)
    total = tl.fma(total, shrink, other_total * other_shrink)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), other_acc * other_shrink[:, None])
    return acc, new_top, total


@triton.jit
def result(acc, top, total):
    """Output and log-sum-exp (natural) of a state: 0 and -inf where no key was seen."""
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    out = acc / safe[:, None]
    lse = tl.where(seen, (top + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    return out, lse
