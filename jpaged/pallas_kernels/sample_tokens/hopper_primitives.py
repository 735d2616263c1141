"""Reductions over the threads of a warp, and of a whole cluster of CTAs by way of distributed shared memory.

    a thread    its elements of some arrays: an element of each makes a record, and records merge by pairs
    a warp      a butterfly of shuffles, after which every lane has the warp's record
    cluster     lane c stores it into CTA c, at the warp's place; the cluster's barrier; every warp reads all records
                from its own CTA, a lane each, and merges them by a butterfly again

One barrier, then, and every thread gets the same result. Merges are in a fixed order, so sums are the same each time.
`hopper_interpreted.py` has the same functions for a CPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from jpaged.pallas_kernels.common.inline_mlir import constant, scalar
from jpaged.pallas_kernels.sample_tokens.hopper_cluster import RECORD_WORDS, WARPS, Cluster

_NOTHING = -math.inf


def exchange_memory(cluster: Cluster) -> Any:
    """Shared memory for `exchange`: two turns of records."""
    return plgpu.SMEM((2, cluster.records, RECORD_WORDS), jnp.int32)


def exchange(
    kind: str, arrays: Sequence[jax.Array], k: jax.Array, records_ref: Any, turn: jax.Array, cluster: Cluster
) -> list[jax.Array]:
    """Reduces arrays [tile] over all threads of the cluster; every thread gets the scalars.

    kind: "best", of (scores, ids, logits): those of the largest score, of the smallest id on ties.
        "sums": the sum of each array.
        "highest", of one array: its largest element, and the k-th largest of the warps' largest elements, which k
        elements at least are not below; minus infinity where there are fewer warps.
    records_ref: of `exchange_memory`.
    turn: int32 []; 0 and 1 in turn. A record is overwritten two exchanges later: the one between keeps it from being
        overwritten under a slow reader.
    """
    dtypes = [jnp.float32, jnp.float32] if kind == "highest" else [x.dtype for x in arrays]
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), splat, splat, *[cluster.layout] * len(arrays)),
        return_type=tuple(plgpu.ShapeDtypeStruct((), d, layout=splat) for d in dtypes),
    )
    def reduce(ctx: Any, smem: Any, turn: Any, k: Any, *arrays: Any) -> tuple[Any, ...]:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        mine = [list(record) for record in zip(*map(_elements, arrays), strict=True)]
        while len(mine) > 1:
            half = len(mine) // 2
            mine = [_merge(kind, mine[2 * i], mine[2 * i + 1]) for i in range(half)] + mine[2 * half :]
        record = _butterfly(kind, mine[0], 32)
        types = [value.type for value in record]
        thread = mgpu.utils.thread_idx()
        lane, warp = arith.remui(thread, constant(32)), arith.divui(thread, constant(32))
        base = mgpu.utils.memref_ptr(smem)
        first = arith.muli(scalar(turn), constant(cluster.records * RECORD_WORDS))

        def address(record: Any, word: int) -> Any:
            at = arith.addi(first, arith.addi(arith.muli(record, constant(RECORD_WORDS)), constant(word)))
            return mgpu.utils.getelementptr(base, [at], i32)

        _send(record, warp, lane, address, cluster)
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)
        lanes = min(32, cluster.records)
        received = _receive(types, lane, lanes, address, cluster)
        total = received[0]
        for other in received[1:]:
            total = _merge(kind, total, other)
        total = _butterfly(kind, total, lanes)
        if kind == "highest":
            total = [*total, _kth_of_records([values[0] for values in received], scalar(k), lane, cluster)]
        return tuple(_splat(value, dtype) for value, dtype in zip(total, dtypes, strict=True))

    return list(reduce(records_ref, turn, k, *arrays))


def leave() -> None:
    """Keeps a CTA, whose shared memory goes when it ends, until no other sends to it any more."""

    @plgpu.inline_mgpu()
    def wait(ctx: Any) -> None:
        del ctx
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    wait()


def warp_any(x: jax.Array, threshold: jax.Array, layout: Any) -> jax.Array:
    """Whether any of the warp's elements is above the threshold."""

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT),
    )
    def any_above(ctx: Any, x: Any, threshold: Any) -> Any:
        del ctx
        least = scalar(threshold)
        mine = None
        for element in _elements(x):
            above = arith.cmpf(arith.CmpFPredicate.OGT, element, least)
            mine = above if mine is None else arith.ori(mine, above)
        return mgpu.FragmentedArray.splat(nvvm.vote_sync(constant(-1), mine, "any"), (), is_signed=False)

    return any_above(x, threshold)


def warp_max(x: jax.Array, layout: Any) -> jax.Array:
    """The largest of the warp's elements."""

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT),
    )
    def largest(ctx: Any, x: Any) -> Any:
        del ctx
        best, *others = _elements(x)
        for element in others:
            best = arith.maxnumf(best, element)
        return _splat(_butterfly("highest", [best], 32)[0], jnp.float32)

    return largest(x)


