"""One-shot all-reduce, added to the residual stream and normed, in one Mosaic GPU kernel (Hopper, NVLink).

    device d, CTA c, generation g; its rows are r = c, c + 264, ...
        1. parts[r] --stores--> inbox[g % 2, slot of d, r] of every other device
        2. fence; signals[d, c] = g of every other device
        3. wait until signals[p, c] of this device has reached g, for every other p
        4. residual[r] + parts[r] + sum over p of inbox[g % 2, slot of p, r] --> residual[r], norm --> normed[r]

A CTA of many rows does that chunk by chunk, and counts chunks in its signals. Between the stores of a chunk and its
signal comes the sum of the chunk before, so that NVLink is busy while rows are added, and the fence has little left to
wait for:

    store 0, signal 0,   store 1, wait 0, add 0, signal 1,   store 2, wait 1, add 1, signal 2,   ...

One trip over NVLink: data is pushed, then the signal behind it. The sum goes over devices in their order, in float32,
so every device comes to the same bits. Nobody waits at the end: device p can write generation g + 2 over what a device
reads in generation g only after it got that device's signal of g + 1, hence after that one's kernel of g had ended.
CTA c meets CTAs c of the other devices only, and a row is always the same CTA's, so calls of any numbers of rows follow
one another as they like. No CTA waits for another of its own device, and all of a call fit there at once, so that each
gets to run whatever order they start in.

Inbox and signals are state of the caller: zeros at first, the same arrays in all calls of all programs, and all devices
make the same calls in the same order. Peers write to them at any time, also before this device's call begins, so they
must stay where they are: programs take them donated, and never a copy. Plain loads and stores; no multicast.

Addresses: XLA tells a kernel that asks for it where the peers' copies of its arguments are ("collective metadata"). It
exchanges them between the devices' threads before each run of the program, kernel by kernel, so one small kernel a
program asks (`all_reduce_peers`) and hands what it learns to the sums. What else this brings: before the program starts
anywhere, each of its kernels has been loaded on every device, which takes a lock that a waiting kernel would hold up
for ever.
"""

from collections.abc import Sequence
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
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from jpaged.pallas_kernels.all_reduce import MAX_CTAS
from jpaged.pallas_kernels.inline_mosaic import constant, instruction, offset, scalar

_THREADS = 128
_CHUNK = 4
"""Rows that a CTA of many stores between two signals."""
_INBOX, _SIGNALS = 0, 2
"""Columns of `peers` where the halves of an address begin. Its last row begins with this device's own number."""


def unsupported(hidden: int, dtype: Any, num_devices: int) -> str | None:
    """Why the kernel cannot reduce rows of this size; None if it can."""
    if num_devices < 2:
        return f"there is nothing to reduce over {num_devices} device"
    if jnp.dtype(dtype).itemsize != 2:
        return f"{jnp.dtype(dtype)} is not of 16 bits"
    if hidden % (_THREADS * 2):
        return f"rows of {hidden} do not divide into {_THREADS} threads with words of two"
    if hidden > 8192:
        return f"rows of {hidden} do not fit one warpgroup's registers"
    return None


def _layout(hidden: int) -> Any:
    """How a row lies in a warpgroup's registers: by the widest vectors that it divides into."""
    wide = next(size for size in (8, 4, 2) if hidden % (_THREADS * size) == 0)
    return plgpu.Layout.WG_STRIDED((hidden,), vec_size=wide)


@partial(jax.jit, static_argnames=("axis", "num_devices"))
def all_reduce_peers(inbox: jax.Array, signals: jax.Array, *, axis: str, num_devices: int) -> jax.Array:
    """`all_reduce_peers` of the package, checked."""

    def body(inbox_ref: Any, signals_ref: Any, out_ref: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, plgpu.Layout.WG_SPLAT))
        def find(ctx: Any, inbox: Any, signals: Any, out: Any, me: Any) -> None:
            own = scalar(me)
            zero = constant(0)
            i64 = ir.IntegerType.get_signless(64)
            with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
                for device in range(num_devices):
                    peer = constant(device)
                    for column, first in ((_INBOX, _part(inbox, zero, zero, zero)), (_SIGNALS, _part(signals, zero))):
                        there = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ctx.to_remote(first, peer)))
                        high = arith.shrui(there, constant(32, 64))
                        for half, value in enumerate((there, high)):
                            _store(arith.trunci(own.type, value), out, device, column + half)
                _store(own, out, num_devices, 0)

        find(inbox_ref, signals_ref, out_ref, lax.axis_index(axis))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_devices + 1, 4), jnp.int32),
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="all_reduce_peers",
    )(inbox, signals)


