"""State space duality, SSD (Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060): the contract.

A head keeps a matrix S [head_dim, state_dim]. Each token makes it forget a little, adds its input along the direction
b, and reads it along c:

    S  <-  exp(dt a) S + dt x b'          ' transposes
    y   =  S c + d x

dt, x, b and c are the token's; a and d the head's. Several heads, a group, share b and c.

A sequence's states live in a slot, and rows of tokens are as of `gated_delta_rule`. Rows of one token take one step
(`state_space_step`). Longer ones are cut into chunks, within which all tokens are computed by matrix products, and the
state is passed from chunk to chunk (`state_space_chunks`; section 6 of the paper).
"""

from functools import partial

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.common.segments import by_length
from jpaged.pallas_kernels.registry import Op, is_hopper
from jpaged.pallas_kernels.state_space_dual.operands import Heads, Operands

STEP = Op("state_space_step", __package__, also={"triton": is_hopper})
CHUNKS = Op("state_space_chunks", __package__)


def state_space_dual(
    states: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    slots: jax.Array,
    fresh: jax.Array,
    query_starts: jax.Array | None = None,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes tokens of several sequences, and updates their states; in place when the caller's jit donates them.

    Arithmetic is float32, but for "xla" on a GPU, which rounds factors of the chunks' products to TF32 unless x is
    float32.

    Args:
        states: float32 [num_slots, heads, head_dim, state_dim].
        x: floats [T, heads, head_dim].
        dt: float32 [T, heads], none below 0; as it is used, after softplus and limits.
        a: float32 [heads], none above 0.
        b, c: [T, groups, state_dim], of x's dtype; groups divides heads, and consecutive heads are a group.
        d: float32 [heads].
        slots, fresh, query_starts: as of `gated_delta_rule`.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        y [T, heads, head_dim] of x's dtype, zeros for tokens of no row; and the states.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_rank("states", states, "num_slots, heads, head_dim, state_dim")
    num_slots, heads, head_dim, state_dim = states.shape
    check.check_array("states", states, jnp.float32, "num_slots, heads, head_dim, state_dim", (None,) * 4)
    check.check_floats("x", x, "T, heads, head_dim")
    tokens = x.shape[0]
    check.check_like("x", x, "T, heads, head_dim", (tokens, heads, head_dim), "states", x.dtype)
    check.check_array("dt", dt, jnp.float32, "T, heads", (tokens, heads))
    for name, of_head in (("a", a), ("d", d)):
        check.check_array(name, of_head, jnp.float32, "heads", (heads,))
    check.check_floats("b", b, "T, groups, state_dim")
    groups = b.shape[1]
    if not groups or heads % groups:
        raise ValueError(f"b must be [T, groups, {state_dim}], groups a divisor of {heads}, got shape {b.shape}")
    check.check_like("b", b, "T, groups, state_dim", (tokens, groups, state_dim), "x and states", x.dtype)
    check.check_like("c", c, "T, groups, state_dim", b.shape, "b", b.dtype)
    operands, rows = Operands(x, dt, b, c), Rows(slots, fresh, query_starts)
    rows.check(tokens)
    step = partial(STEP.pick(backend, states, x).run, Heads(a, d))
    if not tokens or not slots.shape[0] or not num_slots:
        return jnp.zeros_like(x), states
    if query_starts is None:
        return step(states, operands, rows)
    chunks = partial(CHUNKS.pick(backend, states, x).run, Heads(a, d))
    return by_length(chunks, step, states, operands, rows, tokens)
