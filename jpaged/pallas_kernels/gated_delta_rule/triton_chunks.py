"""The gated delta rule over ragged rows as two Triton kernels: what chunks need, and the states from chunk to chunk.

    row 0                    row 2            rows of one token and rows that stopped have no chunks
    | chunk | chunk | chunk  | chunk | ch     a row's chunks begin with its first token; the last one may be short

    `_within_chunks`   a CTA a chunk and head, all at once    products of its keys and queries, T = (1 + A)^-1
    `_across_chunks`   a CTA some columns of one row's and    one chunk after the other, the state [key_dim, columns]
                       head's state                           in registers: read once, written once

The equations are the reference's, which leave T beta (V - (g K) S) to the second kernel: of a chunk the first one
writes T and the queries' scores, [C, C] each, and no products with keys or values. So what is kept between the kernels
is 2 C + 4 numbers a token and head, float32. Sources: section 3 of Yang et al. 2024 (arXiv:2412.06464), and for the
split into two kernels that of Yang et al. 2024, arXiv:2406.06484.

The triangular inverse joins diagonal blocks in pairs, as the reference does. With X the inverses of blocks of a width
and B what of A is below the diagonal within pairs of them, X - X B X are those of the pairs: two products of whole
matrices for each doubling.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_targets import for_family
from jpaged.pallas_kernels.gated_delta_rule.operands import Operands

MOST_KEY_DIM = 128
"""Of a state that the second kernel holds in registers, beside what it multiplies."""

_COLUMNS = 64
"""Columns of keys and queries that are operands of a product at a time, the state's lines for them with them."""


@dataclass(frozen=True)
class Config:
    """How the kernels are cut and compiled.

    chunk: tokens of a chunk, a power of two of at least 16. width: columns of a state of a CTA. warps: of a CTA, for
    the first kernel and the second. stages: iterations of the second one's loop whose loads are in flight together.
    """

    chunk: int
    width: int
    warps: tuple[int, int] = (8, 8)
    stages: int = 1


_PLAIN = Config(chunk=64, width=32)
_IN_16_BITS = {80: _PLAIN, 86: _PLAIN, 90: Config(64, 32, warps=(8, 4), stages=2), 100: _PLAIN, 120: _PLAIN}
_IN_32_BITS = Config(chunk=32, width=16)
"""By family of GPUs; in 32 bits for all, without tensor cores. Not measured."""


def default_config(itemsize: int) -> Config:
    """itemsize: bytes of a number of queries."""
    return _IN_32_BITS if itemsize == 4 else for_family(_IN_16_BITS)


def unsupported(states: jax.Array, q: jax.Array) -> str | None:
    """Why the kernels cannot take these (checked) arguments; None if they can."""
    if q.dtype.itemsize > 4:
        return f"dtype {q.dtype} is wider than 32 bits"
    key_dim = states.shape[2]
    if key_dim > MOST_KEY_DIM:
        return f"key_dim {key_dim} is above {MOST_KEY_DIM}, which registers do not hold beside a chunk"
    return None


