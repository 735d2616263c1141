"""Drawing tokens as two Triton kernels: one read of the logits, and few reads of few of them where they are truncated.

    logits of a row   | group | group | ..     64 tokens each
    _scan             a warp a part of 2,048 tokens: its best token, its mass, and the largest logit of each group
    _choose           a row's CTAs: the best of the parts. One of them searches on where top_k or min_p truncates the
                      row; where top_p alone does, all weigh parts, and the last one to be done settles it
                      (`triton_share.py`)

Without truncation `_scan` is all: the last part of a row to be done takes the best.

The wanted token is the argmax of logit / temperature + noise over the kept tokens, and a token's noise is fixed. The
kept tokens are an upper set of the logits, so truncation is by rejection, as in `hopper.py`:

    floor = below all that min_p and top_k keep
    repeat: t = the best token of those above the floor; stop if top_p keeps t; floor = the logit of t

top_p keeps t if the mass above t is less than its share. The k-th largest of the groups' largest logits is not above
the k-th largest logit, so the search for that, by its bits, needs about k groups. `_choose` lists those that have a
logit above the floor, and in them the tokens. Of up to 128 tokens it compares every two, which tells at once which
ones top_k and top_p keep. Up to 1,024 tokens stay in registers, a few a thread, for all that follows; of more, every
pass reads the listed groups again.

Noise is computed where it can win: a warp leaves a tile out if no token of it comes within reach of its best.

Parts are cut alike in every batch, and sums over them add in one order, whichever CTA made them and however many a row
has: a row's token depends on the row alone.
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
    best_of,
    choose_few,
    draw,
    floor_of,
    floor_of_tokens,
    gumbel,
    keep_share,
    list_groups,
    list_tokens,
    load_tokens,
    mass_above,
    uniform,
    without_nan,
)
from jpaged.pallas_kernels.sample_tokens.triton_share import LEVELS, levels_around, settle, weigh

_GROUP = 64
_TILE = 256  # tokens that a warp of `_scan` handles at once
_PART = 2048  # tokens of a program of `_scan`, at least
_MOST_PARTS = 128  # of a row
_CTAS = 264  # of `_choose` for all rows together, about: as many as an H200 runs at once
_PASS_GROUPS = 64  # that a CTA of `_choose` handles at once; 16 tokens a thread
_UNALIGNED_PASS_GROUPS = 32  # the same where rows do not begin at multiples of 16 bytes, which takes more registers
_MOST_GROUPS = 16384
_ROOM = 1024  # tokens that a CTA of a whole row holds at once; 4 a thread
_SCAN_REGISTERS = (
    64  # of a thread of `_scan`, at `_TILE`: a multiprocessor has room for 32 CTAs of a warp, the most it runs
)
_MOST_REGISTERS = 128  # of a thread of `_choose`: two CTAs fit a multiprocessor
_SETTINGS = 8  # numbers of a row

_INF: tl.constexpr = tl.constexpr(math.inf)
_LEAST_SCORE: tl.constexpr = tl.constexpr(-1e30)
_LARGEST_NOISE: tl.constexpr = tl.constexpr(33.1)  # in powers of two: the least uniform number is 2^-33
_SLACK: tl.constexpr = tl.constexpr(0.01)  # of a bound on scores, far above their rounding
_NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
_LEVELS: tl.constexpr = tl.constexpr(LEVELS)
_FEW: tl.constexpr = tl.constexpr(128)  # tokens of which a CTA compares every two
_COLUMNS: tl.constexpr = tl.constexpr(_SETTINGS)
_RATE, _STRENGTH, _SHARE, _OFFSET, _TOP_K, _KEY_0, _KEY_1, _ARRIVALS = (tl.constexpr(i) for i in range(_SETTINGS))


def unsupported(logits: jax.Array) -> str | None:
    """Why the kernels cannot take these (already checked) logits; None if they can."""
    if logits.shape[1] > _GROUP * _MOST_GROUPS:
        return f"a CTA cannot hold the groups of {logits.shape[1]} logits: more than {_GROUP * _MOST_GROUPS}"
    return None


def settings_of(operands: Operands) -> jax.Array:
    """What the kernels take of a row beside its logits, int32 [R, 8], as one array so that XLA makes it in one kernel:
    the bits of the numbers of `row_numbers`, top_k, the bits of the noise's keys, and 0, a count of arrivals."""
    floats, top_k = row_numbers(operands)
    keys = (lax.bitcast_convert_type(key, jnp.int32) for key in noise.row_keys(operands.seeds, operands.positions))
    bits = lax.bitcast_convert_type(floats, jnp.int32)
    return jnp.stack([*bits.T, top_k, *keys, jnp.zeros_like(top_k)], axis=1)


