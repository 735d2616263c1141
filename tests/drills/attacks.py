"""Hostile constraints and tools are sent to a server, and the gaps between other streams' tokens measured beside them.

    make drill-attacks ARGS="--streams 4"

Each attack must be answered in bounded time, by an error of its own or a short answer. The p99 of the other streams'
inter-token gaps is compared with what it is undisturbed, and with what it is beside ordinary chats, one behind the
other as attacks are: their prompts and rows take time of steps, too. Run it on a machine that is otherwise idle.
Streams are read in this process, and attacks are sent by another one, which on a machine of few cores still takes time
from the server.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from jpaged.bench.report import write_report
from tests.support.served import serving

MOST_ANSWER_S = 60.0
MOST_RATIO = 1.5
"""Of the p99 beside attacks, and the largest one of undisturbed streams and of those beside ordinary chats."""

MOST_ORDINARY_RATIO = 4.0
"""Of the p99 beside ordinary chats, and that of undisturbed streams."""

ORDINARY: Mapping[str, Mapping[str, Any]] = {"ordinary chats": {}, "chats of one token": {"max_tokens": 1}}
"""Fields of chats that attack nothing. Those of one token end as soon as many attacks do: more of them come."""


def attacks() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names, and the fields of a chat that attack; ordinary ones first."""
    yield from ORDINARY.items()
    nested: Any = {"type": "string"}
    for _ in range(400):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    yield "nested schema", _schema(nested)
    wide: Any = {"type": "string"}
    for _ in range(8):
        wide = {"type": "object", "properties": dict.fromkeys("abc", wide)}
    yield "3^8 properties", _schema(wide)
    yield "exponential regex", {"guided_regex": "(((a?){60}){60}){60}"}
    yield "regex of backtracking", {"guided_regex": "(a|aa)*(a|aaa)*b" * 40}
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(30_000)}
    definitions["d30000"] = {"type": "string"}
    yield "1 MB of $ref", _schema({"$defs": definitions, "$ref": "#/$defs/d0"})
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(60)}
    yield "doubling $ref", _schema({"$defs": doubling | {"d60": {"type": "null"}}, "$ref": "#/$defs/d0"})
    yield "recursive grammar", {"guided_grammar": 'start: start start | start | "a" |'}
    yield "ambiguous grammar", {"guided_grammar": 'start: e\ne: e e e | e e | e "+" e | "a" | "a" e'}
    yield "10,000 tools", {"tools": [_tool(i) for i in range(10_000)], "tool_choice": "required"}
    yield "500 tools", {"tools": [_tool(i) for i in range(500)], "tool_choice": "required"}
    yield "enum of 100,000", _schema({"enum": [f"value {i * 7919 % 100_003}" for i in range(100_000)]})


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _tool(i: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"field{i}": {"type": "string"}}, "required": [f"field{i}"]}
    return {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}}


class Streams:
    """Streams that run until `stop`, one after the other in each thread.

    gaps: (when, seconds) between two chunks of a stream.
    """

    def __init__(self, url: str, count: int) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(url, i)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def p99_ms(self, start: float, end: float) -> float:
        gaps = [gap for when, gap in self.gaps if start <= when < end]
        return float(np.percentile(gaps, 99)) * 1e3 if gaps else float("inf")

    def _run(self, url: str, number: int) -> None:
        body = {"prompt": [5 + number], "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 1}
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    last = None
                    for line in answer.iter_lines():
                        if not line.startswith("data: {"):
                            continue
                        now = time.monotonic()
                        if last is not None:
                            self.gaps.append((now, now - last))
                        last = now
                        if self._stop.is_set():
                            break


Answer = tuple[int, float, str]
"""Status, seconds, and what was said."""


def attack(url: str, body: bytes, seconds: float) -> list[Answer]:
    """Sends a body again and again for so long; what was answered."""
    answers: list[Answer] = []
    headers, end = {"content-type": "application/json"}, time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=2 * MOST_ANSWER_S, trust_env=False) as client:
        while (begun := time.monotonic()) < end:
            answer = client.post("/v1/chat/completions", content=body, headers=headers)
            error = answer.json().get("error")
            said = "" if error is None else error["message"][:90]
            answers.append((answer.status_code, time.monotonic() - begun, said))
    return answers


def undisturbed(streams: Streams, seconds: float) -> float:
    """The p99 of gaps, ms, within so long."""
    start = time.monotonic()
    time.sleep(seconds)
    return streams.p99_ms(start, time.monotonic())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="of undisturbed streams, and beside each attack")
    parser.add_argument("--only", action="append", metavar="NAME", help="this attack and ordinary chats; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    args = parser.parse_args()
    chosen = {name: fields for name, fields in attacks() if not args.only or name in (*ORDINARY, *args.only)}
    if unknown := set(args.only or ()) - set(chosen):
        parser.error(f"--only: no attack is named {', '.join(map(repr, sorted(unknown)))}")
    found: list[dict[str, Any]] = []
    # All programs are there, as on GPUs: others would wait while the first constrained rows' are compiled.
    options = ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--compile-programs", "at_start"]
    with serving(options) as server, ProcessPoolExecutor(1, get_context("spawn")) as attacker:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        # Made before anything is measured: it would keep the threads that read streams from running.
        bodies = {name: json.dumps(chat | fields).encode() for name, fields in chosen.items()}
        streams = Streams(server.url, args.streams)
        try:
            attacker.submit(attack, server.url, b"", 0).result()  # the process starts
            undisturbed(streams, 2)
            usual = calm = undisturbed(streams, args.seconds)
            found.append({"attack": None, "p99_ms": calm})
            print(f"{'undisturbed':24} p99 {calm:7.1f} ms", flush=True)
            for name, body in bodies.items():
                start = time.monotonic()
                answers = attacker.submit(attack, server.url, body, args.seconds).result()
                beside = streams.p99_ms(start, time.monotonic())
                status, slowest, said = answers[0][0], max(seconds for _, seconds, _ in answers), answers[0][2]
                if name in ORDINARY:
                    usual = max(usual, beside)
                most = MOST_ORDINARY_RATIO * calm if name in ORDINARY else MOST_RATIO * usual
                is_bad = status >= 500 or slowest > MOST_ANSWER_S or beside > most
                found.append(
                    {
                        "attack": name,
                        "p99_ms": beside,
                        "ratio": beside / calm,
                        "of_usual": beside / usual,
                        "is_bad": is_bad,
                    }
                    | {"answers": len(answers), "status": status, "slowest_answer_s": slowest, "said": said}
                )
                print(
                    f"{name:24} p99 {beside:7.1f} ms ({beside / calm:4.2f} x, {beside / usual:4.2f} of usual),"
                    f" {len(answers)} answers {status} in at most {slowest:.1f} s {said}{'  <--' if is_bad else ''}",
                    flush=True,
                )
            again = undisturbed(streams, args.seconds)
            print(f"{'undisturbed, at the end':24} p99 {again:7.1f} ms")
            found.append({"attack": None, "p99_ms": again})
        finally:
            streams.stop()
    if args.json:
        write_report(args.json, "attacks", vars(args), found)
    return int(any(one.get("is_bad") for one in found))


if __name__ == "__main__":
    sys.exit(main())
