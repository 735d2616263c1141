"""What models say over several GPUs with the one-shot all-reduce: near XLA's, and on all GPUs the same.

    python -m tests.drills.one_shot              # two Hopper GPUs joined by NVLink, about two minutes

The embedded model (a Llama) and four layers of other shapes, random, in 16 bits: each on one GPU, over all with XLA's
all-reduce, and over all with the one-shot kernel in every step. The log-probabilities of given tokens must differ no
more between the two ways of adding than 16 bits make any two ways differ; the embedded model's greedy answers must be
nearly the same, and it must take a thousand steps in a row, and start again from programs that were kept. After each
run the devices must know the same last tokens. A step that hangs shows where after two minutes.
"""

import argparse
import faulthandler
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.bench.models import CONFIGS

ROWS = 2048
"""Largest step: all of them take the kernel, where a block of threads then has more rows than it sends ahead."""
NUM_PROMPTS = 48
SHAPES = ("qwen3-0.6b", "opt-125m")
MEAN_DISTANCE = 0.2
"""Most that log-probabilities over all GPUs, added by XLA, may be from those of one GPU on average. What 16 bits do
depends on the model: 0.04 for the embedded one on a CPU, 0.22 at most, of tokens that it gives -12."""

MEAN_FACTOR, MAX_FACTOR = 2, 4
"""How many times that the kernel's may be from XLA's and from those of one GPU: on average, and of any token."""


def engine(directory: Path, devices: int, one_shot_rows: int | None) -> LLMEngine:
    is_demo = directory == demo_model_path()
    args = EngineArgs(
        model=str(directory),
        load_format="auto" if is_demo else "dummy",
        max_model_len=1024,
        num_gpu_blocks_override=4096,
        gpu_memory_utilization=0.6,
        max_num_seqs=64,
        max_num_batched_tokens=ROWS,
        decode_buckets=(8, 64) if is_demo else (64,),
        token_buckets=(64, ROWS) if is_demo else (ROWS,),
        tensor_parallel_size=devices,
        one_shot_rows=one_shot_rows,
        skip_tokenizer_init=True,
        verbose=False,
    )
    return LLMEngine(args)


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, vocab_size, length).tolist() for length in rng.integers(4, 90, NUM_PROMPTS)]


def scores(llm: LLMEngine) -> np.ndarray:
    """Log-probabilities of all prompts' tokens but the first."""
    for i, prompt in enumerate(prompts(llm.vocab_size)):
        llm.add_score_request(str(i), prompt, 1)
    found = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            found[int(output.request_id)] = np.asarray(output.scores.logprobs)
    return np.concatenate([found[i] for i in range(NUM_PROMPTS)])


def greedy(llm: LLMEngine, max_tokens: int) -> list[list[int]]:
    params = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    for i, prompt in enumerate(prompts(llm.vocab_size)):
        params["output_kind"] = RequestOutputKind.FINAL_ONLY
        llm.add_request(str(i), prompt[:16], SamplingParams(**params))
    tokens: list[list[int]] = [[] for _ in range(NUM_PROMPTS)]
    while llm.has_unfinished_requests():
        for output in llm.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return tokens


def check_devices_agree(llm: LLMEngine) -> None:
    """Each computed the slots' state by itself, from the sums that it got."""
    for leaf in jax.block_until_ready(llm.startup.runner._held["state"]):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(first, other) for other in others)


def report(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)
    faulthandler.dump_traceback_later(120, exit=True)


def check(name: str, directory: Path, devices: int) -> None:
    found = {}
    ways = [("one GPU", 1, None), ("XLA", devices, 0), ("one-shot", devices, ROWS)]
    if name == "demo":
        ways.append(("one-shot, programs from the cache", devices, ROWS))
    for way, count, rows in ways:
        begun = time.monotonic()
        llm = engine(directory, count, rows)
        assert llm.startup.config.one_shot_rows == (rows or 0)
        started = time.monotonic()
        found[way] = scores(llm), greedy(llm, 64)
        assert np.isfinite(found[way][0]).all()
        check_devices_agree(llm)
        seconds = {"start_s": round(started - begun, 1), "run_s": round(time.monotonic() - started, 1)}
        report(model=name, way=way, **seconds)
    if name == "demo":
        first, again = found["one-shot"], found["one-shot, programs from the cache"]
        assert again[1] == first[1]
        assert np.array_equal(again[0], first[0])
    for way, other in (("XLA", "one GPU"), ("one-shot", "one GPU"), ("one-shot", "XLA")):
        apart = np.abs(found[way][0] - found[other][0])
        answers = zip(found[way][1], found[other][1], strict=True)
        equal = [next((i for i in range(64) if a[i] != b[i]), 64) for a, b in answers]
        report(
            model=name,
            compared=[way, other],
            logprob_max=float(apart.max()),
            logprob_mean=float(apart.mean()),
            first_difference={"median": float(np.median(equal)), "equal": equal.count(64), "of": NUM_PROMPTS},
        )
        if way == "XLA":
            usual, most = apart.mean(), apart.max()
            assert usual < MEAN_DISTANCE, (way, other)
        assert apart.mean() <= MEAN_FACTOR * usual, (way, other)
        assert apart.max() <= MAX_FACTOR * most, (way, other)
        if name == "demo":
            assert np.median(equal) == 64, (way, other)


def check_defaults(devices: int) -> None:
    """That an engine takes the kernel by itself here, and a thousand steps of it."""
    llm = engine(demo_model_path(), devices, None)
    assert llm.startup.config.one_shot_rows > 0, "these devices do not take the kernel: see executor/start/one_shot.py"
    begun = time.monotonic()
    tokens = greedy(llm, 1000)
    assert {len(one) for one in tokens} == {1000}
    check_devices_agree(llm)
    report(model="demo", steps=1000, seconds=round(time.monotonic() - begun, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    devices = parser.parse_args().devices
    faulthandler.dump_traceback_later(120, exit=True)
    check("demo", demo_model_path(), devices)
    check_defaults(devices)
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            config = CONFIGS[name] | {"num_hidden_layers": 4}
            (Path(directory) / "config.json").write_text(json.dumps(config))
            check(name, Path(directory), devices)
    print("all as it should be")


if __name__ == "__main__":
    main()
