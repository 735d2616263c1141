"""What the kernels of `triton.py` and `triton_share.py` do with a row of logits: noise, thresholds, and passes over
listed groups of tokens."""

import math

import triton
import triton.language as tl

_INF: tl.constexpr = tl.constexpr(math.inf)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_LN2: tl.constexpr = tl.constexpr(math.log(2))
_NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def load_numbers(numbers, row):
    """A row of `triton.numbers_of`: rate, strength, top_p, offset of min_p, top_k, and the key's words."""
    numbers += row * 7
    rate, strength = tl.load(numbers).to(tl.float32, bitcast=True), tl.load(numbers + 1).to(tl.float32, bitcast=True)
    share, offset = tl.load(numbers + 2).to(tl.float32, bitcast=True), tl.load(numbers + 3).to(tl.float32, bitcast=True)
    key0, key1 = tl.load(numbers + 5).to(tl.uint32, bitcast=True), tl.load(numbers + 6).to(tl.uint32, bitcast=True)
    return rate, strength, share, offset, tl.load(numbers + 4), key0, key1


@triton.jit
def without_nan(x):
    """NaN becomes minus infinity and plus infinity the largest float."""
    return tl.where(x == x, tl.minimum(x, _LARGEST), -_INF)


@triton.jit
def uniform(ids, key0, key1):
    """`noise.uniform`."""
    bits = _mix(_mix(ids.to(tl.uint32) * 0x9E3779B9 + key0) ^ key1)
    return tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(uniform):
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
def winners(logits, at, exists, top, rate, strength, key0, key1):
    """The best token of each part, its logit and its score. at, exists: [PARTS, QUARTERS], the best of quarters. Parts
    without any: the largest id, minus infinity."""
    x = tl.where(exists, without_nan(tl.load(logits + at)), -_INF)
    score = tl.where(exists, (x - top) * rate + strength * gumbel(uniform(at, key0, key1)), -_INF)
    best = tl.max(score, axis=1)
    token = tl.min(tl.where(exists & (score == best[:, None]), at, _NO_TOKEN), axis=1)
    return token, tl.max(tl.where(at == token[:, None], x, -_INF), axis=1), best


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
def below(x):
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
def _narrowed(low, high, found, enough, of_first, of_second, of_third, first, second, third):
    """The bracket (low, high) of the largest number above which there is enough, and how much there is above low, after
    a look at three pivots.

    found, enough, of_first, of_second, of_third: counts or masses; the latter three of what is above each pivot.
    """
    high = tl.where(of_third < enough, third, high)
    high = tl.where(of_second < enough, second, high)
    high = tl.where(of_first < enough, first, high)
    low, found = tl.where(of_first >= enough, first, low), tl.where(of_first >= enough, of_first, found)
    low, found = tl.where(of_second >= enough, second, low), tl.where(of_second >= enough, of_second, found)
    low, found = tl.where(of_third >= enough, third, low), tl.where(of_third >= enough, of_third, found)
    return low, high, found


@triton.jit
def _narrowed_by_counts(low, high, count, k, counts, first, second, third):
    """`_narrowed` to the k-th largest number. counts: of `_packed_counts`, summed."""
    of_first, of_second, of_third = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
    return _narrowed(low, high, count, k, of_first, of_second, of_third, first, second, third)


@triton.jit
def _packed_counts(x, first, second, third):
    """Whether each of x is above each of three images, 20 bits each, the first image's lowest: int64, of x's shape."""
    ones = (x > _of_image(first)).to(tl.int64) + ((x > _of_image(second)).to(tl.int64) << 20)
    return ones + ((x > _of_image(third)).to(tl.int64) << 40)


@triton.jit
def floor_of(x, floor, top, k, most):
    """A number not below `floor` that at least k of x exceed; `floor` where fewer than k do.

    x: float32 [N]. top: not below the largest of x. most: at most so many of x exceed the result, but for ties.
    """
    low, high = _image(floor).to(tl.int64), _image(top).to(tl.int64)
    count = tl.full((), 0x7FFFFFFF, tl.int64)
    while (high - low > 1) & (count > most):
        first, second, third = _pivots(low, high)
        counts = tl.sum(_packed_counts(x, first, second, third), axis=0)
        low, high, count = _narrowed_by_counts(low, high, count, k, counts, first, second, third)
    return _of_image(low)


