"""`score_files`: rows in files, scores in a file; resumable, and on several devices at once.

    inputs --scan--> rows counted, malformed ones found
           --read--> shards --ScoreShards, here or in workers--> shard files --merge--> output

A shard is some consecutive rows. It begins with nothing in the prefix cache and ends with nothing in flight, so its
scores depend on its rows alone, and not on which run or worker computed them.
"""

import io
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from jpaged.config import EngineArgs
from jpaged.errors import InvalidParameterError, MalformedRowError
from jpaged.scoring.ahead import ahead
from jpaged.scoring.inputs import Record, check_inputs, fingerprint, import_pyarrow, read_records
from jpaged.scoring.rows import Row, RowScore, parse_row
from jpaged.scoring.scorer import BATCHES_AHEAD, Batch, ProgressBar, Scorer
from jpaged.scoring.shards import Entry, ShardStore, write_shard, writing
from jpaged.scoring.workers import Done, Progress, Shard, Work, run_work
from jpaged.version import __version__

OnError = Literal["fail", "skip"]

SHARD_SIZE = 1 << 19
"""Characters in a shard, 130,000 tokens or so: a few seconds of an 8B model on one GPU."""

_FORMATS = (".jsonl", ".parquet")


@dataclass(frozen=True)
class ScoreSummary:
    """What a run did.

    num_rows: rows of the input, of which num_errors could not be scored. num_resumed: rows that earlier runs had done.
    num_tokens: tokens computed, by this run. seconds: that it took, model start included.
    errors_file: lists the rows that could not be scored; None if there are none.
    """

    num_rows: int
    num_errors: int
    num_resumed: int
    num_tokens: int
    seconds: float
    errors_file: Path | None = None


def score_files(
    inputs: str | Path | Sequence[str | Path],
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
    use_tqdm: bool = True,
    warn: Callable[[str], None] | None = None,
    **options: Any,
) -> ScoreSummary:
    """Scores the rows of files into a file. Run again after a crash it goes on where it was, to the same output.

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
        use_tqdm: show a progress bar with tokens/s and time left.
        warn: called with a line for each row that is skipped.
    Raises:
        InvalidParameterError: an argument out of range; the output exists; unfinished work of another job is there.
        MalformedRowError: with on_error "fail"; names file and line.
        OutputError: the output cannot be written; finished shards are kept.
        EngineDeadError: an engine failed, or a worker died; finished shards are kept.
    """
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    output = Path(output)
    _check_arguments(paths, output, on_error, shard_size, data_parallel_size, options)
    begun = time.perf_counter()
    settings = {"window": window, "stride": stride, "add_special_tokens": add_special_tokens, "logprobs": logprobs}
    engine = {"model": model, **options}
    num_rows = _scan(paths, on_error)
    job = {
        "task": "score",
        "inputs": [fingerprint(path) for path in paths],
        **settings,
        "shard_size": shard_size,
        **{name: value for name, value in engine.items() if name != "verbose"},
        "jpaged": __version__,
    }
    store = ShardStore(output, job, overwrite=overwrite)
    try:
        resumed = sum(entry["rows"] for entry in store.finished.values())
        work = Work("score", str(store.directory), {**settings, "suffix": output.suffix, "engine": engine})
        todo = (shard for shard in shards_of(read_records(paths), shard_size) if shard.number not in store.finished)
        tokens = 0

        def done(entry: Entry) -> None:
            nonlocal tokens
            for error in entry["errors"]:
                _report(error, on_error, warn)
            tokens += entry["tokens"]
            store.add(entry)

        if resumed < num_rows and not store.complete:
            with ProgressBar(num_rows, done=resumed, shown=use_tqdm) as bar:
                devices_each = int(options.get("tensor_parallel_size", 1))
                run_work(work, todo, data_parallel_size, devices_each, done, bar.add)
        errors = [error for number in sorted(store.finished) for error in store.finished[number]["errors"]]
        errors_file = _finish(store, errors)
    finally:
        store.close()
    return ScoreSummary(
        num_rows=num_rows,
        num_errors=len(errors),
        num_resumed=resumed,
        num_tokens=tokens,
        seconds=time.perf_counter() - begun,
        errors_file=errors_file,
    )


