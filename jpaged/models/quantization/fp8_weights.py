"""FP8 weights in checkpoints: e4m3 [outputs, inputs] with scales of the tensor, of each output or of 128 x 128 blocks.

                          values   scales                                    activations in FP8
    FP8 (DeepSeek, Qwen)  weight   weight_scale_inv [out / 128, in / 128]    dynamic, 128 inputs of a token at a time
        all experts: gate_up_proj [E, out, in], gate_up_proj_scale_inv [E, out / 128, in / 128]    as they are
    FP8 (AutoFP8)         weight   weight_scale [], [1]                      dynamic, or static: input_scale
    compressed-tensors    weight   weight_scale [1], [out, 1], blocks        dynamic by token, static, or none
    fbgemm                weight   weight_scale [out, 1]                     dynamic by token, up to activation_scale_ub

Activations of layers in blocks are rounded where a kernel multiplies block by block (`pallas_kernels.fp8_product`);
elsewhere it would save no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.quantization import row_scales
from jpaged.models.quantization.fp8 import Fp8
from jpaged.models.quantization.layers import StoredLayer
from jpaged.models.quantization.scheme import FLOAT_TYPES, BadTensor, Entries, Modules, Scheme, Stored, checked_scales

BLOCK = 128
"""Outputs and inputs of a block."""


@dataclass(frozen=True, kw_only=True)
class Fp8Weights(Scheme):
    """Weights in FP8. kind: an `Fp8`. scale: what the name of the scales ends with. blocks: they are of blocks."""

    scale: str = "weight_scale"
    blocks: bool = False

    @property
    def dequantizes(self) -> bool:
        return True

    @property
    def fused_experts(self) -> bool:
        return self.scale == "weight_scale_inv"

    def fused_tensors(self, shape: tuple[int, ...]) -> dict[str, Stored]:
        experts, outputs, inputs = shape
        scales = (experts, -(-outputs // BLOCK), -(-inputs // BLOCK))
        return {"": Stored(("F8_E4M3",), (shape,)), _FUSED_SCALE: Stored(FLOAT_TYPES, (scales,))}

    def dequantized(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> jax.Array:
        return row_scales.dequantized(arrays[""], arrays["_scale"], BLOCK if self.blocks else None, jnp.dtype(dtype))

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        wanted = row_scales.tensors(layer, "F8_E4M3", self.kind.activations, self.scale)  # type: ignore[attr-defined]
        if self.blocks:
            shape = -(-layer.outputs // BLOCK), -(-layer.inputs // BLOCK)
            wanted[self.scale] = Stored(FLOAT_TYPES, (shape,))
        return wanted

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        if "" in found:  # all experts of a layer
            scales = checked_scales(found, _FUSED_SCALE)
            return self._block_arrays("", found[""], np.repeat(scales, BLOCK, axis=1)[:, : found[""].shape[1]])
        if self.blocks:
            scales = np.repeat(checked_scales(found, self.scale), BLOCK, axis=0)[: layer.outputs]
            return self._block_arrays("weight", found["weight"], scales)
        arrays = row_scales.arrays(layer, found, self.scale)
        _check_values("weight", found["weight"])
        return arrays

    def _block_arrays(self, name: str, weight: np.ndarray, scales: np.ndarray) -> dict[str, Any]:
        """weight: [.., outputs, inputs]. scales: [.., outputs, blocks of inputs]."""
        _check_values(name, weight)
        return {"": weight.reshape(-1, weight.shape[-1]), "_scale": scales.reshape(-1, scales.shape[-1])}


_FUSED_SCALE = "_scale_inv"
"""What the name of the scales ends with where one tensor has all experts, as transformers saves them."""


def _check_values(name: str, weight: np.ndarray) -> None:
    if np.any((weight.view(np.uint8) & 0x7F) == 0x7F):
        raise BadTensor(name, "has NaN")


def read_fp8(config: Entries) -> Scheme:
    """quant_method "fp8"."""
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    modules = Modules(ignored=config.names("modules_to_not_convert", "ignored_layers", "ignore"))
    if config.get("weight_block_size") is None:
        activations = config.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        return Fp8Weights(name="fp8", kind=Fp8(activations=activations), modules=modules)
    config.one_of("weight_block_size", ([BLOCK, BLOCK],))
    config.one_of("activation_scheme", ("dynamic",), "dynamic")
    config.one_of("scale_fmt", ("ue8m0",), "ue8m0")  # of activations, whose scales may be finer than powers of two
    kind = Fp8(group=BLOCK, activations="dynamic")
    return Fp8Weights(name="fp8 in blocks", kind=kind, modules=modules, scale="weight_scale_inv", blocks=True)


def read_fbgemm(config: Entries) -> Scheme:
    """quant_method "fbgemm_fp8"."""
    bound = config.get("activation_scale_ub", 1200.0)
    if not isinstance(bound, int | float) or isinstance(bound, bool) or not 0 < bound < float("inf"):
        config.one_of("activation_scale_ub", (1200.0,))
    modules = Modules(ignored=config.names("modules_to_not_convert"))
    kind = Fp8(activations="dynamic", upper_bound=float(bound))
    return Fp8Weights(name="fbgemm_fp8", kind=kind, modules=modules)
