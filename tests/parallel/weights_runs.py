"""What `test_update_weights` does in a process of eight devices."""

import tempfile
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged import EngineArgs, LLMEngine, SamplingParams
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.weights import zero_weights
from jpaged.models import Model, ModelConfig, Weights, build, save_pretrained
from jpaged.models.loading import live
from jpaged.models.loading.live import WeightUpdater
from jpaged.models.sharding import load_sharded
from tests.parallel.models import eight_heads
from tests.tiny_models import TINY_ENGINE, write_tiny_model

PROMPTS = [[5, 9, 2], [17, 3, 88, 41, 6, 7, 100, 23, 55]]


def tokens_of(engine: LLMEngine) -> list[list[int]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    return [found[str(i)] for i in range(len(PROMPTS))]


def spread(weights: Weights, devices: list[jax.Device]) -> Weights:
    """As a trainer might hold them: over these devices, along the first axis that they divide."""
    mesh = Mesh(np.array(devices), ("fsdp",))

    def one(array: jax.Array) -> jax.Array:
        axis = next((i for i, size in enumerate(array.shape) if size % len(devices) == 0), None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "fsdp")
        return jax.device_put(array, NamedSharding(mesh, spec))

    return tuple(map(one, weights))


def in_form(model: Model, weights: Weights, form: int) -> Any:
    """The weights by a checkpoint's names, by ours, or in a module."""
    if form == 0:
        return WeightUpdater(model, model, None).read(weights, "huggingface")
    return dict(zip(model.parameter_names, weights, strict=True)) if form == 1 else model.module(weights)


def updates(name: str, degrees: list[int], num_rounds: int) -> dict[str, Any]:
    """By degree: tokens after each update, whether weights are read back as they were given, and how many programs were
    compiled after the first round. A round has weights in three forms, on the engine's own devices and on others; the
    trainer has a mesh of all devices set meanwhile, or not."""
    case, found, compiled = eight_heads(name), {}, [0]
    model = build(ModelConfig.from_dict(case.config), "float32")

    def count(event: str, duration: float, **_: Any) -> None:
        compiled[0] += event == "/jax/core/compile/backend_compile_duration"

    everywhere = Mesh(np.array(jax.devices()), ("fsdp",))
    jax.monitoring.register_event_duration_secs_listener(count)
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(case, directory, use_torch=False)
        for degree in degrees:
            engine = LLMEngine(EngineArgs(model=directory, **TINY_ENGINE, tensor_parallel_size=degree))
            tokens, before = [], 0
            for i in range(6 * num_rounds):
                before = compiled[0] if i == 6 else before
                devices = jax.devices()[:degree] if i % 2 else jax.devices()[-2:]
                weights = in_form(model, spread(model.init(i), devices), i % 3)
                with jax.set_mesh(everywhere) if i % 4 > 1 else nullcontext():
                    engine.update_weights(weights)
                    tokens.append(tokens_of(engine))
            late = compiled[0] - before
            in_parts = {name: np.asarray(array) for name, array in in_form(model, model.init(i), 0).items()}
            engine.update_weights(jax.tree.map(np.zeros_like, in_parts))
            with mock.patch.object(live, "_COPIED_AT_ONCE", 1 << 10):
                engine.update_weights(in_parts)
            assert tokens_of(engine) == tokens[-1]
            with jax.set_mesh(everywhere):
                assert engine.sleep(2)
                engine.update_weights(weights)
                engine.wake_up()
                assert tokens_of(engine) == tokens[-1]
                engine.weights_as("huggingface")
            back, last = engine.weights_as("parameters"), model.init(6 * num_rounds - 1)
            same = all(np.array_equal(back[name], one) for name, one in zip(model.parameter_names, last, strict=True))
            found[str(degree)] = {"tokens": tokens, "same": same, "late": late}
            engine.close()
    return found


def differences(names: list[str], degrees: list[int]) -> list[str]:
    """Where weights given as arrays, by a checkpoint's names or by ours, are not those that `load_sharded` reads from a
    checkpoint of them. names: of models, with "/fp8" behind those whose weights are rounded.
    """
    found = []
    for name in names:
        config = eight_heads(name.removesuffix("/fp8")).config
        plain = build(ModelConfig.from_dict(config), "float32")
        rounds = name.endswith("/fp8")
        model = build(ModelConfig.from_dict(config, quantization="fp8"), "float32") if rounds else plain
        weights = plain.init(3)
        with tempfile.TemporaryDirectory() as directory:
            save_pretrained(plain, weights, directory)
            for degree in degrees:
                mesh = DeviceMesh(jax.devices()[:degree])
                shard = mesh.shard_of(model)
                loaded = load_sharded(model, shard, mesh.mesh, directory)
                updater = WeightUpdater(model, shard, mesh.mesh)
                for form in range(2):
                    update = updater.match(in_form(plain, weights, form))
                    placed = updater.apply(zero_weights(shard, mesh), update)
                    for parameter, one, other in zip(model.parameter_names, placed, loaded, strict=True):
                        if one.sharding != other.sharding or not np.array_equal(one, other):
                            found.append(f"{name}, degree {degree}, form {form}: {parameter}")
                if rounds:
                    continue
                back = updater.read(placed, "parameters")
                found += [
                    f"{name}: {p}" for p, one in zip(back, weights, strict=True) if not np.array_equal(back[p], one)
                ]
    return found
