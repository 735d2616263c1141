"""A server under all kinds of requests and troubles at once: no answer may be wrong, and nothing may leak.

    make drill-soak                                     ten minutes
    make drill-soak ARGS="--seconds 0 --only kill_engine --only kill_api"       these once, and be done
    make drill-soak ARGS="--api-workers 1"              with responses in the background
    ... [drill's options] -- --scheduling-policy priority       what follows is for `jpaged serve`

Clients ask for every kind of answer (tests/support/request_mix.py), whole and streamed. Some go away in the middle,
some read slowly. With `--api-workers 1` some ask for responses in the background, too
(tests/support/background_mix.py), which they poll, read again and cancel; API processes do not share these, and the
only one cannot be killed. The wall clock of all processes jumps by hours (a patched `time.time`). Meanwhile, in random
order:

kill_engine, kill_engines    SIGKILL to one engine process; to all
kill_api                     SIGKILL to an API process: its connections break, and their clients ask again
kill_helper                  SIGKILL to a process that renders templates or checks grammars
pause_engine, hang_engine    SIGSTOP, with SIGCONT after a moment; or for good: the server has to notice
full_disk                    no room for temporary files and the log while an engine process dies; needs the right to
                             mount a file system, and is left out without
reset_prefix_cache           200 while nothing runs, else 409
sleep, sleep_busy            the engine sleeps and wakes up; while requests run it has to refuse, whole
sleep_killed, wake_up_killed SIGKILL to an engine process, then to an API process, while the engine falls asleep or
                             wakes up; then it has to wake up, whole
mute_client                  takes nothing of a large answer: it has to be cut off

Every answer must be that of a calm run before. Before and after, when all is quiet, the server is counted: processes,
and descriptors, threads and memory of each. They must be the same, and the KV pool empty. In the end the server has to
exit with 0 and leave nothing behind. Prints a line of JSON for each trouble and one at the end; exits with 1 if
anything was lost.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.support.background_mix import HOW, RESPONSES, BackgroundClient, background_mix, ended_answer
from tests.support.request_mix import Asked, StreamedAnswer, difference, request_mix, whole_answer
from tests.support.served import Server
from tests.support.small_disk import filled, small_disk
from tests.tiny_models import DEMO_OPTIONS

MARK = "JPAGED_SOAK"
"""A variable of all processes of the server, by which those that are left over are found."""
SEND_TIMEOUT_S, STEP_TIMEOUT_S = 3.0, 20.0
NOTICED_S = 240.0
"""In which a process that was stopped must be noticed, whatever it was doing: it may be importing (`pulse.BEGIN_S`)."""
REPLICAS, API_WORKERS = 2, 2
HELPERS_END_S = 5.0
"""Helpers of the first process end when it has ended, which closes their sockets; Python takes a moment for that."""
BACKGROUND_SHARE = 0.25
"""Of what clients ask for, where there is one API process."""
MEMORY_GROWTH, MEMORY_MARGIN_MIB = 1.1, 24.0
COMPILING_MIB = 168.0
"""What an engine process may have beside, which compiles a program where the one before it found all on disk."""
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""The most that asyncio's pool has, which starts them one by one. A thread for each trouble would be more."""
MOST_STEP_FILES = 10
DISK_KIB = 16 << 10
TROUBLES = (
    *("kill_engine", "kill_engines", "kill_api", "kill_helper", "pause_engine", "hang_engine", "full_disk"),
    *("reset_prefix_cache", "sleep", "sleep_busy", "sleep_killed", "wake_up_killed", "mute_client"),
)
KILL_API = ("kill_api", "sleep_killed", "wake_up_killed")
"""Troubles that end an API process, of which there are several then."""
MUTE_PROMPT, MUTE_TOKENS = 97, 900
OPTIONS = (
    *("--data-parallel-size", str(REPLICAS), "--max-restarts", "100000"),
    *("--send-timeout", f"{SEND_TIMEOUT_S:g}", "--step-timeout", f"{STEP_TIMEOUT_S:g}", "--shutdown-timeout", "20"),
    *DEMO_OPTIONS,  # the tests', whose compiled programs it finds in their cache
)
_CLOCK = """
import time

def stepped(real, unit):
    return lambda: real() + (0, 86400, -86400, 3600)[int(time.monotonic() / 5) % 4] * unit

time.time, time.time_ns = stepped(time.time, 1), stepped(time.time_ns, 10**9)
"""
"""A `sitecustomize`: the wall clock jumps every five seconds."""


