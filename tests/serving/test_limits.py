"""Limits on what one request may ask for."""

import pytest

from jpaged.api.sampling_params import SamplingParams
from jpaged.serving.errors import ApiError
from jpaged.serving.limits import ServerLimits

LIMITS = ServerLimits(max_logprob_values=1000)


def test_log_probabilities_are_bounded_over_all_prompts_and_choices():
    echo = SamplingParams(prompt_logprobs=9, logprobs=9, max_tokens=1)
    assert LIMITS.check_logprobs([49, 49], echo, 4096, streams=False) == 1000
    with pytest.raises(ApiError, match=r"logprobs: 1010 values .* at most 1000") as refused:
        LIMITS.check_logprobs([49, 50], echo, 4096, streams=False)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "logprobs", "too_large")
    choices = SamplingParams(logprobs=0, n=2, best_of=4, max_tokens=126)
    with pytest.raises(ApiError):
        LIMITS.check_logprobs([5, 5], choices, 4096, streams=False)


def test_no_more_tokens_are_counted_than_the_model_has_room_for():
    assert LIMITS.check_logprobs([30], SamplingParams(logprobs=0, max_tokens=10**6), 1000, streams=False) == 970


def test_what_is_streamed_or_not_asked_for_is_not_counted():
    assert LIMITS.check_logprobs([5000], SamplingParams(max_tokens=5000), 8192, streams=False) == 0
    assert LIMITS.check_logprobs([5000], SamplingParams(logprobs=20, max_tokens=5000), 8192, streams=True) == 0
    assert LIMITS.check_logprobs([5000], SamplingParams(logprobs=20, max_tokens=None), 8192, streams=False) == 0
    with pytest.raises(ApiError):
        LIMITS.check_logprobs([501], SamplingParams(prompt_logprobs=1, max_tokens=1), 8192, streams=True)
