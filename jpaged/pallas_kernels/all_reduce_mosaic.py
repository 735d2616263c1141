"""One-shot all-reduce of few rows, added to the residual stream and normed, in one Mosaic GPU kernel (Hopper, NVLink).

    device d, CTA r, generation g
        1. partial[r] --stores--> inbox[g % 2, d, r] of every device, its own too
        2. fence; signals[d, r] = g of every other device
        3. wait until signals[p, r] of this device has reached g, for every p
        4. residual[r] + sum over p of inbox[g % 2, p, r] --> residual[r], norm --> normed[r]

One trip over NVLink: data is pushed, then the signal behind it. The sum goes over devices in their order, in float32,
so every device comes to the same bits. Nobody waits at the end: device p can write generation g + 2 over what a device
reads in generation g only after it got that device's signal of g + 1, hence after that one's kernel of g had ended.
CTA r meets CTAs r of the other devices only, so calls of any number of rows follow one another as they like.

Inbox and signals are state of the caller: zeros at first, the same arrays in all calls of all programs, and all devices
make the same calls in the same order. Peers write to them at any time, also before this device's call begins, so they
must stay where they are: programs take them donated, and never a copy. Plain loads and stores; no multicast.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from jpaged.pallas_kernels.inline_mosaic import constant, instruction, offset, scalar

MAX_ROWS = 64
"""Rows of a call: above, bandwidth counts, and a ring or a tree moves fewer bytes."""

_THREADS = 128


def unsupported(shape: tuple[int, ...], dtype: Any, num_devices: int) -> str | None:
    """Why the kernel cannot reduce arrays of this shape; None if it can."""
    rows, hidden = shape
    vector = 16 // jnp.dtype(dtype).itemsize
    if num_devices < 2:
        return f"there is nothing to reduce over {num_devices} device"
    if rows > MAX_ROWS:
        return f"{rows} rows are more than {MAX_ROWS}"
    if hidden % (_THREADS * vector):
        return f"rows of {hidden} do not divide into {_THREADS} threads with vectors of {vector}"
    if hidden > 8192:
        return f"rows of {hidden} do not fit one warpgroup's registers"
    return None


def initial_state(num_devices: int, hidden: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of a device's inbox and signals, which begin as zeros.

    They have to be zeros on every device before the first call is dispatched (`jax.block_until_ready`): a device that
    filled them after a faster peer's first signal would wipe it out, and wait for ever.

    inbox [2, devices, rows, hidden]. signals int32 [devices + 1, rows]: each sender's last generation, and behind them
    this device's own.
    """
    inbox = jax.ShapeDtypeStruct((2, num_devices, MAX_ROWS, hidden), dtype)
    return inbox, jax.ShapeDtypeStruct((num_devices + 1, MAX_ROWS), jnp.int32)