class Soak:
    """The clients of a server, and what came of them.

    Attributes:
        counts: of requests, by how they ended. failures: what should not have happened.
        progress: chunks and answers that came.
    """

    def __init__(self, server: Server, http: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self.server, self.http = server, http
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.progress = 0
        self._mix = request_mix(args.tokens, args.seed)
        self._expected: list[dict[str, Any]] = []
        self._background = background_mix(args.tokens) if args.api_workers == 1 else []
        self._ended: list[dict[str, Any]] = []
        self._draw = random.Random(args.seed)
        self._num_clients = args.clients
        self._gate = asyncio.Event()
        self._open = 0
        self._stopped = False
        self._api_killed_at = -1e9

    async def learn(self) -> None:
        """Asks for everything once, in peace."""
        self._expected = await asyncio.gather(*(self._whole(asked) for asked in self._mix))
        for body in self._background:
            response = await self.http.post(RESPONSES, json=body)
            self._ended.append(ended_answer(response.json()))

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[None]:
        """Clients that ask on and on, until the end of the context and of their last answers."""
        self._stopped = False
        self._gate.set()
        tasks = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]
        try:
            yield
        finally:
            self._stopped = True
            self._gate.set()
            await asyncio.gather(*tasks)

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Nobody asks for anything."""
        self._gate.clear()
        while self._open:
            await asyncio.sleep(0.02)
        try:
            yield
        finally:
            self._gate.set()

    def api_killed(self) -> None:
        self._api_killed_at = time.monotonic()

    async def moved(self, least: int = 100) -> None:
        """Waits until so much more has come."""
        end, before = time.monotonic() + 120, self.progress
        while self.progress < before + least:
            if time.monotonic() > end:
                raise RuntimeError("nothing came for two minutes")
            await asyncio.sleep(0.02)

    async def _client(self) -> None:
        while not self._stopped:
            await self._gate.wait()
            self._open += 1
            try:
                if self._background and self._draw.random() < BACKGROUND_SHARE:
                    await self._one_in_background(self._draw.randrange(len(self._background)))
                else:
                    await self._one(self._draw.randrange(len(self._mix)))
            finally:
                self._open -= 1

    async def _one(self, number: int) -> None:
        asked, begun = self._mix[number], time.monotonic()
        how = self._draw.choices(("whole", "streamed", "slow", "cancelled"), (4, 6, 2, 2))[0]
        if not asked.can_stream and how in ("streamed", "slow"):
            how = "whole"
        while True:
            try:
                if how == "cancelled":
                    await self._cancelled(asked)
                else:
                    ask = {"whole": self._whole, "streamed": self._streamed, "slow": self._slow}[how]
                    if wrong := difference(await ask(asked), self._expected[number]):
                        self.failures.append(f"{how} {asked.body}: {wrong}")
                self.counts[how] += 1
                return
            except (httpx.TransportError, ConnectionError, asyncio.IncompleteReadError) as error:
                if self._api_killed_at < begun - 2:
                    self.failures.append(f"{how} {asked.body}: {error!r}")
                    return
                self.counts["asked again"] += 1
                begun = time.monotonic()
            except Exception as error:
                self.failures.append(f"{how} {asked.body}: {error!r}")
                return

    async def _one_in_background(self, number: int) -> None:
        body, how = self._background[number], self._draw.choice(HOW)
        try:
            await BackgroundClient(self.http, body, self._ended[number]).ask(how)
        except Exception as error:
            self.failures.append(f"background, {how} {body}: {error!r}")
        self.counts[f"background, {how}"] += 1
        self.progress += 1

    async def _whole(self, asked: Asked) -> dict[str, Any]:
        response = await self.http.post(asked.path, json=asked.body)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {response.text}")
        self.progress += 1
        return whole_answer(response.content)

    async def _streamed(self, asked: Asked) -> dict[str, Any]:
        answer = StreamedAnswer()
        async with self.http.stream("POST", asked.path, json=_streaming(asked)) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                self.progress += 1
                answer.take(line)
        return _complete(answer)

    async def _slow(self, asked: Asked) -> dict[str, Any]:
        """Takes some hundred bytes at a time, of a small receive buffer."""
        answer = StreamedAnswer()
        sock = _request(self.server, asked.path, _streaming(asked))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2048)
        unread = b""

        async def next_line() -> bytes:  # one may be longer than what is read ahead
            nonlocal unread
            while b"\n" not in unread and (piece := await reader.read(512)):
                unread += piece
            line, end, unread = unread.partition(b"\n")
            return line + end

        try:
            status = await next_line()
            if not status:
                raise ConnectionResetError
            if b" 200 " not in status:
                raise RuntimeError(f"{status!r} {(await reader.read())!r}")
            while line := await next_line():
                if len(line) > 1:
                    self.progress += 1
                    await asyncio.sleep(0.02)
                answer.take(line.decode().rstrip("\r\n"))
        finally:
            writer.transport.abort()
        if not answer.ended and self._api_killed_at > time.monotonic() - 300:
            raise ConnectionResetError  # to HTTP/1.0 a connection that breaks looks like one that ends
        return _complete(answer)

    async def _cancelled(self, asked: Asked) -> None:
        work = self._streamed if asked.can_stream else self._whole
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(work(asked), self._draw.choice((0.01, 0.1, 0.5)))


class Troubles:
    """What befalls a server. Each method is a trouble and returns when the server has got over it."""

    def __init__(self, soak: Soak, draw: random.Random, disk: Path | None, args: argparse.Namespace) -> None:
        self.num_restarts = 0
        self._num_api = args.api_workers
        self._soak, self._server = soak, soak.server
        self._draw = draw
        self._disk = disk
        names = [name for name in args.only or TROUBLES if name != "full_disk" or disk is not None]
        names = [name for name in names if name not in KILL_API or self._num_api > 1]
        self.all: list[Callable[[], Awaitable[None]]] = [getattr(self, name) for name in names]

    async def kill_engine(self) -> None:
        await self._end_engines([self._draw.choice(self._server.engines())])

    async def kill_engines(self) -> None:
        await self._end_engines(self._server.engines())

    async def kill_api(self) -> None:
        await self._end_api()

    async def _end_api(self) -> None:
        self._soak.api_killed()
        victim = self._draw.choice(_running(self._server, "api_process"))
        os.kill(victim, signal.SIGKILL)
        while len(left := _running(self._server, "api_process")) < self._num_api or victim in left:
            await asyncio.sleep(0.05)
        self._soak.api_killed()

    async def kill_helper(self) -> None:
        helpers = [pid for pid, role in _roles(self._server) if role == "helper"]
        if helpers:
            _kill(self._draw.choice(helpers))

    async def pause_engine(self) -> None:
        engine = self._draw.choice(self._server.engines())
        os.kill(engine, signal.SIGSTOP)
        await asyncio.sleep(self._draw.random())
        os.kill(engine, signal.SIGCONT)

    async def hang_engine(self) -> None:
        engine = self._draw.choice(self._server.engines())
        os.kill(engine, signal.SIGSTOP)
        end = time.monotonic() + NOTICED_S
        while engine in self._server.engines():
            if time.monotonic() > end:
                os.kill(engine, signal.SIGKILL)
                raise RuntimeError(f"an engine process that was stopped went unnoticed for {NOTICED_S:g} s")
            await asyncio.sleep(0.1)
        self.num_restarts += 1
        await self._recovered()

    async def full_disk(self) -> None:
        assert self._disk is not None
        with filled(self._disk):
            await self.kill_engine()

    async def reset_prefix_cache(self) -> None:
        await self._post("/reset_prefix_cache", 200, 409)
        async with self._soak.quiet():
            await self._idle()
            await self._post("/reset_prefix_cache", 200)

    async def sleep(self) -> None:
        async with self._soak.quiet():
            await self._idle()
            await self._post(f"/sleep?level={self._draw.choice((1, 2))}", 200)
            refused = await self._ask("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1})
            if refused.status_code != 503 or refused.json()["error"]["code"] != "asleep":
                self._soak.failures.append(f"asleep, it answered {refused.status_code} {refused.text}")
            await self._post("/wake_up", 200)

    async def sleep_busy(self) -> None:
        if await self._post("/sleep", 200, 409) == 200:  # nothing happened to run
            await self._post("/wake_up", 200)

    async def sleep_killed(self) -> None:
        await self._killed_amid("/sleep?level=1")

    async def wake_up_killed(self) -> None:
        await self._killed_amid("/wake_up")

    async def _killed_amid(self, path: str) -> None:
        """Kills an engine process at a random moment of a call, then an API process at one of another call, and wakes
        all up. Nobody asks meanwhile.
        """
        async with self._soak.quiet():
            for kill in (self._end_idle_engine, self._end_api):
                await self._idle()
                if path == "/wake_up":
                    await self._post("/sleep", 200)
                call = asyncio.ensure_future(self._ask("POST", path))
                await asyncio.sleep(self._draw.random() * 0.02)
                await kill()
                answer = await call
                if answer.status_code not in (200, 503):  # 503: an engine process ended when it was to sleep
                    self._soak.failures.append(f"{path}: {answer.status_code} {answer.text}")
                await self._post("/wake_up", 200)
        await self._soak.moved()

    async def _end_idle_engine(self) -> None:
        pid = self._draw.choice(self._server.engines())
        _kill(pid)
        self.num_restarts += 1
        while pid in self._server.engines():
            await asyncio.sleep(0.05)
        await self._serving()

    async def mute_client(self) -> None:
        prompt = list(range(3, 3 + MUTE_PROMPT))  # nobody else's has this length
        body = {"prompt": prompt, "n": 8, "logprobs": 20, "max_tokens": MUTE_TOKENS, "ignore_eos": True, "stream": True}
        with _request(self._server, "/v1/completions", body):
            came, most = False, 0
            while True:
                views = msgspec.json.decode(await self._get("/debug/requests"))["requests"]
                known = [view.get("known", 0) for view in views if view["prompt_tokens"] == MUTE_PROMPT]
                if came and not known:
                    break
                came, most = came or bool(known), max(most, *known, 0)
                await asyncio.sleep(0.2)
        if most >= MUTE_PROMPT + 0.9 * MUTE_TOKENS:
            self._soak.failures.append(f"{most - MUTE_PROMPT} tokens were computed for a client that takes nothing")

    async def _end_engines(self, pids: list[int]) -> None:
        for pid in pids:
            _kill(pid)
        self.num_restarts += len(pids)
        while any(pid in self._server.engines() for pid in pids):
            await asyncio.sleep(0.05)
        await self._recovered()

    async def _recovered(self) -> None:
        """Waits until all replicas serve, and requests get on: who kills twice before that makes suspects."""
        await self._serving()
        await self._soak.moved()

    async def _serving(self) -> None:
        end = time.monotonic() + 120
        while True:
            text = await self._get("/metrics")
            if text.count("jpaged:num_requests_running{") == REPLICAS:
                break
            if time.monotonic() > end:
                raise RuntimeError("a replica does not serve again")
            await asyncio.sleep(0.2)

    async def _idle(self) -> None:
        """Waits until the server has noticed that nobody asks for anything any more."""
        end = time.monotonic() + 30
        while any(open_requests(await self._get("/metrics")).values()):
            if time.monotonic() > end:
                raise RuntimeError("requests go on that nobody waits for")
            await asyncio.sleep(0.05)

    async def _get(self, path: str) -> str:
        while (response := await self._ask("GET", path)).status_code != 200:
            await asyncio.sleep(0.1)
        return response.text

    async def _ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """Asks until there is an answer: the API process may have been killed that a connection leads to."""
        while True:
            try:
                return await self._soak.http.request(method, path, **fields)
            except httpx.TransportError:
                await asyncio.sleep(0.1)

    async def _post(self, path: str, *statuses: int) -> int:
        response = await self._ask("POST", path)
        if response.status_code not in statuses:
            self._soak.failures.append(f"{path}: {response.status_code} {response.text}")
        return response.status_code


async def soak(server: Server, args: argparse.Namespace, disk: Path | None) -> dict[str, Any]:
    """The whole drill on a server that has just started. Returns the report."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as http:
        one = Soak(server, http, args)
        await one.learn()
        async with one.clients():  # until every pool of threads and every cache has what it ever will
            await asyncio.sleep(args.warm_up)
    before = await quiet_census(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as http:
        one.http = http
        troubles = Troubles(one, random.Random(args.seed), disk, args)
        begun, befallen = time.monotonic(), Counter[str]()
        async with one.clients():
            try:
                await befall(one, troubles, begun + args.seconds, befallen)
            except RuntimeError as error:
                one.failures.append(str(error))
        async with one.clients():  # processes that are new grow as those before did
            await asyncio.sleep(args.warm_up)
        metrics = (await http.get("/metrics")).text
    after = await quiet_census(server)
    report: dict[str, Any] = {"seconds": round(time.monotonic() - begun), "troubles": dict(befallen)}
    report |= {"requests": dict(one.counts), "restarts": total(metrics, "engine_restarts_total")}
    report |= {name: total(metrics, f"requests_{name}_total") for name in ("resumed", "suspected")}
    report |= {"before": before, "after": after}
    one.failures += leaks(before, after)
    if report["restarts"] != troubles.num_restarts:
        one.failures.append(f"{report['restarts']} restarts are counted of {troubles.num_restarts}")
    return report | {"failures": one.failures}


async def befall(one: Soak, troubles: Troubles, end: float, befallen: Counter[str]) -> None:
    """Troubles in random order, each as often as the others, until so late, and at least once."""
    draw, rounds, left = random.Random(0), 0, list[Callable[[], Awaitable[None]]]()
    while time.monotonic() < end or rounds < 1 or (rounds == 1 and left):
        if not left:
            left, rounds = draw.sample(troubles.all, len(troubles.all)), rounds + 1
        trouble = left.pop()
        begun, before = time.monotonic(), len(one.failures)
        await trouble()
        name = trouble.__name__
        befallen[name] += 1
        report = {"trouble": name, "took_s": round(time.monotonic() - begun, 1), "answers": sum(one.counts.values())}
        print(json.dumps(report | {"failures": one.failures[before:]}), flush=True)
        await one.moved()


async def quiet_census(server: Server) -> dict[str, Any]:
    """What the server holds when nobody asks: requests, the pool's use, and for each kind of process how many there
    are, and the most descriptors, threads and MiB that one has.
    """
    end = time.monotonic() + 30
    while True:
        held = open_requests(await asyncio.to_thread(lambda: server.get("/metrics").text))
        held["load"] = float(server.get("/load").json()["server_load"])
        if not any(held.values()) or time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # connections that were closed here are closed there
    processes: dict[str, dict[str, float]] = {}
    for pid, role in _roles(server):
        with contextlib.suppress(FileNotFoundError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found = processes.setdefault(role, {"number": 0, "descriptors": 0, "threads": 0, "memory_mib": 0.0})
            found["number"] += 1
            memory_mib = round(int(status["VmRSS"].split()[0]) / 1024, 1)
            values = {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"])}
            for name, value in (values | {"memory_mib": memory_mib}).items():
                found[name] = max(found[name], value)
    return {"held": held, "processes": processes}


def leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is held in the end that was not in the beginning."""
    found = [f"{name} is {value} when all is quiet" for name, value in after["held"].items() if value]
    for role, old in before["processes"].items():
        new = after["processes"].get(role, dict.fromkeys(old, 0))
        memory_mib = MEMORY_GROWTH * old["memory_mib"] + MEMORY_MARGIN_MIB
        memory_mib += COMPILING_MIB if role == "engine_process" else 0.0
        bounds = old | {"memory_mib": memory_mib, "threads": old["threads"] + POOL_THREADS}
        found += [f"{role}: {name} {new[name]}, not {old[name]}" for name in old if new[name] > bounds[name]]
        if new["number"] < old["number"] and role != "helper":  # those start when they are needed
            found.append(f"{role}: {new['number']} processes, not {old['number']}")
    return found


def open_requests(metrics: str) -> dict[str, float]:
    return {
        name: total(metrics, name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }


def total(metrics: str, name: str) -> float:
    """The sum of a metric over the replicas."""
    lines = [line for line in metrics.splitlines() if line.startswith(f"jpaged:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _streaming(asked: Asked) -> dict[str, Any]:
    return asked.body | {"stream": True, "stream_options": {"include_usage": True}}


def _complete(answer: StreamedAnswer) -> dict[str, Any]:
    if not answer.ended:
        raise RuntimeError("The stream ended without [DONE].")
    return answer.answer


def _request(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection with a small receive buffer, with a request in HTTP/1.0, whose answers have no chunks."""
    content, (host, port) = msgspec.json.encode(body), server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    head = f"POST {path} HTTP/1.0\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return sock


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _roles(server: Server) -> list[tuple[int, str]]:
    """The server's processes, and what each is."""
    found = [(server.process.pid, "first")]
    for pid in server.children():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            roles = [role for role in ("engine_process", "api_process") if role.encode() in command]
            if command:  # else: it has ended
                found.append((pid, roles[0] if roles else "helper"))
    return found


def _running(server: Server, role: str) -> list[int]:
    return [pid for pid, found in _roles(server) if found == role]


def _marked(mark: str) -> list[int]:
    """All processes that were started with this mark, wherever they are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _left(mark: str, within_s: float) -> list[int]:
    """Those that have not ended within this time. Returns as soon as none is left."""
    end = time.monotonic() + within_s
    while left := _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(left[0])
            try:
                ended, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            finally:
                os.close(fd)
            if not ended:
                return left
    return []


def drill(args: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name), DISK_KIB) as disk:
        directory, mark = disk or Path(name), f"{os.getpid()}-{time.monotonic_ns()}"
        (Path(name) / "sitecustomize.py").write_text(_CLOCK)
        temporary = directory / "tmp"
        temporary.mkdir()
        environment = {MARK: mark, "PYTHONPATH": name, "TMPDIR": str(temporary)}
        with (directory / "log").open("w+") as log:
            server = Server(
                [*OPTIONS, "--api-workers", str(args.api_workers), *args.serve_options],
                log=log,
                environment=environment,
            )
            try:
                report = asyncio.run(soak(server, args, disk))
            finally:
                server.close()
            log.seek(0)
            written = log.read()
        failures = report["failures"]
        if server.process.returncode != 0:
            failures.append(f"the server ended with exit code {server.process.returncode}")
        if left := _left(mark, HELPERS_END_S):
            failures.append(f"processes {left} are left")
        files = [path.name for path in temporary.iterdir()]
        if len(files) > MOST_STEP_FILES or not all(name.startswith("jpaged-steps-") for name in files):
            failures.append(f"temporary files {files} are left")
        if "Traceback" in written:
            failures.append("the log: " + written[max(0, written.index("Traceback") - 500) :][:4000])
        if args.log is not None:
            args.log.write_text(written)
    print(json.dumps(report), flush=True)
    return not failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of troubles, each at least once (default: 600)")
    parser.add_argument("--only", choices=TROUBLES, action="append", help="may be repeated (default: all)")
    parser.add_argument("--api-workers", type=int, default=API_WORKERS, metavar="N", help="(default: 2)")
    parser.add_argument("--warm-up", type=float, default=10.0, help="s without, before and after (default: 10)")
    parser.add_argument("--clients", type=int, default=16, help="requests at once (default: 16)")
    parser.add_argument("--tokens", type=int, default=40, help="of most answers (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked, and of what befalls (default: 0)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log here")
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="options of the server")
    return 0 if drill(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
