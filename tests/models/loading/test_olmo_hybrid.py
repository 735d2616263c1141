"""OLMo Hybrid's checkpoints as published, and as transformers 5 saves them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import models
from jpaged.api.errors import CheckpointError
from tests.tiny_models import TinyModel, tiny_model, write_tiny_model

OTHERS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


def published(**changes: int) -> TinyModel:
    """A case with tensors of the convolution for queries, for keys and for values."""
    case = tiny_model("olmo-hybrid-7b-style")
    entries = {name: value for name, value in case.config.items() if name != "stored_convolution_shape"}
    return TinyModel(case.name, case.family, entries | changes)


def rewritten(directory: Path, target: Path) -> Path:
    """The checkpoint as transformers saves it: other names of norms, and equal thirds of a convolution."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for first in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{one}_conv1d") for one in "qkv"]
        thirds = np.split(np.concatenate([tensors[name] for name in names]), 3)
        tensors |= {name: np.ascontiguousarray(third) for name, third in zip(names, thirds, strict=True)}
    for theirs, other in OTHERS.items():
        tensors = {name.replace(theirs, other): tensor for name, tensor in tensors.items()}
    save_file(tensors, target / file.name)
    return target


def loaded(directory: Path) -> dict[str, np.ndarray]:
    model = models.build(models.ModelConfig.from_directory(directory), "float32")
    return dict(zip(model.parameter_names, map(np.asarray, models.load(model, directory)), strict=True))


def test_both_spellings_load_the_same_weights(tmp_path: Path) -> None:
    write_tiny_model(published(), tmp_path / "published", use_torch=False)
    expected = loaded(tmp_path / "published")
    found = loaded(rewritten(tmp_path / "published", tmp_path / "saved"))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_thirds_that_end_within_a_head_are_refused(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 12, "linear_value_head_dim": 10}  # 408 channels
    write_tiny_model(published(**sizes), tmp_path / "published", use_torch=False)
    saved = rewritten(tmp_path / "published", tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"_conv1d.* has shape \(136, 1, 4\)"):
        loaded(saved)
