"""One-shot all-reduce, added to the residual stream and normed, in one Mosaic GPU kernel (Hopper, NVLink).

    device d, CTA c, generation g; its rows are r = c, c + 264, ...
        1. parts[r] --stores--> inbox[g % 2, place of d, r] of every other device
        2. residual[r] + parts[r] + sum over p of inbox[g % 2, place of p, r] --> residual[r], norm --> normed[r],
           each word waited for until it is there, and then made EMPTY

There are no signals and no fences: a word says by itself that it has arrived. An inbox begins as words that no sender
sends (EMPTY: two NaNs; a sender whose own two are these sends others), a thread loads its words until none is EMPTY,
and writes EMPTY over them again. This is NCCL's LL protocol, but with data that is its own flag, as in TensorRT-LLM's
Lamport kernels. So a sum takes one trip over NVLink, and as threads send some rows before they await the first, NVLink
is busy while rows are added. Loads and stores are relaxed ones at system scope, and each word of 32 bits is looked at
by itself: no order between words is needed.

The sum goes over devices in their order, in float32, so every device comes to the same bits.

Nobody waits at the end. Before device p sends what belongs where p's words of generation g were, in g + 2, it has got
every other device's words of g + 1; so their kernels of g have ended, and with them what made the words EMPTY. CTA c
meets CTAs c of the other devices only, and a row is always the same CTA's, so calls of any numbers of rows follow one
another as they like. No CTA waits for another of its own device, and all of a call fit there at once, so that each gets
to run whatever order they start in.

Inbox and generations are state of the caller: the same arrays in all calls of all programs, and all devices make the
same calls in the same order. Peers write to the inbox at any time, also before this device's call begins, so it must
stay where it is: programs take it donated, and never a copy. Plain loads and stores; no multicast.

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

from jpaged.pallas_kernels.all_reduce.inbox import EMPTY, MAX_CTAS
from jpaged.pallas_kernels.all_reduce.operands import Operands
from jpaged.pallas_kernels.common.inline_mlir import constant, instruction, offset, scalar

_THREADS = 128
_WORDS = 64
"""Most words that a thread has on their way at once: of the rows that it sends first, and of those that it awaits."""


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
def all_reduce_peers(inbox: jax.Array, *, axis: str, num_devices: int) -> jax.Array:
    """`all_reduce_peers` of the package, checked.

    Row i: where this device's rows of even generations begin in the inbox of the (i + 1)-th device after it, the low
    and the high half of the address. The last row begins with this device's own number.
    """

    def body(inbox_ref: Any, out_ref: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT))
        def find(ctx: Any, inbox: Any, out: Any, me: Any) -> None:
            own, i64 = scalar(me), ir.IntegerType.get_signless(64)
            with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
                for ahead in range(1, num_devices):
                    device = arith.remui(arith.addi(own, constant(ahead)), constant(num_devices))
                    is_later = arith.extui(own.type, arith.cmpi(arith.CmpIPredicate.ugt, own, device))
                    first = _part(inbox, constant(0), arith.subi(own, is_later), constant(0))
                    there = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ctx.to_remote(first, device)))
                    high = arith.shrui(there, constant(32, 64))
                    for half, value in enumerate((there, high)):
                        _store(arith.trunci(own.type, value), out, ahead - 1, half)
                _store(own, out, num_devices - 1, 0)

        find(inbox_ref, out_ref, lax.axis_index(axis))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_devices, 2), jnp.int32),
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="all_reduce_peers",
    )(inbox)


@partial(jax.jit, static_argnames=("axis", "num_devices", "norm_eps"))
def all_reduce_add_norm(
    operands: Operands, *, axis: str, num_devices: int, norm_eps: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """`all_reduce_add_norm` of the package, checked."""
    del axis  # `peers` says where the other devices are
    inbox, generations, peers, parts, residual, bias, scale = operands
    rows, hidden = parts.shape
    max_rows, words = inbox.shape[2:]
    dtype = parts.dtype
    layout = _layout(hidden)
    together = _WORDS // (words // _THREADS)  # rows whose words may be on their way
    vectors = [one for one in (bias, scale) if one is not None]

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def body(inbox_ref: Any, generations_ref: Any, peers_ref: Any, x_ref: Any, in_ref: Any, *refs: Any) -> None:
        plgpu.griddepcontrol_wait()  # the kernel before this one has ended, with all that it made EMPTY
        cta = lax.axis_index("cta")
        me = peers_ref[num_devices - 1, 0]
        inboxes = [(peers_ref[peer, 0], peers_ref[peer, 1]) for peer in range(num_devices - 1)]
        generation = generations_ref[cta] + 1
        given = iter(refs)
        bias_row = None if bias is None else read(next(given))
        scale_row = None if scale is None else read(next(given))
        out_ref = next(given)

        def place(row: Any, sender: int = 0) -> Any:
            """Where a row of a sender begins in an inbox, in words."""
            return (((generation & 1) * (num_devices - 1) + sender) * max_rows + row) * words

        def send(row: Any, x: jax.Array) -> None:
            _send(x, layout, place(row), inboxes)

        def add(row: Any, own: jax.Array, before: jax.Array) -> None:
            """own, before: the row of this device's parts and of the residual."""
            none = jnp.zeros((hidden,), dtype)
            total = jnp.zeros((hidden,), jnp.float32)
            for begin in range(0, num_devices - 1, together):
                senders = range(begin, min(begin + together, num_devices - 1))
                received = _receive(inbox_ref, [place(row, sender) for sender in senders], layout, dtype)
                for sender, part in zip(senders, received, strict=True):
                    total = total + jnp.where(me == sender, own, none).astype(jnp.float32)  # its turn among devices
                    total = total + part.astype(jnp.float32)
            total = total + jnp.where(me == num_devices - 1, own, none).astype(jnp.float32)
            total = before.astype(jnp.float32) + total
            if bias_row is not None:
                total = total + bias_row.astype(jnp.float32)
            after = total.astype(dtype)
            out_ref.at[row][...] = after
            if scale_row is not None:
                wide = after.astype(jnp.float32)
                mean = jnp.sum(wide * wide) * (1.0 / hidden)
                refs[-1].at[row][...] = (wide * lax.rsqrt(mean + norm_eps)).astype(dtype) * scale_row

        if rows <= MAX_CTAS:
            own = read(x_ref.at[cta])
            send(cta, own)
            add(cta, own, read(in_ref.at[cta]))
        else:
            own_rows = lax.div(rows - 1 - cta, MAX_CTAS) + 1
            ahead = min(together, pl.cdiv(rows, MAX_CTAS))

            def own_row(number: Any) -> Any:
                return cta + number * MAX_CTAS

            # All on their way before the first is sent.
            first = [read(x_ref.at[own_row(jnp.minimum(number, own_rows - 1))]) for number in range(ahead)]
            for number, x in enumerate(first):
                pl.when(number < own_rows)(partial(send, own_row(number), x))

            @pl.loop(0, own_rows)
            def _(number: Any) -> None:
                @pl.when(number + ahead < own_rows)
                def _() -> None:
                    row = own_row(number + ahead)
                    send(row, read(x_ref.at[row]))

                row = own_row(number)
                add(row, read(x_ref.at[row]), read(in_ref.at[row]))

        generations_ref[cta] = generation  # behind the barrier of a write: all threads have read it

    inbox_ref, generations_ref = jax.new_ref(inbox), jax.new_ref(generations)
    shape = jax.ShapeDtypeStruct((rows, hidden), dtype)
    results = plgpu.kernel(
        body,
        out_type=(shape,) if scale is None else (shape, shape),
        grid=(min(rows, MAX_CTAS),),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="all_reduce_add_norm" if scale is not None else "all_reduce_add",
    )(inbox_ref, generations_ref, peers, parts, residual, *vectors)
    return inbox_ref[...], generations_ref[...], results[0], None if scale is None else results[1]


