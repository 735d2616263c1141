"""Reads input files: JSON Lines, CSV or Parquet, by suffix. Each row knows its file and line.

    .jsonl .ndjson   an object a line; blank lines are passed over
    .csv             a header, then a row each; "choices" is a JSON list; an empty cell is no field, but for the prompt
    .parquet         a column for each field; nulls count as absent; lines count rows

A line that cannot be read is a record with an error, not an exception: what to do about it is the caller's to say.
"""

import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.api.errors import InvalidParameterError, JPagedError, MissingPackageError, shown


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the input.

    index: its number among all rows of all files, from 0 on, unreadable ones included.
    file, line: where it stands; lines from 1 on (the last one, of a CSV row that spans several).
    data: its fields, as they are in the file. error: why it could not be read; then data is empty.
    """

    index: int
    file: str
    line: int
    data: Any
    error: str | None = None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def checked_inputs(inputs: str | Path | Iterable[str | Path], formats: Sequence[str]) -> list[str | Path]:
    """One path or several, as a list.

    Raises:
        InvalidParameterError: there is none, or something else among them; or one is no file, or of another format than
            these, by suffix.
    """
    if isinstance(inputs, bytes) or not isinstance(inputs, str | Path | Iterable):
        raise InvalidParameterError(f"inputs must be a path or a list of paths, got {shown(inputs)}.")
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not paths:
        raise InvalidParameterError("There is no input file; name at least one.")
    for given in paths:
        if not isinstance(given, str | Path):
            raise InvalidParameterError(f"An input must be a path, got {shown(given)}.")
        path = Path(given)
        if path.suffix not in formats:
            raise InvalidParameterError(
                f"The input {path} must end in one of {', '.join(formats)}, which tells its format."
            )
        if not path.is_file():
            raise InvalidParameterError(f"The input {path} is no file; check the name.")
    return paths


def fingerprint(path: str | Path) -> dict[str, Any]:
    """A file's identity: name, size and sha256 of its contents."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return {"file": str(path), "bytes": size, "sha256": digest.hexdigest()}


def read_records(paths: Sequence[str | Path]) -> Iterator[Record]:
    """All rows of all files, in order.

    Raises:
        JPagedError: a Parquet file that is none, two columns of one name, or pyarrow is not installed.
        OSError: a file cannot be read.
    """
    index = 0
    for path in map(Path, paths):
        readers = {".csv": _read_csv, ".parquet": _read_parquet}
        for line, data, error in readers.get(path.suffix, _read_json_lines)(path):
            yield Record(index, str(path), line, data, error)
            index += 1


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any, str | None]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")), None
            except UnicodeDecodeError as error:
                yield number, {}, f"the line is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}."
            except (ValueError, RecursionError) as error:
                yield number, {}, f"the line is not JSON: {error or 'it is nested too deeply'}."


def _read_csv(path: Path) -> Iterator[tuple[int, Any, str | None]]:
    csv.field_size_limit(sys.maxsize)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _check_columns(path, reader.fieldnames or ())
        except csv.Error as error:
            raise JPagedError(f"{path} has a header that is not CSV: {error}.") from error
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:  # an open quote swallows the rest of the file
                yield reader.line_num, {}, f"the row is not CSV: {error}."
                continue
            if row is None:
                return
            yield reader.line_num, *_csv_fields(row)


def _csv_fields(row: dict[str | Any, Any]) -> tuple[Any, str | None]:
    if None in row:
        return {}, "the row has more cells than the header has columns; quote cells that hold commas."
    if any("\udc80" <= c <= "\udcff" for value in row.values() if value for c in value):
        return {}, "the row is not UTF-8."
    fields = {name: value for name, value in row.items() if value or (name == "prompt" and value is not None)}
    if "choices" in fields:
        try:
            fields["choices"] = json.loads(fields["choices"])
        except (ValueError, RecursionError) as error:
            return {}, f'"choices" must be a JSON list such as ["yes", "no"]: {error}.'
    return fields, None


def _read_parquet(path: Path) -> Iterator[tuple[int, Any, str | None]]:
    pyarrow = import_pyarrow()
    from pyarrow import parquet

    try:
        line = 0
        with parquet.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    line += 1
                    yield line, {name: value for name, value in row.items() if value is not None}, None
    except pyarrow.ArrowException as error:
        raise JPagedError(f"{path} cannot be read as Parquet: {error}") from error


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Raises JPagedError if two columns have the same name: it is unclear which one is meant."""
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise JPagedError(f"{path} has two columns of the name {shown(twice)}; rename or remove one.")


def import_pyarrow() -> Any:
    """Imports pyarrow. Raises MissingPackageError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise MissingPackageError("Parquet files need pyarrow: pip install 'jpaged[score]'.") from error
    return pyarrow
