"""Model configurations to benchmark without a download: real shapes, random weights (`load_format="dummy"`)."""

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jpaged.api.errors import InvalidParameterError
from jpaged.host.hub import resolve
from jpaged.models import ModelConfig
from jpaged.models.config import ROUTER_SKEW
from jpaged.models.config_reader import read_json
from jpaged.models.families.gpt_oss import ROPE_SCALING

_LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}

_QWEN_HYBRID = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}

_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}

_DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "torch_dtype": "bfloat16",
}

_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": ROPE_SCALING,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "torch_dtype": "bfloat16",
}
"""Without its quantization_config: experts are served as bfloat16."""

_GEMMA_3_12B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 15360,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
"""The text part."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA_3_1
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "llama-3.1-70b": _LLAMA_3_1
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "qwen3-0.6b": _QWEN3
    | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    | {"tie_word_embeddings": True},
    "qwen3-8b": _QWEN3
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
    | {"tie_word_embeddings": False},
    "qwen3-30b-a3b": _QWEN3
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4}
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    "qwen3-next-80b-a3b": _QWEN_HYBRID
    | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936}
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 2, "intermediate_size": 5120}
    | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
    | {"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3.5-9b": _QWEN_HYBRID
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320}
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4, "intermediate_size": 12288},
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "gpt-oss-20b": _GPT_OSS_20B,
    "gemma-3-12b": _GEMMA_3_12B,
    "opt-125m": _OPT
    | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072}
    | {"word_embed_proj_dim": 768},
    "opt-13b": _OPT
    | {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480}
    | {"word_embed_proj_dim": 5120},
}
"""By the name that `--model` takes: the contents of the model's config.json."""


def model_directory(name: str) -> str:
    """A directory with the config.json of a model named here, which is removed as this process exits (one that is
    killed leaves it); any other name is returned as it is.
    """
    return _written(name, CONFIGS[name]) if name in CONFIGS else name


def skewed_model_directory(name: str, zipf: float) -> str:
    """A directory with the config.json of a model, named here or by a directory or hub id, whose random routers pick
    experts as popular as their rank to the power of -zipf (`Routing.zipf`). It is removed as this process exits.

    Raises:
        InvalidParameterError: the model has no experts.
        ModelNotFoundError: there is no such model.
    """
    config = CONFIGS[name] if name in CONFIGS else read_json(resolve(name, load_format="dummy") / "config.json")
    model = ModelConfig.from_dict(config)
    if not model.num_experts:
        raise InvalidParameterError(
            f"--expert-skew {zipf:g} is for mixtures of experts, and {model.architecture} is none; leave it out."
        )
    return _written(Path(name).name, {**config, ROUTER_SKEW: zipf})


def _written(name: str, config: dict[str, Any]) -> str:
    directory = Path(tempfile.mkdtemp(prefix=f"jpaged-{name}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return str(directory)
