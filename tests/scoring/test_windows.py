"""Strided windows, against the loop of Hugging Face's guide on the perplexity of fixed-length models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.api.errors import InvalidParameterError
from jpaged.scoring.windows import check_window, windows


def guide(seq_len: int, max_length: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, first label, end) of each window: labels are the last trg_len tokens, and the shift drops label 0."""
    found, prev_end = [], 0
    for begin in range(0, seq_len, stride):
        end = min(begin + max_length, seq_len)
        trg_len = end - prev_end
        found.append((begin, max(end - trg_len, begin + 1), end))
        prev_end = end
        if end == seq_len:
            break
    return found


lengths = st.integers(2, 400)
unhurried = settings(deadline=None)


@unhurried
@given(lengths, st.integers(2, 60), st.data())
def test_a_text_gets_the_windows_of_the_guide(n, window, data):
    stride = data.draw(st.integers(1, window - 1))
    assert [tuple(w) for w in windows(n, 1, window, stride)] == guide(n, window, stride)


@unhurried
@given(lengths, st.integers(2, 60), st.data())
def test_every_token_is_scored_once_with_enough_context(n, window, data):
    stride, first = data.draw(st.integers(1, window - 1)), data.draw(st.integers(1, n - 1))
    scored = []
    for begin, start, end in windows(n, first, window, stride):
        assert 0 <= begin < start < end <= n
        assert end - begin <= window
        assert start - begin >= min(start, window - stride)
        scored += range(start, end)
    assert scored == list(range(first, n))


@unhurried
@given(st.integers(2, 60), st.data())
def test_a_short_completion_is_scored_in_one_window_that_ends_with_it(window, data):
    stride = data.draw(st.integers(1, window - 1))
    first = data.draw(st.integers(1, 500))
    n = first + data.draw(st.integers(1, stride))
    assert [tuple(w) for w in windows(n, first, window, stride)] == [(max(0, n - window), first, n)]


def test_the_default_is_the_whole_context_and_half_of_it():
    assert check_window(None, None, 1024) == (1024, 512)
    assert check_window(100, None, 1024) == (100, 50)
    assert check_window(2, None, 1024) == (2, 1)


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [(1, None, "window must be at least 2"), (65, None, "max_model_len=64"), (8, 8, "stride must be from 1 to 7")],
)
def test_windows_that_would_leave_tokens_out_are_refused(window, stride, message):
    with pytest.raises(InvalidParameterError, match=message):
        check_window(window, stride, 64)
