"""`hopper_primitives.py` in words that Pallas' GPU interpreter knows. Products are computed at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jpaged.pallas_kernels.common.hopper_interpreted import await_kernel_before, in_warps, set_registers  # noqa: F401
from jpaged.pallas_kernels.gated_product.hopper_tiling import ROWS
from jpaged.pallas_kernels.invariant_product.hopper_interpreted import zeros  # noqa: F401


def stored_shape(shape: tuple[int, ...], padded: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an output that `store_outputs` stores: that of whole tiles, since no store leaves out a part."""
    del shape
    return padded


def load_groups(ref: Any, output: jax.Array, group: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Numbers of `count` groups from `group` on, of 64 outputs from `output` on: [64] a group; behind the last output
    and the last group, theirs."""
    outputs, groups = ref.shape
    rows = jnp.minimum(output + jnp.arange(ROWS), outputs - 1)
    columns = jnp.minimum(group + jnp.arange(count), groups - 1)
    found = ref[...][rows][:, columns]
    return tuple(found[:, i] if found.dtype == jnp.float32 else found[:, i].astype(jnp.int32) for i in range(count))


def add_products(
    sums: tuple[jax.Array, ...], w_ref: Any, x_ref: Any, scales: Any, zero_points: Any, form: Any
) -> tuple[jax.Array, ...]:
    """sums + (a stage's weights) @ x^T; arguments as of `hopper_primitives`."""
    packed, x = w_ref[...], x_ref[...]
    plgpu.commit_smem()  # for the detector of races, to which an arrival alone does not order reads before it
    x = jnp.concatenate(list(x), axis=1)  # [rows, inputs of a stage]
    added, group = [], form.group or form.inputs
    for block, total in enumerate(sums):
        of_groups = packed[block * ROWS : (block + 1) * ROWS].reshape(ROWS, form.groups, -1)
        for number in range(form.groups):
            own = of_groups[:, number]
            if form.bits == 8:
                values = lax.bitcast_convert_type(own, jnp.float8_e4m3fn)
            else:
                values = jnp.concatenate([own & 15, own >> 4], axis=1).astype(jnp.int32)
                values -= zero_points[block][number][:, None] if zero_points else 8
            inputs = x[:, number * group : (number + 1) * group]
            part = jnp.dot(values.astype(x.dtype), inputs.T, preferred_element_type=jnp.float32)
            total += part * scales[block][number][:, None] if scales else part
        added.append(total)
    return tuple(added)


def scaled(sums: jax.Array, scale: jax.Array) -> jax.Array:
    """sums [64, rows] * scale [64]."""
    return sums * scale[:, None]


def store_outputs(
    out_ref: Any, sums: jax.Array, split: jax.Array, row: jax.Array, rows: int, output: jax.Array, outputs: int
) -> None:
    """Stores sums [64, columns] as outputs from `output` on, of rows from `row` on."""
    del rows, outputs
    out_ref[split, pl.ds(row, sums.shape[1]), pl.ds(output, ROWS)] = sums.T.astype(out_ref.dtype)