@jax.jit  # so that the layers of a model lower the kernels once between them
def gated_delta_chunks(states: jax.Array, operands: Operands, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of the package, checked, by chunks for rows of any length."""
    (q, k, v, log_decay, beta), (_, fresh, query_starts) = operands, rows
    assert query_starts is not None
    num_slots, heads, key_dim, value_dim = states.shape
    tokens, key_heads, _ = q.shape
    config = default_config(q.dtype.itemsize)
    size = config.chunk
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(key_dim)))
    width = min(config.width, max(16, triton.next_power_of_2(value_dim)))
    constants: dict[str, Any] = {
        "TOKENS": tokens,
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY_DIM": key_dim,
        "COLUMNS": columns,
        "BLOCKS": triton.cdiv(key_dim, columns),
        "CHUNK": size,
        "PRECISION": "tf32" if q.dtype.itemsize < 4 else "ieee",
    }
    ends, slots = _rows_with_chunks(rows.slots, query_starts, num_slots)
    firsts, counts = _chunks(query_starts[:-1], ends, size, tokens)
    of_chunk = jax.ShapeDtypeStruct((tokens, heads, size), jnp.float32)
    four = jax.ShapeDtypeStruct((4, tokens, heads), jnp.float32)
    solve, reads, factors = call(
        _within_chunks,
        Launch((heads, firsts.shape[0]), config.warps[0], 1),
        *(q, k, log_decay, beta, firsts, counts),
        out=[of_chunk, of_chunk, four],
        DOUBLINGS=size.bit_length() - 1,
        SCALE=key_dim**-0.5,
        **constants,
    )
    out, states = call(
        _across_chunks,
        Launch((triton.cdiv(value_dim, width), heads, slots.shape[0]), config.warps[1], config.stages),
        *(q, k, v, solve, reads, factors, slots, fresh.astype("int32"), query_starts[:-1], ends),
        updated=[jnp.zeros_like(v), states],  # tokens of no row stay zeros
        SLOTS=num_slots,
        VALUE_DIM=value_dim,
        WIDTH=width,
        **constants,
    )
    return out, states


def _rows_with_chunks(slots: jax.Array, query_starts: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """int32 [R]: the end of each row, its start where it computes nothing; and its slot, `num_slots` there."""
    live = (slots >= 0) & (slots < num_slots) & (query_starts[1:] > query_starts[:-1])
    return jnp.where(live, query_starts[1:], query_starts[:-1]), jnp.where(live, slots, num_slots)


def _chunks(starts: jax.Array, ends: jax.Array, size: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """First token and number of tokens of each chunk, int32 [most chunks]; 0 for those that are not there."""
    rows = starts.shape[0]
    counts = (ends - starts + size - 1) // size
    behind = jnp.cumsum(counts, dtype=jnp.int32)
    chunk = jnp.arange(min(tokens, tokens // size + min(rows, tokens)), dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(chunk[:, None] >= behind[None, :], axis=1, dtype=jnp.int32), rows - 1)
    first = starts[row] + (chunk - (behind - counts)[row]) * size
    return first, jnp.where(chunk < behind[-1], jnp.minimum(ends[row] - first, size), 0)


@triton.jit
def _within_chunks(
    q, k, log_decay, beta, firsts, counts,
    solve, reads, factors,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, DOUBLINGS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head.

    q, k: [TOKENS, HEADS / GROUP, KEY_DIM]. log_decay, beta: float32 [TOKENS, HEADS]. firsts, counts: int32 [chunks].
    solve: float32 [TOKENS, HEADS, CHUNK]; T beta, a row a token, a column for each of its chunk.
    reads: likewise; the scores of its query, decayed.
    factors: float32 [4, TOKENS, HEADS]; what multiplies the products of the token's key and of its query with the state
        before the chunk, and of its key with what it adds to the state behind it; and its decay since the beginning.
    """
    head, chunk = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(firsts + chunk), tl.load(counts + chunk)
    c = tl.arange(0, CHUNK)
    if count > 0:
        token, is_token = first + c, c < count
        at = (token.to(tl.int64) * (HEADS // GROUP) + head // GROUP) * KEY_DIM
        lower = tl.zeros((CHUNK, CHUNK), tl.float32)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_key = tl.zeros((CHUNK,), tl.float32)
        of_query = tl.zeros((CHUNK,), tl.float32)
        for block in tl.static_range(0, BLOCKS):
            keys = _load_columns(k, at, is_token, block, KEY_DIM, COLUMNS)
            queries = _load_columns(q, at, is_token, block, KEY_DIM, COLUMNS)
            lower = tl.dot(keys, tl.trans(keys), lower, input_precision="ieee")
            scores = tl.dot(queries, tl.trans(keys), scores, input_precision="ieee")
            of_key += tl.sum(keys.to(tl.float32) * keys.to(tl.float32), axis=1)
            of_query += tl.sum(queries.to(tl.float32) * queries.to(tl.float32), axis=1)
        of_key = 1.0 / tl.sqrt(of_key + 1e-6)
        of_query = SCALE / tl.sqrt(of_query + 1e-6)
        number = token * HEADS + head
        decay = tl.load(log_decay + number, mask=is_token, other=0.0)
        strength = tl.load(beta + number, mask=is_token, other=0.0)
        total = tl.cumsum(decay, axis=0)
        i, j = c[:, None], c[None, :]
        since = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], float("-inf")))

        scores = scores * of_query[:, None] * of_key[None, :] * since
        place = (token.to(tl.int64) * HEADS + head)[:, None] * CHUNK + c[None, :]
        tl.store(reads + place, scores, mask=is_token[:, None])
        lower = lower * (strength * of_key)[:, None] * of_key[None, :] * since
        inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1 == j >> 1) & (i > j), lower, 0.0)
        for doubling in tl.static_range(1, DOUBLINGS):  # from blocks of 2 ** doubling
            pair = (i >> (doubling + 1) == j >> (doubling + 1)) & (i >> doubling > j >> doubling)
            left = tl.dot(inverse, tl.where(pair, lower, 0.0), input_precision=PRECISION)
            inverse -= tl.dot(left, inverse, input_precision=PRECISION)
        tl.store(solve + place, inverse * strength[None, :], mask=is_token[:, None])

        decayed = tl.exp(total)
        until = tl.exp(tl.sum(decay, axis=0) - total)
        tl.store(factors + number, decayed * of_key, mask=is_token)
        tl.store(factors + TOKENS * HEADS + number, decayed * of_query, mask=is_token)
        tl.store(factors + 2 * TOKENS * HEADS + number, until * of_key, mask=is_token)
        tl.store(factors + 3 * TOKENS * HEADS + number, decayed, mask=is_token)


