"""Files in, files out: formats, malformed rows, crashes, workers. Most of it with a scorer that needs no model."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError, InvalidParameterError, MalformedRowError, OutputError
from jpaged.cli import main
from jpaged.scoring import files, score_files
from jpaged.scoring.rows import RowScore, SequenceScore
from jpaged.scoring.workers import WorkerProcess
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model


class FakeScorer:
    """Gives each continuation's characters log-probabilities made of their code points."""

    seen: ClassVar[list[str]] = []
    crash_at: ClassVar[str | None] = None

    def __init__(self, **options) -> None:
        self.options = options

    def encode(self, rows):
        yield [(i, []) for i in range(len(rows))]

    def score_encoded(self, rows, batches, progress):
        results = []
        for batch in batches:
            for position, _ in batch:
                row = rows[position]
                if row.context == "crash" and FakeScorer.crash_at == row.id:
                    raise EngineDeadError("The engine failed: out of luck")
                FakeScorer.seen.append(str(row.id))
                if row.continuations == ("late",):
                    results.append(MalformedRowError("found late"))
                    continue
                scores = []
                for text in row.continuations:
                    ids = np.array([ord(c) for c in text], np.int32)
                    scores.append(SequenceScore(ids, -(ids % 7).astype(np.float32), ids % 2 == 0))
                results.append(RowScore(row, tuple(scores)))
                progress(1, len(row.continuations))
        return results


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(files, "Scorer", FakeScorer)
    monkeypatch.setattr(FakeScorer, "seen", [])
    monkeypatch.setattr(FakeScorer, "crash_at", None)


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ROWS = [
    {"id": "t", "text": "fox"},
    {"id": 2, "prompt": "a", "completion": "bc"},
    {"id": "c", "prompt": "q", "choices": ["x", "yes"]},
]


