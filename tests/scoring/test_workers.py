"""A single worker in a process of its own: what ends it costs time, unless it ends it each time."""

import os
import signal
from pathlib import Path

import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.cli import main
from jpaged.scoring.inputs import Record
from jpaged.scoring.workers import Shard, Work, run_work


class FragileShards:
    """Stands in for an engine (`ShardProcessor`): it is killed at the shards that `options` names, so often each."""

    def __init__(self, options, directory):
        self._kills, self._directory = options["kills"], directory

    def run(self, shards, done, progress):
        for shard in shards:
            for kill in range(self._kills.get(str(shard.number), 0)):
                mark = self._directory / f"{shard.number}-{kill}"
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            done({"shard": shard.number, "rows": [record.data for record in shard.records], "pid": os.getpid()})


def entries(directory: Path, kills: dict[str, int]) -> list[dict]:
    """What a worker process reports of five shards."""
    found: list[dict] = []
    shards = (Shard(number, [Record(number, "in.jsonl", 1, {"text": str(number)})]) for number in range(5))
    work = Work(FragileShards, {"kills": kills}, directory)
    run_work(work, shards, 1, 1, found.append, lambda rows, tokens: None, worker_process=True)
    return found


def test_a_worker_that_is_killed_goes_on_in_another_process_from_the_first_shard_to_the_last(tmp_path):
    found = entries(tmp_path, {"0": 1, "2": 1, "4": 1})
    assert [entry["shard"] for entry in found] == [0, 1, 2, 3, 4]
    assert [entry["rows"] for entry in found] == [[{"text": str(number)}] for number in range(5)]
    assert len({entry["pid"] for entry in found} | {os.getpid()}) == 4


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
