"""What the ragged attention kernel has to compute, as a list that plain XLA operations make on the device.

    tokens of the step (query_starts)      | row 0        |1| row 2                     | padding |
    windows of `window` tokens, aligned    |      |      |      |      |      |      |      |     |
    tiles: (row, window) pairs that meet   |t0    |t1   t2|t3 .. the list, longest first

A window may hold tokens of several rows: each row's tile computes the window whole and stores its own tokens alone. The
padding behind the last row is one more row, without keys: its tiles store zeros.
"""

import jax
import jax.numpy as jnp

ROW, TOKEN, FIRST, END, SHIFT, KV_LEN, *STEPS = range(FIELDS := 10)
LO, LO_FULL, HI_FULL, HI = STEPS
"""Columns of the list, one row a tile: see `plan_tiles`."""

COLUMNS = 32
"""Columns of a row, padding included: 128 bytes are the least that one TMA copy brings."""


def plan_tiles(
    query_starts: jax.Array,
    kv_lens: jax.Array,
    *,
    tokens: int,
    window: int,
    block_kv: int,
    sliding_window: int | None,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The (row, window) pairs to compute, longest first; plain int32 operations on the device.

    Every layer of a model plans alike, so inside one jit the compiler plans once.

    Args:
        query_starts: int32 [R + 1]; kv_lens: int32 [R].
        tokens: T, the static number of tokens. window: tokens of a tile. block_kv: keys of a step.
        causal: whether tokens stand one after another, the last at kv_lens[r] - 1, or all of them there.
    Returns:
        int32 [tiles, 32] and its number of live rows, int32 [1]. Columns: row of the block table, first token of the
        window, first and end token of the row in it, position of a token minus its index, the row's kv_len, and the
        steps: begin, begin and end of those that need no mask, end.
    """
    rows = kv_lens.shape[0]
    starts = jnp.clip(query_starts, 0, tokens)
    starts = jnp.concatenate([starts, jnp.full((1,), tokens, jnp.int32)])
    kv_lens = jnp.concatenate([kv_lens, jnp.zeros((1,), jnp.int32)])
    begin, end = starts[:-1], starts[1:]
    windows = jnp.where(end > begin, (end - 1) // window - begin // window + 1, 0)
    ends = jnp.cumsum(windows, dtype=jnp.int32)
    capacity = min(tokens, -(-tokens // window) + rows + 1)

    tile = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32), rows)
    token = (begin[row] // window + tile - (ends - windows)[row]) * window
    first = jnp.maximum(token, begin[row])
    last = jnp.minimum(token + window, end[row])
    shift = kv_lens[row] - end[row]
    # Where the tile's first and last token stand: each sees the keys before it and itself.
    first_position, last_position = first + shift, last - 1 + shift
    if not causal:
        first_position = last_position = kv_lens[row] - 1
    hi = (jnp.maximum(last_position + 1, 0) + block_kv - 1) // block_kv
    hi_full = jnp.maximum(first_position + 1, 0) // block_kv
    lo = lo_full = jnp.zeros_like(hi)
    if sliding_window is not None:
        lo = jnp.maximum(first_position - sliding_window + 1, 0) // block_kv
        lo_full = (jnp.maximum(last_position - sliding_window + 1, 0) + block_kv - 1) // block_kv
    lo = jnp.minimum(lo, hi)
    lo_full = jnp.clip(lo_full, lo, hi)
    hi_full = jnp.clip(hi_full, lo_full, hi)
    live = tile < ends[-1]
    steps = jnp.where(live, hi - lo, -1)
    # A stable rank by comparing all pairs: one small fused kernel where a sort would be several.
    before = (steps[None, :] > steps[:, None]) | ((steps[None, :] == steps[:, None]) & (tile[None, :] < tile[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    columns = [jnp.minimum(row, rows - 1), token, first, last, shift, kv_lens[row], lo, lo_full, hi_full, hi]
    columns += [jnp.zeros_like(row)] * (COLUMNS - FIELDS)
    work = jnp.zeros((capacity, COLUMNS), jnp.int32).at[rank].set(jnp.stack(columns, axis=1), unique_indices=True)
    return work, ends[-1:]
