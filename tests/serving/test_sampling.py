"""What a request asks of the sampler, in the words of the request."""

import weakref

import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import SamplingParams
from jpaged.host.garbage import without_collections
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, CompletionRequest
from jpaged.serving.sampling import sampling_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 64}, "n must be at most 20, got 64"),
        ({"n": 1, "best_of": 64}, "best_of must be at most 20, got 64"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"best_of": 0}, "best_of must be at least 1, got 0"),
    ],
)
def test_a_search_that_cannot_be_is_blamed_on_the_field_that_asked_for_it(fields, message):
    request = CompletionRequest(prompt="a", use_beam_search=True, **fields)
    with pytest.raises(InvalidParameterError, match=f"^{message}"):
        sampling_of(request, SamplingParams())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_completion_tokens": -1}, "max_completion_tokens must be at least 1, got -1"),
        (
            {"max_completion_tokens": 4, "max_tokens": 9, "min_tokens": 5},
            "min_tokens=5 is above max_completion_tokens=4",
        ),
        ({"max_completion_tokens": 0, "use_beam_search": True}, "max_completion_tokens must be at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
    ],
)
def test_the_limit_of_a_chat_is_blamed_by_the_name_it_was_given_under(fields, message):
    request = ChatCompletionRequest(messages=[], **fields)
    with pytest.raises(InvalidParameterError, match=f"^{message}"):
        sampling_of(request, SamplingParams())


def test_all_that_is_no_token_id_is_named():
    with pytest.raises(ApiError, match=r"^logit_bias: 'one', 'two' are no token ids\.$"):
        sampling_of(CompletionRequest(prompt="a", logit_bias={"one": 1, "5": 1, "two": 1}), SamplingParams())


def test_a_refused_constraint_is_freed_at_once():
    """Not by a collection, of which 400 refused schemas a second made one every 100 ms, and streams waited for 10 ms.
    Python before 3.12 has no such cycles."""

    class Schema(dict):
        pass

    schema = Schema(type="string")
    for _ in range(100):
        schema = Schema(type="object", properties={"a": schema})
    gone = weakref.ref(schema)

    def refuse(schema):
        described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        request = ChatCompletionRequest(messages=[], response_format=described)
        with pytest.raises(InvalidParameterError, match=r"^response_format\.json_schema\.schema nests deeper"):
            sampling_of(request, SamplingParams())

    with without_collections():
        refuse(schema)
        del schema
        assert gone() is None
