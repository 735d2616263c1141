"""The throughput benchmark on a tiny model, and the workloads it draws."""

import json

import jsonschema
import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.models import CONFIGS, model_directory
from jpaged.bench.structured import unseen_schema
from jpaged.bench.throughput import main
from jpaged.bench.workloads import DATASETS, make_requests
from jpaged.models import ModelConfig, build
from tests.bench import small_engine


@small_engine.GROUP
def test_a_run_is_measured_and_written_down(tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = [*small_engine.options(tmp_path), "--dataset", "random", "--dataset", "shared-prefix"]
    arguments += [
        "--prefix-len",
        "40",
        "--num-prompts",
        "6",
        "--input-len",
        "10",
        "--output-len",
        "5",
        "--runs",
        "2",
        "--json",
        str(file),
    ]
    assert main(arguments) == 0
    report = json.loads(file.read_text())
    for result, input_len in zip(report["results"], (10, 50), strict=True):
        assert (result["input_tokens"], result["output_tokens"]) == (6 * input_len, 30)
        assert len(result["seconds"]) == 2
        assert 0.3 < result["kv_utilization"] < 1  # sequences of 11 to 55 tokens in blocks of 16
        assert result["output_tokens_per_s"] == pytest.approx(30 / np.median(result["seconds"]))
    assert report["environment"]["device"] == "cpu"
    assert "output tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_workload_is_the_same_for_the_same_seed_and_within_the_vocabulary(dataset):
    first, again = (make_requests(dataset, 50, 1000, seed=3) for _ in range(2))
    assert first == again
    assert first != make_requests(dataset, 50, 1000, seed=4)
    assert all(0 <= token < 1000 for request in first for token in request.prompt_token_ids)
    assert all(request.output_len > 0 for request in first)


@pytest.mark.parametrize(("dataset", "inputs", "outputs"), [("sharegpt-like", 161, 338), ("alpaca-like", 19, 58)])
def test_traces_have_the_mean_lengths_of_the_published_ones(dataset, inputs, outputs):
    requests = make_requests(dataset, 20_000, 10)
    assert np.mean([len(r.prompt_token_ids) for r in requests]) == pytest.approx(inputs, rel=0.05)  # clipping costs 3 %
    assert np.mean([r.output_len for r in requests]) == pytest.approx(outputs, rel=0.1)  # and 8 % here


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3.5-9b", 8.95),
        ("opt-125m", 0.125),
        ("opt-13b", 12.85),
    ],
)
def test_named_models_have_the_published_number_of_parameters(name, billions):
    assert name in CONFIGS
    config = ModelConfig.from_directory(model_directory(name))
    assert build(config).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


@small_engine.GROUP
def test_a_workload_is_measured_with_and_without_a_schema(tmp_path, capsys):
    file = tmp_path / "figures.json"
    sizes = [
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "64",
        "--decode-buckets",
        "16",
        "--token-buckets",
        "64",
    ]
    lengths = ["--num-prompts", "4", "--input-len", "6", "--output-len", "40", "--runs", "1", "--temperature", "1"]
    assert main([*sizes, *lengths, "--structured", "half", "--unseen-schemas", "3", "--json", str(file)]) == 0
    free, half, unseen = json.loads(file.read_text())["results"]
    assert free["output_tokens"] == 160
    assert (half["num_prompts"], half["num_constrained"]) == (4, 2)
    (run,) = half["runs"]
    assert run["free"]["output_tokens"] == half["free_alone"]["output_tokens"] == 80
    assert 2 <= run["constrained"]["output_tokens"] <= 80
    assert run["output_tokens"] == run["constrained"]["output_tokens"] + 80
    assert half["same_lengths"]["output_tokens"] == run["output_tokens"]
    assert half["same_lengths"]["free"]["output_tokens"] == 80
    assert half["output_tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"])
    assert unseen["count"] == 3
    assert unseen["first_token_ms"]["max"] >= unseen["first_token_ms"]["p50"] > 0 < unseen["first_token_free_ms"]["p50"]
    with pytest.raises(InvalidParameterError, match="--unseen-schemas needs --structured"):
        main([*sizes, "--unseen-schemas", "3"])
    printed = capsys.readouterr().out
    assert "2 of 4 requests with a schema" in printed
    assert "with unseen schema" in printed


def test_unseen_schemas_are_schemas_and_no_two_of_them_are_alike():
    rng = np.random.default_rng(0)
    schemas = [unseen_schema(rng) for _ in range(50)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    texts = [json.dumps(schema) for schema in schemas]
    assert len(set(texts)) == 50
    assert 10 < np.median([text.count("field_") for text in texts]) / 2 < 60


def test_a_configuration_without_a_tokenizer_needs_one_for_a_schema():
    with pytest.raises(InvalidParameterError, match="--structured needs --tokenizer"):
        main(["--model", "qwen3-0.6b", "--load-format", "dummy", "--structured", "all"])


@small_engine.GROUP
def test_a_workload_that_the_engine_cannot_take_is_refused_before_any_is_measured(tmp_path, capsys):
    longest = 2 * small_engine.MAX_LENGTH
    arguments = [*small_engine.options(tmp_path), "--num-prompts", "2", "--input-len", str(longest - 5)]
    with pytest.raises(InvalidParameterError, match=f"'random' has {longest} tokens, .*--max-model-len {longest} or"):
        main([*arguments, "--output-len", "5"])
    assert "output tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--temperature", "1"), ("--num-prompts", "256"), ("--dataset", "sharegpt-like")])
def test_options_that_a_workload_sets_are_refused_beside_it(option):
    """Also where they are what they would be without a workload."""
    with pytest.raises(InvalidParameterError, match=f"{option[0]} does not go with --workload batch-32, which says it"):
        main(["--model", "qwen3-0.6b", "--load-format", "dummy", "--workload", "batch-32", *option])


def test_lengths_are_refused_beside_a_file_of_conversations():
    with pytest.raises(InvalidParameterError, match="--input-len does not go with --dataset-path, which says it"):
        main(["--model", "qwen3-0.6b", "--dataset-path", "conversations.json", "--input-len", "8"])
