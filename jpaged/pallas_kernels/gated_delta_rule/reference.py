"""The gated delta rule in plain XLA: one step, chunks of ragged rows, and whole sequences (which gradients pass).

Within a chunk, let g_i be the product of the decays from the first token of its row to token i, D_ij = g_i / g_j for i
from j on in the same row, and S the row's state before the chunk. Token i adds to the state its key times

    u_i = beta_i (v_i - what the state holds under k_i)

which depends on the u of the tokens before it: (1 + A) U = beta V - (beta g K) S with A_ij = beta_i D_ij (k_i . k_j)
below the diagonal. So one triangular inverse gives them all (the WY form):

    U   = T beta V - (T beta g K) S                                       T = (1 + A)^-1
    out = (g Q) S + (D * Q K') U
    S  <- g_last S + (g_last / g K)' U
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of

CHUNK = 64
"""Tokens of a chunk."""


@jax.jit
def gated_delta_step(
    states: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    slots: jax.Array,
    fresh: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of the package for rows of one token, checked."""
    num_slots, heads = states.shape[:2]
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in normalised(q, k))
    live = (slots >= 0) & (slots < num_slots)
    held = states[jnp.where(live, slots, 0)]
    held = jnp.where((live & ~fresh)[:, None, None, None], held, 0.0) * jnp.exp(log_decay)[..., None, None]
    # Sums of products, which XLA fuses: as dots they would be rounded to TF32 on a GPU.
    error = v.astype(jnp.float32) - jnp.sum(held * k[..., None], axis=2)
    new = held + k[..., None] * (beta[..., None] * error)[:, :, None]
    out = jnp.where(live[:, None, None], jnp.sum(new * q[..., None], axis=2), 0.0)
    return out.astype(v.dtype), states.at[jnp.where(live, slots, num_slots)].set(new, mode="drop")


