"""Output that survives `kill -9`: shards, each written whole or not at all, and a manifest of the finished ones.

    out.jsonl.parts/
      manifest.jsonl        {"version": 1, "job": {...}}                   what the work is; another job is refused
                            {"shard": 0, "bytes": ..., "sha256": ...}      one line for each finished shard, appended
                            {"shard": 2, ...}
                            {"complete": true}                           the output is in its place
      shard-00000000.jsonl  written under another name, flushed to the disk, then renamed
      shard-00000002.jsonl
    out.jsonl               put together when all shards are there, then renamed; the directory goes last

A shard counts as finished if the manifest lists it and its file is as listed. So whatever the moment of a crash, what
the next run finds is finished or absent; it does the absent ones, and the output is what one run would have written.
While a run is at work it holds a lock on the manifest.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jpaged.api.errors import InvalidParameterError, JPagedError, OutputError

_VERSION = 1

Entry = dict[str, Any]
"""A finished shard's line of the manifest: "shard", its number; "file", "bytes", "sha256"; and what its writer adds."""


class ShardStore:
    """Finished shards of one output file. One process opens it; others may write shard files (`write_shard`).

    Args:
        output: the file that is to come into being.
        job: what defines the output, as JSON; a run with another one is refused.
        overwrite: drop an output and unfinished work of the same name instead of refusing or going on.

    Attributes:
        directory: where shards are.
        finished: the manifest's entries, by shard number.
        complete: an earlier run put the output in its place, and ended before it had cleared up.

    Raises:
        InvalidParameterError: the output exists, or finished shards of another job are there.
        OutputError: the place cannot be written to, or another process is at work on it.
    """

    def __init__(self, output: str | Path, job: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.output = Path(output)
        self.directory = self.output.with_name(self.output.name + ".parts")
        self.finished: dict[int, Entry] = {}
        self.complete = False
        self._path = self.directory / "manifest.jsonl"
        header: Entry = json.loads(json.dumps({"version": _VERSION, "job": job}))
        with writing(self.output):
            if self.output.exists() and not overwrite and not self._path.exists():
                raise InvalidParameterError(
                    f"The output {self.output} exists; pass overwrite (--overwrite) to replace it."
                )
            if self.output.is_dir():
                raise InvalidParameterError(f"The output {self.output} is a directory; name a file.")
            self.directory.mkdir(exist_ok=True)
            # Open, and locked, for the store's life. Unbuffered, or closing it would try a write that failed again.
            self._manifest = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        try:
            self._lock()
            if overwrite:
                self._manifest.truncate(0)
            self._load(header)
        except BaseException:
            self._manifest.close()
            raise

    def close(self) -> None:
        """Releases the lock. Finished shards stay. A second call does nothing."""
        self._manifest.close()

    def add(self, entry: Entry) -> None:
        """Lists a shard whose file has been written. Raises OutputError if that cannot be written."""
        self._append(entry)
        self.finished[entry["shard"]] = entry

    def shard_files(self) -> Iterator[Path]:
        """The finished shards' files, in the order of their numbers."""
        for number in sorted(self.finished):
            yield self.directory / self.finished[number]["file"]

    def put_in_place(self, made: Mapping[Path, Path]) -> None:
        """Renames files that have been put together (key) to their names (value).

        Raises OutputError if that fails; the shards are then still there.
        """
        with writing(self.output):
            for source, target in made.items():
                _sync(source)
                os.replace(source, target)
            _sync(self.output.parent)
        self._append({"complete": True})
        self.complete = True

    def clear(self) -> None:
        """Removes the shards, the manifest last, and closes the store."""
        with writing(self.directory):
            for path in self.directory.iterdir():
                if path != self._path:
                    path.unlink()
            self._path.unlink()
            self.directory.rmdir()
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"Another process is at work on {self.output}; wait for it, or stop it.") from None

    def _load(self, header: Entry) -> None:
        """Reads the manifest. A last line that a crash cut short is dropped."""
        self._manifest.seek(0)
        data = self._manifest.read()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            self._manifest.truncate(0)
            self._append(header)
            return
        try:
            found, *entries = map(json.loads, lines)
        except ValueError as error:
            raise JPagedError(
                f"{self._path} is damaged ({error}); pass overwrite (--overwrite) to begin anew."
            ) from error
        if found != header:
            if not entries:  # a run that ended before its first shard, of a mistyped model say: nothing would be lost
                self._manifest.truncate(0)
                self._append(header)
                return
            raise InvalidParameterError(
                f"{self.directory} holds unfinished work of another job: {_difference(found, header)}. Run that one to "
                f"its end, name another output, or pass overwrite (--overwrite) to begin anew."
            )
        if whole != data:
            self._manifest.truncate(len(whole))
        self.complete = any("complete" in entry for entry in entries)
        for entry in entries:
            if "shard" in entry and (self.complete or self._is_intact(entry)):
                self.finished[entry["shard"]] = entry

    def _is_intact(self, entry: Entry) -> bool:
        path = self.directory / entry["file"]
        return path.is_file() and path.stat().st_size == entry["bytes"] and _sha256(path) == entry["sha256"]

    def _append(self, entry: Entry) -> None:
        line = (json.dumps(entry) + "\n").encode()
        with writing(self._path):
            whole = os.fstat(self._manifest.fileno()).st_size
            try:
                while line:
                    line = line[self._manifest.write(line) :]
                os.fsync(self._manifest.fileno())
            except OSError:
                self._manifest.truncate(whole)  # the rest of a line would spoil the one after it
                raise


def write_shard(directory: Path, number: int, suffix: str, data: bytes) -> Entry:
    """Writes a shard's file, whole or not at all, and returns its entry for the manifest.

    Raises:
        OutputError: it cannot be written.
    """
    name = f"shard-{number:08d}{suffix}"
    temporary = directory / f".{name}.{os.getpid()}"
    with writing(directory / name):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync(directory)
    return {"shard": number, "file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong while writing into an OutputError that names the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error, JPagedError):
            raise
        reason = error.strerror or str(error)
        fix = "make the place writable, or name another output"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "free some space"
        raise OutputError(
            f"{path} cannot be written ({reason}); {fix}, and run the same again: finished work is kept."
        ) from error


def _sync(path: Path) -> None:
    """Flushes a file, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _difference(found: Entry, header: Entry) -> str:
    """Describes the first difference between two jobs."""
    theirs, ours = found.get("job", {}), header["job"]
    for name in [*ours, *theirs]:
        if theirs.get(name) != ours.get(name):
            return f"its {name} is {theirs.get(name)!r:.200}, this one's {ours.get(name)!r:.200}"
    return f"its manifest is of version {found.get('version')}, this one's of {header['version']}"
