"""What `tests/parallel/test_quantized.py` has done in a process of eight devices."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged import LLMEngine, models
from jpaged.executor.mesh import DeviceMesh, pick_devices
from jpaged.models.sharding import load_sharded, shard_of
from tests.parallel.family_runs import ARGS, _run
from tests.support.greedy_programs import greedy_programs
from tests.support.quantized import dequantized_checkpoint, plain_checkpoint, quantized_checkpoint


def tokens(*layouts: str) -> dict[str, dict[str, Any]]:
    """By layout, the engine's greedy tokens: of dequantized weights on one device, of quantized ones on one and two."""
    with tempfile.TemporaryDirectory() as directory, greedy_programs():
        plain = plain_checkpoint("qwen3-layer-types", Path(directory) / "plain")
        return {layout: _tokens(plain, Path(directory), layout) for layout in layouts}


def _tokens(plain: Path, directory: Path, layout: str) -> dict[str, Any]:
    quantized = str(quantized_checkpoint(plain, directory / layout, layout))
    exact = str(dequantized_checkpoint(plain, directory / f"{layout}-exact", layout))
    engines = {
        "exact": replace(ARGS, model=exact),
        "one": replace(ARGS, model=quantized),
        "two": replace(ARGS, model=quantized, tensor_parallel_size=2),
    }
    return {name: _run(LLMEngine(args)) for name, args in engines.items()}


def fp8_cache() -> dict[str, Any]:
    """Greedy tokens with keys and values in FP8, on one device and on two."""
    with tempfile.TemporaryDirectory() as directory, greedy_programs():
        args = replace(ARGS, model=str(plain_checkpoint("qwen3-layer-types", Path(directory))), kv_cache_dtype="fp8")
        return {
            "one": _run(LLMEngine(args)),
            "two": _run(LLMEngine(replace(args, tensor_parallel_size=2))),
        }


def shards_equal_the_whole(*layouts: str) -> list[str]:
    """Parameters of quantized layers whose shards, side by side, are not the whole ones; over two and four devices."""
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        plain = plain_checkpoint("llama-biases", Path(directory) / "plain")
        for layout in layouts:
            online = layout == "online"
            source = plain if online else quantized_checkpoint(plain, Path(directory) / layout, layout)
            config = models.ModelConfig.from_directory(source, quantization="fp8" if online else None)
            model = models.build(config, "float32")
            whole = models.load(model, source)
            mesh = DeviceMesh(pick_devices(2))
            split = load_sharded(model, shard_of(model, 2), mesh.mesh, source)
            for name, one, other in zip(model.parameter_names, whole, split, strict=True):
                if one.shape == other.shape and not np.array_equal(np.asarray(one), np.asarray(jax.device_get(other))):
                    wrong.append(f"{layout}: {name}")
                if one.shape != other.shape and "embedding" not in name and "lm_head" not in name:
                    wrong.append(f"{layout}: {name} has shape {other.shape}")
    return wrong
