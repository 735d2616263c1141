"""`jpaged bench steps` on a tiny model: which steps it times."""

from types import SimpleNamespace

import pytest

from jpaged import EngineArgs, LLMEngine
from jpaged.api.errors import InvalidParameterError
from jpaged.bench import steps
from jpaged.bench.models import model_directory
from jpaged.models import ModelConfig, build
from tests.bench import small_engine

pytestmark = small_engine.GROUP
NUM_SEQS = small_engine.MAX_NUM_SEQS


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One that computes no more tokens in a step than it decodes sequences."""
    model = small_engine.write_model(tmp_path_factory.mktemp("steps"))
    sizes = {"max_num_seqs": NUM_SEQS, "max_num_batched_tokens": NUM_SEQS}
    return LLMEngine(EngineArgs(model=str(model), **sizes, skip_tokenizer_init=True, verbose=False))


def test_timed_steps_are_decode_steps_of_all_sequences_however_long_their_prompts_take(engine, monkeypatch, tmp_path):
    args = steps.parser().parse_args(["--model", "m", "--steps", "16", "--context", "30", "--trace", str(tmp_path)])
    steps.measure(engine, NUM_SEQS, args)  # which compiles what it runs; to compile takes the time, too
    runner, plans, timed = engine.startup.runner, [], []
    execute, clock = runner.execute, steps.time.perf_counter

    def recording_execute(plan):
        plans.append(plan)
        return execute(plan)

    def noting_clock():
        timed.append(len(plans))
        return clock()

    monkeypatch.setattr(runner, "execute", recording_execute)
    monkeypatch.setattr(steps.time, "perf_counter", noting_clock)
    figure = steps.measure(engine, NUM_SEQS, args)  # of the last prompt's steps each has room for one token
    assert figure["wall_ms"] > 0
    assert timed[-1] - timed[0] == 16
    recorded = 8
    measured = plans[timed[0] : timed[-1] + recorded]
    assert {(len(plan.decode_slots), len(plan.chunks)) for plan in measured} == {(NUM_SEQS, 0)}


def test_sequences_last_while_prompts_are_computed_and_steps_measured():
    engine = SimpleNamespace(startup=SimpleNamespace(config=SimpleNamespace(token_buckets=(64, 512))))
    args = SimpleNamespace(context=512, steps=48)
    assert 148 + 2 * 48 < steps.output_len(engine, 128, args) < 148 + 2 * 48 + 32
    assert 1 + 2 * 48 < steps.output_len(engine, 1, args) < 1 + 2 * 48 + 32


@pytest.mark.parametrize("num_devices", [1, 2])
def test_kernels_and_floor_are_those_of_one_device(engine, num_devices, monkeypatch):
    """As if each device had run two kernels in each of the 8 recorded steps, of 0.5 ms each."""
    monkeypatch.setattr(steps, "kernel_times", lambda profiles: {"k": (8.0 * num_devices, 16 * num_devices)})
    given = ["--model", "m", "--steps", "16", "--context", "8", "--tensor-parallel-size", str(num_devices)]
    rates = ["--read-gb-per-s", "1", "--tflops", "1000"]
    figure = steps.measure(engine, NUM_SEQS, steps.parser().parse_args([*given, *rates]))
    assert figure["kernels"] == [{"name": "k", "ms": 1.0, "count": 2.0}]
    assert figure["floor_ms"] == pytest.approx(sum(steps.step_work(engine, NUM_SEQS, 8)[:3]) / 1e6 / num_devices)


def test_sizes_whose_sequences_would_end_on_the_way_are_refused_or_left_out(engine):
    most = engine.max_model_len
    given = ["--model", "m", "--context", str(most // 2), "--steps", "8", "--batch", "1", "--batch", str(NUM_SEQS)]
    asked = steps.parser().parse_args(given)
    longest = most // 2 + steps.output_len(engine, NUM_SEQS, asked)
    with pytest.raises(InvalidParameterError, match=f"Batch {NUM_SEQS}: sequences grow to {longest} tokens"):
        steps.sizes_that_last(engine, asked.batch, asked)
    some = steps.parser().parse_args(["--model", "m", "--context", "8"])
    assert steps.sizes_that_last(engine, [1, NUM_SEQS], some) == [1, NUM_SEQS]
    others = SimpleNamespace(startup=engine.startup, max_model_len=8 + steps.output_len(engine, 1, some))
    assert steps.sizes_that_last(others, [1, NUM_SEQS], some) == [1]
    others.max_model_len -= 1
    with pytest.raises(InvalidParameterError, match="Batch 1: sequences grow to"):
        steps.sizes_that_last(others, [1, NUM_SEQS], some)


def test_more_sequences_than_decode_at_once_are_refused_before_anything_is_timed():
    engine = SimpleNamespace(startup=SimpleNamespace(config=SimpleNamespace(decode_buckets=(8, 256))))
    with pytest.raises(InvalidParameterError, match="--batch 257 is more than the 256 sequences"):
        steps.batch_sizes(engine, [1, 257])
    assert steps.batch_sizes(engine, [256, 3]) == [256, 3]
    assert steps.batch_sizes(engine, None) == [1, 32, 256]


def test_a_mixture_of_experts_reads_what_its_tokens_need():
    model = build(ModelConfig.from_directory(model_directory("qwen3-30b-a3b")))
    engine = SimpleNamespace(startup=SimpleNamespace(model=model, config=SimpleNamespace(kv_scales=None)))
    billions = [sum(steps.step_work(engine, batch, 0)[:3]) / 2e9 for batch in (1, 10_000)]
    assert billions == pytest.approx([3.35 - 0.31, 30.53 - 0.31], rel=0.01)  # "A3B", without the embedding


def test_the_floor_of_many_rows_is_that_of_their_operations():
    model = build(ModelConfig.from_directory(model_directory("qwen3-30b-a3b")))
    engine = SimpleNamespace(startup=SimpleNamespace(model=model, config=SimpleNamespace(kv_scales=None)))
    few, many = (steps.step_work(engine, batch, 0) for batch in (1, 10_000))
    assert few.floor_s(1e9, 1e15) == pytest.approx(sum(few[:3]) / 1e9)
    active = 2 * 3.35e9 - 2 * 0.31e9  # parameters of a token, without the embedding
    assert many.floor_s(1e15, 1e12) == pytest.approx(10_000 * active / 1e12, rel=0.01)
