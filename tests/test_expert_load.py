"""Tokens by expert: against transformers' routers, and what becomes of the counts up to `/metrics`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.expert_load import ExpertLoad, RecentCounts
from jpaged.engine.stats import EngineStats
from jpaged.executor.step.expert_load import ExpertLoadReader, add_counts
from jpaged.models import ModelConfig
from jpaged.processes.request_metrics import NUM_COLUMNS, RequestMetrics
from jpaged.serving.metrics import exposition
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, torch_model, write_tiny_model

CASE = tiny_model("qwen3-moe-some-layers")  # layer 1 of 4 has experts, 16 of them, 4 a token
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    directory = write_tiny_model(CASE, tmp_path_factory.mktemp("sparse"), use_torch=False)
    return LLMEngine(EngineArgs(model=str(directory), expert_load=True, **TINY_ENGINE))


def generate(engine: LLMEngine, prompts: list[list[int]]) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.transformers
def test_every_computed_token_counts_for_the_experts_that_transformers_router_picks(engine: LLMEngine) -> None:
    torch = pytest.importorskip("torch")
    before = engine.get_metrics().expert_load
    assert before is not None
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (1, 17, 60, 90)]  # in two steps of 128
    generated = generate(engine, prompts)

    model = torch_model(CASE)
    picked: list[Any] = []
    (router,) = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    router.register_forward_hook(lambda _, __, output: picked.append(output[-1]))
    with torch.no_grad():
        for prompt, output in zip(prompts, generated, strict=True):
            model(torch.tensor([prompt + output[:-1]]))  # the last token is sampled, not computed
    theirs = np.bincount(torch.cat(picked).flatten().numpy(), minlength=16)

    load = engine.get_metrics().expert_load
    assert load is not None
    assert load.layers == (1,)
    counted = np.array(load.tokens) - np.array(before.tokens)
    np.testing.assert_array_equal(counted[0], theirs)
    assert load.imbalance[0] == pytest.approx(max(load.recent[0]) / np.mean(load.recent[0]))
    assert engine.get_metrics(expert_load=False).expert_load is None


def test_an_engine_on_a_used_runner_begins_at_zero(engine: LLMEngine) -> None:
    generate(engine, [[5, 6, 7]])
    second = LLMEngine(engine.args, engine.startup)
    assert second.get_metrics().expert_load == ExpertLoad((1,), ((0,) * 16,), ((0,) * 16,))
    generate(second, [[5, 6, 7, 8]])
    load = second.get_metrics().expert_load
    assert load is not None
    assert sum(load.tokens[0]) == 4 * (4 + NUM_TOKENS - 1)


def test_a_model_without_experts_and_what_cannot_count_are_refused_by_name(engine: LLMEngine, tmp_path: Path) -> None:
    dense = write_tiny_model(tiny_model("qwen3-tied-d64"), tmp_path, use_torch=False)
    with pytest.raises(
        InvalidParameterError, match="expert_load=True is for mixtures of experts, and Qwen3ForCausalLM"
    ):
        LLMEngine(EngineArgs(model=str(dense), expert_load=True, **TINY_ENGINE))
    with pytest.raises(InvalidParameterError, match="batch_invariant=True cannot go with expert_load"):
        replace(engine.args, batch_invariant=True)


def test_while_steps_run_the_counts_that_have_arrived_are_told_and_nothing_waits() -> None:
    class Arriving:
        """A copy of the device's counts, which arrives when it is told to."""

        def __init__(self, count: int) -> None:
            self.count, self.has_arrived = count, False

        def is_ready(self) -> bool:
            return self.has_arrived

        def copy_to_host_async(self) -> None: ...

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            return np.full((2, 1, 16), self.count, np.uint32) * np.array([1, 0], np.uint32)[:, None, None]

    copies: list[Arriving] = []

    def copy() -> Any:
        copies.append(Arriving(10 + len(copies)))
        return copies[-1]

    reader = ExpertLoadReader(ModelConfig.from_dict(CASE.config), copy)
    assert [reader.read(wait=False).tokens[0][0] for _ in range(2)] == [0, 0]
    assert len(copies) == 2  # at its making, and one on its way
    copies[1].has_arrived = True
    assert reader.read(wait=False).tokens[0][0] == 1
    assert reader.read(wait=True).tokens[0][0] == 2


def test_totals_go_on_past_32_bits() -> None:
    totals = jnp.asarray([[[2**32 - 3, 5]], [[7, 0]]], jnp.uint32)
    low, high = np.asarray(add_counts(totals, jnp.asarray([[10, 1]])))
    assert (low.tolist(), high.tolist()) == ([[7, 6]], [[8, 0]])


def test_recent_counts_cover_one_to_two_windows() -> None:
    recent = RecentCounts(np.zeros(1, int), 0.0, window_s=60.0)
    told = [int(recent.since(np.array([t]), float(t))[0]) for t in range(10, 400, 10)]  # one count a second
    assert told[:6] == [10, 20, 30, 40, 50, 60]
    assert all(60 <= one <= 120 for one in told[5:])


@pytest.fixture
def loads() -> list[ExpertLoad]:
    return [ExpertLoad((1, 3), ((4, 0, 0, 8), (1, 1, 1, 1)), ((4, 0, 0, 8), (0, 0, 0, 0))) for _ in range(2)]


def test_imbalance_is_the_busiest_expert_over_the_mean_and_unused_are_those_without_tokens(
    loads: list[ExpertLoad],
) -> None:
    assert loads[0].imbalance == (8 / 3, 0.0)
    assert loads[0].num_unused == (2, 0)
    both = ExpertLoad.total(loads)
    assert both is not None
    assert both.tokens == ((8, 0, 0, 16), (2, 2, 2, 2))
    assert ExpertLoad.total([loads[0], None]) is None


def test_metrics_have_three_series_a_layer_however_many_experts_there_are(
    engine: LLMEngine, loads: list[ExpertLoad]
) -> None:
    stats = replace(engine.get_metrics(expert_load=False), expert_load=loads[0])

    def text(one: EngineStats) -> str:
        return exposition(RequestMetrics(np.zeros((1, 1, NUM_COLUMNS)), 0), "jpaged", "m", {0: one})

    of = 'model_name="m",engine="0",layer='
    found = [line for line in text(stats).splitlines() if "expert" in line and not line.startswith("#")]
    assert found == [
        f'jpaged:expert_tokens_total{{{of}"1"}} 12',
        f'jpaged:expert_tokens_total{{{of}"3"}} 4',
        f'jpaged:expert_load_imbalance{{{of}"1"}} {8 / 3!r}',
        f'jpaged:expert_load_imbalance{{{of}"3"}} 0',
        f'jpaged:experts_unused{{{of}"1"}} 2',
        f'jpaged:experts_unused{{{of}"3"}} 0',
    ]
    assert "expert" not in text(replace(stats, expert_load=None))
