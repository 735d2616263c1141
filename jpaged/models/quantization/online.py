"""Weights that a checkpoint has in floats, quantized while they are read: a scale for each output, and activations with
a scale for each token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.models.quantization.fp8 import Fp8
from jpaged.models.quantization.int8 import Int8
from jpaged.models.quantization.layers import RowOrder, StoredLayer
from jpaged.models.quantization.scheme import FLOAT_TYPES, BadTensor, Scheme, Stored


@dataclass(frozen=True, kw_only=True)
class Online(Scheme):
    """The checkpoint's own weights, one tensor at a time."""

    kind: Fp8 | Int8

    @property
    def online(self) -> bool:
        return True

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        return {"weight": Stored((*FLOAT_TYPES, "F64"), ((layer.outputs, layer.inputs),))}

    def arrays(self, layer: StoredLayer, found: Mapping[str, Any]) -> dict[str, Any]:
        """found: "weight", an array as the checkpoint has it, and "order", its `RowOrder`."""
        values, scales = self.rounded(found["weight"], found["order"])
        if not bool(jnp.all(jnp.isfinite(scales))):
            raise BadTensor("weight", "has NaN or infinity")
        return {"": values, "_scale": scales}

    def rounded(self, weight: jax.Array, order: RowOrder) -> tuple[jax.Array, jax.Array]:
        return self.kind.rounded(weight, order)


ONLINE: dict[str, Scheme] = {
    "fp8": Online(name="fp8", kind=Fp8(activations="dynamic")),
    "int8": Online(name="int8", kind=Int8(activations="dynamic")),
}
"""By the names that users give them."""
