"""Quantized checkpoints: what is read is what the published layouts say, and what cannot be served is named."""

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import EngineArgs, models
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from jpaged.frontend.model_of_config import options_of
from jpaged.models.loading import orbax_checkpoint
from jpaged.models.loading.live import WeightUpdater
from jpaged.models.quantization import SUFFIXES
from jpaged.models.quantization.fp8 import Fp8
from jpaged.models.quantization.int8 import Int8
from jpaged.models.quantization.layers import RowOrder, StoredLayer
from jpaged.models.quantization.mxfp4 import Mxfp4
from jpaged.models.quantization.nvfp4 import Nvfp4
from jpaged.models.quantization.scheme import BadTensor, checked_scales
from jpaged.pallas_kernels.fp8_product.reference import dequantized as fp8_dequantized
from jpaged.pallas_kernels.int4_product.reference import dequantized as int4_dequantized
from jpaged.pallas_kernels.int4_product.reference import nvfp4_dequantized
from jpaged.pallas_kernels.quantized_grouped_product.reference import dequantized as grouped_dequantized
from tests.support.quantized import (
    E4M3,
    PUBLISHED,
    dequantized_checkpoint,
    plain_checkpoint,
    quantized_checkpoint,
    read_tensors,
    write_tensors,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model

LLAMA, QWEN3 = "llama-biases", "qwen3-layer-types"
WEIGHT_ONLY = ("fp8-weights", "fp8-blocks", "awq", "gptq-act-order", "int4-symmetric", "int4-act-order", "nvfp4")
WEIGHT_ONLY += ("gptq-8-bits",)
ROWS = "llama of 128"
"""For scales of whole rows, which are repeated every 128 inputs."""
LENGTH = 24


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("plain")
    found = {name: plain_checkpoint(name, directory / name) for name in (LLAMA, QWEN3)}
    return found | {ROWS: plain_checkpoint(LLAMA, directory / ROWS, hidden_size=128)}


def load(directory: Path, quantization: str | None = None) -> tuple[models.Model, models.Weights]:
    model = models.build(models.ModelConfig.from_directory(directory, quantization=quantization), "float32")
    return model, models.load(model, directory)


def dequantized(model: models.Model, weights: models.Weights) -> dict[str, np.ndarray]:
    """All parameters in float32, quantized ones as a plain model has them."""
    named = dict(zip(model.parameter_names, weights, strict=True))
    found = {}
    for name, array in named.items():
        layout = model.quantized.get(name)
        if layout is not None:
            shaped = values_of(model, named, name).reshape(*layout.rows, *layout.inputs)
            array = shaped.transpose(np.argsort([*layout.row_axes, *layout.input_axes]))
        elif any(name.endswith(suffix) and name.removesuffix(suffix) in model.quantized for suffix in SUFFIXES):
            continue
        found[name] = np.asarray(array)
    return found


def values_of(model: models.Model, named: dict[str, Any], name: str) -> Any:
    """float32 [outputs, inputs]."""
    flat = {suffix: array.reshape(-1, array.shape[-1]) for suffix, array in arrays_of(named, name).items()}
    kind = model.config.quantization.kind
    if isinstance(kind, Mxfp4):
        return grouped_dequantized(flat[""], flat["_scale"], None, form="mxfp4", group=kind.group)
    if isinstance(kind, Nvfp4):
        return nvfp4_dequantized(flat[""], flat["_scale"], flat["_outer"][:, 0])
    if isinstance(kind, Fp8):
        return fp8_dequantized(flat[""], flat["_scale"], kind.group)
    if isinstance(kind, Int8):
        values = fp8_dequantized(flat[""], flat["_scale"], kind.group)
    else:
        values = int4_dequantized(flat[""], flat["_scale"], flat.get("_zero"), kind.group)
    if "_order" not in flat:
        return values
    orders = np.argsort(flat["_order"], axis=1)  # of the layer, or of each expert
    return np.take_along_axis(np.asarray(values), np.repeat(orders, len(values) // len(orders), axis=0), axis=1)


def arrays_of(named: dict[str, Any], name: str) -> dict[str, Any]:
    """A quantized layer's parameters, by what their names end with."""
    return {suffix: named[name + suffix] for suffix in ("", *SUFFIXES) if name + suffix in named}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_weights_are_those_of_the_published_layout_to_the_bit(layout, plain, tmp_path):
    source = plain[ROWS if layout == "gptq-rows" else QWEN3]
    ours = load(quantized_checkpoint(source, tmp_path / "quantized", layout))
    model, weights = load(dequantized_checkpoint(source, tmp_path / "dequantized", layout))
    found = dequantized(*ours)
    assert set(found) == set(model.parameter_names)
    assert len(ours[0].quantized) == 8
    for name, expected in zip(model.parameter_names, weights, strict=True):
        np.testing.assert_array_equal(found[name], np.asarray(expected), err_msg=name)
    assert ours[0].num_parameters == model.num_parameters
    assert ours[0].num_bytes < 0.6 * model.num_bytes


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("bamba", "fp8-blocks"),
        ("bamba", "awq"),
        ("qwen3.5", "awq"),
        ("qwen3-next", "fp8-blocks"),
        ("lfm2-1.2b-style", "awq"),
        ("nemotron3-super-style", "fp8-blocks"),
    ],
)
def test_so_are_those_of_recurrent_layers(layout, name, tmp_path):
    """Whose products are joined of parts of one tensor, or of several."""
    sizes = {
        "qwen3-next": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        "nemotron3-super-style": dict.fromkeys(
            ("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), 64
        ),
    }.get(name, {})
    source = plain_checkpoint(name, tmp_path / "plain", **sizes)
    ours = load(quantized_checkpoint(source, tmp_path / "quantized", layout))
    model, weights = load(dequantized_checkpoint(source, tmp_path / "dequantized", layout))
    found = dequantized(*ours)
    mamba = {"attention.zx", "attention.bc", "attention.dt_in"}
    inputs = {
        **{"bamba": mamba, "lfm2-1.2b-style": {"attention.bcx"}},
        "nemotron3-super-style": mamba | {"mlp.up", "mlp.experts.up", "mlp.into_latents", "mlp.out_of_latents"},
    }.get(name, {"attention.qkvz"})
    assert inputs | {"attention.out"} <= {name.split(".", 2)[2] for name in ours[0].quantized}
    for parameter, expected in zip(model.parameter_names, weights, strict=True):
        np.testing.assert_array_equal(found[parameter], np.asarray(expected), err_msg=parameter)


@pytest.mark.parametrize("layout", ["int4-symmetric", "int8-weights"])
def test_packed_layers_have_any_number_of_outputs_where_there_are_no_zero_points(layout, tmp_path):
    """Words are of inputs alone: a key-value head has 6 outputs here."""
    sizes = {"num_attention_heads": 16, "head_dim": 6, "num_key_value_heads": 1}
    source = plain_checkpoint(LLAMA, tmp_path / "plain", **sizes)
    ours = load(quantized_checkpoint(source, tmp_path / "quantized", layout))
    theirs = load(dequantized_checkpoint(source, tmp_path / "dequantized", layout))
    found = dequantized(*ours)
    for name, expected in zip(theirs[0].parameter_names, theirs[1], strict=True):
        np.testing.assert_array_equal(found[name], np.asarray(expected), err_msg=name)
    assert greedy(*ours) == greedy(*theirs)
    random = dequantized(ours[0], ours[0].init(seed=1))["layers.0.attention.qkv"]
    assert 0.8 < random.std() / ours[0].quantized["layers.0.attention.qkv"].std < 1.2
    for other in ("int4-act-order", "awq", "gptq-8-bits"):
        config = dict(ours[0].config.source) | {"quantization_config": PUBLISHED[other].config}
        with pytest.raises(UnsupportedModelError, match=r"_proj has 6 outputs and 160 inputs; .* for multiples"):
            models.build(models.ModelConfig.from_dict(config), "float32")


@partial(jax.jit, static_argnums=0)
def next_tokens(model: models.Model, weights: models.Weights, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    hidden = model.forward(weights, tokens, positions, models.dense_causal_attend)
    return jnp.argmax(model.logits(weights, hidden), axis=-1)


def prompt() -> np.ndarray:
    """int32 [LENGTH], of which the first half is read."""
    return np.random.default_rng(5).integers(3, VOCAB_SIZE, LENGTH).astype(np.int32)


def greedy(model: models.Model, weights: models.Weights) -> list[int]:
    """The likeliest token after each of a prompt's and of the text that follows it."""
    tokens = prompt()
    for n in range(LENGTH // 2, LENGTH):
        tokens[n] = next_tokens(model, weights, tokens)[n - 1]
    return next_tokens(model, weights, tokens).tolist()


@pytest.mark.parametrize(("layout", "name"), [(layout, (LLAMA, QWEN3)[i % 2]) for i, layout in enumerate(WEIGHT_ONLY)])
def test_greedy_tokens_are_those_of_the_dequantized_weights(layout, name, plain, tmp_path):
    ours = greedy(*load(quantized_checkpoint(plain[name], tmp_path / "quantized", layout)))
    assert ours == greedy(*load(dequantized_checkpoint(plain[name], tmp_path / "dequantized", layout)))
    assert len(set(ours)) > 8, "a text that wanders"


def round_activations(x: np.ndarray, scale: float | None, bound: float = np.inf) -> np.ndarray:
    """x [T, K] with each row, or all of it where a scale is given, rounded to e4m3."""
    if scale is None:
        scale = np.minimum(np.abs(x).max(axis=1, keepdims=True), bound) / np.float32(448)
    return np.clip(x / scale, -448, 448).astype(E4M3).astype(np.float32) * scale


def round_to_integers(x: np.ndarray, scale: float | None) -> np.ndarray:
    """Likewise, to integers of 8 bits."""
    if scale is None:
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.clip(np.round(x / scale), -128, 127) * scale


@pytest.mark.parametrize(
    ("layout", "scale"),
    [("fp8-static", 0.02), ("fp8-dynamic", None), ("fbgemm", None), ("int8-static", 0.05), ("int8-dynamic", None)],
)
def test_activations_are_rounded_as_the_scheme_says(layout, scale, plain, tmp_path):
    rounded = round_to_integers if layout.startswith("int8") else round_activations
    model, weights = load(quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", layout))
    found, module = dequantized(model, weights), model.module(weights)
    rng = np.random.default_rng(3)
    for name, layer in (("attention.qkv", module.layers[1].attention.qkv), ("mlp.down", module.layers[1].mlp.down)):
        inputs = layer.layout.inputs[0]
        x = (rng.standard_normal((7, inputs)) * rng.uniform(0.1, 3, (7, 1))).astype(np.float32)
        x[3] = 0
        kernel = found[f"layers.1.{name}"].reshape(inputs, -1).astype(np.float64)
        right = rounded(x[[0, 1, 2, 4, 5, 6]], scale).astype(np.float64) @ kernel
        bias = 0 if layer.bias is None else np.asarray(layer.bias[...]).reshape(-1)
        y = layer(x) if not layer.layout.splits_inputs else layer.partial_sum(x).array
        ours = np.asarray(y).reshape(7, -1) - (0 if layer.layout.splits_inputs else bias)
        error = np.abs(ours[[0, 1, 2, 4, 5, 6]] - right)
        # Sums in float32, and a bias added and taken away; where x / scale rounds otherwise, a step of one value.
        assert error.max() < 1e-5 * np.abs(right).max()
        assert np.abs(ours[3]).max() < 1e-6


def test_online_each_output_has_a_scale_and_is_rounded_to_the_nearest(plain):
    model, weights = load(plain[LLAMA], "fp8")
    integers = dequantized(*load(plain[LLAMA], "int8"))
    plain_model, plain_weights = load(plain[LLAMA])
    found = dequantized(model, weights)
    for name, expected in zip(plain_model.parameter_names, plain_weights, strict=True):
        expected = np.asarray(expected)
        if name not in model.quantized:
            np.testing.assert_array_equal(found[name], expected)
            continue
        inner = tuple(range(len(model.quantized[name].inputs)))
        largest = np.abs(expected).max(axis=inner)
        np.testing.assert_allclose(np.abs(found[name]).max(axis=inner), largest, rtol=1e-6)
        # 3 bits of mantissa: half of an eighth; below 2 ** -6 the steps are 2 ** -9, of 448 parts of the largest.
        assert np.all(np.abs(found[name] - expected) <= np.maximum(np.abs(expected) / 16, largest / 448 / 1024) * 1.001)
        np.testing.assert_allclose(np.abs(integers[name]).max(axis=inner), largest, rtol=1e-6)
        assert np.all(np.abs(integers[name] - expected) <= largest / 254 * 1.001)


@pytest.mark.parametrize(
    "name", ["gpt2", "opt-350m-style", "falcon-7b-style", "phi3-window", "bloom", "qwen3.5", "granite4-h-all-options"]
)
def test_online_other_families_keep_their_layout(name, tmp_path):
    directory = write_tiny_model(tiny_model(name), tmp_path / name, use_torch=False)
    model, weights = load(directory, "fp8")
    plain_model, plain_weights = load(directory)
    found = dequantized(model, weights)
    for parameter, expected in zip(plain_model.parameter_names, plain_weights, strict=True):
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found[parameter], expected, rtol=1 / 15, atol=scale / 1000, err_msg=parameter)


@pytest.mark.parametrize("kind", ["fp8", "fp8-blocks", "gptq-act-order", "nvfp4"])
def test_random_weights_are_finite_and_of_the_usual_size(kind, plain, tmp_path):
    directory = plain[LLAMA] if kind == "fp8" else quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", kind)
    config = models.ModelConfig.from_directory(directory, quantization="fp8" if kind == "fp8" else None)
    model = models.build(config, "float32")
    found = dequantized(model, model.init(seed=1))
    for name, layout in model.quantized.items():
        assert 0.8 * layout.std < found[name].std() < 1.2 * layout.std


def damage(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = read_tensors(directory / "model.safetensors")
    change(tensors)
    write_tensors(directory / "model.safetensors", tensors)


SCALES = {
    "fp8-static": ("weight_scale", "input_scale"),
    "fp8-dynamic": ("weight_scale",),
    "fp8-blocks": ("weight_scale_inv",),
    "int8-static": ("weight_scale", "input_scale"),
    "awq": ("scales",),
    "gptq": ("scales",),
    "int4-symmetric": ("weight_scale",),
    "nvfp4": ("weight_global_scale",),
    "modelopt-nvfp4": ("weight_scale_2",),
    "modelopt-fp8": ("weight_scale", "input_scale"),
}


@pytest.mark.parametrize(("layout", "suffix"), [(layout, one) for layout, names in SCALES.items() for one in names])
def test_scales_that_cannot_be_are_named(layout, suffix, plain, tmp_path):
    directory = quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", layout)
    name = f"model.layers.1.self_attn.v_proj.{suffix}"
    good = read_tensors(directory / "model.safetensors")
    for value in (np.nan, -1.0, 0.0, np.inf):
        bad = good[name].copy()
        bad.reshape(-1)[-1] = value
        write_tensors(directory / "model.safetensors", good | {name: bad})
        with pytest.raises(CheckpointError, match=rf"'{name}' has a scale of {value:g}, which must be above 0"):
            load(directory)
    write_tensors(directory / "model.safetensors", {key: value for key, value in good.items() if key != name})
    with pytest.raises(CheckpointError, match=f"lacks tensor '{name}'"):
        load(directory)
    write_tensors(directory / "model.safetensors", good | {name: np.concatenate([np.atleast_1d(good[name])] * 3)})
    with pytest.raises(CheckpointError, match=f"'{name}' has shape"):
        load(directory)
    write_tensors(directory / "model.safetensors", good | {name: good[name].astype(np.int32)})
    with pytest.raises(CheckpointError, match=f"'{name}' has type I32"):
        load(directory)


def test_scales_that_float32_does_not_compute_with_are_named():
    """448 times 1e36 is infinity, and so is 448 divided by 1e-36."""
    for value in (1e-36, 1e36):
        said = re.escape(f"has a scale of {value:g}, which must be from 1e-35 to 1e+35")
        with pytest.raises(BadTensor, match=said):
            checked_scales({"weight_scale": np.array([1, value], np.float32)}, "weight_scale")


def test_outputs_of_tiny_weights_become_zeros_and_no_nan():
    """Whose scale a device would take for zero."""
    weight = np.outer(np.float32([1e-30, 1e-33, 1e-36, 1e-37, 1e-40]), np.linspace(-1, 1, 33, dtype=np.float32))
    for kind, rtol, atol in ((Fp8(), 0.07, 1e-33), (Int8(), 0, 1e-30 / 254)):
        values, scales = kind.rounded(jnp.asarray(weight), RowOrder(weight.shape, (0, 1)))
        found = np.asarray(fp8_dequantized(values, scales, None))
        np.testing.assert_allclose(found[0], weight[0], rtol=rtol, atol=atol * 1.001)
        assert not found[1:].any()
        np.testing.assert_array_equal(scales[1:], 1)


def test_scales_of_nvfp4_that_cannot_be_are_named(plain, tmp_path):
    """One of 0 makes zeros of 16 weights, as it should where they are tiny."""
    directory = quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", "nvfp4")
    name = "model.layers.1.self_attn.v_proj.weight_scale"
    good = read_tensors(directory / "model.safetensors")
    for value, said in ((np.nan, "is negative or NaN"), (-1.0, "is negative or NaN"), (0.0, "of 0 alone")):
        bad = np.full_like(good[name], value)
        write_tensors(directory / "model.safetensors", good | {name: bad})
        with pytest.raises(CheckpointError, match=rf"'{name}' has .* {said}"):
            load(directory)
    write_tensors(directory / "model.safetensors", good | {name: good[name][:, :-1]})
    with pytest.raises(CheckpointError, match=f"'{name}' has shape"):
        load(directory)
    write_tensors(directory / "model.safetensors", good | {name: good[name].astype(np.float32)})
    with pytest.raises(CheckpointError, match=f"'{name}' has type F32"):
        load(directory)


def test_modelopt_s_file_of_its_own_is_read(plain, tmp_path):
    """hf_quant_config.json, where config.json says nothing."""
    directory = quantized_checkpoint(plain[QWEN3], tmp_path / "quantized", "modelopt-nvfp4")
    expected = load(directory)[1]
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    apart = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": apart}))
    for ours, theirs in zip(load(directory)[1], expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": apart | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(
        UnsupportedModelError, match="quant_algo='W4A8_AWQ' is not supported; supported: 'NVFP4', 'W4A16_NVFP4', 'FP8'"
    ):
        models.ModelConfig.from_directory(directory)
    unquantized = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(unquantized))
    assert models.ModelConfig.from_directory(directory).quantization is None


def test_nvfp4_is_what_compressed_tensors_itself_decompresses_to_the_bit():
    """`nvfp4.safetensors` holds what its NVFP4PackedCompressor made of a weight, and what it makes of that again, in
    its only type, bfloat16."""
    tensors = read_tensors(Path(__file__).with_name("nvfp4.safetensors"))
    found = {name: tensors[name] for name in ("weight_packed", "weight_scale", "weight_global_scale")}
    scheme = models.ModelConfig.from_dict(
        tiny_model(LLAMA).config | {"quantization_config": PUBLISHED["nvfp4"].config}
    ).quantization
    arrays = scheme.arrays(StoredLayer("layer", *tensors["weight"].shape), found)
    ours = nvfp4_dequantized(arrays[""], arrays["_scale"], arrays["_outer"][:, 0])
    np.testing.assert_array_equal(np.asarray(ours.astype(jnp.bfloat16)), tensors["weight"])


def test_integers_are_what_compressed_tensors_itself_decompresses_to_the_bit():
    """`int8.safetensors` holds what its IntQuantizationCompressor and its PackedQuantizationCompressor (groups of 32)
    made of a weight, and what they make of that again, in its type, bfloat16."""
    tensors = read_tensors(Path(__file__).with_name("int8.safetensors"))
    for kind, layout, group in (("int", "int8-dynamic", None), ("packed", "int8-weights", 32)):
        config = json.loads(json.dumps(PUBLISHED[layout].config))
        if group is not None:
            config["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": group}
        scheme = models.ModelConfig.from_dict(tiny_model(LLAMA).config | {"quantization_config": config}).quantization
        found = {name.removeprefix(f"{kind}."): one for name, one in tensors.items() if name.startswith(kind)}
        expected = found.pop("decompressed")
        ours = scheme.dequantized(scheme.arrays(StoredLayer("layer", *expected.shape), found), jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(ours), expected)


def test_values_that_are_not_numbers_are_named(plain, tmp_path):
    directory = quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", "fp8-dynamic")
    name = "model.layers.0.mlp.down_proj.weight"
    damage(directory, lambda tensors: tensors[name].view(np.uint8).reshape(-1).__setitem__(7, 0xFF))
    with pytest.raises(CheckpointError, match=f"'{name}' has NaN"):
        load(directory)

    plain_copy = dequantized_checkpoint(plain[LLAMA], tmp_path / "plain", "fp8-dynamic")
    damage(plain_copy, lambda tensors: tensors[name].reshape(-1).__setitem__(7, np.inf))
    with pytest.raises(CheckpointError, match=f"'{name}' has NaN or infinity"):
        load(plain_copy, "fp8")


def test_a_quantized_tensor_that_config_json_says_nothing_of_is_named(plain, tmp_path):
    directory = quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", "fp8-dynamic", ignore=["re:.*layers.1.*"])
    with pytest.raises(CheckpointError, match=r"holds 7 tensors \('model.layers.1.*weight_scale'"):
        load(directory)
    unnamed = [name for name in read_tensors(directory / "model.safetensors") if ".1." in name and "_scale" in name]
    damage(directory, lambda tensors: [tensors.pop(name) for name in unnamed])
    with pytest.raises(CheckpointError, match=r"model.layers.1.*has type F8_E4M3.*quantization_config"):
        load(directory)


def test_layers_of_one_product_are_quantized_together_or_refused(plain, tmp_path):
    directory = quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", "fp8-dynamic", ignore=["re:.*k_proj"])
    with pytest.raises(UnsupportedModelError, match=r"covers .*q_proj and not .*k_proj, which are one product"):
        load(directory)


def refusal(plain: Path, asked: str | None = None, **entries: Any) -> str:
    config = models.ModelConfig.from_directory(plain).source | {"quantization_config": entries or None}
    with pytest.raises((UnsupportedModelError, InvalidParameterError, CheckpointError)) as caught:
        models.ModelConfig.from_dict(config, quantization=asked)
    return str(caught.value)


def test_what_is_not_supported_is_refused_by_name_with_what_is(plain):
    llama = plain[LLAMA]
    assert "quant_method 'bitsandbytes' is not supported; supported: " in refusal(llama, quant_method="bitsandbytes")
    assert "compressed-tensors, fbgemm_fp8, fp8" in refusal(llama, quant_method="exl3").replace("awq, ", "")
    assert "weight_block_size=[64, 64]" in refusal(llama, quant_method="fp8", weight_block_size=[64, 64])
    assert "fmt='e5m2'" in refusal(llama, quant_method="fp8", fmt="e5m2")
    dynamic = PUBLISHED["fp8-dynamic"].config
    assert "kv_cache_scheme" in refusal(llama, **dynamic | {"kv_cache_scheme": {"num_bits": 8}})
    assert "format 'marlin-24'" in refusal(llama, **dynamic | {"format": "marlin-24"})
    groups = dynamic["config_groups"]
    assert "must have one group" in refusal(
        llama, **dynamic | {"config_groups": groups | {"group_1": groups["group_0"]}}
    )
    nvfp4 = PUBLISHED["nvfp4"].config
    weights = nvfp4["config_groups"]["group_0"]
    wide = {"group_0": weights | {"weights": weights["weights"] | {"group_size": 32}}}
    assert "group_size=32 is not supported; supported: 16" in refusal(llama, **nvfp4 | {"config_groups": wide})
    narrow = {"hidden_size": 144, "quantization_config": nvfp4}
    config = models.ModelConfig.from_dict(dict(models.ModelConfig.from_directory(llama).source) | narrow)
    with pytest.raises(UnsupportedModelError, match="has 144 inputs; compressed-tensors NVFP4 is supported for"):
        models.build(config)
    assert "no regular expression" in refusal(llama, **dynamic | {"ignore": ["re:("]})
    assert "quantization='awq' is for checkpoints of that scheme" in refusal(llama, "awq")
    assert "quantized by 'compressed-tensors'; leave" in refusal(llama, "fp8", **dynamic)


def test_models_that_are_quantized_here_are_not_saved(plain, tmp_path):
    model, weights = load(plain[LLAMA], "fp8")
    with pytest.raises(InvalidParameterError, match="save_pretrained writes no quantized models"):
        models.save_pretrained(model, weights, tmp_path / "out")
    with pytest.raises(InvalidParameterError, match=r"'fp8'.*, which no config.json says; save it without"):
        orbax_checkpoint.save(model, weights, tmp_path / "out")
    assert not (tmp_path / "out" / orbax_checkpoint.PARAMS).exists()


def test_quantized_weights_saved_by_orbax_are_read_back_to_the_bit_and_damage_is_named(plain, tmp_path):
    model, weights = load(quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", "fp8-blocks"))
    orbax_checkpoint.save(model, weights, tmp_path / "saved")
    assert same_bits(load(tmp_path / "saved")[1], weights)

    named = dict(zip(model.parameter_names, weights, strict=True))
    name = "layers.1.mlp.down"
    scales = named[f"{name}_scale"]
    for number, (changed, said) in enumerate(
        (
            ({f"{name}_scale": scales.at[3, 1].set(np.nan)}, f"'{name}_scale' has a scale that cannot be"),
            ({f"{name}_scale": scales.at[3, 1].set(0)}, f"'{name}_scale' has a scale that cannot be"),
            ({name: named[name].at[5, 7].set(np.nan)}, f"'{name}' has NaN"),
            ({name: named[name].astype(jnp.bfloat16)}, f"'{name}' has type bfloat16, config.json implies float8_e4m3"),
        )
    ):
        orbax_checkpoint.save(model, [*(named | changed).values()], tmp_path / f"{number}")
        with pytest.raises(CheckpointError, match=f"parameter {said}"):
            load(tmp_path / f"{number}")


def test_orbax_weights_that_are_rounded_while_they_are_read_are_those_of_safetensors(plain, tmp_path):
    model, weights = load(plain[LLAMA])
    orbax_checkpoint.save(model, weights, tmp_path / "saved")
    rounded, wanted = load(plain[LLAMA], "fp8")
    assert same_bits(load(tmp_path / "saved", "fp8")[1], wanted)
    assert len(rounded.quantized) == 8

    named = dict(zip(model.parameter_names, weights, strict=True))
    name = "layers.1.mlp.down"
    bad = named | {name: named[name].at[3, 1].set(np.inf)}
    orbax_checkpoint.save(model, [*bad.values()], tmp_path / "bad")
    with pytest.raises(CheckpointError, match=f"parameter '{name}' has NaN or infinity"):
        load(tmp_path / "bad", "fp8")


def same_bits(ours: models.Weights, theirs: models.Weights) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a).view("u1"), np.asarray(b).view("u1")) for a, b in pairs
    )


def test_biases_of_zeros_that_gptq_writes_for_layers_without_are_passed_over(plain, tmp_path):
    directory = quantized_checkpoint(plain[QWEN3], tmp_path / "quantized", "gptq-act-order")
    file = directory / "model.safetensors"
    before = load(directory)[1]
    tensors = read_tensors(file)
    name = "model.layers.0.mlp.down_proj"
    outputs = tensors[f"{name}.qweight"].shape[1]
    write_tensors(file, tensors | {f"{name}.bias": np.zeros((outputs,), np.float16)})
    for one, other in zip(before, load(directory)[1], strict=True):
        np.testing.assert_array_equal(one, other)
    write_tensors(file, tensors | {f"{name}.bias": np.ones((outputs,), np.float16)})
    with pytest.raises(CheckpointError, match=r"down_proj\.bias.* has no place"):
        load(directory)


def test_a_configuration_keeps_the_scheme_that_its_config_json_does_not_say(plain):
    directory = plain[LLAMA]
    assert options_of(models.ModelConfig.from_directory(directory, quantization="fp8")) == {"quantization": "fp8"}
    assert options_of(models.ModelConfig.from_directory(directory)) == {}
    assert options_of({"architectures": ["LlamaForCausalLM"]}) == {}


def test_arrays_given_to_a_model_that_rounds_become_what_loading_makes_of_a_checkpoint_of_them(tmp_path):
    """Of a mixture of experts, from a trainer's in bfloat16, in every form."""
    directory = plain_checkpoint("qwen3-moe", tmp_path / "plain", num_hidden_layers=1)
    model, weights = load(directory)
    models.save_pretrained(model, weights, tmp_path / "saved", "bfloat16")
    shutil.copy(directory / "config.json", tmp_path / "saved")
    weights = tuple(array.astype(jnp.bfloat16) for array in weights)
    rounded, wanted = load(tmp_path / "saved", "fp8")
    updater = WeightUpdater(rounded, rounded, None)
    by_name = WeightUpdater(model, model, None).read(weights, "huggingface")
    forms = (weights, model.module(weights), by_name, {name: np.asarray(one) for name, one in by_name.items()})
    for given in forms:
        update = updater.match(given)
        assert update.is_complete
        assert same_bits(updater.apply(zeros(rounded), update), wanted)
    integers, wanted = load(tmp_path / "saved", "int8")
    updater = WeightUpdater(integers, integers, None)
    assert same_bits(updater.apply(zeros(integers), updater.match(weights)), wanted)


def test_a_part_of_joined_products_is_rounded_and_the_rest_keeps_its_bits(plain):
    (model, weights), (rounded, old) = load(plain[LLAMA]), load(plain[LLAMA], "fp8")
    updater = WeightUpdater(rounded, rounded, None)
    tensors = WeightUpdater(model, model, None).read(weights, "huggingface")
    chosen = {name: 3 * array for name, array in tensors.items() if "1.self_attn.k_proj" in name or "up_proj" in name}
    assert len(chosen) == 6  # with biases
    update = updater.match(chosen, partial=True)
    assert not update.is_complete
    mixed = updater.apply(tuple(map(jnp.copy, old)), update)
    assert same_bits(mixed, updater.apply(zeros(rounded), updater.match(tensors | chosen)))
    assert not same_bits(mixed, old)


def test_arrays_that_cannot_be_rounded_and_quantized_checkpoints_are_refused_by_name(plain, tmp_path):
    (model, weights), (rounded, _) = load(plain[LLAMA]), load(plain[LLAMA], "fp8")
    updater = WeightUpdater(rounded, rounded, None)
    tensors = WeightUpdater(model, model, None).read(weights, "huggingface")
    name = "model.layers.1.mlp.down_proj.weight"
    for number in (np.nan, -np.inf):
        bad = tensors[name].at[3, 5].set(number)
        for array in (bad, np.asarray(bad), np.asarray(bad, jnp.bfloat16), np.asarray(bad, np.float64)):
            with pytest.raises(InvalidParameterError, match=f"'{name}' has NaN or infinity.*Nothing was changed"):
                updater.match(tensors | {name: array})
    too_large = np.asarray(tensors[name], np.float64) * 1e300  # for float32
    with pytest.raises(InvalidParameterError, match=f"'{name}' has NaN or infinity"):
        updater.match(tensors | {name: too_large})
    with pytest.raises(InvalidParameterError, match=rf"'{name}' has shape \(3,\), the model implies"):
        updater.match(tensors | {name: jnp.zeros(3)})
    own = dict(zip(rounded.parameter_names, zeros(rounded), strict=True))
    with pytest.raises(InvalidParameterError, match=r"there is no place for 'layers\.0\.attention\.out_scale'"):
        updater.match(own)
    with pytest.raises(InvalidParameterError, match="weights_as is not supported for weights in fp8"):
        updater.read(tuple(own.values()), "huggingface")
    stored = load(quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", "awq"))[0]
    with pytest.raises(InvalidParameterError, match="update_weights is not supported for a checkpoint in AWQ"):
        WeightUpdater(stored, stored, None).match(tensors)


def zeros(model: models.Model) -> models.Weights:
    return tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in model.abstract_weights)


def test_the_scheme_is_part_of_what_tells_programs_apart(plain, tmp_path):
    configs = [models.ModelConfig.from_directory(plain[LLAMA], quantization=asked) for asked in (None, "fp8")]
    configs.append(models.ModelConfig.from_directory(plain[LLAMA], quantization="int8"))
    for layout in ("fp8-static", "fp8-dynamic", "fp8-weights", "int8-static", "int8-dynamic", "int8-weights"):
        configs.append(models.ModelConfig.from_directory(quantized_checkpoint(plain[LLAMA], tmp_path / layout, layout)))
    assert len({repr(config) for config in configs}) == len(configs)


def test_an_order_of_inputs_that_cannot_be_is_named(plain, tmp_path):
    directory = quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", "gptq-act-order")
    good = read_tensors(directory / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.g_idx"
    for change, said in ((-1, "does not put 32 inputs into each of 5 groups"), (7, "does not put 32 inputs")):
        bad = good[name].copy()
        bad[0] = change
        write_tensors(directory / "model.safetensors", good | {name: bad})
        with pytest.raises(CheckpointError, match=f"'{name}' {said}"):
            load(directory)
    write_tensors(directory / "model.safetensors", good | {name: good[name][::-1]})
    with pytest.raises(CheckpointError, match="orders its inputs in another way"):
        load(directory)
    unsaid = quantized_checkpoint(plain[LLAMA], tmp_path / "unsaid", "gptq-act-order", desc_act=False)
    with pytest.raises(CheckpointError, match=r"reorders inputs, which config.json says nothing of"):
        load(unsaid)


@pytest.mark.parametrize("layout", ["gptq-act-order", "gptq-8-bits"])
def test_a_group_of_inputs_with_a_huge_number_takes_no_memory_for_all_groups_below_it(layout, plain, tmp_path):
    directory = quantized_checkpoint(plain[LLAMA], tmp_path / "quantized", layout)
    tensors, name = read_tensors(directory / "model.safetensors"), "model.layers.1.self_attn.k_proj.g_idx"
    tensors[name][0] = 2**31 - 1
    write_tensors(directory / "model.safetensors", tensors)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"'{name}' does not put 32 inputs"):
            load(directory)
        assert tracemalloc.get_traced_memory()[1] < 2**30
    finally:
        tracemalloc.stop()


def test_eight_bits_that_are_not_supported_are_refused_by_name(plain, tmp_path):
    llama, gptq = plain[LLAMA], PUBLISHED["gptq-8-bits"]
    assert "sym=False is not supported; supported: True" in refusal(llama, **gptq.config | {"sym": False})
    for layout, part, entries, said in (
        ("int8-dynamic", "weights", {"symmetric": False}, "weights: symmetric=False is not supported"),
        ("int8-dynamic", "weights", {"strategy": "group"}, "strategy='group' is not supported; supported: 'tensor',"),
        ("int8-dynamic", "input_activations", {"symmetric": False}, "input_activations: symmetric=False is not"),
        ("int8-dynamic", "input_activations", {"strategy": "tensor"}, "strategy='tensor' is not supported"),
        ("int8-dynamic", "input_activations", {"num_bits": 4}, "num_bits=4 is not supported; supported: 8"),
        ("int8-weights", "weights", {"symmetric": False}, "weights: symmetric=False is not supported"),
        ("int8-weights", "weights", {"num_bits": 3}, "'pack-quantized' with weights of 3 bits (int) is not supported"),
    ):
        config = PUBLISHED[layout].config
        group = config["config_groups"]["group_0"]
        changed = {"group_0": group | {part: group[part] | entries}}
        assert said in refusal(llama, **config | {"config_groups": changed})

    directory = quantized_checkpoint(llama, tmp_path / "quantized", "gptq-8-bits")
    good = read_tensors(directory / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.qzeros"
    write_tensors(directory / "model.safetensors", good | {name: good[name] + 1})
    with pytest.raises(
        CheckpointError, match=rf"'{name}' has zero points other than 128, which are not supported in 8"
    ):
        load(directory)
    name = "model.layers.1.self_attn.k_proj.qweight"
    write_tensors(directory / "model.safetensors", good | {name: good[name][:-1]})
    with pytest.raises(CheckpointError, match=f"'{name}' has shape"):
        load(directory)


def test_four_bit_layouts_that_are_not_supported_are_refused_by_name(plain):
    llama, awq, gptq = plain[LLAMA], PUBLISHED["awq"].config, PUBLISHED["gptq"].config
    assert "bits=3 is not supported; supported: 4, 8" in refusal(llama, **gptq | {"bits": 3})
    assert "bits=8 is not supported; supported: 4." in refusal(llama, **awq | {"bits": 8})
    assert "group_size=16 is not supported; supported: 32, 64, 128, -1" in refusal(llama, **awq | {"group_size": 16})
    assert "version='gemv'" in refusal(llama, **awq | {"version": "gemv"})
    wider = {"-:.*attn.*": {}, "+:.*down_proj.*": {"bits": 8}}
    assert "dynamic: +:.*down_proj.*=" in refusal(llama, **gptq | {"dynamic": wider})
    assert "dynamic has '-:(', which is no regular expression" in refusal(llama, **gptq | {"dynamic": {"-:(": {}}})
    assert "dynamic must be an object" in refusal(llama, **gptq | {"dynamic": ["-:.*"]})
    config = models.ModelConfig.from_directory(llama).source | {"quantization_config": awq | {"group_size": 128}}
    with pytest.raises(UnsupportedModelError, match=r"q_proj has 256 outputs and 160 inputs; AWQ is supported for"):
        models.build(models.ModelConfig.from_dict(config), "float32")


def test_an_engine_takes_the_names_of_schemes_and_no_others():
    assert EngineArgs(quantization="fp8").quantization == "fp8"
    with pytest.raises(InvalidParameterError, match=r"quantization must be .*fp8.*awq.*got 'int3'"):
        EngineArgs(quantization="int3")
    assert EngineArgs(quantization="fp8").differs_from(EngineArgs()) == "quantization"
