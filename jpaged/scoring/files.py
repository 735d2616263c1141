"""`score_files`: rows in files, scores in a file; resumable, and on several devices at once.

    inputs --scan--> rows counted, malformed ones found
           --read--> shards --ScoreShards, here or in workers--> shard files --merge--> output

A shard is some consecutive rows. It begins with nothing in the prefix cache and ends with nothing in flight, so its
scores depend on its rows alone, and not on which run or worker computed them.
"""

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from jpaged.api.checks import check_bool, check_integer, plain
from jpaged.api.errors import InvalidParameterError, MalformedRowError, shown
from jpaged.scoring.ahead import Ahead
from jpaged.scoring.inputs import Record, checked_inputs, import_pyarrow, read_records
from jpaged.scoring.jobs import Job, JobSummary, checked_options, checked_output, engine_fields, run_job
from jpaged.scoring.json_lines import json_lines, merge_json_lines
from jpaged.scoring.progress import Progress
from jpaged.scoring.rows import Row, RowScore, parse_row
from jpaged.scoring.scorer import BATCHES_AHEAD, Batch, Scorer
from jpaged.scoring.shards import Entry, ShardStore, write_shard
from jpaged.scoring.windows import check_sizes
from jpaged.scoring.workers import Done, Shard

OnError = Literal["fail", "skip"]

SHARD_SIZE = 1 << 19
"""Characters in a shard. They are about 130,000 tokens, a few seconds of an 8B model on one GPU."""

INPUT_FORMATS = (".jsonl", ".ndjson", ".csv", ".parquet")
OUTPUT_FORMATS = (".jsonl", ".parquet")


def score_files(
    inputs: str | Path | Iterable[str | Path],
    output: str | Path,
    *,
    model: str | None = None,
    logprobs: bool = False,
    window: int | None = None,
    stride: int | None = None,
    add_special_tokens: bool = True,
    on_error: OnError = "fail",
    overwrite: bool = False,
    shard_size: int = SHARD_SIZE,
    data_parallel_size: int = 1,
    worker_process: bool = False,
    use_tqdm: bool = True,
    warn: Callable[[str], None] | None = None,
    **options: Any,
) -> JobSummary:
    """Scores the rows of files into a file. After a crash, the same call resumes the work; the output is the same.

    Args:
        inputs: .jsonl, .csv or .parquet files; see `jpaged.scoring.rows` for what a row is.
        output: .jsonl or .parquet; a row for each row of the input that could be scored, in order.
        model, window, stride, add_special_tokens, options: as for `Scorer`.
        logprobs: with every scored token's id and log-probability.
        on_error: what a malformed row does: "fail" ends the run before or while it works, "skip" leaves the row out and
            lists it in OUTPUT.errors.jsonl.
        overwrite: replace an output of this name, and drop unfinished work on it.
        shard_size: characters that are scored between two commits to the disk.
        data_parallel_size: worker processes, each with the model on a GPU of its own.
        worker_process: a single worker, too, has a process of its own. A worker process that ends, or whose engine
            fails, is started again with the shards that it had, as long as it gets on.
        use_tqdm: show a progress bar with tokens/s and time left.
        warn: called with a line for each row that is skipped.
    Raises:
        InvalidParameterError: an argument out of range; the output exists; unfinished work of another job is there.
        MalformedRowError: with on_error "fail"; names file and line.
        OutputError: the output cannot be written; finished shards are kept.
        EngineDeadError: an engine failed, or a worker died; finished shards are kept.
    """
    paths = checked_inputs(inputs, INPUT_FORMATS)
    target = checked_output(output, paths, OUTPUT_FORMATS)
    engine = checked_options({"model": model, **options}, data_parallel_size=data_parallel_size)
    check_integer("shard_size", shard_size, 1, sys.maxsize)
    for name, value in (
        ("logprobs", logprobs),
        ("add_special_tokens", add_special_tokens),
        ("overwrite", overwrite),
        ("worker_process", worker_process),
        ("use_tqdm", use_tqdm),
    ):
        check_bool(name, value)
    check_sizes(window, stride)  # whether they go together, the scorer says, which knows the context
    if on_error not in get_args(OnError):
        raise InvalidParameterError(f'on_error must be "fail" or "skip", got {shown(on_error)}.')
    if warn is not None and not callable(warn):
        raise InvalidParameterError(f"warn must be a function of a line of text, got {shown(warn)}.")
    if target.suffix == ".parquet":
        import_pyarrow()
    settings = {
        "window": plain(window),
        "stride": plain(stride),
        "add_special_tokens": add_special_tokens,
        "logprobs": logprobs,
    }
    job = Job(
        task="score",
        processor=ScoreShards,
        inputs=paths,
        output=target,
        settings=settings | {"suffix": target.suffix},
        engine=engine,
        shard_size=int(shard_size),
        size_of=size_of,
        merge=_merge_parquet if target.suffix == ".parquet" else merge_json_lines,
    )
    num_rows = _scan(paths, on_error)

    def check(entry: Entry) -> None:
        for error in entry["errors"]:
            _report(error, on_error, warn)

    return run_job(
        job,
        num_rows,
        check,
        overwrite=overwrite,
        num_workers=data_parallel_size,
        worker_process=worker_process,
        use_tqdm=use_tqdm,
    )


