"""Orbax checkpoints: converted ones and a training job's, onto any mesh."""

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jpaged import models
from jpaged.api.errors import CheckpointError, InvalidParameterError
from jpaged.models.loading import orbax_checkpoint
from tests.parallel.eight_devices import call_with_eight_devices
from tests.tiny_models import tiny_model

CASES = ["llama-gqa-d64-tied", "opt-350m-style", "gpt2"]


def test_a_converted_checkpoint_loads_onto_any_mesh_as_the_original_does():
    found = call_with_eight_devices("tests.parallel.orbax_runs:converted", CASES)
    for name in CASES:
        assert found[name].pop("files") == ["config.json", "params", "tokenizer.json"]
        assert found[name] == {"1": True, "2": True, "8": True}, name


def test_quantized_weights_load_onto_a_mesh_as_those_of_safetensors_do():
    """Rounded while they are read, with key-value heads that two shards hold each; in blocks that shards share; and
    experts in 4 bits."""
    layouts = ["fp8", "fp8-blocks", "qwen3-moe/nvfp4"]
    assert call_with_eight_devices("tests.parallel.orbax_runs:quantized", layouts, 4) == []


def test_what_a_training_job_saved_is_served():
    found = call_with_eight_devices("tests.parallel.orbax_runs:trained")
    assert found["state"] == found["pure"] == found["hf"]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[models.Model, Path]:
    model = models.build(models.ModelConfig.from_dict(tiny_model("gpt2").config), "float32")
    orbax_checkpoint.save(model, model.init(1), tmp_path / "model")
    return model, tmp_path / "model"


def test_arrays_are_stored_in_chunks_along_the_axis_that_shards_split(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_checkpoint, "_CHUNK_BYTES", 2**12)
    model = models.build(models.ModelConfig.from_dict(tiny_model("gpt2").config), "float32")
    orbax_checkpoint.save(model, model.init(1), tmp_path)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(tmp_path / "params").item_metadata.tree
    up = tree["layers"]["0"]["mlp"]["up"]
    rows, columns = up.shape
    assert up.storage.chunk_shape[0] == rows
    assert up.storage.chunk_shape[1] * 8 <= columns


def test_a_model_of_another_shape_is_refused_by_name(saved):
    _, directory = saved
    config = json.loads((directory / "config.json").read_text()) | {"n_inner": 100}
    other = models.build(models.ModelConfig.from_dict(config), "float32")
    with pytest.raises(CheckpointError, match=r"mlp\.(up|down)' has shape"):
        models.load(other, directory)


def test_missing_parameters_are_named(saved):
    _, directory = saved
    config = json.loads((directory / "config.json").read_text()) | {"n_layer": 3}
    other = models.build(models.ModelConfig.from_dict(config), "float32")
    with pytest.raises(CheckpointError, match=r"lacks parameter 'layers\.2\."):
        models.load(other, directory)


def test_a_directory_without_an_orbax_checkpoint_is_refused(saved, tmp_path):
    model, _ = saved
    with pytest.raises(CheckpointError, match="holds no Orbax checkpoint"):
        models.load(model, tmp_path, "orbax")


def test_a_checkpoint_is_not_written_over(saved):
    model, directory = saved
    with pytest.raises(InvalidParameterError, match="exists"):
        orbax_checkpoint.save(model, model.init(2), directory)
    again = models.load(model, directory)
    assert all(np.array_equal(a, b) for a, b in zip(again, model.init(1), strict=True))
