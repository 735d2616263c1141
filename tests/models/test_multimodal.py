"""The text part of a multimodal checkpoint is loaded as the text model that it is, whatever its tensors are called."""

import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged import models
from jpaged.api.config import EngineArgs
from jpaged.api.errors import CheckpointError, UnsupportedModelError
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.weights import CheckpointReader
from jpaged.models.loading import safetensors_file
from tests.support.config_spaces import SPACES, draw
from tests.tiny_models import tiny_model, write_tiny_model

OF_OTHER_PARTS = ("vision_tower.vision_model.embeddings.weight", "multi_modal_projector.linear.weight")
OF_OTHER_PARTS += ("mm_projector.proj.0.weight",)


def write_multimodal(
    text: Path, directory: Path, architecture: str, prefix: str, others: tuple[str, ...], layers: str = "layers"
) -> None:
    """A checkpoint of which the one in `text` is the text part, whose names begin with `prefix`. layers: what they are
    called."""
    tensors = {name: tensor.read() for name, tensor in safetensors_file.read_header(text / "model.safetensors").items()}
    renamed = {
        f"{prefix}{name.removeprefix('model.')}" if "lm_head" not in name else name: x for name, x in tensors.items()
    }
    renamed = {name.replace(".layers.", f".{layers}."): x for name, x in renamed.items()}
    renamed |= {name: np.zeros((2, 2), np.float32) for name in others}
    layout = {name: tensor.shape for name, tensor in renamed.items()}
    directory.mkdir()
    safetensors_file.write(directory / "model.safetensors", layout, np.dtype(np.float32), iter(renamed.values()))
    config = json.loads((text / "config.json").read_text())
    whole = {"architectures": [architecture], "text_config": config, "eos_token_id": [2, 9]}
    (directory / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mistral-full", "Mistral3ForConditionalGeneration"),
        ("llama4-scout-style", "Llama4ForConditionalGeneration"),
        ("ministral3", "Mistral3ForConditionalGeneration"),
        ("kimi-k2-style", "KimiK25ForConditionalGeneration"),
    ],
)
def test_it_has_the_weights_of_the_text_model(name: str, architecture: str, prefix: str, tmp_path: Path) -> None:
    text, whole = write_tiny_model(tiny_model(name), tmp_path / "text", use_torch=False), tmp_path / "whole"
    write_multimodal(text, whole, architecture, prefix, OF_OTHER_PARTS)
    config = models.ModelConfig.from_directory(whole)
    assert config.architecture == tiny_model(name).config["architectures"][0]
    assert config.eos_token_ids == (2, 9)
    model, alone = models.build(config, "float32"), models.build(models.ModelConfig.from_directory(text), "float32")
    for found, expected in zip(models.load(model, whole), models.load(alone, text), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_layers_of_a_kimi_k25_may_have_the_name_that_transformers_saves_them_by(tmp_path: Path) -> None:
    text, whole = write_tiny_model(tiny_model("kimi-k2-style"), tmp_path / "text", use_torch=False), tmp_path / "whole"
    write_multimodal(text, whole, "Kimi_K25ForConditionalGeneration", "language_model.model.", (), layers="blocks")
    model, alone = (models.build(models.ModelConfig.from_directory(one), "float32") for one in (whole, text))
    for found, expected in zip(models.load(model, whole), models.load(alone, text), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_experts_apart_are_read_though_published_checkpoints_have_them_in_one_tensor(tmp_path: Path) -> None:
    """As transformers saves Qwen3.5-MoE."""
    name, architecture, prefix = "qwen3.5-moe", "Qwen3_5MoeForConditionalGeneration", "model.language_model."
    text, whole = write_tiny_model(tiny_model(name), tmp_path / "text", use_torch=False), tmp_path / "whole"
    write_multimodal(text, whole, architecture, prefix, ("model.visual.patch_embed.proj.weight",))
    model, alone = (models.build(models.ModelConfig.from_directory(one), "float32") for one in (whole, text))
    for found, expected in zip(models.load(model, whole), models.load(alone, text), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_only_what_the_text_model_reads_counts_as_read(tmp_path: Path) -> None:
    text, whole = write_tiny_model(tiny_model("gemma3"), tmp_path / "text", use_torch=False), tmp_path / "whole"
    prefix = "language_model.model."
    write_multimodal(text, whole, "Gemma3ForConditionalGeneration", prefix, OF_OTHER_PARTS)
    mesh = DeviceMesh(jax.devices()[:1])
    sizes = []
    for directory in (text, whole):
        model = models.build(models.ModelConfig.from_directory(directory), "float32")
        reader = CheckpointReader(mesh, model, model, directory, EngineArgs(model=str(directory)))
        reader()
        sizes.append(reader.num_bytes)
    assert sizes[0] == sizes[1] > 0


def test_a_tensor_that_no_part_has_is_refused(tmp_path: Path) -> None:
    text, whole = write_tiny_model(tiny_model("gemma3"), tmp_path / "text", use_torch=False), tmp_path / "whole"
    prefix = "language_model.model."
    write_multimodal(text, whole, "Gemma3ForConditionalGeneration", prefix, ("audio_tower.weight",))
    with pytest.raises(CheckpointError, match=r"audio_tower\.weight"):
        models.load(models.build(models.ModelConfig.from_directory(whole), "float32"), whole)


def test_another_text_model_is_refused_by_name() -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    with pytest.raises(UnsupportedModelError, match="llama"):
        models.ModelConfig.from_dict(config)


def test_a_mistral_3_may_have_the_text_model_of_a_mistral_4() -> None:
    text = draw(SPACES["mistral4"], random.Random(1))
    found = models.ModelConfig.from_dict({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert found.architecture == "Mistral4ForCausalLM"
    assert found == models.ModelConfig.from_dict(text)


@pytest.mark.parametrize("of_whole", [True, False])
def test_whether_the_head_is_tied_is_said_of_the_whole_model_first(of_whole: bool) -> None:
    """As transformers reads it; each of its two defaults would be wrong for one of them."""
    text = tiny_model("mistral-full").config | {"tie_word_embeddings": not of_whole}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert models.ModelConfig.from_dict(config).tie_word_embeddings is not of_whole
    assert models.ModelConfig.from_dict(config | {"tie_word_embeddings": of_whole}).tie_word_embeddings is of_whole


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("gemma3", "gemma3"),
        ("mistral3", "mistral-full"),
        ("qwen3_5_text", "qwen3.5"),
        ("llama4", "llama4-scout-style"),
        ("llama4_text", "llama4-scout-style"),
        ("qwen2_5_vl", "qwen2-tied"),
        ("qwen3_vl", "qwen3-tied-d64"),
        ("kimi_k25", "kimi-k2-style"),
    ],
)
def test_a_model_type_alone_is_enough(model_type: str, name: str) -> None:
    config = {key: value for key, value in tiny_model(name).config.items() if key != "architectures"}
    whole = config if model_type.endswith("_text") else {"text_config": config}
    found = models.ModelConfig.from_dict(whole | {"model_type": model_type})
    assert found.architecture == models.ModelConfig.from_dict(tiny_model(name).config).architecture
