"""Drawing tokens as a Mosaic GPU kernel (Hopper): one read of the logits from memory, whatever is truncated.

A cluster of CTAs owns a row and keeps it in its shared memory, dealt out to its warpgroups by tiles:

    logits of a row    | t0 | t1 | t2 | t3 | t4 | t5 | t6 | t7 | t8 | t9 | ...      tiles of 1,024 tokens
    CTA, warpgroup      0,0  0,1  1,0  1,1  2,0  2,1  3,0  3,1  4,0  4,1            8 CTAs of 2 warpgroups

Truncation is by rejection, under noise that is fixed. The wanted token is the argmax of logit / temperature + noise
over the kept tokens N, and N is an upper set of the logits: it holds every token above any of its own. So

    S = all tokens, or any upper set known to hold N                          _load_row
    repeat: t = argmax over S; stop if t is in N; S = the tokens above t      _attempt: _draw, _check

ends with the very token that thresholds would give, since N stays inside S, however many rounds it takes. Whether t is
in N takes one pass: top_k counts the tokens above t, top_p sums their mass. min_p, and top_k up to 64, bound S from the
start.

top_p is a share of the mass T of what min_p and top_k keep. With top_k, T is bracketed by sums at known thresholds, and
the bracket is narrowed (four ways a pass, in the order of the floats' bit patterns) only until the decision is clear.

Each pass ends with one reduction over the cluster (`hopper_primitives.py`), after which all threads know its
results and take the same branches. Sums add in a fixed order, so they grow with the set that is summed, and a row's
token depends on nothing but the row. Noise is computed where it can win: a warp leaves a tile out if no token of it
comes within reach of the warp's best.

Sources: the Gumbel-max trick; rejection sampling as in FlashInfer's sorting-free sampler
(https://flashinfer.ai/2025/03/10/sampling.html), which draws anew each round. Here a token's noise stays, so that the
result does not depend on the rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.sample_tokens import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.sample_tokens import noise as sample_noise
from jpaged.pallas_kernels.sample_tokens.hopper_cluster import Cluster
from jpaged.pallas_kernels.sample_tokens.operands import Operands, row_numbers

_LN2 = math.log(2)
_INF = math.inf
_LARGEST = float(np.finfo(np.float32).max)
_SMEM_BYTES = 227 * 1024 - 1024
_SERIES_BELOW = 1 / 16
_LARGEST_NOISE = 33.1  # in powers of two: the least uniform number is 2^-33
_SLACK = 0.01  # of a bound on scores, far above their rounding


@dataclass(frozen=True)
class Config(Cluster):
    """Shape of the kernel: the cluster that shares a row, and

    ahead: tiles whose loads from memory are in flight at once.
    """

    ahead: int = 5

    def tiles_each(self, vocab_size: int) -> int:
        """Tiles of one warpgroup."""
        return -(-vocab_size // (self.tile * self.workers))

    def smem_bytes(self, vocab_size: int) -> int:
        return self.warpgroups * self.tiles_each(vocab_size) * self.tile * 4 + self.records_bytes()


def unsupported(logits: jax.Array) -> str | None:
    """Why the kernel cannot take these (already checked) logits; None if it can."""
    need = Config().smem_bytes(logits.shape[1])
    if need > _SMEM_BYTES:
        return f"a cluster cannot hold {logits.shape[1]} logits: {need} bytes a CTA, over {_SMEM_BYTES}"
    return None


@partial(jax.jit, static_argnames=("config", "interpret"))
def sample_tokens(operands: Operands, *, config: Config | None = None, interpret: Any = None) -> jax.Array:
    """`sample_tokens` of the package, checked. interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU."""
    logits = operands.logits
    rows, vocab_size = logits.shape
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    if config is None:
        config = Config()
    floats, top_k = row_numbers(operands)
    # Loads are of 16 bytes, and the last tile is a whole one.
    padding = max(-vocab_size % 4, config.tile - vocab_size)
    if padding > 0:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-_INF)
    return plgpu.kernel(
        partial(_kernel, config, gpu),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        scratch_types=[
            plgpu.SMEM((config.warpgroups, config.tiles_each(logits.shape[1]) * config.tile), jnp.float32),
            gpu.exchange_memory(config),
        ],
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
        interpret=interpret,
    )(
        logits,
        floats,
        top_k[:, None],
        jnp.stack(sample_noise.row_keys(operands.seeds, operands.positions), axis=1),
    )


class _Row(NamedTuple):
    """A row of logits, as one of the warpgroups that share it sees it."""

    config: Config
    vocab_size: int  # padded: a multiple of 4 and at least a tile
    x_s: Any  # [warpgroups, tiles of a warpgroup * tile]: the row's logits in shared memory, without NaN
    exchange_s: Any  # as `exchange_memory` says
    gpu: ModuleType  # `hopper_primitives`, or `hopper_interpreted` on a CPU
    warpgroup: jax.Array
    worker: jax.Array  # warpgroup of the cluster
    positions: jax.Array  # int32 [tile]: 0, 1, ..
    rate: jax.Array  # log2(e) / temperature
    strength: jax.Array  # what the noise is multiplied by: 0 for greedy rows
    top_p: jax.Array
    min_p_offset: jax.Array  # log(min_p) * temperature
    top_k: jax.Array  # 0 for all
    k: jax.Array  # the same in float32, as counts are: exact far beyond any vocabulary
    keys: tuple[jax.Array, jax.Array]  # of the noise
    top: jax.Array  # the largest logit

    @property
    def tiles(self) -> int:
        return self.config.tiles_each(self.vocab_size)

    def full(self, value: float, dtype: Any = jnp.float32) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.config.tile,), value, dtype), self.config.layout)

    def start_of(self, i: Any) -> jax.Array:
        """First token of the warpgroup's i-th tile. The row's last tile is a whole one and overlaps the one before
        it; tiles past the end are that tile again, and all their tokens are masked."""
        config = self.config
        return jnp.minimum((i * config.workers + self.worker) * config.tile, self.vocab_size - config.tile)

    def tile_at(self, i: Any) -> jax.Array:
        """Logits of the warpgroup's i-th tile."""
        tile = self.config.tile
        at = self.x_s.at[self.warpgroup, pl.ds(i * tile, tile)]
        return plgpu.load(at, layout=self.config.layout, optimized=False)

    def exchange(self, kind: str, turn: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Reduces over the cluster; see `hopper_primitives.exchange`."""
        return self.gpu.exchange(kind, arrays, self.top_k, self.exchange_s, turn, self.config)

    def warp_any(self, x: jax.Array, threshold: jax.Array) -> jax.Array:
        return self.gpu.warp_any(x, threshold, self.config.layout)

    def warp_max(self, x: jax.Array) -> jax.Array:
        return self.gpu.warp_max(x, self.config.layout)

    def below(self, x: jax.Array) -> jax.Array:
        """The next float down, so that x is above it; minus infinity stays."""
        bits = self.gpu.reinterpret(x, jnp.int32)
        down = jnp.where(bits > 0, bits - 1, jnp.where(x == 0, np.int32(-0x7FFFFFFF), bits + 1))
        return jnp.where(x == -_INF, x, self.gpu.reinterpret(down, jnp.float32))

    def image(self, x: jax.Array) -> jax.Array:
        """An int32 that is ordered as the floats are."""
        bits = self.gpu.reinterpret(x, jnp.int32)
        return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))

    def of_image(self, image: jax.Array) -> jax.Array:
        return self.gpu.reinterpret(image ^ ((image >> 31) & np.int32(0x7FFFFFFF)), jnp.float32)


def _kernel(
    config: Config,
    gpu: ModuleType,
    logits_ref: Any,
    floats_ref: Any,
    ints_ref: Any,
    keys_ref: Any,
    out_ref: Any,
    x_s: Any,
    exchange_s: Any,
) -> None:
    """Draws the token of one row: out int32 [R], of logits float32 [R, V].

    floats: float32 [R, 4]; rate, strength, top_p and min_p_offset of `_Row`. ints: int32 [R, 1]; top_k. keys: uint32
    [R, 2].
    """
    row, cta, warpgroup = (lax.axis_index(name) for name in ("row", "cta", "warpgroup"))
    worker = cta * config.warpgroups + warpgroup
    rate, strength, top_p, min_p_offset = (floats_ref[row, i] for i in range(4))
    top_k = ints_ref[row, 0]
    r = _Row(
        config=config,
        vocab_size=logits_ref.shape[1],
        x_s=x_s,
        exchange_s=exchange_s,
        gpu=gpu,
        warpgroup=warpgroup,
        worker=worker,
        rate=rate,
        strength=strength,
        top_p=top_p,
        min_p_offset=min_p_offset,
        top_k=top_k,
        k=top_k.astype(jnp.float32),
        keys=(keys_ref[row, 0], keys_ref[row, 1]),
        positions=plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (config.tile,), 0), config.layout),
        top=jnp.float32(0.0),
    )
    top, kth_at_least = _load_row(r, logits_ref.at[row])
    r = r._replace(top=top)
    floor = jnp.maximum(r.below(top + min_p_offset), r.below(kth_at_least))
    start = _Attempt(jnp.int32(1), jnp.int32(0), jnp.int32(0), floor, floor, jnp.float32(-1.0))
    last = lax.while_loop(lambda state: state.kept == 0, partial(_attempt, r), start)

    @pl.when(worker == 0)
    def _store() -> None:
        out_ref[row] = last.token

    gpu.leave()


def _load_row(r: _Row, logits_ref: Any) -> tuple[jax.Array, jax.Array]:
    """Brings the row into shared memory, and gives its largest logit and one that the top_k-th largest is not below.

    Each thread reads back only what it wrote itself, so no barrier is needed.
    """
    config = r.config
    highest = r.full(-_INF)
    for group in range(0, r.tiles, config.ahead):
        members = range(group, min(group + config.ahead, r.tiles))
        loaded = [
            plgpu.load(logits_ref.at[pl.ds(r.start_of(i), config.tile)], layout=config.layout, optimized=False)
            for i in members
        ]
        for i, x in zip(members, loaded, strict=True):
            owned = r.positions + r.start_of(i) >= (i * config.workers + r.worker) * config.tile
            x = jnp.where(owned & (x == x), jnp.minimum(x, _LARGEST), -_INF)
            r.x_s[r.warpgroup, pl.ds(i * config.tile, config.tile)] = x
            highest = jnp.maximum(highest, x)
    top, kth_at_least = r.exchange("highest", jnp.int32(0), [highest])
    return jnp.where(top == -_INF, 0.0, top), kth_at_least


class _Attempt(NamedTuple):
    """Where the search for a token is."""

    turn: jax.Array  # of the next exchange
    kept: jax.Array  # whether the last draw is the outcome
    token: jax.Array  # of the last draw
    above: jax.Array  # the next draw is among the tokens above this logit
    floor: jax.Array  # is below everything that min_p and top_k keep
    kept_mass: jax.Array  # the mass of that, -1 while unknown


def _attempt(r: _Row, state: _Attempt) -> _Attempt:
    """A draw, and whether it is kept."""
    token, logit = _draw(r, state.turn, state.above)
    turn, kept, floor, kept_mass = lax.cond(
        (r.top_k > 0) | (r.top_p < 1.0),
        partial(_check, r),
        lambda turn, _, floor, kept_mass: (turn, jnp.int32(1), floor, kept_mass),
        *(1 - state.turn, logit, state.floor, state.kept_mass),
    )
    return _Attempt(turn, kept, token, logit, floor, kept_mass)


def _draw(r: _Row, turn: jax.Array, above: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The token with the best score among those above a logit, and its logit; token 0 where there is none."""

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x = r.tile_at(i)
        bound, hopeless = carry[-2:]

        def hash_tile(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            base = (x - r.top) * r.rate
            ids = r.positions + r.start_of(i)
            uniform = sample_noise.uniform(ids.astype(jnp.uint32), *r.keys)

            def score_tile(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                best, best_id, best_x, *_ = carry
                score = base + r.strength * _noise(uniform)
                better = (x > above) & (score > best)
                best, best_id = jnp.where(better, score, best), jnp.where(better, ids, best_id)
                bound = r.warp_max(best)
                # Nor can a token win, whatever its noise, that is further behind than any noise goes.
                hopeless = jnp.maximum(above, r.below(r.top + (bound - _LARGEST_NOISE) / r.rate))
                return best, best_id, jnp.where(better, x, best_x), bound, hopeless

            # -log(1 - u) >= u, so that the score is at most base - log2(u).
            could_win = r.warp_any(jnp.exp2(base - (bound - _SLACK)) - uniform, jnp.float32(0.0))
            return lax.cond(could_win, score_tile, lambda carry: carry, carry)

        return lax.cond(r.warp_any(x, hopeless), hash_tile, lambda carry: carry, carry)

    start = (r.full(-_INF), r.full(0, jnp.int32), r.full(-_INF), jnp.float32(-1e30), above)
    *best, _, _ = lax.fori_loop(0, r.tiles, step, start)
    _, token, logit = r.exchange("best", turn, best)
    return token, logit


def _noise(uniform: jax.Array) -> jax.Array:
    """Gumbel noise times log2(e), from `noise.uniform`'s numbers; within 1e-5 of `noise.gumbel`'s.

    The hardware's logarithm is off by 2^-22 absolute near 1, too much for -log(1 - u) of a small u, which makes the
    largest noise: u + u^2 / 2 + u^3 / 3 + ... takes over there.
    """
    series = uniform * (1 / 6) + (1 / 5)
    for n in (4, 3, 2, 1):
        series = series * uniform + (1 / n)
    exponential = jnp.where(uniform < _SERIES_BELOW, series * uniform, jnp.log2(1.0 - uniform) * -_LN2)
    return -jnp.log2(exponential)


def _sums_above(r: _Row, turn: jax.Array, thresholds: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """For each threshold, how many tokens are above it (float32), and their mass.

    The last threshold is the lowest.
    """

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x = r.tile_at(i)

        def add(sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            mass = jnp.exp2((x - r.top) * r.rate)
            out: list[jax.Array] = []
            for j, threshold in enumerate(thresholds):
                counts = jnp.where(x > threshold, 1.0, 0.0)
                out += [sums[2 * j] + counts, sums[2 * j + 1] + counts * mass]
            return tuple(out)

        return lax.cond(r.warp_any(x, thresholds[-1]), add, lambda sums: sums, sums)

    sums = lax.fori_loop(0, r.tiles, step, (r.full(0.0),) * (2 * len(thresholds)))
    results = r.exchange("sums", turn, sums)
    return [(results[2 * j], results[2 * j + 1]) for j in range(len(thresholds))]


def _check(r: _Row, turn: jax.Array, logit: jax.Array, floor: jax.Array, kept_mass: jax.Array) -> tuple[jax.Array, ...]:
    """Whether top_k and top_p keep a token of this logit: (turn, kept, floor, kept_mass) of `_Attempt`."""
    weigh = (r.top_p < 1.0) & (kept_mass < 0)

    def sums_around() -> tuple[jax.Array, ...]:
        return tuple(x for pair in _sums_above(r, turn, [logit, r.below(logit), floor]) for x in pair)

    def sums_over() -> tuple[jax.Array, ...]:
        zero = jnp.float32(0.0)
        return (*_sums_above(r, turn, [logit])[0], zero, zero, zero, zero)

    count, mass, count_with, mass_with, count_all, mass_all = lax.cond(weigh, sums_around, sums_over)
    beyond_k = (r.top_k > 0) & (count >= r.k)
    by_p = (r.top_p < 1.0) & (count > 0) & ~beyond_k
    # The mass of what min_p and top_k keep: known if that is all above the floor, or all from the token up.
    all_kept = (r.top_k == 0) | (count_all <= r.k)
    ends_here = (r.top_k > 0) & (count_with >= r.k)
    most = jnp.where(all_kept | ~ends_here, mass_all, mass_with)
    least = jnp.where(all_kept, mass_all, mass_with)
    least, most = jnp.where(weigh, least, kept_mass), jnp.where(weigh, most, kept_mass)
    # Where top_p has no say there is nothing to search.
    most = jnp.where(by_p, most, -1.0)
    turn, floor, least, most = _search(r, mass, _Bracket(1 - turn, floor, logit, least, most))
    kept = ~beyond_k & (~by_p | (mass < r.top_p * least))
    kept_mass = jnp.where(by_p & (least >= most), least, kept_mass)
    return turn, kept.astype(jnp.int32), jnp.where(beyond_k, logit, floor), kept_mass


class _Bracket(NamedTuple):
    """What is known of the mass that top_k keeps."""

    turn: jax.Array  # of the next exchange
    low: jax.Array  # the k-th largest logit is above this one, or its image,
    high: jax.Array  # and at or below this one
    least: jax.Array  # mass
    most: jax.Array


def _search(r: _Row, mass: jax.Array, known: _Bracket) -> tuple[jax.Array, ...]:
    """Narrows the mass that top_k keeps until `mass` is clearly below its share top_p, or clearly not.

    Returns: turn, low, least and most of the new bracket.
    """

    def unclear(state: _Bracket) -> jax.Array:
        return (mass >= r.top_p * state.least) & (mass < r.top_p * state.most)

    def narrow(state: _Bracket) -> _Bracket:
        turn, low, high, least, most = state
        gap = (high - low).astype(jnp.uint32)
        quarter = jnp.maximum(gap >> 2, jnp.uint32(1))
        pivots = [low + jnp.minimum(quarter * np.uint32(j), gap).astype(jnp.int32) for j in (3, 2, 1)]
        sums = _sums_above(r, turn, [r.of_image(pivot) for pivot in pivots])
        for pivot, (count, total) in zip(pivots, sums, strict=True):
            high = jnp.where(count < r.k, pivot, high)
            least = jnp.where(count < r.k, jnp.maximum(least, total), least)
        for pivot, (count, total) in reversed(list(zip(pivots, sums, strict=True))):
            low = jnp.where(count >= r.k, pivot, low)
            most = jnp.where(count >= r.k, total, most)
            least = jnp.where(count == r.k, total, least)
        least = jnp.where((high - low).astype(jnp.uint32) <= 1, most, least)
        return _Bracket(1 - turn, low, high, least, most)

    start = known._replace(low=r.image(known.low), high=r.image(known.high))
    turn, low, _, least, most = lax.while_loop(unclear, narrow, start)
    return turn, r.of_image(low), least, most
