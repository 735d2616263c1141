"""`kv_idle_release_s`: engines that share one device's memory, each using what the other does not need."""

import time
from collections.abc import Iterator

import pytest

from jpaged import EngineArgs, LLMEngine, PoolingParams, RequestOutputKind, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.cache.virtual.memfd import Memory
from tests.parallel.tensor_parallel_runs import ARGS, NUM_TOKENS, prompts, run
from tests.tiny_models import tiny_model, write_tiny_model

IDLE_S = 0.05


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """On a device that has room for most of what one of them may have."""
    directory = write_tiny_model(tiny_model("qwen3-layer-types"), tmp_path_factory.mktemp("model"), use_torch=False)
    options = {name: getattr(ARGS, name) for name in ARGS.__dataclass_fields__} | {"model": str(directory)}
    args = EngineArgs(**options | {"kv_cache_layout": "virtual", "kv_idle_release_s": IDLE_S, "block_size": 1})
    both = LLMEngine(args), LLMEngine(args)
    drivers = [engine.startup.runner.memory._ranges[0].driver for engine in both]
    least = [driver.memory.num_used for driver in drivers]
    card = Memory(drivers[0].memory.num_bytes * 6 // 10, sum(least))
    for driver in drivers:
        driver.memory = card
    yield both
    for engine in both:
        engine.close()
    assert card.num_used == 0


def params(seed: int) -> SamplingParams:
    """As `run` has them."""
    return SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, output_kind=RequestOutputKind.FINAL_ONLY
    )


def rest_until_small(engine: LLMEngine) -> int:
    """Bytes that its pool keeps."""
    memory = engine.startup.runner.memory
    least = (engine.core.scheduler.elastic._least + 1) * engine.startup.memory.block
    end = time.monotonic() + 30.0
    while memory.backed_bytes != least and time.monotonic() < end:
        engine.rest()
    return memory.backed_bytes


def test_idle_memory_of_one_engine_serves_the_other_and_comes_back(engines):
    first, second = engines
    expected = run(first, prompts())
    held = first.startup.runner.memory.backed_bytes
    kept = rest_until_small(first)
    assert kept < held
    for engine in (second, first, second):
        assert run(engine, prompts()) == expected
        assert engine.startup.runner.memory.backed_bytes > kept
        assert rest_until_small(engine) == kept
        engine.core.check_integrity()
        engine.startup.runner.memory.mapper.check_integrity()


def test_steps_that_bring_nothing_but_embeddings_count_as_read(engines):
    """Or pages that go back while an engine is busy with them would wait for a step that brings a token."""
    engine = engines[0]
    mapper = engine.startup.runner.memory.mapper
    first = mapper.num_steps
    for i in range(20):
        engine.add_request(str(i), list(range(3 + i, 23 + i)), PoolingParams())
    while engine.has_unfinished_requests():
        engine.step()
    assert mapper.num_steps - first >= 12  # of 32 tokens
    assert mapper._newest_read == mapper.num_steps - 1
    rest_until_small(engine)


def test_both_serve_at_once_when_memory_is_short(engines):
    first, second = engines
    expected = run(first, prompts())
    for engine in engines:
        for i, prompt in enumerate(prompts()):
            engine.add_request(str(i), prompt, params(i))
    tokens: list[dict[int, list[int]]] = [{}, {}]
    while first.has_unfinished_requests() or second.has_unfinished_requests():
        for found, engine in zip(tokens, engines, strict=True):
            for output in engine.step() if engine.has_unfinished_requests() else ():
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert [[found[i] for i in range(len(expected))] for found in tokens] == [expected, expected]


def test_an_engine_that_slept_begins_small_and_grows(engines):
    engine = engines[0]
    expected = run(engine, prompts())
    rest_until_small(engines[1])  # or there may be nothing left to grow by
    assert engine.sleep()
    engine.wake_up()
    memory = engine.startup.runner.memory
    woken = memory.backed_bytes
    assert run(engine, prompts()) == expected
    assert memory.backed_bytes > woken
    rest_until_small(engine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_layout": "paged", "kv_idle_release_s": 1.0}, "needs kv_cache_layout='virtual'"),
        ({"kv_cache_layout": "virtual", "kv_idle_release_s": 0}, "kv_idle_release_s must be"),
        ({"kv_cache_layout": "virtual", "kv_idle_release_s": "soon"}, "kv_idle_release_s must be"),
        ({"virtual_page_layout": "per-layer"}, "virtual_page_layout='per-layer' needs kv_cache_layout='virtual'"),
    ],
)
def test_what_the_layout_does_not_do_is_refused_by_name(options, said):
    with pytest.raises(InvalidParameterError, match=said):
        EngineArgs(**options)
