"""What a request may ask of an engine, whatever kind of request it is."""

from dataclasses import dataclass

import pytest

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.engine.limits import RequestLimits

LIMITS = RequestLimits(
    max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, block_size=4, num_blocks=16, windows=(None,)
)


@dataclass(frozen=True)
class Drafts:
    """Parameters of a made-up kind of request."""

    num_sequences: int
    max_tokens: int | None = 20
    runs_together: bool = True
    sequences_parameter: str = "num_drafts"


def test_sequences_that_run_together_must_fit_the_pool_together():
    assert LIMITS.max_len(4, Drafts(2)) == 24
    with pytest.raises(OutOfMemoryError, match=r"^num_drafts=4 may need 21 blocks for 24 .* lower num_drafts or"):
        LIMITS.max_len(4, Drafts(4))
    assert LIMITS.max_len(4, Drafts(4, runs_together=False)) == 24


def test_more_sequences_than_can_run_are_refused_under_the_name_of_their_parameter():
    with pytest.raises(InvalidParameterError, match=r"^num_drafts=9 exceeds max_num_seqs=8; .* lower num_drafts or"):
        LIMITS.max_len(4, Drafts(9, runs_together=False))
