"""Drawing tokens as two Triton kernels: one read of the logits, and few reads of few of them where they are truncated.

    logits of a row   | group | group | ..     64 tokens each
    _scan             a warp a part of 4,096 tokens: its best token, its mass, and the largest logit of each group
    _choose           a CTA a row: the best of the parts; where the row is truncated, the search below

The wanted token is the argmax of logit / temperature + noise over the kept tokens, and a token's noise is fixed. The
kept tokens are an upper set of the logits, so truncation is by rejection, as in `hopper.py`:

    floor = below all that min_p and top_k keep
    repeat: t = the best token of those above the floor; stop if top_p keeps t; floor = the logit of t

top_p keeps t if the mass above t is less than its share. The k-th largest of the groups' largest logits is not above
the k-th largest logit, so the search for that, by its bits, reads about k groups. Every pass reads only the groups that
have a logit above its floor: `_choose` lists them.

Noise is computed where it can win: a warp leaves a tile out if no token of it comes within reach of its best.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.sample_tokens import noise
from jpaged.pallas_kernels.sample_tokens.operands import Operands, row_numbers

_GROUP = 64
_TILE = 1024  # tokens that a warp of `_scan` handles at once
_PART = 4096
_PASS_GROUPS = 64  # that a CTA of `_choose` handles at once; 16 tokens a thread
_UNALIGNED_PASS_GROUPS = 32  # the same where rows do not begin at multiples of 16 bytes, which takes more registers
_MOST_GROUPS = 16384

_INF: tl.constexpr = tl.constexpr(math.inf)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_LEAST_SCORE: tl.constexpr = tl.constexpr(-1e30)
_LARGEST_NOISE: tl.constexpr = tl.constexpr(33.1)  # in powers of two: the least uniform number is 2^-33
_SLACK: tl.constexpr = tl.constexpr(0.01)  # of a bound on scores, far above their rounding
_LN2: tl.constexpr = tl.constexpr(math.log(2))
_NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)


def unsupported(logits: jax.Array) -> str | None:
    """Why the kernels cannot take these (already checked) logits; None if they can."""
    if logits.shape[1] > _GROUP * _MOST_GROUPS:
        return f"a CTA cannot hold the groups of {logits.shape[1]} logits: more than {_GROUP * _MOST_GROUPS}"
    return None


@jax.jit
def sample_tokens(operands: Operands) -> jax.Array:
    """`sample_tokens` of the package, checked."""
    logits = operands.logits
    rows, vocab_size = logits.shape
    floats, top_k = row_numbers(operands)
    keys = jnp.stack(noise.row_keys(operands.seeds, operands.positions), axis=1)
    truncates = any(x is not None for x in (operands.top_k, operands.top_p, operands.min_p))
    parts, groups = triton.cdiv(vocab_size, _PART), triton.cdiv(vocab_size, _GROUP)
    sizes = {"VOCAB": vocab_size, "PARTS": parts, "GROUPS": groups, "GROUP": _GROUP, "TRUNCATES": truncates}

    def shape(columns: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), dtype)

    found = call(
        _scan,
        Launch((rows, parts), warps=1),
        logits,
        floats,
        keys,
        out=[
            shape(parts, jnp.float32),
            shape(parts, jnp.int32),
            shape(parts, jnp.float32),
            shape(groups if truncates else 1, jnp.float32),
        ],
        **sizes,
        TILE=_TILE,
        TILES=_PART // _TILE,
    )
    tokens, _ = call(
        _choose,
        Launch((rows,), warps=8),
        logits,
        floats,
        top_k,
        keys,
        *found,
        out=[jax.ShapeDtypeStruct((rows,), jnp.int32), shape(groups if truncates else 1, jnp.int32)],
        **sizes,
        ALL_PARTS=triton.next_power_of_2(parts),
        ALL_GROUPS=triton.next_power_of_2(groups),
        PASS=_UNALIGNED_PASS_GROUPS if vocab_size % 4 else _PASS_GROUPS,
    )
    return tokens


@triton.jit
def _scan(
    logits,
    floats,
    keys,
    tops,
    ids,
    masses,
    maxima,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TRUNCATES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of a part
):
    """Of a part of a row: its largest logit, its best token, its mass in units of the largest, and its groups' maxima.

    logits: float32 [R, VOCAB]. floats: float32 [R, 4], of `row_numbers`. keys: uint32 [R, 2]. tops, masses: float32
    [R, PARTS]. ids: int32 [R, PARTS]. maxima: float32 [R, GROUPS]. Masses of rows with top_p alone; maxima where
    TRUNCATES.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    rate = tl.load(floats + row * 4)
    strength = tl.load(floats + row * 4 + 1)
    share = tl.load(floats + row * 4 + 2)
    key0 = tl.load(keys + row * 2)
    key1 = tl.load(keys + row * 2 + 1)
    top = -_INF
    best = _LEAST_SCORE
    token = 0
    mass = 0.0
    for i in range(TILES):
        first = (part * TILES + i) * TILE
        at = first + tl.arange(0, TILE)
        x = _without_nan(tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=-_INF))
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
            if share < 1:
                mass = mass * tl.exp2((top - higher) * rate) + tl.sum(tl.exp2(base), axis=0)
            if (new - higher) * rate + _LARGEST_NOISE * strength > best:
                uniform = _uniform(at, key0, key1)
                # -log(1 - u) >= u, so that a score is at most base - log2(u).
                if tl.max(tl.exp2(base - (best - _SLACK)) - uniform, axis=0) > 0:
                    score = base + strength * _noise(uniform)
                    winner = tl.max(score, axis=0)
                    if winner > best:
                        best = winner
                        token = tl.min(tl.where(score == winner, at, _NO_TOKEN), axis=0)
            top = higher
    tl.store(tops + row * PARTS + part, top)
    tl.store(ids + row * PARTS + part, token)
    tl.store(masses + row * PARTS + part, mass)