@triton.jit
def floor_of_share(highest, top, rate, wanted):
    """A number above which the groups' largest logits alone have the wanted mass, so that top_p keeps no token that is
    not above it; minus infinity where they have not.

    highest: float32 [N]. top: their largest. wanted: in units of the mass of `top`.
    """
    mass = tl.exp2((highest - top) * rate)
    enough = wanted * 1.0001  # far beyond the rounding of sums
    low, high = top - 40 / rate, top  # what is below weighs nothing
    found = tl.sum(tl.where(highest > low, mass, 0.0), axis=0)
    turns = 0
    while (turns < 12) & (found > enough * 1.05):
        quarter = (high - low) / 4
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        of_first = tl.sum(tl.where(highest > first, mass, 0.0), axis=0)
        of_second = tl.sum(tl.where(highest > second, mass, 0.0), axis=0)
        of_third = tl.sum(tl.where(highest > third, mass, 0.0), axis=0)
        low, high, found = _narrowed(low, high, found, enough, of_first, of_second, of_third, first, second, third)
        turns += 1
    return tl.where(found >= enough, low, -_INF)


@triton.jit
def floor_of_tokens(logits, listed, count, floor, top, k, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr):
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
        low, high, found = _narrowed_by_counts(low, high, found, k, tl.sum(counts), first, second, third)
    return _of_image(low)


@triton.jit
def list_groups(highest, listed, floor):
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
    return without_nan(x), at


@triton.jit
def list_tokens(
    logits, listed, count, floor, few, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr, ROOM: tl.constexpr
):
    """Lists the tokens above the floor, all of which are in listed groups, in `few`. Returns how many they are, or a
    number above ROOM if there is no room for all."""
    i = 0
    held = 0
    while (i < count) & (held <= ROOM):
        x, at = _load_groups(logits, listed, count, i, VOCAB, GROUP, PASS)
        has = tl.reshape((x > floor).to(tl.int32), (PASS * GROUP,))
        place = held + tl.cumsum(has, axis=0) - has
        tl.store(few + place, tl.reshape(at, (PASS * GROUP,)), mask=(has != 0) & (place < ROOM))
        held += tl.sum(has, axis=0)
        i += PASS
    tl.debug_barrier()  # all see the list
    return held


@triton.jit
def load_tokens(logits, few, held, ROOM: tl.constexpr):
    """Logits and ids of the listed tokens: [ROOM]; minus infinity where there is none."""
    place = tl.arange(0, ROOM)
    at = tl.load(few + place, mask=place < held, other=0)
    return without_nan(tl.load(logits + at, mask=place < held, other=-_INF)), at


@triton.jit
def keep_share(x, at, token, logit, wanted, top, rate, key0, key1):
    """The given token if the mass above its logit is less than `wanted`; else the best token above it of which this
    holds.

    x, at: of the tokens above the logit, and perhaps others. wanted: in units of the largest logit, `top`.
    """
    mass = tl.exp2((x - top) * rate)
    score = (x - top) * rate + gumbel(uniform(at, key0, key1))
    above = tl.sum(tl.where(x > logit, mass, 0.0), axis=0)
    while (above > 0) & (above >= wanted):
        token, logit = best_above(x, at, score, logit)
        above = tl.sum(tl.where(x > logit, mass, 0.0), axis=0)
    return token


@triton.jit
def best_above(x, at, score, floor):
    """The token with the best score among those above the floor, and its logit."""
    score = tl.where(x > floor, score, -_INF)
    token = tl.min(tl.where(score == tl.max(score, axis=0), at, _NO_TOKEN), axis=0)
    return token, tl.max(tl.where((at == token) & (x > floor), x, -_INF), axis=0)


@triton.jit
def mass_above(logits, listed, count, floor, top, rate, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr):
    """The mass of the tokens above the floor, all of which are in listed groups."""
    masses = tl.zeros((PASS, GROUP), tl.float32)
    for i in range(0, count, PASS):
        x, _ = _load_groups(logits, listed, count, i, VOCAB, GROUP, PASS)
        masses += tl.where(x > floor, tl.exp2((x - top) * rate), 0.0)
    return tl.sum(masses)


@triton.jit
def draw(
    logits, listed, count, floor, top, rate, key0, key1, VOCAB: tl.constexpr, GROUP: tl.constexpr, PASS: tl.constexpr
):
    """The token with the best score among those above the floor, all of which are in listed groups."""
    best = tl.full((PASS, GROUP), -_INF, tl.float32)
    token = tl.zeros((PASS, GROUP), tl.int32)
    for i in range(0, count, PASS):
        x, at = _load_groups(logits, listed, count, i, VOCAB, GROUP, PASS)
        score = tl.where(x > floor, (x - top) * rate + gumbel(uniform(at, key0, key1)), -_INF)
        token = tl.where(score > best, at, token)
        best = tl.maximum(best, score)
    return tl.min(tl.where(best == tl.max(best), token, _NO_TOKEN))
