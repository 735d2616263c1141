"""Mixtures of experts in few bits: their weights are those of the published layouts, and they stay in as many bits."""

from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import models
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from jpaged.models.config import inner_columns
from jpaged.models.experts import Routing, mix, split_by_experts
from jpaged.models.linear import LinearLayout
from jpaged.models.loading import checkpoint
from jpaged.models.parameters import Constant
from jpaged.models.quantization.grouped import QuantizedProduct, Values
from jpaged.models.sharding import shard_of
from jpaged.pallas_kernels import route_tokens
from tests.models.quantization.test_checkpoints import dequantized, greedy, load
from tests.support.quantized import (
    PUBLISHED,
    dequantized_checkpoint,
    plain_checkpoint,
    quantized_checkpoint,
    read_tensors,
    write_tensors,
)
from tests.tiny_models import tiny_model, write_tiny_model

SPARSE = ("mixtral", "qwen3-moe", "deepseek-v3")
CASES = [
    ("fp8-dynamic", "mixtral"),
    ("fp8-static", "qwen3-moe"),
    ("fp8-blocks", "qwen3-moe"),
    ("fp8-blocks", "deepseek-v3"),
    ("awq", "mixtral"),
    ("gptq", "qwen3-moe"),
    ("int4-symmetric", "qwen3-moe"),
    ("int8-dynamic", "deepseek-v3"),
    ("nvfp4", "mixtral"),
    ("modelopt-nvfp4", "qwen3-moe"),
    ("gptq-act-order", "mixtral"),
    ("fp8-static", "deepseek-v3"),
    ("awq", "deepseek-v3"),
    ("gptq-act-order", "deepseek-v3"),
    ("nvfp4", "deepseek-v3"),
]
GREEDY = [("fp8-blocks", "deepseek-v3"), ("int4-symmetric", "qwen3-moe"), ("modelopt-nvfp4", "qwen3-moe")]
GREEDY += [("gptq-act-order", "mixtral")]
PLAIN = {"deepseek-v3": {"to_keys", "to_values"}}
"""What is read as plain numbers."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("plain")
    sizes = {"moe_intermediate_size": 64, "kv_lora_rank": 64, "q_lora_rank": 64}
    return {name: plain_checkpoint(name, directory / name, **sizes) for name in SPARSE}


def experts_of(model: models.Model) -> set[str]:
    return {name for name in model.quantized if ".experts." in name}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_experts_are_those_of_the_published_layout_to_the_bit_and_stay_small(layout, name, plain, tmp_path):
    """Routers are never quantized, though DeepSeek's quantization_config does not say so."""
    ours = load(quantized_checkpoint(plain[name], tmp_path / "quantized", layout))
    model, weights = load(dequantized_checkpoint(plain[name], tmp_path / "dequantized", layout))
    assert len(experts_of(ours[0])) == 2 * sum("router" in name for name in model.parameter_names if "gate" in name)
    assert {name.rpartition(".")[2] for name in ours[0].dequantized} == PLAIN.get(name, set())
    assert ours[0].num_parameters == model.num_parameters
    for parameter, array in zip(ours[0].parameter_names, ours[1], strict=True):
        if parameter in experts_of(ours[0]):
            eight = jnp.float8_e4m3fn if "fp8" in layout else jnp.int8 if "8" in layout else jnp.uint8
            assert array.dtype == eight
    found = dequantized(*ours)
    assert set(found) == set(model.parameter_names)
    for parameter, expected in zip(model.parameter_names, weights, strict=True):
        np.testing.assert_array_equal(found[parameter], np.asarray(expected), err_msg=parameter)
    if (layout, name) in GREEDY:
        assert greedy(*ours) == greedy(model, weights)


@pytest.mark.parametrize(
    ("name", "quantization"), [("mixtral", "fp8"), ("gpt-oss-20b-style", "fp8"), ("gpt-oss-20b-style", "int8")]
)
def test_online_each_output_of_each_expert_has_a_scale(name, quantization, tmp_path):
    """gpt-oss has all experts in one tensor, inputs before outputs, and gate and up in turns."""
    directory = write_tiny_model(tiny_model(name), tmp_path / name, use_torch=False)
    model, weights = load(directory, quantization)
    plain_model, plain_weights = load(directory)
    found = dequantized(model, weights)
    assert len(experts_of(model)) == 2 * model.config.num_layers
    for parameter, expected in zip(plain_model.parameter_names, plain_weights, strict=True):
        if parameter not in model.quantized:
            np.testing.assert_array_equal(found[parameter], expected, err_msg=parameter)
            continue
        axes = model.quantized[parameter].input_axes
        largest = np.abs(expected).max(axis=axes, keepdims=True)
        np.testing.assert_allclose(np.abs(found[parameter]).max(axis=axes, keepdims=True), largest, rtol=1e-6)
        error = np.abs(found[parameter] - expected)
        half = largest / 127 / 2 if quantization == "int8" else np.maximum(np.abs(expected) / 16, largest / 448 / 1024)
        assert np.all(error <= half * 1.001), parameter


