"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464): the contract.

A head keeps a matrix S [key_dim, value_dim]. Each token makes it forget a little, replaces a part of what it holds
under the token's key by the token's value, and reads it with the token's query:

    S  <-  exp(log_decay) S
    S  <-  S + beta k (v - S' k)'          ' transposes
    out =  S' q

A sequence's states live in a slot, and a step computes some tokens of each row's sequence:

    rows     0        1           2        ..      tokens   q0 | q1 q1 q1 q1 | q2 | padding
    slots    slots[0] slots[1]    slots[2]

Rows of one token take one step (`gated_delta_step`). Longer ones are cut into chunks, within which all tokens are
computed by matrix products, and the state is passed from chunk to chunk (`gated_delta_chunks`; section 3 of the paper).
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.common.segments import by_length
from jpaged.pallas_kernels.gated_delta_rule.operands import Operands
from jpaged.pallas_kernels.registry import Op, is_hopper

STEP = Op("gated_delta_step", __package__, also={"triton": is_hopper})
CHUNKS = Op("gated_delta_chunks", __package__, also={"triton": is_hopper})


def gated_delta_rule(
    states: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    slots: jax.Array,
    fresh: jax.Array,
    query_starts: jax.Array | None = None,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes tokens of several sequences, and updates their states; in place when the caller's jit donates them.

    Arithmetic is float32, but on a GPU factors of the chunks' products are rounded to TF32 unless q is float32. Queries
    and keys are scaled to length 1 first (with 1e-6 added to the squared length), and queries by key_dim ** -0.5 then.

    Args:
        states: float32 [num_slots, heads, key_dim, value_dim].
        q, k: floats [T, key_heads, key_dim]; key_heads divides heads, and consecutive heads share a query and a key.
        v: [T, heads, value_dim], of q's dtype.
        log_decay: float32 [T, heads], none above 0.
        beta: float32 [T, heads], from 0 to 1; to 2 where states may have negative eigenvalues.
        slots: int32 [R]; no slot twice. A row whose slot is not 0 .. num_slots - 1 computes nothing.
        fresh: bool [R]; rows that begin with a state of zeros, whatever their slots hold, NaN included.
        query_starts: int32 [R + 1], ascending; row r has the tokens query_starts[r] .. query_starts[r + 1] - 1, which
            may be none: it then leaves its slot as it is. None: row r has token r, and R = T.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        out [T, heads, value_dim] of v's dtype, zeros for tokens of no row; and the states.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_rank("states", states, "num_slots, heads, key_dim, value_dim")
    num_slots, heads, key_dim, value_dim = states.shape
    check.check_array("states", states, jnp.float32, "num_slots, heads, key_dim, value_dim", (None,) * 4)
    check.check_floats("q", q, "T, key_heads, key_dim")
    tokens, key_heads, _ = q.shape
    if not key_heads or heads % key_heads or q.shape[2] != key_dim:
        raise ValueError(f"q must be [T, key_heads, {key_dim}], key_heads a divisor of {heads}, got shape {q.shape}")
    check.check_like("k", k, "T, key_heads, key_dim", q.shape, "q", q.dtype)
    check.check_like("v", v, "T, heads, value_dim", (tokens, heads, value_dim), "q and states", q.dtype)
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        check.check_array(name, x, jnp.float32, "T, heads", (tokens, heads))
    operands, rows = Operands(q, k, v, log_decay, beta), Rows(slots, fresh, query_starts)
    rows.check(tokens)
    step = STEP.pick(backend, states, q).run
    if not tokens or not slots.shape[0] or not num_slots:
        return jnp.zeros_like(v), states
    if query_starts is None:
        return step(states, operands, rows)
    chunks = CHUNKS.pick(backend, states, q, query_starts).run
    return by_length(chunks, step, states, operands, rows, tokens)
