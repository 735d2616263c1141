"""One step of the gated delta rule as a Triton kernel: each state is read and written once, in place.

    a CTA: some columns of one row's and head's state [key_dim, value_dim]; all of its key_dim, in registers

A step moves each state twice and computes next to nothing, so what counts is bytes in flight: CTAs are small and many.
"""

import jax
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.gated_delta_rule import triton_chunks
from jpaged.pallas_kernels.gated_delta_rule.operands import Operands
from jpaged.pallas_kernels.gated_delta_rule.triton_chunks import gated_delta_chunks

__all__ = ["gated_delta_chunks", "gated_delta_step", "unsupported"]

_CTA_NUMBERS = 4096
"""Of a state; 32 each a thread. Not measured."""


def unsupported(states: jax.Array, q: jax.Array, query_starts: jax.Array | None = None) -> str | None:
    """Why a kernel cannot take these (checked) arguments; None if it can. query_starts: given for chunks."""
    if query_starts is not None:
        return triton_chunks.unsupported(states, q)
    if q.dtype.itemsize > 4:
        return f"dtype {q.dtype} is wider than 32 bits"
    key_dim = states.shape[2]
    return f"key_dim {key_dim} is above 512, which registers do not hold" if key_dim > 512 else None


@jax.jit  # so that the layers of a model lower the kernel once between them
def gated_delta_step(states: jax.Array, operands: Operands, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of the package for rows of one token, checked."""
    num_slots, heads, key_dim, value_dim = states.shape
    count, key_heads, _ = operands.q.shape
    height = triton.next_power_of_2(key_dim)
    width = min(triton.next_power_of_2(value_dim), max(8, _CTA_NUMBERS // height))
    launch = Launch((triton.cdiv(value_dim, width), heads, count))
    constants = {
        "SLOTS": num_slots,
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "HEIGHT": height,
        "WIDTH": width,
        "SCALE": key_dim**-0.5,
    }
    out = jax.ShapeDtypeStruct((count, heads, value_dim), operands.v.dtype)
    arrays = (*operands, rows.slots, rows.fresh.astype("int32"))
    stepped, states = call(_gated_delta_step, launch, *arrays, updated=[states], out=[out], **constants)
    return stepped, states


@triton.jit
def _gated_delta_step(
    q,
    k,
    v,
    log_decay,
    beta,
    slots,
    fresh,
    states,
    out,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share a key head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEIGHT: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    WIDTH: tl.constexpr,  # columns of a CTA, a power of two
    SCALE: tl.constexpr,
):
    """q, k: [rows, HEADS / GROUP, KEY_DIM]. v, out: [rows, HEADS, VALUE_DIM]. log_decay, beta: float32 [rows, HEADS].
    slots, fresh: int32 [rows]. states: float32 [SLOTS, HEADS, KEY_DIM, VALUE_DIM].
    """
    head, row = tl.program_id(1), tl.program_id(2)
    line, column = tl.arange(0, HEIGHT), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_line, is_column = line < KEY_DIM, column < VALUE_DIM
    slot = tl.load(slots + row)
    given = (row * HEADS + head) * VALUE_DIM + column
    if (slot >= 0) & (slot < SLOTS):
        is_old = tl.zeros((HEIGHT, WIDTH), tl.int32) == tl.load(fresh + row)
        of_key = (row * (HEADS // GROUP) + head // GROUP) * KEY_DIM + line
        query = tl.load(q + of_key, mask=is_line, other=0.0).to(tl.float32)
        key = tl.load(k + of_key, mask=is_line, other=0.0).to(tl.float32)
        query = query * (SCALE / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6))
        key = key / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6)
        place = (slot.to(tl.int64) * HEADS + head) * (KEY_DIM * VALUE_DIM) + line[:, None] * VALUE_DIM + column[None, :]
        exists = is_line[:, None] & is_column[None, :]
        held = tl.load(states + place, mask=exists & is_old, other=0.0)
        held *= tl.exp(tl.load(log_decay + row * HEADS + head))
        value = tl.load(v + given, mask=is_column, other=0.0).to(tl.float32)
        error = tl.load(beta + row * HEADS + head) * (value - tl.sum(held * key[:, None], axis=0))
        held += key[:, None] * error[None, :]
        tl.store(states + place, held, mask=exists)
        tl.store(out + given, tl.sum(held * query[:, None], axis=0).to(out.dtype.element_ty), mask=is_column)
    else:
        tl.store(out + given, tl.zeros((WIDTH,), out.dtype.element_ty), mask=is_column)
