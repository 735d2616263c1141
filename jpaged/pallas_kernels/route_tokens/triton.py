"""Routing for GPUs from Ampere on, and for Hopper: one Triton kernel while tokens are few, two else.

    a block of tokens    scores [tokens, E] in registers; the best, k times over: the largest key, then the lowest
                         number that has it. Keys are integers in the order of the scores.
                     --> experts, weights [T, k], and how many of the block's tokens have each expert

    one block            starts  = sums over the experts before       row of (token, expert) = start of the expert
    (few tokens)         ranks   = sums over the tokens before                                + rank among its tokens
                     --> everything, in the same kernel

    more blocks          counts [blocks, E] --> a second kernel, whose blocks add up the counts of those before them

Nothing is shared but by way of these counts, so rows come in the same order every time.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.grouped_product.tiles import END, FIRST, GROUP, RowTiles, most_tiles
from jpaged.pallas_kernels.route_tokens.choice import ExpertChoice
from jpaged.pallas_kernels.route_tokens.operands import Operands
from jpaged.pallas_kernels.route_tokens.rows import WEIGHTS_BEHIND, RoutedTokens, SortedRows

_GROUP, _FIRST, _END = (tl.constexpr(x) for x in (GROUP, FIRST, END))
_BEST, _ALL, _EACH = (tl.constexpr(i) for i in range(3))
"""Scores: of a softmax over a token's experts, of one over all experts, of each by itself (a sigmoid)."""
_LEAST = tl.constexpr(-(2**31))
"""Less than the key of any number."""
_LEAST_NUMBER = tl.constexpr(-0x7F800001)
"""The key of minus infinity."""
_INF = tl.constexpr(float("inf"))

_ONE_BLOCK = 2048
"""Scores up to which one CTA does all. On an H200 it takes 3.7 us for 8 tokens of 128 experts and 8.0 for 32; the two
kernels together take 6.1 for 256."""
_BLOCK = 4096
"""Scores of a block, at most, where there are more."""
_BLOCKS = 64
"""CTAs of the second kernel, at most: each reads the counts of all blocks."""
_MOST_EXPERTS = 1024


def unsupported(logits: jax.Array, choice: ExpertChoice) -> str | None:
    """Why the kernels cannot take these (checked) arguments; None if they can."""
    experts = logits.shape[1]
    if experts > _MOST_EXPERTS:
        return f"{experts} experts are more than {_MOST_EXPERTS}"
    if choice.groups > 1 and (_power(experts) != experts or _power(choice.groups) != choice.groups):
        return f"{experts} experts in {choice.groups} groups; it takes powers of two"
    if choice.groups > 1 and experts // choice.groups < choice.group_best:
        return f"groups of {experts // choice.groups} experts have no {choice.group_best} best"
    return None


def _power(number: int) -> int:
    """The next power of two."""
    return triton.next_power_of_2(number)


