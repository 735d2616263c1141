"""Weights on their way to engine processes: shared memory, an engine process that is killed, replicas in threads."""

import asyncio
import os
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import AsyncLLMEngine, EngineArgs, RequestOutputKind, SamplingParams
from jpaged.api.errors import EngineDeadError, EngineRestartingError, InvalidParameterError
from jpaged.models import ModelConfig, build
from jpaged.models.loading.live import WeightUpdater
from jpaged.processes.shared_weights import SharedWeights, map_arrays
from tests.processes.conftest import UUID
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda, on_device
from tests.support.fragile_engine import WEIGHTS_VARIABLE
from tests.test_update_weights import PROMPTS, Reference
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

NAME = "llama-biases"


def test_arrays_of_every_type_and_shape_come_through_shared_memory_as_they_are():
    rng = np.random.default_rng(0)
    given = {
        "bf16": jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16),
        "transposed": rng.normal(size=(4, 7)).astype(np.float32).T,
        "nested": {"half": jnp.ones(3, jnp.float16), 0: np.float32(2.5).reshape(())},
        "empty": np.zeros((0, 4), np.float32),
    }
    shared = SharedWeights(given)
    found = map_arrays(shared.path, shared.arrays)
    shared.close()
    shared.close()
    assert set(found) == shared.names == {"bf16", "transposed", "nested.half", "nested.0", "empty"}
    for name, array in found.items():
        first, _, second = name.partition(".")
        expected = given[first] if not second else given[first][int(second) if second.isdigit() else second]
        assert array.dtype == expected.dtype
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, np.asarray(expected))
    with pytest.raises(InvalidParameterError, match="cannot be mapped"):
        map_arrays(shared.path, shared.arrays)


def test_what_is_no_array_or_is_gone_is_named():
    gone = jnp.zeros(2)
    gone.delete()
    before = len(os.listdir("/proc/self/fd"))
    for weights, message in (
        ({"a": [1.0]}, "'a' is a list, not an array"),
        ({"a": jnp.zeros(2), "b": gone}, "'b' cannot be copied to the host: .*deleted"),
        ({"a": np.array([None, 1.0])}, "'a' has type object, not a number's"),
        ({"a": np.array(["1.0"])}, "'a' has type <U3, not a number's"),
        ({"a": np.zeros(2, "V4")}, "'a' has type .*V4, not a number's"),
        ({"a": np.zeros(2, [("b", "f4")])}, r"'a' has type \[\('b', '<f4'\)\], not a number's"),
        ({"a": np.zeros(2, ">f4")}, "'a' has type >f4, in another order of bytes"),
        ({"a": np.ma.masked_array([1.0, 2.0], [False, True])}, "'a' is masked"),
        ((jnp.zeros(2),), "weights must map names to arrays, got tuple"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            SharedWeights(weights)
    assert len(os.listdir("/proc/self/fd")) == before


def params(num_tokens: int) -> SamplingParams:
    kind = RequestOutputKind.CUMULATIVE
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind)


async def tokens_of(outputs) -> list[int]:
    async for output in outputs:
        last = output
    return list(last.outputs[0].token_ids)


def test_an_engine_process_takes_weights_amid_streams_pauses_and_has_them_still_when_it_was_killed(tmp_path: Path):
    directory = write_tiny_model(tiny_model(NAME), tmp_path, use_torch=False)
    model = build(ModelConfig.from_directory(directory), "float32")
    reference, read = Reference(model), WeightUpdater(model, model, None).read
    first, second = model.init(1), model.init(2)
    names = list(read(first, "huggingface"))

    async def greedy(engine: AsyncLLMEngine) -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(engine.generate(prompt, params(5))) for prompt in PROMPTS))

    async def scene() -> None:
        args = EngineArgs(model=str(directory), **TINY_ENGINE)
        async with AsyncLLMEngine(args) as engine:
            streams = [asyncio.ensure_future(tokens_of(engine.generate([7, i], params(100)))) for i in range(40)]
            while not (await engine.get_metrics()).num_running:
                await asyncio.sleep(0)
            await engine.update_weights(read(first, "state"))
            await engine.pause()
            late = asyncio.ensure_future(tokens_of(engine.generate(PROMPTS[0], params(5))))
            before = await engine.get_metrics()
            while not before.num_running + before.num_waiting:  # the streams may have ended before the pause
                before = await engine.get_metrics()
            for _ in range(3):
                assert (await engine.get_metrics()).generated_tokens == before.generated_tokens
            with pytest.raises(InvalidParameterError, match=r"missing are 'model\.embed_tokens\.weight'"):
                await engine.update_weights({name: read(second, "huggingface")[name] for name in names[1:]})
            assert not late.done()
            await engine.resume()
            assert all(len(tokens) == 100 for tokens in await asyncio.gather(*streams))
            assert await late == reference.greedy(first)[0]
            short = [asyncio.ensure_future(tokens_of(engine.generate([9, i], params(3 + i)))) for i in range(20)]
            while not all(stream.done() for stream in short):  # steps that bring the last two tokens are read at once
                await engine.pause()
                await engine.resume()
            assert [len(stream.result()) for stream in short] == list(range(3, 23))
            assert await greedy(engine) == reference.greedy(first)
            tensors = read(second, "huggingface")
            await engine.update_weights({name: tensors[name] for name in names[:9]}, partial=True, in_flight="continue")
            assert await engine.sleep(1)
            await engine.update_weights({name: tensors[name] for name in names[9:]}, partial=True)
            await engine.wake_up()
            assert await greedy(engine) == reference.greedy(second)
            pid = engine._fleet.processes.pids[0]
            os.kill(pid, signal.SIGKILL)
            while engine._fleet.processes.pids[0] == pid or engine.is_restarting:
                await asyncio.sleep(0.01)
            assert await greedy(engine) == reference.greedy(second)
            assert len(engine._kept.copies) == 3

    asyncio.run(scene())


