"""From prompts to tokens through the whole engine, against transformers' greedy decoding in float32.

A sequence is transformers' greedy sequence exactly if each of its tokens is the argmax of transformers' logits after
the ones before it, so one forward pass over prompt and output checks all of them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.executor.start.started import Startup
from tests.support.quick_compilation import quick_compilation_of_module as quick_compilation_of_module
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, TinyModel, tiny_models, torch_model, write_tiny_model

torch = pytest.importorskip("torch")

NUM_REQUESTS = 8
NUM_TOKENS = 12
FEW_BLOCKS = 24
"""Blocks of 4 tokens in each cache group: the requests of `mixed_prompts` need about 80."""

SIZES: dict[str, Any] = {
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 32,
    "decode_buckets": (NUM_REQUESTS,),
    "token_buckets": (32,),
}
ARGS = EngineArgs(**TINY_ENGINE | SIZES)


@pytest.fixture(
    scope="module",  # one worker runs all tests of a model, so that it is compiled once
    params=[pytest.param(case, marks=pytest.mark.xdist_group(case.name), id=case.name) for case in tiny_models()],
)
def started(request, tmp_path_factory) -> tuple[EngineArgs, Startup, torch.nn.Module]:
    """A tiny model of the family, on disk, loaded and compiled once; and the same in transformers."""
    case: TinyModel = request.param
    directory = write_tiny_model(case, tmp_path_factory.mktemp(case.name))
    args = replace(ARGS, model=str(directory))
    return args, LLMEngine(args).startup, torch_model(case)


@pytest.fixture
def pipeline_depth(request) -> int:
    """The plain loop for every second model and the pipelined one for the others, where a test does not run both."""
    return 0 if tiny_models().index(request.node.callspec.params["started"]) % 2 else 2


def mixed_prompts(seed: int) -> list[list[int]]:
    """Lengths from 1 to 70, block boundaries (block size 4) among them."""
    rng = np.random.default_rng(seed)
    lengths = [1, 3, 4, 5, 8, 70, *rng.integers(1, 70, NUM_REQUESTS - 6)]
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


def run(engine: LLMEngine, prompts: list[list[int]], **params) -> dict[int, list[int]]:
    """Adds all prompts at once, steps until done, and returns the tokens of each."""
    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **params
    )
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, sampling)
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] += output.outputs[0].token_ids
    return tokens


def assert_greedy(model: torch.nn.Module, prompts: list[list[int]], outputs: dict[int, list[int]]) -> None:
    """In one batch, padded behind the sequences, where causal attention does not see it."""
    texts = [torch.tensor(prompt + outputs[i]) for i, prompt in enumerate(prompts)]
    with torch.no_grad():
        best = model(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=3)).logits.argmax(-1)
    for i, prompt in enumerate(prompts):
        assert len(outputs[i]) == NUM_TOKENS
        greedy = best[i, len(prompt) - 1 : len(prompt) + NUM_TOKENS - 1].tolist()
        assert outputs[i] == greedy, f"request {i}: {prompt}"


@pytest.mark.parametrize("pipeline_depth", [0, 2], ids=["plain-loop", "pipelined"])
def test_greedy_tokens_are_those_of_transformers(started, pipeline_depth):
    args, startup, reference = started
    engine = LLMEngine(replace(args, pipeline_depth=pipeline_depth), startup)
    prompts = mixed_prompts(0)
    assert_greedy(reference, prompts, run(engine, prompts))


def test_prompts_computed_in_chunks_of_16_tokens_give_the_same_tokens(started, pipeline_depth):
    args, startup, reference = started
    engine = LLMEngine(replace(args, max_num_batched_tokens=16, pipeline_depth=pipeline_depth), startup)
    prompts = mixed_prompts(1)
    assert_greedy(reference, prompts, run(engine, prompts))
    least = sum(map(len, prompts)) / 16
    assert engine.get_metrics().num_steps >= least


def test_preempted_requests_give_the_same_tokens(started, pipeline_depth):
    args, startup, reference = started
    num_blocks = FEW_BLOCKS * len(startup.cache_groups)
    few = replace(args, num_gpu_blocks_override=num_blocks, watermark=0.0, pipeline_depth=pipeline_depth)
    engine = LLMEngine(few, startup)
    # Short prompts make room short in windowed groups too, which reserve a long prompt's blocks at its admission.
    prompts = [prompt if i % 2 else prompt[:3] for i, prompt in enumerate(mixed_prompts(2))]
    assert_greedy(reference, prompts, run(engine, prompts))
    metrics = engine.get_metrics()
    assert metrics.num_preemptions > 0
    assert metrics.num_used_blocks == 0


def test_as_many_samples_of_one_prompt_as_there_are_slots_give_its_tokens(started):
    """Each is forked in the middle of a block, which is copied in every cache group."""
    args, startup, reference = started
    engine = LLMEngine(args, startup)
    prompt = mixed_prompts(4)[5][:30]
    sampling = SamplingParams(
        temperature=0, n=NUM_REQUESTS, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    engine.add_request("0", prompt, sampling)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (output,) = outputs
    assert_greedy(reference, [prompt], {0: list(output.outputs[0].token_ids)})
    assert len(output.outputs) == NUM_REQUESTS
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 1
    assert engine.get_metrics().num_used_blocks == 0


def test_prefix_cache_hits_give_the_same_tokens(started, pipeline_depth):
    args, startup, reference = started
    engine = LLMEngine(replace(args, pipeline_depth=pipeline_depth), startup)
    shared = mixed_prompts(3)[5][:40]
    prompts = [shared + prompt[:20] for prompt in mixed_prompts(3)]
    run(engine, [shared])
    assert_greedy(reference, prompts, run(engine, prompts))
    assert engine.get_metrics().prefix_cache_hits >= len(prompts) * len(shared)
