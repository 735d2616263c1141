"""A server without a key in a process of its own, for drills, benchmarks and tools."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from jpaged.processes.spare import TAKEN

_START_S = 600.0
_LAST_LINES = 20


class Server:
    """`jpaged serve` with these options, without a key, on a free port of this machine.

    log: an open file for what it writes; None: this process's own stderr. environment: further variables.

    Attributes:
        url: of its root. process: the first of its processes. start_s: until it served.

    Raises:
        SystemExit: it ended before it served, or does not serve in ten minutes; with what it wrote last.
    """

    def __init__(
        self, options: Sequence[str], log: IO[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jpaged", "serve", "--port", str(port), "--quiet", "--api-workers", "1"]
        self.url = f"http://127.0.0.1:{port}"
        variables = {name: value for name, value in os.environ.items() if name != "JPAGED_API_KEY"}
        for name, value in (environment or {}).items():
            variables[name] = os.pathsep.join(filter(None, [value, variables.get(name)])) if "PATH" in name else value
        self.process = subprocess.Popen([*command, *options], env=variables, stdout=log, stderr=log)
        begun = time.monotonic()
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.get("/health").status_code == 200:
                    self.start_s = time.monotonic() - begun
                    return
            if (code := self.process.poll()) is not None:
                raise SystemExit(f"The server ended with exit code {code} before it served.{_last_lines(log)}")
            if time.monotonic() - begun > _START_S:
                self.close()
                raise SystemExit(f"The server did not start within {_START_S:g} s.{_last_lines(log)}")
            time.sleep(0.2)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, trust_env=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False)

    def gauge(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"jpaged:{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def children(self, of: int | None = None) -> list[int]:
        """Its children and theirs, without those that end meanwhile."""
        pid = self.process.pid if of is None else of
        try:
            direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [*direct, *(child for one in direct for child in self.children(one))]

    def engines(self) -> list[int]:
        """Engine processes that serve, or start to; not those that wait to take the place of one."""
        return [pid for pid in self.children() if b"engine_process" in _command(pid) and not _is_spare(pid)]

    def memory_mib(self) -> float:
        """Resident memory of all its processes."""
        lines = [
            line
            for pid in (self.process.pid, *self.children())
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        ]
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def _is_spare(pid: int) -> bool:
    """Whether a process waits to take the place of an engine process."""
    with contextlib.suppress(OSError):
        return b"--spare" in _command(pid) and Path(f"/proc/{pid}/comm").read_text().strip() != TAKEN
    return False


def _command(pid: int) -> bytes:
    """What a process was started with; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextlib.contextmanager
def serving(options: Sequence[str]) -> Iterator[Server]:
    server = Server(options)
    try:
        yield server
    finally:
        server.close()


def _last_lines(log: IO[str] | None) -> str:
    """What a server wrote last, behind a line break; nothing where it is not to be read here."""
    if log is None or not log.readable():
        return ""
    log.seek(0)
    return "".join(["\n", *log.readlines()[-_LAST_LINES:]])
