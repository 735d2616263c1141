"""Drawing tokens as a Mosaic GPU kernel (Hopper): one read of the logits from memory, whatever is truncated.

A cluster of CTAs owns a row and keeps it in its shared memory, a slice a warpgroup, strided by tiles:

    logits of a row   | t0 | t1 | t2 | ... | t15 | t16 | t17 | ...        tiles of 1,024 tokens
    warpgroup (CTA)     0(0) 1(0) 2(1)       15(7) 0(0)  1(0)             8 CTAs of 2 warpgroups

Truncation is by rejection, under noise that is fixed. The wanted token is the argmax of logit / temperature + noise
over the kept tokens N, and N is an upper set of the logits: it holds every token above any of its own. So

    S = all tokens (or any upper set known to hold N)
    repeat: t = argmax over S; stop if t is in N; S = the tokens above t

ends with the very token that thresholds would give, since N stays inside S. Whether t is in N takes one pass: top_k
counts the tokens above t, top_p sums their mass. A round rejects with at most the probability that top_p and top_k cut
off, and each rejection leaves about half of S. All passes but the first read shared memory.

top_p is a share of the mass T of what min_p and top_k keep. With top_k, T is bracketed by sums at known thresholds, and
the bracket is narrowed (four ways a pass, in the order of the floats' bit patterns) only until the decision is clear.

Sums add in a fixed order, so they grow with the set that is summed, and a row's token depends on nothing but the row.

Sources: the Gumbel-max trick; dual-pivot rejection sampling as in FlashInfer's sorting-free sampler
(https://flashinfer.ai/2025/03/10/sampling.html), here with the noise of a token fixed, so that the result does not
depend on the number of rounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jpaged.pallas_kernels import sample_reference as reference

_LOG2E = math.log2(math.e)
_LN2 = math.log(2)
_INF = np.float32(np.inf)
_LARGEST = np.finfo(np.float32).max
_WARPS = 4  # of a warpgroup
_SMEM_BYTES = 227 * 1024 - 1024
_FIELDS = 8  # words of a warp's record in an exchange
_SERIES_BELOW = 1 / 16


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

    def tiles_each(self, vocab_size: int) -> int:
        """Tiles of one warpgroup."""
        return -(-vocab_size // (self.tile * self.ctas * self.warpgroups))

    def smem_bytes(self, vocab_size: int) -> int:
        return self.warpgroups * (self.tiles_each(vocab_size) * self.tile + 2 * _WARPS * _FIELDS) * 4


def unsupported(logits: jax.Array) -> str | None:
    """Why the kernel cannot take these (already checked) logits; None if it can."""
    need = Config().smem_bytes(logits.shape[1])
    if need > _SMEM_BYTES:
        return f"a cluster cannot hold {logits.shape[1]} logits: {need} bytes a CTA, over {_SMEM_BYTES}"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# What Pallas has no word for
# ---------------------------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """One result of an exchange: `op` reduces a warp's elements, `across` the warps' results. "argmax" goes with the
    field behind it, which holds ids: the smallest id of those with the largest value."""

    values: jax.Array
    op: str
    across: str


def _reduce_pairs(op: str, a: Any, b: Any, is_float: bool) -> Any:
    if op == "add":
        return arith.addf(a, b) if is_float else arith.addi(a, b)
    if op == "max":
        return arith.maxnumf(a, b) if is_float else arith.maxsi(a, b)
    return arith.minnumf(a, b) if is_float else arith.minsi(a, b)


def _better(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """The larger of two (value, id) pairs, the lower id on ties."""
    larger = arith.cmpf(arith.CmpFPredicate.OGT, b[0], a[0])
    equal = arith.cmpf(arith.CmpFPredicate.OEQ, b[0], a[0])
    lower = arith.cmpi(arith.CmpIPredicate.slt, b[1], a[1])
    take = arith.ori(larger, arith.andi(equal, lower))
    return arith.select(take, b[0], a[0]), arith.select(take, b[1], a[1])


def _merge(ops: Sequence[str], floats: Sequence[bool], a: list[Any], b: list[Any]) -> list[Any]:
    """Two records (one value a field) into one."""
    out: list[Any] = []
    for i, op in enumerate(ops):
        if op == "argmax":
            out += _better((a[i], a[i + 1]), (b[i], b[i + 1]))
        elif op != "id":
            out.append(_reduce_pairs(op, a[i], b[i], floats[i]))
    return out


def _const(value: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _exchange(fields: Sequence[_Field], exchange_ref: Any, turn: jax.Array, config: Config) -> list[jax.Array]:
    """Reduces the fields over all threads of the cluster; every thread gets the scalars.

    Every warp leaves a record in its CTA's shared memory, and after the cluster's barrier every warp reads all records.
    turn: int32 []; 0 and 1 in turn. A record is overwritten two exchanges later: the one between keeps it from being
    overwritten under a slow reader.
    """
    warps = config.warpgroups * _WARPS
    records = warps * config.ctas
    ops, across = [f.op for f in fields], [f.across for f in fields]
    floats = [jnp.issubdtype(f.values.dtype, jnp.floating) for f in fields]
    layout = plgpu.Layout.WG_STRIDED((config.tile,), vec_size=4)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, *[layout] * len(fields)),
        return_type=tuple(plgpu.ShapeDtypeStruct((), f.values.dtype, layout=plgpu.Layout.WG_SPLAT) for f in fields),
    )
    def exchange(ctx: Any, smem: Any, turn: Any, *arrays: Any) -> tuple[Any, ...]:
        del ctx
        elements = []
        for array in arrays:
            flat = []
            for register in array.registers.flat:
                flat += [vector.extract(register, [], [i]) for i in range(4)]
            elements.append(flat)
        mine = [list(record) for record in zip(*elements, strict=True)]
        while len(mine) > 1:
            half = len(mine) // 2
            merged = [_merge(ops, floats, mine[2 * i], mine[2 * i + 1]) for i in range(half)]
            mine = merged + mine[2 * half :]
        record = mine[0]
        kinds = [value.type for value in record]

        def butterfly(record: list[Any], ops: Sequence[str], lanes: int) -> list[Any]:
            distance = lanes // 2
            while distance:
                other = [mgpu.utils.shfl_bfly(value, distance) for value in record]
                # Both partners must agree, and which of two equal zeros comes first must not depend on the lane.
                record = _merge(ops, floats, record, other)
                distance //= 2
            return record

        record = butterfly(record, ops, 32)
        thread = mgpu.utils.thread_idx()
        lane, warp = arith.remui(thread, _const(32)), arith.divui(thread, _const(32))
        base = mgpu.utils.memref_ptr(smem)
        now = arith.muli(turn.registers.item(), _const(warps * _FIELDS))
        i32 = ir.IntegerType.get_signless(32)

        def address(warp: Any, field: int) -> Any:
            at = arith.addi(now, arith.addi(arith.muli(warp, _const(_FIELDS)), _const(field)))
            return mgpu.utils.getelementptr(base, [at], i32)

        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, _const(0))):
            for i, value in enumerate(record):
                llvm.store(value, address(warp, i))
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

        lanes = min(32, records)
        total: list[Any] | None = None
        for first in range(0, records, 32):
            nth = arith.addi(arith.remui(lane, _const(lanes)), _const(first))
            peer, warp = arith.divui(nth, _const(warps)), arith.remui(nth, _const(warps))
            loaded = []
            for i, kind in enumerate(kinds):
                pointer = mgpu.utils.get_cluster_ptr(address(warp, i), peer, generic=False)
                loaded.append(llvm.load(kind, pointer))
            total = loaded if total is None else _merge(across, floats, total, loaded)
        assert total is not None
        total = butterfly(total, across, lanes)
        return tuple(
            mgpu.FragmentedArray.splat(value, (), is_signed=None if is_float else True)
            for value, is_float in zip(total, floats, strict=True)
        )

    return list(exchange(exchange_ref, turn, *[f.values for f in fields]))


def _leave() -> None:
    """Keeps a CTA's shared memory alive until all of its cluster have read it."""

    @plgpu.inline_mgpu()
    def leave(ctx: Any) -> None:
        del ctx
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    leave()


