"""Drills of a server that are too long for the tests: each starts `jpaged serve` itself and exits with 1 if one fails.

    python -m tests.drills.serving streams --streams 1000 --rounds 3 --tokens 24     many concurrent streams
    python -m tests.drills.serving cancel --requests 200 --tokens 10000              clients that go away
    python -m tests.drills.serving kill                                              processes that are killed
    ... [drill's options] -- --api-workers 2                                        what follows is for `jpaged serve`

streams   Stream i has seed i. All must complete with the tokens that `LLM` gives for the same seeds, round after round,
          over connections that are kept and used again (or, with --fresh, one for each stream). Over the second and
          later rounds the server's processes together may not grow by more than 2 %.
cancel    All are cancelled after 0.5 s, while some run and some wait. The KV pool must be empty 1 s later, and the next
          request be answered within 5 s. The model has random weights and takes sequences this long.
kill      SIGKILL to the server: the engine must be gone within 2 s. SIGKILL to an engine that is not started again: a
          stream must end with an error event, and the server with exit code 1. (`survival.py` kills those that are.)

Prints a line of JSON for each round or step.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx
import msgspec

from tests.support.served import Server, serving

PROMPT = "Once upon a time"
GROWTH = 1.02
POOL_EMPTY_S, ANSWER_S, ENGINE_GONE_S = 1.0, 5.0, 2.0


async def stream_tokens(client: httpx.AsyncClient, seed: int, num_tokens: int) -> list[int]:
    """The tokens of one stream; raises what went wrong with it."""
    body = {"prompt": PROMPT, "seed": seed, "max_tokens": num_tokens, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    tokens: list[int] = []
    ended = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                tokens += event["choices"][0]["token_ids"]
    if not ended:
        raise RuntimeError("The stream ended without [DONE].")
    return tokens


def offline_tokens(num_streams: int, num_tokens: int) -> list[list[int]]:
    """What `LLM` gives for the same prompt and seeds."""
    from dataclasses import replace

    from jpaged import LLM

    llm = LLM()
    defaults = replace(llm.get_default_sampling_params(), max_tokens=num_tokens, ignore_eos=True)
    params = [replace(defaults, seed=seed) for seed in range(num_streams)]
    return [output.outputs[0].token_ids for output in llm.generate([PROMPT] * num_streams, params)]


def drill_streams(args: argparse.Namespace) -> bool:
    expected = offline_tokens(args.streams, args.tokens)
    with serving(args.serve_options) as server:
        return asyncio.run(_rounds(args, server, expected))


async def _rounds(args: argparse.Namespace, server: Server, expected: list[list[int]]) -> bool:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0 if args.fresh else None)
    memory: list[float] = []
    good = True
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False) as client:
        for number in range(1, args.rounds + 1):
            begin = time.monotonic()
            streams = [stream_tokens(client, seed, args.tokens) for seed in range(args.streams)]
            answers = await asyncio.gather(*streams, return_exceptions=True)
            seconds = time.monotonic() - begin
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            wrong = sum(answer != tokens for answer, tokens in zip(answers, expected, strict=True)) - len(errors)
            memory.append(server.memory_mib())
            report = {
                "round": number,
                "seconds": round(seconds, 2),
                "tokens_per_s": round(args.streams * args.tokens / seconds),
                "errors": len(errors),
                "first_error": repr(errors[0]) if errors else None,
                "wrong": wrong,
                "memory_mib": round(memory[-1], 1),
            }
            print(json.dumps(report), flush=True)
            good &= not errors and not wrong
    return good and memory[-1] <= GROWTH * memory[min(1, len(memory) - 1)]


def drill_cancel(args: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        model = _write_long_model(Path(directory), 2 * args.tokens)
        options = ("--load-format", "dummy", "--max-num-seqs", "64", "--max-num-batched-tokens", "1024")
        pool = ("--num-gpu-blocks-override", "20000")
        with serving((model, *options, *pool, *args.serve_options)) as server:
            begun = asyncio.run(_cancelled(args, server))
            cancelled = time.monotonic()
            gauges = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
            while any(server.gauge(name) for name in gauges) and time.monotonic() < cancelled + 60:
                time.sleep(0.01)
            empty_s = time.monotonic() - cancelled
            begin = time.monotonic()
            answer = server.post("/v1/completions", prompt=PROMPT, max_tokens=5, ignore_eos=True)
            answer_s = time.monotonic() - begin
    report = {"open_when_cancelled": begun, "pool_empty_s": round(empty_s, 3), "next_answer_s": round(answer_s, 3)}
    print(json.dumps(report), flush=True)
    return begun == args.requests and empty_s < POOL_EMPTY_S and answer.status_code == 200 and answer_s < ANSWER_S


async def _cancelled(args: argparse.Namespace, server: Server) -> int:
    """How many requests were open when all were cancelled."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False) as client:
        tasks = [asyncio.create_task(stream_tokens(client, seed, args.tokens)) for seed in range(args.requests)]
        await asyncio.sleep(args.after)
        begun: int = (await client.get("/load")).json()["server_load"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return begun


def _write_long_model(directory: Path, max_tokens: int) -> str:
    """The demo model's shape and tokenizer, made for sequences of so many tokens."""
    from jpaged.assets import demo_model_path

    for path in demo_model_path().iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "generation_config")):
            (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((demo_model_path() / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_tokens}))
    return str(directory)


def drill_kill(args: argparse.Namespace) -> bool:
    good = True
    with serving(args.serve_options) as server:
        pids = server.children()
        begin = time.monotonic()
        server.process.kill()
        server.process.wait()
        while any(map(_runs, pids)) and time.monotonic() < begin + 60:
            time.sleep(0.01)
        gone_s = time.monotonic() - begin
        print(json.dumps({"killed": "server", "all_gone_s": round(gone_s, 3)}), flush=True)
        good &= gone_s < ENGINE_GONE_S
    with serving(["--max-restarts", "0", *args.serve_options]) as server:
        body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60, trust_env=False) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            begin = time.monotonic()
            for pid in server.engines():
                os.kill(pid, signal.SIGKILL)
            last = list(lines)[-1]
            ended_s = time.monotonic() - begin
        ends_with_error = "error" in json.loads(last.removeprefix("data: "))
        code = server.process.wait(60)
        report = {"killed": "engine", "stream_ended_s": round(ended_s, 3), "error_event": ends_with_error}
        print(json.dumps(report | {"exit_code": code}), flush=True)
        good &= ends_with_error and code == 1
    return good


def _runs(pid: int) -> bool:
    """Whether there is such a process and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    streams = commands.add_parser("streams")
    streams.add_argument("--streams", type=int, default=1000)
    streams.add_argument("--rounds", type=int, default=3)
    streams.add_argument("--tokens", type=int, default=64)
    streams.add_argument("--fresh", action="store_true", help="a connection for each stream")
    streams.set_defaults(drill=drill_streams)
    cancel = commands.add_parser("cancel")
    cancel.add_argument("--requests", type=int, default=200)
    cancel.add_argument("--tokens", type=int, default=10_000)
    cancel.add_argument("--after", type=float, default=0.5, help="s")
    cancel.set_defaults(drill=drill_cancel)
    kill = commands.add_parser("kill")
    kill.set_defaults(drill=drill_kill)
    arguments, serve_options = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, serve_options = arguments[:at], arguments[at + 1 :]
    args = parser.parse_args(arguments)
    args.serve_options = serve_options
    return 0 if args.drill(args) else 1


if __name__ == "__main__":
    sys.exit(main())