def test_weights_on_the_device_come_whole_or_leave_the_old_ones_and_need_a_copy_for_a_process_started_again(
    tmp_path: Path, fragile_processes: None, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(WEIGHTS_VARIABLE, "4096")
    directory = write_tiny_model(tiny_model(NAME), tmp_path, use_torch=False)
    model = build(ModelConfig.from_directory(directory), "float32")
    reference, read = Reference(model), WeightUpdater(model, model, None).read
    first, second = model.init(1), model.init(2)
    parts = {"ready", "export", "open", "write", "close"}

    async def greedy(engine: AsyncLLMEngine) -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(engine.generate(prompt, params(5))) for prompt in PROMPTS))

    async def scene() -> None:
        async with AsyncLLMEngine(EngineArgs(model=str(directory), **TINY_ENGINE)) as engine:
            stream = asyncio.ensure_future(tokens_of(engine.generate([7, 8], params(100))))
            update = asyncio.ensure_future(engine.update_weights(on_device(cuda, read(first, "huggingface"))))
            while engine._update is None:
                await asyncio.sleep(0)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert not engine._update.done()
            await engine._update  # nobody waits for them any more, and they come
            assert engine.update_seconds.keys() == parts | {"copy"}
            assert await greedy(engine) == reference.greedy(first)
            assert len(await stream) == 100

            tensors = dict(read(second, "huggingface"))
            last = max(tensors)
            tensors[last] = tensors[last].at[0].set(4096.0)
            stream = asyncio.ensure_future(tokens_of(engine.generate([7, 9], params(100))))
            with pytest.raises(EngineRestartingError, match="those that it had"):  # there is no room for them
                await engine.update_weights(on_device(cuda, tensors))
            assert await greedy(engine) == reference.greedy(first)
            assert len(await stream) == 100
            assert engine.metrics.counted("engine_restarts", 0) == 1

            cuda.uuid = bytes(16)  # of a device that the engine process does not see
            fake_cuda.install(cuda)
            await engine.update_weights(on_device(cuda, read(second, "huggingface")), keep=False)
            assert engine.update_seconds.keys() == {"ready", "export", "copy", "open", "write", "close"}
            assert await greedy(engine) == reference.greedy(second)
            cuda.uuid = UUID
            fake_cuda.install(cuda)
            with pytest.raises(InvalidParameterError, match="there is no place for 'surplus'"):
                await engine.update_weights({"surplus": on_device(cuda, tensors)[last]}, keep=False)
            named = on_device(cuda, read(first, "huggingface"), created=False)
            await engine.update_weights(named, keep=False)
            assert engine.update_seconds.keys() == parts
            assert await greedy(engine) == reference.greedy(first)
            await engine.update_weights({last: named[last]}, partial=True)
            os.kill(engine._fleet.processes.pids[0], signal.SIGKILL)
            while engine.is_alive:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineDeadError, match=r"no copy was kept of its weights .*keep=False"):
                await greedy(engine)

    asyncio.run(scene())
