"""What `tests/test_families.py` has done in a process of eight devices: models run by every path of the engine."""

import os
import tempfile
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.executor.cache import paged
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
}
"""Models that are split over devices as another of their family is, and run on one alone."""

FOUR_ONLY = {"qwen3.5", "gemma3", "olmo3", "granite4-rope", "granite4-h-all-options", "command-r7b"}
FOUR_ONLY |= {"falcon-40b-style", "falcon-rw-style", "pythia", "gptj", "bloom", "mpt"}
FOUR_ONLY |= {"olmo2", "exaone4-32b-style", "granite", "granite4-h-micro", "lfm2-1.2b-style", "nemotron-h-8b-style"}
FOUR_ONLY |= {"glm4", "command-r-plus", "stablelm-12b-style", "starcoder2", "smollm3", "hunyuan-a13b-style"}
FOUR_ONLY |= {"gemma4-e4b-style", "gemma4-26b-a4b-style"}
FOUR_ONLY |= {"trinity-style", "minimax-m2", "glm4.5-style", "ernie4.5-moe"}
"""Models that are split over four devices and, without `ALL_DEGREES`, not over two: another of their family or of their
blocks is, or two differ from four in nothing, since no key-value head is stored more than once."""

UNSPLIT_YET = {"codestral-mamba-style", "falcon-h1"}
"""Models that are split with `ALL_DEGREES` alone: another one has their blocks, and is split."""

ALL_DEGREES = "JPAGED_TESTS_ALL_DEGREES"
"""An environment variable; if it is not empty, every model that is split is split over two devices and over four."""

EXPANDED = {"deepseek-v2-lite", "deepseek-v3"}
"""Models with latents whose programs for prompts make keys and values of heads, as larger programs do."""

SPARSE = {"gpt-oss-20b-style", "deepseek-v3", "granite-moe-shared", "llama4-scout-style", "lfm2-8b-a1b-style"}
SPARSE |= {"nemotron3-super-style"}
"""Models whose experts are split over devices in both ways."""

HYBRID = {"qwen3-next", "qwen3-next-some-layers", "qwen3.5", "qwen3.5-moe"}
HYBRID |= {"granite4-h-tiny", "granite4-h-micro", "granite4-h-small", "granite4-h-all-options", "bamba"}
HYBRID |= {"lfm2-1.2b-style", "lfm2-8b-a1b-style"}
HYBRID |= {"nemotron-h-8b-style", "nemotron3-nano-style", "nemotron3-super-style", "falcon-h1"}
HYBRID |= {"codestral-mamba-style"}
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
    """How many devices the model is split over."""
    all_degrees = bool(os.environ.get(ALL_DEGREES))
    if name in UNSPLIT or (name in UNSPLIT_YET and not all_degrees):
        return ()
    return (4,) if name in FOUR_ONLY and not all_degrees else (2, 4)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def tokens_by_path(*names: str) -> dict[str, dict[str, Any]]:
    """For each model the greedy tokens of the prompts by each path, what shows that the path was taken, and scores."""
    with mock.patch.object(checkpoint, "MOST_BYTES", MOST_BYTES):
        found = {}
        for name in names:
            least = ARGS.max_num_batched_tokens if name in EXPANDED else latent.EXPANDED_FROM
            op = mock.patch.object(paged, "expanded_attention", wraps=paged.expanded_attention)
            with mock.patch.object(latent, "EXPANDED_FROM", least), op as expanded:
                found[name] = _tokens_by_path(name)
            found[name]["expanded"] = expanded.called
        return found


def _tokens_by_path(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(tiny_model(name), directory, use_torch=False)
        args = replace(ARGS, model=directory, expert_load=name in SPARSE)
        engine = LLMEngine(args)
        found: dict[str, Any] = {"chunked": greedy_tokens(engine)}  # 131 tokens of prompts in steps of 32
        found["load"] = _load(engine)
        found["prefix hits"] = greedy_tokens(engine)
        found["hits"] = engine.get_metrics().prefix_cache_hits
        found["preempted"] = []
        for blocks in POOLS:
            num_blocks = blocks * len(engine.startup.cache_groups)
            few = LLMEngine(replace(args, num_gpu_blocks_override=num_blocks), engine.startup)
            found["preempted"].append(greedy_tokens(few))
            if preemptions := few.get_metrics().num_preemptions:
                break
        found["preemptions"] = preemptions
        found["samples"] = _samples(LLMEngine(args, engine.startup))
        found["scores"] = _scores(LLMEngine(args, engine.startup))
        if name in HYBRID:
            found["small chunks"] = greedy_tokens(LLMEngine(replace(args, max_num_batched_tokens=7), engine.startup))
        for degree in degrees(name):
            split = replace(args, tensor_parallel_size=degree)
            # One model of each kind is put together by the programs that larger parameters take, on each device.
            most = 0 if degree == 2 and name in (*SPARSE, "qwen3-next") else placing.MOST_HOST_BYTES
            with mock.patch.object(placing, "MOST_HOST_BYTES", most):
                engine = LLMEngine(split)
            found[f"tensor parallel {degree}"] = greedy_tokens(engine)
            load = _load(engine)
            if name in HYBRID:
                found[f"split states {degree}"] = greedy_tokens(engine), engine.get_metrics().prefix_cache_hits
            if name in SPARSE:
                whole = LLMEngine(replace(split, enable_expert_parallel=True))
                found[f"expert parallel {degree}"] = greedy_tokens(whole)
                found[f"loads {degree}"] = [load, _load(whole)]
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


def _load(engine: LLMEngine) -> Any:
    """Tokens by layer and expert, where they are counted."""
    load = engine.get_metrics().expert_load
    return None if load is None else load.tokens


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
