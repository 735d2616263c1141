"""Kills engine processes under open streams: every stream must bring the tokens of an undisturbed run.

    python -m tests.drills.survival kill --kills 20 --streams 200       SIGKILL, again and again
    python -m tests.drills.survival suspect                             a request that breaks the engine each time
    python -m tests.drills.survival weights --kills 10                  SIGKILL while replicas take new weights
    ... [drill's options] -- --data-parallel-size 2                     what follows is for `jpaged serve`

kill      Streams are greedy, seeded, for two choices, with log-probabilities, with stop strings. Each kill comes when
          they have moved since the last one. Prints for each kill the pause until the next token of any stream, and its
          parts: until the server notices the death, until the process is gone and the next one is started, the phases
          of its start, and from "ready" to the token: requests added again, their prompts and tokens computed. The KV
          pool must be as large as before: a process that started beside the dying one would find less memory.
          --exact no: compare lengths and ends only, for models whose tokens may depend on what shares a step.
suspect   A request with a certain token kills the engine, raises an error in its step, or makes the step hang. It must
          be refused, and the streams beside it end as if it had never been.
weights   `AsyncLLMEngine` with two replicas under streams takes other weights, again and again; each time one replica
          or both are killed at a random moment. When all serve again, all must have the new weights, or, where the call
          said so, all the old ones; every stream must end with all its tokens.

Prints a line of JSON for each kill and one at the end; exits with 1 if anything was lost.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.support.pauses import parts_of
from tests.support.served import Server

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 1},
    {"n": 2, "seed": 2},
    {"seed": 3, "logprobs": 2},
    {"seed": 4, "stop": [" the ", "and", "e s"], "min_tokens": 100},
)
FATAL_TOKEN = 77
SUSPECTS = {"start": ("kill", 0), "kill": ("kill", 40), "raise": ("raise", 30), "hang": ("hang", 20)}
"""How a suspect breaks the engine, and how many tokens of it are known then."""


class Streams:
    """Streams of one server. progress: chunks that came, in all; last_at: when the last one did."""

    def __init__(self, client: httpx.AsyncClient, num_tokens: int) -> None:
        self._client = client
        self._num_tokens = num_tokens
        self.progress = 0
        self.last_at = 0.0

    async def one(self, number: int) -> dict[int, dict[str, Any]]:
        """What a stream brings, by choice."""
        body = {"prompt": f"Once upon a time, number {number}", "max_tokens": self._num_tokens, "ignore_eos": True}
        body |= KINDS[number % len(KINDS)] | {"stream": True, "return_token_ids": True}
        body |= {"stream_options": {"include_usage": True}}
        choices: dict[int, dict[str, Any]] = {}
        ended = False
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    self._take(msgspec.json.decode(line[6:]), choices)
        if not ended:
            raise RuntimeError("The stream ended without [DONE].")
        return choices

    def _take(self, event: dict[str, Any], choices: dict[int, dict[str, Any]]) -> None:
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        self.progress, self.last_at = self.progress + 1, time.monotonic()
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"tokens": [], "text": "", "logprobs": 0, "end": None})
            choice["tokens"] += part["token_ids"] or []
            choice["text"] += part["text"]
            choice["logprobs"] += len((part["logprobs"] or {}).get("tokens", ()))
            choice["end"] = part["finish_reason"] or choice["end"]
        if event.get("usage"):
            choices[-1] = {"usage": event["usage"]["completion_tokens"]}


def client_of(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=1200, limits=limits, trust_env=False)


async def undisturbed(server: Server, args: argparse.Namespace) -> list[Any]:
    async with client_of(server) as client:
        streams = Streams(client, args.tokens)
        return await asyncio.gather(*(streams.one(number) for number in range(args.streams)))


def is_alike(answer: Any, expected: Any) -> bool:
    """Whether each choice has as many tokens, where the tokens may differ. One that a stop string ended may have any
    number.
    """
    ends = [
        {index: (choice["end"], len(choice["tokens"])) for index, choice in one.items() if "tokens" in choice}
        for one in (answer, expected)
    ]
    if ends[0].keys() != ends[1].keys():
        return False
    pairs = [(ends[0][index], ends[1][index]) for index in ends[0]]
    return all(a == b or (None not in (a[0], b[0]) and "stop" in (a[0], b[0])) for a, b in pairs)


def judged(answers: list[Any], calm: list[Any], exact: bool) -> dict[str, Any]:
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    wrong = 0
    for answer, expected in zip(answers, calm, strict=True):
        if not isinstance(answer, BaseException):
            wrong += answer != expected if exact else not is_alike(answer, expected)
    return {"errors": len(errors), "first_error": repr(errors[0]) if errors else None, "wrong": wrong}


def drill_kill(args: argparse.Namespace) -> bool:
    with tempfile.TemporaryFile("w+") as log, logged_server(args, log) as server:
        calm = asyncio.run(undisturbed(server, args))
        return asyncio.run(_killed(server, args, calm, log))


async def _killed(server: Server, args: argparse.Namespace, calm: list[Any], log: Any) -> bool:
    async with client_of(server) as client:
        streams = Streams(client, args.tokens)
        tasks = [asyncio.create_task(streams.one(number)) for number in range(args.streams)]
        killed, reports, blocks = 0, list[dict[str, Any]](), num_blocks(server)
        for number in range(1, args.kills + 1):
            before = streams.progress
            while streams.progress < before + args.streams and not all(task.done() for task in tasks):
                await asyncio.sleep(0.02)
            await asyncio.sleep(random.uniform(min(args.shortest_wait, args.longest_wait), args.longest_wait))
            engines = server.engines()
            if all(task.done() for task in tasks):
                break
            at = time.time()  # noqa: TID251  the server's log has dates
            begin, before = time.monotonic(), streams.progress
            for pid in engines:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += len(engines)
            await asyncio.sleep(0.1)  # what was under way has come by then
            before = streams.progress
            while streams.progress == before and not all(task.done() for task in tasks):
                await asyncio.sleep(0.005)
            log.seek(0)
            says = [line for line in log if "serves again" in line]
            report = {"kill": number} | parts_of(at, streams.last_at - begin, says[-1] if len(says) == killed else "")
            reports.append(report)
            print(json.dumps(report), flush=True)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    report = {"kills": killed, "streams": args.streams} | judged(answers, calm, args.exact == "yes")
    report |= {name: server.gauge(f"{name}_total") for name in ("engine_restarts", "requests_resumed")}
    report |= {"open": server.gauge("num_requests_running"), "health": server.get("/health").status_code}
    report |= {"blocks_before": blocks, "blocks_after": num_blocks(server), "start_s": round(server.start_s, 1)}
    print(json.dumps(report), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"kills": reports, "end": report, "arguments": sys.argv[1:]}, indent=1))
    whole = not report["errors"] and not report["wrong"] and report["engine_restarts"] == killed
    whole &= report["blocks_after"] == blocks
    return whole and not report["open"] and report["health"] == 200 and killed > 0


def num_blocks(server: Server) -> list[str]:
    """Of each replica's KV pool."""
    return re.findall(r'cache_config_info\{.*num_gpu_blocks="(\d+)"', server.get("/metrics").text)


