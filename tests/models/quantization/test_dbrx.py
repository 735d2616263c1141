"""DBRX's tensors have the rows of all experts, w2 with inputs first; quantized while they are read, each has scales."""

from pathlib import Path

import numpy as np
import pytest

from jpaged import models
from jpaged.models.loading import checkpoint
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