@pytest.mark.parametrize("name", ["gpt-oss-20b-style", "mixtral"])
def test_large_tensors_are_quantized_in_runs_of_their_experts_or_outputs(name, tmp_path, monkeypatch):
    directory = write_tiny_model(tiny_model(name), tmp_path / name, use_torch=False)
    model, weights = load(directory, "fp8")
    most = 8192
    monkeypatch.setattr(checkpoint, "MOST_BYTES", most)
    for ours, theirs in zip(load(directory, "fp8")[1], weights, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    stored = checkpoint.match(model, checkpoint.find_tensors(directory))
    largest = max(tensor.num_bytes for tensors in stored.values() for tensor in tensors.values())
    each = max(64 * 2 * model.config.expert_size * 4, most) if "gpt" in name else most  # an expert is never cut
    assert max(read for _, _, read in checkpoint.read_each(model, stored, None)) <= each < largest


def test_random_experts_are_of_the_usual_size(plain, tmp_path):
    for layout in ("online", "int4-symmetric", "nvfp4"):
        directory = plain["qwen3-moe"]
        if layout != "online":
            directory = quantized_checkpoint(directory, tmp_path / layout, layout)
        config = models.ModelConfig.from_directory(directory, quantization="fp8" if layout == "online" else None)
        model = models.build(config, "float32")
        found = dequantized(model, model.init(seed=1))
        for name in experts_of(model):
            assert 0.8 * model.quantized[name].std < found[name].std() < 1.2 * model.quantized[name].std


def damaged(directory: Path, name: str, value: np.ndarray | None) -> Path:
    tensors = read_tensors(directory / "model.safetensors")
    tensors = {key: one for key, one in tensors.items() if key != name} | ({} if value is None else {name: value})
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def test_a_tensor_of_an_expert_that_cannot_be_served_is_named(plain, tmp_path):
    directory = quantized_checkpoint(plain["qwen3-moe"], tmp_path / "quantized", "fp8-blocks")
    name = "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"
    good = read_tensors(directory / "model.safetensors")[name]
    with pytest.raises(CheckpointError, match=rf"'{name}' has a scale of -1, which must be above 0"):
        load(damaged(directory, name, -np.ones_like(good)))
    with pytest.raises(CheckpointError, match=rf"lacks tensor '{name}'"):
        load(damaged(directory, name, None))


def test_gate_and_up_of_an_expert_must_order_their_inputs_alike(plain, tmp_path):
    directory = quantized_checkpoint(plain["mixtral"], tmp_path / "quantized", "gptq-act-order")
    name = "model.layers.0.block_sparse_moe.experts.3.w3.g_idx"
    order = read_tensors(directory / "model.safetensors")[name]
    with pytest.raises(CheckpointError, match=r"experts\.3\.w3 orders its inputs in another way"):
        load(damaged(directory, name, order[::-1]))


def test_static_scales_of_experts_activations_are_not_read_and_need_not_be_there(plain, tmp_path):
    """An expert that no token of a calibration went to may have a scale of 0, or none."""
    directory = quantized_checkpoint(plain["qwen3-moe"], tmp_path / "quantized", "fp8-static")
    expected = load(directory)[1]
    prefix = "model.layers.0.mlp.experts"
    damaged(directory, f"{prefix}.3.up_proj.input_scale", np.zeros(1, np.float32))
    damaged(directory, f"{prefix}.2.down_proj.input_scale", None)
    for ours, theirs in zip(load(directory)[1], expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    attention = "model.layers.0.self_attn.q_proj.input_scale"
    with pytest.raises(CheckpointError, match=f"'{attention}' has a scale of 0, which must be above 0"):
        load(damaged(directory, attention, np.zeros(1, np.float32)))


def test_what_experts_cannot_be_in_is_refused_by_name(plain, tmp_path):
    def refusal(name: str, layout: str, **entries: object) -> str:
        source = models.ModelConfig.from_directory(plain[name]).source if name in plain else tiny_model(name).config
        config = dict(source) | {"quantization_config": PUBLISHED[layout].config | entries}
        with pytest.raises((UnsupportedModelError, InvalidParameterError)) as caught:
            models.build(models.ModelConfig.from_dict(config), "float32")
        return str(caught.value)

    fused = refusal("gpt-oss-20b-style", "fbgemm")
    assert "experts.down_proj has all experts in one tensor, which is not supported in fbgemm_fp8" in fused
    some = refusal("mixtral", "fp8-dynamic", ignore=["re:.*experts.3.*"])
    assert "covers model.layers.0.block_sparse_moe.experts.0.w2 and not " in some


def test_experts_that_a_compressor_took_apart_are_refused_by_name(tmp_path):
    """compressed-tensors' of Llama 4, whose plain checkpoints have one tensor for all experts of a layer."""
    directory = write_tiny_model(tiny_model("llama4-scout-style"), tmp_path / "plain", use_torch=False)
    directory = quantized_checkpoint(directory, tmp_path / "quantized", "fp8-dynamic")
    tensors = read_tensors(directory / "model.safetensors")
    apart = {name.replace("experts.down_proj", "experts.0.down_proj.weight"): one for name, one in tensors.items()}
    write_tensors(directory / "model.safetensors", apart)
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors .*experts\.down_proj.*tensors of each expert are not"):
        load(directory)


def test_scales_are_split_as_the_experts_are_and_each_device_has_whole_groups(plain):
    def shard(layout: str, *, whole: bool) -> models.Model:
        source = dict(models.ModelConfig.from_directory(plain["qwen3-moe"]).source)
        config = models.ModelConfig.from_dict(source | {"quantization_config": PUBLISHED[layout].config})
        config = split_by_experts(config) if whole else config
        return shard_of(models.build(config, "float32"), 2)

    def shapes(model: models.Model) -> dict[str, tuple[int, ...]]:
        named = zip(model.parameter_names, model.abstract_weights, strict=True)
        return {name.rpartition(".")[2]: leaf.shape for name, leaf in named if name.startswith("layers.1.mlp.experts")}

    split = shapes(shard("int4-symmetric", whole=False))
    assert split == {"gate_up": (8, 2, 32, 80), "gate_up_scale": (8, 2, 32, 5)} | {
        "down": (8, 160, 16),
        "down_scale": (8, 160, 1),
    }
    by_expert = shapes(shard("fp8-blocks", whole=True))
    assert by_expert["gate_up"] == (4, 2, 64, 160)
    assert by_expert["gate_up_scale"] == (4, 2, 64, 2)
    assert by_expert["down_scale"] == (4, 160, 1)
    padded = shapes(shard("fp8-blocks", whole=False))
    assert padded["gate_up"] == (8, 2, 64, 160)
    assert padded["down"] == (8, 160, 64)
    assert padded["down_scale"] == (8, 160, 1)


@pytest.mark.parametrize(
    ("inner", "shards", "group", "columns"),
    [(2880, 2, 32, 1440), (2880, 4, 32, 736), (2880, 8, 32, 384), (768, 4, 128, 256), (768, 4, 1, 192), (90, 4, 1, 24)],
)
def test_columns_of_gpt_oss_and_qwen3_are_filled_up_to_whole_groups_alone(inner, shards, group, columns):
    assert inner_columns(inner, shards, group) == columns


@pytest.mark.parametrize(("in_order", "weighted_inputs", "biased"), product((True, False), repeat=3))
def test_rows_that_come_sorted_give_what_rows_sorted_here_give(in_order, weighted_inputs, biased):
    """The product reads them where they are, unless something is to be done with them first."""
    experts, hidden, inner = 6, 24, 16
    rng = np.random.default_rng(4)
    values = Values("fp8", None, jnp.float8_e4m3fn, Constant(0.0), act_order=not in_order)

    def product_of(inputs: int, outputs: tuple[int, ...]) -> QuantizedProduct:
        layout = LinearLayout((inputs,), outputs, 1.0, None, 0, False, experts)
        kernel = jnp.asarray(rng.standard_normal((experts, layout.output_size, inputs)), jnp.float8_e4m3fn)
        scale = jnp.asarray(rng.uniform(0.1, 0.3, (experts, layout.output_size, 1)), jnp.float32)
        order = np.stack([rng.permutation(inputs) for _ in range(experts)]).astype(np.int32)
        return QuantizedProduct(layout, values, kernel, scale, None, None, None if in_order else jnp.asarray(order))

    products = product_of(hidden, (2, inner)), product_of(inner, (hidden,))
    x = jnp.asarray(rng.standard_normal((7, hidden)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((7, experts)), jnp.float32)
    chosen, weights, rows = route_tokens(logits, Routing(per_token=3), live=jnp.arange(7) < 5, backend="xla")
    biases = jnp.asarray(rng.standard_normal((experts, 2, inner))), jnp.asarray(rng.standard_normal((experts, hidden)))
    found = [
        mix(
            x,
            products,
            experts,
            chosen,
            weights,
            activation="silu",
            backend="xla",
            biases=biases if biased else None,
            weighted_inputs=weighted_inputs,
            rows=known,
        )
        for known in (rows, None)
    ]
    np.testing.assert_array_equal(*map(np.asarray, found))
    assert np.all(np.asarray(found[0])[:5].any(axis=1))
    assert not np.asarray(found[0])[5:].any()
