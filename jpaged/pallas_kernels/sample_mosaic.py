"""Drawing tokens as a Mosaic GPU kernel (Hopper): one read of the logits from memory, whatever is truncated.

A cluster of CTAs owns a row and keeps it in its shared memory, dealt out to its warpgroups by tiles:

    logits of a row    | t0 | t1 | t2 | t3 | t4 | t5 | t6 | t7 | t8 | t9 | ...      tiles of 1,024 tokens
    CTA, warpgroup      0,0  0,1  1,0  1,1  2,0  2,1  3,0  3,1  4,0  4,1            8 CTAs of 2 warpgroups

Truncation is by rejection, under noise that is fixed. The wanted token is the argmax of logit / temperature + noise
over the kept tokens N, and N is an upper set of the logits: it holds every token above any of its own. So

    S = all tokens, or any upper set known to hold N
    repeat: t = argmax over S; stop if t is in N; S = the tokens above t

ends with the very token that thresholds would give, since N stays inside S, however many rounds it takes. Whether t is
in N takes one pass: top_k counts the tokens above t, top_p sums their mass. min_p, and top_k up to 64, bound S from the
start.

top_p is a share of the mass T of what min_p and top_k keep. With top_k, T is bracketed by sums at known thresholds, and
the bracket is narrowed (four ways a pass, in the order of the floats' bit patterns) only until the decision is clear.

Sums add in a fixed order, so they grow with the set that is summed, and a row's token depends on nothing but the row.
Noise is computed where it can win: a warp leaves a tile out if no token of it comes within reach of the warp's best.

Sources: the Gumbel-max trick; rejection sampling as in FlashInfer's sorting-free sampler
(https://flashinfer.ai/2025/03/10/sampling.html), which draws anew each round. Here a token's noise stays, so that the
result does not depend on the rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from jpaged.pallas_kernels import sample_reference as reference

_LOG2E = math.log2(math.e)
_LN2 = math.log(2)
_INF = math.inf
_LARGEST = float(np.finfo(np.float32).max)
_WARPS = 4  # of a warpgroup
_SMEM_BYTES = 227 * 1024 - 1024
_RECORD_WORDS = 8  # of a warp, in an exchange
_SERIES_BELOW = 1 / 16
_LARGEST_NOISE = 33.1  # in powers of two: the least uniform number is 2^-33
_SLACK = 0.01  # of a bound on scores, far above their rounding


@dataclass(frozen=True)
class Config:
    """Shape of the kernel.

    ctas: of a cluster, which shares a row; 1, 2, 4 or 8.
    warpgroups: of a CTA.
    tile: tokens that a warpgroup handles at once, a multiple of 512.
    ahead: tiles whose loads from memory are in flight at once.
    """

    ctas: int = 8
    warpgroups: int = 2
    tile: int = 1024
    ahead: int = 5

    @property
    def records(self) -> int:
        """Of an exchange: one a warp of the cluster, a power of two."""
        return self.ctas * self.warpgroups * _WARPS

    def tiles_each(self, vocab_size: int) -> int:
        """Tiles of one warpgroup."""
        return -(-vocab_size // (self.tile * self.ctas * self.warpgroups))

    def smem_bytes(self, vocab_size: int) -> int:
        return self.warpgroups * self.tiles_each(vocab_size) * self.tile * 4 + 2 * self.records * _RECORD_WORDS * 4


def unsupported(logits: jax.Array) -> str | None:
    """Why the kernel cannot take these (already checked) logits; None if it can."""
    need = Config().smem_bytes(logits.shape[1])
    if need > _SMEM_BYTES:
        return f"a cluster cannot hold {logits.shape[1]} logits: {need} bytes a CTA, over {_SMEM_BYTES}"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# What Pallas has no word for
# ---------------------------------------------------------------------------------------------------------------------


def _const(value: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _elements(array: Any) -> list[Any]:
    """A thread's elements of an array that is held four to a register."""
    return [vector.extract(register, [], [i]) for register in array.registers.flat for i in range(4)]


def _scalar(value: Any, dtype: Any) -> Any:
    return mgpu.FragmentedArray.splat(value, (), is_signed=None if dtype == jnp.float32 else True)


