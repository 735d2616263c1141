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

from jpaged.models.quantization import row_scales
from jpaged.models.quantization.int8 import Int8
from jpaged.models.quantization.layers import StoredLayer
from jpaged.models.quantization.scheme import Scheme, Stored


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
        return row_scales.tensors(layer, "I8", self.kind.activations)

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return row_scales.arrays(layer, found)
