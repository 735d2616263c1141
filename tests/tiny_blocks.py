"""Tiny models of the families made of `jpaged.models.blocks`, each with the features of its published ones."""

from dataclasses import replace
from typing import Any

from tests.tiny_cases import MAX_LENGTH, VOCAB_SIZE, WINDOW, TinyModel, llama, sparse


def models_of_blocks() -> list[TinyModel]:
    """The families whose layers are `jpaged.models.blocks`, with the features of their published configurations; of
    sparse Llamas those that have more than the ones in `tests/tiny_cases.py`."""
    window = {"sliding_window": WINDOW}
    gemma = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        **window,
    }
    gemma2 = gemma | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 24}
    gemma3 = gemma | {
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 100.0,
        "rope_theta": 10000.0,
    }
    gemma3n = gemma | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "intermediate_size": [90, 112, 112, 112],  # four shards pad the first
        "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.0],
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE - 32,
        "final_logit_softcapping": 8.0,
        "rope_local_base_freq": 100.0,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
    }
    gemma4 = gemma | {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 8.0,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
    }
    gemma4_e4b = gemma4 | {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", *2 * gemma4["layer_types"]],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_double_wide_mlp": True,
    }
    gemma4_31b = gemma4 | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
    }
    gemma4_26b = gemma4_31b | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
    }
    thetas = {"full_attention": 10000.0, "sliding_attention": 100.0}
    mimo = {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "attention_value_scale": 0.707,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
            for kind, theta in thetas.items()
        },
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": None,
        **window,
    }
    longrope = {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0] * 6}
    phi = {"model_type": "phi3", "pad_token_id": 0}
    phi4_mini = phi | {
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": MAX_LENGTH,
        "max_position_embeddings": 4 * MAX_LENGTH,
        "rope_scaling": longrope,
        "tie_word_embeddings": True,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.1}
    multipliers = {
        "num_key_value_heads": 2,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 4.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
    }
    dense_hybrid = multipliers | {
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 112,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["attention", "attention"],
        "tie_word_embeddings": True,
    }
    # Of granite-4.0-h-micro and so on: the multipliers, and all that a smaller shape can keep.
    granite4_h = dense_hybrid | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "position_embedding_type": "nope",
        "rope_theta": 10000,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
    bamba = {name: value for name, value in granite4_h.items() if name.startswith("mamba_")}
    bamba |= {"num_hidden_layers": 3, "attn_layer_indices": [1], "num_key_value_heads": 2, "rope_theta": 10000.0}
    bamba |= {"attn_rotary_emb": 8, "pad_token_id": 0, "mamba_d_head": "auto"}
    granite4_h_experts = {"intermediate_size": 40, "shared_intermediate_size": 48}
    granite_moe = multipliers | {"intermediate_size": 40, "tie_word_embeddings": True}
    granite_experts = {"num_local_experts": 8, "num_experts_per_tok": 3}
    lfm2 = {"num_hidden_layers": 4, "num_key_value_heads": 2, "norm_eps": 1e-5, "rope_theta": 1e6}
    lfm2 |= {"conv_L_cache": 3, "conv_bias": False, "tie_embedding": True, "pad_token_id": 0}
    nemotron = {
        "model_type": "nemotron_h",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 128,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "time_step_min": 0.001,
        "time_step_limit": [0.0, 1e30],
        "residual_in_fp32": False,
        "pad_token_id": 0,
    }
    nemotron_experts = {
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    glm = {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}
    glm["pad_token_id"] = 0
    cohere = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 2, "pad_token_id": 0}
    cohere_experts = {
        "model_type": "cohere2_moe",
        "head_dim": 16,
        "intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "expert_selection_fn": "sigmoid",
        "use_parallel_block": True,
        **window,
    }
    stablelm = {"num_key_value_heads": 4, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}
    starcoder2 = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "num_key_value_heads": 2}
    falcon = {"activation": "gelu", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "ffn_hidden_size": 112}
    neox = {"model_type": "gpt_neox", "hidden_act": "gelu", "rotary_pct": 0.25, "layer_norm_eps": 1e-5}
    gptj = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_inner": 112, "n_positions": MAX_LENGTH}
    bloom = {"hidden_size": 64, "n_layer": 2, "seq_length": MAX_LENGTH, "tie_word_embeddings": True}
    mpt = {"d_model": 64, "n_layers": 2, "max_seq_len": MAX_LENGTH, "no_bias": True, "tie_word_embeddings": True}
    dbrx = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": MAX_LENGTH, "pad_token_id": 0}
    olmo_hybrid = {"model_type": "olmo_hybrid", "num_hidden_layers": 4, "pad_token_id": 0}
    glm45 = {
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e6,
        "attention_bias": True,
        "pad_token_id": 0,
    }
    gpt_oss = {
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "pad_token_id": 0,
        **window,
    }
    hunyuan = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
        "pad_token_id": 0,
    }
    llama4 = {
        "model_type": "llama4_text",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "intermediate_size_mlp": 112,
        "num_local_experts": 8,
        "attention_chunk_size": 16,
        "floor_scale": 16,
        "attn_scale": 0.3,
        "pad_token_id": 0,
    }
    next_layers = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "pad_token_id": 0,
    }
    next_experts = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 48, "num_experts": 16}
    next_experts |= {"num_experts_per_tok": 4, "norm_topk_prob": True}
    mrope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    two, four = {"num_hidden_layers": 2, "full_attention_interval": 2}, {"num_hidden_layers": 4}
    qwen35 = next_layers | {"rope_parameters": next_layers["rope_parameters"] | mrope}
    return [
        _hybrid(
            "qwen3-next", "Qwen3Next", decoder_sparse_step=1, mlp_only_layers=[], **four, **next_layers, **next_experts
        ),
        _hybrid(
            "qwen3-next-some-layers",
            "Qwen3Next",
            layer_types=["linear_attention", "full_attention", "full_attention", "linear_attention"],
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            attention_bias=True,
            **four,
            **next_layers,
            **next_experts | {"norm_topk_prob": False},
        ),
        _hybrid("qwen3.5", "Qwen3_5", "qwen3_5_text", tie_word_embeddings=True, **two, **qwen35),
        _hybrid("qwen3.5-moe", "Qwen3_5Moe", "qwen3_5_moe_text", **two, **qwen35, **next_experts),
        _mla("deepseek-v2-lite", "V2", q_lora_rank=None, num_experts_per_tok=6, topk_method="greedy", n_group=1),
        _mla("deepseek-v2", "V2", num_experts_per_tok=3, topk_method="group_limited_greedy", attention_bias=True),
        _mla("deepseek-v3", "V3", num_experts_per_tok=4, rope_scaling=_mla_yarn(mscale=1.0, mscale_all_dim=1.0)),
        _mla("kimi-k2-style", "V3", num_experts_per_tok=8, n_group=1, rope_scaling=_mla_yarn(factor=32, beta_fast=1)),
        _mla("moonlight-style", "V3", q_lora_rank=None, num_experts_per_tok=6, n_group=1, rope_scaling=None),
        _mla(
            "glm4.7-flash-style",
            "V3",
            architectures=["Glm4MoeLiteForCausalLM"],
            model_type="glm4_moe_lite",
            num_experts_per_tok=4,
            n_group=1,
            mlp_layer_types=["dense", "sparse"],
            rope_scaling=None,
            rope_theta=1e6,
        ),
        _of("gemma", "gemma", "GemmaForCausalLM", **gemma | {"hidden_activation": None, "hidden_act": "gelu"}),
        _of("gemma2", "gemma", "Gemma2ForCausalLM", **gemma2),
        _of("vaultgemma", "gemma", "VaultGemmaForCausalLM", **gemma2 | {"num_key_value_heads": 4}),
        _of("gemma3", "gemma", "Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8.0}, **gemma3),
        _of("mimo-v2-flash-style", "mimo", "MiMoV2FlashForCausalLM", **mimo),
        _of("gemma3n-e4b-style", "gemma3n", "Gemma3nForCausalLM", **gemma3n),
        _of("gemma4-e4b-style", "gemma4", "Gemma4ForCausalLM", **gemma4_e4b),
        _of("gemma4-31b-style", "gemma4", "Gemma4ForCausalLM", **gemma4_31b),
        _of("gemma4-26b-a4b-style", "gemma4", "Gemma4ForCausalLM", **gemma4_26b),
        _of(
            "llama4-scout-style",
            "llama4",
            "Llama4ForCausalLM",
            no_rope_layers=[1, 0],
            num_experts_per_tok=1,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            **llama4,
        ),
        _of(
            "llama4-maverick-style",
            "llama4",
            "Llama4ForCausalLM",
            num_hidden_layers=4,
            interleave_moe_layer_step=2,
            use_qk_norm=False,
            **llama4
            | {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True}
            | {"attention_chunk_size": 48},
        ),
        _of("phi3-window", "phi3", "Phi3ForCausalLM", **phi, **window),
        _of("phi4-mini", "phi3", "Phi3ForCausalLM", **phi4_mini),
        _of("olmo2", "olmo", "Olmo2ForCausalLM", num_key_value_heads=2, rope_theta=5e5, pad_token_id=0),
        _of(
            "olmo3",
            "olmo",
            "Olmo3ForCausalLM",
            layer_types=["sliding_attention", "full_attention"],
            num_key_value_heads=2,
            rope_theta=5e5,
            rope_scaling=yarn,
            pad_token_id=0,
            **window,
        ),
        _of(
            "olmo-hybrid-7b-style",
            "olmo_hybrid",
            "OlmoHybridForCausalLM",
            rope_parameters={"rope_theta": None, "rope_type": "default"},
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            stored_convolution_shape=[86, 1, 4],  # as transformers saves it: 86, 86 and 84 channels
            **olmo_hybrid,
        ),
        _of(
            "olmo-hybrid-rope",
            "olmo_hybrid",
            "OlmoHybridForCausalLM",
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
            num_key_value_heads=2,
            rope_theta=5e5,
            attention_bias=True,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=24,
            linear_value_head_dim=12,
            linear_conv_kernel_dim=3,
            linear_allow_neg_eigval=False,
            tie_word_embeddings=True,
            **olmo_hybrid,
        ),
        _of(
            "exaone4-32b-style",
            "exaone4",
            "Exaone4ForCausalLM",
            layer_types=["sliding_attention", "full_attention"],
            sliding_window_pattern="LLLG",
            num_key_value_heads=2,
            rope_theta=1e6,
            pad_token_id=0,
            **window,
        ),
        _of(
            "exaone4-1.2b-style",
            "exaone4",
            "Exaone4ForCausalLM",
            layer_types=["full_attention"] * 2,
            sliding_window_pattern=None,
            sliding_window=None,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        _of("granite", "granite", "GraniteForCausalLM", tie_word_embeddings=True, attention_bias=True, **multipliers),
        _of("granite-moe", "granite", "GraniteMoeForCausalLM", **granite_moe, **granite_experts),
        _of(
            "granite-moe-shared",
            "granite",
            "GraniteMoeSharedForCausalLM",
            shared_intermediate_size=48,
            **granite_moe,
            **granite_experts,
        ),
        _of(
            "granite4-experts",
            "granite",
            "GraniteMoeHybridForCausalLM",
            position_embedding_type="nope",
            **dense_hybrid | {"intermediate_size": 40, "shared_intermediate_size": 48} | granite_experts,
        ),
        _of("granite4-rope", "granite", "GraniteMoeHybridForCausalLM", position_embedding_type="rope", **dense_hybrid),
        _of("granite4-nope", "granite", "GraniteMoeHybridForCausalLM", position_embedding_type="nope", **dense_hybrid),
        _of(
            "granite4-h-tiny",
            "granite",
            "GraniteMoeHybridForCausalLM",
            **granite4_h
            | granite4_h_experts
            | {"attention_multiplier": 0.0078125, "logits_scaling": 6, "num_local_experts": 16}
            | {"num_experts_per_tok": 6},
        ),
        _of(
            "granite4-h-micro",
            "granite",
            "GraniteMoeHybridForCausalLM",
            **granite4_h | {"attention_multiplier": 0.015625, "logits_scaling": 8},
        ),
        _of(
            "granite4-h-small",
            "granite",
            "GraniteMoeHybridForCausalLM",
            **granite4_h
            | granite4_h_experts
            | {"attention_multiplier": 0.0078125, "logits_scaling": 16, "num_local_experts": 18}
            | {"num_experts_per_tok": 10},
        ),
        _of(
            "granite4-h-all-options",
            "granite",
            "GraniteMoeHybridForCausalLM",
            **granite4_h
            | {"mamba_n_groups": 2, "mamba_proj_bias": True, "position_embedding_type": "rope"}
            | {"time_step_limit": [0.5, 1.5], "tie_word_embeddings": False, "attention_bias": True},
        ),
        _of("bamba", "bamba", "BambaForCausalLM", **bamba),
        _of(
            "smollm3",
            "smollm3",
            "SmolLM3ForCausalLM",
            num_key_value_heads=2,
            no_rope_layers=[1, 0],
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        _of(
            "lfm2-1.2b-style",
            "lfm2",
            "Lfm2ForCausalLM",
            **lfm2
            | {"full_attn_idxs": [1, 3], "block_ff_dim": 112, "block_auto_adjust_ff_dim": True}
            | {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 32, "block_dim": 64, "conv_bias": True},
        ),
        _of(
            "lfm2-8b-a1b-style",
            "lfm2",
            "Lfm2MoeForCausalLM",
            model_type="lfm2_moe",
            layer_types=["conv", "conv", "full_attention", "conv"],
            num_dense_layers=2,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=40,
            norm_topk_prob=True,
            use_expert_bias=True,
            routed_scaling_factor=1.0,
            **lfm2,
        ),
        _of(
            "nemotron-h-8b-style",
            "nemotron_h",
            "NemotronHForCausalLM",
            n_routed_experts=8,
            hybrid_override_pattern="M-M*-M-",
            **nemotron,
        ),
        _of(
            "nemotron3-nano-style",
            "nemotron_h",
            "NemotronHForCausalLM",
            hybrid_override_pattern="MEM*E",
            **nemotron | nemotron_experts,
        ),
        _of(
            "nemotron3-super-style",
            "nemotron_h",
            "NemotronHForCausalLM",
            layers_block_type=["mamba", "moe", "moe", "mlp", "attention", "moe"],
            moe_latent_size=24,
            **nemotron | nemotron_experts | {"n_groups": 4, "use_bias": True, "routed_scaling_factor": 5.0},
        ),
        _of("glm", "glm", "GlmForCausalLM", **glm),
        _of("glm4", "glm", "Glm4ForCausalLM", **glm),
        _of("command-r", "cohere", "CohereForCausalLM", logit_scale=0.25, **cohere),
        _of("command-r-plus", "cohere", "CohereForCausalLM", logit_scale=0.5, use_qk_norm=True, **cohere),
        _of(
            "command-r7b",
            "cohere",
            "Cohere2ForCausalLM",
            logit_scale=0.25,
            sliding_window_pattern=2,
            **cohere,
            **window,
        ),
        _of(
            "north-mini-code-style",
            "cohere",
            "Cohere2MoeForCausalLM",
            logit_scale=1.0,
            num_hidden_layers=3,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=112,
            norm_topk_prob=False,
            num_shared_experts=0,
            **cohere | cohere_experts,
        ),
        _of(
            "command-a-plus-style",
            "cohere",
            "Cohere2MoeForCausalLM",
            logit_scale=0.25,
            sliding_window_pattern=2,
            num_shared_experts=2,
            shared_expert_combination_strategy="average",
            **cohere | cohere_experts | {"rms_norm_eps": None},
        ),
        _of("stablelm", "stablelm", "StableLmForCausalLM", use_qkv_bias=True, **stablelm),
        _of(
            "stablelm-12b-style",
            "stablelm",
            "StableLmForCausalLM",
            qk_layernorm=True,
            use_parallel_residual=True,
            **stablelm | {"num_key_value_heads": 2},
        ),
        _of("starcoder2", "starcoder2", "Starcoder2ForCausalLM", tie_word_embeddings=True, **starcoder2, **window),
        _of("falcon-7b-style", "falcon", "FalconForCausalLM", multi_query=True, parallel_attn=True, **falcon),
        _of(
            "falcon-40b-style",
            "falcon",
            "FalconForCausalLM",
            new_decoder_architecture=True,
            num_kv_heads=2,
            **falcon,
        ),
        _of(
            "falcon-11b-style",
            "falcon",
            "FalconForCausalLM",
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            **falcon,
        ),
        _of(
            "falcon-rw-style",
            "falcon",
            "FalconForCausalLM",
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            bias=True,
            **falcon,
        ),
        _of("pythia", "gpt_neox", "GPTNeoXForCausalLM", **neox),
        _of("redpajama-3b-style", "gpt_neox", "GPTNeoXForCausalLM", use_parallel_residual=False, **neox),
        _of("gptj", "gptj", "GPTJForCausalLM", activation_function="gelu_new", layer_norm_epsilon=1e-5, **gptj),
        _of("bloom", "bloom", "BloomForCausalLM", n_head=4, layer_norm_epsilon=1e-5, **bloom),
        _of("mpt", "mpt", "MptForCausalLM", n_heads=4, attn_config={"alibi": True}, **mpt),
        _of("mpt-30b-style", "mpt", "MPTForCausalLM", n_heads=8, attn_config={"clip_qkv": 1.5, "alibi": True}, **mpt),
        _of(
            "dbrx-style",
            "dbrx",
            "DbrxForCausalLM",
            attn_config={"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 5e5},
            rope_theta=5e5,  # transformers reads this one alone
            ffn_config={"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 3},
            **dbrx,
        ),
        _of(
            "dbrx-all-options",
            "dbrx",
            "DbrxForCausalLM",
            attn_config={"clip_qkv": 8, "kv_n_heads": 1, "rope_theta": 1e4},
            ffn_config={
                "ffn_act_fn": {"name": "gelu"},
                "ffn_hidden_size": 48,
                "moe_num_experts": 6,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": None,
            },
            **dbrx,
        ),
        sparse(
            "olmoe",
            "Olmoe",
            model_type="olmoe",
            num_experts=8,
            num_experts_per_tok=3,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
        ),
        sparse(
            "minimax-m2",
            "MiniMaxM2",
            model_type="minimax_m2",
            num_local_experts=8,
            num_experts_per_tok=3,
            rotary_dim=8,
            rope_theta=5e6,
        ),
        sparse("glm4.5-air-style", "Glm4Moe", **glm45, routed_scaling_factor=1.0),
        sparse("glm4.5-style", "Glm4Moe", **glm45, use_qk_norm=True, routed_scaling_factor=2.5),
        replace(
            sparse(
                "ernie4.5-moe",
                "Ernie4_5_Moe",
                model_type="ernie4_5_moe",
                moe_num_experts=8,
                moe_k=3,
                moe_num_shared_experts=2,
                moe_layer_start_index=1,
                moe_layer_end_index=-1,
                rope_theta=500000.0,
                tie_word_embeddings=True,
                pad_token_id=0,
            ),
            family="ernie_moe",
        ),
        _of(
            "hunyuan-7b-style",
            "hunyuan",
            "HunYuanDenseV1ForCausalLM",
            **hunyuan | {"model_type": "hunyuan_v1_dense", "tie_word_embeddings": True},
        ),
        _of(
            "hunyuan-a13b-style",
            "hunyuan",
            "HunYuanMoEV1ForCausalLM",
            **hunyuan | {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [3, 3], "intermediate_size": 48},
        ),
        _of("gpt-oss-20b-style", "gpt_oss", "GptOssForCausalLM", num_local_experts=8, swiglu_limit=7.0, **gpt_oss),
        _of(
            "gpt-oss-120b-style",
            "gpt_oss",
            "GptOssForCausalLM",
            num_hidden_layers=3,
            num_local_experts=32,
            swiglu_limit=2.0,
            **gpt_oss,
        ),
        replace(
            sparse(
                "trinity-style",
                "Afmoe",
                num_dense_layers=1,
                num_experts=8,
                num_experts_per_tok=3,
                num_shared_experts=1,
                route_scale=2.826,
                global_attn_every_n_layers=2,
                mup_enabled=True,
                **{"model_type": "afmoe"} | window,
            ),
            family="afmoe",
        ),
        _of(
            "falcon-h1",
            "falcon_h1",
            "FalconH1ForCausalLM",
            **{name: value for name, value in granite4_h.items() if name.startswith("mamba_")},
            model_type="falcon_h1",
            num_key_value_heads=2,
            mamba_d_ssm=128,
            mamba_rms_norm=False,
            mamba_norm_before_gate=False,
            projectors_bias=False,
            embedding_multiplier=5.656854249492381,
            lm_head_multiplier=0.25,
            key_multiplier=0.5,
            attention_in_multiplier=1.0,
            attention_out_multiplier=0.9375,
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=0.7,
            mlp_multipliers=[0.8838834764831844, 0.5859375],
            ssm_multipliers=[0.7, 0.9, 0.8, 0.5, 0.6],
            rope_theta=1e11,
            pad_token_id=0,
        ),
        _of(
            "codestral-mamba-style",
            "mamba2",
            "Mamba2ForCausalLM",
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=2,
            conv_kernel=4,
            expand=2,
            layer_norm_epsilon=1e-5,
            pad_token_id=0,
        ),
    ]


def _of(name: str, family: str, architecture: str, **changes: Any) -> TinyModel:
    """A case with Llama's entries, of which each family reads those that it knows; GPT-J, BLOOM and MPT have their
    own."""
    config = llama(name).config
    if family in ("gptj", "bloom", "mpt", "dbrx"):
        config = {entry: config[entry] for entry in ("vocab_size", "bos_token_id", "eos_token_id")}
    named = {"architectures": [architecture], "model_type": architecture.removesuffix("ForCausalLM").lower()}
    return TinyModel(name, family, config | named | changes)


def _hybrid(name: str, family: str, model_type: str = "qwen3_next", **changes: Any) -> TinyModel:
    return replace(llama(name, family, model_type=model_type, **changes), family="qwen_hybrid")


def _mla(name: str, version: str, **changes: Any) -> TinyModel:
    """DeepSeek-V2 or V3, or what is built like one."""
    is_v2 = version == "V2"
    config = {
        "model_type": f"deepseek_{version.lower()}",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "max_position_embeddings": 2560,
        "rope_scaling": _mla_yarn(mscale=0.707, mscale_all_dim=0.707),
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 40,
        "n_routed_experts": 16,
        "n_shared_experts": 2 if is_v2 else 1,
        "scoring_func": "softmax" if is_v2 else "sigmoid",
        "topk_method": "greedy" if is_v2 else "noaux_tc",
        "n_group": 4,
        "norm_topk_prob": not is_v2,
        "routed_scaling_factor": 4.0 if is_v2 else 2.5,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
    }
    config = config | changes
    return _of(name, "deepseek", f"Deepseek{version}ForCausalLM", **config, topk_group=min(2, config["n_group"]))


def _mla_yarn(**changes: Any) -> dict[str, Any]:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    return yarn | {"mscale": 1.0, "mscale_all_dim": 1.0} | changes
