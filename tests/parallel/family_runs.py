"""What `tests/test_families.py` has done in a process of eight devices: models run by every path of the engine."""

import os
import tempfile
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.executor.cache import paged
from jpaged.executor.start.started import Startup
from jpaged.models import latent
from jpaged.models.loading import checkpoint, placing
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model

NUM_REQUESTS, NUM_TOKENS, NUM_SAMPLES = 6, 10, 3
LENGTHS = (1, 4, 5, 23, 38, 60)
POOLS = (44, 40, 36, 32, 28, 24, 20)
"""Blocks of 4 tokens in each cache group, fewer and fewer until a request is preempted: 49 would do for all at once."""

UNSPLIT = {"gemma", "phi3-window", "granite4-nope", "glm", "command-r", "stablelm", "falcon-11b-style"}
UNSPLIT |= {
    "qwen3-next-some-layers",
    "qwen3.5-moe",
    "redpajama-3b-style",
    "mpt-30b-style",
    "gpt-oss-120b-style",
    "glm4.5-air-style",
    "granite4-experts",
    "granite-moe",
    "gemma4-31b-style",
}
UNSPLIT |= {
    "llama4-maverick-style",
    "hunyuan-7b-style",
    "deepseek-v2",
    "exaone4-1.2b-style",
    "olmoe",
    "glm4.7-flash-style",
    "kimi-k2-style",
    "moonlight-style",
    "granite4-h-tiny",
    "granite4-h-small",
    "bamba",
    "nemotron3-nano-style",
    "dbrx-all-options",
    "vaultgemma",
    "olmo-hybrid-rope",
}
"""Models that run on one device alone: another of their family has their blocks, and is split."""

UNSPLIT_YET = {"codestral-mamba-style", "falcon-h1"}
"""Models that are split with `ALL_DEGREES` alone: another one has their blocks, and is split."""

ONE_AND_FOUR = {"smollm3", "starcoder2", "gptj", "bloom", "ernie4.5-moe", "trinity-style", "olmo2", "lfm2-1.2b-style"}
"""Models that run on one device and on four: those of their file that have no unsplit one beside them."""

TWO = {"qwen3-next", "deepseek-v3", "falcon-7b-style", "gpt-oss-20b-style", "nemotron3-super-style"}
"""Models that run on two devices, where no key-value head or group is stored twice; those of `SPARSE` on four, too,
with whole experts on each. Another one with their blocks is split over four."""

ALL_DEGREES = "JPAGED_TESTS_ALL_DEGREES"
"""An environment variable; if it is not empty, every model that is split runs on one device, on two and on four. Else
most run on four alone: the unsplit ones, with the same blocks, run the same code on one."""

EXPANDED = {"deepseek-v2-lite", "deepseek-v3"}
"""Models with latents whose programs for prompts make keys and values of heads, as larger programs do."""

SPARSE = {"gpt-oss-20b-style", "deepseek-v3", "granite-moe-shared", "llama4-scout-style", "lfm2-8b-a1b-style"}
SPARSE |= {"nemotron3-super-style", "command-a-plus-style"}
"""Models whose experts are split over devices in both ways."""

HYBRID = {"qwen3-next", "qwen3-next-some-layers", "qwen3.5", "qwen3.5-moe"}
HYBRID |= {"granite4-h-tiny", "granite4-h-micro", "granite4-h-small", "granite4-h-all-options", "bamba"}
HYBRID |= {"lfm2-1.2b-style", "lfm2-8b-a1b-style"}
HYBRID |= {"nemotron-h-8b-style", "nemotron3-nano-style", "nemotron3-super-style", "falcon-h1"}
HYBRID |= {"codestral-mamba-style", "olmo-hybrid-7b-style", "olmo-hybrid-rope"}
"""Models with recurrent layers. They run with smaller chunks, too, and hit snapshots of states on several devices."""

MOST_BYTES = 8192
"""Larger tensors are read in runs of their rows: half of a square matrix, some of the experts of a layer."""

ARGS = EngineArgs(
    dtype="float32",
    block_size=4,
    num_gpu_blocks_override=256,
    max_model_len=128,
    max_num_seqs=NUM_REQUESTS,
    max_num_batched_tokens=32,
    decode_buckets=(NUM_REQUESTS,),
    token_buckets=(32,),
    skip_tokenizer_init=True,
    verbose=False,
    watermark=0.0,
    state_snapshot_tokens=4,
)


