"""Reading config.json: what is understood, and what is refused by name."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import models
from jpaged.api.errors import CheckpointError, JPagedError, UnsupportedModelError
from jpaged.models import ModelConfig
from tests.tiny_models import MAX_LENGTH, TinyModel, models_of_blocks, tiny_model, tiny_models

LLAMA = tiny_model("llama-mha-d16").config
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def llama(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | changes)


@pytest.mark.parametrize("case", [*tiny_models(), *models_of_blocks()], ids=lambda case: case.name)
def test_every_tiny_model_serves_the_length_it_promises(case: TinyModel) -> None:
    assert ModelConfig.from_dict(case.config).max_position_embeddings >= MAX_LENGTH


def test_both_styles_of_rope_entries_mean_the_same() -> None:
    old = tiny_model("llama-rope-llama3").config
    new = tiny_model("llama-rope-llama3-new-style").config
    assert "rope_scaling" in old
    assert "rope_parameters" in new
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 32768),
        ({"type": "linear", "factor": 4.0}, 131072),
        ({"type": "dynamic", "factor": 4.0}, 32768),
        (YARN, 131072),
        (YARN | {"original_max_position_embeddings": 16384}, 65536),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 8192},
            32768,
        ),
        ({"type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 4096}, 4096),
        ({"type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 1.5}, 2),
    ],
)
def test_the_usable_context_follows_from_the_rope_scaling(scaling: dict[str, Any] | None, length: int) -> None:
    assert llama(max_position_embeddings=32768, rope_scaling=scaling).max_position_embeddings == length


def test_qwen2_windows_start_at_max_window_layers_and_only_if_switched_on() -> None:
    config = tiny_model("qwen2-window").config
    assert ModelConfig.from_dict(config).layer_windows == (None, 12, 12)
    assert ModelConfig.from_dict(config | {"use_sliding_window": False}).layer_windows == (None, None, None)
    assert ModelConfig.from_dict(config | {"sliding_window": 10**6}).layer_windows == (None, None, None)


def test_layer_types_say_which_layers_have_the_window() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = {"layer_types": kinds, "num_hidden_layers": 3}
    for name in ("qwen2-window", "qwen3-layer-types"):
        config = tiny_model(name).config | mixed
        assert ModelConfig.from_dict(config).layer_windows == (12, None, 12)
        assert ModelConfig.from_dict(config | {"use_sliding_window": False}).layer_windows == (None, None, None)
    mistral = tiny_model("mistral-window").config | mixed
    assert ModelConfig.from_dict(mistral).layer_windows == (12, 12, 12), "transformers' Mistral has windows everywhere"
    ministral = mistral | {"architectures": ["MinistralForCausalLM"]}
    assert ModelConfig.from_dict(ministral).layer_windows == (12, None, 12)
    assert ModelConfig.from_dict(ministral | {"layer_types": None}).layer_windows == (12, 12, 12)
    with pytest.raises(CheckpointError, match="layer_types must list 3 layers"):
        ModelConfig.from_dict(ministral | {"layer_types": kinds[:2]})


def test_a_configuration_without_windows_has_none_in_any_layer() -> None:
    assert llama(num_hidden_layers=3).layer_windows == (None, None, None)
    assert ModelConfig.from_dict(tiny_model("gpt2").config).layer_windows == (None, None)


def test_head_dim_is_independent_of_the_hidden_size_in_qwen3() -> None:
    config = {key: value for key, value in tiny_model("qwen3-tied-d64").config.items() if key != "head_dim"}
    assert ModelConfig.from_dict(config).head_dim == 128
    assert llama(head_dim=None).head_dim == 16


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_runs_in_the_type_of_the_checkpoint(key: str) -> None:
    assert models.build(llama(**{key: "float16"})).dtype == "float16"
    assert models.build(llama()).dtype == "float32"


def test_the_model_type_stands_in_for_missing_architectures() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert ModelConfig.from_dict(config).architecture == "LlamaForCausalLM"


def test_generation_config_says_what_ends_a_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_scaling": {"type": "mystery", "factor": 2.0}}, "mystery"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2, 3]}}, "mrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "xielu"}, "xielu"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {}}}, "rope_parameters"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        llama(**changes)


def test_an_unknown_architecture_is_answered_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        llama(architectures=["MambaForCausalLM"])
    for architecture in models.supported_architectures():
        assert architecture in str(error.value)


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("qwen3-layer-types", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("opt-125m-style", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("mpt", {"no_bias": False}, "no_bias"),
        ("granite4-experts", {"layer_types": None}, "mamba layers alone"),
        ("granite4-rope", {"layer_types": ["mamba", "lstm"]}, "layer type 'lstm'"),
        ("granite4-h-micro", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("glm4", {"hidden_act": "xielu"}, "xielu"),
    ],
)
def test_unimplemented_features_of_other_families_are_refused_too(
    case: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_dict(tiny_model(case).config | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
    ],
)
def test_a_damaged_entry_is_blamed_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        llama(**changes)


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("phi4-mini", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("phi4-mini", {"partial_rotary_factor": 0.1}, "even number"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("mpt", {"attn_config": "alibi"}, "attn_config"),
        ("granite4-h-micro", {"layer_types": ["mamba"]}, "layer_types must list 3 layers"),
        ("granite4-h-micro", {"mamba_d_head": 24}, "mamba_d_head"),
        ("granite4-h-micro", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("granite4-h-micro", {"mamba_d_conv": 1}, "mamba_d_conv"),
        ("granite4-h-micro", {"time_step_limit": [1.0]}, "time_step_limit"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices"),
    ],
)
def test_a_damaged_entry_of_another_family_is_blamed_by_name(case: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_dict(tiny_model(case).config | changes)


def test_the_text_part_of_a_multimodal_gemma_3_is_read_with_what_its_config_leaves_out() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    config = ModelConfig.from_dict(whole)
    assert (config.architecture, config.eos_token_ids) == ("Gemma3ForCausalLM", (1, 106))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.max_position_embeddings == 131072
    assert [i for i, window in enumerate(config.layer_windows) if window is None] == [5, 11, 17, 23, 29]


def test_rope_is_stretched_for_the_length_that_is_asked_for() -> None:
    phi = tiny_model("phi4-mini").config
    lengths = [
        ModelConfig.from_dict(phi, asked).max_position_embeddings for asked in (None, MAX_LENGTH, MAX_LENGTH + 1)
    ]
    assert lengths == [MAX_LENGTH, MAX_LENGTH, 4 * MAX_LENGTH]


JUNK = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from([*tiny_models(), *models_of_blocks()]), data=st.data())
def test_any_entry_replaced_by_junk_is_read_or_refused_with_our_own_error(case: TinyModel, data: st.DataObject) -> None:
    config = json.loads(json.dumps(case.config))
    target = config
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling and data.draw(st.booleans()):
        target = scaling
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JUNK)
    with contextlib.suppress(JPagedError):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "\x00"])
def test_a_config_that_is_no_json_object_is_a_checkpoint_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_a_missing_config_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        ModelConfig.from_directory(tmp_path)


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


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
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


def test_windows_of_gpt_oss_stand_in_every_second_layer_or_where_config_says() -> None:
    config = tiny_model("gpt-oss-120b-style").config
    assert ModelConfig.from_dict(config).layer_windows == (12, None, 12)
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    assert ModelConfig.from_dict(config | {"layer_types": kinds}).layer_windows == (None, None, 12)
    assert ModelConfig.from_dict(config | {"sliding_window": None}).layer_windows == (None, None, None)
    without = {name: value for name, value in config.items() if name != "sliding_window"}
    assert ModelConfig.from_dict(without).layer_windows == (128, None, 128)


def test_gpt_oss_without_a_rope_has_that_of_the_published_models() -> None:
    config = tiny_model("gpt-oss-20b-style").config
    without = {name: value for name, value in config.items() if not name.startswith("rope")}
    assert ModelConfig.from_dict(without).ropes == ModelConfig.from_dict(config).ropes
    rounded = config | {"rope_scaling": config["rope_scaling"] | {"truncate": True}}
    assert ModelConfig.from_dict(rounded).ropes != ModelConfig.from_dict(config).ropes
