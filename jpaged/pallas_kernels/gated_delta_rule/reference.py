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

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.common.segments import Chunks, Cut, Decays, advance_rows, advance_sequences, rows_of_tokens
from jpaged.pallas_kernels.gated_delta_rule.operands import Operands


@jax.jit
def gated_delta_step(states: jax.Array, operands: Operands, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of the package for rows of one token, checked."""
    (q, k, v, log_decay, beta), (slots, fresh, _) = operands, rows
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
def gated_delta_chunks(states: jax.Array, operands: Operands, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of the package, checked, by chunks for rows of any length."""
    num_slots, _, _, value_dim = states.shape
    tokens, key_heads, _ = operands.q.shape
    row = rows_of_tokens(rows, num_slots, tokens)
    out, states = advance_rows(within_chunks(operands, row), states, row, rows, key_heads, value_dim)
    return Cut.of(tokens).flat(out).astype(operands.v.dtype), states


def gated_delta_sequences(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, row: jax.Array
) -> jax.Array:
    """The gated delta rule over whole sequences, from states of zeros. It is differentiable.

    row: int32 [T]; the sequence of each token, whose tokens are consecutive.
    Other arguments, and the result: as of `gated_delta_rule`.
    """
    heads, key_heads = v.shape[1], q.shape[1]
    start = jnp.zeros((key_heads, heads // key_heads, q.shape[2], v.shape[2]), jnp.float32)
    out = advance_sequences(within_chunks(Operands(q, k, v, log_decay, beta), row), start)
    return Cut.of(q.shape[0]).flat(out).astype(v.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaChunks(Chunks):
    """Groups are of the heads that share a key head.

    q, k: [key_heads, C, key_dim], normalised.
    scores: [key_heads, group, C, C]; the query of a token with the keys up to it, decayed since.
    own: [key_heads, group, C, value_dim]; U for a state of zeros. of_state: [key_heads, group, C, key_dim]; what of
        the state U lacks.
    until: [key_heads, group, C]; as of `Decays`.
    """

    q: jax.Array
    k: jax.Array
    scores: jax.Array
    own: jax.Array
    of_state: jax.Array
    until: jax.Array

    def advance(
        self, held: jax.Array, reads: jax.Array, stays: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As of `segments.Chunks`. held: [key_heads, group, key_dim, value_dim]."""
        lacks = self.product("hgck,hgkv->hgcv", self.of_state, held)
        found = self.product("hck,hgkv->hgcv", self.q, held) * self.since[..., None]
        reads, stays = reads[:, None], stays[:, None]
        u = self.own - jnp.where(reads, lacks, 0.0)
        out = jnp.where(reads, found, 0.0) + self.product("hgcd,hgdv->hgcv", self.scores, u)
        added = jnp.where(stays, u * self.until[..., None], 0.0)
        return out, held * decay[..., None, None] + self.product("hck,hgcv->hgkv", self.k, added)


def within_chunks(operands: Operands, row: jax.Array) -> DeltaChunks:
    """Cuts T tokens into chunks of consecutive ones, padded, and computes what needs no state.

    row: int32 [T]; the sequence of each token, -1 for none, which may then be anything; a sequence's tokens are
        consecutive.
    """
    q, k, v, log_decay, beta = operands
    tokens, key_heads, _ = q.shape
    q, k, v = (jnp.where((row >= 0)[:, None, None], x, 0) for x in (q, k, v))
    group, precision = v.shape[1] // key_heads, precision_of(q.dtype)
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    cut = Cut.of(tokens)
    row = cut.rows(row)
    q, k = (cut.apply(x, key_heads) for x in normalised(q, k))
    v, beta, log_decay = (cut.apply(x, key_heads, group) for x in (v, beta, log_decay))
    beta = jnp.where((row >= 0)[:, None, None, :], beta, 0.0)
    decays = Decays.of(row, log_decay)
    index = jnp.arange(cut.size)
    keys = product("nhck,nhdk->nhcd", k, k)[:, :, None]
    lower = jnp.where((index[:, None] > index), beta[..., None] * decays.between * keys, 0.0)
    inverse = _inverse(lower, precision)
    return DeltaChunks(
        row=row,
        q=q,
        k=k,
        scores=product("nhck,nhdk->nhcd", q, k)[:, :, None] * decays.between,
        own=product("nhgcd,nhgdv->nhgcv", inverse, beta[..., None] * v),
        of_state=product("nhgcd,nhgd,nhdk->nhgck", inverse, beta * decays.since, k),
        since=decays.since,
        until=decays.until,
        decay=decays.whole,
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