@partial(jax.jit, static_argnames=("tile", "part", "room", "ctas"))
def sample_tokens(
    operands: Operands,
    *,
    tile: int | None = None,
    part: int | None = None,
    room: int | None = None,
    ctas: int | None = None,
) -> jax.Array:
    """`sample_tokens` of the package, checked. tile, part, room, ctas: to try others than `_TILE`, `_PART`, `_ROOM` and
    `_CTAS`."""
    truncates = any(x is not None for x in (operands.top_k, operands.top_p, operands.min_p))
    cut: dict[str, Any] = {"tile": tile or _TILE, "part": part or _PART}
    settings, tokens, *found = scan(operands.logits, settings_of(operands), truncates, **cut)
    if not truncates:
        return tokens
    shares = operands.top_p is not None
    return choose(operands.logits, settings, found, shares, **cut, room=room or _ROOM, ctas=ctas or _CTAS)[1]


def scan(logits: jax.Array, settings: jax.Array, truncates: bool, *, tile: int, part: int) -> tuple[jax.Array, ...]:
    """The settings, updated in place to what they were, and what `_scan` writes."""
    rows, vocab_size = logits.shape
    part, parts, groups = _cut(vocab_size, part)

    def shape(columns: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), dtype)

    *written, settings = call(
        _scan,
        Launch((rows, parts), warps=1, registers=_SCAN_REGISTERS * max(1, tile // _TILE)),
        logits,
        updated=[settings],
        out=[
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            shape(parts, jnp.float32),
            shape(parts, jnp.int32),
            shape(parts, jnp.float32),
            shape(parts, jnp.float32),
            shape(groups if truncates else 1, jnp.float32),
        ],
        VOCAB=vocab_size,
        PARTS=parts,
        ALL_PARTS=triton.next_power_of_2(parts),
        GROUPS=groups,
        GROUP=_GROUP,
        TRUNCATES=truncates,
        TILE=tile,
        TILES=part // tile,
    )
    return settings, *written


def choose(
    logits: jax.Array,
    settings: jax.Array,
    found: list[jax.Array],
    shares: bool,
    *,
    tile: int,
    part: int,
    room: int,
    ctas: int,
) -> tuple[jax.Array, ...]:
    """The settings, updated in place to what they were, and the tokens. found: of `_scan`, behind the tokens."""
    rows, vocab_size = logits.shape
    part, parts, groups = _cut(vocab_size, part)

    def shape(columns: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), dtype)

    tokens, *_, settings = call(
        _choose,
        Launch(
            (rows, min(parts, max(2, ctas // rows)) if shares else 1),
            warps=8,
            registers=_MOST_REGISTERS,
        ),
        logits,
        *found,
        updated=[settings],
        out=[
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, parts if shares else 1, LEVELS), jnp.float32),
            shape(groups, jnp.int32),
            shape(room, jnp.int32),
            shape(room, jnp.float32),
        ],
        VOCAB=vocab_size,
        PARTS=parts,
        GROUPS=groups,
        GROUP=_GROUP,
        PART=part,
        SHARES=shares,
        ALL_PARTS=triton.next_power_of_2(parts),
        ALL_GROUPS=triton.next_power_of_2(groups),
        PASS=_UNALIGNED_PASS_GROUPS if vocab_size % 4 else _PASS_GROUPS,
        ROOM=room,
    )
    return settings, tokens


def _cut(vocab_size: int, part: int) -> tuple[int, int, int]:
    """Tokens of a part, parts and groups of a row."""
    part = triton.next_power_of_2(max(part, triton.cdiv(vocab_size, _MOST_PARTS)))
    return part, triton.cdiv(vocab_size, part), triton.cdiv(vocab_size, _GROUP)


@triton.jit
def _scan(
    logits,
    settings,
    tokens,
    tops,
    ids,
    bests,
    masses,
    maxima,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    ALL_PARTS: tl.constexpr,  # rounded up to a power of two
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TRUNCATES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of a part
):
    """Of a part of a row: its largest logit, its best token and that one's logit, its mass in units of the largest, and
    its groups' maxima. Where not TRUNCATES, the last part of a row to be done finds the row's token.

    logits: float32 [R, VOCAB]. settings: of `settings_of`. tokens: int32 [R], where not TRUNCATES. tops, bests, masses:
    float32 [R, PARTS]. ids: int32 [R, PARTS]. maxima: float32 [R, GROUPS]. Masses of rows with top_p alone; maxima
    where TRUNCATES.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    settings += row * _COLUMNS
    rate, strength = _number(settings + _RATE), _number(settings + _STRENGTH)
    key0, key1 = _word(settings + _KEY_0), _word(settings + _KEY_1)
    weighs = _has_share_alone(settings)
    top = -_INF
    best = _LEAST_SCORE
    token = 0
    mass = 0.0
    logits += row * VOCAB
    at = part * TILES * TILE + tl.arange(0, TILE)
    ahead = tl.load(logits + at, mask=at < VOCAB, other=-_INF)
    for i in range(TILES):
        first = (part * TILES + i) * TILE
        at = first + tl.arange(0, TILE)
        x = without_nan(ahead)
        if i + 1 < TILES:  # the next tile is on its way while this one is looked at
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
            if (new - higher) * rate + _LARGEST_NOISE * strength > best:
                u = uniform(at, key0, key1)
                # -log(1 - u) >= u, so that a score is at most base - log2(u).
                if tl.max(tl.exp2(base - (best - _SLACK)) - u, axis=0) > 0:
                    score = base + strength * gumbel(u)
                    winner = tl.max(score, axis=0)
                    if winner > best:
                        best = winner
                        token = tl.min(tl.where(score == winner, at, _NO_TOKEN), axis=0)
            top = higher
    place = row * PARTS + part
    tl.store(tops + place, top, cache_modifier=".cg")
    tl.store(ids + place, token, cache_modifier=".cg")
    tl.store(bests + place, without_nan(tl.load(logits + token)), cache_modifier=".cg")
    if TRUNCATES:
        tl.store(masses + place, mass)
    elif _arrives_last(settings + _ARRIVALS, PARTS):
        tl.store(tokens + row, _best_part(tops, ids, bests, row, rate, strength, key0, key1, PARTS, ALL_PARTS))


@triton.jit
def _best_part(tops, ids, bests, row, rate, strength, key0, key1, PARTS: tl.constexpr, ALL_PARTS: tl.constexpr):
    """The best token of a row's parts, as other CTAs of this launch found them."""
    part = tl.arange(0, ALL_PARTS)
    exists = part < PARTS
    part = row * PARTS + part
    top = tl.max(tl.load(tops + part, mask=exists, other=-_INF, cache_modifier=".cg"), axis=0)
    at = tl.load(ids + part, mask=exists, other=_NO_TOKEN, cache_modifier=".cg")
    x = tl.load(bests + part, mask=exists, other=-_INF, cache_modifier=".cg")
    score = (x - tl.where(top == -_INF, 0.0, top)) * rate + strength * gumbel(uniform(at, key0, key1))
    return best_of(at, score)


@triton.jit
def _number(at):
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def _word(at):
    return tl.load(at).to(tl.uint32, bitcast=True)


@triton.jit
def _has_share_alone(settings):
    """Whether top_p truncates a row, and neither top_k nor min_p does."""
    return (_number(settings + _SHARE) < 1) & (tl.load(settings + _TOP_K) <= 0) & (_number(settings + _OFFSET) == -_INF)


@triton.jit
def _arrives_last(counter, count):
    """Counts a CTA's arrival, behind all that it has stored; whether it is the last of `count`, which see all that the
    others stored, past the first-level cache. The last sets the counter back."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _choose(
    logits,
    tops,
    ids,
    bests,
    masses,
    maxima,
    settings,
    tokens,
    sums,
    listed,
    few,
    few_logits,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,  # tokens
    SHARES: tl.constexpr,
    ALL_PARTS: tl.constexpr,  # rounded up to a power of two, as ALL_GROUPS
    ALL_GROUPS: tl.constexpr,
    PASS: tl.constexpr,  # groups
    ROOM: tl.constexpr,  # tokens
):
    """The token of a row, from what `_scan` found. A grid of rows, and CTAs of a row.

    settings: of `settings_of`. tokens: int32 [R]. sums: float32 [R, PARTS, LEVELS], the masses above levels of rows
    with top_p alone, where SHARES. listed: int32 [R, GROUPS], few: int32 [R, ROOM], few_logits: float32 [R, ROOM],
    scratch of one CTA of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    cta = tl.program_id(1)
    part, group = tl.arange(0, ALL_PARTS), tl.arange(0, ALL_GROUPS)
    exists = part < PARTS
    settings += row * _COLUMNS
    # All loads at once: each that waited for another would add its latency.
    rate, strength = _number(settings + _RATE), _number(settings + _STRENGTH)
    share, offset, k = _number(settings + _SHARE), _number(settings + _OFFSET), tl.load(settings + _TOP_K)
    key0, key1 = _word(settings + _KEY_0), _word(settings + _KEY_1)
    part_top = tl.load(tops + row * PARTS + part, mask=exists, other=-_INF)
    at = tl.load(ids + row * PARTS + part, mask=exists, other=_NO_TOKEN)
    x = tl.load(bests + row * PARTS + part, mask=exists, other=-_INF)
    mass = tl.load(masses + row * PARTS + part, mask=exists, other=0.0)
    highest = tl.load(maxima + row * GROUPS + group, mask=group < tl.where(cta == 0, GROUPS, 0), other=-_INF)
    logits += row * VOCAB
    listed += row * GROUPS
    few += row * ROOM
    few_logits += row * ROOM
    alone = SHARES and _has_share_alone(settings)
    if alone | (cta == 0):
        top = tl.max(part_top, axis=0)
        top = tl.where(top == -_INF, 0.0, top)
        score = (x - top) * rate + strength * gumbel(uniform(at, key0, key1))
        token = best_of(at, score)
        logit = tl.max(tl.where(at == token, x, -_INF), axis=0)
        if alone:
            mass *= tl.exp2((part_top - top) * rate)
            levels, is_single = levels_around(x, mass, logit, share)
            sums += row * PARTS * _LEVELS
            weigh(logits, tops + row * PARTS, levels, is_single, sums, top, rate, VOCAB, PARTS, PART)
            if _arrives_last(settings + _ARRIVALS, tl.num_programs(1)):
                token = settle(
                    logits, maxima + row * GROUPS, sums, listed, few, few_logits, levels, token, logit,
                    x, at, score, share, tl.sum(mass, axis=0), top, rate, key0, key1,
                    VOCAB, PARTS, GROUPS, GROUP, PART // GROUP, PASS, ROOM,
                )  # fmt: skip
                tl.store(tokens + row, token)
        else:
            if (k > 0) | (offset > -_INF):
                floor = below(tl.minimum(top + offset, top))
                if k > 0:
                    # Every group exceeds a floor just below the least of their maxima. Fewer than k groups set none.
                    lowest = below(tl.min(tl.where(group < GROUPS, highest, _INF), axis=0))
                    lowest = tl.where(k <= GROUPS, lowest, -_INF)
                    floor = tl.maximum(floor, floor_of(highest, lowest, top, k, k + k // 4))
                count = list_groups(highest, listed, floor)
                held = list_tokens(logits, listed, count, floor, few, few_logits, VOCAB, GROUP, PASS, ROOM)
                FEW: tl.constexpr = min(ROOM, _FEW)
                if held <= FEW:
                    few_x, few_at = load_tokens(few, few_logits, held, FEW)
                    token = choose_few(few_x, few_at, k, share, top, rate, key0, key1)
                elif held <= ROOM:  # nothing is read again
                    token = _choose_held(
                        few, few_logits, held, floor, token, logit, k, share, top, rate, key0, key1, ROOM
                    )
                else:
                    if k > 0:
                        floor = floor_of_tokens(logits, listed, count, floor, top, k, VOCAB, GROUP, PASS)
                        count = list_groups(highest, listed, floor)
                    if logit <= floor:
                        token = draw(logits, listed, count, floor, top, rate, key0, key1, VOCAB, GROUP, PASS)
                        logit = without_nan(tl.load(logits + token))
                    if share < 1:
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
def _choose_held(few, few_logits, held, floor, token, logit, k, share, top, rate, key0, key1, ROOM: tl.constexpr):
    """The token of a row whose tokens above the floor are listed: the given one, if it is kept. logit: of that one."""
    x, at = load_tokens(few, few_logits, held, ROOM)
    if k > 0:
        floor = floor_of(x, floor, top, k, k)
    if logit <= floor:
        token, logit = best_above(x, at, (x - top) * rate + gumbel(uniform(at, key0, key1)), floor)
    if share < 1:
        total = tl.sum(tl.where(x > floor, tl.exp2((x - top) * rate), 0.0), axis=0)
        token = keep_share(x, at, token, logit, share * total, top, rate, key0, key1)
    return token
