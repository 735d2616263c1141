"""What a request asks of the sampler, in the words of the request."""

import pytest

from jpaged.errors import InvalidParameterError
from jpaged.sampling_params import SamplingParams
from jpaged.serving.protocol import CompletionRequest
from jpaged.serving.sampling import sampling_of


@pytest.mark.parametrize(("fields", "blamed"), [({"n": 64}, "n"), ({"n": 1, "best_of": 64}, "best_of")])
def test_a_search_too_wide_is_blamed_on_the_field_that_asked_for_it(fields, blamed):
    request = CompletionRequest(prompt="a", use_beam_search=True, **fields)
    with pytest.raises(InvalidParameterError, match=f"^{blamed} must be at most 20, got 64"):
        sampling_of(request, SamplingParams())
