"""Layers and experts that keep NVFP4: E2M1 in groups of 16 inputs, whose scales have 8 bits, and a scale of the tensor.

                        values                  scales                         of the tensor
    compressed-tensors  weight_packed           weight_scale e4m3 [out, in/16] weight_global_scale float32 [1]
    ModelOpt            weight                  weight_scale e4m3 [out, in/16] weight_scale_2 float32 []
                        uint8 [out, in/2], the first of two values in the lower bits

    weight = value * (weight_scale / weight_global_scale)          weight_global_scale = 1 / weight_scale_2

    kernel   uint8 [*outputs, inputs / 2]     two values a byte: see `pallas_kernels.int4_product`
    scale    e4m3 [*outputs, inputs / 16]
    outer    float32 [*outputs, 1]            weight_global_scale, so that joined layers (q, k and v) keep theirs

Only weights are in 4 bits. Activations stay as they are, where a checkpoint says something of them, too: their scales
(input_global_scale, input_scale) are for GPUs that multiply in 4 bits, and are not read.

Sources: compressed-tensors' `compressors/nvfp4`, and `converters/modelopt_nvfp4.py` for what ModelOpt's are there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import UnsupportedModelError
from jpaged.models.grouped_linear import GroupedLinear
from jpaged.models.linear import Linear
from jpaged.models.parameters import Bits, Constant
from jpaged.models.quantization.grouped import QuantizedGroupedLinear, Values
from jpaged.models.quantization.layers import QuantizedLinear, StoredLayer, WholeGroups, rows_parameter
from jpaged.models.quantization.scheme import FLOAT_TYPES, BadTensor, Scheme, Stored, checked_scales
from jpaged.pallas_kernels import int4_product
from jpaged.pallas_kernels.int4_product.api import NV_GROUP, NV_PACK
from jpaged.pallas_kernels.int4_product.reference import nvfp4_dequantized, pack

_RANDOM_STD = 2.93
"""Of equally likely values of four bits."""


@dataclass(frozen=True)
class Nvfp4(WholeGroups):
    """What layers and experts keep. group: inputs that devices have together: those that share bytes."""

    group = NV_PACK
    reorders_inputs = False

    def linear(self, plain: Linear, rngs: nnx.Rngs) -> QuantizedLinear:
        return Nvfp4Linear(plain, rngs)

    def grouped(self, plain: GroupedLinear, rngs: nnx.Rngs) -> GroupedLinear:
        values = Values("nvfp4", NV_GROUP, jnp.uint8, Bits(), outer=_RANDOM_STD / plain.layout.std)
        return QuantizedGroupedLinear(plain, values, Constant(1.0), jnp.float8_e4m3fn, rngs)


class Nvfp4Linear(QuantizedLinear):
    """See above."""

    def __init__(self, plain: Linear, rngs: nnx.Rngs) -> None:
        super().__init__(plain)
        inputs = self.layout.input_size
        rows = partial(rows_parameter, self.layout, rngs)
        self.kernel = rows(Bits(), inputs // 2, jnp.uint8, "", by_input=True, weights_each=2)
        self.scale = rows(Constant(1.0), inputs // NV_GROUP, jnp.float8_e4m3fn, "_scale", by_input=True)
        outer = Constant(_RANDOM_STD / self.layout.std)
        self.outer = rows(outer, 1, jnp.float32, "_outer", by_input=False)

    def _multiply(self, x: jax.Array, dtype: Any, backend: str | None) -> jax.Array:
        outputs = self.layout.output_size
        values, scales = self.kernel[...].reshape(outputs, -1), self.scale[...].reshape(outputs, -1)
        outer = self.outer[...].reshape(outputs)
        options: dict[str, Any] = {"form": "nvfp4", "group": NV_GROUP, "dtype": dtype, "backend": backend}
        return int4_product(x, values, scales, outer=outer, **options)


@dataclass(frozen=True, kw_only=True)
class Nvfp4Weights(Scheme):
    """Checkpoints in NVFP4. values, outer, unread: what the names of tensors end with. inverted: the scale of a tensor
    multiplies."""

    values: str = "weight_packed"
    outer: str = "weight_global_scale"
    unread: str = "input_global_scale"
    inverted: bool = False

    @property
    def dequantizes(self) -> bool:
        return True

    def dequantized(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> jax.Array:
        return _dequantized(arrays[""], arrays["_scale"], arrays["_outer"][:, 0], jnp.dtype(dtype))

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        return {
            self.values: Stored(("U8",), ((layer.outputs, layer.inputs // 2),)),
            "weight_scale": Stored(("F8_E4M3",), ((layer.outputs, layer.inputs // NV_GROUP),)),
            self.outer: Stored(FLOAT_TYPES, ((), (1,), (1, 1))),
            self.unread: Stored(FLOAT_TYPES, ((), (1,), (1, 1)), optional=True),
        }

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        packed, scales = found[self.values], found["weight_scale"]
        bits = scales.view(np.uint8)
        if np.any(bits > _LARGEST):
            raise BadTensor("weight_scale", "has a scale that is negative or NaN")
        if not bits.any():
            raise BadTensor("weight_scale", "has scales of 0 alone")
        outer = checked_scales(found, self.outer).reshape(())
        if self.inverted:
            outer = np.float32(1) / outer
        values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(layer.outputs, layer.inputs)
        return {"": pack(values, NV_PACK), "_scale": scales, "_outer": np.full((layer.outputs, 1), outer, np.float32)}

    def check_layer(self, layer: StoredLayer) -> None:
        if layer.inputs % NV_PACK:
            raise UnsupportedModelError(
                f"{layer.name} has {layer.inputs} inputs; {self.name} is supported for multiples of {NV_PACK}."
            )


@partial(jax.jit, static_argnums=3)
def _dequantized(values: jax.Array, scales: jax.Array, outer: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return nvfp4_dequantized(values, scales, outer).astype(dtype)


_LARGEST = 0x7E
"""The bits of 448 in e4m3. A group whose weights are tiny beside the tensor's largest has a scale of 0."""
