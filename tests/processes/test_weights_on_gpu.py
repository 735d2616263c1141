"""Weights for an engine process of the same GPU: pytest -m gpu with JAX_PLATFORMS=cuda and
XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both have room."""

import asyncio
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged import AsyncLLMEngine, EngineArgs
from jpaged.models import ModelConfig, build
from jpaged.models.loading.live import WeightUpdater
from tests.processes.test_shared_weights import NAME, params, tokens_of
from tests.test_update_weights import PROMPTS
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model


@pytest.mark.gpu
def test_on_the_gpu_an_engine_process_has_the_tokens_of_a_fresh_one_whichever_way_its_weights_came(tmp_path: Path):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    directory = write_tiny_model(tiny_model(NAME), tmp_path, use_torch=False)
    model = build(ModelConfig.from_directory(directory), "float32")
    read = WeightUpdater(model, model, None).read
    first, second = (read(model.init(seed), "huggingface") for seed in (1, 2))
    args = EngineArgs(model=str(directory), **TINY_ENGINE | {"gpu_memory_utilization": 0.2})

    async def greedy(engine: AsyncLLMEngine) -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(engine.generate(prompt, params(12))) for prompt in PROMPTS))

    async def scene() -> None:
        async with AsyncLLMEngine(args) as engine:
            found = []
            for weights in (first, second):
                await engine.update_weights(weights, keep=False)
                assert engine.update_seconds.keys() == {"ready", "export", "open", "write", "close"}
                found.append(await greedy(engine))
            half = dict(list(first.items())[::2])
            await engine.update_weights(half, partial=True, keep=False)
            mixed = await greedy(engine)
        async with AsyncLLMEngine(args) as fresh:  # through the host, which a CPU's tests compare with a reference
            for weights, expected in ((first, found[0]), (second, found[1]), (second | half, mixed)):
                await fresh.update_weights({name: np.asarray(array) for name, array in weights.items()}, keep=False)
                assert "export" not in fresh.update_seconds
                assert await greedy(fresh) == expected
        assert found[0] != found[1] != mixed

    asyncio.run(scene())