class ScoreShards:
    """Scores shards with one engine (`ShardProcessor`).

    Rows are encoded by a thread, shards ahead; finished shards are written by another. The engine waits for neither.
    """

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        self._directory = directory
        self._suffix: str = options["suffix"]
        self._logprobs: bool = options["logprobs"]
        scorer = {name: options[name] for name in ("window", "stride", "add_special_tokens")}
        self._scorer = Scorer(**scorer | engine_fields(options))

    def run(self, shards: Iterable[Shard], done: Done, progress: Progress) -> None:
        """Scores each shard and writes it. `done` gets its manifest entry, in the writing thread."""
        with ThreadPoolExecutor(1) as writer:
            written: list[Future[None]] = []
            encoded = Ahead(self._encode(shards), BATCHES_AHEAD)
            for opened in encoded:
                assert isinstance(opened, _OpenShard)
                tokens = _Sum()

                def count(rows: int, num_tokens: int, tokens: "_Sum" = tokens) -> None:
                    tokens.value += num_tokens
                    progress(rows, num_tokens)

                results = self._scorer.score_encoded(opened.rows, _batches(encoded), count)
                progress(len(opened.errors), 0)
                for future in written:  # by now they are; if one failed, so does this
                    future.result()
                written = [writer.submit(lambda *args: done(self._write(*args)), opened, results, tokens.value)]
            for future in written:
                future.result()

    def _encode(self, shards: Iterable[Shard]) -> Iterator["_OpenShard | Batch | None"]:
        """For each shard its rows, then their sequences batch by batch, then None."""
        for shard in shards:
            opened = _OpenShard(shard.number)
            for record in shard.records:
                _row_of(record, partial(opened.add, record), partial(opened.add_error, record))
            yield opened
            yield from self._scorer.encode(opened.rows)
            yield None

    def _write(self, shard: "_OpenShard", results: list[RowScore | MalformedRowError], tokens: int) -> Entry:
        records = []
        for record, result in zip(shard.records, results, strict=True):
            if isinstance(result, MalformedRowError):
                shard.add_error(record, result)
            else:
                records.append(result.record(record.index, logprobs=self._logprobs))
        errors = sorted(shard.errors, key=lambda error: error["index"])
        data = _parquet(records) if self._suffix == ".parquet" else json_lines(records)
        entry = write_shard(self._directory, shard.number, self._suffix, data)
        num_rows = len(records) + len(errors)
        return entry | {"rows": num_rows, "tokens": tokens, "failed": len(errors), "errors": errors}


@dataclass
class _OpenShard:
    """A shard's rows, where each stands in the input, and what was wrong with the others."""

    number: int
    rows: list[Row] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, record: Record, row: Row) -> None:
        self.rows.append(row)
        self.records.append(record)

    def add_error(self, record: Record, error: MalformedRowError) -> None:
        self.errors.append({"index": record.index, "file": record.file, "line": record.line, "error": str(error)})


@dataclass
class _Sum:
    value: int = 0


def _batches(encoded: Iterator["_OpenShard | Batch | None"]) -> Iterator[Batch]:
    """The batches up to the next None."""
    while isinstance(batch := next(encoded), list):
        yield batch


T = TypeVar("T")


def _row_of(record: Record, good: Callable[[Row], T], bad: Callable[[MalformedRowError], T]) -> T:
    """Parses a record; calls one of the two functions with its row or its error."""
    if record.error is not None:
        return bad(MalformedRowError(record.error))
    try:
        row = parse_row(record.data)
    except MalformedRowError as error:
        return bad(error)
    return good(row)


def _scan(paths: Sequence[str | Path], on_error: OnError) -> int:
    """Counts the rows. With on_error "fail" a malformed one raises now, before anything expensive."""
    num_rows = 0
    for record in read_records(paths):
        num_rows += 1
        if on_error == "fail":
            _row_of(record, lambda row: None, partial(_raise_at, record.place))
    if not num_rows:
        raise InvalidParameterError(f"The input ({', '.join(map(str, paths))}) has no rows.")
    return num_rows


def _raise_at(place: str, error: MalformedRowError) -> None:
    raise MalformedRowError(f"{place}: {error}")


def _report(error: dict[str, Any], on_error: OnError, warn: Callable[[str], None] | None) -> None:
    text = f"{error['file']}:{error['line']}: {error['error']}"
    if on_error == "fail":
        raise MalformedRowError(text)
    if warn is not None:
        warn(text)


def size_of(record: Record) -> int:
    """A row's share of a shard's size: its characters; 1 for a malformed row."""
    return _row_of(record, lambda row: row.size, lambda error: 1)


def _merge_parquet(store: ShardStore, target: Path) -> None:
    from pyarrow import parquet

    with parquet.ParquetWriter(target, parquet_schema()) as writer:
        for path in store.shard_files():
            table = parquet.read_table(path)
            if len(table):
                writer.write_table(table)


def _parquet(records: list[dict[str, Any]]) -> bytes:
    """A file whose columns are the fields of JSON output; those that a row does not have are null, and ids are text."""
    import pyarrow
    from pyarrow import parquet

    rows = [record | {"id": str(record["id"])} if "id" in record else record for record in records]
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, parquet_schema()), buffer)
    return buffer.getvalue()


def parquet_schema() -> Any:
    """Columns of Parquet output, a pyarrow.Schema."""
    import pyarrow as pa

    sequence = [
        ("num_tokens", pa.int64()),
        ("logprob", pa.float64()),
        ("logprob_per_token", pa.float64()),
        ("perplexity", pa.float64()),
        ("greedy", pa.bool_()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_logprobs", pa.list_(pa.float32())),
    ]
    best = [(name, pa.int64()) for name in ("best", "best_per_token", "best_per_byte")]
    choices = pa.list_(pa.struct(sequence))
    return pa.schema([("index", pa.int64()), ("id", pa.string()), *sequence, ("choices", choices), *best])
