"""Drawing tokens as Triton kernels: one read of the logits, and few reads of few of them where they are truncated.

    logits of a row   | group | group | ..     64 tokens each
    _scan             a warp a part of 2,048 tokens, or each quarter of one where rows are few: of each quarter its best
                      token and its mass, and the largest logit of each group
    _choose           a CTA a row: the best of the parts; where the row is truncated, the search below
    weigh, settle     the same where top_p alone truncates it, and to more than a few tokens: `triton_share.py`

The wanted token is the argmax of logit / temperature + noise over the kept tokens, and a token's noise is fixed. The
kept tokens are an upper set of the logits, so truncation is by rejection, as in `hopper.py`:

    floor = below all that min_p and top_k keep
    repeat: t = the best token of those above the floor; stop if top_p keeps t; floor = the logit of t

top_p keeps t if the mass above t is less than its share. The k-th largest of the groups' largest logits is not above
the k-th largest logit, so the search for that, by its bits, needs about k groups. Where top_p alone truncates a row, a
floor is a number above which the groups' largest logits weigh the share, if there is one. `_choose` lists the groups
that have a logit above the floor, and in them the tokens. Up to 1,024 tokens stay in registers, a few a thread, for all
that follows; of more, every pass reads the listed groups again.

Noise is computed where it can win: a warp leaves a tile out if no token of it comes within reach of its best. A warp
that scans a whole part may so miss the best token of a later quarter, but never the best of the part, nor any mass.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.sample_tokens import noise
from jpaged.pallas_kernels.sample_tokens.operands import Operands, row_numbers
from jpaged.pallas_kernels.sample_tokens.triton_rows import (
    below,
    best_above,
    draw,
    floor_of,
    floor_of_share,
    floor_of_tokens,
    gumbel,
    keep_share,
    list_groups,
    list_tokens,
    load_numbers,
    load_tokens,
    mass_above,
    uniform,
    winners,
    without_nan,
)
from jpaged.pallas_kernels.sample_tokens.triton_share import LEVELS, levels_around, settle, weigh

_GROUP = 64
_TILE = 256  # tokens that a warp of `_scan` handles at once
_PART = 2048  # tokens of a program of `_scan`, at least
_MOST_PARTS = 128  # of a row
_QUARTERS = 4  # of a part
_FEW_ROWS = 8  # of which a warp scans a quarter
_PASS_GROUPS = 64  # that a CTA of `_choose` handles at once; 16 tokens a thread
_UNALIGNED_PASS_GROUPS = 32  # the same where rows do not begin at multiples of 16 bytes, which takes more registers
_MOST_GROUPS = 16384
_ROOM = 1024  # tokens that a CTA of a whole row holds at once; 4 a thread
_MOST_REGISTERS = 128  # of a thread that handles a whole row: two CTAs fit a multiprocessor

_INF: tl.constexpr = tl.constexpr(math.inf)
_LEAST_SCORE: tl.constexpr = tl.constexpr(-1e30)
_LARGEST_NOISE: tl.constexpr = tl.constexpr(33.1)  # in powers of two: the least uniform number is 2^-33
_SLACK: tl.constexpr = tl.constexpr(0.01)  # of a bound on scores, far above their rounding
_NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
_LEVELS: tl.constexpr = tl.constexpr(LEVELS)


def unsupported(logits: jax.Array) -> str | None:
    """Why the kernels cannot take these (already checked) logits; None if they can."""
    if logits.shape[1] > _GROUP * _MOST_GROUPS:
        return f"a CTA cannot hold the groups of {logits.shape[1]} logits: more than {_GROUP * _MOST_GROUPS}"
    return None


def numbers_of(operands: Operands) -> jax.Array:
    """What the kernels take of a row beside its logits, int32 [R, 7]: the bits of the four numbers of `row_numbers`,
    top_k, and the two words of the noise's key. One array, so that XLA makes it in one kernel."""
    floats, top_k = row_numbers(operands)
    keys = (lax.bitcast_convert_type(key, jnp.int32) for key in noise.row_keys(operands.seeds, operands.positions))
    return jnp.stack([*lax.bitcast_convert_type(floats, jnp.int32).T, top_k, *keys], axis=1)


