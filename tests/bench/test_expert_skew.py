"""Skewed routers of benchmarks: whom they pick, who is refused, and what steps then read at least."""

import argparse
import json
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine
from jpaged.api.errors import CheckpointError, InvalidParameterError
from jpaged.bench import latency, steps, throughput, vattention
from jpaged.bench.engine_options import engine_options
from jpaged.bench.models import CONFIGS, model_directory
from jpaged.bench.routing import experts_touched, popularity
from jpaged.executor.start.shapes import refuse_skew
from jpaged.models import Model, ModelConfig, Routing, SparseConfig, build
from jpaged.models.config import ROUTER_SKEW
from jpaged.models.experts import route
from tests.tiny_models import tiny_model, write_tiny_model


def read(directory: str) -> SparseConfig:
    config = ModelConfig.from_directory(directory)
    assert isinstance(config, SparseConfig)
    return config


def args(*options: str) -> argparse.Namespace:
    return throughput.parser().parse_args(list(options))


def test_the_option_reaches_the_model_s_routers() -> None:
    options = engine_options(args("--model", "qwen3-30b-a3b", "--load-format", "dummy", "--expert-skew", "1.2"))
    assert read(options["model"]).routing == read(model_directory("qwen3-30b-a3b")).routing.__class__(
        per_token=8, renormalized=True, zipf=1.2
    )
    assert "expert_skew" not in options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "qwen3-0.6b", "--load-format", "dummy"), "mixtures of experts, and Qwen3ForCausalLM is none"),
        (("--model", "qwen3.5-9b", "--load-format", "dummy"), "mixtures of experts, and Qwen3_5ForCausalLM is none"),
        (("--load-format", "dummy"), "is for mixtures of experts"),
        (("--model", "qwen3-30b-a3b"), "add --load-format dummy"),
    ],
)
def test_models_without_experts_and_checkpoints_are_refused(options: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        engine_options(args(*options, "--expert-skew", "1"))


@pytest.mark.parametrize("skew", ["0", "-1", "5", "nan"])
def test_a_skew_out_of_range_is_refused(skew: str) -> None:
    with pytest.raises(InvalidParameterError, match="--expert-skew must be above 0"):
        engine_options(args("--model", "qwen3-30b-a3b", "--load-format", "dummy", "--expert-skew", skew))


@pytest.mark.parametrize("benchmark", [latency, steps, vattention])
def test_benchmarks_that_report_no_load_of_experts_do_not_take_the_option(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert args("--expert-load").expert_load
    with pytest.raises(SystemExit):
        benchmark.parser().parse_args(["--model", "qwen3-30b-a3b", "--expert-load"])
    assert "unrecognized arguments: --expert-load" in capsys.readouterr().err


def test_an_engine_refuses_skewed_routers_of_weights_that_are_not_random(tmp_path: Path) -> None:
    directory = write_tiny_model(tiny_model("qwen3-moe-some-layers"), tmp_path, use_torch=False)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, ROUTER_SKEW: 1.5}))
    with pytest.raises(InvalidParameterError, match=f"{ROUTER_SKEW}=1.5 in config.json is for benchmarks"):
        LLMEngine(EngineArgs(model=str(directory), skip_tokenizer_init=True))
    refuse_skew(read(str(directory)), are_random=True)


