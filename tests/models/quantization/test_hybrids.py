"""Quantized models with gated delta nets: their checkpoints are read to the bit, and what decays states stays exact."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import models
from jpaged.api.errors import CheckpointError
from jpaged.models import quantize_checkpoint
from jpaged.models.loading import calibration
from jpaged.models.loading.kv_calibration import largest_of
from jpaged.models.loading.kv_scales import read_kv_scales
from tests.models.quantization.test_checkpoints import dequantized, greedy, load
from tests.models.quantization.test_quantize_checkpoint import dequantized_by_formula
from tests.support.quantized import (
    PUBLISHED,
    dequantized_checkpoint,
    plain_checkpoint,
    quantized_checkpoint,
    read_tensors,
    write_tensors,
)
from tests.tiny_models import VOCAB_SIZE

NEXT, QWEN35, MOE = "qwen3-next", "qwen3.5", "qwen3.5-moe"
SIZES = {
    NEXT: {"num_hidden_layers": 2, "full_attention_interval": 2, "moe_intermediate_size": 64, "num_experts": 8},
    QWEN35: {"hidden_size": 128, "intermediate_size": 128},
    MOE: {"moe_intermediate_size": 64, "num_experts": 8},
}
SIZES = {name: sizes | {"shared_expert_intermediate_size": 64} for name, sizes in SIZES.items()}
LEFT = ("in_proj_ba", "in_proj_b", "in_proj_a")
"""What published checkpoints in FP8 leave as it is."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("plain")
    return {name: plain_checkpoint(name, directory / name, **sizes) for name, sizes in SIZES.items()}


def with_left(directory: Path, plain: Path) -> Path:
    """The same checkpoint, of which these layers are as they were."""
    tensors = read_tensors(directory / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if name.rsplit(".", 2)[-2] not in LEFT}
    before = read_tensors(plain / "model.safetensors")
    kept |= {name: one for name, one in before.items() if name.rsplit(".", 2)[-2] in LEFT}
    write_tensors(directory / "model.safetensors", kept)
    return directory


