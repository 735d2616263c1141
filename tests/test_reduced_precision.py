"""bfloat16 through the device's own kernels, judged by transformers' float32 logits, on the embedded model.

On a CPU these are the XLA ops; on a Hopper GPU (JAX_PLATFORMS=cuda) the Mosaic kernels, which are insisted on. Rounding
may turn a near tie, after which the texts differ: so each token is judged by the reference's logits after the same
tokens, not by the reference's own text.
"""

import jax
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.executor import config

torch = pytest.importorskip("torch")

SUBJECTS = ("a fox and a lantern", "a boat", "the wind", "two brothers and a bridge", "an old clock")
MAX_TOKENS = 24
LARGEST_GAP = 0.25
"""How far below the reference's best logit a greedy token may lie."""
MEAN_ERROR = 0.005
"""Of log-probabilities, over all tokens."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        dtype="bfloat16",
        kernel_backend="hopper" if jax.default_backend() == "gpu" else None,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,  # long prompts come in chunks, beside the decoding of others
        decode_buckets=(8,),
        token_buckets=(64,),
        shared_prefix_attention=True,
        verbose=False,
    )


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)


def prompts_of(llm: LLM) -> list[list[int]]:
    """Chats about one subject, and about several after each other: 10 to 300 tokens."""
    asks = [[{"role": "user", "content": f"Tell me a story about {subject}."}] for subject in SUBJECTS]
    tokenizer = llm.engine.tokenizer
    short = [tokenizer.apply_chat_template(messages) for messages in asks]
    together = [[token for prompt in short[: n + 1] for token in prompt] for n in range(1, len(short))]
    return short + together


def reference_logits(reference, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocabulary]; what each token was chosen from."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].numpy()


@pytest.mark.xdist_group("reduced-precision")
@pytest.mark.parametrize("logprobs", [None, 0], ids=["greedy-program", "full-program"])
def test_greedy_tokens_and_log_probabilities_are_the_references_within_rounding(llm, reference, logprobs):
    prompts = prompts_of(llm)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=logprobs)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    gaps, errors = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        logits = reference_logits(reference, prompt, completion.token_ids)
        chosen = logits[np.arange(len(logits)), completion.token_ids]
        gaps.append(logits.max(axis=1) - chosen)
        if logprobs is not None:
            ours = [p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)]
            errors.append(np.abs(ours - (chosen - np.logaddexp.reduce(logits, axis=1))))
    gaps = np.concatenate(gaps)
    print(f"{len(gaps)} tokens; gap {gaps.max():.3f} at most, {np.mean(gaps > 0):.2%} not the reference's argmax")
    assert gaps.max() < LARGEST_GAP
    assert np.mean(gaps > 0) < 0.02
    if errors:
        errors = np.concatenate(errors)
        print(f"log-probabilities: mean error {errors.mean():.4f}, largest {errors.max():.3f}")
        assert errors.mean() < MEAN_ERROR


@pytest.mark.xdist_group("reduced-precision")
def test_a_prefix_that_is_read_once_keeps_within_the_same_bounds(llm, reference, monkeypatch):
    monkeypatch.setattr(config, "LEAST_SAVED_TOKENS", 1)
    *asks, prefix = prompts_of(llm)
    prompts = [prefix + ask for ask in asks[: len(SUBJECTS)]]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    steps = llm.get_metrics().num_shared_prefix_steps
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert llm.get_metrics().num_shared_prefix_steps > steps
    gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(reference, prompt, tokens)
        gaps.append(logits.max(axis=1) - logits[np.arange(len(logits)), tokens])
    gaps = np.concatenate(gaps)
    print(f"{len(gaps)} tokens; gap {gaps.max():.3f} at most, {np.mean(gaps > 0):.2%} not the reference's argmax")
    assert gaps.max() < LARGEST_GAP
    assert np.mean(gaps > 0) < 0.02