@partial(jax.jit, static_argnames=("choice", "held", "tile_height"))
def route_tokens(operands: Operands, *, choice: ExpertChoice, held: int, tile_height: int) -> RoutedTokens:
    """`route_tokens` of the package, checked."""
    logits, correction, live, first = operands
    tokens, experts = logits.shape
    each, wide = choice.per_token, _power(experts)
    whole = _power(tokens) * wide <= _ONE_BLOCK
    block = _power(tokens) if whole else max(4, min(_power(triton.cdiv(tokens, _BLOCKS)), _BLOCK // wide))
    blocks = triton.cdiv(tokens, block)
    of_best = choice.softmax_of_best_alone(correction is not None)
    score = _EACH if choice.score == "sigmoid" else _BEST if of_best else _ALL
    sizes: dict[str, Any] = {"TOKENS": tokens, "K": each, "BLOCK": block, "WIDE": wide, "HELD": held}
    sizes |= {"SPLIT": first is not None}
    rule: dict[str, Any] = {
        "EXPERTS": experts,
        "SCORE": score.value,
        "BY_LOGITS": choice.picks_by_logits(correction is not None),
        "RENORMALIZED": choice.renormalized,
        "ADDED": choice.added_to_sum,
        "FACTOR": choice.factor,
    }
    rule |= {"BIASED": correction is not None, "PADDED": live is not None, "GROUPS": choice.groups}
    rule |= {"KEPT": choice.kept_groups, "GROUP_BEST": choice.group_best}
    # What is not there is not read either, and the logits stand for it.
    optional = [logits if x is None else x for x in (correction, live, None if first is None else first.reshape(1))]
    rows = tokens * each
    shapes = {"tokens": (rows,), "places": (tokens, each), "sizes": (held,), "ends": (held,)}
    shapes |= {"listed": (most_tiles(rows, held, tile_height), 3)}
    out = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes.values()]
    out.append(jax.ShapeDtypeStruct((rows + WEIGHTS_BEHIND,), jnp.float32))
    chosen = [jax.ShapeDtypeStruct((tokens, each), x) for x in (jnp.int32, jnp.float32)]
    launch = Launch((blocks,), warps=max(1, min(8, block * wide // 128)), stages=1)
    if whole:
        found = call(_route, launch, logits, *optional, out=[*chosen, *out], HEIGHT=tile_height, **sizes, **rule)
        (ids, weights), of_rows = found[:2], found[2:]
    else:
        scratch = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens, each), (blocks, held))]
        ids, weights, *counted = call(_choose, launch, logits, *optional, out=[*chosen, *scratch], **sizes, **rule)
        turns = triton.cdiv(blocks, _BLOCKS)
        launch = Launch((triton.cdiv(blocks, turns),), warps=launch.warps, stages=1)
        numbers = {
            "HEIGHT": tile_height,
            "BLOCKS": blocks,
            "TURNS": turns,
            "STEP": max(1, min(_power(blocks), _BLOCK // wide)),
        }
        numbers |= {"WIDTH": min(1024, _power(turns * block * each))}
        read = (ids, weights, optional[2], *counted)
        of_rows = call(_arrange, launch, *read, out=[*out, scratch[1]], **sizes, **numbers)[:-1]
    row_tokens, places, group_sizes, ends, listed, row_weights = of_rows
    tiles = RowTiles(listed, ends, tile_height)
    return RoutedTokens(ids, weights, SortedRows(row_tokens, row_weights, places, group_sizes, tiles))


@triton.jit
def _route(
    logits,
    correction,
    live,
    first,
    experts,
    weights,
    row_tokens,
    places,
    sizes,
    ends,
    listed,
    row_weights,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,  # experts of a token
    BLOCK: tl.constexpr,  # tokens; a power of two, as WIDE
    WIDE: tl.constexpr,  # EXPERTS rounded up
    HELD: tl.constexpr,  # experts that are here,
    SPLIT: tl.constexpr,  # from `first` on
    HEIGHT: tl.constexpr,  # of a tile
    SCORE: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    ADDED: tl.constexpr,
    FACTOR: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,  # tokens may not be live
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """All of it, of one block. logits: float32 [T, E]. correction: float32 [E]. live: bool [T]. first: int32 [1].
    experts, places: int32 [T, K]. weights: float32 [T, K]. row_tokens: int32 [T * K]. sizes, ends: int32 [HELD].
    listed: int32 [tiles, 3]. row_weights: float32 [T * K + ..]."""
    nth, weight, here = _choice(
        logits, correction, live, first, experts, weights, 0, TOKENS, EXPERTS, K, BLOCK, WIDE, HELD, SPLIT, SCORE,
        BY_LOGITS, RENORMALIZED, ADDED, FACTOR, BIASED, PADDED, GROUPS, KEPT, GROUP_BEST
    )  # fmt: skip
    offset = 0
    if SPLIT:
        offset = tl.load(first)
    ones = here.to(tl.int32)
    size = tl.sum(ones, axis=0)
    start = tl.cumsum(size, axis=0) - size
    row = start[None, :] + tl.cumsum(ones, axis=0) - ones
    token = tl.arange(0, BLOCK)
    at = token[:, None] * K + nth
    tl.store(places + at, tl.where(here, row, 0), mask=(nth >= 0) & (token < TOKENS)[:, None])
    tl.store(row_tokens + row, tl.broadcast_to(token[:, None], (BLOCK, WIDE)), mask=here)
    tl.store(row_weights + row, weight, mask=here)
    _store_tiles(sizes, ends, listed, size, start, tl.arange(0, WIDE) - offset, HELD, HEIGHT)


@triton.jit
def _choose(
    logits,
    correction,
    live,
    first,
    experts,
    weights,
    ranks,
    counts,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    HELD: tl.constexpr,
    SPLIT: tl.constexpr,
    SCORE: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    ADDED: tl.constexpr,
    FACTOR: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """A block's tokens: their experts and weights, how many have each expert, and how many before each. Arrays and
    constants are those of `_route`. ranks: int32 [T, K]; of those of no expert here anything. counts: int32 [blocks,
    HELD]."""
    block = tl.program_id(0)
    nth, _, here = _choice(
        logits, correction, live, first, experts, weights, block, TOKENS, EXPERTS, K, BLOCK, WIDE, HELD, SPLIT, SCORE,
        BY_LOGITS, RENORMALIZED, ADDED, FACTOR, BIASED, PADDED, GROUPS, KEPT, GROUP_BEST
    )  # fmt: skip
    expert = tl.arange(0, WIDE)
    if SPLIT:
        expert -= tl.load(first)
    ones = here.to(tl.int32)
    token = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(ranks + token[:, None] * K + nth, tl.cumsum(ones, axis=0) - ones, mask=here)
    size = tl.sum(ones, axis=0)
    tl.store(counts + block * HELD + expert, size, mask=(expert >= 0) & (expert < HELD))


@triton.jit
def _arrange(
    experts,
    weights,
    first,
    ranks,
    counts,
    row_tokens,
    places,
    sizes,
    ends,
    listed,
    row_weights,
    bases,
    TOKENS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    HELD: tl.constexpr,
    SPLIT: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCKS: tl.constexpr,
    TURNS: tl.constexpr,  # blocks of a CTA
    STEP: tl.constexpr,  # blocks whose counts are read at once, a power of two
    WIDTH: tl.constexpr,  # rows that are placed at once, a power of two
):
    """The rows of TURNS blocks, and, by the first CTA, the tiles. Arrays and constants are those of `_choose`. bases:
    int32 [blocks, HELD], scratch: the first row of each block and expert."""
    program = tl.program_id(0)
    expert = tl.arange(0, WIDE)  # counted from the first that is here
    held = expert < HELD
    size = tl.zeros((WIDE,), tl.int32)
    before = tl.zeros((WIDE,), tl.int32)
    for begin in range(0, BLOCKS, STEP):
        block = begin + tl.arange(0, STEP)
        inside = (block < BLOCKS)[:, None] & held[None, :]
        count = tl.load(counts + block[:, None] * HELD + expert[None, :], mask=inside, other=0)
        size += tl.sum(count, axis=0)
        before += tl.sum(tl.where((block < program * TURNS)[:, None], count, 0), axis=0)
    start = tl.cumsum(size, axis=0) - size
    for turn in range(TURNS):
        at = (program * TURNS + turn) * HELD + expert
        inside = held & (at < BLOCKS * HELD)
        tl.store(bases + at, start + before, mask=inside)
        before += tl.load(counts + at, mask=inside, other=0)
    tl.debug_barrier()  # all see what all stored
    for begin in range(0, TURNS * BLOCK * K, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        inside = at < TURNS * BLOCK * K
        at += program * (TURNS * BLOCK * K)
        inside = inside & (at < TOKENS * K)
        own = tl.load(experts + at, mask=inside, other=-1)
        here = own >= 0
        if SPLIT:
            own -= tl.load(first)
            here = here & (own >= 0) & (own < HELD)
        base = tl.load(bases + at // (BLOCK * K) * HELD + own, mask=here, other=0)
        row = base + tl.load(ranks + at, mask=here, other=0)
        tl.store(places + at, row, mask=inside)
        tl.store(row_tokens + row, at // K, mask=here)
        tl.store(row_weights + row, tl.load(weights + at, mask=here, other=0.0), mask=here)
    if program == 0:
        _store_tiles(sizes, ends, listed, size, start, expert, HELD, HEIGHT)


@triton.jit
def _choice(
    logits, correction, live, first, experts, weights, block, TOKENS, EXPERTS, K, BLOCK, WIDE, HELD, SPLIT, SCORE,
    BY_LOGITS, RENORMALIZED, ADDED, FACTOR, BIASED, PADDED, GROUPS, KEPT, GROUP_BEST
):  # fmt: skip
    """Picks the experts of a block's tokens, and stores these and their weights.

    Returns, each [BLOCK, WIDE]: which choice of its token an expert is, -1 for none; its weight; whether it is a live
    token's and here.
    """
    token = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, WIDE)
    inside = (token < TOKENS)[:, None] & (expert < EXPERTS)[None, :]
    x = tl.load(logits + token[:, None] * EXPERTS + expert[None, :], mask=inside, other=-_INF)
    if SCORE == _ALL:
        score = tl.exp(x - tl.max(x, axis=1)[:, None])
        score = score / tl.sum(tl.where(inside, score, 0.0), axis=1)[:, None]
    elif SCORE == _EACH:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = x  # a softmax keeps the order
    wish = x if BY_LOGITS else score
    if BIASED:
        wish += tl.load(correction + expert, mask=expert < EXPERTS, other=0.0)[None, :]
    key = _key(wish)
    if GROUPS > 1:
        key = _in_kept_groups(key, BLOCK, WIDE, GROUPS, KEPT, GROUP_BEST)
    key = tl.where((expert < EXPERTS)[None, :], key, _LEAST)
    nth = tl.full((BLOCK, WIDE), -1, tl.int32)
    for j in tl.static_range(K):
        largest = tl.max(key, axis=1)
        best = tl.min(tl.where(key == largest[:, None], expert[None, :], WIDE), axis=1)
        hit = expert[None, :] == best[:, None]
        nth = tl.where(hit, j, nth)
        key = tl.where(hit, _LEAST, key)
    chosen = (nth >= 0) & (token < TOKENS)[:, None]
    weight = score
    if SCORE == _BEST:
        top = tl.max(tl.where(chosen & (x == x), x, -_INF), axis=1)
        weight = tl.exp(x - top[:, None])
    if RENORMALIZED:
        total = tl.sum(tl.where(chosen, weight, 0.0), axis=1)
        if SCORE == _EACH:
            total += ADDED
        weight = weight / total[:, None]
    weight = weight * FACTOR
    here = chosen
    stored = tl.broadcast_to(expert[None, :], (BLOCK, WIDE))
    if PADDED:
        lives = tl.load(live + token, mask=token < TOKENS, other=0) != 0
        here = here & lives[:, None]
        stored = tl.where(lives[:, None], stored, -1)
    at = token[:, None] * K + nth
    tl.store(experts + at, stored, mask=chosen)
    tl.store(weights + at, weight, mask=chosen)
    if SPLIT:
        own = expert - tl.load(first)
        here = here & ((own >= 0) & (own < HELD))[None, :]
    return nth, weight, here


@triton.jit
def _store_tiles(sizes, ends, listed, size, start, expert, HELD, HEIGHT):
    """Sizes of groups, and their tiles. size, start: int32, of each expert; those that are not here have no rows.
    expert: its number here."""
    held = (expert >= 0) & (expert < HELD)
    number = (size + (HEIGHT - 1)) // HEIGHT
    end = tl.cumsum(number, axis=0)
    tl.store(sizes + expert, size, mask=held)
    tl.store(ends + expert, end, mask=held)
    for i in range(tl.max(number, axis=0)):
        tile = listed + (end - number + i) * 3
        begin = start + i * HEIGHT
        tl.store(tile + _GROUP, expert, mask=i < number)
        tl.store(tile + _FIRST, begin, mask=i < number)
        tl.store(tile + _END, tl.minimum(begin + HEIGHT, start + size), mask=i < number)


@triton.jit
def _key(x):
    """Integers in the order of floats; NaN becomes minus infinity, and the zeros are one."""
    x = tl.where(x == x, x, -_INF)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _in_kept_groups(key, BLOCK, WIDE, GROUPS, KEPT, GROUP_BEST):
    """Keys of experts, with that of minus infinity for those that are in none of their token's best groups."""
    group, within = tl.arange(0, GROUPS), tl.arange(0, WIDE // GROUPS)
    grouped = tl.reshape(key, (BLOCK, GROUPS, WIDE // GROUPS))
    left = grouped
    total = tl.zeros((BLOCK, GROUPS), tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        largest = tl.max(left, axis=2)
        total += _of_key(largest)
        best = tl.min(tl.where(left == largest[:, :, None], within[None, None, :], WIDE), axis=2)
        left = tl.where(within[None, None, :] == best[:, :, None], _LEAST, left)
    worth = _key(total)
    kept = tl.zeros((BLOCK, GROUPS), tl.int32)
    for _ in tl.static_range(KEPT):
        largest = tl.max(worth, axis=1)
        best = tl.min(tl.where(worth == largest[:, None], group[None, :], GROUPS), axis=1)
        hit = group[None, :] == best[:, None]
        kept = tl.where(hit, 1, kept)
        worth = tl.where(hit, _LEAST, worth)
    return tl.reshape(tl.where(kept[:, :, None] != 0, grouped, _LEAST_NUMBER), (BLOCK, WIDE))
