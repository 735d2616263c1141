"""`jpaged quantize` and `quantize_checkpoint`: what is written is what the formulas give, and is read as such."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.api.errors import CheckpointError, InvalidParameterError, OutputError, UnsupportedModelError
from jpaged.cli import main
from jpaged.cli.quantize import SCHEMES
from jpaged.models import quantize_checkpoint
from jpaged.models.loading import safetensors_file
from jpaged.models.quantization.int4 import Int4
from jpaged.models.quantization.layers import StoredLayer
from jpaged.models.quantization.packed_weights import PackQuantized
from jpaged.models.quantization.recipes import RECIPES
from tests.models.quantization.test_checkpoints import dequantized, load
from tests.models.test_multimodal import OF_OTHER_PARTS, write_multimodal
from tests.support.quantized import E4M3, plain_checkpoint, read_tensors, write_tensors
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

LLAMA, QWEN3 = "llama-biases", "qwen3-layer-types"
SIZES = {
    "fp8": {},
    "fp8-block": {},  # 160 inputs: the last block of some is not whole
    "int8": {},
    "int4": {"hidden_size": 128, "head_dim": 64},
}
GENERATING = ((LLAMA, "fp8"), (QWEN3, "fp8-block"), (LLAMA, "int8"), (QWEN3, "int4"))
"""Once each: one takes seconds to compile."""
BF16 = np.dtype(ml_dtypes.bfloat16)


def dequantized_by_formula(scheme: str, weight: np.ndarray) -> np.ndarray:
    """What the scheme makes of a weight, in float32."""
    wide = weight.astype(np.float32)
    rows, columns = {"fp8-block": (128, 128), "int4": (1, 128)}.get(scheme, (1, wide.shape[1]))
    found = np.empty_like(wide)
    for r in range(0, wide.shape[0], rows):
        for c in range(0, wide.shape[1], columns):
            part = wide[r : r + rows, c : c + columns]
            largest = np.abs(part).max()
            if scheme == "int4":
                scale = (largest / np.float32(7.5)).astype(weight.dtype).astype(np.float32) if largest else 1
                values = np.clip(np.round(part / scale), -8, 7)
            elif scheme == "int8":
                scale = largest / np.float32(127) if largest else np.float32(1)
                values = np.round(part / scale)
            else:
                scale = largest / np.float32(448) if largest else np.float32(1)
                values = np.clip(part / scale, -448, 448).astype(E4M3).astype(np.float32)
            found[r : r + rows, c : c + columns] = values * scale
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_checkpoint(LLAMA, tmp_path_factory.mktemp("plain") / "llama")


def stored_as(directory: Path, target: Path, dtype: Any) -> Path:
    """A checkpoint with its tensors in another type, one output's weights of which are all zero."""
    shutil.copytree(directory, target)
    tensors = {name: array.astype(dtype) for name, array in read_tensors(directory / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.q_proj.weight"][3] = 0
    write_tensors(target / "model.safetensors", tensors)
    return target


@pytest.mark.parametrize(
    ("name", "scheme", "dtype"),
    [
        (LLAMA, "fp8", BF16),
        (QWEN3, "fp8", np.float32),
        (LLAMA, "fp8-block", np.float32),
        (QWEN3, "fp8-block", BF16),
        (QWEN3, "int8", np.float16),
        (LLAMA, "int4", np.float16),
        (QWEN3, "int4", BF16),
    ],
)
def test_a_quantized_checkpoint_is_read_as_the_formula_has_it_and_generates(
    name: str, scheme: str, dtype: Any, tmp_path: Path
) -> None:
    first = plain_checkpoint(name, tmp_path / "plain", **SIZES[scheme])
    source = stored_as(first, tmp_path / "source", dtype)
    out = tmp_path / "out"
    (source / "tokenizer_config.json").write_text("{}")
    quantize_checkpoint(source, out, scheme, shard_bytes=100_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert (out / "tokenizer_config.json").read_text() == "{}"

    expected = tmp_path / "expected"
    expected.mkdir()
    shutil.copy(source / "config.json", expected)
    tensors = {}
    for tensor, array in read_tensors(source / "model.safetensors").items():
        quantized = "_proj" in tensor and tensor.endswith(".weight")
        tensors[tensor] = dequantized_by_formula(scheme, array) if quantized else array.astype(np.float32)
    write_tensors(expected / "model.safetensors", tensors)
    ours, theirs = dequantized(*load(out)), dequantized(*load(expected))
    assert ours.keys() == theirs.keys()
    for parameter, array in theirs.items():
        np.testing.assert_array_equal(ours[parameter], array, err_msg=parameter)

    if (name, scheme) in GENERATING:
        with LLM(model=out, **TINY_ENGINE) as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            output = llm.generate([[3, 1, 4, 1, 5, 9, 2, 6]], params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 8
        assert all(0 <= token < VOCAB_SIZE for token in output.token_ids)


@pytest.mark.parametrize(("name", "scheme"), [("bamba", "fp8-block"), ("qwen3.5", "int4")])
def test_recurrent_layers_are_quantized_too(name: str, scheme: str, tmp_path: Path) -> None:
    source = plain_checkpoint(name, tmp_path / "source", **SIZES[scheme])
    quantize_checkpoint(source, tmp_path / "out", scheme)
    tensors = read_tensors(source / "model.safetensors")
    kept = ("in_proj_a.weight", "in_proj_b.weight")
    layers = {one for one in tensors if "_proj" in one and one.endswith(".weight") and not one.endswith(kept)}
    (tmp_path / "expected").mkdir()
    shutil.copy(source / "config.json", tmp_path / "expected")
    made = {one: dequantized_by_formula(scheme, x) if one in layers else x for one, x in tensors.items()}
    write_tensors(tmp_path / "expected" / "model.safetensors", made)
    ours, theirs = dequantized(*load(tmp_path / "out")), dequantized(*load(tmp_path / "expected"))
    assert ours.keys() == theirs.keys()
    for parameter, array in theirs.items():
        np.testing.assert_array_equal(ours[parameter], array, err_msg=parameter)


def test_what_stays_as_it_is_keeps_its_bytes_and_type_and_all_tensors_are_aligned(plain: Path, tmp_path: Path) -> None:
    source = stored_as(plain, tmp_path / "source", BF16)
    quantize_checkpoint(source, tmp_path / "out", "fp8")
    before, after = (read_tensors(path / "model.safetensors") for path in (source, tmp_path / "out"))
    kept = {name for name in before if "_proj" not in name or name.endswith(".bias")}
    assert kept == {name for name in after if not name.endswith("_scale") and after[name].dtype != E4M3}
    assert all(after[name].tobytes() == before[name].tobytes() and after[name].dtype == BF16 for name in kept)
    header = safetensors_file.read_header(tmp_path / "out" / "model.safetensors")
    assert all(tensor.offset % tensor.dtype.itemsize == 0 for tensor in header.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entry = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert (entry["quant_method"], entry["ignore"]) == ("compressed-tensors", ["lm_head"])


def test_of_a_multimodal_checkpoint_the_text_part_is_quantized_and_the_rest_is_left_and_ignored(tmp_path: Path) -> None:
    text = write_tiny_model(tiny_model("gemma3"), tmp_path / "text", use_torch=False)
    prefix = "language_model.model."
    write_multimodal(text, tmp_path / "whole", "Gemma3ForConditionalGeneration", prefix, OF_OTHER_PARTS)
    quantize_checkpoint(text, tmp_path / "a", "fp8")
    quantize_checkpoint(tmp_path / "whole", tmp_path / "b", "fp8")
    for found, expected in zip(load(tmp_path / "b")[1], load(tmp_path / "a")[1], strict=True):
        np.testing.assert_array_equal(found, expected)
    written = read_tensors(tmp_path / "b" / "model.safetensors")
    assert all(written[name].dtype == np.float32 for name in OF_OTHER_PARTS)
    ignored = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "multi_modal_projector.linear"} <= set(ignored)
    assert not any("layers" in name for name in ignored)


def test_experts_are_written_as_they_are_quantized_online_and_routers_stay(tmp_path: Path) -> None:
    source = write_tiny_model(tiny_model("mixtral"), tmp_path / "source", use_torch=False)
    quantize_checkpoint(source, tmp_path / "out", "fp8")
    (model, found), (_, online) = load(tmp_path / "out"), load(source, "fp8")
    assert any(".experts." in name for name in model.quantized)
    for name, ours, expected in zip(model.parameter_names, found, online, strict=True):
        ours, expected = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
        # Scales are divided on another device: the last digit may differ, and then a value that lies between two.
        np.testing.assert_allclose(ours, expected, rtol=1 / 7 if name in model.quantized else 1e-6, err_msg=name)
        assert np.mean(ours == expected) > 0.99 or name.endswith("_scale")


def test_the_command_writes_what_the_function_does_and_refuses_to_write_there_again(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuple(RECIPES) == SCHEMES
    quantize_checkpoint(plain, tmp_path / "a", "fp8-block")
    assert main(["quantize", str(plain), str(tmp_path / "b"), "--scheme", "fp8-block"]) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert main(["quantize", str(plain), str(tmp_path / "b"), "--scheme", "fp8"]) == 2
    assert "is not empty; choose another directory" in capsys.readouterr().err
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert main(["quantize", str(plain), str(plain / "config.json"), "--scheme", "fp8"]) == 2
    assert "is a file; name a directory" in capsys.readouterr().err


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_models_and_schemes_that_cannot_be_quantized_are_named(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path / "done", "fp8")
    refused = [
        (tmp_path / "done", "fp8", "quantized already"),
        (plain, "int4", "layers.0.*160 inputs.*multiples of 128 inputs; choose group_size=32, or 'fp8'"),
        (write_tiny_model(tiny_model("gpt2"), tmp_path / "gpt2", use_torch=False), "fp8", "stored transposed"),
        (
            write_tiny_model(tiny_model("gpt-oss-20b-style"), tmp_path / "moe", use_torch=False),
            "fp8",
            "all experts of a layer in one tensor",
        ),
    ]
    for source, scheme, words in refused:
        with pytest.raises(UnsupportedModelError, match=words):
            quantize_checkpoint(source, tmp_path / "out", scheme)
    with pytest.raises(InvalidParameterError, match="scheme must be one of fp8, fp8-block, int8, int4, got 'int3'"):
        quantize_checkpoint(plain, tmp_path / "out", "int3")
    with pytest.raises(InvalidParameterError, match="shard_bytes must be at least 1"):
        quantize_checkpoint(plain, tmp_path / "out", "fp8", shard_bytes=0)
    assert not (tmp_path / "out").exists()


def test_a_smaller_group_is_offered_where_it_would_do() -> None:
    recipe = RECIPES["int4"]
    assert recipe.misfit(StoredLayer("a", 64, 256)) == RECIPES["fp8"].misfit(StoredLayer("a", 4, 33)) == ""
    needed = "multiples of 128 inputs; choose "
    assert recipe.misfit(StoredLayer("a", 64, 192)) == needed + "group_size=32 or 64, or 'fp8'"
    assert recipe.misfit(StoredLayer("a", 64, 144)) == needed + "scheme 'fp8'"


def test_any_number_of_outputs_is_packed_and_read_again() -> None:
    recipe, layer = RECIPES["int4"].in_groups(64), StoredLayer("a", 5, 192)
    weight = np.random.default_rng(0).standard_normal((5, 192)).astype(np.float32)
    assert recipe.misfit(layer) == ""
    scheme = PackQuantized(name="int4", kind=Int4(64))
    found = scheme.arrays(layer, recipe.tensors(weight))
    steps = np.repeat(np.asarray(found["_scale"], np.float32), 64, axis=1)
    assert np.all(np.abs(np.asarray(scheme.dequantized(found, np.dtype(np.float32))) - weight) <= 0.51 * steps)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_left(scheme: str, plain: Path, tmp_path: Path) -> None:
    source = shutil.copytree(plain, tmp_path / "source")
    tensors = read_tensors(plain / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = np.nan
    write_tensors(source / "model.safetensors", tensors)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight' has NaN or infinity"):
        quantize_checkpoint(source, tmp_path / "out", scheme, shard_bytes=50_000)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, *_: Any) -> None:
        path.write_bytes(b"x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_file, "write_mixed", fill)
    with pytest.raises(OutputError, match=r"No space left on device.*make room"):
        quantize_checkpoint(plain, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