@partial(jax.jit, static_argnames=("num_devices", "norm_eps"))
def all_reduce_add_norm(
    inbox: jax.Array,
    signals: jax.Array,
    peers: jax.Array,
    parts: jax.Array,
    residual: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    *,
    num_devices: int,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """`all_reduce_add_norm` of the package, checked."""
    rows, hidden = parts.shape
    max_rows = inbox.shape[2]
    dtype = parts.dtype
    layout = _layout(hidden)
    ctas = min(rows, MAX_CTAS)
    most_chunks = pl.cdiv(pl.cdiv(max_rows, MAX_CTAS), _CHUNK)  # of any call: signals rise by as many a generation
    vectors = [one for one in (bias, scale) if one is not None]

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def body(inbox_ref: Any, signals_ref: Any, peers_ref: Any, x_ref: Any, in_ref: Any, *refs: Any) -> None:
        plgpu.griddepcontrol_wait()
        cta = lax.axis_index("cta")
        me = peers_ref[num_devices, 0]
        generation = signals_ref[num_devices, cta] + 1
        others = [lax.rem(me + ahead, num_devices) for ahead in range(1, num_devices)]  # which spreads them over links
        peer_inboxes = [_address(peers_ref, device, _INBOX) for device in others]
        peer_signals = [_address(peers_ref, device, _SIGNALS) for device in others]
        given = iter(refs)
        bias_row = None if bias is None else read(next(given)).astype(jnp.float32)
        scale_row = None if scale is None else read(next(given))
        out_ref = next(given)

        def place(slot: Any, row: Any) -> Any:
            return (((generation & 1) * (num_devices - 1) + slot) * max_rows + row) * hidden

        def push(row: Any, x: jax.Array) -> None:
            # A device's slot s is for rows of the device s + 1 after it in the ring; the last would be for its own.
            firsts = [place(num_devices - 2 - ahead, row) for ahead in range(num_devices - 1)]
            _push(x, layout, firsts, peer_inboxes)

        def tell(chunk: Any) -> None:
            _tell_peers(generation * most_chunks + chunk, me * signals_ref.shape[1] + cta, peer_signals)

        def wait(chunk: Any) -> None:
            _wait_for_peers(signals_ref, cta, generation * most_chunks + chunk, others)

        def add(row: Any, before: jax.Array) -> None:
            total = jnp.zeros((hidden,), jnp.float32)
            for device in range(num_devices):
                sent = place(lax.rem(device + num_devices - 1 - me, num_devices), row)
                part = _read_part(x_ref, row * hidden, inbox_ref, sent, device == me, layout)
                total = total + part.astype(jnp.float32)
            total = before.astype(jnp.float32) + total
            if bias_row is not None:
                total = total + bias_row
            after = total.astype(dtype)
            out_ref.at[row][...] = after
            if scale_row is not None:
                wide = after.astype(jnp.float32)
                mean = jnp.sum(wide * wide) * (1.0 / hidden)
                refs[-1].at[row][...] = (wide * lax.rsqrt(mean + norm_eps)).astype(dtype) * scale_row

        if rows <= MAX_CTAS:
            push(cta, read(x_ref.at[cta]))
            before = read(in_ref.at[cta])  # on its way while the peers' rows are
            tell(0)
            wait(0)
            add(cta, before)
        else:
            own_rows = lax.div(rows - 1 - cta, MAX_CTAS) + 1
            chunks = lax.div(own_rows + _CHUNK - 1, _CHUNK)

            def own_row(number: Any) -> Any:
                return cta + number * MAX_CTAS

            @pl.loop(0, chunks + 1)
            def _(chunk: Any) -> None:
                @pl.when(chunk < chunks)
                def _() -> None:
                    which = [chunk * _CHUNK + i for i in range(_CHUNK)]
                    # All on their way before the first is stored; the last chunk may have too few.
                    loaded = [read(x_ref.at[own_row(jnp.minimum(number, own_rows - 1))]) for number in which]
                    for number, x in zip(which, loaded, strict=True):
                        pl.when(number < own_rows)(partial(push, own_row(number), x))

                @pl.when(chunk > 0)
                def _() -> None:
                    wait(chunk - 1)

                    @pl.loop((chunk - 1) * _CHUNK, jnp.minimum(chunk * _CHUNK, own_rows))
                    def _(number: Any) -> None:
                        row = own_row(number)
                        add(row, read(in_ref.at[row]))

                pl.when(chunk < chunks)(partial(tell, chunk))

        signals_ref[num_devices, cta] = generation

    inbox_ref, signals_ref = jax.new_ref(inbox), jax.new_ref(signals)
    shape = jax.ShapeDtypeStruct((rows, hidden), dtype)
    results = plgpu.kernel(
        body,
        out_type=(shape,) if scale is None else (shape, shape),
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="all_reduce_add_norm" if scale is not None else "all_reduce_add",
    )(inbox_ref, signals_ref, peers, parts, residual, *vectors)
    return inbox_ref[...], signals_ref[...], results[0], None if scale is None else results[1]


def _address(peers_ref: Any, device: Any, column: int) -> tuple[Any, Any]:
    """The halves of an address, low and high."""
    return peers_ref[device, column], peers_ref[device, column + 1]


def _push(x: Any, layout: Any, firsts: Sequence[Any], inboxes: Sequence[tuple[Any, Any]]) -> None:
    """Stores a row in the other devices' inboxes, in each from its element `first` on."""

    @plgpu.inline_mgpu(arg_types=(layout, *[plgpu.Layout.WG_SPLAT] * (3 * len(inboxes))))
    def push(ctx: Any, x: Any, *arguments: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        width = ir.VectorType(x.registers.flat[0].type).shape[0] // 2
        words = ir.VectorType.get((width,), i32)
        places = ", ".join(f"${i + 1}" for i in range(width))
        store = f"st.global.v{width}.b32 [$0], {{{places}}};" if width > 1 else f"st.global.b32 [$0], {places};"
        for first, low, high in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
            there = offset(_pointer(low, high), scalar(first), x.mlir_dtype)
            for place, register in zip(x.layout.linear_thread_idxs(), x.registers.flat, strict=True):
                values = vector.bitcast(words, register)
                instruction(
                    store,
                    offset(there, arith.index_cast(i32, place), x.mlir_dtype),
                    *(vector.extract(values, dynamic_position=[], static_position=[i]) for i in range(width)),
                )

    push(x, *(one for first, address in zip(firsts, inboxes, strict=True) for one in (first, *address)))


def _read_part(parts_ref: Any, own: Any, inbox_ref: Any, sent: Any, is_own: Any, layout: Any) -> jax.Array:
    """A row [hidden], of this device's parts from their element `own` on or of its inbox from `sent` on. An address is
    chosen, not a branch, so that loads of several devices' parts are on their way together.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3),
        return_type=plgpu.ShapeDtypeStruct(parts_ref.shape[1:], parts_ref.dtype, layout=layout),
    )
    def read(ctx: Any, parts: Any, inbox: Any, own: Any, sent: Any, is_own: Any) -> Any:
        del ctx
        i32, element = ir.IntegerType.get_signless(32), ir.MemRefType(parts.type).element_type
        here, there = (
            offset(mgpu.utils.memref_ptr(ref), scalar(first), element) for ref, first in ((parts, own), (inbox, sent))
        )
        chosen = llvm.addrspacecast(llvm.PointerType.get(1), arith.select(scalar(is_own), here, there))
        spread = layout.to_mgpu()
        words = ir.VectorType.get((spread.vec_size,), element)
        registers = [
            llvm.load(words, offset(chosen, arith.index_cast(i32, place), element))
            for place in spread.linear_thread_idxs()
        ]
        return mgpu.FragmentedArray(_registers=np.array(registers, object), _layout=spread, _is_signed=None)

    return read(parts_ref, inbox_ref, own, sent, is_own)


def _tell_peers(signal: Any, first: Any, signals: list[tuple[Any, Any]]) -> None:
    """After all threads' stores: sets this device's signal, which is integer `first` of the signals, on every peer."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,) * (2 + 2 * len(signals)))
    def tell(ctx: Any, signal: Any, first: Any, *halves: Any) -> None:
        del ctx
        mgpu.warpgroup_barrier()
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            # All threads' stores come before the signals: by the barrier before the fence, which is cumulative.
            instruction("fence.acq_rel.sys;")
            reached = scalar(signal)
            for low, high in zip(halves[::2], halves[1::2], strict=True):
                there = offset(_pointer(low, high), scalar(first), reached.type)
                instruction("st.relaxed.sys.global.b32 [$0], $1;", there, reached)

    tell(signal, first, *(half for address in signals for half in address))


def _wait_for_peers(signals_ref: Any, cta: Any, signal: Any, senders: list[Any]) -> None:
    """Until every peer's signal here has reached `signal`; all threads then see what came before it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * (2 + len(senders))))
    def wait(ctx: Any, signals: Any, cta: Any, signal: Any, *senders: Any) -> None:
        del ctx
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            wanted = scalar(signal)
            for sender in senders:
                here = mgpu.utils.memref_ptr(_part(signals, scalar(sender), scalar(cta)))
                loop = scf.WhileOp([], [])
                with ir.InsertionPoint(loop.before.blocks.append()):
                    found = instruction("ld.relaxed.sys.global.b32 $0, [$1];", here, result=wanted.type)
                    behind = arith.subi(found, wanted)  # a peer may be ahead, and signals wrap around
                    scf.condition(arith.cmpi(arith.CmpIPredicate.slt, behind, constant(0)), [])
                with ir.InsertionPoint(loop.after.blocks.append()):
                    scf.yield_([])
            # What the peers stored before their signals comes before all threads' loads behind the barrier.
            instruction("fence.acq_rel.sys;")
        mgpu.warpgroup_barrier()

    wait(signals_ref, cta, signal, *senders)


def _pointer(low: Any, high: Any) -> Any:
    """The pointer of an address whose halves `inline_mgpu` passes."""
    i64 = ir.IntegerType.get_signless(64)
    upper = arith.shli(arith.extui(i64, scalar(high)), constant(32, 64))
    return llvm.inttoptr(llvm.PointerType.get(), arith.ori(upper, arith.extui(i64, scalar(low))))


def _part(ref: Any, *indices: Any) -> Any:
    """ref[indices], still a reference."""
    index = ir.IndexType.get()
    return mgpu.memref_slice(ref, tuple(arith.index_cast(index, i) for i in indices))


def _store(value: Any, ref: Any, *indices: int) -> None:
    memref.store(value, ref, [arith.constant(ir.IndexType.get(), i) for i in indices])
