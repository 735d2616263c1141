"""Configurations against transformers in float32: some that `tests/drills/model_configs.py` found jpaged to read
otherwise, each with the field that it was, and a few random ones."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from jpaged.api.errors import UnsupportedModelError
from jpaged.models import ModelConfig
from tests.support.config_spaces import SPACES, draw

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from tests.support.against_transformers import compare  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"short_factor": [1.0] * 12, "long_factor": [3.0] * 12, "original_max_position_embeddings": 16}
_READ_AS: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(("n_embd", "d_model"), lambda read: read.hidden_size),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), lambda read: read.num_heads),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), lambda read: read.num_layers),
    "n_positions": lambda read: read.max_position_embeddings,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), lambda read: read.num_experts
    ),
    **dict.fromkeys(("moe_k", "moe_topk"), lambda read: read.routing.per_token),
}
"""What the entries become that have other names, too."""

FOUR_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

OF_LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4", "youtu")

FOUND: dict[str, dict[str, Any]] = {
    "one of YaRN's two weights": {"model_type": "llama", "rope_scaling": YARN | {"mscale_all_dim": 0.5}},
    "Llama 4 Scout's factors of low and high frequencies": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
        | {"original_max_position_embeddings": 16},
    },
    "another name of SiLU": {"model_type": "llama", "hidden_act": "swish"},
    "Mistral's windows by layer types": {
        "model_type": "mistral",
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma 2's exact GELU": {"model_type": "gemma2", "head_dim": 16, "hidden_activation": "gelu"},
    "Gemma 3's soft cap of attention": {"model_type": "gemma3_text", "head_dim": 16, "attn_logit_softcapping": 2.0},
    "OLMo 3's theta of full layers alone": {
        "model_type": "olmo3",
        "rope_theta": 100,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "OLMo 3's theta of layers with windows, left out among those of both kinds": {
        "model_type": "olmo3",
        "rope_theta": 100,
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma 3's theta of layers with windows, left out among those of both kinds": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "rope_local_base_freq": 100.0,
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "SmolLM3's windows by layer types alone": {
        "model_type": "smollm3",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "SmolLM3's switch without a window": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "no_rope_layer_interval": 2,
    },
    "Qwen2-MoE's windows in every second layer": {
        "model_type": "qwen2_moe",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **FOUR_EXPERTS,
    },
    "GLM-4.5's epsilon": {"model_type": "glm4_moe", "head_dim": 16, "n_routed_experts": 4, **FOUR_EXPERTS},
    "GPT-NeoX's own names of what RoPE rotates": {
        "model_type": "gpt_neox",
        "partial_rotary_factor": 0.5,
        "rope_theta": 100,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "a pair for an odd number of rotated columns": {
        "model_type": "glm",
        "head_dim": 20,
        "partial_rotary_factor": 0.25,
        "rope_theta": 100,
    },
    "pairs of a whole head, of which the first ones turn": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
        "rope_theta": 100,
    },
    "GPT-J's bias of a tied head": {
        "model_type": "gptj",
        "rotary_dim": 8,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
    },
    "nanochat's YaRN, whose scale its norms take away": {"model_type": "nanochat", "rope_scaling": YARN},
    "Phi-3's original length": {"model_type": "phi3", "rope_scaling": {"type": "yarn", **LONGROPE}},
}


@pytest.mark.parametrize("name", FOUND)
def test_what_once_differed_is_equal(name: str) -> None:
    config = FOUND[name]
    (architecture,) = (one.architecture for one in SPACES.values() if one.model_type == config["model_type"])
    assert compare(SMALL | config | {"architectures": [architecture]}, seed=1) is None


@pytest.mark.parametrize(
    "family",
    [
        "apertus",
        "codegen",
        "cohere2_moe",
        "deepseek_v3",
        "ernie4_5",
        "gemma3",
        "gemma3n",
        "gpt_neo",
        "granitemoehybrid",
        "mimo_v2_flash",
        "mistral4",
        "dbrx",
        "olmo_hybrid",
        "nemotron",
        "phimoe",
        "qwen3_next",
        "seed_oss",
    ],
)
def test_a_random_configuration_is_equal(family: str) -> None:
    assert compare(draw(SPACES[family], random.Random(5)), seed=5) is None


@pytest.mark.parametrize("family", [name for name in SPACES if name not in OF_LATENTS])
def test_key_value_heads_that_are_left_out_are_as_many_as_in_transformers(family: str) -> None:
    """But for DeepSeek's and their kin, whose latents have none."""
    space = SPACES[family]
    their_class = CONFIG_MAPPING[space.model_type]
    if "num_key_value_heads" not in their_class().to_dict():
        pytest.skip("it has another name for them, or as many as query heads")
    heads = {"num_attention_heads": 480, "head_dim": 8, "hidden_size": 480 * 8}
    config = draw(space, random.Random(1)) | heads
    others = "use_bidirectional_attention", "mamba_d_head"  # refused, and not of these sizes
    for name in ("num_key_value_heads", "rope_scaling", "rope_parameters", *others):
        config.pop(name, None)
    theirs = their_class(**config).num_key_value_heads
    if theirs is None:
        pytest.skip("transformers needs them")
    assert 1 <= theirs <= 480
    assert ModelConfig.from_dict(config).num_kv_heads == theirs


OTHER_NAMES = [
    (family, other, own)
    for family, space in SPACES.items()
    for other, own in CONFIG_MAPPING[space.model_type].attribute_map.items()
    if own in _READ_AS
]


@pytest.mark.parametrize(("family", "other", "own"), OTHER_NAMES)
def test_sizes_by_the_other_names_that_transformers_knows_are_read(family: str, other: str, own: str) -> None:
    space = SPACES[family]
    for number in range(40):  # until one has the entry, and is served
        config = draw(space, random.Random(f"{family} {number}")) | {"use_bidirectional_attention": False}
        if not isinstance(size := config.pop(own, None), int):
            continue
        try:
            found = ModelConfig.from_dict(config | {own: size})
        except UnsupportedModelError:
            continue
        read = ModelConfig.from_dict(config | {other: size})
        assert _READ_AS[own](read) == _READ_AS[own](found) == size
        return
    pytest.skip("none drawn has the entry")
