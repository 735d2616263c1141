"""GPTQ against a plain loop over columns, against rounding, and in checkpoints that `quantize_checkpoint` writes."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import models
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from jpaged.assets import demo_model_path
from jpaged.cli import main
from jpaged.cli.calibration import read_texts
from jpaged.models import quantize_checkpoint
from jpaged.models.loading import calibration, checkpoint
from jpaged.models.loading.kv_scales import read_kv_scales
from jpaged.models.quantization.gptq import gptq
from jpaged.models.quantization.recipes import RECIPES
from jpaged.pallas_kernels import split_qkv
from jpaged.text.tokenizer import Tokenizer
from tests.models.quantization.test_checkpoints import dequantized, load
from tests.support.quantized import plain_checkpoint, read_tensors, write_tensors
from tests.tiny_models import VOCAB_SIZE

GROUP = 32
QUESTION, STORY = "Tell me a story about a fox.", "Once upon a time there was a fox who had a lantern."


def correlated(rng: np.random.Generator, rows: int, inputs: int) -> np.ndarray:
    """Inputs of a layer, of which a few directions have most: float32 [rows, inputs]."""
    mixing = rng.standard_normal((inputs // 4, inputs))
    return (rng.standard_normal((rows, inputs // 4)) @ mixing + 0.3 * rng.standard_normal((rows, inputs))).astype("f4")


def plain_gptq(weight: np.ndarray, hessian: np.ndarray, scales: np.ndarray, damping: float) -> np.ndarray:
    """The paper's algorithm 1 in float64, one column at a time, the largest of the hessian's diagonal first, each
    updating all that follow."""
    order = np.argsort(-np.diag(hessian), kind="stable")
    weight, hessian = weight.astype(np.float64)[:, order], hessian.astype(np.float64)[order][:, order]
    scale = np.repeat(scales.astype(np.float64), GROUP, axis=1)[:, order]
    hessian = hessian + damping * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T
    values = np.zeros(weight.shape)
    for j, column in enumerate(order):
        value = np.clip(np.rint(weight[:, j] / scale[:, j]), -8, 7)
        error = (weight[:, j] - value * scale[:, j]) / factor[j, j]
        weight[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
        values[:, column] = value
    return values


def whole(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float64) * np.repeat(np.asarray(scales, np.float64), GROUP, axis=1)


def test_columns_are_rounded_as_the_paper_says_and_the_layer_errs_less_than_by_rounding() -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((48, 128)).astype(np.float32), correlated(rng, 400, 128)
    hessian = x.T @ x
    values, scales = gptq(jnp.asarray(weight), jnp.asarray(hessian), group=GROUP, scale_dtype=jnp.float32, damping=0.01)
    right = plain_gptq(weight, hessian, np.asarray(scales), 0.01)
    assert np.mean(np.asarray(values) == right) > 0.97  # one that lies between two changes those behind it
    part = np.asarray(scales) / np.abs(weight.reshape(48, -1, GROUP)).max(axis=2) * 7.5
    assert 0.5 < part.min() < 0.95
    assert part.max() <= 1 + 1e-6

    packed = RECIPES["int4"].in_groups(GROUP).tensors(weight)
    bits = (packed["weight_packed"].view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    nearest = whole(bits.reshape(weight.shape).astype(np.int8) - 8, packed["weight_scale"])
    ours, theirs = (np.linalg.norm(x @ (found - weight).T) for found in (whole(values, scales), nearest))
    assert ours < 0.5 * theirs
    np.testing.assert_allclose(ours, np.linalg.norm(x @ (whole(right, scales) - weight).T), rtol=0.05)


def test_inputs_that_are_never_there_cost_nothing_and_too_little_damping_is_raised() -> None:
    rng = np.random.default_rng(1)
    weight, x = rng.standard_normal((8, 64)).astype(np.float32), correlated(rng, 20, 64)  # fewer rows than inputs
    x[:, [3, 40]] = 0
    options = {"group": GROUP, "scale_dtype": jnp.bfloat16, "damping": 1e-9}
    values, scales = gptq(jnp.asarray(weight), jnp.asarray(x.T @ x), **options)
    assert scales.dtype == jnp.bfloat16
    assert not np.asarray(values)[:, [3, 40]].any()
    assert np.abs(np.asarray(values)).max() <= 8
    with pytest.raises(ValueError, match="has NaN or infinity"):
        gptq(jnp.full((8, 64), jnp.inf), jnp.eye(64), **options)
    with pytest.raises(ValueError, match="calibration inputs with NaN"):
        gptq(jnp.asarray(weight), jnp.full((64, 64), jnp.nan), **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "llama"
    return plain_checkpoint("llama-biases", directory, hidden_size=128, head_dim=32, intermediate_size=128)


def texts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (70, 30, 90, 60)]


def test_each_layer_reads_what_the_quantized_ones_before_it_give(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "ROW_TOKENS", 100)  # the second text shares a row with the first
    quantize_checkpoint(plain, tmp_path / "out", "int4", group_size=GROUP, calibration=texts())
    ours, weights = load(tmp_path / "out")
    assert len(ours.quantized) == 8
    found = dequantized(ours, weights)
    model, plain_weights = load(plain)
    first = [
        found[name] if name.startswith("layers.0.") else array
        for name, array in zip(model.parameter_names, plain_weights, strict=True)
    ]
    module = model.module(first)
    norm = module.layers[1].attention_norm
    module.layers = nnx.List([module.layers[0], calibration._Stop()])
    expected = []
    for text in texts():
        with pytest.raises(calibration._Reached) as reached:
            module(jnp.asarray(text, jnp.int32), jnp.arange(len(text)), models.dense_causal_attend)
        expected.append(np.asarray(reached.value.x))

    stored = checkpoint.find_tensors(plain)
    steps = calibration.Calibration(model, stored, tuple(ours.quantized), texts(), group=GROUP, damping=0.01)
    assert [row.x.shape for row in steps._rows] == [(100, 128)] * 3
    made = steps.layer(0)
    assert made["model.layers.0.mlp.down_proj.weight"][0].shape == (128, 128)
    rows = np.concatenate([row.x[row.texts >= 0] for row in steps._rows])
    np.testing.assert_allclose(rows, np.concatenate(expected), rtol=1e-4, atol=1e-4)
    normed = np.asarray(norm(jnp.asarray(np.concatenate(expected))))
    hessians = steps._observe(1, steps._read("layers.1."))
    assert set(hessians) == {name for name in ours.quantized if name.startswith("layers.1.")}
    largest = np.abs(normed.T @ normed).max()
    np.testing.assert_allclose(hessians["layers.1.attention.qkv"], normed.T @ normed, atol=1e-4 * largest)


def test_the_command_calibrates_on_conversations_and_the_model_reads_them_better_than_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers of the embedded model, which is trained and has a tokenizer."""
    monkeypatch.setattr(calibration, "ROW_TOKENS", 64)
    source = first_layers(tmp_path / "source")
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": STORY}]
    (tmp_path / "texts.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    asked = ["quantize", str(source), str(tmp_path / "nearest"), "--scheme", "int4", "--group-size", "32"]
    assert main(asked) == 0
    asked[2] = str(tmp_path / "out")
    assert main([*asked, "--calibration", str(tmp_path / "texts.jsonl"), "--kv-cache", "fp8"]) == 0
    assert all(
        0.001 < scale < 0.1 for of_layer in read_kv_scales("auto", tmp_path / "out", [True] * 2) for scale in of_layer
    )
    weights = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert weights["group_0"]["weights"]["group_size"] == 32
    tokens = jnp.asarray(Tokenizer.load(str(source)).apply_chat_template(turns), jnp.int32)

    def hidden(directory: Path) -> np.ndarray:
        model, held = load(directory)
        return np.asarray(model.forward(held, tokens, jnp.arange(tokens.size), models.dense_causal_attend))

    right = hidden(source)
    errors = [np.linalg.norm(hidden(tmp_path / name) - right) for name in ("out", "nearest")]
    assert errors[0] < 0.8 * errors[1]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_checkpoint("qwen3-moe", tmp_path_factory.mktemp("sparse") / "moe", num_hidden_layers=1)


@pytest.mark.parametrize(("source", "scheme"), [("plain", "fp8"), ("sparse", "fp8-block"), ("plain", "int4")])
def test_the_largest_key_and_value_of_each_layer_become_448(
    source: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Those that the model makes of texts; int4's of its weights in 4 bits."""
    monkeypatch.setattr(calibration, "ROW_TOKENS", 100)
    directory, out = request.getfixturevalue(source), tmp_path / "out"
    sizes = {"group_size": GROUP} if scheme == "int4" else {}
    asked = texts()[:1] if source == "sparse" else texts()
    quantize_checkpoint(directory, out, scheme, calibration=asked, kv_cache="fp8", shard_bytes=100_000, **sizes)
    model, weights = load(out if scheme == "int4" else directory)
    largest: list[list[float]] = []

    def attend(qkv: Any, *, rotation: Any = None, norms: Any = None, norm_eps: float = 1e-6, **features: Any) -> Any:
        _, k, v = split_qkv(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps)
        largest.append([float(jnp.abs(one).max()) for one in (k, v)])
        return models.dense_causal_attend(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps, **features)

    for text in asked:
        model.forward(weights, jnp.asarray(text, jnp.int32), jnp.arange(len(text)), attend)
    expected = np.max(np.reshape(largest, (len(asked), -1, 2)), axis=0) / 448
    found = read_kv_scales("auto", out, [True] * len(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-3 if scheme == "int4" else 1e-4)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor",
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert "model.layers.0.self_attn.k_scale" in index["weight_map"]
    tensors = [read_tensors(file) for file in out.glob("*.safetensors")]
    assert index["metadata"]["total_size"] == sum(one.nbytes for found in tensors for one in found.values())
    assert load(out)[0].config.quantization is not None
    if scheme != "int4":  # weights are what they are without
        quantize_checkpoint(directory, tmp_path / "without", scheme)
        for one, other in zip(load(out)[1], load(tmp_path / "without")[1], strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_lines_and_objects_are_read_as_texts_and_others_are_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(demo_model_path()))
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": STORY}]
    (tmp_path / "texts.txt").write_text(f"{QUESTION}\n\n{STORY}\n")
    entries = ({"messages": turns}, {"text": STORY}, {"prompt": QUESTION})
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert read_texts(tmp_path / "texts.txt", tokenizer) == [tokenizer.encode(QUESTION), tokenizer.encode(STORY)]
    templated, *others = read_texts(tmp_path / "texts.jsonl", tokenizer)
    assert others == [tokenizer.encode(STORY), tokenizer.encode(QUESTION)]
    assert STORY in tokenizer.decode(templated, skip_special_tokens=True)
    (tmp_path / "unusual.jsonl").write_text(
        f'\ufeff{{"text": null, "prompt": "{QUESTION}"}}\r\n{{"text": "a fox\u2028and\x85a hen"}}\n', encoding="utf-8"
    )
    expected = [tokenizer.encode(QUESTION), tokenizer.encode("a fox\u2028and\x85a hen")]
    assert read_texts(tmp_path / "unusual.jsonl", tokenizer) == expected
    (tmp_path / "unusual.txt").write_text("\ufeffa fox\x0cand a hen\n", encoding="utf-8")
    assert read_texts(tmp_path / "unusual.txt", tokenizer) == [tokenizer.encode("a fox\x0cand a hen")]
    (tmp_path / "turns.jsonl").write_text('\n{"messages": [{"content": "a fox"}]}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a fox"}\n{"texts": []}\n')
    (tmp_path / "empty.txt").write_text("\n")
    refused = {
        "bad.jsonl": "line 2: must be an object with",
        "turns.jsonl": r"turns\.jsonl, line 2: .*role",
        "empty.txt": "has no text",
        "no": "cannot be read",
    }
    for name, said in refused.items():
        with pytest.raises(InvalidParameterError, match=said):
            read_texts(tmp_path / name, tokenizer)


def test_the_command_refuses_what_it_cannot_do_before_a_tokenizer_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No model is there at all, which would be said otherwise."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    refused = {
        ("full", "--scheme", "int4"): "is not empty; choose another directory",
        ("out", "--scheme", "fp8"): "calibration is for scheme 'int4', and not for 'fp8', unless kv_cache is given",
        ("out", "--scheme", "fp8", "--kv-cache", "fp8", "--group-size", "32"): "group_size is for scheme 'int4', and",
        ("out", "--scheme", "int4", "--group-size", "48"): "group_size must be one of 32, 64, 128, got 48",
    }
    for (out, *options), said in refused.items():
        command = ["quantize", str(tmp_path / "none"), str(tmp_path / out), *options]
        assert main([*command, "--calibration", str(tmp_path / "none.txt")]) == 2
        assert said in capsys.readouterr().err


def first_layers(target: Path) -> Path:
    """The embedded model with its first two layers alone."""
    target.mkdir()
    for path in demo_model_path().iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            shutil.copy(path, target / path.name)
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 2}
    (target / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(demo_model_path() / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if ".layers." not in name or name.split(".")[2] in "01"}
    write_tensors(target / "model.safetensors", kept)
    return target


def test_what_cannot_be_calibrated_is_named_and_nothing_is_left(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(error: type[Exception], words: str, source: Path = plain, scheme: str = "int4", **options: Any) -> None:
        with pytest.raises(error, match=words):
            quantize_checkpoint(source, out, scheme, **{"calibration": texts()} | options)
        assert not out.exists()

    refused(InvalidParameterError, "calibration is for scheme 'int4', and not for 'fp8'", scheme="fp8")
    refused(InvalidParameterError, "group_size must be one of 32, 64, 128, got 48", group_size=48)
    refused(InvalidParameterError, "kv_cache='fp8' needs calibration", calibration=None, kv_cache="fp8")
    refused(InvalidParameterError, "kv_cache must be 'fp8' or left out, got 'int8'", kv_cache="int8")
    latent = plain_checkpoint("deepseek-v3", tmp_path / "latent", moe_intermediate_size=64)
    options = {"source": latent, "scheme": "fp8", "kv_cache": "fp8"}
    refused(UnsupportedModelError, "kv_cache='fp8' is not supported for a DeepseekV3", **options)
    shared = {"source": plain_checkpoint("gemma4-e4b-style", tmp_path / "shared"), "scheme": "fp8", "kv_cache": "fp8"}
    refused(UnsupportedModelError, "layers that read others' keys and values, or inputs of their own", **shared)
    refused(InvalidParameterError, "damping must be above 0", damping=0)
    refused(InvalidParameterError, "calibration must have texts with tokens", calibration=[[]])
    refused(InvalidParameterError, f"has the token {VOCAB_SIZE}, which is not one", calibration=[[5, VOCAB_SIZE]])
    for token in (2**40, 2**70, -1, 1.7, True, "a"):
        refused(InvalidParameterError, f"has the token {token!r}, which is not one", calibration=[[5, token]])
    refused(InvalidParameterError, "must be lists of token ids, one a text, and has 'a fox'", calibration=["a fox"])
    refused(InvalidParameterError, "must be lists of token ids, one a text, and has 5", calibration=[5])
    sparse = plain_checkpoint("qwen3-moe", tmp_path / "moe", moe_intermediate_size=64)
    options = {"source": sparse, "group_size": 32}
    refused(UnsupportedModelError, "mixtures of experts are not supported with calibration", **options)
    hybrid = {"source": plain_checkpoint("bamba", tmp_path / "hybrid"), "group_size": 32}
    refused(UnsupportedModelError, "Mamba-2 layers are not supported with calibration", **hybrid)
    wide = plain_checkpoint("llama-biases", tmp_path / "wide")
    refused(UnsupportedModelError, "multiples of 128 inputs; choose group_size=32, or 'fp8'", source=wide)
    broken = shutil.copytree(plain, tmp_path / "broken")
    tensors = read_tensors(plain / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = np.nan
    write_tensors(broken / "model.safetensors", tensors)
    refused(CheckpointError, r"layers\.1\.mlp\.down_proj\.weight' has NaN or infinity", source=broken)
