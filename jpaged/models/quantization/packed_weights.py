"""Integers of 4 or 8 bits in checkpoints: w = 8 or 4 values in an int32, the first in its lowest bits but for AWQ's
order.

                         values              scales                  zero points             order of inputs
    AWQ (GEMM), 4 bits   qweight [in, o/w]   scales [in/g, out]      qzeros [in/g, out/w]    -
    GPTQ                 qweight [in/w, o]   scales [in/g, out]      qzeros [in/g, out/w]    g_idx [in]
    compressed-tensors   weight_packed       weight_scale            weight_zero_point       weight_g_idx [in]
                         [out, in/w]         [out, in/g]             [out/w, in/g]

    AWQ                  (q - zero) * scale; columns 0, 2, 4, 6, 1, 3, 5, 7 of eight from the lowest bits up
    GPTQ                 (q - (zero + 1)) * scale, with zero as stored; "gptq_v2" stores what is subtracted
    compressed-tensors   values and zero points are signed, and stored 8 (of 8 bits 128) larger

Zero points with 8 bits are not supported: q - zero needs 9 bits. GPTQ stores them anyway, and then all must be 128.

Sources: AutoAWQ's `awq/utils/packing_utils.py`, AutoGPTQ's `qlinear_cuda_old.py`, compressed-tensors'
`compressors/quantized_compressors/pack_quantized.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.api.errors import UnsupportedModelError
from jpaged.models.quantization.int4 import Int4
from jpaged.models.quantization.int8 import Int8
from jpaged.models.quantization.layers import StoredLayer
from jpaged.models.quantization.scheme import FLOAT_TYPES, BadTensor, Entries, Modules, Scheme, Stored, checked_scales

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of a word each of eight columns is."""

_WHOLE_ROW_GROUP = 128
"""Inputs for which a scale of all inputs (group_size -1) is repeated in 4 bits."""

_NO_ZERO = 128
"""What GPTQ stores in 8 bits where values have no zero point."""

GROUPS = (32, 64, 128, -1)
"""Supported sizes of groups; -1 is all inputs."""


