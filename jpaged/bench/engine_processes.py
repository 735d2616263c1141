"""Engines in processes of their own, for benchmarks of memory: one gives it back to the device only when it ends.

    parent  --a command a line-->  engine     serve | serve N | rest S | sleep | wake
            <--a JSON line--------            what it has and how long it took

A process prints what else it has to say to stderr, so the parent's log shows it.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError
from jpaged.api.sampling_params import SamplingParams
from jpaged.bench.engine_options import engine_options
from jpaged.bench.models import model_directory
from jpaged.executor.cache.virtual.arrays import GpuRanges
from jpaged.frontend.llm_engine import LLMEngine

NOT_PASSED_ON = {"part", "layout", "json", "help", "cudnn_slots"}
"""Options of `jpaged bench vattention` that are its own, besides the hidden ones."""


class EngineProcess:
    """An engine of `jpaged bench vattention`, in a process that takes commands. It starts with the first of them.

    Args:
        name: for errors. argv: its command line.
    """

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def ask(self, command: str) -> dict[str, Any]:
        """Its answer to a command.

        Raises:
            EngineDeadError: it ended.
        """
        told, said = self._process.stdin, self._process.stdout
        assert told is not None
        assert said is not None
        try:
            told.write(command + "\n")
            told.flush()
        except BrokenPipeError:
            answer = None
        else:
            answer = next((line for line in said if line.startswith("{")), None)
        if answer is None:
            raise EngineDeadError(
                f"Engine {self.name} ended at {command!r} with exit code {self._process.wait()}; what it said is above."
            )
        found: dict[str, Any] = json.loads(answer)
        return found


def engine_argv(parser: argparse.ArgumentParser, args: argparse.Namespace, layout: str, **options: Any) -> list[str]:
    """The command line of an engine in that layout ("paged", a layout of pages, or "cudnn": per-layer pages and cuDNN's
    attention), with these options instead.

    A model named by `--model` is a directory of this process, which removes it at its exit; an engine may be killed.
    """
    of_layout: dict[str, Any] = {"kv_cache_layout": "paged" if layout == "paged" else "virtual"}
    if layout != "paged":
        of_layout["virtual_page_layout"] = "per-layer" if layout == "cudnn" else layout
    if layout == "cudnn":
        of_layout["kernel_backend"] = layout
        if (slots := args.cudnn_slots) is not None:
            of_layout["max_num_seqs"] = slots
            if args.decode_buckets is not None:
                of_layout["decode_buckets"] = (*(size for size in args.decode_buckets if size < slots), slots)
    hidden = {action.dest for action in parser._actions if action.help == argparse.SUPPRESS}
    known = {action.dest for action in parser._actions} - NOT_PASSED_ON - hidden
    argv = [sys.executable, "-m", "jpaged", "bench", "vattention"]
    model = {"model": args.model and model_directory(args.model)}
    for name, value in (vars(args) | model | of_layout | options).items():
        if name not in known or value is None or value is False:
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        else:
            argv += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return argv


def obey(args: argparse.Namespace) -> None:
    """An engine process: does what its lines say, and answers each."""
    engine: LLMEngine | None = None
    for line in sys.stdin:
        command, *numbers = line.split()
        begun = time.perf_counter()
        answer: dict[str, Any] = {}
        if engine is None:
            engine = LLMEngine(EngineArgs(**engine_options(args)))
            answer["start_s"] = time.perf_counter() - begun
            begun = time.perf_counter()
        if command == "serve":
            rows = int(numbers[0]) if numbers else args.rows
            times, tokens = decode(engine, rows, args.context, args.steps)
            answer |= {"rows": rows, "mean_ms": 1e3 * float(np.mean(times))}
            answer["tokens_sha256"] = digest(tokens)
        elif command == "rest":
            until = begun + float(numbers[0])
            while time.perf_counter() < until:
                if not engine.rest():
                    time.sleep(0.02)
        elif command == "sleep":
            engine.sleep()
        elif command == "wake":
            engine.wake_up()
        print(json.dumps(answer | {"s": time.perf_counter() - begun} | _memory(engine)), flush=True)


def digest(tokens: Sequence[Sequence[int]]) -> str:
    """SHA-256 of sequences of token ids, which is another one where any token, or the order, is."""
    return hashlib.sha256(json.dumps([list(map(int, of_row)) for of_row in tokens]).encode()).hexdigest()


def _memory(engine: LLMEngine) -> dict[str, Any]:
    memory = engine.startup.runner.memory
    kept = engine.startup.memory.pool if memory is None else memory.backed_bytes
    return {"kv_gb": kept / 1e9, "kv_gb_at_most": engine.startup.memory.pool / 1e9, "free_gb": free_gb()}


def free_gb() -> float | None:
    """Memory of the GPU that no process has; None on a CPU."""
    device = jax.devices()[0]
    return GpuRanges(device).free_bytes() / 1e9 if device.platform == "gpu" else None


def decode(engine: LLMEngine, rows: int, context: int, steps: int) -> tuple[list[float], list[list[int]]]:
    """Seconds of each decode step, and all sequences' tokens."""
    rng, size = np.random.default_rng(0), engine.startup.model.config.vocab_size
    params = SamplingParams(temperature=0, max_tokens=steps + 64, ignore_eos=True, detokenize=False)
    engine.reset_prefix_cache()
    tokens: dict[str, Sequence[int]] = {}
    decoding: set[str] = set()

    def step() -> None:
        for output in engine.step():
            decoding.add(output.request_id)
            tokens[output.request_id] = output.outputs[0].token_ids

    for i in range(rows):
        engine.add_request(str(i), {"prompt_token_ids": rng.integers(0, size, context).tolist()}, params)
    while len(decoding) < rows:
        step()
    for _ in range(8):
        step()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    while engine.has_unfinished_requests():
        step()
    return times, [list(tokens[str(i)]) for i in range(rows)]
