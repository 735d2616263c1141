"""Checkpoints of NVIDIA's Model Optimizer (ModelOpt): NVFP4, and FP8 with a scale for each tensor.

"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "W4A16_NVFP4" or "FP8", "ignore": [...],
    "kv_cache_scheme": {...}}
or in a file of its own, hf_quant_config.json:
"quantization": {"quant_algo": ..., "exclude_modules": [...], "kv_cache_quant_algo": "FP8" or null}
"""

import fnmatch

from jpaged.models.quantization.fp8 import Fp8
from jpaged.models.quantization.fp8_weights import Fp8Weights
from jpaged.models.quantization.nvfp4 import Nvfp4, Nvfp4Weights
from jpaged.models.quantization.scheme import Entries, Modules, Scheme, check_kv_cache
from jpaged.pallas_kernels.int4_product.api import NV_GROUP


def read_modelopt(config: Entries) -> Scheme:
    """quant_method "modelopt"."""
    algorithm = config.one_of("quant_algo", ("NVFP4", "W4A16_NVFP4", "FP8"))
    config.one_of("kv_cache_quant_algo", ("FP8", "NONE"), "NONE")
    check_kv_cache(config.part("kv_cache_scheme"))
    names = config.names("exclude_modules", "ignore")
    modules = Modules(ignored=tuple(_pattern(name) for name in names))
    if algorithm == "FP8":
        return Fp8Weights(name="ModelOpt FP8", kind=Fp8(activations="static"), modules=modules)
    config.one_of("group_size", (NV_GROUP,), NV_GROUP)
    tensors = {"values": "weight", "outer": "weight_scale_2", "unread": "input_scale"}
    return Nvfp4Weights(name="ModelOpt NVFP4", kind=Nvfp4(), modules=modules, inverted=True, **tensors)


def _pattern(name: str) -> str:
    """A name may have "*", for anything."""
    return "re:" + fnmatch.translate(name) if "*" in name else name
