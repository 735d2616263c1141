"""What checkpoints in FP8 and in 8-bit integers have in common.

Values [outputs, inputs] have a scale of the tensor or of each output. Activations that are rounded with a fixed scale
have one, too.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.quantization.layers import StoredLayer
from jpaged.models.quantization.scheme import FLOAT_TYPES, Stored, checked_scales
from jpaged.pallas_kernels.fp8_product import reference

_OF_TENSOR: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


def tensors(layer: StoredLayer, kind: str, activations: str, scale: str = "weight_scale") -> dict[str, Stored]:
    """As of `Scheme.tensors`. kind: of values, by safetensors' name. scale: what the scales' names end with."""
    out = layer.outputs
    wanted = {
        "weight": Stored((kind,), ((out, layer.inputs),)),
        scale: Stored(FLOAT_TYPES, (*_OF_TENSOR, (out,), (out, 1))),
    }
    if activations == "static":
        wanted["input_scale"] = Stored(FLOAT_TYPES, _OF_TENSOR)
    return wanted


def arrays(layer: StoredLayer, found: Mapping[str, np.ndarray], scale: str = "weight_scale") -> dict[str, Any]:
    """As of `Scheme.arrays`, of what `tensors` names."""
    scales = checked_scales(found, scale).reshape(-1, 1)
    made = {"": found["weight"], "_scale": np.broadcast_to(scales, (layer.outputs, 1))}
    if "input_scale" in found:
        made["_input_scale"] = checked_scales(found, "input_scale").reshape(1)
    return made


@partial(jax.jit, static_argnums=(2, 3))
def dequantized(values: jax.Array, scales: jax.Array, group: int | None, dtype: jnp.dtype) -> jax.Array:
    """[outputs, inputs], rounded once, from float32. scales: [outputs, G], of groups of inputs; None: one has all."""
    return reference.dequantized(values, scales, group).astype(dtype)
