"""A report says by itself what was measured, where and how."""

import json
import subprocess
import sys

import jax
import pytest

from jpaged.bench import report
from jpaged.cli import main


def test_a_report_names_commit_command_host_versions_options_and_devices(tmp_path, monkeypatch, capsys):
    path = tmp_path / "out" / "scheduler.json"
    argv = ["bench", "scheduler", "--running", "4", "--steps", "5", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/jpaged", *argv])
    assert main(argv) == 0
    written = json.loads(path.read_text())
    assert set(written) == {"benchmark", "environment", "settings", "results"}
    assert written["benchmark"] == "scheduler"
    assert written["settings"]["steps"] == 5
    assert written["results"]
    environment = written["environment"]
    assert environment["command"] == f"jpaged bench scheduler --running 4 --steps 5 --json {path}"
    assert environment["device"] == jax.devices()[0].device_kind
    assert environment["jax"] == jax.__version__
    assert " cores, " in environment["host"]
    assert "driver" in environment


def test_the_commit_is_that_of_the_sources_or_the_one_that_is_named(monkeypatch):
    monkeypatch.delenv("JPAGED_COMMIT", raising=False)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=report._SOURCES, capture_output=True, text=True, check=False
    ).stdout.strip()
    commit = report.environment({})["commit"]
    assert commit is None if not head else head.startswith(commit.removesuffix("-dirty"))
    monkeypatch.setenv("JPAGED_COMMIT", "abc123")
    assert report.environment({})["commit"] == "abc123"


def test_a_report_of_another_process_devices_opens_none(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: 1 / 0)
    assert "device" not in report.environment({})


@pytest.mark.parametrize("key", [["--api-key", "secret"], ["--api-key=secret"]])
def test_keys_stay_out_of_the_command(key, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jpaged", "bench", "serve", *key, "--seed", "1"])
    command = report.environment({})["command"]
    assert "secret" not in command
    assert command.endswith("--seed 1")


def test_a_script_is_named_by_its_place_in_the_repository(monkeypatch):
    script = report._SOURCES / "benchmarks" / "dispatch.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--calls", "3"])
    assert report.environment({})["command"] == "python benchmarks/dispatch.py --calls 3"


def test_the_kept_results_are_few_and_describe_themselves():
    files = sorted((report._SOURCES / "benchmarks" / "results").glob("*.json"))
    assert 0 < len(files) <= 25
    for file in files:
        kept = json.loads(file.read_text())
        assert kept.keys() >= {"benchmark", "environment", "settings", "results"}, file
        assert kept["environment"].keys() >= {"date", "commit", "command", "host", "driver", "jax", "device"}, file
        assert kept["settings"], file
        assert kept["results"], file
