"""Layers that keep 4 bits a value, in groups of inputs that share a scale, and maybe a zero point.

kernel     uint8 [*outputs, inputs / 2]    two values a byte: see `pallas_kernels.int4_product`
scale      float32 [*outputs, G]
zero       uint8 [*outputs, G]             of checkpoints whose groups have zero points; else it is 8
order      int32 [inputs]                  act-order: which input each value is for, groups side by side
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.grouped_linear import GroupedLinear
from jpaged.models.linear import Linear
from jpaged.models.parameters import Ascending, Bits, Constant, parameter
from jpaged.models.quantization.grouped import QuantizedGroupedLinear, Values
from jpaged.models.quantization.layers import QuantizedLinear, WholeGroups, rows_parameter
from jpaged.pallas_kernels import int4_product
from jpaged.pallas_kernels.int4_product import reference
from jpaged.pallas_kernels.int4_product.api import MIDDLE

_RANDOM, _RANDOM_STD = Bits(halves_around_8=True), 4.18
"""What values start from, and how they deviate."""


@dataclass(frozen=True)
class Int4(WholeGroups):
    """group: inputs that share a scale. zero_points: groups have some. act_order: inputs of a group are scattered."""

    group: int
    zero_points: bool = False
    act_order: bool = False

    bits = 4

    @property
    def reorders_inputs(self) -> bool:
        return self.act_order

    def linear(self, plain: Linear, rngs: nnx.Rngs) -> QuantizedLinear:
        return Int4Linear(plain, self, rngs)

    def grouped(self, plain: GroupedLinear, rngs: nnx.Rngs) -> GroupedLinear:
        values = Values("int4", self.group, jnp.uint8, _RANDOM, self.zero_points, act_order=self.act_order)
        return QuantizedGroupedLinear(plain, values, Constant(plain.layout.std / _RANDOM_STD), jnp.float32, rngs)

    def arrays(
        self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, order: np.ndarray | None
    ) -> dict[str, Any]:
        """A layer's arrays.

        values: uint8 [outputs, inputs], from 0 to 15. scales, zeros: [outputs, G].
        order: the inputs, those of the first group first; None where they follow each other.
        """
        if order is not None:
            values = values[:, order]
        arrays = {"": reference.pack(np.ascontiguousarray(values), self.group), "_scale": scales}
        if self.zero_points:
            arrays["_zero"] = np.full(scales.shape, MIDDLE, np.uint8) if zeros is None else zeros
        if self.act_order:
            arrays["_order"] = np.arange(values.shape[1], dtype=np.int32) if order is None else order
        return arrays

    def dequantized(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> jax.Array:
        """[outputs, inputs] of a layer's arrays, in the order of these; rounded once, from float32."""
        return _dequantized(arrays[""], arrays["_scale"], arrays.get("_zero"), self.group, dtype)


class Int4Linear(QuantizedLinear):
    """See above."""

    def __init__(self, plain: Linear, kind: Int4, rngs: nnx.Rngs) -> None:
        super().__init__(plain)
        self.kind = kind
        inputs, groups = self.layout.input_size, self.layout.input_size // kind.group
        scales = Constant(self.layout.std / _RANDOM_STD)
        rows = partial(rows_parameter, self.layout, rngs, by_input=True)
        self.kernel = rows(_RANDOM, inputs // 2, jnp.uint8, "", weights_each=2)
        self.scale = rows(scales, groups, jnp.float32, "_scale")
        self.zero = rows(Constant(MIDDLE), groups, jnp.uint8, "_zero") if kind.zero_points else None
        options: dict[str, Any] = {"suffix": "_order", "weights_each": 0}
        integers = jnp.dtype(jnp.int32)
        self.order = parameter(rngs, Ascending(), (inputs,), integers, **options) if kind.act_order else None

    def _multiply(self, x: jax.Array, dtype: Any, backend: str | None) -> jax.Array:
        kernel, scale, outputs = self.kernel[...], self.scale[...], self.layout.output_size
        if self.order is not None:
            x = x[:, self.order[...]]
        zero = None if self.zero is None else self.zero[...].reshape(outputs, -1)
        values, scales = kernel.reshape(outputs, -1), scale.reshape(outputs, -1)
        return int4_product(x, values, scales, zero, group=self.kind.group, dtype=dtype, backend=backend)


@partial(jax.jit, static_argnums=(3, 4))
def _dequantized(
    values: jax.Array, scales: jax.Array, zeros: jax.Array | None, group: int, dtype: jnp.dtype
) -> jax.Array:
    return reference.dequantized(values, scales, zeros, group).astype(dtype)
