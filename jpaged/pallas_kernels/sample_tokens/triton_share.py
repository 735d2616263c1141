"""Truncation by top_p alone, by all CTAs of a row of `triton.py`'s `_choose`.

    a part's winner   its token with the best score, of `_scan`. The best of them is t
    levels_around     8 levels: t's logit, and 7 of winners' logits around where the kept tokens are expected to end
    weigh             a CTA a part of tokens, then the next: its mass above each level
    settle            the last CTA of a row to be done: t, if top_p keeps it. Otherwise the best of the tokens above the
                      highest level that it does not keep: of the winners, those above it; of parts whose winner is not,
                      a new winner

Winners are draws of their parts by mass, so their logits tell where the mass is: a level is the logit of one such that
the parts of those above it have about the mass that is wanted. Levels lie close where the end is expected and reach far
to both sides, as a row without a level between its end and t's logit needs many passes by one CTA. Where the winners
say that t is surely kept, its logit is the only level.

After `settle`'s draw, only a token between two levels is unclear; it is weighed as in `triton.py`, by the last CTA
alone, and so on.
"""

import math

import triton
import triton.language as tl

from jpaged.pallas_kernels.sample_tokens.triton_rows import (
    best_of,
    draw,
    gumbel,
    keep_share,
    list_groups,
    list_tokens,
    load_tokens,
    mass_above,
    uniform,
    without_nan,
)

LEVELS = 8

_LEVELS: tl.constexpr = tl.constexpr(LEVELS)
_INF: tl.constexpr = tl.constexpr(math.inf)


@triton.jit
def levels_around(x, mass, logit, share):
    """The levels of a row, float32 [LEVELS], and whether the first is the only one, the others being plus infinity.

    x, mass: of its parts, the winner's logit, minus infinity where there is none, and the mass, in any unit. logit: of
    the best of the winners, the first level.
    """
    total = tl.sum(mass, axis=0)
    above = tl.sum(tl.where(x[None, :] > x[:, None], mass[None, :], 0.0), axis=1)
    # A sum over winners strays from a sum over tokens as much as over so many draws.
    draws = total * total / tl.maximum(tl.sum(mass * mass, axis=0), 1e-30)
    strays = tl.maximum(tl.sqrt(tl.maximum(share * (1 - share), 0.0) / tl.maximum(draws, 1.0)), 0.02)
    level = tl.arange(0, _LEVELS)
    d = (level - _LEVELS // 2).to(tl.float32)
    steps = d * (0.3 + 0.1 * d * d)  # of 7 levels: 0, 0.4, 1.4 and 3.6 times that to both sides
    wanted = tl.maximum(share + steps * strays, 0.0) * total
    levels = tl.min(tl.where(above[:, None] <= wanted[None, :], x[:, None], _INF), axis=0)
    levels = tl.minimum(levels, tl.max(x, axis=0))
    is_single = tl.sum(tl.where(x > logit, mass, 0.0), axis=0) < (share - 4 * strays) * total
    return tl.where(level == 0, logit, tl.where(is_single, _INF, levels)), is_single


@triton.jit
def weigh(
    logits, tops, levels, is_single, sums, top, rate,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A CTA's share of a row's parts: their masses above each level.

    logits: of the row. tops: float32 [PARTS], the parts' largest logits. levels, is_single: of `levels_around`. sums:
    float32 [PARTS, LEVELS], in units of `top`; not written behind the first where that is the only one. Parts below all
    levels are not read.
    """
    level, t = tl.arange(0, _LEVELS), tl.arange(0, PART)[None, :]
    lowest = tl.min(levels, axis=0)
    first = tl.max(tl.where(level == 0, levels, -_INF), axis=0)
    step = tl.num_programs(1)
    part = tl.program_id(1)
    highest = tl.load(tops + part)
    at = part * PART + t
    ahead = tl.load(logits + at, mask=at < tl.where(highest > lowest, VOCAB, 0), other=-_INF)
    after = tl.load(tops + part + step, mask=part + step < PARTS, other=-_INF)
    while part < PARTS:
        x = without_nan(ahead)
        # The next part is on its way while this one is looked at.
        at = (part + step) * PART + t
        ahead = tl.load(logits + at, mask=at < tl.where(after > lowest, VOCAB, 0), other=-_INF)
        after = tl.load(tops + part + 2 * step, mask=part + 2 * step < PARTS, other=-_INF)
        mass = tl.exp2((x - top) * rate)
        at_sum = sums + part * _LEVELS
        if is_single:
            tl.store(at_sum, tl.sum(tl.where(x > first, mass, 0.0)), cache_modifier=".cg")
        else:
            above = tl.sum(tl.where(x > levels[:, None], mass, 0.0), axis=1)
            tl.store(at_sum + level, above, cache_modifier=".cg")
        part += step


@triton.jit
def settle(
    logits, maxima, sums, listed, few, few_logits, levels, token, logit,
    x, at, score, share, total, top, rate, key0, key1,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PART_GROUPS: tl.constexpr,
    PASS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The token of a row.

    maxima: float32 [GROUPS], of `_scan`. sums: of `weigh`. levels: of `levels_around`. token, logit: of the best of the
    winners. x, at, score: of the parts' winners, minus infinity where there is none. total: the row's mass, in units of
    the largest logit, `top`. listed, few, few_logits: scratch, of `list_groups` and `list_tokens`.
    """
    ALL_PARTS: tl.constexpr = x.shape[0]
    level, part = tl.arange(0, _LEVELS), tl.arange(0, ALL_PARTS)
    at_sum = sums + part[:, None] * _LEVELS + level[None, :]
    is_sum = (part < PARTS)[:, None] & (levels < _INF)[None, :]
    above = tl.sum(tl.load(at_sum, mask=is_sum, other=0.0, cache_modifier=".cg"), axis=0)
    kept = (above <= 0) | (above < share * total)
    floor = tl.max(tl.where(kept, -_INF, levels), axis=0)  # all that is kept is above it,
    sure = tl.min(tl.where(kept, levels, _INF), axis=0)  # and all from here up is kept
    if logit < sure:
        best = tl.max(tl.where(x > floor, score, -_INF), axis=0)
        token = best_of(at, tl.where(x > floor, score, -_INF))
        # A part whose winner is not kept may have a token that is, and no better one than that winner.
        again = (part < PARTS) & (x <= floor) & (score >= best)
        group = tl.arange(0, ALL_PARTS * PART_GROUPS)
        highest = tl.load(maxima + group, mask=group < GROUPS, other=-_INF)
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
            held = list_tokens(logits, listed, count, logit, few, few_logits, VOCAB, GROUP, PASS, ROOM)
            if held <= ROOM:  # nothing is read again
                few_x, few_at = load_tokens(few, few_logits, held, ROOM)
                token = keep_share(few_x, few_at, token, logit, share * total, top, rate, key0, key1)
            else:
                weight = mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
                while (weight > 0) & (weight >= share * total):
                    token = draw(logits, listed, count, logit, top, rate, key0, key1, VOCAB, GROUP, PASS)
                    logit = without_nan(tl.load(logits + token))
                    count = list_groups(highest, listed, logit)
                    weight = mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
    return token
