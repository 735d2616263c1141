"""The "quantization_config" that published checkpoints have, read into tiny models: which layers it covers, and how.

Names of layers are those of two layers; everything else is as the tools that write such checkpoints leave it.
"""

from typing import Any, NamedTuple

import pytest

from jpaged import models
from jpaged.api.errors import UnsupportedModelError
from jpaged.models.quantization.fp8 import Fp8
from jpaged.models.quantization.int4 import Int4
from jpaged.models.quantization.int8 import Int8
from jpaged.models.quantization.mxfp4 import Mxfp4
from jpaged.models.quantization.nvfp4 import Nvfp4
from tests.support.quantized import tiny
from tests.tiny_models import tiny_model

_SAID_OF_NOTHING: dict[str, Any] = {
    "observer_kwargs": {},
    "block_structure": None,
    "group_size": None,
    "actorder": None,
}
_OF_WEIGHTS = _SAID_OF_NOTHING | {"dynamic": False, "observer": "minmax", "symmetric": True}
_OF_INPUTS = _SAID_OF_NOTHING | {"dynamic": True, "observer": None, "symmetric": True}
_NEWER: dict[str, Any] = {
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
    "global_compression_ratio": None,
}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str, **entries: Any) -> dict[str, Any]:
    """LLM Compressor's, with all that it writes."""
    group = {"targets": ["Linear"], "weights": _OF_WEIGHTS | weights, "output_activations": None}
    group |= {"input_activations": None if inputs is None else _OF_INPUTS | inputs}
    return {
        "config_groups": {"group_0": group},
        "format": layout,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    } | entries


def gptq(**entries: Any) -> dict[str, Any]:
    """GPTQModel's."""
    meta = {"meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.01, "mse": 0.0, "true_sequential": True}}
    of_all = {"bits": 4, "checkpoint_format": "gptq", "desc_act": False, "dynamic": None, "group_size": 128}
    return of_all | meta | {"lm_head": False, "pack_dtype": "int32", "quant_method": "gptq", "sym": True} | entries


_FLOAT8, _INT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int", "strategy": "group"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_INT8 = {"num_bits": 8, "type": "int"}
_DENSE = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_TENSOR = _FLOAT8 | {"strategy": "tensor"}
_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "observer": "minmax"}


class Case(NamedTuple):
    """model: of `tiny`. config: as published. kind: what layers keep. parts: which of theirs are quantized, by what the
    names begin with; None: all. layers: in which."""

    model: str
    config: dict[str, Any]
    kind: Any
    parts: set[str] | None = None
    layers: tuple[int, ...] = (0, 1)