def _merge(kind: str, a: list[Any], b: list[Any]) -> list[Any]:
    """Two records into one; see `_exchange`."""
    if kind == "sums":
        return [arith.addf(x, y) for x, y in zip(a, b, strict=True)]
    if kind == "highest":
        return [arith.maxnumf(x, y) for x, y in zip(a, b, strict=True)]
    larger = arith.cmpf(arith.CmpFPredicate.OGT, b[0], a[0])
    equal = arith.cmpf(arith.CmpFPredicate.OEQ, b[0], a[0])
    lower = arith.cmpi(arith.CmpIPredicate.slt, b[1], a[1])
    take = arith.ori(larger, arith.andi(equal, lower))
    return [arith.select(take, y, x) for x, y in zip(a, b, strict=True)]


def _butterfly(kind: str, record: list[Any], lanes: int) -> list[Any]:
    """Merges the records of a warp's lanes, `lanes` neighbours at a time: all of these get the result."""
    distance = lanes // 2
    while distance:
        record = _merge(kind, record, [mgpu.utils.shfl_bfly(value, distance) for value in record])
        distance //= 2
    return record


def _kth_largest(values: list[Any], k: Any) -> Any:
    """The k-th largest of the values that the lanes of a warp hold, k from 1."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    lane = arith.remui(mgpu.utils.thread_idx(), _const(32))
    ranks = [_const(0) for _ in values]
    for j in range(32):
        for n, value in enumerate(values):
            bits = nvvm.shfl_sync(_const(-1), arith.bitcast(i32, value), _const(j), _const(31), nvvm.ShflKind.idx)
            other = arith.bitcast(f32, bits)
            for m, mine in enumerate(values):
                larger = arith.cmpf(arith.CmpFPredicate.OGT, other, mine)
                equal = arith.cmpf(arith.CmpFPredicate.OEQ, other, mine)
                # Equals rank in the order of their places, so that no rank is skipped.
                earlier = arith.cmpi(arith.CmpIPredicate.sgt, lane, _const(j if m <= n else j - 1))
                ahead = arith.ori(larger, arith.andi(equal, earlier))
                ranks[m] = arith.addi(ranks[m], arith.extui(i32, ahead))
    wanted = arith.subi(k, _const(1))
    lowest = arith.constant(f32, ir.FloatAttr.get(f32, -math.inf))
    found = [
        arith.select(arith.cmpi(arith.CmpIPredicate.eq, rank, wanted), value, lowest)
        for rank, value in zip(ranks, values, strict=True)
    ]
    while len(found) > 1:
        found = [arith.maxnumf(found[0], found[1]), *found[2:]]
    return _butterfly("highest", found, 32)[0]


def _exchange(
    kind: str, arrays: Sequence[jax.Array], k: jax.Array, exchange_ref: Any, turn: jax.Array, config: Config
) -> list[jax.Array]:
    """Reduces arrays over all threads of the cluster; every thread gets the scalars.

    kind: "best", of (scores, ids, logits): those of the largest score, of the smallest id on ties.
        "sums": the sum of each array.
        "highest", of one array: its largest element, and the k-th largest of the warps' largest elements, which k
        elements at least are not below; minus infinity where there are fewer warps.
    turn: int32 []; 0 and 1 in turn. Every warp sends its record to all CTAs of the cluster, and after the cluster's
        barrier reads them all from its own. A record is overwritten two exchanges later: the one between keeps it from
        being overwritten under a slow reader.
    """
    warps = config.warpgroups * _WARPS
    records = config.records
    layout = plgpu.Layout.WG_STRIDED((config.tile,), vec_size=4)
    dtypes = [jnp.float32, jnp.float32] if kind == "highest" else [x.dtype for x in arrays]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT, *[layout] * len(arrays)),
        return_type=tuple(plgpu.ShapeDtypeStruct((), d, layout=plgpu.Layout.WG_SPLAT) for d in dtypes),
    )
    def exchange(ctx: Any, smem: Any, turn: Any, k: Any, *arrays: Any) -> tuple[Any, ...]:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        quad = ir.VectorType.get((4,), i32)
        mine = [list(record) for record in zip(*map(_elements, arrays), strict=True)]
        while len(mine) > 1:
            half = len(mine) // 2
            mine = [_merge(kind, mine[2 * i], mine[2 * i + 1]) for i in range(half)] + mine[2 * half :]
        record = _butterfly(kind, mine[0], 32)
        kinds = [value.type for value in record]
        thread = mgpu.utils.thread_idx()
        lane, warp = arith.remui(thread, _const(32)), arith.divui(thread, _const(32))
        base = mgpu.utils.memref_ptr(smem)
        first = arith.muli(turn.registers.item(), _const(records * _RECORD_WORDS))

        def address(record: Any, word: int) -> Any:
            at = arith.addi(first, arith.addi(arith.muli(record, _const(_RECORD_WORDS)), _const(word)))
            return mgpu.utils.getelementptr(base, [at], i32)

        # All lanes have the warp's record; lane c sends it to CTA c.
        words = [value if value.type == i32 else arith.bitcast(i32, value) for value in record]
        words += [_const(0)] * (-len(words) % 4)
        rank = nvvm.read_ptx_sreg_cluster_ctarank()
        place = arith.addi(arith.muli(rank, _const(warps)), warp)
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, lane, _const(config.ctas))):
            for w in range(0, len(words), 4):
                target = mgpu.utils.get_cluster_ptr(address(place, w), lane, generic=False)
                llvm.store(vector.from_elements(quad, words[w : w + 4]), target, alignment=16)
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

        lanes = min(32, records)
        loaded = []
        for nth in range(0, records, 32):
            words = []
            for w in range(0, len(kinds), 4):
                at = address(arith.addi(arith.remui(lane, _const(lanes)), _const(nth)), w)
                vec = llvm.load(quad, at, alignment=16)
                words += [vector.extract(vec, [], [i]) for i in range(4)]
            loaded.append([w if t == i32 else arith.bitcast(t, w) for w, t in zip(words, kinds, strict=False)])
        total = loaded[0]
        for other in loaded[1:]:
            total = _merge(kind, total, other)
        total = _butterfly(kind, total, lanes)
        if kind == "highest":
            f32 = ir.F32Type.get()
            lowest = arith.constant(f32, ir.FloatAttr.get(f32, -math.inf))
            held = [values[0] for values in loaded]
            if records < 32:
                held = [arith.select(arith.cmpi(arith.CmpIPredicate.slt, lane, _const(records)), held[0], lowest)]
            wanted = k.registers.item()
            some = arith.cmpi(arith.CmpIPredicate.sgt, wanted, _const(0))
            few = arith.cmpi(arith.CmpIPredicate.sle, wanted, _const(records))
            branch = scf.IfOp(arith.andi(some, few), [f32], has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_([_kth_largest(held, wanted)])
            with ir.InsertionPoint(branch.else_block):
                scf.yield_([lowest])
            total = [*total, branch.results[0]]
        return tuple(_scalar(value, dtype) for value, dtype in zip(total, dtypes, strict=True))

    return list(exchange(exchange_ref, turn, k, *arrays))


def _exchange_interpreted(
    kind: str,
    arrays: Sequence[jax.Array],
    k: jax.Array,
    exchange_ref: Any,
    turn: jax.Array,
    config: Config,
    barrier: Any,
) -> list[jax.Array]:
    """`_exchange` in words that the interpreter knows, for one CTA; records are warpgroups' instead of warps'."""
    warpgroup = lax.axis_index("warpgroup")

    def merged(columns: Sequence[jax.Array]) -> list[jax.Array]:
        if kind == "sums":
            return [jnp.sum(x) for x in columns]
        if kind == "highest":
            return [jnp.max(columns[0])]
        scores, ids, _ = columns
        winner = jnp.argmin(jnp.where(scores == jnp.max(scores), ids, jnp.iinfo(jnp.int32).max))
        return [x[winner] for x in columns]

    for i, value in enumerate(merged(arrays)):
        exchange_ref[turn, warpgroup, i] = lax.bitcast_convert_type(value, jnp.int32)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    columns = []
    for i, array in enumerate(arrays):
        words = jnp.stack([exchange_ref[turn, g, i] for g in range(config.warpgroups)])
        columns.append(lax.bitcast_convert_type(words, array.dtype))
    if kind != "highest":
        return merged(columns)
    ranked = jnp.sort(columns[0], descending=True)
    few = (k > 0) & (k <= config.warpgroups)
    return [ranked[0], jnp.where(few, ranked[jnp.clip(k - 1, 0, config.warpgroups - 1)], -_INF)]


def _leave() -> None:
    """Keeps a CTA from ending while another may still send to it."""

    @plgpu.inline_mgpu()
    def leave(ctx: Any) -> None:
        del ctx
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    leave()


def _warp_any(x: jax.Array, threshold: jax.Array, layout: Any, interpret: Any) -> jax.Array:
    """Whether any of the warp's elements is above the threshold; the interpreter asks the warpgroup's."""
    if interpret is not None:
        return jnp.any(x > threshold)

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT),
    )
    def any_above(ctx: Any, x: Any, threshold: Any) -> Any:
        del ctx
        least = threshold.registers.item()
        mine = None
        for element in _elements(x):
            above = arith.cmpf(arith.CmpFPredicate.OGT, element, least)
            mine = above if mine is None else arith.ori(mine, above)
        return mgpu.FragmentedArray.splat(nvvm.vote_sync(_const(-1), mine, "any"), (), is_signed=False)

    return any_above(x, threshold)


def _warp_max(x: jax.Array, layout: Any, interpret: Any) -> jax.Array:
    """The largest of the warp's elements; the interpreter takes the warpgroup's."""
    if interpret is not None:
        return jnp.max(x)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT),
    )
    def largest(ctx: Any, x: Any) -> Any:
        del ctx
        best, *others = _elements(x)
        for element in others:
            best = arith.maxnumf(best, element)
        return _scalar(_butterfly("highest", [best], 32)[0], jnp.float32)

    return largest(x)


def _reinterpret(x: jax.Array, dtype: Any, interpret: Any) -> jax.Array:
    """The same 32 bits of a scalar, as another dtype."""
    if interpret is not None:
        return lax.bitcast_convert_type(x, dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), dtype, layout=plgpu.Layout.WG_SPLAT),
    )
    def cast(ctx: Any, x: Any) -> Any:
        del ctx
        to = mgpu.utils.dtype_to_ir_type(dtype)
        is_signed = None if jnp.issubdtype(dtype, jnp.floating) else True
        return mgpu.FragmentedArray.splat(arith.bitcast(to, x.registers.item()), (), is_signed=is_signed)

    return cast(x)


# ---------------------------------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------------------------------


def _noise(uniform: jax.Array) -> jax.Array:
    """Gumbel noise times log2(e), from `reference.uniform`'s numbers; within 1e-5 of `reference.gumbel`'s.

    The hardware's logarithm is off by 2^-22 absolute near 1, too much for -log(1 - u) of a small u, which makes the
    largest noise: u + u^2 / 2 + u^3 / 3 + ... takes over there.
    """
    series = uniform * (1 / 6) + (1 / 5)
    for n in (4, 3, 2, 1):
        series = series * uniform + (1 / n)
    exponential = jnp.where(uniform < _SERIES_BELOW, series * uniform, jnp.log2(1.0 - uniform) * -_LN2)
    return -jnp.log2(exponential)


def _kernel(
    logits: jax.Array,
    floats: jax.Array,
    ints: jax.Array,
    keys: jax.Array,
    *,
    config: Config,
    interpret: Any,
) -> jax.Array:
    """int32 [R]. logits: float32 [R, V], V a multiple of 4 and at least a tile.

    floats: float32 [R, 4]; log2(e) / temperature, what the noise is multiplied by (0 for greedy rows), top_p, and
        log(min_p) * temperature. ints: int32 [R, 1]; top_k, 0 for all. keys: uint32 [R, 2].
    """
    rows, vocab_size = logits.shape
    tile, workers = config.tile, config.ctas * config.warpgroups
    tiles = config.tiles_each(vocab_size)
    layout = plgpu.Layout.WG_STRIDED((tile,), vec_size=4)

    def body(
        logits_ref: Any,
        floats_ref: Any,
        ints_ref: Any,
        keys_ref: Any,
        out_ref: Any,
        x_s: Any,
        exchange_s: Any,
        barrier: Any = None,
    ) -> None:
        row, cta, warpgroup = (lax.axis_index(name) for name in ("row", "cta", "warpgroup"))
        worker = cta * config.warpgroups + warpgroup
        rate, strength, top_p, min_p_offset = (floats_ref[row, i] for i in range(4))
        top_k = ints_ref[row, 0]
        k = top_k.astype(jnp.float32)  # counts are float32, exact far beyond any vocabulary
        key0, key1 = keys_ref[row, 0], keys_ref[row, 1]
        positions = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (tile,), 0), layout)

        def full(value: float, dtype: Any = jnp.float32) -> jax.Array:
            return plgpu.layout_cast(jnp.full((tile,), value, dtype), layout)

        def start_of(i: Any) -> jax.Array:
            """First token of the warpgroup's i-th tile. The row's last tile is a whole one and overlaps the one before
            it; tiles past the end are that tile again, and all their tokens are masked."""
            return jnp.minimum((i * workers + worker) * tile, vocab_size - tile)

        def exchange(kind: str, turn: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
            if interpret is None:
                return _exchange(kind, arrays, top_k, exchange_s, turn, config)
            return _exchange_interpreted(kind, arrays, top_k, exchange_s, turn, config, barrier)

        def tile_at(i: Any) -> jax.Array:
            return plgpu.load(x_s.at[warpgroup, pl.ds(i * tile, tile)], layout=layout, optimized=False)

        def warp_any(x: jax.Array, threshold: jax.Array) -> jax.Array:
            return _warp_any(x, threshold, layout, interpret)

        def warp_max(x: jax.Array) -> jax.Array:
            return _warp_max(x, layout, interpret)

        def below(x: jax.Array) -> jax.Array:
            """The next float down, so that x is above it; minus infinity stays."""
            bits = _reinterpret(x, jnp.int32, interpret)
            down = jnp.where(bits > 0, bits - 1, jnp.where(x == 0, np.int32(-0x7FFFFFFF), bits + 1))
            return jnp.where(x == -_INF, x, _reinterpret(down, jnp.float32, interpret))

        def image(x: jax.Array) -> jax.Array:
            """An int32 that is ordered as the floats are."""
            bits = _reinterpret(x, jnp.int32, interpret)
            return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))

        def of_image(image: jax.Array) -> jax.Array:
            return _reinterpret(image ^ ((image >> 31) & np.int32(0x7FFFFFFF)), jnp.float32, interpret)

        # The row comes in. Each thread reads back only what it wrote itself, so no barrier is needed.
        highest = full(-_INF)
        for group in range(0, tiles, config.ahead):
            members = range(group, min(group + config.ahead, tiles))
            loaded = [
                plgpu.load(logits_ref.at[row, pl.ds(start_of(i), tile)], layout=layout, optimized=False)
                for i in members
            ]
            for i, x in zip(members, loaded, strict=True):
                owned = positions + start_of(i) >= (i * workers + worker) * tile
                x = jnp.where(owned & (x == x), jnp.minimum(x, _LARGEST), -_INF)
                x_s[warpgroup, pl.ds(i * tile, tile)] = x
                highest = jnp.maximum(highest, x)
        top, kth_at_least = exchange("highest", jnp.int32(0), [highest])
        top = jnp.where(top == -_INF, 0.0, top)

        def draw(turn: jax.Array, above: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The token with the best score among those above a logit, and its logit; token 0 where there is none."""

            def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                x = tile_at(i)
                bound, hopeless = carry[-2:]

                def hash_tile(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    base = (x - top) * rate
                    ids = positions + start_of(i)
                    uniform = reference.uniform(ids.astype(jnp.uint32), key0, key1)

                    def score_tile(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                        best, best_id, best_x, *_ = carry
                        score = base + strength * _noise(uniform)
                        better = (x > above) & (score > best)
                        best, best_id = jnp.where(better, score, best), jnp.where(better, ids, best_id)
                        bound = warp_max(best)
                        # Nor can a token win, whatever its noise, that is further behind than any noise goes.
                        hopeless = jnp.maximum(above, below(top + (bound - _LARGEST_NOISE) / rate))
                        return best, best_id, jnp.where(better, x, best_x), bound, hopeless

                    # -log(1 - u) >= u, so that the score is at most base - log2(u).
                    could_win = warp_any(jnp.exp2(base - (bound - _SLACK)) - uniform, jnp.float32(0.0))
                    return lax.cond(could_win, score_tile, lambda carry: carry, carry)

                return lax.cond(warp_any(x, hopeless), hash_tile, lambda carry: carry, carry)

            start = (full(-_INF), full(0, jnp.int32), full(-_INF), jnp.float32(-1e30), above)
            *best, _, _ = lax.fori_loop(0, tiles, step, start)
            _, token, logit = exchange("best", turn, best)
            return token, logit

        def sums_above(turn: jax.Array, thresholds: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
            """For each threshold, how many tokens are above it, and their mass. The last threshold is the lowest."""

            def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                x = tile_at(i)

                def add(sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    mass = jnp.exp2((x - top) * rate)
                    out: list[jax.Array] = []
                    for j, threshold in enumerate(thresholds):
                        counts = jnp.where(x > threshold, 1.0, 0.0)
                        out += [sums[2 * j] + counts, sums[2 * j + 1] + counts * mass]
                    return tuple(out)

                return lax.cond(warp_any(x, thresholds[-1]), add, lambda sums: sums, sums)

            sums = lax.fori_loop(0, tiles, step, (full(0.0),) * (2 * len(thresholds)))
            results = exchange("sums", turn, sums)
            return [(results[2 * j], results[2 * j + 1]) for j in range(len(thresholds))]

        def search(
            turn: jax.Array, low: jax.Array, high: jax.Array, mass: jax.Array, least: jax.Array, most: jax.Array
        ) -> tuple[jax.Array, ...]:
            """Narrows the mass that top_k keeps until `mass` is clearly below its share top_p, or clearly not.

            The k-th largest logit is above `low` and at or below `high`.
            """

            def unclear(state: tuple[jax.Array, ...]) -> jax.Array:
                _, _, _, least, most = state
                return (mass >= top_p * least) & (mass < top_p * most)

            def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                turn, low, high, least, most = state
                gap = (high - low).astype(jnp.uint32)
                quarter = jnp.maximum(gap >> 2, jnp.uint32(1))
                pivots = [low + jnp.minimum(quarter * np.uint32(j), gap).astype(jnp.int32) for j in (3, 2, 1)]
                sums = sums_above(turn, [of_image(pivot) for pivot in pivots])
                for pivot, (count, total) in zip(pivots, sums, strict=True):
                    high = jnp.where(count < k, pivot, high)
                    least = jnp.where(count < k, jnp.maximum(least, total), least)
                for pivot, (count, total) in reversed(list(zip(pivots, sums, strict=True))):
                    low = jnp.where(count >= k, pivot, low)
                    most = jnp.where(count >= k, total, most)
                    least = jnp.where(count == k, total, least)
                least = jnp.where((high - low).astype(jnp.uint32) <= 1, most, least)
                return 1 - turn, low, high, least, most

            start: tuple[jax.Array, ...] = (turn, image(low), image(high), least, most)
            turn, low, _, least, most = lax.while_loop(unclear, narrow, start)
            return turn, of_image(low), least, most

        def check(turn: jax.Array, logit: jax.Array, floor: jax.Array, kept_mass: jax.Array) -> tuple[jax.Array, ...]:
            """Whether top_k and top_p keep a token of this logit; see `attempt` for what goes in and out."""
            weigh = (top_p < 1.0) & (kept_mass < 0)

            def sums_around() -> tuple[jax.Array, ...]:
                return tuple(x for pair in sums_above(turn, [logit, below(logit), floor]) for x in pair)

            def sums_over() -> tuple[jax.Array, ...]:
                zero = jnp.float32(0.0)
                return (*sums_above(turn, [logit])[0], zero, zero, zero, zero)

            count, mass, count_with, mass_with, count_all, mass_all = lax.cond(weigh, sums_around, sums_over)
            beyond_k = (top_k > 0) & (count >= k)
            by_p = (top_p < 1.0) & (count > 0) & ~beyond_k
            # The mass of what min_p and top_k keep: known if that is all above the floor, or all from the token up.
            all_kept = (top_k == 0) | (count_all <= k)
            ends_here = (top_k > 0) & (count_with >= k)
            most = jnp.where(all_kept | ~ends_here, mass_all, mass_with)
            least = jnp.where(all_kept, mass_all, mass_with)
            least, most = jnp.where(weigh, least, kept_mass), jnp.where(weigh, most, kept_mass)
            # Where top_p has no say there is nothing to search.
            turn, floor, least, most = search(1 - turn, floor, logit, mass, least, jnp.where(by_p, most, -1.0))
            kept = ~beyond_k & (~by_p | (mass < top_p * least))
            kept_mass = jnp.where(by_p & (least >= most), least, kept_mass)
            return turn, kept.astype(jnp.int32), jnp.where(beyond_k, logit, floor), kept_mass

        def attempt(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """A draw, and whether it is kept.

            turn: of the next exchange. kept, token: the outcome. above: the draw is among the tokens above this.
            floor: is below everything that min_p and top_k keep. kept_mass: the mass of that, -1 while unknown.
            """
            turn, _, _, above, floor, kept_mass = state
            token, logit = draw(turn, above)
            turn, kept, floor, kept_mass = lax.cond(
                (top_k > 0) | (top_p < 1.0),
                check,
                lambda turn, _, floor, kept_mass: (turn, jnp.int32(1), floor, kept_mass),
                *(1 - turn, logit, floor, kept_mass),
            )
            return turn, kept, token, logit, floor, kept_mass

        floor = jnp.maximum(below(top + min_p_offset), below(kth_at_least))
        start: tuple[jax.Array, ...] = (jnp.int32(1), jnp.int32(0), jnp.int32(0), floor, floor, jnp.float32(-1.0))
        _, _, token, *_ = lax.while_loop(lambda state: state[1] == 0, attempt, start)

        @pl.when(worker == 0)
        def _store() -> None:
            out_ref[row] = token

        if interpret is None:
            _leave()

    scratch: list[Any] = [
        plgpu.SMEM((config.warpgroups, tiles * tile), jnp.float32),
        plgpu.SMEM((2, config.records, _RECORD_WORDS), jnp.int32),
    ]
    if interpret is not None:
        scratch.append(plgpu.Barrier(num_arrivals=config.warpgroups))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        scratch_types=scratch,
        grid=(rows,),
        grid_names=("row",),
        cluster=(config.ctas,),
        cluster_names=("cta",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            # Each thread reads back only what it wrote itself, and exchanges have the cluster's barrier.
            unsafe_no_auto_barriers=True,
            # Inferring the layouts, which are all given, would take 1.1 of 1.4 seconds of lowering.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="sample_tokens",
        **({} if interpret is None else {"interpret": interpret}),
    )(logits, floats, ints, keys)


@partial(jax.jit, static_argnames=("config", "interpret"))
def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
    min_p: jax.Array | None,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`sample_tokens` of the package, checked. interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU."""
    rows, vocab_size = logits.shape
    if config is None:
        config = Config()
    greedy = temperature <= 0
    temperature = jnp.where(greedy, 1.0, temperature)
    top_k = jnp.zeros(rows, jnp.int32) if top_k is None else jnp.maximum(top_k, 0)
    top_p = jnp.ones(rows, jnp.float32) if top_p is None else top_p
    min_p = jnp.zeros(rows, jnp.float32) if min_p is None else min_p
    floats = [
        _LOG2E / temperature,
        jnp.where(greedy, 0.0, 1.0),
        jnp.where(greedy, 1.0, top_p),
        jnp.where(greedy, -_INF, jnp.log(min_p) * temperature),
    ]
    top_k = jnp.where(greedy | (top_k >= vocab_size), 0, top_k)
    # Loads are of 16 bytes, and the last tile is a whole one.
    padding = max(-vocab_size % 4, config.tile - vocab_size)
    if padding > 0:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-_INF)
    return _kernel(
        logits,
        jnp.stack(floats, axis=1).astype(jnp.float32),
        top_k[:, None],
        jnp.stack(reference.row_keys(seeds, positions), axis=1),
        config=config,
        interpret=interpret,
    )
