"""OLMo Hybrid's checkpoints as published, and as transformers 5 saves them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import models
from tests.tiny_models import TinyModel, tiny_model, torch_model, write_tiny_model

OTHERS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}

SIZES = [
    (12, 12, 8, 16),  # 384 channels, in thirds that end between heads
    (4, 4, 12, 24),  # 192: thirds end within heads
    (4, 4, 16, 32),  # 256: 86, 86 and 84
    (2, 6, 10, 7),  # 82: 28, 28 and 26, and values share key heads
    (1, 1, 24, 4),  # 52: 18, 18 and 16, and no chunk has a whole key
    (3, 3, 2, 30),  # 102: 34 each, and one head's values in two chunks
]
"""Key heads, value heads, and their sizes."""


def published(sizes: tuple[int, int, int, int]) -> TinyModel:
    """A case with tensors of the convolution for queries, for keys and for values."""
    case = tiny_model("olmo-hybrid-7b-style")
    entries = {name: value for name, value in case.config.items() if name != "stored_convolution_shape"}
    names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    return TinyModel(case.name, case.family, entries | dict(zip(names, sizes, strict=True)))


def rewritten(directory: Path, target: Path) -> Path:
    """The checkpoint as transformers saves it: other names of norms, and three chunks of a convolution."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for first in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{one}_conv1d") for one in "qkv"]
        joined = np.concatenate([tensors[name] for name in names])
        chunk = -(-len(joined) // 3)
        chunks = np.split(joined, [chunk, 2 * chunk])
        tensors |= {name: np.ascontiguousarray(one) for name, one in zip(names, chunks, strict=True)}
    for theirs, other in OTHERS.items():
        tensors = {name.replace(theirs, other): tensor for name, tensor in tensors.items()}
    save_file(tensors | {"mtp.layers.0.norm.weight": np.ones(3, np.float32)}, target / file.name)  # which is ignored
    return target


def built(directory: Path) -> models.Model:
    return models.build(models.ModelConfig.from_directory(directory), "float32")


@pytest.mark.parametrize("sizes", SIZES)
def test_both_spellings_load_the_same_weights_and_are_saved_as_they_were(
    sizes: tuple[int, int, int, int], tmp_path: Path
) -> None:
    write_tiny_model(published(sizes), tmp_path / "published", use_torch=False)
    saved = rewritten(tmp_path / "published", tmp_path / "saved")
    model, other = built(tmp_path / "published"), built(saved)
    expected, found = models.load(model, tmp_path / "published"), models.load(other, saved)
    assert all(map(np.array_equal, found, expected))

    models.save_pretrained(other, found, tmp_path / "again")
    (again,), (file,) = (path.glob("*.safetensors") for path in (tmp_path / "again", saved))
    stored, convolved = load_file(again), {name: x for name, x in load_file(file).items() if "conv1d" in name}
    assert convolved
    assert all(np.array_equal(stored[name], tensor) for name, tensor in convolved.items())


@pytest.mark.transformers
@pytest.mark.parametrize("sizes", SIZES[1:])
def test_what_transformers_saves_gives_its_logits(sizes: tuple[int, int, int, int], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    case = published(sizes)
    write_tiny_model(case, tmp_path)
    tokens = np.random.default_rng(0).integers(3, case.config["vocab_size"], 40)
    with torch.no_grad():
        expected = torch_model(case)(torch.tensor(tokens[None])).logits[0].numpy()
    model = built(tmp_path)
    assert model.config.convolved[0] == -(-sum(model.config.convolved) // 3)
    weights = models.load(model, tmp_path)
    hidden = model.forward(weights, tokens, np.arange(len(tokens)), models.dense_causal_attend)
    np.testing.assert_allclose(model.logits(weights, hidden), expected, atol=5e-4 * expected.std())
