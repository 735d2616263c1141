"""Layers that keep e4m3 values and float32 scales.

    kernel          e4m3 [*outputs, inputs]
    scale           float32 [*outputs, G]    of each output, of each group of inputs
    input_scale     float32 [1]              of activations, where the checkpoint has them ("static")

A scale of a whole tensor stands there for each output, so that joined layers (q, k and v; gate and up) keep theirs; it
takes 4 bytes for the thousands that an output's weights take. The scales of 128 x 128 blocks stand there for each of
their 128 outputs, 3 % of the weights' bytes.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.grouped_linear import GroupedLinear
from jpaged.models.linear import Linear, Rounding, Rows, Term, count_rows
from jpaged.models.parameters import Constant, Normal, parameter
from jpaged.models.quantization.grouped import QuantizedGroupedLinear, Values
from jpaged.models.quantization.layers import Kind, QuantizedLinear, RowOrder, rows_parameter
from jpaged.pallas_kernels import RoundedRows, Sums, fp8_product
from jpaged.pallas_kernels.fp8_product.api import Activations, product_of_rounded, takes_rounded_rows
from jpaged.pallas_kernels.fp8_product.rounding import round_to_fp8
from jpaged.pallas_kernels.round_rows.operands import type_of_sums

_RANDOM_STD = 64.0
"""Of random values: about what the largest of some thousands at 448 leaves the others."""


_LEAST_GROUP = 64
"""Of experts: `pallas_kernels.quantized_grouped_product` has a kernel for groups of 64 and of 128."""


@dataclass(frozen=True)
class Fp8:
    """group: inputs that share a scale; None for all. activations, upper_bound: as of `pallas_kernels.fp8_product`."""

    group: int | None = None
    activations: Activations = "none"
    upper_bound: float | None = None

    reorders_inputs = False

    @property
    def least_group(self) -> int | None:
        return None if self.group is None else min(self.group, _LEAST_GROUP)

    def in_groups_of(self, group: int) -> Kind:
        return replace(self, group=group)

    def linear(self, plain: Linear, rngs: nnx.Rngs) -> QuantizedLinear:
        return Fp8Linear(plain, self, rngs)

    def grouped(self, plain: GroupedLinear, rngs: nnx.Rngs) -> GroupedLinear:
        """Of experts weights alone are in FP8: their activations stay as they are, static scales are not read."""
        values = Values("fp8", self.group, jnp.float8_e4m3fn, Normal(_RANDOM_STD))
        return QuantizedGroupedLinear(plain, values, Constant(plain.layout.std / _RANDOM_STD), jnp.float32, rngs)

    def rounded(self, weight: jax.Array, order: RowOrder) -> tuple[jax.Array, jax.Array]:
        """As of `Scheme.rounded`."""
        return _rounded(weight, order)


class Fp8Linear(QuantizedLinear):
    """See above."""

    def __init__(self, plain: Linear, kind: Fp8, rngs: nnx.Rngs) -> None:
        super().__init__(plain)
        self.kind = kind
        inputs = self.layout.input_size
        groups = 1 if kind.group is None else -(-inputs // kind.group)
        values, scales = Normal(_RANDOM_STD), Constant(self.layout.std / _RANDOM_STD)
        e4m3, by_input = jnp.float8_e4m3fn, kind.group is not None
        self.kernel = rows_parameter(self.layout, rngs, values, inputs, e4m3, "", by_input=True, weights_each=1)
        self.scale = rows_parameter(self.layout, rngs, scales, groups, jnp.float32, "_scale", by_input=by_input)
        static = kind.activations == "static"
        options: dict[str, Any] = {"suffix": "_input_scale", "weights_each": 0}
        one = jnp.dtype(jnp.float32)
        self.input_scale = parameter(rngs, Constant(1 / 64), (1,), one, **options) if static else None

    def rounding(self, num_rows: int, backend: str | None) -> Rounding | None:
        kind, (kernel, scale) = self.kind, self._weights()
        if not takes_rounded_rows(num_rows, kernel, scale, self.dtype, kind.group, kind.activations, backend):
            return None
        return Rounding(None if self.input_scale is None else self.input_scale[...], kind.upper_bound, backend)

    def gated(self, x: Rows, activation: str, backend: str | None, rounding: Rounding | None = None) -> Rows:
        own = self.rounding(count_rows(x), backend)
        if own is None or rounding is None or self.bias is not None:
            return super().gated(x, activation, backend, rounding)
        return rounding(self._sums(x, own), activation=activation)[0]

    def sums(self, x: Rows, backend: str | None = "xla") -> jax.Array | Sums:
        rounding = self.rounding(count_rows(x), backend)
        if rounding is None or self.bias is not None:
            return super().sums(x, backend)
        return self._sums(x, rounding)

    def _term(self, x: Rows, backend: str | None) -> Term:
        rounding = self.rounding(count_rows(x), backend)
        if rounding is None or len(self.layout.outputs) > 1:
            return super()._term(x, backend)
        return self._sums(x, rounding)

    def _product(self, x: Rows, dtype: jnp.dtype | None, backend: str | None) -> jax.Array:
        rounding = self.rounding(count_rows(x), backend)
        if rounding is None:
            return super()._product(x, dtype, backend)
        sums = self._sums(x, rounding, dtype)
        outer = sums.shape[:1] if isinstance(x, RoundedRows) else x.shape[: x.ndim - len(self.layout.inputs)]
        return sums.array().reshape(*outer, *self.layout.outputs)

    def _sums(self, x: Rows, rounding: Rounding, dtype: jnp.dtype | None = None) -> Sums:
        """The product, without scales so far; dtype: of the result, x's if None."""
        rows = x if isinstance(x, RoundedRows) else rounding(x.reshape(-1, self.layout.input_size))[0]
        kernel, scale = self._weights()
        dtype = dtype or rows.dtype
        products = product_of_rounded(rows.values, kernel, type_of_sums(dtype))
        return Sums(products, rows.scales, scale[:, 0], rows.count, dtype)

    def _weights(self) -> tuple[jax.Array, jax.Array]:
        """e4m3 [all outputs, inputs], and scales [all outputs, G]."""
        outputs = self.layout.output_size
        return self.kernel[...].reshape(outputs, -1), self.scale[...].reshape(outputs, -1)

    def _multiply(self, x: jax.Array, dtype: Any, backend: str | None) -> jax.Array:
        kernel, scale = self._weights()
        return fp8_product(
            x,
            kernel,
            scale,
            None if self.input_scale is None else self.input_scale[...],
            group=self.kind.group,
            activations=self.kind.activations,
            upper_bound=self.kind.upper_bound,
            dtype=dtype,
            backend=backend,
        )


@partial(jax.jit, static_argnums=1)  # one program, which writes no transposed copy of the weight
def _rounded(weight: jax.Array, order: RowOrder) -> tuple[jax.Array, jax.Array]:
    """Each output's largest magnitude becomes 448. NaN and infinity make those of their output NaN or infinite."""
    return round_to_fp8(order.rows(weight))
