"""`jpaged convert` where it cannot write, or must not."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.api.errors import CheckpointError, OutputError
from jpaged.cli import main
from jpaged.models import ModelConfig, build
from jpaged.models.loading import orbax_checkpoint
from jpaged.models.loading.kv_scales import read_kv_scales
from tests.tiny_models import tiny_model, write_tiny_model


@pytest.fixture
def directory(tmp_path):
    return write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path / "model", use_torch=False)


def test_a_model_is_not_converted_into_its_own_directory(directory, capsys):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert main(["convert", str(directory), str(directory)]) == 2
    assert "config.json exists" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_file_in_the_place_of_the_output_is_refused(directory, capsys):
    assert main(["convert", str(directory), str(directory / "config.json")]) == 2
    assert "is a file; name a directory" in capsys.readouterr().err


def test_what_cannot_be_written_whole_is_removed_and_the_error_says_why(directory, tmp_path, monkeypatch):
    def fill_the_disk(model, weights, target):
        (target / "params.tmp").mkdir()
        (target / "params.tmp" / "part").write_bytes(b"x")
        raise ValueError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(orbax_checkpoint, "_write", fill_the_disk)
    model = build(ModelConfig.from_directory(directory))
    with pytest.raises(OutputError, match="no space left"):
        orbax_checkpoint.save(model, model.init(0), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_scales_of_the_cache_go_along(directory, tmp_path, capsys):
    path, out = directory / "model.safetensors", tmp_path / "out"
    name = "model.layers.{}.self_attn.{}_scale"
    scales = {name.format(i, kind): np.array(0.5 + i, np.float32) for i in range(2) for kind in "kv"}
    save_file(load_file(path) | scales, path)
    assert main(["convert", str(directory), str(out), "-q"]) == 0
    assert read_kv_scales("auto", out, [True, True]) == ((0.5, 0.5), (1.5, 1.5))
    for held, said in (
        ({"keys": [1.0, 1.0], "values": [1.0, 0.0]}, r"values\[1\] is 0, which must be above 0"),
        ({"keys": [1.0], "values": [1.0]}, "scales of 1 and 1 layers, and the model has 2"),
        ({"keys": [1.0, None], "values": [1.0, 1.0]}, "holds no lists of numbers"),
    ):
        (out / "kv_cache_scales.json").write_text(json.dumps(held))
        with pytest.raises(CheckpointError, match=said):
            read_kv_scales("auto", out, [True, True])

    save_file({k: v for k, v in load_file(path).items() if k != name.format(1, "v")}, path)
    assert main(["convert", str(directory), str(tmp_path / "other"), "-q"]) == 0
    assert "scales of keys and values are left out: " in capsys.readouterr().err
    assert read_kv_scales("auto", tmp_path / "other", [True, True]) == ((1.0, 1.0), (1.0, 1.0))
