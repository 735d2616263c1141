"""State space duality in plain XLA: one step, chunks of ragged rows, and whole sequences (which gradients pass).

Within a chunk, let g_i be the product of the decays exp(dt a) from the first token of its row to token i, D_ij =
g_i / g_j for i from j on in the same row, and S the row's state before the chunk (section 6 of the paper):

    Y  = (D * C B') (dt X) + d X  +  (g C) S'             the first two terms need no state
    S  <- g_last S + (g_last / g dt X)' B
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.numerics import precision_of
from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.common.segments import Chunks, Cut, Decays, advance_rows, advance_sequences, rows_of_tokens
from jpaged.pallas_kernels.state_space_dual.operands import Heads, Operands


@jax.jit
def state_space_step(of_heads: Heads, states: jax.Array, operands: Operands, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """`state_space_dual` of the package for rows of one token, checked."""
    (a, d), (x, dt, b, c), (slots, fresh, _) = of_heads, operands, rows
    num_slots, heads = states.shape[:2]
    wide = x.astype(jnp.float32)
    b, c = (jnp.repeat(z.astype(jnp.float32), heads // z.shape[1], axis=1)[:, :, None] for z in (b, c))
    live = (slots >= 0) & (slots < num_slots)
    held = states[jnp.where(live, slots, 0)]
    held = jnp.where((live & ~fresh)[:, None, None, None], held, 0.0) * jnp.exp(dt * a)[..., None, None]
    new = held + (dt[..., None] * wide)[..., None] * b
    # A sum of products, which XLA fuses: as a dot it would be rounded to TF32 on a GPU.
    out = jnp.where(live[:, None, None], jnp.sum(new * c, axis=3) + d[:, None] * wide, 0.0)
    return out.astype(x.dtype), states.at[jnp.where(live, slots, num_slots)].set(new, mode="drop")


@jax.jit
def state_space_chunks(
    of_heads: Heads, states: jax.Array, operands: Operands, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """`state_space_dual` of the package, checked, by chunks for rows of any length."""
    x, groups = operands.x, operands.b.shape[1]
    row = rows_of_tokens(rows, states.shape[0], x.shape[0])
    out, states = advance_rows(within_chunks(of_heads, operands, row), states, row, rows, groups, x.shape[2])
    return Cut.of(x.shape[0]).flat(out).astype(x.dtype), states


def state_space_sequences(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, row: jax.Array
) -> jax.Array:
    """State space duality over whole sequences, from states of zeros. It is differentiable.

    row: int32 [T]; the sequence of each token, whose tokens are consecutive.
    Other arguments, and the result: as of `state_space_dual`.
    """
    groups = b.shape[1]
    start = jnp.zeros((groups, x.shape[1] // groups, x.shape[2], b.shape[2]), jnp.float32)
    out = advance_sequences(within_chunks(Heads(a, d), Operands(x, dt, b, c), row), start)
    return Cut.of(x.shape[0]).flat(out).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateSpaceChunks(Chunks):
    """Groups are of the heads that share b and c.

    b, c: [groups, C, state_dim].
    own: [groups, group, C, head_dim]; what tokens give for a state of zeros. added: what each adds to the state at the
        segment's end, along its b.
    """

    b: jax.Array
    c: jax.Array
    own: jax.Array
    added: jax.Array

    def advance(
        self, held: jax.Array, reads: jax.Array, stays: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As of `segments.Chunks`. held: [groups, group, head_dim, state_dim]."""
        found = self.product("gck,ghpk->ghcp", self.c, held) * self.since[..., None]
        added = jnp.where(stays[:, None], self.added, 0.0)
        out = self.own + jnp.where(reads[:, None], found, 0.0)
        return out, held * decay[..., None, None] + self.product("ghcp,gck->ghpk", added, self.b)


def within_chunks(of_heads: Heads, operands: Operands, row: jax.Array) -> StateSpaceChunks:
    """Cuts T tokens into chunks of consecutive ones, padded, and computes what needs no state. row: as of
    `gated_delta_rule.reference.within_chunks`.
    """
    (a, d), (x, dt, b, c) = of_heads, operands
    (tokens, heads, _), groups = x.shape, b.shape[1]
    x, b, c = (jnp.where((row >= 0)[:, None, None], z, 0) for z in (x, b, c))
    precision = precision_of(x.dtype)
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    cut = Cut.of(tokens)
    row = cut.rows(row)
    axes = groups, heads // groups
    b, c = (cut.apply(z, groups) for z in (b, c))
    a, d = (z.reshape(*axes)[..., None] for z in (a, d))
    x, dt = cut.apply(x, *axes), jnp.where((row >= 0)[:, None, None, :], cut.apply(dt, *axes), 0.0)
    decays = Decays.of(row, dt * a)
    scores = product("ngck,ngdk->ngcd", c, b)[:, :, None] * decays.between
    inputs = dt[..., None] * x
    return StateSpaceChunks(
        row=row,
        b=b,
        c=c,
        own=product("nghcd,nghdp->nghcp", scores, inputs) + d[..., None] * x,
        added=decays.until[..., None] * inputs,
        since=decays.since,
        decay=decays.whole,
        precision=precision,
    )
