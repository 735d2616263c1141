"""The latency benchmark on a tiny model, and the arithmetic of its percentiles."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.bench import latency
from jpaged.bench.latency import main
from jpaged.bench.percentiles import summary, table
from jpaged.processes.replicas import ReplicatedEngine
from tests.bench import small_engine


@small_engine.GROUP
def test_batches_are_timed_to_the_first_token_to_each_and_to_the_last(tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = [*small_engine.options(tmp_path), "--batch-size", "3", "--input-len", "10", "--output-len", "6"]
    arguments += ["--runs", "4", "--warm-up", "1", "--json", str(file)]
    assert main(arguments) == 0
    [figures] = json.loads(file.read_text())["results"]
    first, per_token, whole = figures["ttft_ms"], figures["tpot_ms"], figures["latency_ms"]
    for of in (first, per_token, whole):
        assert 0 < of["p50"] <= of["p90"] <= of["p99"] <= of["max"]
    # A batch's last token comes five intervals after its first, and then the host is told.
    assert first["mean"] + 5 * per_token["mean"] <= whole["mean"] * 1.001
    assert figures["output_tokens_per_s"] == pytest.approx(3 * 6 / (whole["mean"] / 1000))
    out = capsys.readouterr().out
    assert f"{whole['p99']:,.2f}" in out.splitlines()[-2]


def test_replicas_have_ended_before_the_report_names_the_device(tmp_path, monkeypatch):
    ended = []
    engine = object.__new__(ReplicatedEngine)
    engine.close = lambda: ended.append(True)
    monkeypatch.setattr(latency, "make_llm", lambda args: SimpleNamespace(engine=engine))
    percentiles = {"ttft_ms": None, "tpot_ms": None, "latency_ms": None}
    monkeypatch.setattr(latency, "measure", lambda llm, args: {"output_tokens_per_s": 1.0, **percentiles})
    monkeypatch.setattr(latency, "write_report", lambda *report: ended.append("written"))
    assert main(["--data-parallel-size", "2", "--json", str(tmp_path / "figures.json")]) == 0
    assert ended == [True, "written"]


def test_a_number_out_of_range_is_refused_by_name():
    with pytest.raises(InvalidParameterError, match="--batch-size must be at least 1, got 0"):
        main(["--batch-size", "0"])


def test_percentiles_are_numpys_and_a_weight_stands_for_repetitions():
    seconds = np.random.default_rng().exponential(size=500)
    figures = summary(seconds)
    assert figures is not None
    assert figures["p90"] == pytest.approx(1000 * np.percentile(seconds, 90))
    assert figures["mean"] == pytest.approx(1000 * seconds.mean())
    weights = np.random.default_rng().integers(0, 4, 500)
    repeated = np.repeat(seconds, weights)
    of_weighted = summary(seconds, weights)
    assert of_weighted is not None
    assert of_weighted["p50"] == pytest.approx(1000 * np.percentile(repeated, 50, method="inverted_cdf"))
    assert summary(np.array([])) is None
    assert "nothing" not in table({"nothing": None, "some": figures})