def drill_suspect(args: argparse.Namespace) -> bool:
    good = True
    for how, length in (SUSPECTS[name] for name in args.only or SUSPECTS):
        with tempfile.TemporaryDirectory() as directory:
            _put_fragile_engine(Path(directory), f"{FATAL_TOKEN}:{length}:{how}")
            environment = {"PYTHONPATH": directory}
            args.serve_options = [*args.given_options, "--step-timeout", str(args.step_timeout)]
            with logged_server(args, None, environment) as server:
                calm = asyncio.run(undisturbed(server, args))
                good &= asyncio.run(_with_suspect(server, args, calm, f"{how} at {length}"))
    return good


def _put_fragile_engine(directory: Path, value: str) -> None:
    """A `sitecustomize` that makes engine processes break (tests/support/fragile_engine.py)."""
    root = Path(__file__).parents[2]
    (directory / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('engine_process' in argument for argument in sys.orig_argv):\n"
        f"    sys.path.append({str(root)!r})\n"
        "    from tests.support.fragile_engine import make_fragile\n"
        f"    make_fragile({value!r})\n"
    )


async def _with_suspect(server: Server, args: argparse.Namespace, calm: list[Any], what: str) -> bool:
    async with client_of(server) as client:
        streams = Streams(client, args.tokens)
        tasks = [asyncio.create_task(streams.one(number)) for number in range(args.streams)]
        while streams.progress < args.streams:
            await asyncio.sleep(0.02)
        begin = time.monotonic()
        body = {"prompt": [5, 6, FATAL_TOKEN], "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        refused = await client.post("/v1/completions", json=body)
        refused_s = time.monotonic() - begin
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    report = {"suspect": what, "status": refused.status_code, "code": refused.json().get("error", {}).get("code")}
    report |= {"refused_s": round(refused_s, 1), "restarts": server.gauge("engine_restarts_total")}
    report |= judged(answers, calm, args.exact == "yes")
    print(json.dumps(report), flush=True)
    return report["code"] == "engine_ended" and not report["errors"] and not report["wrong"]


def drill_weights(args: argparse.Namespace) -> bool:
    from jpaged.models import ModelConfig, build
    from jpaged.models.loading.live import WeightUpdater
    from tests.test_update_weights import Reference
    from tests.tiny_models import tiny_model, write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        directory = write_tiny_model(tiny_model("llama-biases"), Path(name), use_torch=False)
        model = build(ModelConfig.from_directory(directory), "float32")
        read, reference = WeightUpdater(model, model, None).read, Reference(model)
        versions = [model.init(seed) for seed in range(2)]
        expected = [reference.greedy(version) for version in versions]
        given = [dict(read(version, "huggingface")) for version in versions]
        return asyncio.run(_with_new_weights(str(directory), given, expected, args))


async def _with_new_weights(
    directory: str, given: list[dict[str, Any]], expected: list[list[list[int]]], args: argparse.Namespace
) -> bool:
    from jpaged import AsyncLLMEngine, EngineArgs, SamplingParams
    from jpaged.api.config import RestartOptions
    from jpaged.api.errors import EngineRestartingError
    from tests.test_update_weights import PROMPTS
    from tests.tiny_models import TINY_ENGINE

    async def tokens_of(prompt: list[int], num_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async for output in engine.generate(prompt, params):
            last = output
        return list(last.outputs[0].token_ids)

    args_of_engine = EngineArgs(model=directory, data_parallel_size=2, **TINY_ENGINE)
    good, now = True, 0
    async with AsyncLLMEngine(args_of_engine, restarts=RestartOptions(max_restarts=1000)) as engine:
        await engine.update_weights(given[now])
        processes = engine.keeper._processes  # type: ignore[union-attr]
        for number in range(1, args.kills + 1):
            streams = [asyncio.ensure_future(tokens_of([7, i], args.tokens)) for i in range(args.streams)]
            await asyncio.sleep(random.random() * 0.2)
            update = asyncio.ensure_future(engine.update_weights(given[1 - now]))
            await asyncio.sleep(random.random() * args.longest_wait)
            pids = list(processes.pids)
            victims = random.sample(pids, random.choice((1, 2)))
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            (error,) = await asyncio.gather(update, return_exceptions=True)
            if error is None:
                now = 1 - now
            elif not isinstance(error, EngineRestartingError):
                raise error
            while set(victims) & set(processes.pids) or engine.is_restarting:
                await asyncio.sleep(0.05)
            lengths = {len(tokens) for tokens in await asyncio.gather(*streams)}
            # Enough at once that both replicas have some.
            found = await asyncio.gather(*(tokens_of(prompt, 5) for prompt in PROMPTS * 4))
            report: dict[str, Any] = {"kill": number, "killed": len(victims), "taken": error is None}
            report |= {"right": found == expected[now] * 4, "streams_whole": lengths == {args.tokens}}
            print(json.dumps(report), flush=True)
            good &= report["right"] and report["streams_whole"]
    return good


@contextlib.contextmanager
def logged_server(args: argparse.Namespace, log: Any, environment: dict[str, str] | None = None) -> Any:
    options = ["--max-restarts", "1000", "--max-queued-requests", "100000", *args.serve_options]
    server = Server(options, log=log, environment=environment)
    try:
        yield server
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    kill = commands.add_parser("kill")
    kill.add_argument("--kills", type=int, default=20)
    kill.add_argument("--longest-wait", type=float, default=1.0, help="s, before each kill; the wait is random")
    kill.add_argument("--shortest-wait", type=float, default=0.0, help="s; 4: a spare process is ready each time")
    kill.add_argument("--json", type=Path, help="write the parts of each pause to this file")
    kill.set_defaults(drill=drill_kill)
    suspect = commands.add_parser("suspect")
    suspect.add_argument("--step-timeout", type=float, default=20.0, help="s")
    suspect.add_argument("--only", choices=SUSPECTS, action="append", help="may be repeated (default: all)")
    suspect.set_defaults(drill=drill_suspect)
    weights = commands.add_parser("weights")
    weights.add_argument("--kills", type=int, default=10)
    weights.add_argument("--longest-wait", type=float, default=0.2, help="s, from the call to a kill; random")
    weights.set_defaults(drill=drill_weights)
    for command, streams, tokens in ((kill, 200, 400), (suspect, 12, 400), (weights, 12, 100)):
        command.add_argument("--streams", type=int, default=streams)
        command.add_argument("--tokens", type=int, default=tokens)
        command.add_argument("--exact", choices=("yes", "no"), default="yes")
    arguments, serve_options = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, serve_options = arguments[:at], arguments[at + 1 :]
    args = parser.parse_args(arguments)
    args.serve_options = args.given_options = serve_options
    return 0 if args.drill(args) else 1


if __name__ == "__main__":
    sys.exit(main())
