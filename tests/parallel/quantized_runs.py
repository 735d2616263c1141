"""What `tests/parallel/test_quantized.py` has done in a process of eight devices."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import LLM, LLMEngine, SamplingParams, models
from jpaged.executor.mesh import DeviceMesh, pick_devices
from jpaged.models.experts import split_by_experts
from jpaged.models.loading import checkpoint
from jpaged.models.quantization import int8
from jpaged.models.sharding import load_sharded, shard_of
from tests.models.loading import test_mxfp4
from tests.models.quantization import test_checkpoints
from tests.parallel.family_runs import ARGS, MOST_BYTES, greedy_tokens
from tests.support.quantized import (
    dequantized_checkpoint,
    plain_checkpoint,
    quantized_checkpoint,
    read_tensors,
    write_tensors,
)


def tokens(*layouts: str) -> dict[str, dict[str, Any]]:
    """By layout, the engine's greedy tokens: of dequantized weights on one device, of quantized ones on two.

    layouts: of a Qwen3; or behind a model's name and a slash of that one.
    """
    found = {}
    for one in layouts:
        name, _, layout = one.rpartition("/")
        with tempfile.TemporaryDirectory() as directory:
            plain = plain_checkpoint(name or "qwen3-layer-types", Path(directory) / "plain")
            found[one] = _tokens(plain, Path(directory), layout)
    return found


def integers() -> dict[str, list[int]]:
    """Greedy tokens of W8A8 on two devices, and of one model whose products are of floats with the same values."""

    def in_floats(x: Any, w: Any, scale: Any, input_scale: Any, *, dtype: Any, **_: Any) -> Any:
        rounded = jnp.clip(jnp.round(x / input_scale), -128, 127) * input_scale
        return jnp.dot(rounded, (w * scale).T, precision="highest").astype(dtype)

    with tempfile.TemporaryDirectory() as directory:
        plain = plain_checkpoint("qwen3-layer-types", Path(directory) / "plain")
        source = quantized_checkpoint(plain, Path(directory) / "quantized", "int8-static")
        sampling = SamplingParams(temperature=0, max_tokens=test_checkpoints.LENGTH // 2, ignore_eos=True)
        given = test_checkpoints.prompt()[: test_checkpoints.LENGTH // 2].tolist()
        with LLM(**vars(replace(ARGS, model=str(source), tensor_parallel_size=2))) as llm:
            (output,) = llm.generate([given], sampling, use_tqdm=False)
        with mock.patch.object(int8, "int8_product", in_floats):
            expected = test_checkpoints.greedy(*test_checkpoints.load(source))
        return {"two": list(output.outputs[0].token_ids), "exact": expected[len(given) - 1 : -1]}


def experts(layout: str) -> dict[str, Any]:
    """Likewise, of a mixture of experts, whose columns or experts two devices share."""
    with tempfile.TemporaryDirectory() as directory:
        plain = plain_checkpoint("qwen3-moe", Path(directory) / "plain", moe_intermediate_size=64)
        return _tokens(plain, Path(directory), layout, "whole")


def hybrid() -> dict[str, Any]:
    """Greedy tokens of a Qwen3-Next in FP8 blocks, which four devices share, and of its dequantized weights."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"num_hidden_layers": 2, "full_attention_interval": 2, "moe_intermediate_size": 64}
        sizes |= {"num_key_value_heads": 4, "shared_expert_intermediate_size": 48, "num_experts": 8}
        plain = plain_checkpoint("qwen3-next", Path(directory) / "plain", **sizes)
        source = quantized_checkpoint(plain, Path(directory) / "quantized", "fp8-blocks")
        exact = dequantized_checkpoint(plain, Path(directory) / "exact", "fp8-blocks")
        args = replace(ARGS, model=str(source))
        engines = {"4": replace(args, tensor_parallel_size=4), "exact": replace(args, model=str(exact))}
        return {name: greedy_tokens(LLMEngine(one)) for name, one in engines.items()}


def padded_experts(layout: str) -> dict[str, Any]:
    """Greedy tokens by number of devices, of experts whose groups that share a scale the devices do not divide.

    layout: "mxfp4" for gpt-oss, whose experts have five groups of 32 columns; else of a Qwen3-MoE with three groups.
    """
    with tempfile.TemporaryDirectory() as directory:
        if layout == "mxfp4":
            config = test_mxfp4.CONFIG | {"intermediate_size": 160, "num_key_value_heads": 4}
            source = test_mxfp4.write(Path(directory) / layout, test_mxfp4.stored_tensors(config)[0], config)
        else:
            inner = 384 if layout == "fp8-blocks" else 96
            sizes = {"moe_intermediate_size": inner, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 1}
            plain = plain_checkpoint("qwen3-moe", Path(directory) / "plain", **sizes)
            source = quantized_checkpoint(plain, Path(directory) / layout, layout)
        args = replace(ARGS, model=str(source))
        return {str(number): greedy_tokens(LLMEngine(replace(args, tensor_parallel_size=number))) for number in (1, 4)}