@pytest.mark.parametrize("skew", ["1", True, -1, float("inf")])
def test_a_skew_that_is_no_positive_number_is_refused_by_name(skew: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{ROUTER_SKEW} must be a positive number"):
        ModelConfig.from_dict({**CONFIGS["qwen3-30b-a3b"], ROUTER_SKEW: skew})


def test_the_best_expert_is_as_often_each_as_its_rank_says() -> None:
    routing = Routing(per_token=1, zipf=1.0)
    found = np.sort(popularity(routing, 16))[::-1]
    wanted = 1 / np.arange(1, 17)
    np.testing.assert_allclose(found, wanted / wanted.sum(), rtol=0.1)


def test_experts_touched_are_those_that_tokens_routed_so_have() -> None:
    for zipf in (0.0, 1.0):
        routing = Routing(per_token=4, zipf=zipf)
        assert popularity(routing, 32).sum() == pytest.approx(4)
        logits = jnp.asarray(np.random.default_rng(1).standard_normal((16_384, 32)), jnp.float32)
        drawn = np.asarray(jax.jit(route, static_argnums=1)(routing.skewed(logits) if zipf else logits, routing)[0])
        for tokens in (1, 8, 64):
            mean = np.mean([len(np.unique(one)) for one in drawn.reshape(-1, 4 * tokens)])
            assert experts_touched(routing, 32, tokens) == pytest.approx(mean, rel=0.03)
    assert experts_touched(Routing(per_token=4, zipf=1.0), 32, 64) < experts_touched(Routing(per_token=4), 32, 64)


@cache
def model(name: str, num_layers: int, skew: float = 0.0) -> Model:
    """The first layers of a model named by `--model`."""
    config = {**CONFIGS[name], "num_hidden_layers": num_layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    return build(ModelConfig.from_dict({**config, ROUTER_SKEW: skew}))


def floor(of: Model, batch: int, context: int, **config: Any) -> int:
    startup = SimpleNamespace(model=of, config=SimpleNamespace(**{"kv_scales": None} | config))
    read = steps.step_work(SimpleNamespace(startup=startup), batch, context)[:3]  # type: ignore[arg-type]
    return round(sum(read))


def cache_bytes(of: Model, context: int, **config: Any) -> int:
    """Of one row's tokens: what they add to a step without any."""
    return floor(of, 1, context, **config) - floor(of, 1, 0, **config)


def test_windows_bound_what_their_layers_read() -> None:
    token = 2 * 8 * 64 * 2  # key and value, heads, columns, bytes
    gpt_oss = model("gpt-oss-20b", 2)
    assert cache_bytes(gpt_oss, 100) == 2 * 100 * token
    assert cache_bytes(gpt_oss, 5000) == (128 + 5000) * token
    token = 2 * 8 * 256 * 2
    assert cache_bytes(model("gemma-3-12b", 6), 5000) == (5 * 1024 + 5000) * token


def test_keys_and_values_in_8_bits_are_half_as_many_bytes() -> None:
    gpt_oss = model("gpt-oss-20b", 2)
    assert 2 * cache_bytes(gpt_oss, 1000, kv_scales=((1.0, 1.0),) * 2) == cache_bytes(gpt_oss, 1000)


def test_latents_are_read_once_for_all_heads() -> None:
    assert cache_bytes(model("deepseek-v2-lite", 3), 1000) == 3 * 1000 * (512 + 64) * 2


def test_states_are_read_and_written_whatever_the_context() -> None:
    hybrid = model("qwen3.5-9b", 4)  # three of four layers have states
    assert cache_bytes(hybrid, 1000) == 1000 * 2 * 4 * 256 * 2
    states = 3 * (4 * 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert floor(hybrid, 3, 0) - floor(hybrid, 1, 0) == 2 * 2 * states


def test_weights_are_those_of_the_experts_touched() -> None:
    gpt_oss, each = model("gpt-oss-20b", 2), 3 * 2880 * 2880 + 3 * 2880  # numbers of an expert
    others = gpt_oss.num_parameters - 201_088 * 2880 - 2 * 32 * each
    for batch in (1, 32):
        touched = 32 * (1 - (1 - 4 / 32) ** batch)
        assert floor(gpt_oss, batch, 0) == pytest.approx(2 * (others + 2 * touched * each), rel=1e-6)
    skewed = model("gpt-oss-20b", 2, skew=1.0)
    assert floor(skewed, 1, 0) == pytest.approx(floor(gpt_oss, 1, 0), rel=1e-3), "a token has as many"
    assert floor(skewed, 8, 0) < 0.9 * floor(gpt_oss, 8, 0)
    # DeepSeek's first layer has an MLP; its shared experts are read by every step.
    each, attention = 3 * 2048 * 1408, 2048 * 16 * 192 + 2048 * 576 + 512 + 16 * 512 * 256 + 16 * 128 * 2048
    others = 3 * (attention + 2 * 2048) + 3 * 2048 * 10_944 + 2 * (2 * each + 64 * 2048) + 2048 + 102_400 * 2048
    touched = 64 * (1 - (1 - 6 / 64) ** 32)
    found = floor(model("deepseek-v2-lite", 3), 32, 0)
    assert found == pytest.approx(2 * (others + 2 * touched * each), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "group", "layers", "parameters"),
    [("gpt-oss-20b", 2, 24, 20_914_757_184), ("gemma-3-12b", 6, 48, 11_766_034_176)],
)
def test_shapes_have_the_published_number_of_parameters(name: str, group: int, layers: int, parameters: int) -> None:
    """group: layers after which all is as before."""
    assert CONFIGS[name]["num_hidden_layers"] == layers
    one, two = model(name, group).num_parameters, model(name, 2 * group).num_parameters
    assert one + (layers // group - 1) * (two - one) == parameters
