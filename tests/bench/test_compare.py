"""Two reports side by side."""

import json

import pytest

from benchmarks.compare import main, ratios
from jpaged.api.errors import InvalidParameterError


def report(tmp_path, name, results, benchmark="throughput", **settings):
    file = tmp_path / name
    file.write_text(json.dumps({"benchmark": benchmark, "settings": settings, "results": results}))
    return str(file)


def test_cases_are_matched_by_name_and_numbers_by_theirs():
    a = [{"name": "x", "tokens_per_s": 100.0, "only_a": 1}, {"name": "y", "tokens_per_s": 10}, {"batch": 4, "ms": 2.0}]
    b = [{"name": "y", "tokens_per_s": 15, "zero": 0}, {"name": "x", "tokens_per_s": 50.0}, {"batch": 4, "ms": 1.0}]
    assert ratios(a, b) == {
        "x": {"tokens_per_s": (100.0, 50.0)},
        "y": {"tokens_per_s": (10.0, 15.0)},
        "4": {"ms": (2.0, 1.0)},
    }


def test_percentiles_are_numbers_of_their_own():
    a, b = ([{"batch_size": 8, "ttft_ms": {"p50": p50, "p99": 9.0}, "tpot_ms": None}] for p50 in (2.0, 3.0))
    assert ratios(a, b) == {"8": {"ttft_ms p50": (2.0, 3.0), "ttft_ms p99": (9.0, 9.0)}}


def test_differences_of_settings_and_the_ratios_are_printed(tmp_path, capsys):
    a = report(tmp_path, "a.json", [{"name": "x", "tokens_per_s": 100.0}], seed=0, model="m")
    b = report(tmp_path, "b.json", [{"name": "x", "tokens_per_s": 125.0}], seed=1, model="m")
    assert main([a, b]) == 0
    out = capsys.readouterr().out
    assert "settings seed: 0 -> 1" in out
    assert "model" not in out
    assert "1.250x" in out


def test_reports_that_cannot_be_compared_are_refused_by_name(tmp_path):
    a = report(tmp_path, "a.json", [{"name": "x", "ms": 1.0}])
    with pytest.raises(InvalidParameterError, match=r"missing.json cannot be read"):
        main([a, str(tmp_path / "missing.json")])
    with pytest.raises(InvalidParameterError, match=r"'throughput'.*'kernels'; compare like"):
        main([a, report(tmp_path, "b.json", [], benchmark="kernels")])
    with pytest.raises(InvalidParameterError, match="no case in common"):
        main([a, report(tmp_path, "c.json", [{"name": "z", "ms": 1.0}])])
    (tmp_path / "d.json").write_text("{")
    with pytest.raises(InvalidParameterError, match="is not JSON"):
        main([a, str(tmp_path / "d.json")])
    (tmp_path / "e.json").write_text("[]")
    with pytest.raises(InvalidParameterError, match="is not a report"):
        main([a, str(tmp_path / "e.json")])