def experts_in_act_order() -> dict[str, Any]:
    """Greedy tokens on four devices, and of the dequantized weights, of which attention's are not quantized."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"moe_intermediate_size": 64, "num_key_value_heads": 4, "num_hidden_layers": 1}
        plain = plain_checkpoint("qwen3-moe", Path(directory) / "plain", **sizes)
        ignored = {"modules_to_not_convert": ["self_attn"]}
        source = quantized_checkpoint(plain, Path(directory) / "quantized", "gptq-act-order", **ignored)
        exact = dequantized_checkpoint(plain, Path(directory) / "exact", "gptq-act-order")
        tensors, whole = (read_tensors(path / "model.safetensors") for path in (source, exact))
        attention = {
            name: one for name, one in read_tensors(plain / "model.safetensors").items() if "self_attn" in name
        }
        for path, found in ((source, tensors), (exact, whole)):
            kept = {name: one for name, one in found.items() if "self_attn" not in name}
            write_tensors(path / "model.safetensors", kept | attention)
        args = replace(ARGS, model=str(source))
        split = replace(args, enable_expert_parallel=True, tensor_parallel_size=4)
        engines = {"4": split, "exact": replace(args, model=str(exact))}
        return {name: greedy_tokens(LLMEngine(one)) for name, one in engines.items()}


def shared_blocks() -> dict[str, Any]:
    """Greedy tokens of FP8 in blocks on four devices, and of the dequantized weights."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"intermediate_size": 212, "head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
        plain = plain_checkpoint("llama-biases", Path(directory) / "plain", **sizes)
        source = quantized_checkpoint(plain, Path(directory) / "quantized", "fp8-blocks")
        exact = dequantized_checkpoint(plain, Path(directory) / "exact", "fp8-blocks")
        args = replace(ARGS, model=str(source))
        engines = {"4": replace(args, tensor_parallel_size=4), "exact": replace(args, model=str(exact))}
        return {name: greedy_tokens(LLMEngine(one)) for name, one in engines.items()}


def _tokens(plain: Path, directory: Path, layout: str, *further: str) -> dict[str, Any]:
    quantized = str(quantized_checkpoint(plain, directory / layout, layout))
    exact = str(dequantized_checkpoint(plain, directory / f"{layout}-exact", layout))
    engines = {
        "exact": replace(ARGS, model=exact),
        "two": replace(ARGS, model=quantized, tensor_parallel_size=2),
    }
    if further:
        engines |= {further[0]: replace(engines["two"], enable_expert_parallel=True)}
    return {name: greedy_tokens(LLMEngine(args)) for name, args in engines.items()}


def fp8_cache() -> dict[str, Any]:
    """Greedy tokens with keys and values in FP8, and their scales, on one device and on four."""
    with tempfile.TemporaryDirectory() as directory:
        args = replace(
            ARGS,
            model=str(plain_checkpoint("qwen3-layer-types", Path(directory))),
            kv_cache_dtype="fp8",
            calculate_kv_scales=True,
        )
        engines = [LLMEngine(replace(args, tensor_parallel_size=number)) for number in (1, 4)]
        return {
            "tokens": [greedy_tokens(one) for one in engines],
            "scales": [one.startup.config.kv_scales for one in engines],
        }


def shards_equal_the_whole(*layouts: str) -> list[str]:
    """Parameters of quantized layers whose shards, side by side, are not the whole ones. Tensors of shards are read in
    runs, where they can be. layouts: behind a model's name
    and a slash of that one, whose experts stay whole in "fp8-blocks"."""
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        for layout in layouts:
            name, _, layout = layout.rpartition("/")
            sizes = {"moe_intermediate_size": 64} if name else {}
            plain = Path(directory) / f"{name}-plain"
            plain = plain if plain.exists() else plain_checkpoint(name or "llama-biases", plain, **sizes)
            online = layout == "online"
            source = plain if online else quantized_checkpoint(plain, Path(directory) / f"{name}-{layout}", layout)
            config = models.ModelConfig.from_directory(source, quantization="fp8" if online else None)
            config = split_by_experts(config) if name and layout == "fp8-blocks" else config
            model = models.build(config, "float32")
            whole = models.load(model, source)
            mesh = DeviceMesh(pick_devices(2))
            with mock.patch.object(checkpoint, "MOST_BYTES", MOST_BYTES):
                split = load_sharded(model, shard_of(model, 2), mesh.mesh, source)
            for parameter, one, other in zip(model.parameter_names, whole, split, strict=True):
                if one.shape == other.shape and not np.array_equal(np.asarray(one), np.asarray(jax.device_get(other))):
                    wrong.append(f"{layout}: {parameter}")
                if one.shape != other.shape and "embedding" not in parameter and "lm_head" not in parameter:
                    wrong.append(f"{layout}: {parameter} has shape {other.shape}")
    return wrong
