"""Experts in MXFP4, kept in 4 bits (gpt-oss; the layout of checkpoints: `models.loading.mxfp4`).

kernel    uint8 [E, *outputs, inputs / 2]     two values a byte, as `pallas_kernels.int4_product` has them
scale     uint8 [E, *outputs, inputs / 32]    a power of two for each group, 127 more than its exponent
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import UnsupportedModelError
from jpaged.models.grouped_linear import GroupedLinear
from jpaged.models.linear import Linear
from jpaged.models.parameters import Bits, Constant
from jpaged.models.quantization.grouped import QuantizedGroupedLinear, Values
from jpaged.models.quantization.layers import QuantizedLinear, StoredLayer, WholeGroups
from jpaged.models.quantization.scheme import BadTensor, Entries, Modules, Scheme, Stored
from jpaged.pallas_kernels.int4_product.reference import pack
from jpaged.pallas_kernels.quantized_grouped_product.api import MX_GROUP

_RANDOM_STD = 2.93
"""Of equally likely values of four bits."""
_BIAS, MOST_EXPONENT, _NAN = 127, 252, 255
"""Of scales. Those above MOST_EXPONENT may make infinity: 6 * 2^(253 - 127) is beyond 2^128."""


@dataclass(frozen=True)
class Mxfp4(WholeGroups):
    """What experts keep."""

    group = MX_GROUP
    reorders_inputs = False

    def linear(self, plain: Linear, rngs: nnx.Rngs) -> QuantizedLinear:
        raise UnsupportedModelError("MXFP4 is supported for experts, and not for other linear layers.")

    def grouped(self, plain: GroupedLinear, rngs: nnx.Rngs) -> GroupedLinear:
        exponent = Constant(round(log2(plain.layout.std / _RANDOM_STD)) + _BIAS)
        return QuantizedGroupedLinear(plain, Values("mxfp4", MX_GROUP, jnp.uint8, Bits()), exponent, jnp.uint8, rngs)


@dataclass(frozen=True, kw_only=True)
class Mxfp4Weights(Scheme):
    """Tensors of all experts of a layer, each of blocks and scales, which loading reads as one."""

    @property
    def fused_experts(self) -> bool:
        return True

    @property
    def separate_experts(self) -> bool:
        return False

    def fused_tensors(self, shape: tuple[int, ...]) -> dict[str, Stored]:
        return {"": Stored(("BF16",), (shape,))}  # as what MXFP4 is read otherwise

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        raise NotImplementedError("loading knows the tensors of all experts together")

    def arrays(self, layer: StoredLayer, found: Mapping[str, Any]) -> dict[str, Any]:
        """found: "blocks" uint8 [E, outputs, G, 16] and "scales" uint8 [E, outputs, G], of JAX."""
        largest = int(jnp.max(found["scales"], initial=0))
        if largest > MOST_EXPONENT:
            what = "NaN" if largest == _NAN else "numbers that bfloat16 does not hold"
            raise BadTensor("", f"has a scale of {largest}, which makes {what}")
        return {"": _halves(found["blocks"]), "_scale": found["scales"].reshape(layer.outputs, -1)}

    def check_layer(self, layer: StoredLayer) -> None:
        if layer.inputs % MX_GROUP:
            raise UnsupportedModelError(
                f"{layer.name} has {layer.inputs} inputs; MXFP4 is supported for multiples of {MX_GROUP}."
            )


@jax.jit
def _halves(blocks: jax.Array) -> jax.Array:
    """Neighbours in a byte -> uint8 [outputs, inputs / 2], the two halves of a group in a byte."""
    values = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
    return pack(values.reshape(-1, blocks.shape[-2] * MX_GROUP), MX_GROUP)


def read_mxfp4(config: Entries) -> Scheme:
    """quant_method "mxfp4". Names of modules may have "*"."""
    names = config.names("modules_to_not_convert")
    ignored = tuple("re:" + fnmatch.translate(f"{name}*") if "*" in name else name for name in names)
    modules = Modules(targets=("experts",), ignored=ignored)
    return Mxfp4Weights(name="mxfp4", kind=Mxfp4(), modules=modules)
