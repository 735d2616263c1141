"""What constrained rows cost the host: an engine's control plane and what follows grammars for it, in played time. No
model, no accelerator, and no matter how many cores there are or what else they do.

    python benchmarks/structured_host.py --tokenizer DIR [--requests 16 256] [--processes 6] [--runs 3]

Played time is the CPU time of the engine's thread, and what it waits for: the dispatch of programs, the device, and
grammar processes. These are played too: each question is answered at once by the code that they run, and the answer is
held back for as long as a process of its own would have taken, by the CPU time that it took.

The played device samples uniformly, as a model with random weights nearly does: under a row's mask, or, for a row that
guesses, 16 tokens in a random order. `Device` says what steps and dispatches take.

Printed for each number of requests: output tokens/s, steps, rows a step, guesses, the milliseconds a step that each
part of the engine's thread takes, and how busy the processes are.
"""

import argparse
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.bench.structured import SCHEMA
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.constraints import batch_gate, grammars
from jpaged.engine.constraints.grammars import ConstrainedRows
from jpaged.engine.interface import NO_TOKEN, NUM_RANKED, FinishCode, SamplingVariant, StepPlan, StepResult
from jpaged.engine.loop import EngineCore
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequences.request import Request
from jpaged.text.frames import framed
from jpaged.text.grammar_follower import Follower
from jpaged.text.grammar_guides import CompiledGrammar, Guide
from jpaged.text.grammar_process import Compile, Follow, GrammarServer, MakeMasks, Resume, Start, answers_to
from jpaged.text.grammar_shards import Shard

_MASK_TRIES = 4096
_LATENCY_S = 50e-6
"""From one process to another that waits for it."""


class Clock:
    """Played time: CPU time of this thread but for what is not its own, and what it has waited."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited_s

    def sleep(self, seconds: float) -> None:
        self._waited_s += max(0.0, seconds)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What runs meanwhile takes no time."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._waited_s -= time.thread_time() - begun


CLOCK = Clock()


class PlayedSocket:
    """An engine's end of a socket to a grammar process. busy_s: seconds for which that was busy."""

    def __init__(self, server: GrammarServer, number: int) -> None:
        self._server, self._number = server, number
        self._decode = msgspec.msgpack.Decoder(Compile | Follow | Resume | MakeMasks).decode
        self._free_at = self.busy_s = 0.0
        self._answers: deque[tuple[float, bytes]] = deque()

    def fileno(self) -> int:
        return self._number

    def send(self, data: bytes, flags: int) -> int:
        """Takes one message."""
        with CLOCK.stopped():
            at = max(self._free_at, CLOCK.now() + _LATENCY_S)
            begun = time.thread_time()
            for answer in answers_to(self._server, self._decode(bytes(data[4:]))):
                message = framed(msgspec.msgpack.encode(answer))
                self._answers.append((at + time.thread_time() - begun + _LATENCY_S, message))
            took = time.thread_time() - begun
            self._free_at, self.busy_s = at + took, self.busy_s + took
        return len(data)

    def recv_into(self, space: memoryview, size: int, flags: int) -> int:
        read = 0
        while self._answers and self._answers[0][0] <= CLOCK.now():
            if read + len(self._answers[0][1]) > len(space):
                break
            _, message = self._answers.popleft()
            space[read : read + len(message)] = message
            read += len(message)
        if not read:
            raise BlockingIOError
        return read

    @property
    def next_at(self) -> float:
        return self._answers[0][0] if self._answers else float("inf")


class PlayedProcesses:
    """As `Processes`, but no constraint gets a table: what is measured is what those without one cost the host."""

    is_alive = True
    serial = 0
    tables = SimpleNamespace(want=lambda grammar: None)

    def __init__(self, start: Start, num_words: int, num_shards: int) -> None:
        self.numbers = count()
        first = GrammarServer(num_words)
        first.start(start)
        self.servers = [first] + [first.forked() for _ in range(num_shards - 1)]
        self.sockets = [PlayedSocket(server, i) for i, server in enumerate(self.servers)]
        self.shards = [Shard(self, sock) for sock in self.sockets]  # type: ignore[arg-type]