@jax.jit
def gated_delta_chunks(
    states: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    slots: jax.Array,
    fresh: jax.Array,
    query_starts: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of the package, checked, by chunks for rows of any length.

    What of a row lies in one chunk is a segment. Segments are computed one after the other, as many as there are.
    """
    num_slots, heads, key_dim, value_dim = states.shape
    tokens, num_rows = q.shape[0], slots.shape[0]
    starts, ends = query_starts[:-1], query_starts[1:]
    live = (slots >= 0) & (slots < num_slots)
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(token[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), num_rows - 1)
    row = jnp.where((token >= starts[row]) & (token < ends[row]) & live[row], row, -1)
    chunks = within_chunks(q, k, v, log_decay, beta, row)
    count, size = chunks.row.shape
    begins = (row >= 0) & ((token % size == 0) | (token == starts[row]))
    (firsts,) = jnp.nonzero(begins, size=count + min(num_rows, tokens), fill_value=0)
    by_key_head = (q.shape[1], heads // q.shape[1], key_dim, value_dim)

    def first_state(states: jax.Array, its: jax.Array) -> jax.Array:
        held = lax.dynamic_index_in_dim(states, slots[its], keepdims=False)
        return jnp.where(fresh[its], 0.0, held).reshape(by_key_head)

    def compute(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        states, out, held = carry
        first, following = firsts[i], row[firsts[jnp.minimum(i + 1, firsts.shape[0] - 1)]]
        its, here = row[first], first // size
        chunk = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, here, keepdims=False), chunks)
        mine = chunk.row == its
        given, held = chunk.advance(held, mine, mine, chunk.decay[..., first % size])
        given = jnp.where(mine[:, None], given, lax.dynamic_index_in_dim(out, here, keepdims=False))
        out = lax.dynamic_update_index_in_dim(out, given, here, 0)
        # Written, then read: were the state read where it is updated, XLA would copy all states in each iteration.
        states = lax.dynamic_update_index_in_dim(states, held.reshape(states.shape[1:]), slots[its], 0)
        return states, out, jnp.where(following == its, held, first_state(states, following))

    zeros = jnp.zeros((count, *by_key_head[:2], size, value_dim), jnp.float32)
    start = states, zeros, first_state(states, row[firsts[0]])
    states, out, _ = lax.fori_loop(0, jnp.sum(begins, dtype=jnp.int32), compute, start)
    return flat(out, tokens).astype(v.dtype), states


def gated_delta_sequences(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, row: jax.Array
) -> jax.Array:
    """The gated delta rule over whole sequences, from states of zeros. It is differentiable.

    row: int32 [T]; the sequence of each token, whose tokens are consecutive.
    Other arguments, and the result: as of `gated_delta_rule`.
    """
    heads, key_heads = v.shape[1], q.shape[1]
    chunks = within_chunks(q, k, v, log_decay, beta, row)
    last = chunks.row[:, -1]
    before = jnp.concatenate([last[:1] - 1, last[:-1]])

    def compute(held: jax.Array, of: tuple[Chunks, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk, before = of
        goes_on = chunk.row[-1] == before
        decay = jnp.where(goes_on, chunk.decay[..., -1], 0.0)
        given, held = chunk.advance(held, chunk.row == before, chunk.row == chunk.row[-1], decay)
        return held, given

    zeros = jnp.zeros((key_heads, heads // key_heads, q.shape[2], v.shape[2]), jnp.float32)
    _, out = lax.scan(compute, zeros, (chunks, before))
    return flat(out, q.shape[0]).astype(v.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """What is computed of all chunks at once, before any state is known. Below, C is a chunk's tokens, and each array
    has the axis of chunks before these; `group` is of the heads that share a key head.

    row: int32 [C]; of each token, -1 for none.
    q, k: [key_heads, C, key_dim], normalised.
    scores: [key_heads, group, C, C]; the query of a token with the keys up to it, decayed since.
    own: [key_heads, group, C, value_dim]; U for a state of zeros. of_state: [key_heads, group, C, key_dim]; what of
        the state U lacks.
    since: [key_heads, group, C]; decay from the segment's beginning to the token. until: from the token to the
        segment's end. decay: of the token's whole segment.
    """

    row: jax.Array
    q: jax.Array
    k: jax.Array
    scores: jax.Array
    own: jax.Array
    of_state: jax.Array
    since: jax.Array
    until: jax.Array
    decay: jax.Array
    precision: Any = field(metadata={"static": True})

    def advance(
        self, held: jax.Array, reads: jax.Array, stays: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """One chunk, without the axis of chunks.

        held: float32 [key_heads, group, key_dim, value_dim], the state. reads: bool [C]; tokens that follow it.
        stays: tokens that the next state is of. decay: [key_heads, group]; what of `held` the next state has.
        Returns out [key_heads, group, C, value_dim], and the next state.
        """
        product = partial(jnp.einsum, precision=self.precision, preferred_element_type=jnp.float32)
        lacks = product("hgck,hgkv->hgcv", self.of_state, held)
        found = product("hck,hgkv->hgcv", self.q, held) * self.since[..., None]
        reads, stays = reads[:, None], stays[:, None]
        u = self.own - jnp.where(reads, lacks, 0.0)
        out = jnp.where(reads, found, 0.0) + product("hgcd,hgdv->hgcv", self.scores, u)
        added = jnp.where(stays, u * self.until[..., None], 0.0)
        return out, held * decay[..., None, None] + product("hck,hgcv->hgkv", self.k, added)


def within_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, row: jax.Array
) -> Chunks:
    """Cuts T tokens into chunks of consecutive ones, padded, and computes what needs no state.

    row: int32 [T]; the sequence of each token, -1 for none; a sequence's tokens are consecutive.
    """
    tokens, key_heads, _ = q.shape
    group, precision = v.shape[1] // key_heads, precision_of(q.dtype)
    size = min(CHUNK, 1 << (tokens - 1).bit_length())
    count = -(-tokens // size)
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def cut(x: jax.Array, *axes: int) -> jax.Array:
        """[T, heads, ...] -> [chunks, *axes, C, ...], float32."""
        x = jnp.pad(x.astype(jnp.float32), [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1))
        x = x.reshape(count, size, *axes, *x.shape[2:])
        return jnp.moveaxis(x, 1, 1 + len(axes))

    row = jnp.pad(row, (0, count * size - tokens), constant_values=-1).reshape(count, size)
    counts = (row >= 0)[:, None, None, :]
    q, k = (cut(x, key_heads) for x in normalised(q, k))
    v, beta = cut(v, key_heads, group), jnp.where(counts, cut(beta, key_heads, group), 0.0)
    total = jnp.cumsum(jnp.where(counts, cut(log_decay, key_heads, group), 0.0), axis=-1)  # [chunks, heads, group, C]

    index = jnp.arange(size)
    same = (row[:, :, None] == row[:, None, :]) & (row >= 0)[:, :, None]
    upto = (same & (index[:, None] >= index))[:, None, None]
    decays = jnp.exp(jnp.where(upto, total[..., :, None] - total[..., None, :], -jnp.inf))
    first = jnp.argmax(same, axis=-1)[:, None, None, :]  # of the token's segment
    last = size - 1 - jnp.argmax(same[..., ::-1], axis=-1)[:, None, None, :]
    earlier, last = (jnp.broadcast_to(x, total.shape) for x in (jnp.maximum(first - 1, 0), last))
    before = jnp.where(first > 0, jnp.take_along_axis(total, earlier, axis=-1), 0.0)
    end = jnp.take_along_axis(total, last, axis=-1)

    keys = product("nhck,nhdk->nhcd", k, k)[:, :, None]
    lower = jnp.where((index[:, None] > index), beta[..., None] * decays * keys, 0.0)
    inverse = _inverse(lower, precision)
    since = jnp.exp(total - before)
    return Chunks(
        row=row,
        q=q,
        k=k,
        scores=product("nhck,nhdk->nhcd", q, k)[:, :, None] * decays,
        own=product("nhgcd,nhgdv->nhgcv", inverse, beta[..., None] * v),
        of_state=product("nhgcd,nhgd,nhdk->nhgck", inverse, beta * since, k),
        since=since,
        until=jnp.exp(end - total),
        decay=jnp.exp(end - before),
        precision=precision,
    )


def _inverse(lower: jax.Array, precision: Any) -> jax.Array:
    """(1 + lower)^-1 of strictly lower triangular matrices [..., C, C], C a power of two.

    Blocks on the diagonal are joined in pairs: [[a, 0], [b, c]]^-1 = [[a', 0], [-c' b a', c']]. A series of powers
    would take as many products, but of keys that repeat its terms grow beyond what float32 can cancel.
    """
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    size = lower.shape[-1]
    inverses = jnp.ones((*lower.shape[:-1], 1, 1), lower.dtype)  # [..., blocks, width, width]
    width = 1
    while width < size:
        pairs = size // (2 * width)
        blocks = lower.reshape(*lower.shape[:-2], pairs, 2 * width, pairs, 2 * width)
        diagonal = jnp.stack([blocks[..., i, width:, i, :width] for i in range(pairs)], axis=-3)
        upper, below = inverses[..., ::2, :, :], inverses[..., 1::2, :, :]
        corner = -product("...ij,...jk,...kl->...il", below, diagonal, upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverses = jnp.concatenate([top, jnp.concatenate([corner, below], axis=-1)], axis=-2)
        width *= 2
    return inverses[..., 0, :, :]


def normalised(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys of length 1, queries scaled by key_dim ** -0.5, float32."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    q, k = (x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def flat(out: jax.Array, tokens: int) -> jax.Array:
    """[chunks, key_heads, group, C, value_dim] -> [T, heads, value_dim]."""
    count, key_heads, group, size, value_dim = out.shape
    return jnp.moveaxis(out, 3, 1).reshape(count * size, key_heads * group, value_dim)[:tokens]