CASES = {
    "RedHatAI/Llama-3.1-8B-Instruct-FP8-dynamic": Case(
        "llama-biases",
        compressed(_FLOAT8 | {"strategy": "channel"}, _FLOAT8 | {"strategy": "token"}, "float-quantized"),
        Fp8(activations="dynamic"),
    ),
    "neuralmagic/Llama-3.1-8B-Instruct-FP8": Case(
        "llama-biases",
        compressed(_TENSOR, _TENSOR | {"dynamic": False}, "float-quantized", kv_cache_scheme=_KV, **_NEWER),
        Fp8(activations="static"),
    ),
    "RedHatAI/Qwen3-30B-A3B-FP8-block": Case(
        "qwen3-moe",
        compressed(
            _FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
            _FLOAT8 | {"strategy": "group", "group_size": 128},
            "float-quantized",
            ignore=["re:.*lm_head", "re:.*mlp.gate$"],
        ),
        Fp8(group=128, activations="dynamic"),
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-quantized.w8a8": Case(
        "llama-biases",
        compressed(_INT8 | {"strategy": "channel"}, _INT8 | {"strategy": "token"}, "int-quantized"),
        Int8(activations="dynamic"),
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-quantized.w8a16": Case(
        "llama-biases",
        compressed(_INT8 | {"strategy": "channel"}, None, "pack-quantized", **_NEWER),
        Int8(),
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": Case("llama-biases", gptq(bits=8), Int8(group=128)),
    "RedHatAI/Llama-3.1-8B-Instruct-quantized.w4a16": Case(
        "llama-biases",
        compressed(_INT4 | {"group_size": 128, "actorder": "weight", "observer": "mse"}, None, "pack-quantized"),
        Int4(group=128, zero_points=False),
    ),
    "RedHatAI/DeepSeek-R1-quantized.w4a16": Case(
        "deepseek-v3",
        compressed(
            _INT4 | {"group_size": 128},
            None,
            "pack-quantized",
            ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", *_DENSE],
        ),
        Int4(group=128, zero_points=False),
        {"mlp.experts.gate_up", "mlp.experts.down"},
        layers=(1,),
    ),
    "moonshotai/Kimi-K2-Thinking": Case(
        "deepseek-v3",
        compressed(
            _INT4 | {"group_size": 32},
            None,
            "pack-quantized",
            ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
        ),
        Int4(group=32, zero_points=False),
        {"mlp.experts.gate_up", "mlp.experts.down"},
        layers=(1,),
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-NVFP4": Case(
        "llama-biases",
        compressed(_NVFP4, _NVFP4 | {"dynamic": "local", "observer": "minmax"}, "nvfp4-pack-quantized", **_NEWER),
        Nvfp4(),
    ),
    "nvidia/Llama-3.1-8B-Instruct-NVFP4": Case(
        "llama-biases",
        {
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head"],
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quant_method": "modelopt",
        },
        Nvfp4(),
    ),
    "ModelOpt, NVFP4 weights alone": Case(
        "llama-biases",
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "kv_cache_scheme": None}
        | {"ignore": ["lm_head", "model.layers.0.self_attn*", "model.layers.1.self_attn*"]},
        Nvfp4(),
        {"mlp"},
    ),
    "nvidia/DeepSeek-R1-NVFP4": Case(
        "deepseek-v3",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head", "model.layers.0.self_attn*", "model.layers.1.self_attn*"],
        },
        Nvfp4(),
        {"mlp"},
    ),
    "Qwen/Qwen3-8B-FP8": Case("qwen3-layer-types", _BLOCKS, Fp8(group=128, activations="dynamic")),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": Case(
        "qwen3-moe",
        _BLOCKS
        | {
            "modules_to_not_convert": ["lm_head"]
            + [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("input_layernorm", "mlp.gate")]
        },
        Fp8(group=128, activations="dynamic"),
    ),
    "deepseek-ai/DeepSeek-V3": Case("deepseek-v3", _BLOCKS, Fp8(group=128, activations="dynamic")),
    "deepseek-ai/DeepSeek-V3.1": Case(
        "deepseek-v3", _BLOCKS | {"scale_fmt": "ue8m0"}, Fp8(group=128, activations="dynamic")
    ),
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV": Case(
        "llama-biases",
        {
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
            "quant_method": "fp8",
        },
        Fp8(activations="static"),
    ),
    "meta-llama/Llama-3.1-405B-Instruct-FP8": Case(
        "llama-biases",
        {
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up")]
            + [f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "kqvo"],
            "quant_method": "fbgemm_fp8",
        },
        Fp8(activations="dynamic", upper_bound=1200.0),
        {"mlp"},
        layers=(1,),
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": Case(
        "llama-biases",
        {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"}
        | {"zero_point": True},
        Int4(group=128, zero_points=True),
    ),
    "cognitivecomputations/DeepSeek-V3-AWQ": Case(
        "deepseek-v3",
        {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"}
        | {"zero_point": True},
        Int4(group=128, zero_points=True),
    ),
    "hugging-quants/Mixtral-8x7B-Instruct-v0.1-AWQ-INT4": Case(
        "mixtral",
        {"backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None}
        | {"group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": ["gate"], "quant_method": "awq"}
        | {"version": "gemm", "zero_point": True},
        Int4(group=128, zero_points=True),
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Case(
        "llama-biases",
        {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01}
        | {"dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "sym": True}
        | {"max_input_length": None, "modules_in_block_to_quantize": None, "pad_token_id": None, "tokenizer": None}
        | {"quant_method": "gptq", "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
        Int4(group=128, zero_points=True),
    ),
    "TheBloke/opt-125m-AWQ": Case(
        "opt-125m-style",
        {"quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "gemm"},
        Int4(group=128, zero_points=True),
    ),
    "TheBloke/Llama-2-7B-GPTQ": Case(
        "llama-biases",
        {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True, "sym": True, "true_sequential": True}
        | {"model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq"},
        Int4(group=128, zero_points=True, act_order=True),
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": Case("qwen3-moe", gptq(), Int4(group=128, zero_points=True)),
    "Qwen3.5, attention left out by GPTQModel": Case(
        "qwen3.5",
        gptq(
            dynamic={"lm_head": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
        ),
        Int4(group=128, zero_points=True),
        {"mlp"},
    ),
    "openai/gpt-oss-20b": Case(
        "gpt-oss-20b-style",
        {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        Mxfp4(),
        {"mlp.experts.gate_up", "mlp.experts.down"},
    ),
}


_SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b-style": {"hidden_size": 256, "intermediate_size": 128},
    "opt-125m-style": {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256},
}


def config_of(case: Case) -> dict[str, Any]:
    """Of a tiny model, whose sizes groups of 128 divide."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
    sizes |= {"kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 64}
    own = _SIZES.get(case.model)
    config = tiny(case.model, **sizes).config if own is None else tiny_model(case.model).config | own
    return config | {"quantization_config": case.config}


@pytest.mark.parametrize("name", CASES)
def test_published_schemes_cover_the_layers_that_they_say(name: str) -> None:
    case = CASES[name]
    model = models.build(models.ModelConfig.from_dict(config_of(case)), "float32")
    scheme = model.config.quantization
    assert scheme is not None
    assert scheme.kind == case.kind
    found = {tuple(layer.split(".", 2)[1:]) for layer in model.quantized}
    parts = case.parts or {"attention", "mlp"}
    begins = {part: [(i, one) for i, one in found if f"{one}.".startswith(f"{part}.")] for part in parts}
    assert {pair for pairs in begins.values() for pair in pairs} == found, "nothing but these"
    assert all({layer for layer, _ in pairs} == {str(i) for i in case.layers} for pairs in begins.values())
    assert {name.split(".")[-1] for name in model.dequantized} <= {"to_keys", "to_values"}, "no embeddings"


REFUSED = {
    "LLM Compressor, asymmetric activations in 8 bits": (
        compressed(_INT8 | {"strategy": "channel"}, _INT8 | {"strategy": "token", "symmetric": False}, "int-quantized"),
        "input_activations: symmetric=False",
    ),
    "unsloth/Llama-3.1-8B-Instruct-bnb-4bit": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"},
        "quant_method 'bitsandbytes'",
    ),
    "ModelOpt, several algorithms": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        "quant_algo='MIXED_PRECISION'",
    ),
    "GPTQModel, 8 bits in some layers": (gptq(dynamic={"+:.*mlp.*": {"bits": 8}}), r"dynamic: \+:.\*mlp.\*"),
    "GPTQModel, 3 bits": (gptq(bits=3), "bits=3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_published_schemes_that_are_not_supported_are_named(name: str) -> None:
    config, said = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=said):
        models.ModelConfig.from_dict(dict(tiny("llama-biases").config) | {"quantization_config": config})