@triton.jit
def _choose(
    logits,
    floats,
    top_k,
    keys,
    tops,
    ids,
    masses,
    maxima,
    tokens,
    listed,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TRUNCATES: tl.constexpr,
    ALL_PARTS: tl.constexpr,  # rounded up to a power of two, as ALL_GROUPS
    ALL_GROUPS: tl.constexpr,
    PASS: tl.constexpr,  # groups
):
    """The token of a row, from what `_scan` found. top_k: int32 [R], 0 for all. tokens: int32 [R]. listed: int32 [R,
    GROUPS], scratch."""
    row = tl.program_id(0).to(tl.int64)
    rate = tl.load(floats + row * 4)
    strength = tl.load(floats + row * 4 + 1)
    key0 = tl.load(keys + row * 2)
    key1 = tl.load(keys + row * 2 + 1)
    logits += row * VOCAB

    part = tl.arange(0, ALL_PARTS)
    exists = part < PARTS
    part_top = tl.load(tops + row * PARTS + part, mask=exists, other=-_INF)
    at = tl.load(ids + row * PARTS + part, mask=exists, other=0)
    top = tl.max(part_top, axis=0)
    top = tl.where(top == -_INF, 0.0, top)
    x = _without_nan(tl.load(logits + at))
    score = (x - top) * rate + strength * _noise(_uniform(at, key0, key1))
    score = tl.where(exists, score, -_INF)
    token = tl.min(tl.where(exists & (score == tl.max(score, axis=0)), at, _NO_TOKEN), axis=0)

    if TRUNCATES:
        share = tl.load(floats + row * 4 + 2)
        offset = tl.load(floats + row * 4 + 3)
        k = tl.load(top_k + row)
        if (k > 0) | (share < 1) | (offset > -_INF):
            listed += row * GROUPS
            group = tl.arange(0, ALL_GROUPS)
            highest = tl.load(maxima + row * GROUPS + group, mask=group < GROUPS, other=-_INF)
            logit = _without_nan(tl.load(logits + token))
            floor = _below(tl.minimum(top + offset, top))
            if k > 0:
                floor = tl.maximum(floor, _floor_of_groups(highest, top, k))
                count = _list_groups(highest, listed, floor)
                floor = _floor_of_tokens(logits, listed, count, floor, top, k, VOCAB, GROUP, PASS)
            if logit <= floor:
                count = _list_groups(highest, listed, floor)
                token = _draw(logits, listed, count, floor, top, rate, key0, key1, VOCAB, GROUP, PASS)
                logit = _without_nan(tl.load(logits + token))
            if share < 1:
                mass = tl.load(masses + row * PARTS + part, mask=exists, other=0.0)
                total = tl.sum(mass * tl.exp2((part_top - top) * rate), axis=0)
                if floor > -_INF:
                    count = _list_groups(highest, listed, floor)
                    total = _mass_above(logits, listed, count, floor, top, rate, VOCAB, GROUP, PASS)
                count = _list_groups(highest, listed, logit)
                above = _mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
                while (above > 0) & (above >= share * total):
                    token = _draw(logits, listed, count, logit, top, rate, key0, key1, VOCAB, GROUP, PASS)
                    logit = _without_nan(tl.load(logits + token))
                    count = _list_groups(highest, listed, logit)
                    above = _mass_above(logits, listed, count, logit, top, rate, VOCAB, GROUP, PASS)
    tl.store(tokens + row, token)


