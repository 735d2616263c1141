"""What `jpaged bench kernels` writes when not all goes well. Cases and device are made up."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

from jpaged.bench import kernels


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command on three cases, which take `seconds()`; returns its report, None if there is none."""
    monkeypatch.setattr(kernels.jax, "devices", lambda: [SimpleNamespace(platform="gpu", device_kind="made up")])
    monkeypatch.setattr("jpaged.bench.report.environment", lambda devices: {})
    path = tmp_path / "report.json"

    def run(seconds, *options, raises=None):
        names = ("decode one", "decode two", "prefill")
        monkeypatch.setattr(kernels, "cases", lambda _, __: (kernels.Case(n, "us", None, lambda n=n: n) for n in names))
        monkeypatch.setattr(kernels, "measure", lambda build, repeats: ([seconds(build())] * 3, 1.0))
        if raises is None:
            assert kernels.main(["--json", str(path), *options]) == 0
        else:
            with pytest.raises(raises):
                kernels.main(["--json", str(path), *options])
        return json.loads(path.read_text()) if path.exists() else None

    return run


def names(report) -> list[str]:
    return [row["case"] for row in report["results"]]


def test_cases_are_chosen_by_parts_of_their_names(run):
    assert names(run(lambda name: 1e-6)) == ["decode one", "decode two", "prefill"]
    report = run(lambda name: 1e-6, "--only", "two", "--only", "pre")
    assert names(report) == ["decode two", "prefill"]
    assert report["settings"]["complete"]
    assert names(run(lambda name: 1e-6, "--only", "=decode one", "--only", "=pre")) == ["decode one"]


def test_backends_are_compared_in_columns_and_one_that_fails_leaves_the_others(run, monkeypatch, capsys):
    measured = []

    def seconds(name: str) -> float:
        measured.append(name)
        if len(measured) == 3:
            raise ValueError("no such kernel")
        return len(measured) * 1e-6

    report = run(seconds, "--backend", "hopper", "--backend", "xla", "--only", "decode")
    assert measured == ["decode one"] * 2 + ["decode two"] * 2
    assert report["settings"]["backend"] == ["hopper", "xla"]
    one, two = report["results"]
    assert one["hopper"]["value"] == pytest.approx(1)
    assert one["xla"]["value"] == pytest.approx(2)
    assert two["hopper"] == {"error": "ValueError: no such kernel"}
    assert two["xla"]["value"] == pytest.approx(4)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["case", "unit", "hopper", "xla"]
    assert printed[3].split() == ["decode", "two", "us", "-", "4.0"]
    assert run(seconds, "--backend", "hopper", "--backend", "mosaic", raises=SystemExit) == report


def test_a_name_that_no_case_has_is_refused(run):
    assert run(lambda name: 1e-6, "--only", "decoed", raises=SystemExit) is None


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_what_it_measured(run, stop):
    def seconds(name: str) -> float:
        if name == "decode two":
            os.kill(os.getpid(), stop)
        return 1e-6

    before = signal.getsignal(signal.SIGTERM)
    report = run(seconds, raises=(KeyboardInterrupt, SystemExit))
    assert names(report) == ["decode one"]
    assert not report["settings"]["complete"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_is_stopped_at_once_leaves_the_last_report_alone(run):
    def stop(name: str) -> float:
        raise KeyboardInterrupt

    run(lambda name: 1e-6)
    assert names(run(stop, raises=KeyboardInterrupt)) == ["decode one", "decode two", "prefill"]


@pytest.mark.parametrize("skew", ["0", "nan", "4.5", "inf"])
def test_a_skew_out_of_range_is_refused(run, capsys, skew):
    assert run(lambda name: 1e-6, "--expert-skew", skew, raises=SystemExit) is None
    assert "--expert-skew must be above 0" in capsys.readouterr().err
