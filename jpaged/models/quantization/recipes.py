"""How weights that are not quantized become a checkpoint of compressed-tensors.

             tensors of a layer, behind its name                                             activations
fp8          weight e4m3 [out, in], weight_scale float32 [out, 1]                            a scale for each token
fp8-block    weight e4m3 [out, in], weight_scale float32 [out / 128, in / 128]               128 inputs of a token
int8         weight int8 [out, in], weight_scale float32 [out, 1]                            a scale for each token
int4         weight_packed int32 [out, in / 8], weight_scale [out, in / 128], weight_shape   as they are

    fp8, fp8-block   scale = largest magnitude / 448      value = e4m3(weight / scale)
    int8             scale = largest magnitude / 127      value = round(weight / scale)
    int4             scale = largest magnitude / 7.5      value = round(weight / scale), clipped to -8 .. 7; 8 is added

The largest magnitude is of the weights that share a scale; where it is 0, or below 5e-33, the scale is 1. Scales of
int4 have the type of the weights, and are rounded to it before they divide; all else is computed in float32. The
formulas are compressed-tensors' own for symmetric weights (`quantization/utils/helpers.py`, `calculate_qparams`), but
for int8, which is rounded as `quantization="int8"` does: there it is 127.5, so that the largest weight is clipped.

numpy computes them, so that the same bits come out on every machine: XLA multiplies by the reciprocal of a constant
divisor, keeps bfloat16 intermediates in float32 and, on a CPU, may lose a NaN in a maximum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpaged.models.quantization.fp8_weights import BLOCK
from jpaged.models.quantization.layers import StoredLayer
from jpaged.pallas_kernels.common.numerics import FP8_MAX, LEAST_LARGEST, LEAST_SCALE, MOST_SCALE

GROUP = 128
"""Inputs that share a scale in int4, unless others are asked for."""
GROUPS = (32, 64, 128)
"""Sizes of groups that there is a choice of."""

_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_DYNAMIC = _FP8 | {"dynamic": True}
_INT8 = _FP8 | {"type": "int"}
_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}

_E4M3, _FLOAT32 = np.dtype(jnp.float8_e4m3fn), np.dtype(np.float32)
_CHUNK = 8 * BLOCK
"""Outputs that are quantized at a time, which bounds the float32 copies."""


@dataclass(frozen=True)
class Recipe:
    """A scheme to write.

    layout: its name in compressed-tensors. weights, activations: as in "config_groups".
    rows, columns: outputs and inputs that share a scale; 0 for all inputs.
    most: what the largest magnitude of these becomes.
    """

    layout: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None
    rows: int
    columns: int
    most: float

    @property
    def _type(self) -> np.dtype:
        """Of values that are not packed."""
        return np.dtype(np.int8) if self.layout == "int-quantized" else _E4M3

    @property
    def packs(self) -> bool:
        """Whether values have 4 bits, and eight of them a word."""
        return self.layout == "pack-quantized"

    def misfit(self, layer: StoredLayer) -> str:
        """What a layer's sizes would have to be, if it cannot be stored, and what to do; else nothing."""
        if not self.packs or layer.inputs % self.columns == 0:
            return ""
        fitting = [str(size) for size in GROUPS if layer.inputs % size == 0]
        instead = f"group_size={' or '.join(fitting)}, or " if fitting else "scheme "
        return f"multiples of {self.columns} inputs; choose {instead}'fp8'"

    def config(self, ignored: Sequence[str], *, kv_cache: bool = False) -> dict[str, Any]:
        """The "quantization_config". ignored: names of the linear layers that are not quantized. kv_cache: there are
        scales of keys and values."""
        group = {
            "targets": ["Linear"],
            "weights": dict(self.weights),
            "input_activations": None if self.activations is None else dict(self.activations),
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": _FP8 | {"strategy": "tensor"} if kv_cache else None,
        }

    def shapes(self, layer: StoredLayer, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shapes and types of the tensors of a layer, by what their names end with. dtype: of its weight."""
        columns = self.columns or layer.inputs
        scales = (-(-layer.outputs // self.rows), -(-layer.inputs // columns))
        if not self.packs:
            return {"weight": ((layer.outputs, layer.inputs), self._type), "weight_scale": (scales, _FLOAT32)}
        return {
            "weight_packed": ((layer.outputs, layer.inputs // 8), np.dtype(np.int32)),
            "weight_scale": (scales, _scale_type(dtype)),
            "weight_shape": ((2,), np.dtype(np.int64)),
        }

    def tensors(self, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of a layer, of its weight [outputs, inputs] in floats.

        Raises:
            ValueError: there is NaN or infinity, or a scale would be too small or too large for its type.
        """
        parts = [self._part(weight[start : start + _CHUNK]) for start in range(0, len(weight), _CHUNK)]
        values, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return self.packed(values, scales) if self.packs else {"weight": values, "weight_scale": scales}

    def packed(self, values: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of a layer of values from -8 to 7 [outputs, inputs] and scales [outputs, groups]."""
        shape = np.array(values.shape, np.int64)
        return {"weight_packed": _packed(values), "weight_scale": scales, "weight_shape": shape}

    def in_groups(self, size: int) -> "Recipe":
        """The same with groups of so many inputs, of 4 bits."""
        return replace(self, weights={**self.weights, "group_size": size}, columns=size)

    def _part(self, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values and scales of some outputs."""
        outputs, inputs = weight.shape
        columns = self.columns or inputs
        wide = np.pad(weight.astype(_FLOAT32), ((0, -outputs % self.rows), (0, -inputs % columns)))
        blocks = wide.reshape(len(wide) // self.rows, self.rows, -1, columns)
        largest = np.abs(blocks).max(axis=(1, 3), keepdims=True)
        if not np.isfinite(largest).all():
            raise ValueError("has NaN or infinity")
        stored = (largest / np.float32(self.most)).astype(_scale_type(weight.dtype) if self.packs else _FLOAT32)
        stored[largest < LEAST_LARGEST] = 1
        scales = stored.astype(_FLOAT32)
        if not ((scales >= LEAST_SCALE) & (scales <= MOST_SCALE)).all():
            raise ValueError(f"has values too small or too large for a scale in {stored.dtype}")
        blocks = blocks / scales
        if self.packs:
            values = np.clip(np.rint(blocks), -8, 7).astype(np.int8).reshape(wide.shape)
        else:
            blocks = blocks if self._type == _E4M3 else np.rint(blocks)
            values = np.clip(blocks, -self.most, self.most).astype(self._type).reshape(wide.shape)[:outputs, :inputs]
        return values, stored[:, 0, :, 0]


def _packed(values: np.ndarray) -> np.ndarray:
    """Numbers from -8 to 7 [outputs, inputs] -> int32 [outputs, inputs / 8], the first of eight in the lowest bits."""
    eights = (values.astype(np.int16) + 8).astype(np.uint32).reshape(len(values), -1, 8)
    return np.bitwise_or.reduce(eights << (4 * np.arange(8, dtype=np.uint32)), axis=2).view(np.int32)


def _scale_type(dtype: np.dtype) -> np.dtype:
    """Of a 4-bit weight that was stored in this type."""
    return _FLOAT32 if dtype == np.float64 else dtype


RECIPES: dict[str, Recipe] = {
    "fp8": Recipe("float-quantized", _FP8 | {"strategy": "channel"}, _DYNAMIC | {"strategy": "token"}, 1, 0, FP8_MAX),
    "fp8-block": Recipe(
        "float-quantized",
        _FP8 | {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        _DYNAMIC | {"strategy": "group", "group_size": BLOCK},
        BLOCK,
        BLOCK,
        FP8_MAX,
    ),
    "int8": Recipe(
        "int-quantized", _INT8 | {"strategy": "channel"}, _INT8 | {"dynamic": True, "strategy": "token"}, 1, 0, 127.0
    ),
    "int4": Recipe("pack-quantized", _INT4 | {"strategy": "group", "group_size": GROUP}, None, 1, GROUP, 7.5),
}
"""By the names that `quantize_checkpoint` and `jpaged quantize` give them."""
