"""`jpaged convert` where it cannot write, or must not."""

import pytest

from jpaged.api.errors import OutputError
from jpaged.cli import main
from jpaged.models import ModelConfig, build
from jpaged.models.loading import orbax_checkpoint
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