@partial(jax.jit, static_argnames=("axis", "num_devices", "norm_eps"))
def all_reduce_add_norm(
    inbox: jax.Array,
    signals: jax.Array,
    partial_sums: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    axis: str,
    num_devices: int,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Inside `shard_map` over the one axis of the mesh, whose devices are JAX's first, in order, and of one process.

    inbox, signals: `initial_state`. partial_sums, residual: [rows, hidden]. scale: [hidden], of the RMS norm.
    Returns: inbox, signals, the new residual, and its norm.
    """
    rows, hidden = partial_sums.shape
    inbox_ref, signals_ref = jax.new_ref(inbox), jax.new_ref(signals)
    shape = jax.ShapeDtypeStruct((rows, hidden), partial_sums.dtype)
    summed, normed = plgpu.kernel(
        partial(_kernel, axis, num_devices, norm_eps),
        out_type=(shape, shape),
        grid=(rows,),
        grid_names=("row",),
        # The barrier over devices that would come before each call: the signals do its work.
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="all_reduce_add_norm",
    )(inbox_ref, signals_ref, partial_sums, residual, scale)
    return inbox_ref[...], signals_ref[...], summed, normed


def _kernel(
    axis: str,
    num_devices: int,
    norm_eps: float,
    inbox_ref: Any,
    signals_ref: Any,
    partial_ref: Any,
    residual_ref: Any,
    scale_ref: Any,
    summed_ref: Any,
    normed_ref: Any,
) -> None:
    """One row, by one warpgroup."""
    _, hidden = partial_ref.shape
    dtype = partial_ref.dtype
    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=16 // dtype.itemsize)

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    plgpu.griddepcontrol_wait()  # the grid starts while the kernel before it ends
    row = lax.axis_index("row")
    me = lax.axis_index(axis)
    generation = signals_ref[num_devices, row] + 1
    parity = generation & 1
    _push(inbox_ref, read(partial_ref.at[row]), layout, parity, me, row, num_devices)
    before, weight = read(residual_ref.at[row]), read(scale_ref)  # on their way while the peers' rows are
    _tell_peers(signals_ref, row, me, generation, num_devices)
    _wait_for_peers(signals_ref, row, me, generation, num_devices)
    total = jnp.zeros((hidden,), jnp.float32)
    for device in range(num_devices):
        total = total + read(inbox_ref.at[parity, device, row]).astype(jnp.float32)
    after = (before.astype(jnp.float32) + total).astype(dtype)
    summed_ref.at[row][...] = after
    wide = after.astype(jnp.float32)
    mean = jnp.sum(wide * wide) * (1.0 / hidden)
    normed_ref.at[row][...] = (wide * lax.rsqrt(mean + norm_eps)).astype(dtype) * weight
    signals_ref[num_devices, row] = generation


def _push(inbox_ref: Any, x: Any, layout: Any, parity: Any, me: Any, row: Any, num_devices: int) -> None:
    """Stores a row in every device's inbox. (A store through `plgpu.remote_ref` is one of 2 bytes: the compiler knows
    nothing of a remote address's alignment.)
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *[plgpu.Layout.WG_SPLAT] * 3))
    def push(ctx: Any, inbox: Any, x: Any, parity: Any, me: Any, row: Any) -> None:
        words = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        own = scalar(me)
        for ahead in range(num_devices):  # each begins with itself, so that links are used evenly
            slot = _part(inbox, scalar(parity), own, scalar(row))
            there = mgpu.utils.memref_ptr(ctx.to_remote(slot, _device(own, ahead, num_devices)))
            for element, register in zip(x.layout.linear_thread_idxs(), x.registers.flat, strict=True):
                values = vector.bitcast(words, register)
                instruction(
                    "st.global.v4.b32 [$0], {$1, $2, $3, $4};",
                    offset(there, arith.index_cast(own.type, element), x.mlir_dtype),
                    *(vector.extract(values, dynamic_position=[], static_position=[i]) for i in range(4)),
                )

    push(inbox_ref, x, parity, me, row)


def _tell_peers(signals_ref: Any, row: Any, me: Any, generation: Any, num_devices: int) -> None:
    """After all threads' stores: sets this device's signal on every peer."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3))
    def tell(ctx: Any, signals: Any, row: Any, me: Any, generation: Any) -> None:
        mgpu.warpgroup_barrier()
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            # All threads' stores come before the signals: by the barrier before the fence, which is cumulative.
            instruction("fence.acq_rel.sys;")
            own = scalar(me)
            for ahead in range(1, num_devices):
                there = ctx.to_remote(_part(signals, own, scalar(row)), _device(own, ahead, num_devices))
                instruction("st.relaxed.sys.global.b32 [$0], $1;", mgpu.utils.memref_ptr(there), scalar(generation))

    tell(signals_ref, row, me, generation)


def _wait_for_peers(signals_ref: Any, row: Any, me: Any, generation: Any, num_devices: int) -> None:
    """Until every peer's signal here has reached the generation; all threads then see what came before it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3))
    def wait(ctx: Any, signals: Any, row: Any, me: Any, generation: Any) -> None:
        del ctx
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            own, wanted = scalar(me), scalar(generation)
            for ahead in range(1, num_devices):
                sender = _device(own, ahead, num_devices)
                here = mgpu.utils.memref_ptr(_part(signals, sender, scalar(row)))
                loop = scf.WhileOp([], [])
                with ir.InsertionPoint(loop.before.blocks.append()):
                    found = instruction("ld.relaxed.sys.global.b32 $0, [$1];", here, result=own.type)
                    behind = arith.subi(found, wanted)  # a peer may be one ahead, and numbers wrap around
                    scf.condition(arith.cmpi(arith.CmpIPredicate.slt, behind, constant(0)), [])
                with ir.InsertionPoint(loop.after.blocks.append()):
                    scf.yield_([])
            # What the peers stored before their signals comes before all threads' loads behind the barrier.
            instruction("fence.acq_rel.sys;")
        mgpu.warpgroup_barrier()

    wait(signals_ref, row, me, generation)


def _device(own: Any, ahead: int, num_devices: int) -> Any:
    """The device so many places after one's own."""
    return arith.remui(arith.addi(own, constant(ahead)), constant(num_devices))


def _part(ref: Any, *indices: Any) -> Any:
    """ref[indices], still a reference."""
    index = ir.IndexType.get()
    return mgpu.memref_slice(ref, tuple(arith.index_cast(index, i) for i in indices))
