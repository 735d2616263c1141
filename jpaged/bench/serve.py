"""`jpaged bench serve`: an open-loop load generator for any OpenAI-compatible server, over streaming /v1/completions.

Requests are sent at random (Poisson) times drawn beforehand, each on a connection of its own, whether or not the
server keeps up. Prompts are token ids; outputs have a fixed length (`ignore_eos`, `max_tokens`, temperature 0). The
server's usage is checked: a request that fails or has another length is counted, named and left out of the latency
figures, and makes the exit code 1.

Figures, times from the moment a request's connection is begun:
  TTFT              time to the first streamed tokens
  inter-token       time between two arrivals, divided evenly among the tokens that arrived together at its end
                    (tokens that come with a request's first count as 0); percentiles over tokens. Tokens a streamed
                    chunk are the request's output length over its number of chunks
  inter-arrival     the same times undivided; percentiles over arrivals. It shows the stalls that dividing evens out
  normalized        time to the last token / output length, a request (the PagedAttention paper's metric)
  latency           time to the last token, a request
  lag               by how much a request was sent later than drawn
  client load       CPU time of the busiest worker / elapsed time: near 1, the client is the bottleneck (--workers)

A second run with the same seed hits the server's prefix cache: change --seed, or empty the cache.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.arguments import bench_parser
from jpaged.bench.percentiles import summary
from jpaged.bench.percentiles import table as percentile_table
from jpaged.bench.stream_client import StreamRecord, Target, send_all
from jpaged.bench.workloads import DATASETS, BenchRequest, make_requests
from jpaged.host.cores import usable_cores

START_DELAY_S = 0.2
"""From the moment all workers are ready until the first request."""


def parser() -> argparse.ArgumentParser:
    result = bench_parser("serve", __doc__, "--dataset sharegpt-like --request-rate 25 --num-prompts 500")
    result.add_argument("--base-url", default="http://127.0.0.1:8000", help="where the server listens")
    result.add_argument("--model", help="the name to send (default: the first of the server's /v1/models)")
    result.add_argument("--api-key", help="sent as a bearer token (default: $OPENAI_API_KEY)")
    result.add_argument("--request-rate", type=float, default=math.inf, help="requests/s; inf: all at once")
    result.add_argument("--num-prompts", type=int, default=1000, help="requests")
    result.add_argument("--dataset", default="sharegpt-like", choices=DATASETS, help="what lengths they have")
    result.add_argument("--input-len", type=int, default=512, help="tokens of a prompt, for random and shared-prefix")
    result.add_argument("--output-len", type=int, default=256, help="tokens of an answer, for random and shared-prefix")
    result.add_argument("--prefix-len", type=int, default=2048, help="tokens that all prompts share, for shared-prefix")
    result.add_argument(
        "--dataset-path", type=Path, help="a ShareGPT JSON file to draw conversations from, instead of --dataset"
    )
    result.add_argument("--tokenizer", help="of the server's model, a directory or hub id; for --dataset-path")
    result.add_argument(
        "--vocab-size",
        type=int,
        default=1000,
        help="prompts are random token ids below this. Any common model has the default; with the "
        "model's own number, prompts are as varied as they can be",
    )
    result.add_argument("--workers", type=int, help="processes that send (default: a quarter of the cores)")
    result.add_argument("--timeout", type=float, default=600.0, help="seconds; a request that takes longer has failed")
    result.add_argument("--seed", type=int, default=0, help="of prompts, lengths and sending times")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    workers = _default_workers() if args.workers is None else args.workers
    _check(args, workers)
    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    target = Target.parse(args.base_url, api_key)
    model = args.model or first_model(target)
    requests = _requests(args)
    times = draw_times(args.num_prompts, args.request_rate, args.seed)
    records, client_load = run(target, model, requests, times, workers=workers, timeout_s=args.timeout)
    figures = evaluate(requests, records) | {"client_load": client_load}
    print(table(figures), flush=True)
    if args.json:
        from jpaged.bench.report import write_report  # it imports JAX

        settings = vars(args) | {"api_key": None, "model": model, "workers": workers}
        write_report(args.json, "serve", settings, figures, devices={})
    return 1 if figures["failed"] else 0


def _requests(args: argparse.Namespace) -> list[BenchRequest]:
    if args.dataset_path is not None:
        from jpaged.bench.sharegpt import read_turns, sharegpt_requests  # both imports take time
        from jpaged.text.tokenizer import Tokenizer

        turns = read_turns(args.dataset_path)
        return sharegpt_requests(turns, Tokenizer.load(args.tokenizer), args.num_prompts, seed=args.seed)
    return make_requests(
        args.dataset,
        args.num_prompts,
        args.vocab_size,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
        seed=args.seed,
    )


def _default_workers() -> int:
    return max(1, usable_cores() // 4)


def _check(args: argparse.Namespace, workers: int) -> None:
    """Raises InvalidParameterError for a number out of range."""
    least = {"num_prompts": 1, "input_len": 1, "output_len": 1, "prefix_len": 0, "vocab_size": 1, "seed": 0}
    for name, bound in least.items():
        if getattr(args, name) < bound:
            option = name.replace("_", "-")
            raise InvalidParameterError(f"--{option} must be at least {bound}, got {getattr(args, name)}.")
    if (args.dataset_path is None) != (args.tokenizer is None):
        raise InvalidParameterError("--dataset-path and --tokenizer go together: the server is sent token ids.")
    if workers < 1:
        raise InvalidParameterError(f"--workers must be at least 1, got {workers}.")
    if not args.request_rate > 0:
        raise InvalidParameterError(f"--request-rate must be above 0, or inf, got {args.request_rate}.")
    if not 0 < args.timeout < math.inf:
        raise InvalidParameterError(f"--timeout must be a number of seconds above 0, got {args.timeout}.")


def first_model(target: Target) -> str:
    """The first id of /v1/models. Raises OSError if the server cannot be reached or does not answer with one."""
    scheme = "https" if target.is_tls else "http"
    host = f"[{target.host}]" if ":" in target.host else target.host
    url = f"{scheme}://{host}:{target.port}{target.path}/models"
    headers = dict(line.split(": ", 1) for line in target.headers.splitlines())
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as response:
            return json.load(response)["data"][0]["id"]
    except urllib.error.URLError as error:
        reason = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else error.reason
        raise ConnectionError(f"cannot ask {url} for its models: {reason}. Is the server running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConnectionError(f"{url} lists no models: pass --model.") from error


def draw_times(count: int, rate: float, seed: int) -> np.ndarray:
    """Sending times [count] in s from the first, of a Poisson process of this rate in requests/s; inf: all 0."""
    if math.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, count)  # independent of the prompts' draws
    return np.cumsum(gaps) - gaps[0]


@dataclass(frozen=True)
class _Share:
    """What one worker sends: bodies, and their times in s from the start."""

    target: Target
    requests: list[tuple[float, bytes]]
    timeout_s: float


def run(
    target: Target,
    model: str,
    requests: list[BenchRequest],
    times: np.ndarray,
    *,
    workers: int,
    timeout_s: float,
) -> tuple[list[StreamRecord], float]:
    """Sends the requests from so many processes. Returns their records in order, and the busiest worker's load."""
    bodies = [_body(model, request) for request in requests]
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for worker in range(workers):
            ours, theirs = context.Pipe()
            share = [
                (float(at), body) for at, body in zip(times[worker::workers], bodies[worker::workers], strict=True)
            ]
            process = context.Process(target=_work, args=(theirs, _Share(target, share, timeout_s)), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()  # ready
        start = time.perf_counter() + START_DELAY_S
        for pipe in pipes:
            pipe.send(start)
        results = _follow(pipes, len(requests))
    except EOFError:
        raise RuntimeError("a load generator's process died; its own message stands above.") from None
    finally:
        for process in processes:
            process.terminate()
            process.join()
    records: list[StreamRecord] = [StreamRecord(0.0)] * len(requests)
    for worker, (part, _) in enumerate(results):
        records[worker::workers] = part
    return records, max(load for _, load in results)


def _body(model: str, request: BenchRequest) -> bytes:
    fields = {
        "model": model,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def _follow(pipes: list[Connection], num_requests: int) -> list[tuple[list[StreamRecord], float]]:
    """Shows the workers' progress until each has sent (its records, its load)."""
    results: dict[int, tuple[list[StreamRecord], float]] = {}
    chunks = 0
    with tqdm(total=num_requests, unit="req", dynamic_ncols=True) as bar:
        begun = time.perf_counter() + START_DELAY_S
        while len(results) < len(pipes):
            waiting = [pipe for index, pipe in enumerate(pipes) if index not in results]
            for pipe in multiprocessing.connection.wait(waiting):
                assert isinstance(pipe, Connection)
                kind, first, second = pipe.recv()
                if kind == "result":
                    results[pipes.index(pipe)] = first, second
                    continue
                chunks += first
                elapsed = max(time.perf_counter() - begun, 1e-3)
                bar.set_postfix_str(f"{chunks / elapsed:,.0f} chunks/s", refresh=False)
                bar.update(second)
    return [results[index] for index in range(len(pipes))]


def _work(pipe: Connection, share: _Share) -> None:
    """A worker process: waits for the common start, sends its share, answers with the records."""
    _raise_file_limit()
    pipe.send("ready")
    start = pipe.recv()
    cpu_begun = time.process_time()
    sending = send_all(
        share.target,
        [(start + at, body) for at, body in share.requests],
        timeout_s=share.timeout_s,
        report=lambda events, ended: pipe.send(("progress", events, ended)),
    )
    try:
        import uvloop  # half the CPU time a segment; part of the `serve` extra
    except ImportError:
        records = asyncio.run(sending)
    else:
        records = uvloop.run(sending)
    load = (time.process_time() - cpu_begun) / max(time.perf_counter() - start, 1e-9)
    pipe.send(("result", records, load))


def _raise_file_limit() -> None:
    """As many connections as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def evaluate(requests: list[BenchRequest], records: list[StreamRecord]) -> dict[str, Any]:
    """The figures of a run; see the module's docstring. Times in ms unless the name says s."""
    failures: Counter[str] = Counter()
    completed = []
    for request, record in zip(requests, records, strict=True):
        if record.error is None and record.output_tokens != request.output_len:
            failures["wrong output length"] += 1
        elif record.error is not None:
            failures[record.error] += 1
        else:
            completed.append((request, record))
    ends = [record.segments[-1][0] for record in records if record.segments]
    begun = [record.begun for record in records]
    duration_s = max(ends, default=max(begun)) - min(begun)
    sending_s = max(begun) - min(begun)
    tokens = sum(request.output_len for request, _ in completed)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    gaps, shares, weights = _inter_token([record for _, record in completed])
    latencies = np.array([record.segments[-1][0] - record.begun for _, record in completed])
    lengths = np.array([request.output_len for request, _ in completed])
    return {
        "num_prompts": len(requests),
        "completed": len(completed),
        "failed": len(requests) - len(completed),
        "failures": dict(failures.most_common()),
        "duration_s": duration_s,
        "input_tokens": sum(len(request.prompt_token_ids) for request, _ in completed),
        "cached_input_tokens": sum(record.cached_tokens for _, record in completed),
        "output_tokens": tokens,
        "sent_requests_per_s": (len(requests) - 1) / sending_s if sending_s > 0 else None,
        "requests_per_s": len(completed) * per_s,
        "output_tokens_per_s": tokens * per_s,
        "ttft_ms": summary(np.array([record.segments[0][0] - record.begun for _, record in completed])),
        "inter_token_ms": summary(shares, weights),
        "inter_arrival_ms": summary(gaps),
        "normalized_latency_ms": summary(latencies / np.maximum(lengths, 1)),
        "latency_ms": summary(latencies),
        "lag_ms": summary(np.array([record.begun - record.scheduled for record in records])),
    }


def _inter_token(records: list[StreamRecord]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times between arrivals in s; the same divided among tokens, and how many tokens each stands for."""
    gaps, shares, weights = [], [], []
    for record in records:
        arrivals, events = np.array(record.segments).T
        tokens = events * (record.output_tokens / events.sum())
        between = np.diff(arrivals)
        gaps.append(between)
        shares.append(np.append(between / tokens[1:], 0.0))
        weights.append(np.append(tokens[1:], max(0.0, tokens[0] - 1)))
    if not records:
        return np.array([]), np.array([]), np.array([])
    return np.concatenate(gaps), np.concatenate(shares), np.concatenate(weights)


_ROWS = {
    "ttft_ms": "TTFT",
    "inter_token_ms": "inter-token",
    "inter_arrival_ms": "inter-arrival",
    "normalized_latency_ms": "normalized, a token",
    "latency_ms": "latency",
    "lag_ms": "lag",
}


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    sent = figures["sent_requests_per_s"]
    lines = [
        f"{figures['completed']:,} of {figures['num_prompts']:,} requests completed in {figures['duration_s']:.2f} s"
        + (f", sent at {sent:,.2f} a second" if sent else ""),
        f"{figures['input_tokens']:,} tokens in ({figures['cached_input_tokens']:,} from the server's prefix cache), "
        f"{figures['output_tokens']:,} out",
        f"{figures['output_tokens_per_s']:,.0f} output tokens/s, {figures['requests_per_s']:,.2f} requests/s, "
        f"client load {figures['client_load']:.2f}",
        "",
        percentile_table({label: figures[key] for key, label in _ROWS.items()}),
    ]
    if figures["failed"]:
        lines += ["", f"{figures['failed']:,} requests FAILED and are in no latency figure:"]
        lines += [f"  {count:>6,}  {reason}" for reason, count in figures["failures"].items()]
    return "\n".join(lines)
