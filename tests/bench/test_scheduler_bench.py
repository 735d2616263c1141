import json

import pytest

from jpaged.bench.scheduler import Case, main, measure


def test_a_decode_step_of_a_thousand_sequences_takes_less_than_a_millisecond():
    assert measure(Case("blocks"), running=1000, steps=200).median_us < 1000


def test_every_case_is_measured_and_written_down(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["--running", "16", "64", "--steps", "40", "--finishing", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    results = report["results"]
    assert report["environment"]["device"]
    cases = [(case, n) for case in ("nothing", "blocks", "blocks, cache", "finishes", "streaming") for n in (16, 64)]
    assert [(r["case"], r["running"]) for r in results] == [*cases, *((f"fork, {n}", 1) for n in (10, 100, 1000))]
    assert all(0 < r["median_us"] <= r["p99_us"] and r["steps"] == 40 for r in results)
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(results)
    assert last == f"written to {file}"


def test_a_count_below_one_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "must be at least 1" in capsys.readouterr().err
