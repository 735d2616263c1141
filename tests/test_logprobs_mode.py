"""Log-probabilities that an engine reports: the model's own, or those of the distribution that it samples from."""

import math

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.models import ModelConfig, build, dense_causal_attend
from tests.tiny_models import TINY_ENGINE, tiny_model

PROMPT = [5, 9, 2, 44]


def test_the_engine_reports_log_probabilities_of_the_distribution_that_it_samples_from():
    """Of the tokens that top_k leaves, at the temperature, from logits of the model without an engine."""
    contents = tiny_model("llama-biases").config
    model = build(ModelConfig.from_dict(contents), "float32")
    weights = model.init(3)
    with LLM(contents, weights=weights, **TINY_ENGINE, logprobs_mode="processed_logprobs") as llm:
        params = SamplingParams(temperature=0.5, top_k=3, max_tokens=6, seed=1, logprobs=5, ignore_eos=True)
        completion = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
        score = SamplingParams(temperature=0.5, max_tokens=1, prompt_logprobs=1)
        prompt_logprobs = llm.generate([PROMPT], score, use_tqdm=False)[0].prompt_logprobs
    tokens = np.array([*PROMPT, *completion.token_ids], np.int32)
    hidden = model.forward(weights, tokens, np.arange(len(tokens), dtype=np.int32), dense_causal_attend)
    logits = np.asarray(model.logits(weights, hidden), np.float64)
    for i, position in enumerate(completion.logprobs):
        row = logits[len(PROMPT) + i - 1]
        left = np.argsort(-row)[:3]
        exact = row[left] / 0.5 - np.log(np.exp(row[left] / 0.5).sum())
        assert set(position) == set(left.tolist())
        for token, expected in zip(left.tolist(), exact, strict=True):
            assert math.isclose(position[token].logprob, expected, abs_tol=1e-3)
    for i, token in enumerate(PROMPT[1:]):  # these stay the model's own
        expected = logits[i, token] - np.log(np.exp(logits[i]).sum())
        assert math.isclose(prompt_logprobs[i + 1][token].logprob, expected, abs_tol=1e-3)


def test_modes_that_there_are_not_are_refused_by_name():
    with pytest.raises(InvalidParameterError, match="logprobs_mode must be one of 'raw_logprobs', 'processed"):
        LLM(logprobs_mode="raw_logits")
