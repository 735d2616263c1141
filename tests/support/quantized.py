"""Tiny checkpoints of every published layout of quantized weights, written from the layouts' definitions with numpy.

quantized_checkpoint(plain, target, "awq")       a checkpoint without quantization -> the same, quantized
dequantized_checkpoint(plain, target, "awq")     what the layout's definition says that its weights are, in float32
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny_models import TinyModel, tiny_model, write_tiny_model

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_TYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    E4M3: "F8_E4M3",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
Tensors = dict[str, np.ndarray]


class Published(NamedTuple):
    """A layout. config: "quantization_config". pack: a weight [out, in] -> its tensors, and what they stand for.
    of_expert: likewise, of a weight of the expert of a number; None where they are as others."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
    of_expert: Callable[[np.ndarray, int], tuple[Tensors, np.ndarray]] | None = None

    def packed(self, name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        """Of the layer of a name."""
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if self.of_expert is None or expert is None:
            return self.pack(weight)
        return self.of_expert(weight, int(expert[1]))


def tiny(name: str, **changes: Any) -> TinyModel:
    """A tiny Llama or Qwen3 whose hidden size groups of 32 divide, blocks of 128 do not, and whose shards both do."""
    case = tiny_model(name)
    sizes = {"hidden_size": 160, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256}
    return replace(case, config=case.config | sizes | changes)


def plain_checkpoint(name: str, directory: Path, **changes: Any) -> Path:
    """Of `tiny`."""
    return write_tiny_model(tiny(name, **changes), directory, use_torch=False)


def quantized_checkpoint(plain: Path, target: Path, layout: str, **entries: Any) -> Path:
    """entries: further ones of its "quantization_config"."""
    published = PUBLISHED[layout]
    config = {"quantization_config": published.config | entries}

    def pack(name: str, weight: np.ndarray) -> Tensors:
        return {f"{name}.{suffix}": tensor for suffix, tensor in published.packed(name, weight)[0].items()}

    return _rewritten(plain, target, config, pack)


def dequantized_checkpoint(plain: Path, target: Path, layout: str) -> Path:
    return _rewritten(
        plain, target, {}, lambda name, weight: {f"{name}.weight": PUBLISHED[layout].packed(name, weight)[1]}
    )


def _rewritten(plain: Path, target: Path, config: dict[str, Any], pack: Callable[[str, np.ndarray], Tensors]) -> Path:
    tensors: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_linear = any(part in name for part in ("_proj", ".experts.", ".feed_forward.w")) and name.endswith(".weight")
        tensors |= pack(name.removesuffix(".weight"), tensor) if is_linear else {name: tensor}
    target.mkdir()
    write_tensors(target / "model.safetensors", tensors)
    whole = json.loads((plain / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(whole))
    return target


def write_tensors(path: Path, tensors: Tensors) -> None:
    """A safetensors file of any types; the package writes no FP8 of numpy's."""
    if E4M3 not in {tensor.dtype for tensor in tensors.values()}:
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
        return
    entries, body = {}, b""
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor).tobytes()
        offsets = [len(body), len(body) + len(data)]
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body += data
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def read_tensors(path: Path) -> Tensors:
    """The inverse of `write_tensors`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    dtypes = {name: dtype for dtype, name in _TYPES.items()}
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[start:end], dtypes[entry["dtype"]]).reshape(entry["shape"]).copy()
    return found


def _fp8(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """e4m3 of a weight with a scale for each of its values."""
    return np.clip(weight / scale, -448, 448).astype(E4M3)


def _fp8_tensor(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = np.float32(np.abs(weight).max() / 448)
    values = _fp8(weight, scale)
    tensors = {"weight": values, "weight_scale": scale.reshape(1), "input_scale": np.full(1, 0.02, np.float32)}
    return tensors, values.astype(np.float32) * scale


def _fp8_channel(weight: np.ndarray, dtype: Any) -> tuple[Tensors, np.ndarray]:
    scale = (np.abs(weight).max(axis=1, keepdims=True) / 448).astype(dtype)
    values = _fp8(weight, scale.astype(np.float32))
    return {"weight": values, "weight_scale": scale}, values.astype(np.float32) * scale.astype(np.float32)


def _fp8_blocks(weight: np.ndarray, name: str) -> tuple[Tensors, np.ndarray]:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales, whole = np.empty((rows, columns), np.float32), np.empty(weight.shape, np.float32)
    for r in range(rows):
        for c in range(columns):
            block = (slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
            scales[r, c] = np.abs(weight[block]).max() / 448
            whole[block] = scales[r, c]
    values = _fp8(weight, whole)
    return {"weight": values, name: scales}, values.astype(np.float32) * whole


def _compressed(weights: dict[str, Any], activations: dict[str, Any] | None, layout: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_BY_TOKEN = _FLOAT8 | {"strategy": "token", "dynamic": True}


def _words(values: np.ndarray, axis: int, places: Sequence[int] = range(8)) -> np.ndarray:
    """Eight 4-bit values along an axis in an int32, or four 8-bit ones; places: which of them is in which bits."""
    values = np.moveaxis(values, axis, -1).astype(np.uint32)
    each = len(places)
    words = np.zeros((*values.shape[:-1], values.shape[-1] // each), np.uint32)
    for i, place in enumerate(places):
        words |= values[..., place::each] << np.uint32(32 // each * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def _integers(
    weight: np.ndarray,
    size: int,
    *,
    symmetric: bool,
    index: np.ndarray | None = None,
    dtype: Any = np.float16,
    bits: int = 4,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Values [out, in], scales and zero points [out, G], and the weights that they stand for.

    index: the group of each input; in their order if None.
    """
    outputs, inputs = weight.shape
    size = inputs if size == -1 else size
    index = np.arange(inputs) // size if index is None else index
    scales = np.empty((outputs, inputs // size), dtype)
    zeros = np.empty(scales.shape, np.int64)
    values = np.empty(weight.shape, np.int64)
    most = 2**bits - 1
    for g in range(inputs // size):
        part = weight[:, index == g]
        low, high = np.minimum(part.min(1), -1e-3), np.maximum(part.max(1), 1e-3)
        scales[:, g] = np.maximum(-low, high) / (most / 2) if symmetric else (high - low) / most
        wide = scales[:, g].astype(np.float32)
        zeros[:, g] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / wide), 1, most)
        rounded = np.round(part / wide[:, None]) + zeros[:, g, None]
        values[:, index == g] = np.clip(rounded, 0, most)
    whole = (values - zeros[:, index]).astype(np.float32) * scales[:, index].astype(np.float32)
    return values, scales, zeros, whole


def _awq(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    values, scales, zeros, whole = _integers(weight, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": _words(values.T, 1, order), "qzeros": _words(zeros.T, 1, order), "scales": scales.T}
    return tensors, whole


def scattered(inputs: int, size: int, expert: int = 0) -> np.ndarray:
    """The group of each input of a layer in act-order: the same for all layers of as many inputs, and of an expert."""
    return np.random.default_rng((inputs, expert)).permutation(np.arange(inputs) // size).astype(np.int32)


def _gptq(
    weight: np.ndarray, size: int, *, act_order: bool, stored_offset: int, expert: int = 0, bits: int = 4
) -> tuple[Tensors, np.ndarray]:
    """Of 8 bits without zero points."""
    inputs, each = weight.shape[1], range(32 // bits)
    index = scattered(inputs, size, expert) if act_order else None
    values, scales, zeros, whole = _integers(weight, size, symmetric=bits == 8, index=index, bits=bits)
    plain = np.zeros(inputs, np.int32) if size == -1 else (np.arange(inputs) // size).astype(np.int32)
    tensors = {
        "qweight": _words(values.T, 0, each),
        "qzeros": _words(zeros.T - stored_offset, 1, each),
        "scales": scales.T,
        "g_idx": plain if index is None else index,
    }
    return tensors, whole


def _packed(
    weight: np.ndarray, size: int = 32, *, symmetric: bool, act_order: bool = False, bits: int = 4
) -> tuple[Tensors, np.ndarray]:
    index = scattered(weight.shape[1], size) if act_order else None
    options: dict[str, Any] = {"symmetric": symmetric, "index": index, "dtype": ml_dtypes.bfloat16, "bits": bits}
    values, scales, zeros, whole = _integers(weight, size, **options)
    shape = np.array(weight.shape, np.int64)
    tensors = {
        "weight_packed": _words(values, 1, range(32 // bits)),
        "weight_scale": scales.astype(np.float32),
        "weight_shape": shape,
    }
    tensors |= {} if symmetric else {"weight_zero_point": _words(zeros, 0)}
    return tensors | ({} if index is None else {"weight_g_idx": index}), whole


def _int8(weight: np.ndarray, *, of_tensor: bool) -> tuple[Tensors, np.ndarray]:
    scale = (np.abs(weight).max(axis=None if of_tensor else 1, keepdims=True) / 127.5).astype(ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)
    values = np.clip(np.round(weight / wide), -128, 127).astype(np.int8)
    tensors = {"weight": values, "weight_scale": scale.reshape(-1) if of_tensor else scale}
    tensors |= {"input_scale": np.full(1, 0.05, np.float32)} if of_tensor else {}
    return tensors, values.astype(np.float32) * wide


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """Bytes [out, in / 2], scales in e4m3 [out, in / 16], what they are divided by, and what that stands for."""
    outputs = len(weight)
    outer = np.float32(448 * 6 / np.abs(weight).max())
    groups = weight.reshape(outputs, -1, 16)
    scale = (np.abs(groups).max(axis=2) / 6 * outer).astype(E4M3)
    scale[0, 0] = 0  # of weights that are too small
    wide = np.repeat(scale.astype(np.float32) / outer, 16, axis=1)
    parts = np.divide(np.abs(weight), wide, out=np.zeros_like(weight), where=wide > 0)
    nearest = np.abs(parts[..., None] - E2M1).argmin(axis=-1)
    bits = (nearest + 8 * (weight < 0)).astype(np.uint8)
    whole = np.where(weight < 0, -E2M1[nearest], E2M1[nearest]) * wide
    return bits[:, ::2] | bits[:, 1::2] << 4, scale, outer, whole


def _compressed_nvfp4(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    packed, scale, outer, whole = _nvfp4(weight)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": outer.reshape(1)}
    return tensors | {"input_global_scale": np.full(1, 50.0, np.float32)}, whole


def _modelopt_nvfp4(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Its scale of a tensor is the inverse, and so is that of what compressed-tensors makes of it."""
    packed, scale, outer, _ = _nvfp4(weight)
    inverse = np.float32(1) / outer
    bits = np.stack([packed & 15, packed >> 4], axis=-1).reshape(weight.shape)
    wide = np.repeat(scale.astype(np.float32) / (np.float32(1) / inverse), 16, axis=1)
    whole = np.concatenate([E2M1, -E2M1])[bits] * wide
    of_input = {"input_scale": np.full((), 0.02, np.float32)}
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": inverse.reshape(())} | of_input, whole


def _modelopt_fp8(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    tensors, whole = _fp8_tensor(weight)
    return {name: one.reshape(()) if one.size == 1 else one for name, one in tensors.items()}, whole


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_NVFP4 = _INT4 | {"type": "float", "strategy": "tensor_group", "group_size": 16}
_MODELOPT = {
    "quant_method": "modelopt",
    "ignore": ["*lm_head", "model.embed*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}

PUBLISHED: dict[str, Published] = {
    "fp8-static": Published(
        _compressed(_FLOAT8 | {"strategy": "tensor"}, _FLOAT8 | {"strategy": "tensor"}, "float-quantized"), _fp8_tensor
    ),
    "fp8-dynamic": Published(
        _compressed(_FLOAT8 | {"strategy": "channel"}, _BY_TOKEN, "float-quantized"),
        lambda weight: _fp8_channel(weight, ml_dtypes.bfloat16),
    ),
    "fp8-weights": Published(
        _compressed(_FLOAT8 | {"strategy": "channel"}, None, "float-quantized"),
        lambda weight: _fp8_channel(weight, np.float32),
    ),
    "fp8-blocks": Published(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        },
        lambda weight: _fp8_blocks(weight, "weight_scale_inv"),
    ),
    "fbgemm": Published(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        lambda weight: _fp8_channel(weight, np.float32),
    ),
    "awq": Published({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": Published(_GPTQ, lambda weight: _gptq(weight, 32, act_order=False, stored_offset=1)),
    "gptq-rows": Published(
        _GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"},
        lambda weight: _gptq(weight, -1, act_order=False, stored_offset=0),
    ),
    "gptq-act-order": Published(
        _GPTQ | {"desc_act": True},
        lambda weight: _gptq(weight, 32, act_order=True, stored_offset=1),
        lambda weight, expert: _gptq(weight, 32, act_order=True, stored_offset=1, expert=expert),
    ),
    "int4-symmetric": Published(
        _compressed(_INT4, None, "pack-quantized"), lambda weight: _packed(weight, symmetric=True)
    ),
    "int4-act-order": Published(
        _compressed(_INT4 | {"symmetric": False, "actorder": "group"}, None, "pack-quantized"),
        lambda weight: _packed(weight, symmetric=False, act_order=True),
    ),
    "int8-static": Published(
        _compressed(_INT8 | {"strategy": "tensor"}, _INT8 | {"strategy": "tensor"}, "int-quantized"),
        lambda weight: _int8(weight, of_tensor=True),
    ),
    "int8-dynamic": Published(
        _compressed(_INT8 | {"strategy": "channel"}, _INT8 | {"strategy": "token", "dynamic": True}, "int-quantized"),
        lambda weight: _int8(weight, of_tensor=False),
    ),
    "int8-weights": Published(
        _compressed(_INT8 | {"strategy": "channel"}, None, "pack-quantized"),
        lambda weight: _packed(weight, -1, symmetric=True, bits=8),
    ),
    "gptq-8-bits": Published(
        _GPTQ | {"bits": 8, "desc_act": True, "sym": True},
        lambda weight: _gptq(weight, 32, act_order=True, stored_offset=1, bits=8),
        lambda weight, expert: _gptq(weight, 32, act_order=True, stored_offset=1, expert=expert, bits=8),
    ),
    "nvfp4": Published(_compressed(_NVFP4, _NVFP4 | {"dynamic": "local"}, "nvfp4-pack-quantized"), _compressed_nvfp4),
    "modelopt-nvfp4": Published(_MODELOPT | {"quant_algo": "NVFP4"}, _modelopt_nvfp4),
    "modelopt-fp8": Published(_MODELOPT | {"quant_algo": "FP8"}, _modelopt_fp8),
}
