"""Cuts sequences that are longer than the context into overlapping windows. Each token is scored once.

    tokens    0 ................................................ n
    window 0  [ scored              ]                               W tokens, all but the first scored
    window 1          [ context     | scored ]                      `stride` tokens scored, W - stride of context
    window 2                   [ context     | scored ]
    window 3                            [ context     | scored  n]  the last one ends early

This is the strided window of Hugging Face's guide "Perplexity of fixed-length models": windows begin at 0, stride,
2 * stride, ..., and each scores what the one before did not reach. A smaller stride gives tokens more context and
costs more: every token is computed about W / stride times.

Where only a completion is scored, windows that would score nothing are left out, and the first is moved on as far as
`stride` scored tokens allow: so a completion of at most `stride` tokens is scored in one window, the row's last W
tokens, as if the prompt had been cut off from the left.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from jpaged.api.checks import check_integer
from jpaged.api.errors import InvalidParameterError


class Window(NamedTuple):
    """Tokens begin .. end-1 are computed together; of them first .. end-1 are scored. begin < first < end."""

    begin: int
    first: int
    end: int


def windows(num_tokens: int, first_scored: int, window: int, stride: int) -> Iterator[Window]:
    """The windows of a sequence.

    Args:
        num_tokens: its length n.
        first_scored: index of the first token to score, from 1 to n-1.
        window: most tokens at once, W.
        stride: tokens by which a window is ahead of the one before, from 1 to W-1.
    """
    first = first_scored
    end = max(window, min(num_tokens, first_scored + stride))  # the window's full length, even past the last token
    while first < num_tokens:
        yield Window(max(0, end - window), first, min(end, num_tokens))
        first, end = end, end + stride


def check_window(window: int | None, stride: int | None, max_model_len: int) -> tuple[int, int]:
    """The window and the stride to use: by default the whole context, and half of the window.

    Raises:
        InvalidParameterError: not an integer; a window below 2 or above the context; a stride that would leave tokens
            out.
    """
    check_sizes(window, stride)
    size = max_model_len if window is None else int(window)
    if not 2 <= size <= max_model_len:
        raise InvalidParameterError(f"window must be from 2 to max_model_len={max_model_len} tokens, got {size}.")
    step = max(1, size // 2) if stride is None else int(stride)
    if not 1 <= step < size:
        raise InvalidParameterError(
            f"stride must be from 1 to {size - 1}, less than the window of {size} tokens, so that every token has one "
            f"before it; got {step}."
        )
    return size, step


def check_sizes(window: int | None, stride: int | None) -> None:
    """Raises InvalidParameterError for a window or stride that fits no context."""
    for name, value, least in (("window", window, 2), ("stride", stride, 1)):
        if value is not None:
            check_integer(name, value, least, sys.maxsize)
