"""DBRX's tensors have the rows of all experts, w2 with inputs first; quantized while they are read, each has scales.
compressed-tensors leaves them as they are: they are no linear layers."""

import json
from pathlib import Path

import numpy as np
import pytest

from jpaged import models
from jpaged.api.errors import UnsupportedModelError
from jpaged.models.loading import checkpoint
from tests.models.quantization.test_checkpoints import dequantized, greedy, load
from tests.support.quantized import PUBLISHED, read_tensors, write_tensors
from tests.tiny_models import tiny_model, write_tiny_model


def loaded(directory: Path, quantization: str | None) -> dict[str, np.ndarray]:
    config = models.ModelConfig.from_directory(directory, quantization=quantization)
    model = models.build(config, "float32")
    return dict(zip(model.parameter_names, map(np.asarray, models.load(model, directory)), strict=True))


@pytest.mark.parametrize("most_bytes", [1 << 28, 25_000, 4096])
@pytest.mark.parametrize(("quantization", "error"), [("fp8", 1 / 16), ("int8", 1 / 127)])
def test_each_output_of_each_expert_has_its_scale(
    quantization: str, error: float, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an expert is larger than what is read at once."""
    write_tiny_model(tiny_model("dbrx-style"), tmp_path, use_torch=False)
    plain = loaded(tmp_path, None)
    monkeypatch.setattr(checkpoint, "MOST_BYTES", most_bytes)
    found = loaded(tmp_path, quantization)
    for name in ("gate_up", "down"):
        name = f"layers.1.mlp.experts.{name}"
        expected = np.moveaxis(plain[name], 1, -1)  # inputs come last
        largest = np.abs(expected).max(axis=-1, keepdims=True)
        scale = found[f"{name}_scale"]
        assert scale.shape == largest.shape
        np.testing.assert_allclose(scale, largest / (448 if quantization == "fp8" else 127), rtol=1e-6)
        assert (np.abs(found[name].astype(np.float32) * scale - expected) <= error * largest).all()


def test_experts_that_compressed_tensors_leaves_are_plain_beside_quantized_attention(tmp_path: Path) -> None:
    """The target "Linear" is Wqkv and out_proj; w1, v1 and w2 are parameters of another module."""
    published = PUBLISHED["fp8-weights"]
    directories = [write_tiny_model(tiny_model("dbrx-style"), tmp_path / name, use_torch=False) for name in "ab"]
    before = read_tensors(directories[0] / "model.safetensors")
    quantized, exact = dict(before), dict(before)
    for name in before:
        if name.endswith(("Wqkv.weight", "out_proj.weight")):
            packed, exact[name] = published.pack(quantized.pop(name))
            quantized |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in packed.items()}
    for directory, tensors in zip(directories, (quantized, exact), strict=True):
        write_tensors(directory / "model.safetensors", tensors)
    config = json.loads((directories[0] / "config.json").read_text())
    entries = published.config | {"ignore": ["lm_head", "re:.*router.*"]}
    (directories[0] / "config.json").write_text(json.dumps(config | {"quantization_config": entries}))
    ours, theirs = map(load, directories)
    assert {name.split(".", 2)[2] for name in ours[0].quantized} == {"attention.qkv", "attention.out"}
    found = dequantized(*ours)
    for name, expected in zip(theirs[0].parameter_names, theirs[1], strict=True):
        np.testing.assert_array_equal(found[name], np.asarray(expected), err_msg=name)
    assert greedy(*ours) == greedy(*theirs)


@pytest.mark.parametrize("left_out", [[], ["w2"]])
def test_experts_in_fp8_blocks_are_refused_by_name(left_out: list[str]) -> None:
    entries = PUBLISHED["fp8-blocks"].config | {"modules_to_not_convert": left_out}
    config = tiny_model("dbrx-style").config | {"quantization_config": entries}
    with pytest.raises(UnsupportedModelError, match=r"mlp\.(w1|w2) has all experts in one tensor, which is not"):
        models.build(models.ModelConfig.from_dict(config), "float32")
