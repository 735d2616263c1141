"""What `test_starts` does in a process of eight devices."""

import tempfile
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax

from jpaged import EngineArgs, LLMEngine
from jpaged.executor.start import room
from jpaged.models import ModelConfig, Weights, build, save_pretrained
from tests.parallel.models import eight_heads
from tests.parallel.weights_runs import tokens_of
from tests.tiny_models import TINY_ENGINE


def moved_together(name: str, degrees: list[int]) -> dict[str, Any]:
    """By degree: tokens of an engine, and of one whose pool finds no room at first; and whether all of its weights were
    moved, and are where they were on the devices."""
    case, found = eight_heads(name), {}
    model = build(ModelConfig.from_dict(case.config), "float32")
    original = room.moved_together
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(model, model.init(0), directory)
        for degree in degrees:
            tokens, moved = [], []

            def move(weights: Weights, moved: list[bool] = moved) -> Weights:
                shardings = [one.sharding for one in weights]
                copies = original(weights)
                gone = [one.is_deleted() for one in weights]
                moved += [
                    is_gone and one.sharding == old for is_gone, one, old in zip(gone, copies, shardings, strict=True)
                ]
                return copies

            def plug(last: jax.Array) -> list[jax.Array]:
                one = room._bytes_beside(last, 64)
                assert one is not None
                assert {shard.device for shard in one.addressable_shards} == last.devices()
                assert {shard.data.nbytes for shard in one.addressable_shards} == {64}
                return [one]

            for fails in (False, True):
                error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
                made = mock.patch.object(room, "_made", side_effect=[error, mock.DEFAULT], wraps=room._made)
                with (
                    made if fails else nullcontext(),
                    mock.patch.object(room, "_is_movable", return_value=True),
                    mock.patch.object(room, "_plugs_below", plug),
                    mock.patch.object(room, "moved_together", move),
                ):
                    engine = LLMEngine(EngineArgs(model=directory, **TINY_ENGINE, tensor_parallel_size=degree))
                tokens.append(tokens_of(engine))
                engine.close()
            found[str(degree)] = {"tokens": tokens, "moved": all(moved) and len(moved) == len(model.starts)}
    return found
