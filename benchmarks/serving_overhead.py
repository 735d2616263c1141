"""What the server adds to a request, and what it takes from throughput, over the same engine used offline.

    python benchmarks/serving_overhead.py --engine-cpus 0 --other-cpus 1 --json overhead.json

Client, API process and engine compete for few cores. So `--engine-cpus` binds the engine to some of them in both
measurements, and `--other-cpus` binds API processes and client to others. Without these options nothing is bound.

latency      one request at a time, of a given output length, whole and over one kept connection, in turns with the same
             request through `LLMEngine`: the difference of the medians, and of the 10th percentiles, which others on
             the machine disturb less. The client is a bare socket, so that its own cost is small
saturation   more requests at once than run together, streamed, by the client of `jpaged bench serve`, in turns with the
             same requests through `LLMEngine`: the ratio of output tokens/s, median of the rounds
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from jpaged import EngineArgs, LLMEngine, SamplingParams
from jpaged.api.sampling_params import RequestOutputKind
from jpaged.bench.report import write_report
from jpaged.bench.serve import evaluate, run
from jpaged.bench.stream_client import Target
from jpaged.bench.workloads import make_requests
from tests.support.served import Server

PROMPT = "Once upon a time"

BATCH = 10
"""Requests for latency in a turn."""


class Offline:
    """`LLMEngine` in a process of its own, which does one thing after another as it is told."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, *sys.argv, "--offline-only"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.ask("ready")

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def answer_offline(args: argparse.Namespace) -> None:
    """That process."""
    engine = LLMEngine(EngineArgs(max_num_seqs=args.max_num_seqs, verbose=False))
    latency = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    for number, line in enumerate(sys.stdin):
        found: Any = None
        if line == "latency\n":
            found = []
            for i in range(BATCH):
                begin = time.perf_counter()
                engine.add_request(f"{number}-{i}", PROMPT, latency)
                while engine.has_unfinished_requests():
                    engine.step()
                found.append(time.perf_counter() - begin)
        elif line == "saturation\n":
            engine.reset_prefix_cache()
            requests = _requests(args)
            begin = time.perf_counter()
            for i, request in enumerate(requests):
                greedy = replace(latency, max_tokens=request.output_len, output_kind=RequestOutputKind.DELTA)
                engine.add_request(f"{number}-{i}", request.prompt_token_ids, greedy)
            while engine.has_unfinished_requests():
                engine.step()
            found = sum(request.output_len for request in requests) / (time.perf_counter() - begin)
        print(json.dumps(found), flush=True)


class Connection:
    """The least that a client can be: a request goes out in one packet, and the answer's body is not looked at."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)

    def post(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\n"
        self._socket.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer, end = b"", 1
        while len(answer) < end:
            answer += self._read()
            if b"\r\n\r\n" in answer:
                head_bytes = answer.index(b"\r\n\r\n") + 4
                end = head_bytes + int(answer.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"A request was answered {answer.decode()}")

    def _read(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise SystemExit("The server closed the connection.")
        return data


def served_latency(args: argparse.Namespace, connection: Connection) -> list[float]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True}).encode()
    times = []
    for _ in range(BATCH):
        begin = time.perf_counter()
        connection.post("/v1/completions", body)
        times.append(time.perf_counter() - begin)
    return times


def served_saturation(args: argparse.Namespace, server: Server) -> tuple[float, float]:
    """Output tokens/s, and the share of its core that the client took."""
    server.post("/reset_prefix_cache")
    requests = _requests(args)
    records, client_load = run(
        Target.parse(server.url, None), "jpaged-demo", requests, np.zeros(len(requests)), workers=1, timeout_s=600
    )
    figures = evaluate(requests, records)
    if figures["failed"]:
        raise SystemExit(f"Requests failed: {figures['failures']}")
    return figures["output_tokens_per_s"], client_load


def _requests(args: argparse.Namespace) -> list[Any]:
    return make_requests(
        "random", args.streams, 2816, input_len=32, output_len=args.stream_tokens, prefix_len=0, seed=0
    )


def _bind(pids: Sequence[int], cpus: set[int] | None) -> None:
    """All threads of these processes."""
    for pid in pids if cpus else ():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cpus)


def _cpus(text: str) -> set[int]:
    return {int(cpu) for cpu in text.split(",")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-cpus", type=_cpus, help="cores of the engine, such as 0 or 0,1")
    parser.add_argument("--other-cpus", type=_cpus, help="cores of API processes and client")
    parser.add_argument("--requests", type=int, default=200, help="one after another, for latency")
    parser.add_argument("--tokens", type=int, default=16, help="of each of those")
    parser.add_argument("--streams", type=int, default=256, help="at once, for saturation")
    parser.add_argument("--stream-tokens", type=int, default=100, help="of each of those")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--offline-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline_only:
        answer_offline(args)
        return 0
    server = Server(("--max-num-seqs", str(args.max_num_seqs), "--api-workers", str(args.api_workers)))
    offline = Offline(args)
    times: dict[str, list[float]] = {"offline": [], "served": []}
    rates: dict[str, list[float]] = {"offline": [], "served": []}
    client_loads = []
    try:
        engines = server.engines()
        _bind([*engines, offline.pid], args.engine_cpus)
        apis = [pid for pid in (server.process.pid, *server.children()) if pid not in engines]
        _bind([*apis, os.getpid()], args.other_cpus)
        connection = Connection(server.url)
        for measured in [False] + [True] * -(-args.requests // BATCH):  # the first warms up
            pair = {"offline": offline.ask("latency"), "served": served_latency(args, connection)}
            for name in times if measured else ():
                times[name] += pair[name]
        for measured in [False] + [True] * args.rounds:
            rate, client_load = served_saturation(args, server)
            pair = {"offline": offline.ask("saturation"), "served": rate}
            client_loads.append(client_load)
            for name in rates if measured else ():
                rates[name].append(pair[name])
    finally:
        offline.close()
        server.close()
    percentiles = {
        name: dict(zip(("p10", "p50"), np.percentile(t, (10, 50)) * 1e3, strict=True)) for name, t in times.items()
    }
    ratios = [a / b for a, b in zip(rates["served"], rates["offline"], strict=True)]
    figures = {
        "latency_ms": percentiles,
        "added_ms": {q: percentiles["served"][q] - percentiles["offline"][q] for q in ("p10", "p50")},
        "tokens_per_s": rates,
        "served_over_offline": statistics.median(ratios),
        "client_load": max(client_loads),
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "offline_only")}
        settings = {name: sorted(v) if isinstance(v, set) else v for name, v in settings.items()}
        write_report(args.json, "serving_overhead", settings, figures, devices={})
    return 0


if __name__ == "__main__":
    sys.exit(main())
