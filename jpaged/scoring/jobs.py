"""Runs a resumable job: cuts rows of files into shards, works on them here or in workers, and merges the output."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, shown
from jpaged.api.version import __version__
from jpaged.scoring.inputs import Record, fingerprint, read_records
from jpaged.scoring.json_lines import json_lines
from jpaged.scoring.progress import ProgressBar
from jpaged.scoring.shards import Entry, ShardStore, writing
from jpaged.scoring.workers import Shard, ShardProcessor, Work, run_work


@dataclass(frozen=True)
class JobSummary:
    """The result of a run.

    num_rows: rows of the input, of which num_errors could not be done. num_resumed: rows that earlier runs had done.
    num_tokens: tokens computed, by this run. seconds: that it took, model start included.
    errors_file: lists the rows that could not be done; None if there are none.
    """

    num_rows: int
    num_errors: int
    num_resumed: int
    num_tokens: int
    seconds: float
    errors_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job.

    task: its name. processor: what works on its shards.
    settings, engine: options for the processor and for the engine, as JSON; with task, shard_size and the contents of
        the inputs they define the output.
    size_of: what a record adds to its shard, which ends at shard_size.
    merge: puts the shards' files together.
    """

    task: str
    processor: type[ShardProcessor]
    inputs: Sequence[str | Path]
    output: Path
    settings: dict[str, Any]
    engine: dict[str, Any]
    shard_size: int
    size_of: Callable[[Record], int]
    merge: Callable[[ShardStore, Path], None]

    @property
    def identity(self) -> dict[str, Any]:
        """What makes this job the same as, or another than, an unfinished one."""
        return {
            "task": self.task,
            "inputs": [fingerprint(path) for path in self.inputs],
            **self.settings,
            "shard_size": self.shard_size,
            **{name: value for name, value in self.engine.items() if name != "verbose"},
            "jpaged": __version__,
        }


def run_job(
    job: Job,
    num_rows: int,
    check: Callable[[Entry], None],
    *,
    overwrite: bool,
    num_workers: int,
    worker_process: bool,
    use_tqdm: bool,
) -> JobSummary:
    """Does the missing part of a job and puts the output in its place.

    num_rows: of the input. num_workers, worker_process: as for `run_work`.
    check: called with each finished shard's entry, an earlier run's too, before it is listed;
        what it raises ends the run and leaves the shard out. Beside what `ShardStore` wants, entries hold the numbers
        of "rows", of "tokens" and of rows that "failed", and a list of "errors" for the errors file.
    Raises:
        InvalidParameterError: the output exists, or unfinished work of another job is there.
        OutputError: it cannot be written. EngineDeadError: an engine failed or a worker died.
    """
    begun = time.perf_counter()
    store = ShardStore(job.output, job.identity, overwrite=overwrite)
    try:
        for entry in store.finished.values():
            check(entry)
        resumed = sum(entry["rows"] for entry in store.finished.values())
        tokens = 0

        def done(entry: Entry) -> None:
            nonlocal tokens
            check(entry)
            tokens += entry["tokens"]
            store.add(entry)

        if resumed < num_rows and not store.complete:
            work = Work(job.processor, job.settings | {"engine": job.engine}, store.directory)
            shards = shards_of(read_records(job.inputs), job.shard_size, job.size_of)
            todo = (shard for shard in shards if shard.number not in store.finished)
            devices_each = int(job.engine.get("tensor_parallel_size", 1))
            with ProgressBar(num_rows, job.task, done=resumed, shown=use_tqdm) as bar:
                run_work(work, todo, num_workers, devices_each, done, bar.add, worker_process=worker_process)
        num_failed = sum(entry["failed"] for entry in store.finished.values())
        errors = [error for number in sorted(store.finished) for error in store.finished[number]["errors"]]
        errors_file = _finish(store, job, errors)
    finally:
        store.close()
    seconds = time.perf_counter() - begun
    return JobSummary(num_rows, num_failed, resumed, tokens, seconds, errors_file)


def shards_of(records: Iterable[Record], shard_size: int, size_of: Callable[[Record], int]) -> Iterator[Shard]:
    """Cuts rows into shards of at least this size, less for the last; the same rows give the same shards."""
    part: list[Record] = []
    size = number = 0
    for record in records:
        part.append(record)
        size += size_of(record)
        if size >= shard_size:
            yield Shard(number, part)
            part, size, number = [], 0, number + 1
    if part:
        yield Shard(number, part)


def checked_output(output: str | Path, inputs: Sequence[str | Path], formats: Sequence[str]) -> Path:
    """The path of the output. Raises InvalidParameterError if it cannot be the output of these inputs."""
    if not isinstance(output, str | Path) or "\0" in str(output):
        raise InvalidParameterError(f"output must be a path, got {shown(output)}.")
    path = Path(output)
    if path.suffix not in formats:
        raise InvalidParameterError(f"The output {path} must end in one of {', '.join(formats)}.")
    if any(path.resolve() == Path(other).resolve() for other in inputs):
        raise InvalidParameterError(f"The output {path} is an input too; name another file.")
    return path


def checked_options(options: dict[str, Any], *, data_parallel_size: int = 1) -> dict[str, Any]:
    """Engine options as `EngineArgs` has them: its numbers are of the types that JSON knows.

    Raises:
        InvalidParameterError: one that does not exist, or is out of range.
    """
    args = EngineArgs(**{"data_parallel_size": data_parallel_size} | options)
    return {name: getattr(args, name) for name in options}


def engine_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The engine's options of a `Work`, with the tuples that JSON made lists of."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options["engine"].items()}


def _finish(store: ShardStore, job: Job, errors: list[dict[str, Any]]) -> Path | None:
    """Merges the output and the list of rows left out, and puts both in place. Returns that list's file."""
    errors_file = store.output.with_name(store.output.name + ".errors.jsonl")
    if not store.complete:
        merged, listed = store.directory / "merged", store.directory / "errors"
        with writing(store.output):
            job.merge(store, merged)
            if errors:
                listed.write_bytes(json_lines(errors))
            else:
                errors_file.unlink(missing_ok=True)
        store.put_in_place({listed: errors_file, merged: store.output} if errors else {merged: store.output})
    store.clear()
    return errors_file if errors else None
