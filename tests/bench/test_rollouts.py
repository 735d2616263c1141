"""The benchmark of updates and sleep on a tiny model: what it says must be so."""

import json

import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.rollouts import main
from tests.bench import small_engine

OPTIONS = ["--rounds", "3", "--streams", "6", "--output-len", "12"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Which the benchmark changes."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")


@small_engine.GROUP
def test_updates_and_sleep_compile_nothing_keep_memory_and_lose_nothing(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main([*small_engine.options(tmp_path), *OPTIONS, "--json", str(file)]) == 0
    figures = {figure["part"]: figure for figure in json.loads(file.read_text())["results"]}
    for form in ("huggingface", "parameters", "module"):
        figure = figures[f"update, {form}"]
        assert 0 < figure["update_ms_least"] <= figure["update_ms_median"] <= figure["update_ms_most"]
        assert figure["compiled_after_round_2"] == 0
        assert figure["bytes_in_use_at_the_end"] <= figure["bytes_in_use_after_round_2"]
        assert figure["different_outputs"] == 2
    half = figures["update, every second tensor"]
    assert 0 < half["bytes"] < figures["update, huggingface"]["bytes"]
    assert half["compiled_after_round_2"] == 0
    assert figures["the first weights again"]["tokens_are_the_same"]
    given_back = [figures[f"sleep({level})"]["bytes_given_back"] for level in (1, 2)]
    assert 0 < given_back[0] < given_back[1]
    for level in (1, 2):
        assert figures[f"sleep({level})"]["tokens_are_the_same"]
        assert figures[f"sleep({level})"]["compiled_after_the_first"] == 0
    streams = figures["update in the midst of streams"]
    assert (streams["streams"], streams["updates"], streams["lost"]) == (6, 2, 0)
    out = capsys.readouterr().out
    assert f"update in the midst of streams: streams 6, updates 2, recompute_ms {streams['recompute_ms']:.1f}" in out


@small_engine.GROUP
def test_an_engine_in_another_process_takes_weights_from_this_one(tmp_path):
    file = tmp_path / "figures.json"
    options = [*small_engine.options(tmp_path), "--rounds", "3", "--engine-process"]
    assert main([*options, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["results"]
    assert [figure["part"].endswith("keep") for figure in figures] == [False, True]
    for figure in figures:
        assert figure["way"] == "through the host"
        assert 0 < figure["update_ms_least"] <= figure["update_ms_most"]
        parts = sum(figure[f"{part}_ms"] for part in ("copy", "open", "write", "close"))
        assert 0 < parts < 2 * figure["update_ms_most"]
        assert figure["gib_per_s"] * figure["update_ms_median"] / 1000 == pytest.approx(figure["bytes"] / 2**30)


def test_numbers_out_of_range_and_replicas_are_refused():
    with pytest.raises(InvalidParameterError, match="--rounds must be at least 3, got 2"):
        main(["--rounds", "2"])
    with pytest.raises(InvalidParameterError, match="--streams and --output-len go with an engine in this process"):
        main(["--engine-process", "--streams", "5"])
    with pytest.raises(InvalidParameterError, match="--data-parallel-size must be 1"):
        main(["--data-parallel-size", "2"])
