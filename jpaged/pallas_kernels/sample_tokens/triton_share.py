"""Truncation by top_p alone, with a row's passes split over many CTAs, as two Triton kernels.

    _scan, _choose    a part's winner: its token with the best score. The best of them is t
    _choose           8 levels: t's logit, and 7 of winners' logits around where the kept tokens are expected to end
    weigh             a warp a tile of tokens: its mass above each level
    settle            a CTA a row: t, if top_p keeps it. Otherwise the best of the tokens above the highest level that
                      it does not keep: of the winners, those above it; of parts whose winner is not, a new winner

Winners are draws of their parts by mass, so their logits tell where the mass is: a level is the logit of one such that
the parts of those above it have about the mass that is wanted. Levels lie close where the end is expected and reach far
to both sides, as a row without a level between its end and t's logit needs many passes by one CTA. Where the winners
say that t is surely kept, its logit is the only level: a mistake costs time and nothing else.

After `settle`'s draw, only a token between two levels is unclear; it is weighed as in `triton.py`, by its CTA alone,
and so on.
"""

import math

import triton
import triton.language as tl

from jpaged.pallas_kernels.sample_tokens.triton_rows import (
    draw,
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

LEVELS = 8

_LEVELS: tl.constexpr = tl.constexpr(LEVELS)
_INF: tl.constexpr = tl.constexpr(math.inf)
_NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def levels_around(x, mass, logit, share):
    """The levels of a row, float32 [LEVELS]; plus infinity behind the first where that is the only one. x, mass: of its
    parts, the winner's logit, minus infinity where there is none, and the mass, in any unit. logit: of the best of the
    winners."""
    total = tl.sum(mass, axis=0)
    above = tl.sum(tl.where(x[None, :] > x[:, None], mass[None, :], 0.0), axis=1)
    # A sum over winners strays from a sum over tokens as much as over so many draws.
    draws = total * total / tl.maximum(tl.sum(mass * mass, axis=0), 1e-30)
    strays = tl.maximum(tl.sqrt(tl.maximum(share * (1 - share), 0.0) / tl.maximum(draws, 1.0)), 0.02)
    level = tl.arange(0, _LEVELS)
    d = (level - _LEVELS // 2).to(tl.float32)
    wanted = tl.maximum(share + d * (0.3 + 0.1 * d * d) * strays, 0.0) * total  # 0, 0.4, 1.4 and 3.6 times that off
    levels = tl.min(tl.where(above[:, None] <= wanted[None, :], x[:, None], _INF), axis=0)
    is_sure = tl.sum(tl.where(x > logit, mass, 0.0), axis=0) < (share - 4 * strays) * total
    levels = tl.where(is_sure, _INF, tl.minimum(levels, tl.max(x, axis=0)))
    return tl.where(level == 0, logit, levels)


@triton.jit
def weigh(
    logits,
    numbers,
    tops,
    levels,
    units,
    sums,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    QUARTERS: tl.constexpr,
):
    """Of a part of a row: its mass above each level.

    logits: float32 [R, VOCAB]. numbers: of `triton.numbers_of`. tops: of `_scan`. levels: float32 [R, LEVELS], all plus
    infinity where a row needs none. units: of `_choose`. sums: float32 [R, PARTS, LEVELS], in units of the row's
    largest; not written of levels that are plus infinity, or not in every part.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    levels += row * _LEVELS
    sums += (row * PARTS + part) * _LEVELS
    level = tl.arange(0, _LEVELS)
    rate = load_numbers(numbers, row)[0]
    top = tl.load(units + row * 2)
    highest = tl.max(tl.load(tops + (row * PARTS + part) * QUARTERS + tl.arange(0, QUARTERS)), axis=0)
    lowest = tl.min(tl.load(levels + level), axis=0)
    if lowest < _INF:
        if highest > lowest:
            at = part * PART + tl.arange(0, PART)
            x = without_nan(tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=-_INF))
            mass = tl.exp2((x - top) * rate)
            tl.store(sums, tl.sum(tl.where(x > tl.load(levels), mass, 0.0), axis=0))
            if tl.load(levels + 1) < _INF:
                for i in tl.static_range(1, _LEVELS):
                    tl.store(sums + i, tl.sum(tl.where(x > tl.load(levels + i), mass, 0.0), axis=0))
        else:
            tl.store(sums + level, tl.zeros((_LEVELS,), tl.float32))


@triton.jit
def settle(
    logits,
    numbers,
    ids,
    maxima,
    firsts,
    levels,
    units,
    sums,
    tokens,
    listed,
    few,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,  # tokens
    QUARTERS: tl.constexpr,  # of a part
    ALL_PARTS: tl.constexpr,  # rounded up to a power of two
    PART_GROUPS: tl.constexpr,  # of a part
    PASS: tl.constexpr,  # groups
    ROOM: tl.constexpr,  # tokens
):
    """The token of a row. numbers: of `triton.numbers_of`. ids, maxima: of `_scan`. firsts: int32 [R], the row's token
    where it has no levels, else the best of the winners. levels, units: of `_choose`. sums: of `weigh`. tokens: int32
    [R]. listed: int32 [R, GROUPS], few: int32 [R, ROOM], scratch."""
    row = tl.program_id(0).to(tl.int64)
    level, part = tl.arange(0, _LEVELS), tl.arange(0, ALL_PARTS)
    exists = part < PARTS
    token = tl.load(firsts + row)
    at_level = tl.load(levels + row * _LEVELS + level)
    rate, _, share, _, _, key0, key1 = load_numbers(numbers, row)
    top, total = tl.load(units + row * 2), tl.load(units + row * 2 + 1)
    at_sum = sums + (row * PARTS + part)[:, None] * _LEVELS + level[None, :]
    of_parts = tl.load(at_sum, mask=exists[:, None], other=0.0)
    if tl.min(at_level, axis=0) < _INF:
        logits += row * VOCAB
        above = tl.sum(of_parts, axis=0)
        kept = (above <= 0) | (above < share * total) | (at_level == _INF)
        floor = tl.max(tl.where(kept, -_INF, at_level), axis=0)  # all that is kept is above it,
        sure = tl.min(tl.where(kept, at_level, _INF), axis=0)  # and all from here up is kept
        logit = tl.load(levels + row * _LEVELS)
        if logit < sure:
            quarter = part[:, None] * QUARTERS + tl.arange(0, QUARTERS)[None, :]
            is_quarter = quarter * QUARTER < VOCAB
            at = tl.load(ids + row * (PARTS * QUARTERS) + quarter, mask=is_quarter, other=0)
            at, x, score = winners(logits, at, is_quarter, top, rate, 1.0, key0, key1)
            best = tl.max(tl.where(x > floor, score, -_INF), axis=0)
            token = tl.min(tl.where((x > floor) & (score == best), at, _NO_TOKEN), axis=0)
            # A part whose winner is not kept may have a token that is, and no better one than that winner.
            again = exists & (x <= floor) & (score >= best)
            listed += row * GROUPS
            group = tl.arange(0, ALL_PARTS * PART_GROUPS)
            highest = tl.load(maxima + row * GROUPS + group, mask=group < GROUPS, other=-_INF)
            if tl.max(again.to(tl.int32), axis=0) > 0:
                of_part = tl.broadcast_to(tl.where(again, _INF, -_INF)[:, None], (ALL_PARTS, PART_GROUPS))
                of_part = tl.reshape(of_part, (ALL_PARTS * PART_GROUPS,))
                count = list_groups(tl.minimum(highest, of_part), listed, floor)
                if count > 0:
                    other = draw(logits, listed, count, floor, top, rate, key0, key1, VOCAB, GROUP, PASS)
                    reached = (without_nan(tl.load(logits + other)) - top) * rate + gumbel(uniform(other, key0, key1))
                    token = tl.where((reached > best) | ((reached == best) & (other < token)), other, token)
            logit = without_nan(tl.load(logits + token))
            if logit < sure:
                count = list_groups(highest, listed, logit)
                few += row * ROOM
                held = list_tokens(logits, listed, count, logit, few, VOCAB, GROUP, PASS, ROOM)
                if held <= ROOM:  # nothing is read again
                    few_x, few_at = load_tokens(logits, few, held, ROOM)
                    token = keep_share(few_x, few_at, token, logit, share * total, top, rate, key0, key1)
                else:
                    weight = mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
                    while (weight > 0) & (weight >= share * total):
                        token = draw(logits, listed, count, logit, top, rate, key0, key1, VOCAB, GROUP, PASS)
                        logit = without_nan(tl.load(logits + token))
                        count = list_groups(highest, listed, logit)
                        weight = mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
    tl.store(tokens + row, token)
