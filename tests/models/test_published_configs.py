"""The config.json of published models, read: each has its published number of parameters."""

from typing import Any

import pytest

from jpaged import models
from jpaged.models import ModelConfig

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B = LLAMA_3_1_8B | {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": 4096,
}
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "vocab_size": 151936,
    "hidden_size": 1024,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
OPT_350M = OPT_125M | {
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GRANITE_4_H = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 100352,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}


NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 131072,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LFM2 = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
}

_GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 131072,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "olmo-hybrid-7b": (
        {
            "architectures": ["OlmoHybridForCausalLM"],
            "vocab_size": 100352,
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
            "num_key_value_heads": 30,
            "max_position_embeddings": 65536,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "layer_types": [*3 * ["linear_attention"], "full_attention"] * 8,
            "linear_num_key_heads": 30,
            "linear_num_value_heads": 30,
            "linear_key_head_dim": 96,
            "linear_value_head_dim": 192,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "tie_word_embeddings": False,
        },
        7_430_870_688 + 8 * 3840,  # and scales of values beside those of queries and keys, which nothing reads
    ),
    "granite-4.0-h-tiny": (
        GRANITE_4_H
        | {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48}
        | {"intermediate_size": 512, "shared_intermediate_size": 1024}
        | {"num_local_experts": 64, "num_experts_per_tok": 6},
        6_939_037_248,
    ),
    "granite-4.0-h-micro": (
        GRANITE_4_H
        | {"hidden_size": 2048, "mamba_n_heads": 64, "intermediate_size": 8192, "shared_intermediate_size": 8192}
        | {"num_local_experts": 0, "num_experts_per_tok": 0},
        3_191_396_096,
    ),
    "granite-4.0-h-small": (
        GRANITE_4_H
        | {"hidden_size": 4096, "mamba_n_heads": 128, "intermediate_size": 768, "shared_intermediate_size": 1536}
        | {"num_local_experts": 72, "num_experts_per_tok": 10},
        32_207_337_984,
    ),
    "bamba-9b": (
        {
            "architectures": ["BambaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "attn_layer_indices": [9, 18, 27],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
        },
        9_780_235_392,
    ),
    "gemma-2b": (
        {
            "architectures": ["GemmaForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_act": "gelu",
        },
        2_506_172_416,
    ),
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        2_614_341_888,
    ),
    "vaultgemma-1b": (
        {
            "architectures": ["VaultGemmaForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "layer_types": ["full_attention"] * 26,
            "sliding_window": 512,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 1024,
        },
        1_038_741_120,
    ),
    "gemma-3-1b": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
        },
        999_885_952,
    ),
    "gemma-3n-e2b": (
        _GEMMA3N
        | {
            "intermediate_size": [8192] * 30,
            "num_hidden_layers": 30,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6,
            "num_kv_shared_layers": 10,
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        },
        4_435_182_688,
    ),
    "gemma-3n-e4b": (
        _GEMMA3N | {"intermediate_size": [16384] * 35, "num_hidden_layers": 35, "num_kv_shared_layers": 15},
        6_835_235_568,
    ),
    "mimo-v2-flash": (
        {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "vocab_size": 152576,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "swa_num_key_value_heads": 8,
            "head_dim": 192,
            "v_head_dim": 128,
            "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 > 0) for i in range(48)],
            "moe_layer_freq": [0] + [1] * 47,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "sliding_window_size": 128,
        },
        308_778_768_832 + 47 * 256,  # and what corrects the scores of experts
    ),
    "gemma-4-e2b": (
        _GEMMA4
        | {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
        },
        4_628_569_379,
    ),
    "gemma-4-31b": (
        _GEMMA4
        | {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
        },
        30_697_345_340,
    ),
    "gemma-4-26b-a4b": (
        _GEMMA4
        | {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        25_233_141_790,
    ),
    "phi-4-mini": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        },
        3_836_021_760,
    ),
    "granite-3.1-8b": (
        {
            "architectures": ["GraniteForCausalLM"],
            "vocab_size": 49155,
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
        },
        8_170_848_256,
    ),
    **{
        f"granite-3.1-{name}": (
            {
                "architectures": ["GraniteMoeForCausalLM"],
                "vocab_size": 49155,
                "hidden_size": hidden_size,
                "intermediate_size": 512,
                "num_hidden_layers": num_layers,
                "num_attention_heads": hidden_size // 64,
                "num_key_value_heads": 8,
                "num_local_experts": num_experts,
                "num_experts_per_tok": 8,
                "tie_word_embeddings": True,
                "max_position_embeddings": 131072,
                "attention_multiplier": 0.015625,
                "embedding_multiplier": 12.0,
                "logits_scaling": 6.0,
                "residual_multiplier": 0.22,
            },
            parameters,
        )
        for name, hidden_size, num_layers, num_experts, parameters in (
            ("1b-a400m", 1024, 24, 32, 1_334_628_352),
            ("3b-a800m", 1536, 32, 40, 3_298_793_472),
        )
    },
    "smollm3": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
            "no_rope_layer_interval": 4,
        },
        3_075_098_624,
    ),
    "glm-4-9b-0414": (
        {
            "architectures": ["Glm4ForCausalLM"],
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 32768,
        },
        9_400_279_040,
    ),
    "command-r": (
        {
            "architectures": ["CohereForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "max_position_embeddings": 8192,
        },
        34_980_831_232,
    ),
    "stablelm-2-1.6b": (
        {
            "architectures": ["StableLmForCausalLM"],
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": True,
        },
        1_644_515_328,
    ),
    "starcoder2-3b": (
        {
            "architectures": ["Starcoder2ForCausalLM"],
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16384,
            "sliding_window": 4096,
        },
        3_030_371_328,
    ),
    "falcon-7b": (
        {
            "architectures": ["FalconForCausalLM"],
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "new_decoder_architecture": False,
        },
        6_921_720_704,
    ),
    "gpt-j-6b": (
        {
            "architectures": ["GPTJForCausalLM"],
            "vocab_size": 50400,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "rotary_dim": 64,
            "n_positions": 2048,
        },
        6_050_882_784,
    ),
    "gpt-neo-125m": (
        {
            "architectures": ["GPTNeoForCausalLM"],
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "max_position_embeddings": 2048,
            "attention_types": [[["global", "local"], 6]],
            "window_size": 256,
        },
        125_198_592,
    ),
    "bloom-560m": (
        {"architectures": ["BloomForCausalLM"], "vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16},
        559_214_592,
    ),
    **{
        f"gpt-oss-{name}": (
            {
                "architectures": ["GptOssForCausalLM"],
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": num_layers,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": num_experts,
                "num_experts_per_tok": 4,
                "max_position_embeddings": 131072,
                "sliding_window": 128,
                "quantization_config": {"quant_method": "mxfp4"},
            },
            parameters,
        )
        for name, num_layers, num_experts, parameters in (
            ("20b", 24, 32, 20_914_757_184),
            ("120b", 36, 128, 116_829_156_672),
        )
    },
    "lfm2-1.2b": (
        LFM2
        | {"architectures": ["Lfm2ForCausalLM"], "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True}
        | {"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
        | {"num_hidden_layers": 16},
        1_170_340_608,
    ),
    "lfm2-8b-a1b": (
        LFM2
        | {"architectures": ["Lfm2MoeForCausalLM"], "intermediate_size": 7168, "moe_intermediate_size": 1792}
        | {"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24}
        | {"layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]},
        8_339_929_856 + 22 * 32,  # and what corrects the scores of experts
    ),
    "nemotron-3-nano-30b-a3b": (
        NEMOTRON
        | {"hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "intermediate_size": 1856}
        | {"mamba_num_heads": 64, "num_hidden_layers": 52, "n_routed_experts": 128, "num_experts_per_tok": 6}
        | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
        31_577_940_288,
    ),
    "mpt-7b": (
        {
            "architectures": ["MptForCausalLM"],
            "vocab_size": 50432,
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "max_seq_len": 2048,
            "attn_config": {"alibi": True},
        },
        6_649_286_656,
    ),
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        *PUBLISHED.values(),
        (LLAMA_3_1_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_5_0_5B, 494_032_768),
        (QWEN3_0_6B, 596_049_920),
        (OPT_125M, 125_239_296),
        (OPT_350M, 331_196_416),
        (GPT2, 124_439_808),
    ],
    ids=[*PUBLISHED, "llama-3.1-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "opt-125m", "opt-350m", "gpt2"],
)
def test_published_models_have_their_published_number_of_parameters(config: dict[str, Any], parameters: int) -> None:
    assert models.build(ModelConfig.from_dict(config)).num_parameters == parameters


def _sized(architecture: str, vocab: int, hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """A config.json with sizes by their usual names."""
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


OF_EQUAL_LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "falcon-h1-0.5b": (
        {
            "architectures": ["FalconH1ForCausalLM"],
            "vocab_size": 32784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_rms_norm": False,
        },
        521_411_104,
    ),
    "codestral-mamba-7b": (
        {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64},
        7_285_403_648,
    ),
    "phi-2": (_sized("PhiForCausalLM", 51200, 2560, 10240, 32, 32), 2_779_683_840),
    "phi-3.5-moe": (
        _sized("PhiMoEForCausalLM", 32064, 4096, 6400, 32, 32)
        | {"num_key_value_heads": 8, "attention_bias": True, "lm_head_bias": True, "num_local_experts": 16},
        41_873_153_344,
    ),
    "codegen-350m": (
        {"architectures": ["CodeGenForCausalLM"], "vocab_size": 51200, "n_embd": 1024, "n_head": 16, "n_layer": 20}
        | {"rotary_dim": 32},
        356_712_448,
    ),
    "starcoder": (
        {"architectures": ["GPTBigCodeForCausalLM"], "vocab_size": 49152, "n_embd": 6144, "n_head": 48, "n_layer": 40}
        | {"n_positions": 8192},
        15_517_456_384,
    ),
    "olmo-7b": (_sized("OlmoForCausalLM", 50304, 4096, 11008, 32, 32), 6_888_095_744),
    "dbrx": (
        _sized("DbrxForCausalLM", 100352, 6144, 16384, 40, 48)
        | {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        131_596_523_520,
    ),
    "flexolmo-7x7b": (
        _sized("FlexOlmoForCausalLM", 100352, 4096, 11008, 32, 32) | {"num_experts": 7, "num_experts_per_tok": 5},
        33_270_665_216 + 32 * 4096,  # and scales of values beside those of queries and keys, which nothing reads
    ),
    "solar-open-100b": (
        _sized("SolarOpenForCausalLM", 196608, 4096, 10240, 48, 64)
        | {"num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "moe_intermediate_size": 1280},
        102_651_793_408 + 48 * 128,  # and what corrects the scores of experts
    ),
    "k-exaone-236b-a23b": (
        _sized("ExaoneMoEForCausalLM", 153600, 6144, 18432, 48, 64)
        | {"num_key_value_heads": 8, "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 2048},
        236_571_150_336 + 47 * 128,  # likewise
    ),
    "north-mini-code-30b-a3b": (
        _sized("Cohere2MoeForCausalLM", 262144, 2048, 768, 49, 32)
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "expert_selection_fn": "sigmoid"}
        | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 3072, "rms_norm_eps": 1e-6},
        30_484_303_872,
    ),
    "cwm": (
        _sized("CwmForCausalLM", 128256, 6144, 21504, 64, 48) | {"num_key_value_heads": 8, "head_dim": 128},
        32_581_097_472,
    ),
    "helium-1-preview-2b": (
        _sized("HeliumForCausalLM", 48000, 2560, 7040, 24, 20) | {"num_key_value_heads": 20, "head_dim": 128},
        2_172_643_840,
    ),
    "minicpm3-4b": (
        _sized("MiniCPM3ForCausalLM", 73448, 2560, 6400, 62, 40)
        | {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
        4_073_875_968,
    ),
    "youtu-llm-2b": (
        _sized("YoutuForCausalLM", 128256, 2048, 6144, 32, 16) | {"q_lora_rank": 1536, "kv_lora_rank": 512},
        1_961_560_064,
    ),
    "jais-2-8b": (_sized("Jais2ForCausalLM", 150272, 3328, 26624, 32, 26), 8_090_401_280),
    "internlm3-8b": (
        _sized("InternLM3ForCausalLM", 128512, 4096, 10240, 48, 32) | {"num_key_value_heads": 2, "head_dim": 128},
        8_804_241_408,
    ),
    "iquest-coder-40b": (
        _sized("IQuestCoderForCausalLM", 76800, 5120, 27648, 80, 40) | {"num_key_value_heads": 8, "head_dim": 128},
        39_794_283_520,
    ),
    "hyperclova-x-seed-think-14b": (
        _sized("HyperCLOVAXForCausalLM", 110592, 6144, 14336, 38, 48) | {"num_key_value_heads": 8, "head_dim": 128},
        14_748_112_896,
    ),
    "granite-swa-2b": (
        _sized("GraniteSWAForCausalLM", 100352, 2560, 8192, 24, 20) | {"num_key_value_heads": 4},
        2_144_463_840,
    ),
    "mellum2-12b-a2.5b": (
        _sized("MellumForCausalLM", 98304, 2304, 7168, 28, 32) | {"num_key_value_heads": 4},
        12_149_923_072,
    ),
    "nanochat-d32": (_sized("NanoChatForCausalLM", 65536, 2048, 8192, 32, 16), 1_879_048_192),
}
"""Models whose layers have as many parameters each, but for the first one at most."""


@pytest.mark.parametrize(("config", "parameters"), OF_EQUAL_LAYERS.values(), ids=OF_EQUAL_LAYERS)
def test_published_models_of_equal_layers_have_their_published_number_too(
    config: dict[str, Any], parameters: int
) -> None:
    """Counted of few layers, which takes a fraction of the time."""
    entry = "n_layer" if "n_layer" in config else "num_hidden_layers"
    two, three = (models.build(ModelConfig.from_dict(config | {entry: layers})).num_parameters for layers in (2, 3))
    assert two + (config[entry] - 2) * (three - two) == parameters
