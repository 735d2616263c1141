"""The comparison of Triton's calls (benchmarks/triton_calls.py): a process for each way, their results and slopes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.pallas_kernels.registry import missing

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from benchmarks import triton_calls

DEVICES = {"device": "a GPU", "num_devices": 1, "platform_version": "13"}


def figure(way, calls, us, result="bits"):
    return {"way": way, "part": "chain", "calls": calls, "us": us, "result": result}


@pytest.fixture
def processes(monkeypatch):
    """The processes that would measure: their command lines and environments. Each writes the figures of its way."""
    started, figures = [], {way: [figure(way, 1, 5.0), figure(way, 3, 9.0)] for way in triton_calls.WAYS}

    def run(command, env, check):
        started.append((command, env))
        report = {"environment": DEVICES, "results": figures[env["JPAGED_TRITON_CALLS"]]}
        Path(command[command.index("--json", command.index("--way")) + 1]).write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("JPAGED_COMMIT", "a commit")  # so that nothing else starts a process
    monkeypatch.setattr(triton_calls.subprocess, "run", run)
    return started, figures


def test_each_way_has_a_process_whose_environment_names_it(processes, monkeypatch):
    started, _ = processes
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=there")
    assert triton_calls.main(["--graphs", "skip-temp", "--part", "chain"]) == 0
    assert [environment["JPAGED_TRITON_CALLS"] for _, environment in started] == ["ffi", "native"]
    flags = "--xla_dump_to=there --xla_gpu_command_buffer_update_mode=SKIP_TEMP"
    for (command, environment), way in zip(started, triton_calls.WAYS, strict=True):
        assert (environment["XLA_FLAGS"], environment["JPAGED_CACHE_DIR"]) == (flags, "")
        assert command[2:8] == ["--graphs", "skip-temp", "--part", "chain", "--way", way]


def test_the_report_has_the_figures_of_both_ways_and_the_slope_of_each(processes, tmp_path):
    _, figures = processes
    figures["native"] = [figure("native", 1, 4.0), figure("native", 3, 5.0)]
    assert triton_calls.main(["--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["environment"]["device"] == "a GPU"
    assert report["results"][:4] == figures["ffi"] + figures["native"]
    (slopes,) = report["results"][4:]
    assert slopes["name"] == "chain"
    assert slopes["us_a_call"] == pytest.approx({"ffi": 2.0, "native": 0.5})


@pytest.mark.parametrize("wrong", [[figure("native", 1, 1.0), figure("native", 3, 1.0, "others")], []])
def test_results_that_differ_or_are_missing_are_named_and_fail(processes, wrong, capsys):
    _, figures = processes
    figures["native"] = wrong
    assert triton_calls.main([]) == 1
    assert "chain, 3 calls: the two ways' results differ" in capsys.readouterr().err


def test_a_slope_needs_two_numbers_of_calls():
    with pytest.raises(InvalidParameterError, match="--calls 4,4: a slope needs two different numbers"):
        triton_calls.main(["--calls", "4,4"])


def test_buckets_may_be_given_in_any_order(monkeypatch):
    class Built(Exception):
        """Instead of the engine."""

    def build(args):
        raise Built(args)

    monkeypatch.setattr(triton_calls, "LLMEngine", build)
    monkeypatch.setattr(triton_calls, "model_directory", lambda name: name)
    args = triton_calls.parser().parse_args(["--rows", "8,1", "--token-buckets", "512,64,512"])
    with pytest.raises(Built) as built:
        next(triton_calls.steps(args))
    asked = built.value.args[0]
    assert (asked.decode_buckets, asked.max_num_seqs) == ((1, 8), 8)
    assert (asked.token_buckets, asked.max_num_batched_tokens) == ((64, 512), 512)


def test_a_process_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(triton_calls.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3))
    with pytest.raises(JPagedError, match="measures ffi ended with exit code 3"):
        triton_calls.main([])


def test_the_kernels_run_in_the_interpreter_and_add_one_a_call(tmp_path):
    file = tmp_path / "out.json"
    command = [sys.executable, triton_calls.__file__, "--part", "chain", "--calls", "1,3", "--runs", "1"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--batches", "1", "--json", str(file)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(file.read_text())["results"]
    assert [(one["way"], one["calls"]) for one in results[:4]] == [
        (way, calls) for way in triton_calls.WAYS for calls in (1, 3)
    ]
    expected = {
        calls: triton_calls.digest([(triton_calls.np.arange(1024, dtype="f4") + calls).view("i4").tolist()])
        for calls in (1, 3)
    }
    assert all(one["result"] == expected[one["calls"]] for one in results[:4])
