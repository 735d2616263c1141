"""Works on shards: in this process, or in several worker processes, each with an engine on devices of its own.

    coordinator                                   worker (its `main` in a process of its own)
      reads the input, cuts shards   --stdin-->   {"directory": ..., "options": ...}, then shards
      keeps the manifest             <--stdout--  progress, the manifest entry of each shard it has written, errors

The lines are JSON. A worker has two shards at most: one it works on and one to begin at once after it. It ends when its
stdin does, so it does not outlive the coordinator. Which worker does which shard changes nothing in the output.

A thread of the worker says now and then that its process runs. One that is stopped, or holds Python's lock for good,
says nothing, is killed, and counts as one that has ended. So the coordinator never waits in a write: it sends what the
pipe takes while it listens.
"""

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from jpaged.api.errors import EngineDeadError, JPagedError, error_of
from jpaged.host.devices import device_shares
from jpaged.scoring.inputs import Record
from jpaged.scoring.progress import Progress
from jpaged.scoring.shards import Entry

log = logging.getLogger("jpaged.scoring")

SHARDS_AHEAD = 2
"""Shards a worker has at once."""

_MOST_FRUITLESS = 1
"""A worker is started again so often without having finished a shard."""

_PROGRESS_PERIOD_S = 0.2

_BEAT_S = 5.0
"""A worker shows so often that it runs, whatever it does."""
_SILENT_S = 300.0
"""One that has shown nothing for so long is killed."""
_BEGIN_S = 300.0
"""The same before its first sign of life: Python starts and imports."""
_LOOK_S = 1.0
"""Silence is counted in such pieces: one that was spent stopped together with the worker (Ctrl-Z) counts once."""

_PROGRAM = """
from jpaged.scoring.workers import main

def processor():
    from {module} import {name}
    return {name}

raise SystemExit(main(processor))
"""
"""A worker. What libraries print when they are imported must not go to the stdout that it was started with."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of the input. number: from 0 on."""

    number: int
    records: list[Record]


Done = Callable[[Entry], None]


