"""Tiny models of Llama, OPT, GPT-2 and their kin: names and the contents of their config.json. `tests/tiny_blocks.py`
has those of the other families, `tests/tiny_models.py` makes checkpoints of them.
"""

from dataclasses import dataclass, replace
from typing import Any

VOCAB_SIZE = 160
MAX_LENGTH = 256
"""Every case serves this many tokens, "dynamic" and "longrope" included."""

WINDOW = 12


@dataclass(frozen=True)
class TinyModel:
    """name: for test ids. family: its file in `jpaged.models.families`. config: the contents of config.json."""

    name: str
    family: str
    config: dict[str, Any]


def tiny_models() -> list[TinyModel]:
    """All cases: MHA, GQA and MQA; head_dim 16, 64 and 80; tied and untied; every RoPE scaling; sliding windows;
    biases; norms of queries and keys; experts in all layers and in some, with every router, and shared ones; OPT as in
    125m and as in 350m; GPT-2."""
    linear = {"type": "linear", "factor": 2.0}
    dynamic = {"type": "dynamic", "factor": 2.0}
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    longrope = {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": MAX_LENGTH,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    }
    qwen3 = {"num_key_value_heads": 2, "head_dim": 64}
    return [
        llama("llama-mha-d16", num_key_value_heads=4),
        llama("llama-gqa-d64-tied", num_key_value_heads=2, head_dim=64, tie_word_embeddings=True),
        llama("llama-mqa-d80", num_key_value_heads=1, head_dim=80),
        llama("llama-biases", num_key_value_heads=2, attention_bias=True, mlp_bias=True),
        llama("llama-rope-linear", num_key_value_heads=2, rope_scaling=linear),
        llama("llama-rope-dynamic", num_key_value_heads=2, rope_scaling=dynamic),
        llama("llama-rope-llama3", num_key_value_heads=2, rope_theta=500000.0, rope_scaling=llama3),
        llama("llama-rope-llama3-new-style", num_key_value_heads=2, rope_parameters=llama3 | {"rope_theta": 5e5}),
        llama("llama-rope-yarn", num_key_value_heads=2, rope_scaling=yarn),
        llama("llama-rope-longrope", num_key_value_heads=2, rope_scaling=longrope),
        llama("mistral-window", "Mistral", num_key_value_heads=2, sliding_window=WINDOW),
        llama("mistral-full", "Mistral", num_key_value_heads=2, sliding_window=None, head_dim=32),
        llama("qwen2-tied", "Qwen2", num_key_value_heads=2, tie_word_embeddings=True),
        llama(
            "ministral3",
            "Ministral3",
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            pad_token_id=0,
            rope_parameters=yarn
            | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
            | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        llama(
            "qwen2-window",
            "Qwen2",
            num_key_value_heads=1,
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        ),
        llama("qwen3-tied-d64", "Qwen3", tie_word_embeddings=True, **qwen3),
        llama(
            "qwen3-layer-types",
            "Qwen3",
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            **qwen3,
        ),
        _opt("opt-125m-style"),
        _opt("opt-350m-style", word_embed_proj_dim=32, do_layer_norm_before=False),
        _opt("opt-no-biases-untied", enable_bias=False, tie_word_embeddings=False, activation_function="gelu"),
        sparse("qwen3-moe", "Qwen3Moe", num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
        sparse(
            "qwen3-moe-some-layers",
            "Qwen3Moe",
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            num_experts=16,
            num_experts_per_tok=4,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
        ),
        sparse("qwen2-moe", "Qwen2Moe", num_experts=6, num_experts_per_tok=2, shared_expert_intermediate_size=48),
        sparse("mixtral", "Mixtral", num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6, sliding_window=None),
        sparse(
            "dots1",
            "Dots1",
            num_hidden_layers=3,
            first_k_dense_replace=1,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
        _gpt2("gpt2"),
        _gpt2("gpt2-scaled-by-layer", scale_attn_by_inverse_layer_idx=True, n_inner=96, n_layer=3),
    ]


def llama(name: str, family: str = "Llama", **changes: Any) -> TinyModel:
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 112,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return TinyModel(name, "llama", config | changes)


def sparse(name: str, family: str, **changes: Any) -> TinyModel:
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 40}
    changes = {"model_type": family.lower().replace("moe", "_moe")} | sizes | changes
    return replace(llama(name, family, **changes), family="sparse_llama")


def _opt(name: str, **changes: Any) -> TinyModel:
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 112,
        "max_position_embeddings": MAX_LENGTH,
        "do_layer_norm_before": True,
        "word_embed_proj_dim": 64,
        "activation_function": "relu",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    return TinyModel(name, "opt", config | changes)


def _gpt2(name: str, **changes: Any) -> TinyModel:
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_LENGTH,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return TinyModel(name, "gpt2", config | changes)
