"""What the server adds to a request, and what it takes from throughput, over the same engine used offline.

    python tools/serving_overhead.py --engine-cpus 0 --other-cpus 1 --json overhead.json

Client, API process and engine compete where there are few cores. So the engine is bound to some of them, in both
measurements, and what only the server has (API processes and client) to others. Left out, nothing is bound.

latency      one request at a time, of a given output length, whole and over one kept connection: median time, less the
             median of the same requests through `LLMEngine`
saturation   as many requests at once as run together and more, streamed, by the client of `jpaged bench serve`: output
             tokens/s, over those of the same requests through `LLMEngine`

Both run --rounds times, in turns, offline and served; each figure is the best round's, the least disturbed by others on
the machine.
"""

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_drill import PROMPT, Server

from jpaged import EngineArgs, LLMEngine, SamplingParams
from jpaged.bench.serve import evaluate, run
from jpaged.bench.stream_client import Target
from jpaged.bench.workloads import make_requests
from jpaged.sampling_params import RequestOutputKind


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `LLMEngine`; run in a process of its own, bound to the engine's cores."""
    engine = LLMEngine(EngineArgs(max_num_seqs=args.max_num_seqs, verbose=False))
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    times = []
    for i in range(args.requests):
        begin = time.perf_counter()
        engine.add_request(f"latency-{i}", PROMPT, params)
        while engine.has_unfinished_requests():
            engine.step()
        times.append(time.perf_counter() - begin)
    requests = _requests(args)
    rates = []
    for run_number in range(2):  # the first warms up
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        for i, request in enumerate(requests):
            greedy = SamplingParams(
                temperature=0.0,
                max_tokens=request.output_len,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(f"{run_number}-{i}", request.prompt_token_ids, greedy)
        while engine.has_unfinished_requests():
            engine.step()
        rates.append(sum(request.output_len for request in requests) / (time.perf_counter() - begin))
    return {"latency_ms": 1e3 * statistics.median(times[len(times) // 4 :]), "tokens_per_s": rates[-1]}


def served(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """The same of a server that runs, its processes bound as asked."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True})
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    times = []
    for _ in range(args.requests):
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        times.append(time.perf_counter() - begin)
        if response.status != 200:
            raise SystemExit(f"A request was answered {response.status}.")
    connection.close()
    requests = _requests(args)
    target = Target.parse(server.url, None)
    rates = []
    for _ in range(2):
        server.post("/reset_prefix_cache")
        records, client_load = run(target, "jpaged-demo", requests, [0.0] * len(requests), workers=1, timeout_s=600)
        figures = evaluate(requests, records)
        if figures["failed"]:
            raise SystemExit(f"Requests failed: {figures['failures']}")
        rates.append(figures["output_tokens_per_s"])
    latency_ms = 1e3 * statistics.median(times[len(times) // 4 :])
    return {"latency_ms": latency_ms, "tokens_per_s": rates[-1], "client_load": client_load}


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
        print(json.dumps(offline(args)))
        return 0
    options = ("--max-num-seqs", str(args.max_num_seqs), "--api-workers", str(args.api_workers))
    server = Server(options)
    found: dict[str, list[dict[str, Any]]] = {"offline": [], "served": []}
    try:
        engines = server.engines()
        _bind(engines, args.engine_cpus)
        apis = [pid for pid in (server.process.pid, *server.children()) if pid not in engines]
        _bind([*apis, os.getpid()], args.other_cpus)
        for _ in range(args.rounds):
            found["served"].append(served(args, server))
            print(json.dumps({"served": found["served"][-1]}), flush=True)
            command = [sys.executable, *sys.argv, "--offline-only"]
            if args.engine_cpus:
                command = ["taskset", "-c", ",".join(map(str, sorted(args.engine_cpus))), *command]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
            found["offline"].append(json.loads(answer))
            print(json.dumps({"offline": found["offline"][-1]}), flush=True)
    finally:
        server.close()
    latency = {name: min(round_["latency_ms"] for round_ in rounds) for name, rounds in found.items()}
    rates = {name: max(round_["tokens_per_s"] for round_ in rounds) for name, rounds in found.items()}
    figures = {
        "latency_ms": latency,
        "added_ms": latency["served"] - latency["offline"],
        "tokens_per_s": rates,
        "served_over_offline": rates["served"] / rates["offline"],
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "offline_only")}
        settings = {name: sorted(v) if isinstance(v, set) else v for name, v in settings.items()}
        args.json.write_text(json.dumps({"settings": settings, "figures": figures, "rounds": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