def degrees(name: str) -> tuple[int, ...]:
    """How many devices the model runs on. By the first of these it takes every path, by the others the plain one."""
    if name in UNSPLIT:
        return (1,)
    if os.environ.get(ALL_DEGREES):
        return (1, 2, 4)
    if name in UNSPLIT_YET:
        return (1,)
    if name in TWO:
        return (2,)
    return (1, 4) if name in ONE_AND_FOUR else (4,)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def tokens_by_path(name: str) -> dict[str, Any]:
    """The greedy tokens of the prompts by each path, what shows that the path was taken, and scores."""
    least = ARGS.max_num_batched_tokens if name in EXPANDED else latent.EXPANDED_FROM
    op = mock.patch.object(paged, "expanded_attention", wraps=paged.expanded_attention)
    with (
        mock.patch.object(checkpoint, "MOST_BYTES", MOST_BYTES),
        mock.patch.object(latent, "EXPANDED_FROM", least),
        op as expanded,
    ):
        return _tokens_by_path(name) | {"expanded": expanded.called}


def _tokens_by_path(name: str) -> dict[str, Any]:
    first, *others = degrees(name)
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(tiny_model(name), directory, use_torch=False)
        args = replace(ARGS, model=directory, tensor_parallel_size=first, expert_load=name in SPARSE)
        # One model of each kind is put together by the programs that larger parameters take, on each device.
        most = 0 if name in (*SPARSE, "qwen3-next") else placing.MOST_HOST_BYTES
        with mock.patch.object(placing, "MOST_HOST_BYTES", most):
            engine = LLMEngine(args)
        found = {f"degree {first}": _plain_paths(engine)} | _other_paths(name, args, engine.startup)
        for degree in others:
            found[f"degree {degree}"] = _plain_paths(LLMEngine(replace(args, tensor_parallel_size=degree)))
        if name in SPARSE:
            whole = replace(args, tensor_parallel_size=4, enable_expert_parallel=True)
            found["expert parallel"] = _plain_paths(LLMEngine(whole))
        return found


def _plain_paths(engine: LLMEngine) -> dict[str, Any]:
    """131 tokens of prompts in steps of 32, and once more, where prefixes hit the cache."""
    found: dict[str, Any] = {"chunked": greedy_tokens(engine)}
    load = engine.get_metrics().expert_load
    found["load"] = None if load is None else load.tokens  # by layer and expert, where they are counted
    found["prefix hits"] = greedy_tokens(engine)
    found["hits"] = engine.get_metrics().prefix_cache_hits
    return found


def _other_paths(name: str, args: EngineArgs, startup: Startup) -> dict[str, Any]:
    found: dict[str, Any] = {"preempted": []}
    for blocks in POOLS:
        num_blocks = blocks * len(startup.cache_groups)
        few = LLMEngine(replace(args, num_gpu_blocks_override=num_blocks), startup)
        found["preempted"].append(greedy_tokens(few))
        if preemptions := few.get_metrics().num_preemptions:
            break
    found["preemptions"] = preemptions
    found["samples"] = _samples(LLMEngine(args, startup))
    found["scores"] = _scores(LLMEngine(args, startup))
    if name in HYBRID:
        found["small chunks"] = greedy_tokens(LLMEngine(replace(args, max_num_batched_tokens=7), startup))
    return found


def greedy_tokens(engine: LLMEngine) -> list[list[int]]:
    """Greedy tokens of all prompts at once."""
    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, sampling)
    outputs = {output.request_id: output for output in _finish(engine)}
    return [list(outputs[str(i)].outputs[0].token_ids) for i in range(NUM_REQUESTS)]


def _samples(engine: LLMEngine) -> list[list[int]]:
    """Of the fourth prompt, which ends in the middle of a block that each sample copies."""
    sampling = SamplingParams(
        temperature=0,
        n=NUM_SAMPLES,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request("samples", prompts()[3], sampling)
    (output,) = _finish(engine)
    return [list(sample.token_ids) for sample in output.outputs]


def _scores(engine: LLMEngine) -> list[float]:
    """Log-probabilities of the tokens of the longest prompt, from the second on."""
    engine.add_score_request("score", prompts()[-1], 1)
    (output,) = _finish(engine)
    return [float(logprob) for logprob in output.scores.logprobs]


def _finish(engine: LLMEngine) -> list[Any]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs
