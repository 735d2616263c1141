"""MXFP4 checkpoints: their numbers against transformers' and the format's own, loading them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged import models
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from jpaged.frontend.model_of_config import options_of
from jpaged.models.loading import checkpoint, orbax_checkpoint
from jpaged.models.loading.mxfp4 import dequantize
from jpaged.models.sharding import shard_of
from tests.models.quantization.test_checkpoints import dequantized
from tests.tiny_models import draw, tiny_model

CASE = tiny_model("gpt-oss-20b-style")
HIDDEN, INNER, EXPERTS = 64, 32, 8
CONFIG: dict[str, Any] = CASE.config | {
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def every_number() -> tuple[np.ndarray, np.ndarray]:
    """All bytes at all scales: blocks [1, 256, 16, 16] and scales [1, 256, 16]."""
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 16, 16))
    return blocks.copy(), np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (1, 256, 16)).copy()


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint16)


def test_rows_of_a_packed_tensor_are_those_of_the_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "x_blocks": rng.integers(0, 256, (6, 10, 2, 16), np.uint8),
        "x_scales": rng.integers(100, 140, (6, 10, 2), np.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    packed = checkpoint.find_tensors(tmp_path)["x"]
    rows = packed.rows(2, 3)
    np.testing.assert_array_equal(bits(rows.read()), bits(packed.read())[2:5])
    assert rows.shape == (3, 64, 10)
    assert 2 * rows.num_bytes == packed.num_bytes
    assert packed.array_bytes == 6 * 64 * 10 * 2


def test_every_number_at_every_scale_is_exact() -> None:
    found = dequantize(*every_number())
    assert found.shape == (1, 512, 256)
    assert found.dtype == jnp.bfloat16
    for scale in (0, 1, 100, 127, 140, 252):
        wanted = [
            (-1) ** (code >> 3) * NUMBERS[code & 7] * 2.0 ** (scale - 127)
            for byte in range(256)
            for code in (byte & 15, byte >> 4)
        ]
        np.testing.assert_array_equal(found[0, :, scale].astype(np.float64), wanted)
    assert np.isnan(found[0, :, 255].astype(np.float32)).all()


@pytest.mark.transformers
def test_the_bits_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = every_number()
    theirs = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    usual = slice(0, 255)  # the format calls 255 NaN, of which transformers knows nothing
    theirs = theirs.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits(dequantize(blocks, scales))[..., usual], theirs[..., usual])


def packed(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    groups = inputs // 32
    blocks = rng.integers(0, 256, (EXPERTS, outputs, groups, 16), dtype=np.uint8)
    return blocks, rng.integers(118, 124, (EXPERTS, outputs, groups), dtype=np.uint8)


def stored_tensors(config: dict[str, Any] = CONFIG) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What a published checkpoint holds, and the tensors that its packed ones stand for."""
    rng = np.random.default_rng(3)
    inner = config["intermediate_size"]
    model = models.build(models.ModelConfig.from_dict(config), "float32")
    stored, plain = {}, {}
    for piece in model.pieces:
        if piece.tensor.endswith(("gate_up_proj", "down_proj")):
            outputs, inputs = (2 * inner, HIDDEN) if "gate_up" in piece.tensor else (HIDDEN, inner)
            blocks, scales = packed(rng, outputs, inputs)
            stored[f"{piece.tensor}_blocks"], stored[f"{piece.tensor}_scales"] = blocks, scales
            plain[piece.tensor] = dequantize(blocks, scales)
        else:
            stored[piece.tensor] = plain[piece.tensor] = draw(CASE, piece.tensor, piece.shape).astype(jnp.bfloat16)
    return stored, plain


def write(directory: Path, tensors: dict[str, np.ndarray], config: dict[str, object] = CONFIG) -> Path:
    """A checkpoint whose tensors are of several types."""
    directory.mkdir(parents=True, exist_ok=True)
    entries, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        kind = "U8" if array.dtype == np.uint8 else "BF16"
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    data = len(header).to_bytes(8, "little") + header + b"".join(array.tobytes() for array in tensors.values())
    (directory / checkpoint.SINGLE_NAME).write_bytes(data)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(
    directory: Path, dtype: str = "auto", quantization: str | None = "none"
) -> tuple[models.Model, tuple[jax.Array, ...]]:
    model = models.build(models.ModelConfig.from_directory(directory, quantization=quantization), dtype)
    return model, checkpoint.load(model, directory)


def test_a_packed_checkpoint_loads_as_the_plain_one_and_is_saved_as_that(tmp_path: Path) -> None:
    stored, plain = stored_tensors()
    without = {name: value for name, value in CONFIG.items() if name != "quantization_config"}
    model, weights = load(write(tmp_path / "packed", stored))
    _, wanted = load(write(tmp_path / "plain", plain, without))
    assert model.dtype == jnp.bfloat16
    for name, ours, theirs in zip(model.parameter_names, weights, wanted, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=name)
    models.save_pretrained(model, weights, tmp_path / "saved")
    orbax_checkpoint.save(model, weights, tmp_path / "orbax")
    for kind in ("saved", "orbax"):
        again, reloaded = load(tmp_path / kind)
        assert "quantization_config" not in again.config.source
        for ours, theirs in zip(weights, reloaded, strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs))


def test_experts_stay_in_4_bits_and_are_what_they_are_read_as_otherwise(tmp_path: Path) -> None:
    stored, _ = stored_tensors()
    directory = write(tmp_path / "packed", stored)
    model, weights = load(directory, "float32", None)
    plain_model, plain = load(directory, "float32")
    assert {name.rpartition(".")[2] for name in model.quantized} == {"gate_up", "down"}
    assert model.num_parameters == plain_model.num_parameters
    by_name = dict(zip(model.parameter_names, weights, strict=True))
    found = dequantized(model, weights)
    for name, expected in zip(plain_model.parameter_names, plain, strict=True):
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
        if name in model.quantized:
            assert (by_name[name].nbytes, by_name[f"{name}_scale"].nbytes) == (expected.size // 2, expected.size // 32)
    tokens = np.random.default_rng(1).integers(3, 150, 40, np.int32)
    ours, theirs = (
        of.logits(held, of.forward(held, tokens, jnp.arange(40, dtype=jnp.int32), models.dense_causal_attend))
        for of, held in ((model, weights), (plain_model, plain))
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_experts_in_4_bits_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path / "packed", stored_tensors()[0])
    model, weights = load(directory, "float32", None)
    expert = HIDDEN * 2 * INNER
    monkeypatch.setattr(checkpoint, "MOST_BYTES", 3 * 2 * expert)
    found = checkpoint.match(model, checkpoint.find_tensors(directory))
    read = [n for piece, _, n in checkpoint.read_each(model, found, None) if piece.tensor.endswith("gate_up_proj")]
    assert [n for n in read if n] == [few * (expert // 2 + expert // 32) for few in (3, 3, 2)]
    for ours, theirs in zip(checkpoint.load(model, directory), weights, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_what_cannot_be_kept_in_4_bits_is_named(tmp_path: Path) -> None:
    stored, plain = stored_tensors()
    with pytest.raises(CheckpointError, match=r"_proj' is not in MXFP4, though config\.json"):
        load(write(tmp_path / "plain", plain), "float32", None)
    stored[f"{PREFIX}.down_proj_scales"][3, 2, 0] = 255
    with pytest.raises(CheckpointError, match=r"down_proj' has a scale of 255, which makes NaN"):
        load(write(tmp_path / "nan", stored), "float32", None)
    stored[f"{PREFIX}.down_proj_scales"][3, 2, 0] = 253
    with pytest.raises(CheckpointError, match=r"down_proj' has a scale of 253, which makes numbers that bfloat16"):
        load(write(tmp_path / "infinite", stored), "float32", None)


def test_a_configuration_keeps_what_its_weights_are_to_become() -> None:
    for asked, options in ((None, {}), ("none", {"quantization": "none"})):
        assert options_of(models.ModelConfig.from_dict(CONFIG, quantization=asked)) == options


def test_shards_have_the_blocks_and_scales_of_their_columns() -> None:
    for inner in (64, 32):  # of which half a group each is filled up
        config = models.ModelConfig.from_dict(CONFIG | {"intermediate_size": inner})
        model = shard_of(models.build(config, "float32"), 2)
        shapes = {name: leaf.shape for name, leaf in zip(model.parameter_names, model.abstract_weights, strict=True)}
        assert shapes["layers.0.mlp.experts.gate_up"] == (8, 2, 32, 32)
        assert shapes["layers.0.mlp.experts.down"] == (8, 64, 16)
        assert shapes["layers.0.mlp.experts.down_scale"] == (8, 64, 1)


@pytest.mark.transformers
def test_a_packed_checkpoint_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    stored, plain = stored_tensors()
    model, weights = load(write(tmp_path, stored), "float32")
    entries = {name: value for name, value in CONFIG.items() if name not in ("quantization_config", "torch_dtype")}
    config = transformers.AutoConfig.for_model(**entries)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    theirs.load_state_dict({name: torch.from_numpy(np.float32(array)) for name, array in plain.items()})
    tokens = np.random.default_rng(1).integers(3, 150, 40, np.int32)
    hidden = model.forward(weights, tokens, jnp.arange(40, dtype=jnp.int32), models.dense_causal_attend)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens[None]).long()).logits[0].numpy()
    np.testing.assert_allclose(model.logits(weights, hidden), wanted, atol=1e-4 * np.abs(wanted).max())


PREFIX = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_scales", None, "holds '.*gate_up_proj_blocks' but no file holds '.*gate_up_proj_scales'"),
        ("down_proj_blocks", None, "holds '.*down_proj_scales' but no file holds '.*down_proj_blocks'"),
        ("gate_up_proj_blocks", lambda x: x[..., :8], "gate_up_proj_blocks' has shape .*MXFP4 blocks are"),
        ("gate_up_proj_scales", lambda x: x[:, 1:], "gate_up_proj_scales' has type U8 and shape .*are U8"),
        ("down_proj_scales", lambda x: x.astype(jnp.bfloat16), "down_proj_scales' has type BF16"),
    ],
)
def test_packed_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, change, message: str) -> None:
    stored, _ = stored_tensors()
    tensor = stored.pop(f"{PREFIX}.{name}")
    if change is not None:
        stored[f"{PREFIX}.{name}"] = change(tensor)
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, stored))


def test_packed_tensors_of_another_models_size_are_named(tmp_path: Path) -> None:
    stored, _ = stored_tensors()
    for part in ("blocks", "scales"):
        stored[f"{PREFIX}.down_proj_{part}"] = stored[f"{PREFIX}.down_proj_{part}"][1:]
    with pytest.raises(
        CheckpointError, match=r"'.*down_proj' has shape \(7, 32, 64\), config.json implies \(8, 32, 64\)"
    ):
        load(write(tmp_path, stored))


def test_truncated_packed_data_is_named(tmp_path: Path) -> None:
    stored, _ = stored_tensors()
    last = f"{PREFIX}.gate_up_proj_blocks"
    stored[last] = stored.pop(last)
    file = write(tmp_path, stored) / checkpoint.SINGLE_NAME
    whole = file.read_bytes()
    found = checkpoint.find_tensors(tmp_path)[f"{PREFIX}.gate_up_proj"]
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"is truncated: .*gate_up_proj_blocks"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"ends within tensor '.*gate_up_proj_blocks'"):
        found.read()  # the file has become shorter since its header was read


def test_a_header_that_gives_packed_data_other_bytes_is_named(tmp_path: Path) -> None:
    stored, _ = stored_tensors()
    file = write(tmp_path, stored) / checkpoint.SINGLE_NAME
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = f"{PREFIX}.down_proj_scales"
    header[name]["data_offsets"][1] -= 1
    changed = json.dumps(header).encode().ljust(length)
    file.write_bytes(data[:8] + changed + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"down_proj_scales' of shape .* cannot take 511 bytes"):
        load(tmp_path)


def test_other_quantizations_are_refused() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    config = models.ModelConfig.from_dict(CONFIG | {"quantization_config": gptq})
    with pytest.raises(UnsupportedModelError, match="all experts in one tensor, which is not supported in GPTQ"):
        models.build(config, "float32")
    with pytest.raises(InvalidParameterError, match="quantization='none' makes plain numbers of weights in MXFP4"):
        models.ModelConfig.from_dict(CONFIG | {"quantization_config": gptq}, quantization="none")
    plain = {name: value for name, value in CONFIG.items() if name != "quantization_config"}
    for entries in ({"compression_config": gptq}, {"text_config": {"quantization_config": gptq}}):
        with pytest.raises(InvalidParameterError, match="and this checkpoint is in 'gptq'; leave"):
            models.ModelConfig.from_dict(plain | entries, quantization="none")
    for unknown in ({"bits": 4}, {"quant_method": "quark"}):
        with pytest.raises(UnsupportedModelError, match=r"quant_method (None|'quark') is not supported; supported"):
            models.ModelConfig.from_dict(CONFIG | {"quantization_config": unknown}, quantization="none")
    assert models.ModelConfig.from_dict(plain, quantization="none").quantization is None
    with pytest.raises(CheckpointError, match="quantization_config must be an object, got 'mxfp4'"):
        models.ModelConfig.from_dict(CONFIG | {"quantization_config": "mxfp4"})
    config = models.ModelConfig.from_dict(
        tiny_model("qwen3-moe").config | {"quantization_config": {"quant_method": "mxfp4"}}
    )
    with pytest.raises(UnsupportedModelError, match="in mxfp4 is not supported, only checkpoints with all experts in"):
        models.build(config, "float32")
