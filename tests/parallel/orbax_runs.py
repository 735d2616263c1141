"""What `test_orbax` has done in a process of eight devices."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jpaged import LLMEngine
from jpaged.cli import main
from jpaged.executor.mesh import DeviceMesh
from jpaged.models import ModelConfig, build
from jpaged.models.loading import checkpoint
from jpaged.models.sharding import load_sharded
from tests.parallel.models import eight_heads
from tests.parallel.tensor_parallel_runs import ARGS, prompts, run
from tests.support.quantized import plain_checkpoint, quantized_checkpoint
from tests.tiny_models import write_tiny_model


def converted(names: list[str]) -> dict[str, Any]:
    """For each model: whether shards of its converted checkpoint are those of the original, by degree."""
    same: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            source, target = Path(directory) / "hf", Path(directory) / "orbax"
            write_tiny_model(eight_heads(name), source, use_torch=False)
            (source / "tokenizer.json").write_text("{}")
            assert main(["convert", str(source), str(target), "--quiet"]) == 0
            model = build(ModelConfig.from_directory(target), "auto")
            same[name] = {
                "files": sorted(path.name for path in target.iterdir()),
                "1": _same(checkpoint.load(model, source), checkpoint.load(model, target)),
            }
            for degree in (2, 8):
                mesh = DeviceMesh(jax.devices()[:degree])
                shard = mesh.shard_of(model)
                loaded = [load_sharded(model, shard, mesh.mesh, path) for path in (source, target)]
                same[name][str(degree)] = _same(*loaded)
    return same


def trained() -> dict[str, Any]:
    """Tokens from a checkpoint as a training job writes it: the module's state, and a tree with an optimizer's too."""
    case = eight_heads("qwen2-window")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tiny_model(case, directory / "hf", use_torch=False)
        model = build(ModelConfig.from_directory(directory / "hf"), "float32")
        state = nnx.state(model.module(checkpoint.load(model, directory / "hf")), nnx.Param)
        trees = {"state": state, "pure": {"params": nnx.to_pure_dict(state), "opt_state": {"count": np.array(3)}}}
        tokens: dict[str, Any] = {}
        tokens["hf"] = run(LLMEngine(replace(ARGS, model=str(directory / "hf"))), prompts())
        for kind, tree in trees.items():
            target = directory / kind
            target.mkdir()
            (target / "config.json").write_bytes((directory / "hf" / "config.json").read_bytes())
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(target / "params", tree)
            args = replace(ARGS, model=str(target), tensor_parallel_size=4)
            tokens[kind] = run(LLMEngine(args), prompts())
        return tokens


def _same(ours: Any, theirs: Any) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.sharding == b.sharding and np.array_equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def quantized(layouts: list[str], degree: int) -> list[str]:
    """Where the shards of quantized weights in Orbax are not those of the same weights in safetensors.

    layouts: "fp8" of weights that are rounded while they are read; behind a model's name and a slash of that one.
    """
    found = []
    for one in layouts:
        name, _, layout = one.rpartition("/")
        with tempfile.TemporaryDirectory() as directory:
            source, target = Path(directory) / "plain", Path(directory) / "orbax"
            sizes = {"num_hidden_layers": 1} | ({"moe_intermediate_size": 64} if name else {})
            plain_checkpoint(name or "llama-biases", source, **sizes)
            asked = "fp8" if layout == "fp8" else None
            if asked is None:
                source = quantized_checkpoint(source, Path(directory) / "quantized", layout)
            assert main(["convert", str(source), str(target), "--quiet"]) == 0
            model = build(ModelConfig.from_directory(target, quantization=asked), "float32")
            assert model.quantized
            mesh = DeviceMesh(jax.devices()[:degree])
            shard = mesh.shard_of(model)
            loaded = [load_sharded(model, shard, mesh.mesh, path) for path in (source, target)]
            for parameter, ours, theirs in zip(model.parameter_names, *loaded, strict=True):
                if not _same([ours], [theirs]):
                    found.append(f"{one}: {parameter}")
    return found