@partial(jax.jit, static_argnames=("tile", "part", "room"))
def sample_tokens(
    operands: Operands, *, tile: int | None = None, part: int | None = None, room: int | None = None
) -> jax.Array:
    """`sample_tokens` of the package, checked. tile, part, room: to try others than `_TILE`, `_PART` and `_ROOM`."""
    logits = operands.logits
    rows, vocab_size = logits.shape
    numbers = numbers_of(operands)
    shares = operands.top_p is not None
    truncates = any(x is not None for x in (operands.top_k, operands.top_p, operands.min_p))
    tile, part, room = tile or _TILE, part or _PART, room or _ROOM
    part = triton.next_power_of_2(max(part, triton.cdiv(vocab_size, _MOST_PARTS)))
    parts, groups = triton.cdiv(vocab_size, part), triton.cdiv(vocab_size, _GROUP)
    all_parts = triton.next_power_of_2(parts)
    quarter = max(tile, part // _QUARTERS)
    quarters = part // quarter
    each = 1 if rows <= _FEW_ROWS else quarters
    sizes: dict[str, Any] = {"VOCAB": vocab_size, "PARTS": parts, "GROUPS": groups, "GROUP": _GROUP}
    sizes |= {"QUARTER": quarter, "QUARTERS": quarters}

    def shape(columns: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), dtype)

    found = call(
        _scan,
        Launch((rows, parts * quarters // each), warps=1),
        logits,
        numbers,
        out=[
            shape(parts * quarters, jnp.float32),
            shape(parts * quarters, jnp.int32),
            shape(parts * quarters, jnp.float32),
            shape(groups if truncates else 1, jnp.float32),
        ],
        **sizes,
        TRUNCATES=truncates,
        TILE=tile,
        TILES=quarter // tile,
        EACH=each,
    )
    passes: dict[str, Any] = {"PASS": _UNALIGNED_PASS_GROUPS if vocab_size % 4 else _PASS_GROUPS, "ROOM": room}
    tokens, levels, units, *_ = call(
        _choose,
        Launch((rows,), warps=8, registers=_MOST_REGISTERS),
        logits,
        numbers,
        *found,
        out=[
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            shape(LEVELS if shares else 1, jnp.float32),
            shape(2, jnp.float32),
            shape(groups if truncates else 1, jnp.int32),
            shape(room if truncates else 1, jnp.int32),
        ],
        **sizes,
        TRUNCATES=truncates,
        SHARES=shares,
        ALL_PARTS=all_parts,
        ALL_GROUPS=triton.next_power_of_2(groups),
        **passes,
    )
    if not shares:
        return tokens
    (sums,) = call(
        weigh,
        Launch((rows, parts), warps=max(1, part // 512)),
        logits,
        numbers,
        found[0],
        levels,
        units,
        out=[jax.ShapeDtypeStruct((rows, parts, LEVELS), jnp.float32)],
        VOCAB=vocab_size,
        PARTS=parts,
        PART=part,
        QUARTERS=quarters,
    )
    tokens, *_ = call(
        settle,
        Launch((rows,), warps=8, registers=_MOST_REGISTERS),
        logits,
        numbers,
        found[1],
        found[3],
        tokens,
        levels,
        units,
        sums,
        out=[jax.ShapeDtypeStruct((rows,), jnp.int32), shape(groups, jnp.int32), shape(room, jnp.int32)],
        **sizes,
        ALL_PARTS=all_parts,
        PART_GROUPS=part // _GROUP,
        **passes,
    )
    return tokens


@triton.jit
def _scan(
    logits,
    numbers,
    tops,
    ids,
    masses,
    maxima,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,  # tokens
    QUARTERS: tl.constexpr,  # of a part
    TRUNCATES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of a quarter
    EACH: tl.constexpr,  # quarters of a program
):
    """Of each quarter of a part of a row: its largest logit, its best token, its mass in units of the largest, and its
    groups' maxima. Where the part has a better token, it may be any of the quarter's.

    logits: float32 [R, VOCAB]. numbers: of `numbers_of`. tops, masses: float32 [R, PARTS * QUARTERS]. ids: int32
    [R, PARTS * QUARTERS]. maxima: float32 [R, GROUPS]. Masses of rows with top_p alone; maxima where TRUNCATES.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * EACH
    rate, strength, share, offset, k, key0, key1 = load_numbers(numbers, row)
    weighs = (share < 1) & (k <= 0) & (offset == -_INF)
    top = -_INF
    best = _LEAST_SCORE
    token = begin * QUARTER
    mass = 0.0
    reference = -_INF  # of `reached`,
    reached = _LEAST_SCORE  # the best score of the quarters before
    logits += row * VOCAB
    at = begin * QUARTER + tl.arange(0, TILE)
    ahead = tl.load(logits + at, mask=at < VOCAB, other=-_INF)
    for i in range(EACH * TILES):
        first = begin * QUARTER + i * TILE
        at = first + tl.arange(0, TILE)
        x = without_nan(ahead)
        if i + 1 < EACH * TILES:  # the next tile is on its way while this one is looked at
            ahead = tl.load(logits + at + TILE, mask=at + TILE < VOCAB, other=-_INF)
        highest = tl.max(tl.reshape(x, (TILE // GROUP, GROUP)), axis=1)
        if TRUNCATES:
            group = first // GROUP + tl.arange(0, TILE // GROUP)
            tl.store(maxima + row * GROUPS + group, highest, mask=group < GROUPS)
        new = tl.max(highest, axis=0)
        if new > -_INF:
            higher = tl.maximum(top, new)
            # Scores are relative to the largest logit so far, near which float32 tells the noise of tokens apart.
            best = tl.maximum(best + (top - higher) * rate, _LEAST_SCORE)
            base = (x - higher) * rate
            if weighs:
                mass = mass * tl.exp2((top - higher) * rate) + tl.sum(tl.exp2(base), axis=0)
            bound = tl.maximum(best, reached + (reference - higher) * rate)
            if (new - higher) * rate + _LARGEST_NOISE * strength > bound:
                u = uniform(at, key0, key1)
                # -log(1 - u) >= u, so that a score is at most base - log2(u).
                if tl.max(tl.exp2(base - (bound - _SLACK)) - u, axis=0) > 0:
                    score = base + strength * gumbel(u)
                    winner = tl.max(score, axis=0)
                    if winner > best:
                        best = winner
                        token = tl.min(tl.where(score == winner, at, _NO_TOKEN), axis=0)
            top = higher
        if (i + 1) % TILES == 0:
            place = row * (PARTS * QUARTERS) + begin + i // TILES
            tl.store(tops + place, top)
            tl.store(ids + place, token)
            tl.store(masses + place, mass)
            if EACH > 1:
                if top > -_INF:
                    reached = tl.maximum(best, reached + (reference - top) * rate)
                    reference = top
                top = -_INF
                best = _LEAST_SCORE
                token = first + TILE
                mass = 0.0


@triton.jit
def _choose(
    logits,
    numbers,
    tops,
    ids,
    masses,
    maxima,
    tokens,
    levels,
    units,
    listed,
    few,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,  # tokens
    QUARTERS: tl.constexpr,  # of a part
    TRUNCATES: tl.constexpr,
    SHARES: tl.constexpr,
    ALL_PARTS: tl.constexpr,  # rounded up to a power of two, as ALL_GROUPS
    ALL_GROUPS: tl.constexpr,
    PASS: tl.constexpr,  # groups
    ROOM: tl.constexpr,  # tokens
):
    """The token of a row, from what `_scan` found; where top_p alone keeps more than a few tokens, the best of the
    parts' and levels.

    numbers: of `numbers_of`. tokens: int32 [R]. levels: float32 [R, LEVELS], where SHARES; plus infinity in rows
    without any. units: float32 [R, 2], of rows with some: the largest logit, and the row's mass in units of its own.
    listed: int32 [R, GROUPS], few: int32 [R, ROOM], scratch.
    """
    row = tl.program_id(0).to(tl.int64)
    quarter = tl.arange(0, ALL_PARTS)[:, None] * QUARTERS + tl.arange(0, QUARTERS)[None, :]
    exists = quarter * QUARTER < VOCAB
    # All loads at once: each that waited for another would add its latency.
    rate, strength, share, offset, k, key0, key1 = load_numbers(numbers, row)
    quarter += row * (PARTS * QUARTERS)
    quarter_top = tl.load(tops + quarter, mask=exists, other=-_INF)
    at = tl.load(ids + quarter, mask=exists, other=0)
    mass = tl.load(masses + quarter, mask=exists, other=0.0)
    if TRUNCATES:
        group = tl.arange(0, ALL_GROUPS)
        highest = tl.load(maxima + row * GROUPS + group, mask=group < GROUPS, other=-_INF)
    logits += row * VOCAB
    top = tl.max(tl.max(quarter_top, axis=1), axis=0)
    top = tl.where(top == -_INF, 0.0, top)
    at, x, score = winners(logits, at, exists, top, rate, strength, key0, key1)
    token = tl.min(tl.where(score == tl.max(score, axis=0), at, _NO_TOKEN), axis=0)

    if TRUNCATES:
        logit = tl.max(tl.where(at == token, x, -_INF), axis=0)
        searches = (k > 0) | (offset > -_INF)
        floor = below(tl.minimum(top + offset, top))
        total = -1.0
        if SHARES:
            at_level = levels + row * _LEVELS + tl.arange(0, _LEVELS)
            of_levels = tl.full((_LEVELS,), _INF, tl.float32)
            if (share < 1) & (searches == 0):
                part_mass = tl.sum(mass * tl.exp2((quarter_top - top) * rate), axis=1)
                total = tl.sum(part_mass, axis=0)
                floor = floor_of_share(highest, top, rate, share * total)
                searches = tl.sum((highest > floor).to(tl.int32), axis=0) <= ROOM // 4
                if searches == 0:
                    tl.store(units + row * 2, top)
                    tl.store(units + row * 2 + 1, total)
                    of_levels = levels_around(x, part_mass, logit, share)
            tl.store(at_level, of_levels)
        if searches:
            listed += row * GROUPS
            few += row * ROOM
            if k > 0:
                # Every group exceeds a floor just below the least of their maxima. Fewer than k groups set no floor.
                lowest = below(tl.min(tl.where(group < GROUPS, highest, _INF), axis=0))
                lowest = tl.where(k <= GROUPS, lowest, -_INF)
                floor = tl.maximum(floor, floor_of(highest, lowest, top, k, k + k // 4))
            count = list_groups(highest, listed, floor)
            held = list_tokens(logits, listed, count, floor, few, VOCAB, GROUP, PASS, ROOM)
            if held <= ROOM:  # nothing is read again
                token = _choose_held(
                    logits, few, held, floor, token, logit, k, share, total, top, rate, key0, key1, ROOM
                )
            else:
                if k > 0:
                    floor = floor_of_tokens(logits, listed, count, floor, top, k, VOCAB, GROUP, PASS)
                    count = list_groups(highest, listed, floor)
                if logit <= floor:
                    token = draw(logits, listed, count, floor, top, rate, key0, key1, VOCAB, GROUP, PASS)
                    logit = without_nan(tl.load(logits + token))
                if share < 1:
                    if total < 0:
                        total = mass_above(logits, listed, count, floor, top, rate, VOCAB, GROUP, PASS)
                    count = list_groups(highest, listed, logit)
                    above = mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
                    while (above > 0) & (above >= share * total):
                        token = draw(logits, listed, count, logit, top, rate, key0, key1, VOCAB, GROUP, PASS)
                        logit = without_nan(tl.load(logits + token))
                        count = list_groups(highest, listed, logit)
                        above = mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
    tl.store(tokens + row, token)


@triton.jit
def _choose_held(logits, few, held, floor, token, logit, k, share, total, top, rate, key0, key1, ROOM: tl.constexpr):
    """The token of a row whose tokens above the floor are listed: the given one, if it is kept. logit: of that one.
    total: the mass of which top_p is a share; negative for that of what min_p and top_k keep."""
    x, at = load_tokens(logits, few, held, ROOM)
    if k > 0:
        floor = floor_of(x, floor, top, k, k)
    if logit <= floor:
        token, logit = best_above(x, at, (x - top) * rate + gumbel(uniform(at, key0, key1)), floor)
    if share < 1:
        if total < 0:
            total = tl.sum(tl.where(x > floor, tl.exp2((x - top) * rate), 0.0), axis=0)
        token = keep_share(x, at, token, logit, share * total, top, rate, key0, key1)
    return token
