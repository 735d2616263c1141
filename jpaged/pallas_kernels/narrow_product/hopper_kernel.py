"""Hopper's product of rows in 16 bits with weights in 4 or 8, which `int4_product` and `fp8_product` use.

    a CTA: 64 to 256 outputs x 8 to 128 rows, of all inputs or of a part of them

    producer (a warp)                                          consumers, 64 outputs each or more
    free --> TMA --> w [outputs, 128]: 256 inputs, or 128      bytes --> 16-bit numbers, in registers
                     x [4 or 2, rows, 64]: of the same         a group's sums = numbers x^T
                     --> full                                  sums += a group's sums * its scales

A weight's bits are placed in a 16-bit float, which is then too small by a power of two. One multiplication corrects
that; for 4-bit integers the same FMA subtracts the zero point. Scales multiply float32 sums. Products are a warp's
(mma) for up to 16 rows, and a warpgroup's (wgmma) for more; `hopper_primitives.py` says which inputs a thread takes.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.devices import num_multiprocessors
from jpaged.pallas_kernels.gated_product.hopper_primitives import LINES
from jpaged.pallas_kernels.gated_product.hopper_tiling import DEPTH, ROWS
from jpaged.pallas_kernels.narrow_product import hopper_interpreted, hopper_primitives
from jpaged.pallas_kernels.narrow_product.hopper_primitives import MMA_ROWS

GROUPS = (32, 64, 128)
"""Inputs that may share a scale."""
STAGE_BYTES = 128
"""Of each output's weights, in a stage: 256 inputs in 4 bits, 128 in 8."""
_MOST_SPLITS = 8
_MOST_OUTPUTS = 256  # of a copy
_PRODUCER = 40  # registers
_SHARED_BYTES = 226 << 10  # of the 227 KiB that a CTA may have, less its barriers


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel is cut.

    Attributes:
        rows: of a CTA: 8, 16, 32, 64 or 128.
        blocks: of 64 outputs, of a consumer. A CTA has at most 256 outputs.
        consumers: warpgroups that compute; from 32 rows on two or more.
        stages: of the ring, as far as they fit into shared memory.
        splits: parts of the inputs, whose sums XLA adds up; None for `splits_of`.
    """

    rows: int
    blocks: int = 1
    consumers: int = 2
    stages: int = 4
    splits: int | None = None

    def __post_init__(self) -> None:
        if self.rows not in (8, 16, 32, 64, 128):
            raise ValueError(f"rows must be 8, 16, 32, 64 or 128, got {self.rows}")
        if min(self.blocks, self.consumers) < 1 or self.outputs > _MOST_OUTPUTS:
            raise ValueError(f"blocks x consumers x {ROWS} must be at most {_MOST_OUTPUTS} outputs, got {self.outputs}")
        if not self.by_mma and self.consumers < 2:
            raise ValueError(f"consumers must be at least 2 with {self.rows} rows, got {self.consumers}")
        if self.stages < 1 or self.stages * self.stage_bytes > _SHARED_BYTES:
            raise ValueError(f"{self.stages} stages of {self.stage_bytes} bytes do not fit into {_SHARED_BYTES}")

    @property
    def by_mma(self) -> bool:
        """Whether each warp multiplies by itself; else a warpgroup does, by wgmma."""
        return self.rows <= MMA_ROWS

    @property
    def outputs(self) -> int:
        return ROWS * self.blocks * self.consumers

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of a consumer's thread and of the producer's, all that there are. None for up to 16 rows, where all
        threads have what the compiler takes.
        """
        if self.by_mma:
            return None
        threads = self.consumers + 1  # by 128, of which a multiprocessor has 512 registers
        together = 512 // threads // 8 * 8 * threads
        return min(232, (together - _PRODUCER) // self.consumers // 8 * 8), _PRODUCER

    @property
    def reads_ahead(self) -> bool:
        """Whether consumers read a step's scales a step ahead. Sums of 128 rows leave no registers for them."""
        return self.rows < 128

    @property
    def ctas_a_multiprocessor(self) -> int:
        """How many run there at the same time, by the registers that the compiler takes."""
        return 2 if self.rows == 8 and self.consumers == 1 else 1

    @property
    def stage_bytes(self) -> int:
        """With 4-bit weights, whose stages have the most inputs."""
        return self.outputs * STAGE_BYTES + self.rows * 4 * STAGE_BYTES


def splits_of(t: Tiling, ctas: int, steps: int) -> int:
    """Parts of the inputs, each of at least two of `steps`: as many as run at the same time."""
    at_once = num_multiprocessors() * t.ctas_a_multiprocessor
    return max(1, min(_MOST_SPLITS, steps // 2, at_once // ctas))


@dataclasses.dataclass(frozen=True)
class Form:
    """How weights are kept.

    Attributes:
        bits: of one; 4 of integers as in `int4_product`, 8 of e4m3.
        group: inputs that share a scale, one of `GROUPS`; None: each output has one.
        zeros: groups have zero points; without them, that of 4 bits is 8.
    """

    bits: int
    group: int | None
    zeros: bool = False

    @property
    def inputs(self) -> int:
        """Of a stage."""
        return STAGE_BYTES * 8 // self.bits

    @property
    def groups(self) -> int:
        """Of a stage. Each has sums of its own, which its scale multiplies."""
        return 1 if self.group is None else self.inputs // self.group


def narrow_product(
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None], form: Form, t: Tiling, dtype: Any, interpret: Any
) -> jax.Array:
    """x @ (weights * scales).T, summed in float32; called inside a jit.

    Args:
        arrays: x, bfloat16 or float16 [M, K]; weights, uint8 [N, K * bits / 8], packed as in `int4_product` or the bits
            of e4m3; scales, float32 [N, G]; zero points, uint8 [N, G], or None.
        form: how weights are kept.
        t: of at most 16 rows with weights in 8 bits.
        dtype: of the result.
        interpret: a `plgpu.InterpretGPUParams` runs the kernel on a CPU.
    Returns:
        [M, N].
    Raises:
        ValueError: weights in 8 bits with a tiling of more than 16 rows.
    """
    if form.bits == 8 and not t.by_mma:
        raise ValueError(f"weights in 8 bits have tiles of at most {MMA_ROWS} rows, got {t.rows}")
    x, w, scale, zero = arrays
    rows, depth = x.shape
    outputs = w.shape[0]
    strips, tiles, steps = pl.cdiv(outputs, t.outputs), pl.cdiv(rows, t.rows), pl.cdiv(depth, form.inputs)
    part = pl.cdiv(steps, t.splits or splits_of(t, strips * tiles, steps))
    splits = pl.cdiv(steps, part)
    gpu = hopper_primitives if interpret is None else hopper_interpreted
    s = _Shape(t, form, gpu, rows, outputs, steps, part)
    shape = gpu.stored_shape((splits, rows, outputs), (splits, tiles * t.rows, strips * t.outputs))
    kernel = plgpu.kernel(
        functools.partial(_kernel, s),
        out_type=jax.ShapeDtypeStruct(shape, dtype if splits == 1 else jnp.float32),
        scratch_types=_Stages.of(t, form, x.dtype),
        grid=(strips, tiles, splits),
        grid_names=("strip", "tile", "split"),
        num_threads=t.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="int4_product" if form.bits == 4 else "fp8_product",
        interpret=interpret,
    )
    y = kernel(x, w, scale, scale if zero is None else zero)[:, :rows, :outputs]
    return y[0] if splits == 1 else jnp.sum(y, axis=0).astype(dtype)


class _Stages(NamedTuple):
    """Shared memory, and its barriers.

    full: by every copy into the stage. free: by each consumer.
    """

    w: Any  # [stages, outputs, 128]
    x: Any  # [stages, inputs of a stage / 64, rows, 64]
    full: Any
    free: Any

    @classmethod
    def of(cls, t: Tiling, form: Form, dtype: jnp.dtype) -> "_Stages":
        copies = form.inputs // DEPTH
        return cls(
            w=plgpu.SMEM((t.stages, t.outputs, STAGE_BYTES), jnp.uint8, transforms=LINES),
            x=plgpu.SMEM((t.stages, copies, t.rows, DEPTH), dtype, transforms=LINES),
            full=plgpu.Barrier(num_barriers=t.stages, num_arrivals=1 + copies),
            free=plgpu.Barrier(num_barriers=t.stages, num_arrivals=t.consumers),
        )


class _Arguments(NamedTuple):
    """The call's arrays in global memory."""

    x: Any  # [M, K]
    w: Any  # uint8 [N, K * bits / 8]
    scale: Any  # float32 [N, G]
    zero: Any  # uint8 likewise; where there are none, anything
    out: Any  # [splits, M, N]


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the kernel is specialised for."""

    tiling: Tiling
    form: Form
    gpu: ModuleType
    rows: int
    outputs: int
    steps: int
    part: int  # steps of a CTA


class _Cta(NamedTuple):
    """A CTA at work, as each of its warpgroups sees it."""

    shape: _Shape
    gmem: _Arguments
    smem: _Stages
    output: jax.Array  # the first
    row: jax.Array  # the first
    split: jax.Array
    begin: jax.Array  # the first step
    steps: jax.Array


def _kernel(s: _Shape, *refs: Any) -> None:
    gmem, smem = _Arguments(*refs[: len(_Arguments._fields)]), _Stages(*refs[len(_Arguments._fields) :])
    s.gpu.await_kernel_before()
    strip, tile, split, wg = (lax.axis_index(name) for name in ("strip", "tile", "split", "wg"))
    begin = split * s.part
    steps = jnp.minimum(s.steps - begin, s.part)
    c = _Cta(s, gmem, smem, strip * s.tiling.outputs, tile * s.tiling.rows, split, begin, steps)
    pl.when(wg == s.tiling.consumers)(lambda: _produce(c))
    pl.when(wg < s.tiling.consumers)(lambda: _consume(c, wg))


def _produce(c: _Cta) -> None:
    if (registers := c.shape.tiling.registers) is not None:
        c.shape.gpu.set_registers(registers[1], "decrease")
    c.shape.gpu.in_warps(lambda _: _load(c), "operands")


def _load(c: _Cta) -> None:
    """Brings the operands of all steps into shared memory, as one warp."""
    t, smem, inputs = c.shape.tiling, c.smem, c.shape.form.inputs

    def load_step(step: jax.Array, _: None) -> None:
        slot, at = lax.rem(step, t.stages), c.begin + step
        pl.when(step >= t.stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
        full = smem.full.at[slot]
        own = pl.ds(at * STAGE_BYTES, STAGE_BYTES)
        plgpu.copy_gmem_to_smem(c.gmem.w.at[pl.ds(c.output, t.outputs), own], smem.w.at[slot], full)
        for piece in range(inputs // DEPTH):
            own = pl.ds(at * inputs + piece * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(c.gmem.x.at[pl.ds(c.row, t.rows), own], smem.x.at[slot, piece], full)

    lax.fori_loop(0, c.steps, load_step, None)
    # No barrier may have an arrival outstanding when the CTA ends.
    for slot in range(t.stages):
        pl.when(slot < c.steps)(lambda slot=slot: plgpu.barrier_wait(smem.free.at[slot]))


def _consume(c: _Cta, wg: jax.Array) -> None:
    """A consumer warpgroup."""
    s, t, form, gpu, smem = c.shape, c.shape.tiling, c.shape.form, c.shape.gpu, c.smem
    if t.registers is not None:
        gpu.set_registers(t.registers[0], "increase")
    own = wg * (ROWS * t.blocks)  # its outputs in a stage
    firsts = [c.output + own + block * ROWS for block in range(t.blocks)]

    def factors(step: jax.Array) -> tuple[Any, Any]:
        """Scales and zero points of a step's groups: of each block an array [64] a group; () for none."""
        if form.group is None:
            return (), ()
        group = (c.begin + step) * form.groups
        scales = tuple(gpu.load_groups(c.gmem.scale, first, group, form.groups) for first in firsts)
        if not form.zeros:
            return scales, ()
        return scales, tuple(gpu.load_groups(c.gmem.zero, first, group, form.groups) for first in firsts)

    def add(step: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, ahead = carry
        scales, zeros = factors(step) if ahead is None else ahead
        later = None if ahead is None else factors(step + 1)
        slot = lax.rem(step, t.stages)
        plgpu.barrier_wait(smem.full.at[slot])
        w = smem.w.at[slot, pl.ds(own, ROWS * t.blocks)]
        sums = gpu.add_products(sums, w, smem.x.at[slot], scales, zeros, form)
        plgpu.barrier_arrive(smem.free.at[slot])
        return sums, later

    begun = tuple(gpu.zeros(t.rows) for _ in range(t.blocks)), factors(jnp.int32(0)) if t.reads_ahead else None
    sums, _ = lax.fori_loop(0, c.steps, add, begun)
    for first, one in zip(firsts, sums, strict=True):
        if form.group is None:
            one = gpu.scaled(one, *gpu.load_groups(c.gmem.scale, first, jnp.int32(0), 1))
        gpu.store_outputs(c.gmem.out, one, c.split, c.row, s.rows, first, s.outputs)