def _exchange_interpreted(
    fields: Sequence[_Field], exchange_ref: Any, turn: jax.Array, config: Config, barrier: Any
) -> list[jax.Array]:
    """`_exchange` in words that the interpreter knows, for one CTA; records are warpgroups' instead of warps'."""
    ops: dict[str, Callable[..., jax.Array]] = {"add": jnp.sum, "max": jnp.max, "min": jnp.min}
    warpgroup = lax.axis_index("warpgroup")

    def reduced(columns: list[jax.Array], names: list[str]) -> list[jax.Array]:
        out = []
        for i, name in enumerate(names):
            if name == "argmax":
                best = jnp.max(columns[i])
                worst_id = jnp.iinfo(jnp.int32).max
                out += [best, jnp.min(jnp.where(columns[i] == best, columns[i + 1], worst_id))]
            elif name != "id":
                out.append(ops[name](columns[i]))
        return out

    for i, value in enumerate(reduced([f.values for f in fields], [f.op for f in fields])):
        exchange_ref[turn, warpgroup, i] = lax.bitcast_convert_type(value, jnp.int32)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    columns = []
    for i, field in enumerate(fields):
        words = jnp.stack([exchange_ref[turn, g, i] for g in range(config.warpgroups)])
        columns.append(lax.bitcast_convert_type(words, field.values.dtype))
    return reduced(columns, [f.across for f in fields])


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


