"""Checkpoints of compressed-tensors (LLM Compressor): FP8, 8-bit integers, 4 and 8 bits packed into words, and NVFP4.

"quantization_config": {"quant_method": "compressed-tensors", "format": ..., "ignore": [...],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {...}, "input_activations": {...} or null}}}
"""

from jpaged.api.errors import CheckpointError, UnsupportedModelError
from jpaged.models.quantization.fp8 import Fp8
from jpaged.models.quantization.fp8_weights import BLOCK, Fp8Weights
from jpaged.models.quantization.int8 import Int8
from jpaged.models.quantization.int8_weights import Int8Weights
from jpaged.models.quantization.nvfp4 import Nvfp4, Nvfp4Weights
from jpaged.models.quantization.packed_weights import GROUPS, PackQuantized, kind_of
from jpaged.models.quantization.scheme import Entries, Modules, Scheme, check_kv_cache
from jpaged.pallas_kernels.int4_product.api import NV_GROUP


def read_compressed_tensors(config: Entries) -> Scheme:
    """quant_method "compressed-tensors"."""
    config.refuse("transform_config")
    check_kv_cache(config.part("kv_cache_scheme"))
    sparsity = config.part("sparsity_config")
    if sparsity is not None and sparsity.get("format", "dense") != "dense":
        sparsity.one_of("format", ("dense",))
    groups = config.part("config_groups")
    names = [] if groups is None else list(groups)
    if groups is None or len(names) != 1:
        raise UnsupportedModelError(
            f"config.json: quantization_config.config_groups must have one group, got {len(names)}; layers quantized in"
            " different ways are not supported."
        )
    group = groups.part(names[0])
    if group is None or (weights := group.part("weights")) is None:
        raise CheckpointError(f"config.json: quantization_config.config_groups.{names[0]} says nothing of weights.")
    group.refuse("output_activations")
    modules = Modules(group.names("targets") or ("Linear",), config.names("ignore"))
    layout = group.get("format") or config.get("format")
    bits, number = weights.get("num_bits"), weights.get("type")
    if layout in ("float-quantized", "naive-quantized") and (bits, number) == (8, "float"):
        return _float_quantized(weights, group.part("input_activations"), modules)
    if layout in ("int-quantized", "naive-quantized") and (bits, number) == (8, "int"):
        return _int_quantized(weights, group.part("input_activations"), modules)
    if layout == "pack-quantized" and bits in (4, 8) and number == "int":
        return _pack_quantized(weights, group, modules)
    if layout == "nvfp4-pack-quantized" and (bits, number) == (4, "float"):
        return _nvfp4(weights, group.part("input_activations"), modules)
    raise UnsupportedModelError(
        f"config.json: quantization_config: compressed-tensors format {layout!r} with weights of {bits} bits"
        f" ({number}) is not supported; supported: float-quantized with 8 bits (float), int-quantized with 8 (int),"
        " pack-quantized with 4 or 8 (int), nvfp4-pack-quantized with 4 (float)."
    )


def _pack_quantized(weights: Entries, group: Entries, modules: Modules) -> Scheme:
    group.refuse("input_activations")
    weights.one_of("dynamic", (False,), False)
    strategy = weights.one_of("strategy", ("group", "channel"))
    size = weights.one_of("group_size", GROUPS) if strategy == "group" else -1
    bits: int = weights.one_of("num_bits", (4, 8))
    symmetric = weights.one_of("symmetric", (True, False) if bits == 4 else (True,), True)
    order = weights.one_of("actorder", ("group", "weight", "static", "dynamic", False), False)
    kind = kind_of(bits, size, zero_points=not symmetric, act_order=order in ("group", "dynamic"))
    name = "compressed-tensors INT4" if bits == 4 else "compressed-tensors INT8 weights"
    return PackQuantized(name=name, kind=kind, modules=modules, whole_rows=size == -1)


def _int_quantized(weights: Entries, activations: Entries | None, modules: Modules) -> Scheme:
    weights.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    weights.one_of("strategy", ("tensor", "channel"))
    if activations is None:
        return Int8Weights(name="compressed-tensors INT8 weights", kind=Int8(), modules=modules)
    activations.one_of("num_bits", (8,))
    activations.one_of("type", ("int",))
    activations.one_of("symmetric", (True,), True)
    dynamic = activations.one_of("dynamic", (True, False), False)
    activations.one_of("strategy", ("token",) if dynamic else ("tensor",))
    kind = Int8(activations="dynamic" if dynamic else "static")
    return Int8Weights(name="compressed-tensors INT8", kind=kind, modules=modules)


def _nvfp4(weights: Entries, activations: Entries | None, modules: Modules) -> Scheme:
    weights.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    weights.one_of("strategy", ("tensor_group",))
    weights.one_of("group_size", (NV_GROUP,))
    if activations is not None:
        activations.one_of("num_bits", (4,))
        activations.one_of("type", ("float",))
    return Nvfp4Weights(name="compressed-tensors NVFP4", kind=Nvfp4(), modules=modules)


def _float_quantized(weights: Entries, activations: Entries | None, modules: Modules) -> Scheme:
    weights.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"))
    if strategy == "block":
        weights.one_of("block_structure", ([BLOCK, BLOCK],))
        if activations is not None:
            activations.one_of("num_bits", (8,))
            activations.one_of("type", ("float",))
            activations.one_of("dynamic", (True,))
        name = "compressed-tensors FP8 in blocks"
        kind = Fp8(group=BLOCK, activations="none" if activations is None else "dynamic")
        return Fp8Weights(name=name, kind=kind, modules=modules, blocks=True)
    if activations is None:
        return Fp8Weights(name="compressed-tensors FP8 weights", kind=Fp8(), modules=modules)
    activations.one_of("num_bits", (8,))
    activations.one_of("type", ("float",))
    activations.one_of("symmetric", (True,), True)
    if activations.one_of("dynamic", (True, False), False):
        activations.one_of("strategy", ("token",))
        kind = Fp8(activations="dynamic")
    else:
        activations.one_of("strategy", ("tensor",))
        kind = Fp8(activations="static")
    return Fp8Weights(name="compressed-tensors FP8", kind=kind, modules=modules)
