"""8-bit integers in checkpoints that store them as such: int8 [outputs, inputs] with scales of the tensor or of each
output.

                                         values   scales                      activations in int8
    compressed-tensors "int-quantized"   weight   weight_scale [1], [out, 1]  dynamic by token, static, or none
        static                                    input_scale []

Those packed into words are in `packed_weights.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.quantization.int8 import Int8
from jpaged.models.quantization.layers import StoredLayer
from jpaged.models.quantization.scheme import FLOAT_TYPES, Scheme, Stored, checked_scales


@dataclass(frozen=True, kw_only=True)
class Int8Weights(Scheme):
    """See above."""

    kind: Int8

    @property
    def dequantizes(self) -> bool:
        return True

    def dequantized(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> jax.Array:
        return self.kind.dequantized(arrays, jnp.dtype(dtype))

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        out = layer.outputs
        wanted = {
            "weight": Stored(("I8",), ((out, layer.inputs),)),
            "weight_scale": Stored(FLOAT_TYPES, ((), (1,), (1, 1), (out,), (out, 1))),
        }
        if self.kind.activations == "static":
            wanted["input_scale"] = Stored(FLOAT_TYPES, ((), (1,), (1, 1)))
        return wanted

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        scales = checked_scales(found, "weight_scale").reshape(-1, 1)
        arrays = {"": found["weight"], "_scale": np.broadcast_to(scales, (layer.outputs, 1))}
        if "input_scale" in found:
            arrays["_input_scale"] = checked_scales(found, "input_scale").reshape(1)
        return arrays