def _noise(ids: jax.Array, key0: jax.Array, key1: jax.Array) -> jax.Array:
    """`reference.gumbel` times log2(e), of uint32 ids. The bits are the same; the logarithms are the hardware's.

    Their relative error is 2^-22 save near 1, where 1 - u rounds and the error is absolute: a series takes over there.
    """
    uniform = reference.uniform(ids, key0, key1)
    # -log(1 - u) = u + u^2 / 2 + u^3 / 3 + ...
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
    truncates: bool,
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
        key0, key1 = keys_ref[row, 0], keys_ref[row, 1]
        positions = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (tile,), 0), layout)

        def full(value: float, dtype: Any = jnp.float32) -> jax.Array:
            return plgpu.layout_cast(jnp.full((tile,), value, dtype), layout)

        def start_of(i: Any) -> jax.Array:
            """First token of the warpgroup's i-th tile. The row's last tile is a whole one and overlaps the one before
            it; tiles past the end are that tile again, and all their tokens are masked."""
            return jnp.minimum((i * workers + worker) * tile, vocab_size - tile)

        def exchange(turn: jax.Array, *fields: _Field) -> list[jax.Array]:
            if interpret is None:
                return _exchange(fields, exchange_s, turn, config)
            return _exchange_interpreted(fields, exchange_s, turn, config, barrier)

        def tile_at(i: Any) -> jax.Array:
            return plgpu.load(x_s.at[warpgroup, pl.ds(i * tile, tile)], layout=layout, optimized=False)

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
        top, least = exchange(jnp.int32(0), _Field(highest, "max", "max"), _Field(highest, "max", "min"))
        top = jnp.where(top == -_INF, 0.0, top)

        def draw(turn: jax.Array, above: jax.Array) -> jax.Array:
            """The token with the best score among those above a logit; 0 where there is none."""

            def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                best, best_id = carry
                x = tile_at(i)
                ids = positions + start_of(i)
                score = (x - top) * rate + strength * _noise(ids.astype(jnp.uint32), key0, key1)
                better = (x > above) & (score > best)
                return jnp.where(better, score, best), jnp.where(better, ids, best_id)

            best, best_id = lax.fori_loop(0, tiles, step, (full(-_INF), full(0, jnp.int32)))
            _, token = exchange(turn, _Field(best, "argmax", "argmax"), _Field(best_id, "id", "id"))
            return token

        def sums_above(turn: jax.Array, thresholds: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
            """For each threshold, how many tokens are above it, and their mass."""

            def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                x = tile_at(i)
                mass = jnp.exp2((x - top) * rate)
                return tuple(
                    (count + jnp.where(x > threshold, 1, 0), total + jnp.where(x > threshold, mass, 0.0))
                    for threshold, (count, total) in zip(thresholds, carry, strict=True)
                )

            zeros = tuple((full(0, jnp.int32), full(0.0)) for _ in thresholds)
            sums = lax.fori_loop(0, tiles, step, zeros)
            results = exchange(turn, *[_Field(x, "add", "add") for pair in sums for x in pair])
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
                pivots = [low + jnp.minimum(quarter * np.uint32(j), gap).astype(jnp.int32) for j in (1, 2, 3)]
                sums = sums_above(turn, [of_image(pivot) for pivot in pivots])
                for pivot, (count, total) in zip(pivots, sums, strict=True):
                    low = jnp.where(count >= top_k, pivot, low)
                    most = jnp.where(count >= top_k, total, most)
                    least = jnp.where(count == top_k, total, least)
                for pivot, (count, total) in reversed(list(zip(pivots, sums, strict=True))):
                    high = jnp.where(count < top_k, pivot, high)
                    least = jnp.where(count < top_k, jnp.maximum(least, total), least)
                least = jnp.where((high - low).astype(jnp.uint32) <= 1, most, least)
                return 1 - turn, low, high, least, most

            turn, low, _, least, _ = lax.while_loop(unclear, narrow, (turn, image(low), image(high), least, most))
            return turn, of_image(low), least

        def attempt(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """A draw, and whether it is kept. `floor` is below everything that min_p and top_k keep."""
            turn, _, _, above, floor = state
            token = draw(turn, above)
            turn = 1 - turn
            logit = logits_ref[row, token]
            (count, mass), (count_with, mass_with), (count_all, mass_all) = sums_above(
                turn, [logit, below(logit), floor]
            )
            turn = 1 - turn
            beyond_k = (top_k > 0) & (count >= top_k)
            # The mass of what min_p and top_k keep: known if that is all above the floor, or all from the token up.
            all_kept = (top_k == 0) | (count_all <= top_k)
            ends_here = (top_k > 0) & (count_with >= top_k)
            most = jnp.where(all_kept | ~ends_here, mass_all, mass_with)
            least = jnp.where(all_kept, mass_all, mass_with)
            by_p = (top_p < 1.0) & (count > 0) & ~beyond_k
            most = jnp.where(by_p, most, -1.0)  # nothing to search
            turn, floor, least = search(turn, floor, logit, mass, least, most)
            kept = ~beyond_k & (~by_p | (mass < top_p * least))
            return turn, kept.astype(jnp.int32), token, logit, jnp.where(beyond_k, logit, floor)

        def store(token: jax.Array) -> None:
            @pl.when(worker == 0)
            def _store() -> None:
                out_ref[row] = token

        turn = jnp.int32(1)
        floor = jnp.float32(-_INF)
        if truncates:
            floor = below(top + min_p_offset)
            # Each record of the exchange stands for tokens of its own, one of which is no less likely than the least.
            records = workers * (_WARPS if interpret is None else 1)
            floor = jnp.where((top_k > 0) & (top_k <= records), jnp.maximum(floor, below(least)), floor)
            cuts = (top_k > 0) | (top_p < 1.0)

            @pl.when(cuts)
            def _rejecting() -> None:
                state = lax.while_loop(
                    lambda state: state[1] == 0, attempt, (turn, jnp.int32(0), jnp.int32(0), floor, floor)
                )
                store(state[2])

        else:
            cuts = jnp.bool_(False)

        @pl.when(~cuts)
        def _drawing() -> None:
            store(draw(turn, floor))

        if interpret is None:
            _leave()

    scratch: list[Any] = [
        plgpu.SMEM((config.warpgroups, tiles * tile), jnp.float32),
        plgpu.SMEM((2, config.warpgroups * _WARPS, _FIELDS), jnp.int32),
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
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
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
    truncates = top_k is not None or top_p is not None or min_p is not None
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
        truncates=truncates,
        config=config,
        interpret=interpret,
    )