class PlayedFollower(Follower):
    """A follower that waits in played time."""

    def __init__(self, compiler: Any, processes: PlayedProcesses) -> None:
        super().__init__(compiler)
        self._played = processes

    def _wait(self, seconds: float) -> bool:
        next_at = min(sock.next_at for sock in self._played.sockets)
        CLOCK.sleep(min(seconds, next_at - CLOCK.now()))
        return bool(self._answers) or next_at <= CLOCK.now()

    def _pump(self) -> None:
        for shard, sock in zip(self._played.shards, self._played.sockets, strict=True):
            if sock.next_at <= CLOCK.now():
                shard.pump()


class PlayedGrammars:
    """As `GrammarCompiler`."""

    def __init__(self, start: Start, num_shards: int) -> None:
        self.num_words = -(-start.vocab_size // 32)
        self.processes = PlayedProcesses(start, self.num_words, num_shards)
        self._compiled: dict[StructuredOutputsParams, CompiledGrammar] = {}

    def compile(self, params: StructuredOutputsParams) -> "Future[CompiledGrammar]":
        if params not in self._compiled:
            number = next(self.processes.numbers)
            compiled = self.processes.servers[0].compile(Compile(number, params, []))
            compiled.seconds = 0.0  # any process may compile it, when it gets a sequence
            shard = self.processes.shards[0]
            processes: Any = self.processes
            self._compiled[params] = CompiledGrammar(processes, number, shard, compiled, params, lambda _: None)
        future: Future[CompiledGrammar] = Future()
        future.set_result(self._compiled[params])
        return future

    def follower(self) -> PlayedFollower:
        return PlayedFollower(self, self.processes)

    def knows(self, guide: Guide) -> bool:
        return True

    def close(self) -> None:
        pass


class Device:
    """Samples for plans, and says when a device would have. Times in milliseconds, measured on one H200 with a 0.6B
    model (`decode` at 16 and 256 rows; between them it is linear). What masks add to the dispatch of sampling at 256
    rows is estimated: 50 us to pack them, and twice as much to copy 474 KB on their way to the device. More masks than
    sampling takes cost a dispatch of their own.
    """

    decode = (1.4, 3.3)
    sample = 0.15
    dispatch_decode, dispatch_sample, dispatch_masks, copy = 0.75, 0.19, 0.38, 0.08
    masks_at_256_rows = 0.15

    def __init__(self, num_slots: int, vocab_size: int, known: np.ndarray) -> None:
        """known: how many tokens of each slot the host knows."""
        self._known = known
        self._vocab_size = vocab_size
        self._masks: list[np.ndarray | None] = [None] * num_slots
        self._limits = np.zeros((num_slots,), np.int64)
        self._active = np.zeros((num_slots,), np.bool_)
        self._stops: list[frozenset[int]] = [frozenset()] * num_slots
        self._rng = np.random.default_rng(0)
        self._idle_at = 0.0
        self.num_steps = self.num_rows = self.num_mixed = self.num_ahead = 0

    def execute(self, plan: StepPlan) -> "PlayedStep":
        for slot in plan.ends.tolist():
            self._active[slot] = False
        for start in plan.starts:
            self._limits[start.slot] = start.max_len
            self._active[start.slot], self._stops[start.slot] = True, frozenset(start.stop_token_ids)
        given = (plan.mask_slots.tolist(), plan.masks, plan.mask_tokens.tolist(), plan.mask_backs.tolist())
        for slot, mask, token, _ in zip(*given, strict=True):
            self._masks[slot] = mask
            self._active[slot] |= token != NO_TOKEN
        rows = [*plan.decode_slots.tolist(), *(chunk.slot for chunk in plan.chunks)]
        self.num_steps, self.num_rows = self.num_steps + 1, self.num_rows + len(rows)
        self.num_mixed += bool(plan.chunks)
        if len(plan.masks):
            _sleep(self.masks_at_256_rows * max(4, len(rows) // 8) / 32)
        if sum(mask.dtype != np.int32 for mask in plan.masks) > min(24, max(4, len(rows) // 8)):
            _sleep(self.dispatch_masks)
        if plan.has_run_ahead:
            self.num_ahead += 1
        else:
            self._run_body(len(rows))
        _sleep(self.dispatch_sample)
        self._idle_at = max(self._idle_at, CLOCK.now()) + self.sample / 1e3
        step = PlayedStep(partial(self._sample, plan, rows), self._idle_at)
        _sleep(self.copy)
        if len(plan.run_ahead):
            self._run_body(len(plan.run_ahead))
        return step

    def _run_body(self, rows: int) -> None:
        _sleep(self.dispatch_decode)
        few, many = self.decode
        took = few + (many - few) * max(0, rows - 16) / 240
        self._idle_at = max(self._idle_at, CLOCK.now()) + took / 1e3

    def _sample(self, plan: StepPlan, rows: list[int]) -> StepResult:
        samples = [True] * len(plan.decode_slots) + [chunk.samples for chunk in plan.chunks]
        tokens = np.full((len(rows), NUM_RANKED), NO_TOKEN, np.int32)
        codes = np.zeros((len(rows),), np.uint8)
        drawn = self._rng.integers(0, self._vocab_size, tokens.shape, np.int32)
        for row, (slot, does) in enumerate(zip(rows, samples, strict=True)):
            if not (does and self._active[slot]):
                continue
            tokens[row] = self._drawn(self._masks[slot], drawn[row])
            if int(tokens[row, 0]) in self._stops[slot]:
                codes[row] = FinishCode.STOP
            elif 1 + self._known[slot] >= self._limits[slot]:  # who waits for this token has told all before it
                codes[row] = FinishCode.LENGTH
            self._active[slot] = codes[row] == FinishCode.RUNNING
        return StepResult(
            tokens[:, :1].copy(), codes, ranked=tokens if plan.variant == SamplingVariant.MASKED else None
        )

    def _drawn(self, mask: np.ndarray | None, drawn: np.ndarray) -> np.ndarray:
        """A row's tokens, best first; of a row under a mask that is no guess the first alone."""
        assert mask is not None
        if mask.dtype == np.int32 and mask[0] == NO_TOKEN:
            return drawn
        first = np.full((NUM_RANKED,), NO_TOKEN, np.int32)
        if mask.dtype == np.int32:
            first[0] = mask[int(drawn[0]) % len(mask)]
            return first
        tried = self._rng.integers(0, self._vocab_size, _MASK_TRIES)
        allowed = tried[mask[tried // 32] >> (tried % 32).astype(np.uint32) & 1 != 0]
        first[0] = (
            allowed[0] if len(allowed) else np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]
        )
        return first


class PlayedStep:
    """A step of the played device (`StepHandle`)."""

    def __init__(self, sample: Callable[[], StepResult], ends_at: float) -> None:
        self._sample, self._ends_at = sample, ends_at

    def is_ready(self) -> bool:
        return CLOCK.now() >= self._ends_at

    def result(self) -> StepResult:
        with CLOCK.stopped():
            result = self._sample()
        _sleep(1e3 * (self._ends_at - CLOCK.now()))
        return result


def _sleep(ms: float) -> None:
    if ms > 0:
        CLOCK.sleep(ms / 1e3)


class Times:
    """Played milliseconds of methods of the engine's thread, each with what it calls."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def wrap(self, owner: object, name: str, label: str | None = None) -> None:
        function = getattr(owner, name)

        def timed(*args: object, **kwargs: object) -> object:
            begun = CLOCK.now()
            try:
                return function(*args, **kwargs)
            finally:
                part = self.parts[label or name]
                part[0] += 1
                part[1] += 1e3 * (CLOCK.now() - begun)

        setattr(owner, name, timed)


def measure(compiler: Any, args: argparse.Namespace, vocab_size: int, eos: int, num_requests: int) -> dict:
    """Runs so many requests at once, `--runs` times after a warm-up. compiler: `PlayedGrammars`."""
    config = SchedulerConfig(
        block_size=16, num_blocks=64 * 256, max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=1024
    )
    runs = []
    for run in range(args.runs + 1):
        kind = partial(ConstrainedRows, grammars=compiler, guesses=True, runs_ahead=not args.no_ahead)
        scheduler = Scheduler(config, kinds=(kind,))
        device = Device(config.max_num_seqs, vocab_size, scheduler.slots.num_known)
        core = EngineCore(scheduler, device)
        times = Times()
        for name in ("schedule", "update", "collect", "wait_for_news"):
            times.wrap(scheduler, name)
        times.wrap(core._executor, "execute")
        rows: Any = next(iter(scheduler._dependents._kinds.values()))
        for name in ("put", "take_all"):
            times.wrap(rows._maker, name)
        for name in ("take", "collect", "prepare", "contribute"):
            times.wrap(rows, name, "rows." + name)
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=args.output_len,
            structured_outputs=StructuredOutputsParams(json=SCHEMA),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        requests = []
        for i in range(num_requests):
            prompt = np.random.default_rng(i).integers(0, vocab_size, 32)
            requests.append(Request(f"{run}-{i}", prompt, sampling, eos_token_ids=(eos,)))
            core.add_request(requests[-1])
        busy = [sock.busy_s for sock in compiler.processes.sockets]
        begun = CLOCK.now()
        while core.has_unfinished():
            core.step()
        seconds = CLOCK.now() - begun
        tokens = sum(len(request.output_token_ids) for request in requests)
        stats = core.stats()
        if run:
            runs.append(
                {
                    "tokens": tokens,
                    "seconds": seconds,
                    "processes_s": [b.busy_s - a for a, b in zip(busy, compiler.processes.sockets, strict=True)],
                    "steps": device.num_steps,
                    "mixed_steps": device.num_mixed,
                    "ahead_steps": device.num_ahead,
                    "rows": device.num_rows,
                    "guesses": stats.num_guesses,
                    "kept": stats.num_kept_guesses,
                    "parts_ms_a_step": {
                        name: {"calls": calls, "ms": ms / device.num_steps} for name, (calls, ms) in times.parts.items()
                    },
                }
            )
        rows._maker.close()
    return {"requests": num_requests, "runs": runs}


def _print(figure: dict) -> None:
    runs = figure["runs"]
    best = min(runs, key=lambda run: run["seconds"] / run["tokens"])
    rates = sorted(run["tokens"] / run["seconds"] for run in runs)
    busy_s = [seconds for run in runs for seconds in run["processes_s"]]
    share = np.mean(busy_s) / np.mean([run["seconds"] for run in runs])
    us = 1e6 * sum(busy_s) / sum(run["tokens"] for run in runs)
    print(
        f"{figure['requests']} requests: {median(rates):,.0f} tokens/s ({rates[0]:,.0f}..{rates[-1]:,.0f}); each "
        f"process is busy for {share:.0%} of the time, all together {us:.0f} us a token"
    )
    print(
        f"  the fastest: {best['steps']} steps ({best['mixed_steps']} with chunks, {best['ahead_steps']} ahead) of "
        f"{1e3 * best['seconds'] / best['steps']:.2f} ms, {best['rows'] / best['steps']:.1f} rows each, "
        f"{best['rows'] / best['tokens']:.2f} rows a token; {best['guesses']} guesses, {best['kept']} kept"
    )
    for name, part in sorted(best["parts_ms_a_step"].items(), key=lambda item: -item[1]["ms"]):
        print(f"    {name:<18}{part['calls']:>6} calls{part['ms']:>8.3f} ms a step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with a tokenizer.json")
    parser.add_argument("--eos", type=int, default=None, help="end-of-sequence token (default: the first added token)")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--processes", type=int, default=6, help="that follow grammars")
    parser.add_argument("--no-ahead", action="store_true", help="compute no rows before their masks are known")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = (args.tokenizer / "tokenizer.json").read_text()
    eos = args.eos if args.eos is not None else json.loads(text)["added_tokens"][0]["id"]
    for module in (grammars, batch_gate):
        setattr(module, "time", SimpleNamespace(perf_counter=CLOCK.now))  # noqa: B010
    compiler = PlayedGrammars(Start(text, args.vocab_size, (eos,)), args.processes)
    figures = []
    for num_requests in args.requests:
        figures.append(measure(compiler, args, args.vocab_size, eos, num_requests))
        _print(figures[-1])
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
