"""Many concurrent streams against a served model, round after round: are all complete, equal and is memory steady?

    jpaged serve --port 8000 --no-access-log &
    python tools/serving_drill.py --url http://127.0.0.1:8000 --pid $! --streams 1000 --rounds 3

Stream i has seed i, so every round must bring the same texts as the one before. Prints a JSON line for each round, and
exits with 1 if a stream failed, a text differs or, after the first round, the server's processes grew by more than 2 %.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import httpx
import msgspec


async def _stream(client: httpx.AsyncClient, seed: int, tokens: int) -> str:
    body = {"prompt": "Once upon a time", "seed": seed, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    text, ended = [], False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                text.append(event["choices"][0]["text"])
    if not ended:
        raise RuntimeError("The stream ended without [DONE].")
    return "".join(text)


def _memory_mib(pid: int) -> float:
    """Resident memory of a process and its children."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    lines = [line for p in pids for line in Path(f"/proc/{p}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


async def _run(args: argparse.Namespace) -> int:
    first: list[str | BaseException] | None = None
    memory: list[float] = []
    failed = False
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # none that the server is about to close
    async with httpx.AsyncClient(base_url=args.url, timeout=600, limits=limits, trust_env=False) as client:
        for round_number in range(args.rounds):
            begin = time.monotonic()
            streams = [_stream(client, seed, args.tokens) for seed in range(args.streams)]
            texts = await asyncio.gather(*streams, return_exceptions=True)
            seconds = time.monotonic() - begin
            errors = [text for text in texts if isinstance(text, BaseException)]
            first = first or texts
            differing = sum(a != b for a, b in zip(first, texts, strict=True))
            memory.append(_memory_mib(args.pid))
            report = {
                "round": round_number + 1,
                "seconds": round(seconds, 2),
                "tokens_per_s": round(args.streams * args.tokens / seconds),
                "errors": len(errors),
                "first_error": repr(errors[0]) if errors else None,
                "differing": differing,
                "memory_mib": round(memory[-1], 1),
            }
            print(json.dumps(report), flush=True)
            failed |= bool(errors or differing)
    return int(failed or memory[-1] > 1.02 * memory[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    return asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