def reinterpret(x: jax.Array, dtype: Any) -> jax.Array:
    """The same 32 bits of a scalar, as another dtype."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), dtype, layout=plgpu.Layout.WG_SPLAT),
    )
    def cast(ctx: Any, x: Any) -> Any:
        del ctx
        to = mgpu.utils.dtype_to_ir_type(dtype)
        is_signed = None if jnp.issubdtype(dtype, jnp.floating) else True
        return mgpu.FragmentedArray.splat(arith.bitcast(to, scalar(x)), (), is_signed=is_signed)

    return cast(x)


def _elements(array: Any) -> list[Any]:
    """A thread's elements of an array that is held four to a register."""
    return [vector.extract(register, [], [i]) for register in array.registers.flat for i in range(4)]


def _splat(value: Any, dtype: Any) -> Any:
    """A scalar, as `inline_mgpu` returns it."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=None if dtype == jnp.float32 else True)


def _merge(kind: str, a: list[Any], b: list[Any]) -> list[Any]:
    """Two records into one; see `exchange`."""
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


def _send(record: list[Any], warp: Any, lane: Any, address: Callable[[Any, int], Any], cluster: Cluster) -> None:
    """Stores the warp's record, which all of its lanes have, into all CTAs: lane c into CTA c."""
    i32 = ir.IntegerType.get_signless(32)
    quad = ir.VectorType.get((4,), i32)
    words = [value if value.type == i32 else arith.bitcast(i32, value) for value in record]
    words += [constant(0)] * (-len(words) % 4)
    rank = nvvm.read_ptx_sreg_cluster_ctarank()
    place = arith.addi(arith.muli(rank, constant(cluster.warpgroups * WARPS)), warp)
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, lane, constant(cluster.ctas))):
        for w in range(0, len(words), 4):
            target = mgpu.utils.get_cluster_ptr(address(place, w), lane, generic=False)
            llvm.store(vector.from_elements(quad, words[w : w + 4]), target, alignment=16)


def _receive(
    types: list[Any], lane: Any, lanes: int, address: Callable[[Any, int], Any], cluster: Cluster
) -> list[list[Any]]:
    """The records that are this lane's to merge: every 32nd, and where there are fewer, the same in several lanes."""
    i32 = ir.IntegerType.get_signless(32)
    quad = ir.VectorType.get((4,), i32)
    received = []
    for nth in range(0, cluster.records, 32):
        words = []
        for w in range(0, len(types), 4):
            at = address(arith.addi(arith.remui(lane, constant(lanes)), constant(nth)), w)
            vec = llvm.load(quad, at, alignment=16)
            words += [vector.extract(vec, [], [i]) for i in range(4)]
        received.append([w if t == i32 else arith.bitcast(t, w) for w, t in zip(words, types, strict=False)])
    return received


def _kth_of_records(held: list[Any], k: Any, lane: Any, cluster: Cluster) -> Any:
    """The k-th largest of all records' numbers, of which `held` are this lane's; minus infinity if there is none."""
    f32 = ir.F32Type.get()
    lowest = arith.constant(f32, ir.FloatAttr.get(f32, _NOTHING))
    if cluster.records < 32:  # those that other lanes hold as well must not count twice
        held = [arith.select(arith.cmpi(arith.CmpIPredicate.slt, lane, constant(cluster.records)), held[0], lowest)]
    some = arith.cmpi(arith.CmpIPredicate.sgt, k, constant(0))
    few = arith.cmpi(arith.CmpIPredicate.sle, k, constant(cluster.records))
    branch = scf.IfOp(arith.andi(some, few), [f32], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([_kth_largest(held, k)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([lowest])
    return branch.results[0]


def _kth_largest(values: list[Any], k: Any) -> Any:
    """The k-th largest of the values that the lanes of a warp hold, k from 1.

    Each value is shown to all lanes in turn, which count how many are ahead of theirs.
    """
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    lane = arith.remui(mgpu.utils.thread_idx(), constant(32))
    ranks = [constant(0) for _ in values]
    for j in range(32):
        for n, value in enumerate(values):
            bits = nvvm.shfl_sync(constant(-1), arith.bitcast(i32, value), constant(j), constant(31), nvvm.ShflKind.idx)
            other = arith.bitcast(f32, bits)
            for m, mine in enumerate(values):
                larger = arith.cmpf(arith.CmpFPredicate.OGT, other, mine)
                equal = arith.cmpf(arith.CmpFPredicate.OEQ, other, mine)
                # Equals rank in the order of their places, so that no rank is skipped.
                earlier = arith.cmpi(arith.CmpIPredicate.sgt, lane, constant(j if m <= n else j - 1))
                ahead = arith.ori(larger, arith.andi(equal, earlier))
                ranks[m] = arith.addi(ranks[m], arith.extui(i32, ahead))
    wanted = arith.subi(k, constant(1))
    lowest = arith.constant(f32, ir.FloatAttr.get(f32, _NOTHING))
    found = [
        arith.select(arith.cmpi(arith.CmpIPredicate.eq, rank, wanted), value, lowest)
        for rank, value in zip(ranks, values, strict=True)
    ]
    while len(found) > 1:
        found = [arith.maxnumf(found[0], found[1]), *found[2:]]
    return _butterfly("highest", found, 32)[0]
