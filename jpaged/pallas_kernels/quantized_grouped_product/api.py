"""A product of a mixture of experts in 8 or 4 bits: `grouped_product` with weights that are widened as they are read.

    x [A, K], rows of a group each    w [E, N, K], or [E, N, K / 2] bytes    scale [E, N, G], of G groups of inputs

    form      w                        weight                scale
    "fp8"     e4m3                     w * scale             float32
    "int8"    int8                     w * scale             float32
    "int4"    uint8, two values each   (w - zero) * scale    float32, zero uint8 likewise or 8 throughout
    "mxfp4"   uint8, two values each   w * 2^(scale - 127)   uint8; w is one of +-0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1)
    "nvfp4"   uint8, two values each   w * (scale / outer)   e4m3, of 16 inputs; outer float32 [E, N]; w likewise

    out [A, N]        weights * (x @ weight[e].T)
        [A, N / 2]    activation(gate) * up, with gate the first half of the outputs, and up the second

Rows of w are outputs, and two values share a byte as in `int4_product`: those of the two halves of a group. Rows belong
to groups as in `grouped_product`, sorted, or each by its number. x stays in its type. Both implementations read the
matrices of groups that have rows alone, and never hold a second copy of them all.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.gated_product.reference import ACTIVATIONS
from jpaged.pallas_kernels.grouped_product.api import check_tiles
from jpaged.pallas_kernels.grouped_product.tiles import RowGroups, RowTiles
from jpaged.pallas_kernels.int4_product.api import check_group, check_outer
from jpaged.pallas_kernels.quantized_grouped_product.operands import Experts, Operands, Options
from jpaged.pallas_kernels.registry import Op, is_hopper

OP = Op("quantized_grouped_product", __package__, also={"triton": is_hopper})

Form = Literal["fp8", "int8", "int4", "mxfp4", "nvfp4"]
"""What a weight is, see above."""


def quantized_grouped_product(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    group_sizes: jax.Array | None,
    *,
    form: Form,
    group: int | None = None,
    zero: jax.Array | None = None,
    outer: jax.Array | None = None,
    groups: jax.Array | None = None,
    tiles: RowTiles | None = None,
    row_indices: jax.Array | None = None,
    weights: jax.Array | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> jax.Array:
    """See above. Sums are float32; "xla" rounds weights with scales of groups of inputs to x's type first.

    Args:
        x: floats [A, K], or with `row_indices` [T, K].
        w: float8_e4m3fn or int8 [E, N, K], or uint8 [E, N, K / 2].
        scale: float32, uint8 of "mxfp4", float8_e4m3fn of "nvfp4" [E, N, G].
        group_sizes: int32 [E], rows of each group, none negative, no more than A in all; or None, with
        groups: int32 [A], the group of each row, in any order; others than 0 .. E - 1 are no group.
        form: see `Form`.
        group: inputs that share a scale. "fp8", "int8": None for all; of the last group it may be fewer. Else even, a
            divisor of K; 32 of "mxfp4"; 16 of "nvfp4", whose K 32 divides.
        zero: uint8 [E, N, G], with "int4" alone; None for 8.
        outer: float32 [E, N], of "nvfp4" alone. Where it is 0, so are weights.
        tiles: of the rows of group_sizes, where they are known; used if their height is the kernel's (`tile_height`).
        row_indices: int32 [A], which of x's rows each row is, so that nobody has to gather them before; None for all in
            their order. Of rows of no group it may be anything.
        weights: float32 [A], what each row is multiplied by; None for nothing. More may be behind these.
        activation: as of `gated_grouped_product`; None for a product of all outputs. Not with weights.
        backend: "triton" or "xla"; None picks by device, dtype and shapes.
    Returns:
        [A, N] of x's dtype, with an activation [A, N / 2]. Rows of no group hold anything, NaN included.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    _check(x, w, scale, zero, outer, form, group)
    experts, outputs = w.shape[:2]
    rows = x.shape[0]
    if row_indices is not None:
        check.check_int32("row_indices", row_indices, "A", (None,))
        rows = row_indices.shape[0]
    if (group_sizes is None) == (groups is None):
        raise ValueError("one of group_sizes and groups must be given, and not both")
    if group_sizes is not None:
        check.check_int32("group_sizes", group_sizes, "E", (experts,))
    if groups is not None:
        check.check_int32("groups", groups, "A", (rows,))
    check_tiles(tiles, group_sizes, rows, experts)
    if weights is not None:
        check.check_array("weights", weights, jnp.float32, "A", (None,))
        if weights.shape[0] < rows:
            raise ValueError(f"weights must be one for each of {rows} rows, got shape {weights.shape}")
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if weights is not None:
            raise ValueError("weights do not go with an activation")
        if outputs % 2:
            raise ValueError(f"w has {outputs} outputs, which are no halves for gate and up")
    run = OP.pick(backend, x, w, scale, form, group).run
    columns = outputs if activation is None else outputs // 2
    if 0 in (rows, *x.shape, *w.shape):
        return jnp.zeros((rows, columns), x.dtype)
    operands = Operands(x, Experts(w, scale, zero, outer), RowGroups(group_sizes, groups, tiles), weights, row_indices)
    return run(operands, Options(form, group, activation))


def tile_height(rows: int, experts: int, *, has_groups: bool) -> int:
    """Rows of a tile, at most, in which the kernel takes so many rows of so many experts: at least as many as an expert
    has on average, and 8 up to 4 on average. What `tiles` are best made of. has_groups: of inputs, with scales of their
    own."""
    heights = HEIGHTS[:-1] if has_groups else HEIGHTS
    if 2 * rows <= HEIGHTS[0] * experts:
        return HEIGHTS[0]  # above 4 on average, many experts would need two
    return next((height for height in heights[1:] if height * experts >= rows), heights[-1])


HEIGHTS = (8, 16, 32, 64, 128)
"""Of tiles, at most. The highest one is for a scale an output: the products of a group with a scale of its own are in
registers beside the sums."""


def _check(x: Any, w: Any, scale: Any, zero: Any, outer: Any, form: str, group: int | None) -> None:
    if form not in get_args(Form):
        raise ValueError(f"form must be one of {', '.join(get_args(Form))}, got {form!r}")
    check.check_floats("x", x, "A, K")
    inputs = x.shape[1]
    if form in EIGHT_BITS:
        if group is not None and (not isinstance(group, int) or group < 1):
            raise ValueError(f"group must be at least 1, or None for all inputs, got {group!r}")
        check.check_array("w", w, EIGHT_BITS[form], "E, N, K", (None, None, inputs))
        number = 1 if group is None else -(-inputs // group)
    else:
        check_group(form, group, inputs)
        assert group is not None
        if form == "mxfp4" and group != MX_GROUP:
            raise ValueError(f"group of form='mxfp4' must be {MX_GROUP}, got {group}")
        check.check_array("w", w, jnp.uint8, "E, N, K / 2", (None, None, inputs // 2))
        number = inputs // group
    shape = (w.shape[0], w.shape[1], number)
    check.check_array("scale", scale, _SCALES.get(form, jnp.float32), "E, N, G", shape)
    check_outer(form, outer, "E, N", shape[:2])
    if zero is not None:
        if form != "int4":
            raise ValueError(f"zero goes with form='int4', and not with {form!r}")
        check.check_array("zero", zero, jnp.uint8, "E, N, G", shape)


EIGHT_BITS = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
"""Forms of a value a byte, and their types."""

_SCALES = {"mxfp4": jnp.uint8, "nvfp4": jnp.float8_e4m3fn}

MX_GROUP = 32
"""Inputs that share a scale in MXFP4."""
