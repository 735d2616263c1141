"""A single worker in a process of its own: what ends it costs time, unless it ends it each time."""

import os
import signal
from pathlib import Path

import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.cli import main
from jpaged.scoring import workers
from jpaged.scoring.inputs import Record
from jpaged.scoring.workers import Shard, Work, run_work


class FragileShards:
    """Stands in for an engine (`ShardProcessor`): it is killed at the shards that `options` names, so often each, or
    gets another signal.
    """

    def __init__(self, options, directory):
        self._kills, self._signal, self._directory = options["kills"], options["signal"], directory

    def run(self, shards, done, progress):
        for shard in shards:
            for kill in range(self._kills.get(str(shard.number), 0)):
                mark = self._directory / f"{shard.number}-{kill}"
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), self._signal)
            done({"shard": shard.number, "rows": [record.data for record in shard.records], "pid": os.getpid()})


LONG = " ".join(map(str, range(50_000)))
"""More than a pipe holds, and no part of it like another."""

PLAIN_WORKER = """
import json, os, signal, sys, time

if not os.path.exists(MARK):
    open(MARK, "w").close()
    FIRST
for line in sys.stdin:
    shard = json.loads(line)
    if "number" in shard:
        rows = [record["data"] for record in shard["records"]]
        entry = {{"shard": shard["number"], "rows": rows, "pid": os.getpid()}}
        print(json.dumps({{"entry": entry}}), flush=True)
"""
"""Stands in for a worker's whole process. FIRST: what the first one does before it reads."""


def entries(directory: Path, kills: dict[str, int], by: signal.Signals = signal.SIGKILL, text: str = "a") -> list[dict]:
    """What a worker process reports of five shards."""
    found: list[dict] = []
    shards = (Shard(number, [Record(number, "in.jsonl", 1, {"text": f"{number} {text}"})]) for number in range(5))
    work = Work(FragileShards, {"kills": kills, "signal": by}, directory)
    run_work(work, shards, 1, 1, found.append, lambda rows, tokens: None, worker_process=True)
    return found


def test_a_worker_that_is_killed_goes_on_in_another_process_from_the_first_shard_to_the_last(tmp_path):
    found = entries(tmp_path, {"0": 1, "2": 1, "4": 1})
    assert [entry["shard"] for entry in found] == [0, 1, 2, 3, 4]
    assert [entry["rows"] for entry in found] == [[{"text": f"{number} a"}] for number in range(5)]
    assert len({entry["pid"] for entry in found} | {os.getpid()}) == 4


def test_a_worker_that_stands_still_is_killed_and_goes_on_in_another_process(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(workers, "_BEAT_S", 0.1)
    monkeypatch.setattr(workers, "_SILENT_S", 3.0)
    monkeypatch.setattr(workers, "_LOOK_S", 0.5)
    found = entries(tmp_path, {"2": 1}, signal.SIGSTOP, LONG)
    assert [entry["rows"] for entry in found] == [[{"text": f"{number} {LONG}"}] for number in range(5)]
    assert len({entry["pid"] for entry in found}) == 2
    assert "Worker 0 gave no sign of life for 3 s and was killed before its shards were done" in caplog.text


@pytest.mark.parametrize(
    ("first", "said", "restarts"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "gave no sign of life for 3 s", 1),
        ("print('{{}}', flush=True); os.kill(os.getpid(), signal.SIGSTOP)", "gave no sign of life for 2 s", 1),
        ("os.read(0, 1); os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9", 1),
        ("[print('{{}}', flush=True) or time.sleep(0.2) for _ in range(15)]", "", 0),
    ],
    ids=["stopped_from_the_start", "stopped_after_a_sign_of_life", "killed", "slow"],
)
def test_what_a_worker_does_is_noticed_while_its_shards_do_not_fit_the_pipe(
    tmp_path, monkeypatch, caplog, first, said, restarts
):
    program = PLAIN_WORKER.replace("MARK", repr(str(tmp_path / "started"))).replace("FIRST", first)
    monkeypatch.setattr(workers, "_PROGRAM", program)
    monkeypatch.setattr(workers, "_BEGIN_S", 3.0)
    monkeypatch.setattr(workers, "_SILENT_S", 2.0)
    monkeypatch.setattr(workers, "_LOOK_S", 1 / 16)
    found = entries(tmp_path, {}, text=LONG)
    assert [entry["rows"] for entry in found] == [[{"text": f"{number} {LONG}"}] for number in range(5)]
    assert len({entry["pid"] for entry in found}) == 1
    assert caplog.text.count("is started again") == restarts
    assert said in caplog.text


def test_a_shard_that_ends_the_worker_each_time_ends_the_work(tmp_path):
    with pytest.raises(EngineDeadError, match=r"Worker 0 was ended by signal 9 .* run the same again"):
        entries(tmp_path, {"3": 9})
    assert len(list(tmp_path.iterdir())) == 2


def test_one_process_is_for_one_engine(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n')
    arguments = ["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--in-process", "--data-parallel-size", "2"]
    assert main(arguments) == 2
    assert "--in-process is for one engine" in capsys.readouterr().err