@triton.jit
def _without_nan(x):
    """NaN becomes minus infinity and plus infinity the largest float."""
    return tl.where(x == x, tl.minimum(x, _LARGEST), -_INF)


@triton.jit
def _uniform(ids, key0, key1):
    """`noise.uniform`."""
    bits = _mix(_mix(ids.to(tl.uint32) * 0x9E3779B9 + key0) ^ key1)
    return tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(uniform):
    """Gumbel noise times log2(e), from `noise.uniform`'s numbers; within 1e-5 of `noise.gumbel`'s.

    The hardware's logarithm is off by 2^-22 absolute near 1, too much for -log(1 - u) of a small u, which makes the
    largest noise: u + u^2 / 2 + u^3 / 3 + ... takes over there.
    """
    series = uniform * (1 / 6) + (1 / 5)
    series = series * uniform + (1 / 4)
    series = series * uniform + (1 / 3)
    series = series * uniform + (1 / 2)
    series = series * uniform + 1
    return -tl.log2(tl.where(uniform < 1 / 16, series * uniform, tl.log2(1.0 - uniform) * -_LN2))


@triton.jit
def _image(x):
    """An int32 that is ordered as the floats are."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_image(image):
    image = image.to(tl.int32)
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _below(x):
    """The next number down, so that x is above it, zero above all negative ones; minus infinity stays."""
    down = _image(tl.where(x == 0, -0.0, x)) - 1
    return tl.where(x == -_INF, x, _of_image(down))


@triton.jit
def _pivots(low, high):
    """Three images between two, int64, that cut the gap in four; equal ones where it is narrow."""
    gap = high - low
    quarter = tl.maximum(gap >> 2, 1)
    return low + quarter, low + tl.minimum(2 * quarter, gap), low + tl.minimum(3 * quarter, gap)


@triton.jit
def _narrowed(low, high, count, k, counts, first, second, third):
    """The bracket (low, high) of the k-th largest number, and how many are above low, after a look at three pivots.

    counts: of the numbers above each of them, packed 20 bits each, the first pivot's lowest.
    """
    of_first, of_second, of_third = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
    high = tl.where(of_third < k, third, high)
    high = tl.where(of_second < k, second, high)
    high = tl.where(of_first < k, first, high)
    low, count = tl.where(of_first >= k, first, low), tl.where(of_first >= k, of_first, count)
    low, count = tl.where(of_second >= k, second, low), tl.where(of_second >= k, of_second, count)
    low, count = tl.where(of_third >= k, third, low), tl.where(of_third >= k, of_third, count)
    return low, high, count


@triton.jit
def _packed_counts(x, first, second, third):
    """How many of x are above each of three images, packed as `_narrowed` takes them: int64, of x's shape."""
    ones = (x > _of_image(first)).to(tl.int64) + ((x > _of_image(second)).to(tl.int64) << 20)
    return ones + ((x > _of_image(third)).to(tl.int64) << 40)


