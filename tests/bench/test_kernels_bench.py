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
        monkeypatch.setattr(kernels, "cases", lambda _: (kernels.Case(n, "us", None, lambda n=n: n) for n in names))
        monkeypatch.setattr(kernels, "measure", lambda build, repeats: ([seconds(build())] * 3, 1.0))
        if raises is None:
            assert kernels.main(["--json", str(path), *options]) == 0
        else:
            with pytest.raises(raises):
                kernels.main(["--json", str(path), *options])
        return json.loads(path.read_text()) if path.exists() else None

    run.path = path
    return run


def names(report) -> list[str]:
    return [row["case"] for row in report["results"]]


def test_cases_are_chosen_by_parts_of_their_names(run):
    assert names(run(lambda name: 1e-6)) == ["decode one", "decode two", "prefill"]
    report = run(lambda name: 1e-6, "--only", "two", "--only", "pre")
    assert names(report) == ["decode two", "prefill"]
    assert report["settings"]["complete"]


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


def test_each_of_several_backends_has_a_column_and_the_card_is_measured_once(run, monkeypatch, capsys):
    def cases(backend):
        for name in ("card: read", "decode"):
            yield kernels.Case(name, "us", None, lambda name=name: (backend, name))

    def measure(build, repeats):
        backend, name = build()
        if (backend, name) == ("xla", "decode"):
            raise ValueError("it does not fit")
        return [1e-6 if name == "decode" else 2e-6] * 3, 1.0

    monkeypatch.setattr(kernels, "cases", cases)
    monkeypatch.setattr(kernels, "measure", measure)
    path = run.path
    assert kernels.main(["--json", str(path), "--backend", "mosaic", "--backend", "xla"]) == 0
    report = json.loads(path.read_text())
    rows = [(row["case"], row.get("backend"), row.get("value", row.get("error"))) for row in report["results"]]
    assert rows == [
        ("card: read", None, pytest.approx(2)),
        ("decode", "hopper", pytest.approx(1)),
        ("decode", "xla", "ValueError: it does not fit"),
    ]
    assert report["settings"] == {"backend": "hopper, xla", "only": None, "complete": True}
    header, card, decode, why = capsys.readouterr().out.splitlines()[1:5]
    assert header.split() == ["case", "hopper", "spread", "xla", "spread", "unit", "aim"]
    assert card.split() == ["card:", "read", "2.0", "0.0%", "us"]
    assert decode.split() == ["decode", "1.0", "0.0%", "failed", "us"]
    assert "it does not fit" in why