@dataclass(frozen=True, kw_only=True)
class PackedWeights(Scheme):
    """What the three have in common. whole_rows: a scale is of all inputs."""

    kind: Int4 | Int8
    whole_rows: bool = False

    @property
    def values_per_word(self) -> int:
        """Values in an int32."""
        return 32 // self.kind.bits

    @property
    def outputs_per_word(self) -> int:
        """Outputs that share an int32, of values or of zero points."""
        return self.values_per_word

    def check_layer(self, layer: StoredLayer) -> None:
        size = self.kind.group or self.values_per_word
        if layer.inputs % size or layer.outputs % self.outputs_per_word:
            multiples = f"{self.outputs_per_word} and of {size}" if self.outputs_per_word > 1 else f"{size} inputs"
            raise UnsupportedModelError(
                f"{layer.name} has {layer.outputs} outputs and {layer.inputs} inputs; {self.name} is supported for"
                f" multiples of {multiples}."
            )

    @property
    def dequantizes(self) -> bool:
        return True

    def dequantized(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> jax.Array:
        wide = self.kind.dequantized(arrays, jnp.dtype(dtype))
        return wide if "_order" not in arrays else wide[:, jnp.argsort(arrays["_order"])]

    def groups(self, layer: StoredLayer) -> int:
        """Of a checkpoint."""
        return 1 if self.whole_rows or self.kind.group is None else layer.inputs // self.kind.group

    def _arrays(
        self,
        layer: StoredLayer,
        values: np.ndarray,
        scales: np.ndarray,
        zeros: np.ndarray | None,
        found: Mapping[str, np.ndarray],
        index: str,
    ) -> dict[str, Any]:
        """index: the name of the tensor that says which group each input is in."""
        order = None
        if index in found:
            order = self._order(layer, found[index], index)
        if self.whole_rows and self.kind.group is not None:
            times = layer.inputs // self.kind.group
            scales = np.repeat(scales, times, axis=1)
            zeros = None if zeros is None else np.repeat(zeros, times, axis=1)
        return self.kind.arrays(values, scales, zeros, order)

    def _order(self, layer: StoredLayer, index: np.ndarray, name: str) -> np.ndarray | None:
        """The inputs, group after group; None where they follow each other anyway.

        Raises:
            BadTensor: a group does not have as many inputs as it should, or the scheme has no act-order.
        """
        groups = self.groups(layer)
        is_in_range = index.size > 0 and index.min() >= 0 and index.max() < groups
        if not is_in_range or np.any(np.bincount(index, minlength=groups) != layer.inputs // groups):
            raise BadTensor(name, f"does not put {layer.inputs // groups} inputs into each of {groups} groups")
        order = np.argsort(index, kind="stable").astype(np.int32)
        if np.array_equal(order, np.arange(layer.inputs)):
            return None
        if not self.kind.act_order:
            raise BadTensor(name, "reorders inputs, which config.json says nothing of (desc_act, actorder)")
        return order


@dataclass(frozen=True, kw_only=True)
class Awq(PackedWeights):
    """AutoAWQ's."""

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        groups, words = self.groups(layer), layer.outputs // 8
        wanted = {
            "qweight": Stored(("I32",), ((layer.inputs, words),)),
            "scales": Stored(FLOAT_TYPES, ((groups, layer.outputs),)),
        }
        if self.kind.zero_points:
            wanted["qzeros"] = Stored(("I32",), ((groups, words),))
        return wanted

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        values = _unpack(found["qweight"], 1, _AWQ_PLACES).T
        zeros = _unpack(found["qzeros"], 1, _AWQ_PLACES).T if self.kind.zero_points else None
        return self._arrays(layer, values, checked_scales(found, "scales").T, zeros, found, "")


@dataclass(frozen=True, kw_only=True)
class Gptq(PackedWeights):
    """AutoGPTQ's. offset: what is added to the stored zero points."""

    offset: int = 1

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        groups, each = self.groups(layer), self.values_per_word
        return {
            "qweight": Stored(("I32",), ((layer.inputs // each, layer.outputs),)),
            "qzeros": Stored(("I32",), ((groups, layer.outputs // each),)),
            "scales": Stored(FLOAT_TYPES, ((groups, layer.outputs),)),
            "g_idx": Stored(("I32",), ((layer.inputs,),), optional=not self.kind.act_order),
        }

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        each = range(self.values_per_word)
        values = _unpack(found["qweight"], 0, each).T
        zeros: np.ndarray | None = _unpack(found["qzeros"], 1, each).T + np.uint8(self.offset)
        if not self.kind.zero_points:
            if np.any(zeros != _NO_ZERO):
                raise BadTensor("qzeros", f"has zero points other than {_NO_ZERO}, which are not supported in 8 bits")
            zeros = None
        return self._arrays(layer, values, checked_scales(found, "scales").T, zeros, found, "g_idx")


@dataclass(frozen=True, kw_only=True)
class PackQuantized(PackedWeights):
    """compressed-tensors' "pack-quantized"."""

    @property
    def outputs_per_word(self) -> int:
        return self.values_per_word if self.kind.zero_points else 1

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        groups, each = self.groups(layer), self.values_per_word
        wanted = {
            "weight_packed": Stored(("I32",), ((layer.outputs, layer.inputs // each),)),
            "weight_scale": Stored(FLOAT_TYPES, ((layer.outputs, groups),)),
            "weight_shape": Stored(("I64", "I32"), ((2,),), optional=True),
        }
        if self.kind.zero_points:
            wanted["weight_zero_point"] = Stored(("I32",), ((layer.outputs // each, groups),))
        if self.kind.act_order:
            wanted["weight_g_idx"] = Stored(("I32",), ((layer.inputs,),))
        return wanted

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        if "weight_shape" in found and found["weight_shape"].tolist() != [layer.outputs, layer.inputs]:
            raise BadTensor("weight_shape", f"is {found['weight_shape'].tolist()}, not {[layer.outputs, layer.inputs]}")
        each = range(self.values_per_word)
        values = _unpack(found["weight_packed"], 1, each)
        zeros = _unpack(found["weight_zero_point"], 0, each) if self.kind.zero_points else None
        return self._arrays(layer, values, checked_scales(found, "weight_scale"), zeros, found, "weight_g_idx")


def _unpack(words: np.ndarray, axis: int, places: Sequence[int]) -> np.ndarray:
    """int32 -> uint8, as many times more along an axis as there are places: of each value, which bits of a word it has,
    the lowest being 0."""
    bits = 32 // len(places)
    shifts = np.array(places, np.uint32) * bits
    expanded = np.expand_dims(words.view(np.uint32), axis + 1)
    shape = [1] * expanded.ndim
    shape[axis + 1] = len(places)
    values = ((expanded >> shifts.reshape(shape)) & (2**bits - 1)).astype(np.uint8)
    return values.reshape(*words.shape[:axis], words.shape[axis] * len(places), *words.shape[axis + 1 :])


def kind_of(bits: int, size: int, *, zero_points: bool, act_order: bool = False) -> Int4 | Int8:
    """What layers keep of a checkpoint with groups of so many inputs, or -1 for all; of 8 bits without zero points."""
    if bits == 8:
        assert not zero_points
        return Int8(group=None if size == -1 else size, act_order=act_order)
    return Int4(_WHOLE_ROW_GROUP if size == -1 else size, zero_points, act_order)


def read_awq(config: Entries) -> Scheme:
    """quant_method "awq"."""
    bits = _bits(config, 4)
    config.one_of("version", ("gemm", "GEMM"), "gemm")
    size = _group_size(config)
    kind = kind_of(bits, size, zero_points=config.one_of("zero_point", (True, False), True))
    modules = Modules(ignored=config.names("modules_to_not_convert"))
    return Awq(name="AWQ", kind=kind, modules=modules, whole_rows=size == -1)


def read_gptq(config: Entries) -> Scheme:
    """quant_method "gptq"."""
    bits = _bits(config, 4, 8)
    if bits == 8:
        config.one_of("sym", (True,), True)
    config.refuse("lm_head", "modules_in_block_to_quantize")
    offset = 0 if config.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq_v2" else 1
    size = _group_size(config)
    act_order = config.one_of("desc_act", (True, False), False) and size != -1
    kind = kind_of(bits, size, zero_points=bits == 4, act_order=act_order)
    modules = Modules(ignored=(*config.names("modules_to_not_convert"), *_left_out(config)))
    name = "GPTQ" if bits == 4 else "GPTQ in 8 bits"
    return Gptq(name=name, kind=kind, modules=modules, whole_rows=size == -1, offset=offset)


def _left_out(config: Entries) -> tuple[str, ...]:
    """Of GPTQModel's "dynamic", {"-:.*attn.*": {}, ..}: regular expressions for layers that are not quantized. Others
    may change nothing.

    Raises:
        UnsupportedModelError: some layers are quantized in another way.
        CheckpointError: it is no object, or has what is no regular expression.
    """
    rules = config.part("dynamic")
    if rules is None:
        return ()
    rules.refuse(*(rule for rule in rules if not rule.startswith("-:")))
    return rules.expressions("-:")


def _bits(config: Entries, *supported: int) -> int:
    name = "w_bit" if config.get("bits") is None and config.get("w_bit") is not None else "bits"
    bits: int = config.one_of(name, supported)
    return bits


def _group_size(config: Entries) -> int:
    name = "q_group_size" if config.get("group_size") is None and config.get("q_group_size") is not None else None
    size: int = config.one_of(name or "group_size", GROUPS)
    return size
