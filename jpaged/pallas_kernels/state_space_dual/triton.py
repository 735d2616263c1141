"""One step of state space duality as a Triton kernel: each state is read and written once, in place.

    a CTA: some rows of one sequence's and head's state [head_dim, state_dim], which lie side by side in memory

A step moves each state twice and computes next to nothing, so what counts is bytes in flight: CTAs are small and many.
"""

import jax
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.state_space_dual.operands import Heads, Operands

_CTA_NUMBERS = 4096
"""Of a state; 32 each a thread. Not measured."""


def unsupported(states: jax.Array, x: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if x.dtype.itemsize > 4:
        return f"dtype {x.dtype} is wider than 32 bits"
    state_dim = states.shape[3]
    return f"state_dim {state_dim} is above 1024, which registers do not hold" if state_dim > 1024 else None


@jax.jit  # so that the layers of a model lower the kernel once between them
def state_space_step(of_heads: Heads, states: jax.Array, operands: Operands, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """`state_space_dual` of the package for rows of one token, checked."""
    (a, d), (x, dt, b, c) = of_heads, operands
    num_slots, heads, head_dim, state_dim = states.shape
    count, groups, _ = b.shape
    width = triton.next_power_of_2(state_dim)
    height = min(triton.next_power_of_2(head_dim), max(4, _CTA_NUMBERS // width))
    launch = Launch((triton.cdiv(head_dim, height), heads, count))
    constants = {
        "SLOTS": num_slots,
        "HEADS": heads,
        "GROUP": heads // groups,
        "HEAD_DIM": head_dim,
        "STATE_DIM": state_dim,
        "HEIGHT": height,
        "WIDTH": width,
    }
    out = jax.ShapeDtypeStruct((count, heads, head_dim), x.dtype)
    arrays = (x, dt, a, b, c, d, rows.slots, rows.fresh.astype("int32"))
    stepped, states = call(_state_space_step, launch, *arrays, updated=[states], out=[out], **constants)
    return stepped, states


@triton.jit
def _state_space_step(
    x,
    dt,
    a,
    b,
    c,
    d,
    slots,
    fresh,
    states,
    out,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share b and c
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HEIGHT: tl.constexpr,  # lines of a CTA, a power of two
    WIDTH: tl.constexpr,  # STATE_DIM, rounded up to a power of two
):
    """x, out: [rows, HEADS, HEAD_DIM]. dt: float32 [rows, HEADS]. a, d: float32 [HEADS].
    b, c: [rows, HEADS / GROUP, STATE_DIM]. slots, fresh: int32 [rows].
    states: float32 [SLOTS, HEADS, HEAD_DIM, STATE_DIM].
    """
    head, row = tl.program_id(1), tl.program_id(2)
    line, column = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    is_line, is_column = line < HEAD_DIM, column < STATE_DIM
    slot = tl.load(slots + row)
    given = (row * HEADS + head) * HEAD_DIM + line
    if (slot >= 0) & (slot < SLOTS):
        is_old = tl.zeros((HEIGHT, WIDTH), tl.int32) == tl.load(fresh + row)
        of_group = (row * (HEADS // GROUP) + head // GROUP) * STATE_DIM + column
        writes = tl.load(b + of_group, mask=is_column, other=0.0).to(tl.float32)
        reads = tl.load(c + of_group, mask=is_column, other=0.0).to(tl.float32)
        value = tl.load(x + given, mask=is_line, other=0.0).to(tl.float32)
        span = tl.load(dt + row * HEADS + head)
        place = (slot.to(tl.int64) * HEADS + head) * (HEAD_DIM * STATE_DIM)
        place += line[:, None] * STATE_DIM + column[None, :]
        exists = is_line[:, None] & is_column[None, :]
        held = tl.load(states + place, mask=exists & is_old, other=0.0) * tl.exp(span * tl.load(a + head))
        held += (span * value)[:, None] * writes[None, :]
        tl.store(states + place, held, mask=exists)
        read = tl.sum(held * reads[None, :], axis=1) + tl.load(d + head) * value
        tl.store(out + given, read.to(out.dtype.element_ty), mask=is_line)
    else:
        tl.store(out + given, tl.zeros((HEIGHT,), out.dtype.element_ty), mask=is_line)
