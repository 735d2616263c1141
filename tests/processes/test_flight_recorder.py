"""The flight recorder: what it holds after a scheduler's steps, and what `jpaged bench steps --replay` makes of it."""

import json
import os
import resource
import stat
import tempfile
from dataclasses import asdict, replace

import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import SamplingParams
from jpaged.bench import recorded_steps, replayed_steps
from jpaged.bench.steps import main
from jpaged.executor.step.runner import Runner
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.processes import flight_recorder
from jpaged.processes.flight_recorder import FlightRecorder, last_steps, write_last_steps
from jpaged.processes.pulse import Pulse
from tests.engine.helpers import Engine, make_request
from tests.tiny_models import DEMO_ENGINE


@pytest.fixture
def recorded():
    """An engine with a recorder, after some steps; two more are dispatched and not read."""
    engine, pulse = Engine(pipeline_depth=2), Pulse.create()
    engine.core.observer = FlightRecorder(pulse, engine.scheduler.slots)
    engine.add(make_request("a", 10, 20), make_request("b", 5, 20, n=2))
    for _ in range(8):
        engine.step()
    return engine, pulse


def test_records_are_the_plans_and_those_without_a_time_are_in_flight(recorded):
    engine, pulse = recorded
    steps = last_steps(pulse)
    assert [step["step"] for step in steps] == [plan.step_id for plan in engine.plans]
    for step, plan in zip(steps, engine.plans, strict=True):
        assert len(step["contexts"]) == len(plan.decode_slots)
        assert step["chunks"] == [(c.slot, c.start, len(c.token_ids), c.samples) for c in plan.chunks]
        assert (step["num_starts"], step["num_ends"]) == (len(plan.starts), len(plan.ends))
        assert step["variant"] == plan.variant.name.lower()
    assert len(recorded_steps.in_flight(steps)) == engine.scheduler.num_in_flight == 2
    assert pulse.num_steps == len(steps) - 2
    assert steps[-1]["dispatched_s"] == 0.0
    assert steps[-1]["contexts"] == [17, 12, 12]  # prompts and seven tokens
    assert "token" not in json.dumps(steps)


def test_only_the_last_steps_are_kept(monkeypatch, recorded):
    monkeypatch.setattr(flight_recorder, "NUM_RECORDS", 4)
    engine, pulse = Engine(), Pulse.create()
    engine.core.observer = FlightRecorder(pulse, engine.scheduler.slots)
    engine.add(make_request("a", 10, 12))
    engine.run()
    assert [step["step"] for step in last_steps(pulse)] == [plan.step_id for plan in engine.plans][-4:]


def test_a_record_that_was_not_written_whole_is_left_out(recorded):
    engine, pulse = recorded
    body = flight_recorder._encoder.encode(flight_recorder._Content(99, b"abc", [], 0, 0, 0, 0, 0, 0, 0, 0))
    recorder = engine.core.observer
    at = recorder._place(1)
    flight_recorder._HEADER.pack_into(recorder._memory, at, 1, 1.0, 0.0, len(body))
    recorder._memory[at + flight_recorder._HEADER.size : at + flight_recorder._HEADER.size + len(body)] = body
    assert [step["step"] for step in last_steps(pulse)] == [0, *range(2, len(engine.plans))]


def test_they_are_written_for_this_user_only_and_printed(monkeypatch, tmp_path, capsys, recorded):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = write_last_steps(recorded[1], "The engine process was killed by SIGKILL", {"model": "m"}, 3)
    assert path == tmp_path / f"jpaged-steps-{os.getpid()}-3.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["--replay", str(path), "--json", str(tmp_path / "steps.json")]) == 0
    says = capsys.readouterr().out.splitlines()
    assert says[0] == "The engine process was killed by SIGKILL"
    assert says[1] == "8 steps recorded, 2 of them not read"
    assert "not read" in says[-2]
    assert len(json.loads((tmp_path / "steps.json").read_text())["results"]) == 8
    assert write_last_steps(Pulse.create(), "nothing has run", {}, 4) is None


def test_a_full_disk_leaves_no_part_of_the_file(monkeypatch, tmp_path, caplog, recorded):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert write_last_steps(recorded[1], "It was killed", {}, 0) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written: File too large" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE])
def test_where_nothing_can_be_written_or_opened_there_is_no_file_and_no_error(monkeypatch, caplog, recorded, limit):
    monkeypatch.setattr(tempfile, "tempdir", None)  # it looks for a directory with room
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (0, before[1]))
    try:
        assert write_last_steps(recorded[1], "It was killed", {}, 0) is None
    finally:
        resource.setrlimit(limit, before)
    assert "cannot be written" in caplog.text


def test_steps_of_the_recorded_lengths_run_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine, pulse = LLMEngine(EngineArgs(**DEMO_ENGINE, verbose=False)), Pulse.create()
    engine.core.observer = FlightRecorder(pulse, engine.core.scheduler.slots)
    kinds = ({"temperature": 0.0}, {"seed": 1, "n": 2}, {"top_p": 0.5}, {"logprobs": 1, "presence_penalty": 1.0})
    for i, params in enumerate(kinds):
        engine.add_request(str(i), [*range(5, 45 + 30 * i)], SamplingParams(**params, max_tokens=4, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    recorded = last_steps(pulse)
    assert {step["variant"] for step in recorded} >= {"greedy", "sampling", "truncated", "full"}
    path = write_last_steps(pulse, "It was killed", asdict(engine.args), 0)
    asked, executed = [], []
    monkeypatch.setattr(replayed_steps, "LLMEngine", lambda args: asked.append(args) or engine)
    execute = Runner.execute
    monkeypatch.setattr(Runner, "execute", lambda self, plan: executed.append(plan) or execute(self, plan))
    assert main(["--replay", str(path), "--run"]) == 0
    assert asked == [replace(engine.args, compile_programs="at_start")]  # before anything is timed
    ran = [plan for plan in executed if plan.num_rows]
    assert [plan.step_id for plan in ran] == [step["step"] for step in recorded]
    for plan, step in zip(ran, recorded, strict=True):
        assert len(plan.decode_slots) == len(step["contexts"])
        assert [(c.start, len(c.token_ids), c.samples) for c in plan.chunks] == [tuple(c[1:]) for c in step["chunks"]]
        assert plan.variant.name.lower() == step["variant"]
    assert capsys.readouterr().out.count(" tokens\n") == len(recorded)


@pytest.mark.parametrize("content", [None, "no json", "{}", '{"cause": "x", "steps": []}', "[1]"])
def test_what_holds_no_steps_is_refused_by_name(tmp_path, content):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidParameterError, match=rf"--replay {path}"):
        recorded_steps.load(path)