def test_rows_keep_their_order_and_ids(tmp_path, fake):
    source = write_rows(tmp_path / "in.jsonl", ROWS * 5)
    summary = score_files(source, tmp_path / "out.jsonl", shard_size=10, use_tqdm=False)
    records = read(tmp_path / "out.jsonl")
    assert [record["index"] for record in records] == list(range(15))
    assert [record["id"] for record in records] == ["t", 2, "c"] * 5
    assert records[1]["logprob"] == -float(98 % 7 + 99 % 7)
    assert [choice["num_tokens"] for choice in records[2]["choices"]] == [1, 3]
    assert (summary.num_rows, summary.num_errors, summary.num_tokens, summary.errors_file) == (15, 0, 20, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_parquet_output_holds_what_json_output_does(tmp_path, fake):
    parquet = pytest.importorskip("pyarrow.parquet")
    source = write_rows(tmp_path / "in.jsonl", ROWS * 3)
    for output in ("out.jsonl", "out.parquet"):
        score_files(source, tmp_path / output, shard_size=10, logprobs=True, use_tqdm=False)

    def without_nulls(value):
        if isinstance(value, dict):
            return {key: without_nulls(v) for key, v in value.items() if v is not None}
        return [without_nulls(v) for v in value] if isinstance(value, list) else value

    rows = [without_nulls(row) for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()]
    assert rows == [record | {"id": str(record["id"])} for record in read(tmp_path / "out.jsonl")]


def test_a_malformed_row_fails_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "Scorer", None)
    source = write_rows(tmp_path / "in.jsonl", [ROWS[0], '{"text": ""}'])
    with pytest.raises(MalformedRowError, match=r"in\.jsonl:2: .*is empty"):
        score_files(source, tmp_path / "out.jsonl", use_tqdm=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_malformed_rows_are_skipped_and_listed_if_asked(tmp_path, fake):
    bad = ["not json", {"id": "late", "text": "late"}, {"prompt": "a"}]
    source = write_rows(tmp_path / "in.jsonl", [bad[0], *ROWS, bad[1], bad[2], *ROWS])
    warned: list[str] = []
    summary = score_files(
        source, tmp_path / "out.jsonl", on_error="skip", shard_size=10, use_tqdm=False, warn=warned.append
    )
    assert [record["index"] for record in read(tmp_path / "out.jsonl")] == [1, 2, 3, 6, 7, 8]
    listed = read(summary.errors_file)
    assert [(error["index"], error["line"]) for error in listed] == [(0, 1), (4, 5), (5, 6)]
    assert listed[1]["error"] == "found late"
    assert warned[1] == f"{source}:5: found late"
    assert summary.num_errors == 3


def test_what_one_run_has_skipped_ends_the_next_one_that_is_not_to_skip(tmp_path, fake):
    crash = {"id": "c", "prompt": "crash", "completion": "x"}
    source = write_rows(tmp_path / "in.jsonl", [{"id": "l", "prompt": "p", "completion": "late"}, crash])
    call = partial(score_files, source, tmp_path / "out.jsonl", shard_size=5, use_tqdm=False)
    FakeScorer.crash_at = "c"
    with pytest.raises(EngineDeadError):
        call(on_error="skip")
    FakeScorer.crash_at = None
    with pytest.raises(MalformedRowError, match=r"in\.jsonl:1: found late"):
        call(on_error="fail")
    assert call(on_error="skip").num_errors == 1


def test_a_row_found_malformed_late_ends_the_run_and_skipping_it_goes_on(tmp_path, fake):
    source = write_rows(tmp_path / "in.jsonl", [*ROWS * 4, {"text": "late"}, *ROWS])
    with pytest.raises(MalformedRowError, match=r"in\.jsonl:13: found late"):
        score_files(source, tmp_path / "out.jsonl", shard_size=8, use_tqdm=False)
    summary = score_files(source, tmp_path / "out.jsonl", shard_size=8, on_error="skip", use_tqdm=False)
    assert summary.num_resumed >= 9
    assert len(read(tmp_path / "out.jsonl")) == 15


def test_after_an_engine_failure_only_what_is_missing_is_computed(tmp_path, fake, monkeypatch):
    rows = [{"id": i, "prompt": "crash", "completion": "x" * 10} for i in range(20)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    score_files(source, tmp_path / "whole.jsonl", shard_size=30, use_tqdm=False)
    monkeypatch.setattr(FakeScorer, "crash_at", 11)
    with pytest.raises(EngineDeadError):
        score_files(source, tmp_path / "out.jsonl", shard_size=30, use_tqdm=False)
    monkeypatch.setattr(FakeScorer, "crash_at", None)
    FakeScorer.seen.clear()
    summary = score_files(source, tmp_path / "out.jsonl", shard_size=30, use_tqdm=False)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert summary.num_resumed + len(FakeScorer.seen) == 20
    assert 0 < summary.num_resumed < 11


def test_changed_input_or_settings_do_not_mix_with_what_is_finished(tmp_path, fake, monkeypatch):
    source = write_rows(tmp_path / "in.jsonl", ROWS * 9)
    monkeypatch.setattr(FakeScorer, "crash_at", "z")
    write_rows(source, [*ROWS * 9, {"id": "z", "prompt": "crash", "completion": "x"}])
    arguments = {"output": tmp_path / "out.jsonl", "shard_size": 20, "use_tqdm": False}
    with pytest.raises(EngineDeadError):
        score_files(source, **arguments)
    for changes, name in (({"stride": 3}, "stride"), ({"model": "other"}, "model"), ({"shard_size": 21}, "shard_size")):
        with pytest.raises(InvalidParameterError, match=f"another job: its {name}"):
            score_files(source, **(arguments | changes))
    write_rows(source, ROWS * 9)
    with pytest.raises(InvalidParameterError, match="another job: its inputs"):
        score_files(source, **arguments)
    score_files(source, **arguments, overwrite=True)
    assert len(read(tmp_path / "out.jsonl")) == 27


def test_a_full_disk_is_a_typed_error_and_loses_nothing(tmp_path, fake):
    rows = [{"id": i, "text": "x" * 100} for i in range(30)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    score_files(source, tmp_path / "whole.jsonl", shard_size=1000, logprobs=True, use_tqdm=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))  # the merged output is larger, a shard is not
    try:
        with pytest.raises(OutputError, match=r"out\.jsonl cannot be written \(File too large\); free some space"):
            score_files(source, tmp_path / "out.jsonl", shard_size=1000, logprobs=True, use_tqdm=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out.jsonl").exists()
    FakeScorer.seen.clear()
    score_files(source, tmp_path / "out.jsonl", shard_size=1000, logprobs=True, use_tqdm=False)
    assert not FakeScorer.seen
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": "out.csv"}, "must end in one of"),
        ({"output": "in.jsonl"}, "is an input too"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"shard_size": 0}, "shard_size must be"),
        ({"data_parallel_size": 0}, "data_parallel_size must be"),
        ({"modell": "x"}, "no option 'modell'"),
        ({"block_size": 3}, "block_size must be"),
        ({"inputs": None}, "inputs must be a path or a list of paths, got None"),
        ({"inputs": ["in.jsonl", 5]}, "An input must be a path, got 5"),
        ({"output": 5}, "output must be a path, got 5"),
        ({"output": "\0.jsonl"}, "output must be a path"),
        ({"model": 5}, "model must be a directory or a hub id, got 5"),
        ({"window": "8"}, "window must be an integer, got '8'"),
        ({"window": 8.5}, "window must be an integer"),
        ({"stride": 10**5000}, "stride must be at most"),
        ({"shard_size": 10**5000}, "shard_size must be at most"),
        ({"data_parallel_size": 10**9}, "data_parallel_size must be at most"),
        ({"logprobs": "no"}, "logprobs must be True or False, got 'no'"),
        ({"overwrite": 1}, "overwrite must be True or False"),
        ({"warn": 5}, "warn must be a function"),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(files, "Scorer", None)
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(InvalidParameterError, match=message):
        score_files(**({"inputs": "in.jsonl", "output": "out.jsonl", "use_tqdm": False} | changes))


def test_numbers_of_numpy_are_as_good_as_pythons(tmp_path, fake):
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    sizes = {"shard_size": np.int64(7), "window": np.int32(8), "seed": np.int64(3), "watermark": np.float32(0.5)}
    score_files((source for _ in range(2)), tmp_path / "out.jsonl", use_tqdm=False, **sizes)
    assert len(read(tmp_path / "out.jsonl")) == 6


def test_the_command_reports_skipped_rows_and_exits_with_0(tmp_path, fake, capsys):
    source = write_rows(tmp_path / "in.jsonl", [*ROWS, *["broken"] * 30])
    arguments = ["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--in-process"]
    assert main(arguments) == 1
    assert "in.jsonl:4: the line is not JSON" in capsys.readouterr().err
    assert main([*arguments, "--on-error", "skip"]) == 0
    stderr = capsys.readouterr().err
    assert stderr.count("is not JSON") == 20
    assert "30 of 33 rows skipped" in stderr
    assert main([*arguments, "--on-error", "skip"]) == 2  # the output exists
    assert main(["score", str(source), "-o", str(source / "x.jsonl"), "--in-process", "--on-error", "skip"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def random_rows(seed: int, count: int) -> list[dict]:
    rng = np.random.default_rng(seed)

    def ids(low, high):
        return rng.integers(3, VOCAB_SIZE, int(rng.integers(low, high))).tolist()

    rows = []
    for i in range(count):
        prompt = ids(10, 30)
        rows.append([{"text": ids(2, 150)}, {"prompt": prompt, "choices": [ids(1, 9) for _ in range(4)]}][i % 2])
    rows[count // 2] = {"text": [VOCAB_SIZE, 1]}  # found out by a worker
    return rows


@pytest.mark.xdist_group("scoring-llama-gqa-d64-tied")
def test_killed_runs_leave_no_worker_and_end_in_the_same_bytes(tmp_path):
    """One run in this process; the same with two workers, killed in the middle, and run again."""
    model = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path / "model", use_torch=False)
    source = write_rows(tmp_path / "in.jsonl", random_rows(0, 240))
    arguments = {
        "inputs": [str(source)],
        "model": str(model),
        "max_model_len": 48,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 256,
        "decode_buckets": (8,),
        "token_buckets": (64,),
        "skip_tokenizer_init": True,
        "verbose": False,
        "shard_size": 1200,
        "on_error": "skip",
        "logprobs": True,
        "use_tqdm": False,
    }
    score_files(output=tmp_path / "whole.jsonl", **arguments)
    assert len(read(tmp_path / "whole.jsonl")) == 239

    output = tmp_path / "out.jsonl"
    call = f"score_files(output={str(output)!r}, data_parallel_size=2, **{arguments!r})"
    program = f"from jpaged.scoring import score_files; {call}"
    run = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    manifest = tmp_path / "out.jsonl.parts" / "manifest.jsonl"
    end = time.monotonic() + 120
    while not manifest.exists() or manifest.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < end
        assert run.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    while workers := processes_of_session(run.pid):
        assert time.monotonic() < end, f"workers {workers} outlive their coordinator"
        time.sleep(0.02)
    assert not output.exists()

    summary = score_files(output=output, **arguments)
    assert 0 < summary.num_resumed < 240
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [error["line"] for error in read(summary.errors_file)] == [121]


def processes_of_session(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.xdist_group("scoring-llama-gqa-d64-tied")
def test_a_worker_that_is_killed_at_work_is_started_again_and_nothing_is_lost_or_doubled(tmp_path, monkeypatch):
    rows = random_rows(0, 60)
    source = write_rows(tmp_path / "in.jsonl", rows)
    model = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path / "model", use_torch=False)
    options = {
        "model": str(model),
        "max_model_len": 48,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 256,
        "decode_buckets": (8,),
        "token_buckets": (64,),
        "skip_tokenizer_init": True,
        "verbose": False,
        "shard_size": 600,
        "on_error": "skip",
        "use_tqdm": False,
    }
    score_files(source, tmp_path / "whole.jsonl", **options)
    killed = []
    receive = WorkerProcess._receive

    def receive_and_kill(self):
        message = receive(self)
        if "entry" in message and not killed:
            killed.append(self._process.pid)
            self._process.kill()
        return message

    monkeypatch.setattr(WorkerProcess, "_receive", receive_and_kill)
    score_files(source, tmp_path / "out.jsonl", data_parallel_size=2, **options)
    assert killed
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_worker_that_dies_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    start = WorkerProcess._start

    def start_and_kill(self):
        process = start(self)
        process.kill()
        return process

    monkeypatch.setattr(WorkerProcess, "_start", start_and_kill)
    with pytest.raises(EngineDeadError, match=r"Worker \d was ended by signal 9 .* run the same again"):
        score_files(source, tmp_path / "out.jsonl", data_parallel_size=2, use_tqdm=False)
