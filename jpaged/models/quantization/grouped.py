"""Experts' linear layers that keep 8 or 4 bits.

    kernel    e4m3 or int8 [E, *outputs, inputs], or uint8 [E, *outputs, inputs / 2]
    scale     [E, *outputs, G]           of each output of each expert, of each group of inputs
    zero      uint8 likewise             of 4-bit checkpoints whose groups have zero points
    outer     float32 [E, *outputs, 1]   of NVFP4
    order     int32 [E, inputs]          act-order: which input each value of an expert is for

Only weights are in fewer bits: `pallas_kernels.quantized_grouped_product` widens them as it reads them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.grouped_linear import GroupedLinear, GroupedProduct, Rows
from jpaged.models.linear import LinearLayout
from jpaged.models.parameters import Ascending, Constant, Start, parameter
from jpaged.models.quantization.layers import rows_parameter
from jpaged.pallas_kernels import quantized_grouped_product
from jpaged.pallas_kernels.int4_product.api import MIDDLE
from jpaged.pallas_kernels.quantized_grouped_product.api import EIGHT_BITS, Form, tile_height


@dataclass(frozen=True)
class Values:
    """What weights are. form, group: as of `pallas_kernels.quantized_grouped_product`. dtype: of the array that has
    them. start: of random ones. zero_points: groups have some. outer: what those of NVFP4 start from; None for other
    forms. act_order: inputs of a group are scattered, in another way in each expert."""

    form: Form
    group: int | None
    dtype: Any
    start: Start
    zero_points: bool = False
    outer: float | None = None
    act_order: bool = False

    @property
    def each(self) -> int:
        """Weights in an element of the array."""
        return 1 if self.form in EIGHT_BITS else 2


class QuantizedGroupedLinear(GroupedLinear):
    """See above; made of a plain one and put in its place. scale, scale_dtype: what its scales start from."""

    def __init__(self, plain: GroupedLinear, values: Values, scale: Constant, scale_dtype: Any, rngs: nnx.Rngs) -> None:
        self.layout, self.values = plain.layout, values
        inputs = self.layout.input_size
        groups = 1 if values.group is None else -(-inputs // values.group)
        by_input = values.group is not None
        self.kernel = rows_parameter(
            self.layout,
            rngs,
            values.start,
            inputs // values.each,
            values.dtype,
            "",
            by_input=True,
            weights_each=values.each,
        )
        self.scale = rows_parameter(self.layout, rngs, scale, groups, scale_dtype, "_scale", by_input=by_input)
        zero = partial(rows_parameter, self.layout, rngs, Constant(MIDDLE), groups, jnp.uint8, "_zero")
        self.zero = zero(by_input=by_input) if values.zero_points else None
        outer = partial(rows_parameter, self.layout, rngs, size=1, dtype=jnp.float32, suffix="_outer", by_input=False)
        self.outer = None if values.outer is None else outer(start=Constant(values.outer))
        by_expert = 0 if self.layout.shard_axis == 0 else None
        options: dict[str, Any] = {"suffix": "_order", "weights_each": 0}
        ascending = partial(parameter, rngs, Ascending(), (self.layout.experts, inputs), jnp.dtype(jnp.int32))
        self.order = ascending(by_expert, **options) if values.act_order else None

    def tile_height(self, rows: int, backend: str | None) -> int:
        del backend  # one kernel alone has tiles
        return tile_height(rows, self.layout.experts, has_groups=self.scale.shape[-1] > 1)

    def product(self) -> GroupedProduct:
        others = (None if one is None else one[...] for one in (self.zero, self.outer, self.order))
        return QuantizedProduct(self.layout, self.values, self.kernel[...], self.scale[...], *others)


@dataclass(frozen=True)
class QuantizedProduct:
    """A `GroupedProduct`. kernel, scale, zero, outer, order: see above."""

    layout: LinearLayout
    values: Values
    kernel: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    outer: jax.Array | None
    order: jax.Array | None

    def promoted(self, dtype: jnp.dtype) -> jnp.dtype:
        return dtype

    def gated(self, x: jax.Array, rows: Rows, *, activation: str, backend: str | None) -> jax.Array:
        return self._product(x, rows, activation=activation, backend=backend)

    def multiply(self, x: jax.Array, rows: Rows, weights: jax.Array | None = None, *, backend: str | None) -> jax.Array:
        return self._product(x, rows, weights=weights, backend=backend)

    def _product(self, x: jax.Array, rows: Rows, **options: Any) -> jax.Array:
        """options: further arguments of `quantized_grouped_product`."""
        shape = (self.layout.experts, self.layout.output_size)
        if self.order is not None:
            x, rows = rows.of(x)
            x = jnp.take_along_axis(x, self.order[experts_of(rows, x.shape[0], self.layout.experts)], axis=1)
        w, scale = self.kernel.reshape(*shape, -1), self.scale.reshape(*shape, -1)
        return quantized_grouped_product(
            x,
            w,
            scale,
            rows.group_sizes,
            groups=rows.groups,
            tiles=rows.tiles,
            row_indices=rows.row_indices,
            form=self.values.form,
            group=self.values.group,
            zero=None if self.zero is None else self.zero.reshape(*shape, -1),
            outer=None if self.outer is None else self.outer.reshape(shape),
            **options,
        )


def experts_of(rows: Rows, count: int, experts: int) -> jax.Array:
    """int32 [A]: the expert of each row, and any of those that have none."""
    if rows.groups is not None:
        return jnp.clip(rows.groups, 0, experts - 1)
    assert rows.group_sizes is not None
    ends = jnp.cumsum(rows.group_sizes)
    return jnp.minimum(jnp.searchsorted(ends, jnp.arange(count), side="right"), experts - 1)
