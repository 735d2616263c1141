"""A server in a process of its own, as users start it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx

from tests.tiny_models import DEMO_OPTIONS

KEY = "a-key-for-tests"
OPTIONS = (*DEMO_OPTIONS, "--api-workers", "1")


class Server:
    """`jpaged serve` with more options; `client` asks it with the key."""

    def __init__(self, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "jpaged", "serve", "--port", str(self.port), *OPTIONS, *options]
        self.log = log
        with log.open("w") as sink:
            environment = {**os.environ, "JPAGED_API_KEY": KEY}
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
        self.url = f"http://127.0.0.1:{self.port}"
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)
        try:
            self._wait_until_it_serves()
        except BaseException:
            self.close()
            raise

    def _wait_until_it_serves(self) -> None:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError("The server did not start: " + self.log.read_text())

    @property
    def engine_pid(self) -> int:
        """Of the process that is its child."""
        (child,) = self.children("engine_process")
        return child

    def children(self, module: str) -> list[int]:
        """Pids of its children that run a module of `jpaged.serving`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(c) for c in children if module.encode() in Path(f"/proc/{c}/cmdline").read_bytes()]

    def serving(self, response: httpx.Response) -> int:
        """Pid of the API process that writes a stream which has begun."""
        port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        ends = f":{self.port:04X} 0100007F:{port:04X} "
        (line,) = [one for one in Path("/proc/net/tcp").read_text().splitlines() if ends in one]
        its_socket = f"socket:[{line.split()[9]}]"
        for pid in self.children("api_process"):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                    if os.readlink(descriptor) == its_socket:
                        return pid
        raise AssertionError(f"No API process has the connection from port {port}.")

    @contextlib.contextmanager
    def engines_standing_still(self) -> Iterator[None]:
        """What runs and waits there goes on to, however slow this process is."""
        pids = self.children("engine_process")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def wait_until_idle(self) -> None:
        """Until its process takes next to no time."""
        end = time.monotonic() + 60
        while True:
            before = self._cpu_s()
            time.sleep(0.2)
            if self._cpu_s() - before < 0.04:
                return
            assert time.monotonic() < end, "it is busy"

    def _cpu_s(self) -> float:
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"jpaged:{name}{{"))

    def wait_until_refusing(self) -> None:
        """Until none of its processes listens: each stops to when it begins to drain."""
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=60).close()
            except ConnectionRefusedError:
                return
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def log_with(self, text: str) -> str:
        """Its log, once this is in it: a request's line is written after the last byte of its answer."""
        end = time.monotonic() + 60
        while text not in (log := self.log.read_text()):
            assert time.monotonic() < end, log
            time.sleep(0.02)
        return log

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def shared(start: Callable[[], Server]) -> Iterator[Callable[[], Server]]:
    """A server for many tests: each call returns the one that runs. Where a test has ended it, another is started."""
    started: list[Server] = []

    def running() -> Server:
        if not started or started[-1].process.poll() is not None:
            started.append(start())
        return started[-1]

    try:
        yield running
    finally:
        for server in started:
            server.close()


def ended_within(pids: Iterable[int], seconds: float) -> bool:
    """Whether all of these processes are gone by then."""
    left, end = set(pids), time.monotonic() + seconds
    while left and time.monotonic() < end:
        left = {pid for pid in left if is_running(pid)}
        time.sleep(0.02)
    return not left


def is_running(pid: int) -> bool:
    """Whether there is such a process and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