@pytest.mark.parametrize(("layout", "name"), [("fp8-blocks", NEXT), ("nvfp4", QWEN35)])
def test_weights_and_greedy_tokens_are_those_of_the_published_layout(
    layout: str, name: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    ignored = {} if layout != "fp8-blocks" else {"modules_to_not_convert": ["lm_head", "in_proj_ba"]}
    source = quantized_checkpoint(plain[name], tmp_path / "quantized", layout, **ignored)
    exact = dequantized_checkpoint(plain[name], tmp_path / "dequantized", layout)
    if ignored:
        source, exact = with_left(source, plain[name]), with_left(exact, plain[name])
    ours, theirs = load(source), load(exact)
    found = dequantized(*ours)
    assert set(found) == set(theirs[0].parameter_names)
    for parameter, expected in zip(theirs[0].parameter_names, theirs[1], strict=True):
        np.testing.assert_array_equal(found[parameter], np.asarray(expected), err_msg=parameter)
    assert {"layers.0.attention.qkvz", "layers.0.attention.out", "layers.1.attention.gate"} <= set(ours[0].quantized)
    assert ("layers.0.attention.ba" in ours[0].quantized) == (not ignored)
    if layout == "fp8-blocks":
        tokens = greedy(*ours)
        assert tokens == greedy(*theirs)
        assert len(set(tokens)) > 8, "a text that wanders"


def test_of_a_multimodal_checkpoint_in_fp8_each_expert_has_its_tensors_and_ignored_layers_are_named_in_full(
    plain: dict[str, Path], tmp_path: Path
) -> None:
    """As of Qwen3.5-35B-A3B-FP8; published ones in bfloat16 have one tensor for all experts."""
    source = with_left(quantized_checkpoint(plain[MOE], tmp_path / "quantized", "fp8-blocks"), plain[MOE])
    config = json.loads((source / "config.json").read_text())
    layers = [f"model.language_model.layers.0.linear_attn.in_proj_{name}" for name in "ba"]
    quantization = config.pop("quantization_config") | {"modules_to_not_convert": ["lm_head", *layers, "model.visual"]}
    shutil.copytree(source, tmp_path / "whole")
    renamed = {}
    for name, tensor in read_tensors(source / "model.safetensors").items():
        renamed[name.replace("model.", "model.language_model.", 1) if "lm_head" not in name else name] = tensor
    write_tensors(tmp_path / "whole" / "model.safetensors", renamed)
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole | {"quantization_config": quantization}))
    text = config | {"quantization_config": quantization | {"modules_to_not_convert": ["in_proj_b", "in_proj_a"]}}
    (source / "config.json").write_text(json.dumps(text))
    ours, theirs = load(tmp_path / "whole"), load(source)
    assert ours[0].parameter_names == theirs[0].parameter_names
    assert "layers.0.attention.ba" not in ours[0].quantized
    assert "layers.0.mlp.experts.gate_up" in ours[0].quantized
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_fp8_blocks_of_all_experts_in_one_tensor_are_read_as_transformers_saves_them(
    plain: dict[str, Path], tmp_path: Path
) -> None:
    """gate_up_proj and down_proj, each with "_scale_inv". A block has rows of gate and of up."""
    source = with_left(quantized_checkpoint(plain[MOE], tmp_path / "source", "fp8-blocks"), plain[MOE])
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "in_proj_b", "in_proj_a"]
    (source / "config.json").write_text(json.dumps(config))
    exact = with_left(dequantized_checkpoint(plain[MOE], tmp_path / "exact", "fp8-blocks"), plain[MOE])
    before, pack = read_tensors(plain[MOE] / "model.safetensors"), PUBLISHED["fp8-blocks"].pack
    fused, whole = (read_tensors(path / "model.safetensors") for path in (source, exact))
    fused = {name: one for name, one in fused.items() if ".experts." not in name}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        parts: dict[str, list[np.ndarray]] = {}
        for expert in range(8):
            gate, up, down = (before[f"{experts}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            for name, weight in (("gate_up_proj", np.concatenate([gate, up])), ("down_proj", down)):
                tensors, stands_for = pack(weight)
                parts.setdefault(name, []).append(tensors["weight"])
                parts.setdefault(f"{name}_scale_inv", []).append(tensors["weight_scale_inv"])
                names = ("gate", "up") if "up" in name else ("down",)
                each = dict(zip(names, np.split(stands_for, len(names)), strict=True))
                whole |= {f"{experts}.{expert}.{one}_proj.weight": array for one, array in each.items()}
        fused |= {f"{experts}.{name}": np.stack(arrays) for name, arrays in parts.items()}
    write_tensors(source / "model.safetensors", fused)
    write_tensors(exact / "model.safetensors", whole)
    ours, theirs = load(source), load(exact)
    found = dequantized(*ours)
    for parameter, expected in zip(theirs[0].parameter_names, theirs[1], strict=True):
        np.testing.assert_array_equal(found[parameter], np.asarray(expected), err_msg=parameter)
    assert {"layers.0.mlp.experts.gate_up", "layers.1.mlp.experts.down"} <= set(ours[0].quantized)

    name = "model.layers.1.mlp.experts.down_proj_scale_inv"
    for value, said in ((-1, f"'{name}' has a scale of -1, which must be above 0"), (None, f"lacks tensor '{name}'")):
        bad = {} if value is None else {name: np.full_like(fused[name], value)}
        write_tensors(source / "model.safetensors", {key: one for key, one in fused.items() if key != name} | bad)
        with pytest.raises(CheckpointError, match=said):
            load(source)
    broken = fused["model.layers.0.mlp.experts.gate_up_proj"].copy()
    broken.view(np.uint8)[3, 5, 7] = 0xFF
    write_tensors(source / "model.safetensors", fused | {"model.layers.0.mlp.experts.gate_up_proj": broken})
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.experts.gate_up_proj' has NaN"):
        load(source)


def test_online_what_decays_states_and_writes_to_them_is_not_rounded(plain: dict[str, Path]) -> None:
    model, weights = load(plain[QWEN35], "fp8")
    plain_model, plain_weights = load(plain[QWEN35])
    found, before = dequantized(model, weights), dict(zip(plain_model.parameter_names, plain_weights, strict=True))
    assert {"layers.0.attention.qkvz", "layers.0.attention.out"} <= set(model.quantized)
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, VOCAB_SIZE, 40), jnp.int32)
    largest = np.asarray(jax.jit(partial(largest_of, model))(weights, tokens))
    assert not largest[0].any(), "its keys are not kept"
    assert largest[1].all()
    for name, expected in before.items():
        if name in model.quantized:
            of_output = np.abs(expected).max(axis=0)
            np.testing.assert_allclose(found[name], expected, rtol=1 / 15, atol=of_output.max() / 400)
            assert np.any(found[name] != expected)
        else:
            np.testing.assert_array_equal(found[name], expected)
    assert "layers.0.attention.ba" in before.keys() - set(model.quantized)


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_checkpoint_that_is_written_here_is_read_as_the_formula_has_it(
    calibrated: bool, plain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With calibration in 4 bits, by GPTQ, and with scales of keys and values of the layers that have some."""
    monkeypatch.setattr(calibration, "ROW_TOKENS", 64)
    texts = [np.random.default_rng(1).integers(3, VOCAB_SIZE, length).tolist() for length in (40, 24, 60)]
    options: dict[str, Any] = {"calibration": texts, "kv_cache": "fp8", "group_size": 32} if calibrated else {}
    quantize_checkpoint(plain[QWEN35], tmp_path / "out", "int4" if calibrated else "fp8-block", **options)
    ours = load(tmp_path / "out")
    assert "layers.0.attention.ba" not in ours[0].quantized
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {f"model.layers.0.linear_attn.in_proj_{name}" for name in "ba"} <= set(config["ignore"])
    before = read_tensors(plain[QWEN35] / "model.safetensors")
    if calibrated:
        scales = read_kv_scales("auto", tmp_path / "out", [False, True])
        assert scales[0] == (1, 1)
        assert 1e-4 < min(scales[1]) < max(scales[1]) < 1
        model, weights = load(plain[QWEN35])
        tokens = jnp.asarray(texts[2], jnp.int32)
        hidden = [
            np.asarray(jax.jit(partial(one.forward, attend=models.dense_causal_attend))(held, tokens, jnp.arange(60)))
            for one, held in (ours, (model, weights))
        ]
        error = np.linalg.norm(hidden[0] - hidden[1]) / np.linalg.norm(hidden[1])
        assert 0 < error < 0.3
        return
    expected = tmp_path / "expected"
    expected.mkdir()
    shutil.copy(plain[QWEN35] / "config.json", expected)
    quantized = {
        name: dequantized_by_formula("fp8-block", one)
        for name, one in before.items()
        if "_proj" in name and name.rsplit(".", 2)[-2] not in LEFT
    }
    write_tensors(expected / "model.safetensors", before | quantized)
    theirs = dequantized(*load(expected))
    for parameter, array in dequantized(*ours).items():
        np.testing.assert_array_equal(array, theirs[parameter], err_msg=parameter)