@triton.jit
def _across_chunks(
    q, k, v, solve, reads, factors, slots, fresh, starts, ends,
    out, states,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, SLOTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of some columns of one row's and head's state, all chunks of the row.

    v, out: [TOKENS, HEADS, VALUE_DIM]. states: float32 [SLOTS, HEADS, KEY_DIM, VALUE_DIM]. slots, fresh, starts, ends:
    int32 [rows]. Others: as of `_within_chunks`.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    slot, start, end = tl.load(slots + row), tl.load(starts + row), tl.load(ends + row)
    c, column = tl.arange(0, CHUNK), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if slot < SLOTS:
        states += (slot.to(tl.int64) * HEADS + head) * (KEY_DIM * VALUE_DIM)
        is_fresh = tl.load(fresh + row)
        # The state in two parts of COLUMNS lines: the whole as an operand would not fit into registers.
        held_0 = _load_state(states, is_fresh, column, 0, KEY_DIM, COLUMNS, VALUE_DIM, WIDTH)
        if BLOCKS > 1:
            held_1 = _load_state(states, is_fresh, column, 1, KEY_DIM, COLUMNS, VALUE_DIM, WIDTH)
        for first in range(start, end, CHUNK):
            token = first + c
            is_token = token < end
            number = token * HEADS + head
            at = (token.to(tl.int64) * (HEADS // GROUP) + head // GROUP) * KEY_DIM
            place = (token.to(tl.int64) * HEADS + head)[:, None]
            given = place * VALUE_DIM + column[None, :]
            is_value = is_token[:, None] & (column < VALUE_DIM)[None, :]

            found = tl.zeros((CHUNK, WIDTH), tl.float32)
            found = _read(found, k, at, is_token, held_0, 0, KEY_DIM, COLUMNS, PRECISION)
            if BLOCKS > 1:
                found = _read(found, k, at, is_token, held_1, 1, KEY_DIM, COLUMNS, PRECISION)
            seen = tl.load(factors + number, mask=is_token, other=0.0)
            lacks = tl.load(v + given, mask=is_value, other=0.0).to(tl.float32) - found * seen[:, None]
            solved = tl.load(solve + place * CHUNK + c[None, :], mask=is_token[:, None], other=0.0)
            added = tl.dot(solved, lacks, input_precision=PRECISION)

            result = tl.zeros((CHUNK, WIDTH), tl.float32)
            result = _read(result, q, at, is_token, held_0, 0, KEY_DIM, COLUMNS, PRECISION)
            if BLOCKS > 1:
                result = _read(result, q, at, is_token, held_1, 1, KEY_DIM, COLUMNS, PRECISION)
            asked = tl.load(factors + TOKENS * HEADS + number, mask=is_token, other=0.0)
            scores = tl.load(reads + place * CHUNK + c[None, :], mask=is_token[:, None], other=0.0)
            result = tl.dot(scores, added, result * asked[:, None], input_precision=PRECISION)
            tl.store(out + given, result.to(out.dtype.element_ty), mask=is_value)

            added *= tl.load(factors + 2 * TOKENS * HEADS + number, mask=is_token, other=0.0)[:, None]
            last = tl.minimum(first + CHUNK, end) - 1
            decayed = tl.load(factors + 3 * TOKENS * HEADS + last * HEADS + head)
            held_0 = _add(held_0, k, at, is_token, added, decayed, 0, KEY_DIM, COLUMNS, PRECISION)
            if BLOCKS > 1:
                held_1 = _add(held_1, k, at, is_token, added, decayed, 1, KEY_DIM, COLUMNS, PRECISION)
        _store_state(states, held_0, column, 0, KEY_DIM, COLUMNS, VALUE_DIM)
        if BLOCKS > 1:
            _store_state(states, held_1, column, 1, KEY_DIM, COLUMNS, VALUE_DIM)


@triton.jit
def _load_columns(x, at, is_token, block: tl.constexpr, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of the columns of queries or keys that begin at `at` [CHUNK]; zeros for what is none."""
    d = block * COLUMNS + tl.arange(0, COLUMNS)
    return tl.load(x + at[:, None] + d[None, :], mask=is_token[:, None] & (d < KEY_DIM)[None, :], other=0.0)


@triton.jit
def _read(
    found, x, at, is_token, held, block: tl.constexpr, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`found`, with the products of a block of columns of queries or keys with its part of the state."""
    return tl.dot(
        _load_columns(x, at, is_token, block, KEY_DIM, COLUMNS).to(tl.float32), held, found, input_precision=PRECISION
    )


@triton.jit
def _add(
    held, k, at, is_token, added, decayed, block: tl.constexpr, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of the state behind a chunk."""
    keys = _load_columns(k, at, is_token, block, KEY_DIM, COLUMNS).to(tl.float32)
    return tl.dot(tl.trans(keys), added, held * decayed, input_precision=PRECISION)


@triton.jit
def _load_state(
    states, is_fresh, column, block: tl.constexpr, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A part of the state that begins at `states`; zeros for one that is fresh."""
    line = block * COLUMNS + tl.arange(0, COLUMNS)
    is_old = tl.zeros((COLUMNS, WIDTH), tl.int32) == is_fresh
    exists = (line < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :] & is_old
    return tl.load(states + line[:, None] * VALUE_DIM + column[None, :], mask=exists, other=0.0)


@triton.jit
def _store_state(
    states, held, column, block: tl.constexpr, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr, VALUE_DIM: tl.constexpr
):
    line = block * COLUMNS + tl.arange(0, COLUMNS)
    exists = (line < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(states + line[:, None] * VALUE_DIM + column[None, :], held, mask=exists)
