"""Layers that keep 8-bit integers and float32 scales.

    kernel          int8 [*outputs, inputs]
    scale           float32 [*outputs, G]    of each output, of each group of inputs
    input_scale     float32 [1]              of activations, where the checkpoint has it ("static")
    order           int32 [inputs]           act-order: which input each value is for, groups side by side

A scale of a whole tensor stands there for each output, as of `fp8.py`.
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
from jpaged.models.quantization import row_scales
from jpaged.models.quantization.grouped import QuantizedGroupedLinear, Values
from jpaged.models.quantization.layers import QuantizedLinear, RowOrder, WholeGroups, rows_parameter
from jpaged.pallas_kernels import int8_product
from jpaged.pallas_kernels.int8_product.api import Activations
from jpaged.pallas_kernels.int8_product.rounding import round_to_int8

_RANDOM_STD = 73.9
"""Of equally likely values from -128 to 127."""


@dataclass(frozen=True)
class Int8(WholeGroups):
    """group: inputs that share a scale; None for all. activations: as of `pallas_kernels.int8_product`. act_order:
    inputs of a group are scattered."""

    group: int | None = None
    activations: Activations = "none"
    act_order: bool = False

    bits = 8
    zero_points = False

    @property
    def reorders_inputs(self) -> bool:
        return self.act_order

    def linear(self, plain: Linear, rngs: nnx.Rngs) -> QuantizedLinear:
        return Int8Linear(plain, self, rngs)

    def grouped(self, plain: GroupedLinear, rngs: nnx.Rngs) -> GroupedLinear:
        """Of experts weights alone are in 8 bits: their activations stay as they are, static scales are not read."""
        values = Values("int8", self.group, jnp.int8, Bits(), act_order=self.act_order)
        return QuantizedGroupedLinear(plain, values, Constant(plain.layout.std / _RANDOM_STD), jnp.float32, rngs)

    def arrays(
        self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, order: np.ndarray | None
    ) -> dict[str, Any]:
        """A layer's arrays.

        values: uint8 [outputs, inputs], 128 larger than what they stand for. scales: [outputs, G].
        zeros: None. order: the inputs, those of the first group first; None where they follow each other.
        """
        assert zeros is None
        if order is not None:
            values = values[:, order]
        arrays = {"": (values ^ 0x80).view(np.int8), "_scale": scales}
        if self.act_order:
            arrays["_order"] = np.arange(values.shape[1], dtype=np.int32) if order is None else order
        return arrays

    def dequantized(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> jax.Array:
        """[outputs, inputs] of a layer's arrays, in the order of these; rounded once, from float32."""
        return row_scales.dequantized(arrays[""], arrays["_scale"], self.group, dtype)

    def rounded(self, weight: jax.Array, order: RowOrder) -> tuple[jax.Array, jax.Array]:
        """As of `Scheme.rounded`."""
        return _rounded(weight, order)


class Int8Linear(QuantizedLinear):
    """See above."""

    def __init__(self, plain: Linear, kind: Int8, rngs: nnx.Rngs) -> None:
        super().__init__(plain)
        self.kind = kind
        inputs = self.layout.input_size
        groups = 1 if kind.group is None else inputs // kind.group
        rows = partial(rows_parameter, self.layout, rngs)
        self.kernel = rows(Bits(), inputs, jnp.int8, "", by_input=True, weights_each=1)
        scales = Constant(self.layout.std / _RANDOM_STD)
        self.scale = rows(scales, groups, jnp.float32, "_scale", by_input=kind.group is not None)
        static, floats, integers = kind.activations == "static", jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
        given: dict[str, Any] = {"suffix": "_input_scale", "weights_each": 0}
        self.input_scale = parameter(rngs, Constant(1 / 16), (1,), floats, **given) if static else None
        order: dict[str, Any] = {"suffix": "_order", "weights_each": 0}
        self.order = parameter(rngs, Ascending(), (inputs,), integers, **order) if kind.act_order else None

    def _multiply(self, x: jax.Array, dtype: Any, backend: str | None) -> jax.Array:
        outputs = self.layout.output_size
        if self.order is not None:
            x = x[:, self.order[...]]
        return int8_product(
            x,
            self.kernel[...].reshape(outputs, -1),
            self.scale[...].reshape(outputs, -1),
            None if self.input_scale is None else self.input_scale[...],
            group=self.kind.group,
            activations=self.kind.activations,
            dtype=dtype,
            backend=backend,
        )


@partial(jax.jit, static_argnums=1)  # one program, which writes no transposed copy of the weight
def _rounded(weight: jax.Array, order: RowOrder) -> tuple[jax.Array, jax.Array]:
    """Each output's largest magnitude becomes 127. NaN and infinity make the scale of their output NaN or infinite."""
    return round_to_int8(order.rows(weight))