def shards_of(records: Iterable[Record], shard_size: int) -> Iterator[Shard]:
    """Cuts rows into shards of at least `shard_size` characters; the same rows give the same shards."""
    part: list[Record] = []
    size = number = 0
    for record in records:
        part.append(record)
        size += _row_of(record, lambda row: row.size, lambda error: 1)
        if size >= shard_size:
            yield Shard(number, part)
            part, size, number = [], 0, number + 1
    if part:
        yield Shard(number, part)


class ScoreShards:
    """Scores shards with one engine (`ShardProcessor`).

    Rows are encoded by a thread, shards ahead; finished shards are written by another. The engine waits for neither.
    """

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        self._directory = directory
        self._suffix: str = options["suffix"]
        self._logprobs: bool = options["logprobs"]
        scorer = {name: options[name] for name in ("window", "stride", "add_special_tokens")}
        # JSON made lists of the tuples.
        engine = {name: tuple(value) if isinstance(value, list) else value for name, value in options["engine"].items()}
        self._scorer = Scorer(**scorer | engine)

    def run(self, shards: Iterable[Shard], done: Done, progress: Progress) -> None:
        """Scores each shard and writes it. `done` gets its manifest entry, in the writing thread."""
        with ThreadPoolExecutor(1) as writer:
            written: list[Future[None]] = []
            encoded = ahead(self._encode(shards), BATCHES_AHEAD)
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
        data = _parquet(records) if self._suffix == ".parquet" else _json_lines(records)
        entry = write_shard(self._directory, shard.number, self._suffix, data)
        num_rows = len(records) + len(errors)
        return entry | {"rows": num_rows, "tokens": tokens, "errors": errors}


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
    """Parses a record and calls one of the two with what comes of it."""
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


def _check_arguments(
    paths: Sequence[str | Path],
    output: Path,
    on_error: str,
    shard_size: int,
    data_parallel_size: int,
    options: dict[str, Any],
) -> None:
    check_inputs(paths)
    if output.suffix not in _FORMATS:
        raise InvalidParameterError(f"The output {output} must end in one of {', '.join(_FORMATS)}.")
    if any(output.resolve() == Path(path).resolve() for path in paths):
        raise InvalidParameterError(f"The output {output} is an input too; name another file.")
    if on_error not in get_args(OnError):
        raise InvalidParameterError(f'on_error must be "fail" or "skip", got {on_error!r}.')
    for name, value in (("shard_size", shard_size), ("data_parallel_size", data_parallel_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidParameterError(f"{name} must be an integer from 1 up, got {value!r}.")
    unknown = sorted(set(options) - set(EngineArgs.__dataclass_fields__))
    if unknown:
        raise InvalidParameterError(f"score_files has no option {unknown[0]!r}.")
    EngineArgs(**options)
    if output.suffix == ".parquet":
        import_pyarrow()


def _finish(store: ShardStore, errors: list[dict[str, Any]]) -> Path | None:
    """Puts the output, and the list of rows left out, together and in place. Returns that list's file."""
    errors_file = store.output.with_name(store.output.name + ".errors.jsonl")
    if not store.complete:
        merged, listed = store.directory / "merged", store.directory / "errors"
        with writing(store.output):
            _merge(store, merged)
            if errors:
                listed.write_bytes(_json_lines(errors))
            else:
                errors_file.unlink(missing_ok=True)
        store.put_in_place({listed: errors_file, merged: store.output} if errors else {merged: store.output})
    store.clear()
    return errors_file if errors else None


def _merge(store: ShardStore, target: Path) -> None:
    if store.output.suffix != ".parquet":
        with open(target, "wb") as file:
            for path in store.shard_files():
                with open(path, "rb") as shard:
                    shutil.copyfileobj(shard, file, 1 << 20)
        return
    from pyarrow import parquet

    with parquet.ParquetWriter(target, _parquet_schema()) as writer:
        for path in store.shard_files():
            table = parquet.read_table(path)
            if len(table):
                writer.write_table(table)


def _json_lines(records: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def _parquet(records: list[dict[str, Any]]) -> bytes:
    """A file whose columns are the fields of JSON output; those that a row does not have are null, and ids are text."""
    import pyarrow
    from pyarrow import parquet

    rows = [record | {"id": str(record["id"])} if "id" in record else record for record in records]
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, _parquet_schema()), buffer)
    return buffer.getvalue()


def _parquet_schema() -> Any:
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