@triton.jit
def _floor_of_groups(highest, top, k):
    """A logit that at least k, and not many more, of the groups exceed; minus infinity where fewer do."""
    low = _image(tl.full((), -_INF, tl.float32)).to(tl.int64)
    high = _image(top).to(tl.int64)
    count = tl.full((), 0x7FFFFFFF, tl.int64)
    while (high - low > 1) & (count > k + k // 4):
        first, second, third = _pivots(low, high)
        counts = tl.sum(_packed_counts(highest, first, second, third), axis=0)
        low, high, count = _narrowed(low, high, count, k, counts, first, second, third)
    return _of_image(low)


@triton.jit
def _floor_of_tokens(
    logits, listed, count, floor, top, k, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr
):
    """The logit above which are the k largest, and those tied with the last of them. At least k are above `floor`, if
    there are as many."""
    low, high = _image(floor).to(tl.int64), _image(top).to(tl.int64)
    found = tl.full((), -1, tl.int64)
    while (high - low > 1) & (found != k):
        first, second, third = _pivots(low, high)
        counts = tl.zeros((PASS, GROUP), tl.int64)
        for i in range(0, count, PASS):
            x, _ = _load_groups(logits, listed, count, i, VOCAB, GROUP, PASS)
            counts += _packed_counts(x, first, second, third)
        low, high, found = _narrowed(low, high, found, k, tl.sum(counts), first, second, third)
    return _of_image(low)


@triton.jit
def _list_groups(highest, listed, floor):
    """Lists the groups that have a logit above the floor. Returns how many they are."""
    has = (highest > floor).to(tl.int32)
    tl.debug_barrier()  # all have read the list before
    tl.store(listed + tl.cumsum(has, axis=0) - has, tl.arange(0, highest.shape[0]), mask=has != 0)
    tl.debug_barrier()  # all see this one
    return tl.sum(has, axis=0)


@triton.jit
def _load_groups(logits, listed, count, i, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr):
    """Logits and token ids of the listed groups from the i-th on: [PASS, GROUP]; minus infinity where there is none."""
    place = i + tl.arange(0, PASS)
    group = tl.load(listed + place, mask=place < count, other=0)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + at, mask=(place < count)[:, None] & (at < VOCAB), other=-_INF)
    return _without_nan(x), at


@triton.jit
def _mass_above(logits, listed, count, floor, top, rate, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr):
    """The mass of the tokens above the floor, all of which are in listed groups."""
    masses = tl.zeros((PASS, GROUP), tl.float32)
    for i in range(0, count, PASS):
        x, _ = _load_groups(logits, listed, count, i, VOCAB, GROUP, PASS)
        masses += tl.where(x > floor, tl.exp2((x - top) * rate), 0.0)
    return tl.sum(masses)


@triton.jit
def _draw(
    logits, listed, count, floor, top, rate, key0, key1, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr
):
    """The token with the best score among those above the floor, all of which are in listed groups."""
    best = tl.full((PASS, GROUP), -_INF, tl.float32)
    token = tl.zeros((PASS, GROUP), tl.int32)
    for i in range(0, count, PASS):
        x, at = _load_groups(logits, listed, count, i, VOCAB, GROUP, PASS)
        score = tl.where(x > floor, (x - top) * rate + _noise(_uniform(at, key0, key1)), -_INF)
        token = tl.where(score > best, at, token)
        best = tl.maximum(best, score)
    return tl.min(tl.where(best == tl.max(best), token, _NO_TOKEN))