def _send(x: Any, layout: Any, first: Any, inboxes: Sequence[tuple[Any, Any]]) -> None:
    """Stores a row in the other devices' inboxes, from word `first` on. inboxes: halves of addresses, low and high."""

    @plgpu.inline_mgpu(arg_types=(layout, *[plgpu.Layout.WG_SPLAT] * (1 + 2 * len(inboxes))))
    def send(ctx: Any, x: Any, first: Any, *halves: Any) -> None:
        del ctx
        vectors = [_as_words(register) for register in x.registers.flat]
        for low, high in zip(halves[::2], halves[1::2], strict=True):
            for address, words in zip(_addresses(_pointer(low, high), first, x.layout), vectors, strict=True):
                _store_words(words, address)

    send(x, first, *(half for address in inboxes for half in address))


def _receive(inbox_ref: Any, firsts: Sequence[Any], layout: Any, dtype: Any) -> tuple[jax.Array, ...]:
    """Rows [hidden] of the inbox, each from its word `first` on; waits for them, and leaves their places empty."""
    row_type = plgpu.ShapeDtypeStruct((2 * inbox_ref.shape[3],), dtype, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(firsts)), return_type=(row_type,) * len(firsts)
    )
    def receive(ctx: Any, inbox: Any, *firsts: Any) -> Any:
        del ctx
        here, spread = mgpu.utils.memref_ptr(inbox), layout.to_mgpu()
        addresses = [address for first in firsts for address in _addresses(here, first, spread)]
        vectors = _wait_for_words(addresses, spread.vec_size // 2)
        for address, words in zip(addresses, vectors, strict=True):
            _store_words([constant(EMPTY)] * len(words), address)
        kind = ir.VectorType.get((spread.vec_size,), mgpu.utils.dtype_to_ir_type(dtype))
        registers = np.array([_from_words(words, kind) for words in vectors], object).reshape(len(firsts), -1)
        return tuple(mgpu.FragmentedArray(_registers=one, _layout=spread, _is_signed=None) for one in registers)

    return receive(inbox_ref, *firsts)


def _addresses(base: Any, first: Any, layout: Any) -> list[Any]:
    """Where a thread's vectors of a row lie, if the row begins `first` words behind `base`."""
    i32, words = ir.IntegerType.get_signless(32), layout.vec_size // 2
    thread = arith.remui(mgpu.utils.thread_idx(), constant(_THREADS))
    begin = offset(base, arith.addi(scalar(first), arith.muli(thread, constant(words))), i32)
    vectors = layout.shape[0] // (_THREADS * layout.vec_size)
    return [offset(begin, constant(number * _THREADS * words), i32) for number in range(vectors)]


def _as_words(register: Any) -> list[Any]:
    """Integers of 32 bits with a vector's bits, of which none is EMPTY: two NaNs that would be become other NaNs."""
    count = ir.VectorType(register.type).shape[0] // 2
    words = vector.bitcast(ir.VectorType.get((count,), ir.IntegerType.get_signless(32)), register)
    each = [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(count)]
    return [arith.minui(word, constant(EMPTY - 1)) for word in each]


def _from_words(words: Sequence[Any], kind: Any) -> Any:
    """The vector whose bits they are."""
    i32 = ir.IntegerType.get_signless(32)
    return vector.bitcast(kind, vector.from_elements(ir.VectorType.get((len(words),), i32), list(words)))


def _store_words(words: Sequence[Any], address: Any) -> None:
    """Stores neighbours, each word on its own as far as another device can tell."""
    values = ", ".join(f"${i + 1}" for i in range(len(words)))
    if len(words) == 1:
        instruction("st.relaxed.sys.global.b32 [$0], $1;", address, *words)
    else:
        instruction(f"st.relaxed.sys.global.v{len(words)}.b32 [$0], {{{values}}};", address, *words)


def _wait_for_words(addresses: Sequence[Any], width: int) -> list[list[Any]]:
    """Vectors of so many words, loaded again and again until no word is EMPTY."""
    i32 = ir.IntegerType.get_signless(32)
    loop = scf.WhileOp([i32] * (len(addresses) * width), [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        words = [word for address in addresses for word in _load_words(address, width)]
        most = words[0]
        for word in words[1:]:
            most = arith.maxui(most, word)
        scf.condition(arith.cmpi(arith.CmpIPredicate.eq, most, constant(EMPTY)), words)
    with ir.InsertionPoint(loop.after.blocks.append(*[i32] * len(words))):
        scf.yield_([])
    found = list(loop.results)
    return [found[i : i + width] for i in range(0, len(found), width)]


def _load_words(address: Any, width: int) -> list[Any]:
    """Neighbours, each word on its own as far as another device can tell."""
    i32 = ir.IntegerType.get_signless(32)
    if width == 1:
        return [instruction("ld.relaxed.sys.global.b32 $0, [$1];", address, result=i32)]
    names = ", ".join(f"${i}" for i in range(width))
    return instruction(f"ld.relaxed.sys.global.v{width}.b32 {{{names}}}, [${width}];", address, result=[i32] * width)


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