class ShardProcessor(Protocol):
    """Writes a file for each shard (`write_shard`) and reports its manifest entry.

    options: as JSON. directory: where shard files go.
    """

    def __init__(self, options: dict[str, Any], directory: Path) -> None: ...

    def run(self, shards: Iterable[Shard], done: Done, progress: Progress) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What makes a `ShardProcessor`.

    processor: its class, at the top of a module. options, directory: its arguments.
    """

    processor: type[ShardProcessor]
    options: dict[str, Any]
    directory: Path

    def make(self) -> ShardProcessor:
        return self.processor(self.options, self.directory)


def run_work(
    work: Work,
    shards: Iterator[Shard],
    num_workers: int,
    devices_each: int,
    done: Done,
    progress: Progress,
    *,
    worker_process: bool = False,
) -> None:
    """Works on all shards. `done` and `progress` may be called in different threads, each in one at a time.

    num_workers: 1 works in this process, unless worker_process is set; more start as many processes. devices_each: GPUs
    of each worker.
    Raises:
        InvalidParameterError: more devices asked for than there are.
        EngineDeadError: a worker ended by itself, or its engine failed.
        JPagedError: whatever a worker met.
    """
    if num_workers == 1 and not worker_process:
        work.make().run(shards, done, progress)
        return
    with WorkerPool(work, num_workers, devices_each) as pool:
        pool.run(shards, done, progress)


class WorkerPool:
    """Worker processes for one kind of work; a context that ends them.

    num_workers, devices_each, and what is raised: as for `run_work`.
    """

    def __init__(self, work: Work, num_workers: int, devices_each: int) -> None:
        environments = device_shares(num_workers, devices_each, os.environ)
        self._workers = [WorkerProcess(i, work, environment) for i, environment in enumerate(environments)]

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.kill()

    def run(self, shards: Iterator[Shard], done: Done, progress: Progress) -> None:
        """Works on all shards. May be called again: the engines are started once."""
        lock = threading.Lock()

        def next_shard() -> Shard | None:
            with lock:
                return next(shards, None)

        def locked(call: Callable[..., None]) -> Callable[..., None]:
            def wrapped(*args: Any) -> None:
                with lock:
                    call(*args)

            return wrapped

        threads = ThreadPoolExecutor(len(self._workers))
        try:
            serve = [threads.submit(w.serve, next_shard, locked(done), locked(progress)) for w in self._workers]
            finished, _ = wait(serve, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        except BaseException:
            for worker in self._workers:  # or their threads would wait for them
                worker.kill()
            raise
        finally:
            threads.shutdown()


class WorkerProcess:
    """The coordinator's end of a worker. A worker that ends by itself, or whose engine fails, is started again with the
    shards that it had. One that ends twice without finishing a shard between ends the work: it may be a shard's fault.
    """

    def __init__(self, number: int, work: Work, environment: dict[str, str]) -> None:
        self._number = number
        self._work = work
        self._environment = environment
        self._lock = threading.Lock()  # of the streams, which another thread may close (`kill`)
        self._killed = False
        self._process = self._start()

    def serve(self, next_shard: Callable[[], Shard | None], done: Done, progress: Progress) -> None:
        """Gives the worker shards until there are no more and all of its own are done.

        Raises:
            EngineDeadError: it ended before that. JPagedError: it said what went wrong.
        """
        open_shards: dict[int, Shard] = {}
        more, fruitless = True, 0
        while more or open_shards:
            while more and len(open_shards) < SHARDS_AHEAD:
                shard = next_shard()
                if shard is None:
                    more = False
                else:
                    self._send(asdict(shard))
                    open_shards[shard.number] = shard
            if not open_shards:
                break
            try:
                message = self._receive()
                if "error" in message:
                    raise error_of(message["error"], message["text"])
            except EngineDeadError as error:
                fruitless += 1
                if fruitless > _MOST_FRUITLESS or not self._start_again():
                    raise
                log.error("%s Worker %d is started again.", error, self._number)
                for shard in open_shards.values():
                    self._send(asdict(shard))
                continue
            if "progress" in message:
                progress(*message["progress"])
            else:
                fruitless = 0
                del open_shards[message["entry"]["shard"]]
                done(message["entry"])

    def kill(self) -> None:
        """Kills the worker for good. A shard that it has not reported is not finished."""
        with self._lock:
            self._killed = True
            self._end()

    def _start(self) -> "subprocess.Popen[bytes]":
        program = _PROGRAM.format(module=self._work.processor.__module__, name=self._work.processor.__name__)
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | self._environment,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        start = {"options": self._work.options, "directory": str(self._work.directory), "beat_s": _BEAT_S}
        self._unsent, self._unread, self._was_heard = bytearray(_line(start)), b"", False
        self._write(process)
        return process

    def _start_again(self) -> bool:
        """Returns whether it was: not one that was killed for good."""
        with self._lock:
            if not self._killed:
                self._end()
                self._process = self._start()
            return not self._killed

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        """Sends what the pipe takes now; `_read_line` sends the rest."""
        with self._lock:
            if not self._killed:
                self._unsent += _line(message)
                self._write(self._process)

    def _write(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        try:
            del self._unsent[: os.write(process.stdin.fileno(), self._unsent)]
        except BlockingIOError:  # the pipe is full
            pass
        except BrokenPipeError:  # it ended; `_receive` says so
            self._unsent.clear()

    def _receive(self) -> dict[str, Any]:
        """The next message that is more than a sign of life."""
        while True:
            line = self._read_line()
            if not line:
                code = self._process.wait()
                raise self._ended(f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}")
            self._was_heard = True
            message: dict[str, Any] = json.loads(line)
            if message:
                return message

    def _read_line(self) -> bytes:
        """Empty when the worker has ended. Raises EngineDeadError, and kills it, if nothing comes for too long.

        Sends meanwhile what is unsent. Only what comes is a sign of life: a pipe also takes what nobody reads.
        """
        silent_s = 0.0
        while b"\n" not in self._unread:
            data = self._exchange()
            if data == b"":
                return b""
            if data is not None:
                self._unread += data
                continue
            silent_s += _LOOK_S
            if silent_s >= (_SILENT_S if self._was_heard else _BEGIN_S):
                self._process.kill()
                raise self._ended(f"gave no sign of life for {silent_s:g} s and was killed")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _exchange(self) -> bytes | None:
        """Reads what has come, after it has sent what the pipe takes. Empty at the stream's end; None if nothing came
        for `_LOOK_S` with no room to send either.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        while True:
            with self._lock:
                if self._killed:
                    return b""
                reader, writers = stdout.fileno(), [stdin.fileno()] if self._unsent else []
            readable, writable, _ = select.select([reader], writers, [], _LOOK_S)
            with self._lock:
                if self._killed:
                    return b""
                if writable:
                    self._write(self._process)
                if readable:
                    return os.read(reader, 1 << 16)
            if not writable:
                return None

    def _ended(self, how: str) -> EngineDeadError:
        return EngineDeadError(
            f"Worker {self._number} {how} before its shards were done. Finished ones are kept; run the same again."
        )


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def main(processor: Callable[[], type[ShardProcessor]]) -> int:
    """A worker. It speaks on the stdout it was started with; what libraries print there goes to stderr.

    processor: imports what works on the shards.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's affair
    protocol = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, messages), daemon=True).start()
    reporter = _Reporter(protocol)
    try:
        start = messages.get()
        threading.Thread(target=reporter.beat, args=(start["beat_s"],), daemon=True).start()
        work = Work(processor(), start["options"], Path(start["directory"]))
        work.make().run(_shards(messages), reporter.done, reporter.progress)
    except JPagedError as error:
        reporter.send({"error": type(error).__name__, "text": str(error)})
        return 1
    except Exception as error:
        reporter.send({"error": "EngineDeadError", "text": f"A worker failed: {type(error).__name__}: {error}"})
        raise
    return 0


def _read(stdin: IO[bytes], messages: "queue.Queue[dict[str, Any]]") -> None:
    """Reads messages until the coordinator closes the stream; then the process ends. All finished shards have been
    reported by then."""
    for line in stdin:
        messages.put(json.loads(line))
    os._exit(0)


def _shards(messages: "queue.Queue[dict[str, Any]]") -> Iterator[Shard]:
    while True:
        message = messages.get()
        yield Shard(message["number"], [Record(**record) for record in message["records"]])


class _Reporter:
    """The worker's end: entries at once, progress now and then. `done` may be called from another thread."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._rows = self._tokens = 0
        self._sent_at = 0.0

    def done(self, entry: Entry) -> None:
        self._send_progress()
        self.send({"entry": entry})

    def progress(self, rows: int, tokens: int) -> None:
        with self._lock:
            self._rows += rows
            self._tokens += tokens
        if time.monotonic() - self._sent_at > _PROGRESS_PERIOD_S:
            self._send_progress()

    def _send_progress(self) -> None:
        with self._lock:
            rows, tokens = self._rows, self._tokens
            self._rows = self._tokens = 0
            self._sent_at = time.monotonic()
        self.send({"progress": [rows, tokens]})

    def beat(self, period_s: float) -> None:
        """Shows from now on that the process runs."""
        with contextlib.suppress(OSError):  # the coordinator has ended
            while True:
                self.send({})
                time.sleep(period_s)

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()
