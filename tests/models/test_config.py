"""Reading config.json: what is understood, and what is refused by name."""

import contextlib
import json
import re
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
    assert ModelConfig.from_dict(mistral).layer_windows == (12, None, 12), "transformers takes it for a Ministral"
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": mistral}
    assert ModelConfig.from_dict(whole).layer_windows == (12, 12, 12), "its Mistral has windows everywhere"
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


def test_a_head_dim_of_null_divides_the_hidden_size_by_the_heads() -> None:
    """Whatever the family's is where there is no such entry."""
    for architecture in ("SeedOssForCausalLM", "Ernie4_5ForCausalLM", "InternLM3ForCausalLM"):
        assert llama(architectures=[architecture], num_key_value_heads=2, head_dim=None).head_dim == 16


def test_heads_of_a_size_of_their_own_need_not_divide_the_hidden_size() -> None:
    """As in Falcon-H1 1.5B-Deep: 6 heads of 128 columns, and a hidden size of 1280."""
    odd = {"hidden_size": 52, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    assert ModelConfig.from_dict(tiny_model("mixtral").config | odd).head_dim == 16


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
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, -1]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (2,)


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
        ("gemma4-31b-style", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4-31b-style", {"per_layer_config": {"0": {"sliding_window": 4}}}, "per_layer_config may say head_dim"),
        ("gemma4-31b-style", {"per_layer_config": {"1": {"head_dim": 8}}}, "equal for all layers of a type"),
        ("gemma4-e4b-style", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input"),
        ("mimo-v2-flash-style", {"v_head_dim": 32}, r"v_head_dim \(32\) above head_dim \(24\)"),
        ("mimo-v2-flash-style", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("mpt", {"no_bias": False}, "no_bias"),
        ("dbrx-style", {"attn_config": {"rope_theta": 1e6}}, "rope_theta=1000000.0 in attn_config and 500000.0"),
        ("dbrx-style", {"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}}, "ffn_act_fn"),
        ("dbrx-style", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "moe_normalize_expert_weights=2"),
        ("dbrx-style", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("olmo-hybrid-rope", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("olmo-hybrid-rope", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "parameters by layer type"),
        ("olmo-hybrid-rope", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("olmo-hybrid-rope", {"layer_types": ["linear_attention"] * 4}, "linear_attention alone"),
        ("olmo-hybrid-rope", {"layer_types": ["full_attention"] * 4}, "full_attention alone"),
        ("granite4-experts", {"layer_types": None}, "mamba layers alone"),
        ("bloom", {"pretraining_tp": 4, "slow_but_exact": True}, "slow_but_exact"),
        ("granite4-rope", {"layer_types": ["mamba", "lstm"]}, "layer type 'lstm'"),
        ("granite4-h-micro", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("glm4", {"hidden_act": "xielu"}, "xielu"),
        ("llama4-scout-style", {"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ("lfm2-1.2b-style", {"full_attn_idxs": []}, "conv layers alone"),
        ("lfm2-1.2b-style", {"conv_L_cache": 1}, "conv_L_cache"),
        ("lfm2-8b-a1b-style", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("nemotron-h-8b-style", {"hybrid_override_pattern": "M-M-"}, "layers without attention"),
        ("nemotron-h-8b-style", {"hybrid_override_pattern": "M*+"}, "layer type '\\+'"),
        ("nemotron-h-8b-style", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron3-nano-style", {"mlp_bias": True}, "mlp_bias"),
        ("north-mini-code-style", {"use_parallel_block": False}, "use_parallel_block=False"),
        ("north-mini-code-style", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("north-mini-code-style", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "say it as rope_parameters"),
        ("north-mini-code-style", {"expert_selection_fn": "tanh"}, "expert_selection_fn='tanh'"),
        ("command-a-plus-style", {"shared_expert_combination_strategy": "max"}, "supported: average, sum"),
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
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            r"high_freq_factor \(1\) of at least its low_freq_factor \(4\)",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
    ],
)
def test_a_damaged_entry_is_blamed_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        llama(**changes)


def test_a_number_that_is_left_out_is_said_to_be_the_default_of_its_family() -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 32}
    config = tiny_model("stablelm").config | sizes
    with pytest.raises(CheckpointError, match=r"multiple of num_key_value_heads \(32\)\.$"):
        ModelConfig.from_dict(config)
    del config["num_key_value_heads"]
    with pytest.raises(CheckpointError, match=r"\(32, the default of its family, as config\.json leaves it out\)\.$"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("phi4-mini", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("phi4-mini", {"partial_rotary_factor": 0.1}, "even number"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma3n-e4b-style", {"altup_active_idx": 4}, r"altup_active_idx \(4\) must be below altup_num_inputs"),
        ("gemma3n-e4b-style", {"intermediate_size": [112]}, "intermediate_size must list 4 layers"),
        ("gemma3n-e4b-style", {"intermediate_size": [112] * 3 + [0]}, "'intermediate_size' must be a positive integer"),
        ("gemma3n-e4b-style", {"activation_sparsity_pattern": 0.95}, "activation_sparsity_pattern must list"),
        ("gemma3n-e4b-style", {"activation_sparsity_pattern": [1.0] * 4}, "activation_sparsity_pattern must list"),
        ("gemma4-e4b-style", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ("mimo-v2-flash-style", {"mlp_layer_types": None, "moe_layer_freq": [0, 2, 1]}, "moe_layer_freq must list 0"),
        ("gemma4-26b-a4b-style", {"num_global_key_value_heads": 3}, r"num_key_value_heads \(3"),
        ("gemma4-26b-a4b-style", {"top_k_experts": 9}, "num_experts_per_tok"),
        ("mpt", {"attn_config": "alibi"}, "attn_config"),
        ("dbrx-style", {"ffn_config": [3]}, "ffn_config"),
        (
            "dbrx-style",
            {"ffn_config": {"moe_num_experts": 2, "moe_top_k": 3}},
            r"moe_top_k \(3\) .* moe_num_experts \(2\)",
        ),
        ("dbrx-style", {"attn_config": {"kv_n_heads": 3}}, r"n_heads \(4\) must be a multiple of kv_n_heads \(3\)"),
        ("olmo-hybrid-rope", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("olmo-hybrid-rope", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("granite4-h-micro", {"layer_types": ["mamba"]}, "layer_types must list 3 layers"),
        ("granite4-h-micro", {"mamba_d_head": 24}, "mamba_d_head"),
        ("granite4-h-micro", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("granite4-h-micro", {"mamba_d_conv": 1}, "mamba_d_conv"),
        ("granite4-h-micro", {"time_step_limit": [1.0]}, "time_step_limit"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices"),
        ("lfm2-1.2b-style", {"full_attn_idxs": "all"}, "full_attn_idxs"),
        ("nemotron-h-8b-style", {"n_groups": 3}, "n_groups"),
        ("nemotron-h-8b-style", {"layers_block_type": 52}, "layers_block_type"),
        ("nemotron3-nano-style", {"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ("llama4-scout-style", {"no_rope_layers": [1]}, "no_rope_layers must list 0 or 1 for each of 2 layers"),
        ("llama4-scout-style", {"moe_layers": "all"}, "moe_layers"),
        ("llama4-scout-style", {"attn_temperature_tuning": 0.5}, "attn_temperature_tuning"),
        (
            "llama4-scout-style",
            {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": None},
            "attention_chunk_size",
        ),
    ],
)
def test_a_damaged_entry_of_another_family_is_blamed_by_name(case: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_dict(tiny_model(case).config | changes)


@pytest.mark.parametrize("said", ["global", [["global", 2]], [[["local"], "2"]], [[["global"], 10**12]]])
def test_a_damaged_list_of_gpt_neos_kinds_of_layers_is_blamed_by_name(said: object) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    with pytest.raises(CheckpointError, match="attention_types must give 'global' or 'local' for 2 layers"):
        ModelConfig.from_dict({"architectures": ["GPTNeoForCausalLM"], "attention_types": said} | sizes)


def test_gemma_4s_layers_have_the_heads_and_the_sources_of_their_type() -> None:
    config = ModelConfig.from_dict(tiny_model("gemma4-e4b-style").config)
    assert config.layer_sources == (None, None, None, 1, 2)
    assert [config.of_layer(layer).head_dim for layer in range(5)] == [16, 16, 32, 16, 32]
    assert [config.inner_size(layer) for layer in range(5)] == [112, 112, 112, 224, 224]
    passed_over = models.build(config).derived_tensors
    assert re.search(passed_over, "model.language_model.layers.3.self_attn.k_proj.weight")
    assert not re.search(passed_over, "model.language_model.layers.2.self_attn.k_proj.weight")
    split = ModelConfig.from_dict(tiny_model("gemma4-26b-a4b-style").config).shard(2)
    assert [split.of_layer(layer).num_kv_heads for layer in (0, 2)] == [1, 1]
    assert [split.of_layer(layer).kv_head_copies for layer in (0, 2)] == [1, 2]


def test_a_gemma_3n_passes_over_what_its_published_checkpoints_have_besides() -> None:
    passed_over = models.build(ModelConfig.from_dict(tiny_model("gemma3n-e4b-style").config)).derived_tensors
    assert re.search(passed_over, "model.audio_tower.conformer.0.norm.weight")
    assert re.search(passed_over, "model.language_model.layers.2.self_attn.k_norm.weight")
    assert not re.search(passed_over, "model.language_model.layers.1.self_attn.k_norm.weight")
    assert not re.search(passed_over, "model.language_model.layers.1.altup.correct_output_scale")


def test_layers_of_mimo_are_read_as_they_are_published_too() -> None:
    config = tiny_model("mimo-v2-flash-style").config
    said = {"hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "sliding_window_size": 11}
    said |= {"rope_theta": 1e4, "swa_rope_theta": 100, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5}
    others = "layer_types", "mlp_layer_types", "rope_parameters", "sliding_window", "rms_norm_eps"
    published = {name: value for name, value in config.items() if name not in others} | said
    assert ModelConfig.from_dict(published) == ModelConfig.from_dict(config)


@pytest.mark.parametrize("written", ["{}", "0{}"], ids=["plain", "padded with zeros"])
def test_layers_of_gemma_4_are_found_by_their_numbers_as_transformers_writes_them(written: str) -> None:
    """From ten layers on all of these have two digits."""
    config = {name: v for name, v in tiny_model("gemma4-31b-style").config.items() if not name.startswith("global_")}
    whole = {"head_dim": 32, "num_key_value_heads": 1}
    read = ModelConfig.from_dict(config | {"per_layer_config": {written.format(layer): whole for layer in (1, 2)}})
    assert read.layer_heads == ModelConfig.from_dict(tiny_model("gemma4-31b-style").config).layer_heads


def test_heads_of_gemma_4_are_equal_where_its_layers_have_no_configurations() -> None:
    config = tiny_model("gemma4-31b-style").config
    for nothing in (None, {}):
        assert set(ModelConfig.from_dict(config | {"per_layer_config": nothing}).layer_heads) == {(4, 16, 1)}


def test_a_command_a_without_experts_has_no_first_layers_of_another_kind() -> None:
    """transformers reads these entries where there are experts alone."""
    config = tiny_model("command-r7b").config
    others = {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 1}
    found, expected = (ModelConfig.from_dict(one) for one in (config | others, config))
    assert found.layer_windows == expected.layer_windows
    assert found.layer_ropes == expected.layer_ropes


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_windows_of_gemma_2_stand_in_every_second_layer_or_where_layer_types_say(name: str) -> None:
    """transformers reads no sliding_window_pattern there."""
    config = tiny_model(name).config | {"num_hidden_layers": 3, "sliding_window": 12, "sliding_window_pattern": 3}
    config = {entry: value for entry, value in config.items() if entry != "layer_types"}
    assert ModelConfig.from_dict(config).layer_windows == (12, None, 12)
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    assert ModelConfig.from_dict(config | {"layer_types": kinds}).layer_windows == (None, 12, 12)


def test_dbrx_rotates_by_the_theta_that_its_published_checkpoints_say(caplog: pytest.LogCaptureFixture) -> None:
    """In attn_config alone, where transformers 5 does not read it."""
    config = {name: value for name, value in tiny_model("dbrx-style").config.items() if name != "rope_theta"}
    assert ModelConfig.from_dict(config | {"attn_config": {"rope_theta": 5e5}}).ropes[0].theta == 5e5
    (warning,) = caplog.messages
    assert "rope_theta=500000.0" in warning
    assert "rotates by 10000.0" in warning
    caplog.clear()
    for same in ({"attn_config": {"rope_theta": 1e4}}, {"attn_config": {}}):
        assert ModelConfig.from_dict(config | same).ropes[0].theta == 1e4
    both = config | {"attn_config": {"rope_theta": 5e5}, "rope_theta": 5e5}
    assert ModelConfig.from_dict(both).ropes[0].theta == 5e5
    assert not caplog.messages
    saved = config | {"attn_config": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match=r"delete rope_parameters \(or rope_theta\) from config\.json"):
        ModelConfig.from_dict(saved)


def test_mlps_of_qwen_3_next_replace_experts_where_config_json_says_but_none_of_qwen_3_5() -> None:
    for name, dense in (("qwen3-next", (True, False, False, False)), ("qwen3.5-moe", (False, False))):
        read: Any = ModelConfig.from_dict(tiny_model(name).config | {"mlp_only_layers": [0]})
        assert read.dense_layers == dense


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


def test_layers_of_llama_4_that_rotate_have_chunks_unless_config_json_says_otherwise() -> None:
    config = tiny_model("llama4-scout-style").config | {"max_position_embeddings": 4096}
    found = ModelConfig.from_dict(config, 4096)
    assert (found.layer_windows, found.chunked_windows) == ((16, None), True)
    assert found.max_position_embeddings == 4096
    of_other_layers = {"layer_types": ["full_attention", "chunked_attention"]}
    assert ModelConfig.from_dict(config | of_other_layers).layer_windows == (None, 16)
    for whole in ({"attention_chunk_size": None}, {"layer_types": ["full_attention"] * 2}, {"no_rope_layers": [0, 0]}):
        assert ModelConfig.from_dict(config | whole).layer_windows == (None, None)


def test_the_temperature_of_llama_4_is_switched_by_a_number_too_as_in_the_first_files() -> None:
    config = tiny_model("llama4-scout-style").config
    found = [ModelConfig.from_dict(config | {"attn_temperature_tuning": value}).temperature for value in (4, True, 0)]
    assert found[0] == found[1] is not None
    assert found[2] is None


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "qwen3-moe", "qwen3.5"])
def test_every_family_stretches_a_dynamic_rope_to_max_model_len(name: str) -> None:
    config = tiny_model(name).config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}
    length = ModelConfig.from_dict(config).max_position_embeddings
    assert ModelConfig.from_dict(config, 2 * length).max_position_embeddings == 2 * length
