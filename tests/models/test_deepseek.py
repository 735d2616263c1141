"""What is read of DeepSeek's configurations and checkpoints; `tests/test_families.py` compares tokens."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import LLM, models
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from jpaged.bench.models import CONFIGS
from jpaged.executor.cache.spec import cache_spec, kernel_block_bytes
from jpaged.models import ModelConfig, Routing
from jpaged.models.experts import route
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

V2_LITE = CONFIGS["deepseek-v2-lite"]
V2 = V2_LITE | {
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
}
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
}


def parameters_with(config: dict[str, Any], num_layers: int) -> int:
    return models.build(ModelConfig.from_dict(config | {"num_hidden_layers": num_layers})).num_parameters


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(V2_LITE, 15_706_484_224), (V2, 235_741_434_880), (V3, 671_026_419_200)],
    ids=["v2-lite", "v2", "v3"],
)
def test_published_models_have_their_number_of_parameters(config: dict[str, Any], parameters: int) -> None:
    """Counted from few layers, since those with experts are alike."""
    dense = config["first_k_dense_replace"]
    without, sparse = parameters_with(config, dense), parameters_with(config, dense + 1)
    assert without + (config["num_hidden_layers"] - dense) * (sparse - without) == parameters


def test_a_token_keeps_576_numbers_in_a_layer_whatever_the_heads() -> None:
    for config in (V2_LITE, V3):
        spec = cache_spec(models.build(ModelConfig.from_dict(config | {"num_hidden_layers": 1})))
        assert {kernel_block_bytes(layer, 16) for layer in spec} == {16 * 576 * 2}


def test_shards_split_heads_and_keep_all_latents() -> None:
    shard = ModelConfig.from_dict(V3).shard(8)
    assert (shard.num_heads, shard.num_kv_heads, shard.head_dim, shard.value_dim) == (16, 1, 576, 512)


def test_the_temperature_of_yarn_multiplies_scores_and_not_the_rotation() -> None:
    config = ModelConfig.from_dict(V3)
    assert config.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.ropes[0].attention_scale == 1.0
    assert ModelConfig.from_dict(V3 | {"rope_scaling": None}).scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("config", "entry", "value"),
    [
        (V2, "topk_method", "noaux_tc"),
        (V2, "norm_topk_prob", True),
        (V2, "scoring_func", "sigmoid"),
        (V3, "topk_method", "greedy"),
        (V3, "scoring_func", "softmax"),
        (V3, "moe_layer_freq", 2),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], entry: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{entry}=.* is not supported"):
        ModelConfig.from_dict(config | {entry: value})


def test_a_temperature_that_is_no_number_is_named() -> None:
    with pytest.raises(CheckpointError, match="mscale_all_dim"):
        ModelConfig.from_dict(V3 | {"rope_scaling": V3["rope_scaling"] | {"mscale_all_dim": "1"}})


def test_a_group_of_v2_is_as_good_as_its_best_expert_and_one_of_v3_as_its_two_best() -> None:
    logits = np.log(np.array([[0.4, 0.01, 0.3, 0.29]], np.float32))
    for group_best, expected in ((1, [0, 1]), (2, [2, 3])):
        routing = Routing(per_token=2, renormalized=False, groups=2, kept_groups=1, group_best=group_best)
        experts, _ = route(logits, routing)
        assert experts[0].tolist() == expected


def test_layers_behind_the_last_one_are_passed_over_and_no_others(tmp_path: Path) -> None:
    directory = write_tiny_model(tiny_model("deepseek-v3"), tmp_path / "model", use_torch=False)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    model = models.build(ModelConfig.from_directory(directory), "float32")
    weights = models.load(model, directory)
    extra = tensors["model.layers.1.self_attn.o_proj.weight"]
    names = ("model.layers.2.self_attn.o_proj.weight", "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight")
    save_file(tensors | dict.fromkeys(names, extra), file)
    for one, other in zip(weights, models.load(model, directory), strict=True):
        np.testing.assert_array_equal(one, other)
    save_file(tensors | {"model.layers.20.enorm.weight": extra}, file)
    with pytest.raises(CheckpointError, match=r"layers\.20\.enorm"):
        models.load(model, directory)


@pytest.mark.parametrize(
    ("option", "value"), [("kv_cache_layout", "virtual"), ("batch_invariant", True), ("kv_cache_dtype", "fp8")]
)
def test_what_latents_do_without_is_refused_by_name(tmp_path: Path, option: str, value: Any) -> None:
    directory = write_tiny_model(tiny_model("moonlight-style"), tmp_path, use_torch=False)
    with pytest.raises(InvalidParameterError, match=f"{option}={value!r} is not supported for Deepseek"):
        LLM(**TINY_ENGINE | {"model": str(directory), option: value})
