"""Finds the tokens that an answer's text is made of, apart from those of its reasoning, its calls and their marks.

text      <think>why</think>So it is
tokens    <think>|why|</think>|So| it| is      each with its place in the text
content                         So it is       the parser says where it stands: these are its tokens
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

_T = TypeVar("_T")

_MAX_GAP = 8
"""The most characters of a text in a row that belong to no token: they stand for bytes that make no character."""


class TextTokens(Generic[_T]):
    """The tokens of one answer by their places in its text, each with what is said of it."""

    def __init__(self) -> None:
        self._length = 0
        self._waiting: deque[tuple[str, _T | None]] = deque()  # those whose text has not come
        self._placed: deque[tuple[int, int, _T]] = deque()  # from, to, what is said

    def add(self, text: str, tokens: Iterable[tuple[str, _T]]) -> None:
        """More of the answer.

        tokens: new ones, each with its text; "" of one that leaves a character incomplete. Text may come later than
            its tokens, as it does where it may begin a stop string.
        """
        self._waiting += tokens
        while text and self._waiting:
            own, what = self._waiting.popleft()
            is_longer = own.startswith(text) and own != text
            if is_longer:  # the rest comes later
                self._waiting.appendleft((own[len(text) :], None))
            end = len(text) if is_longer else _end_of(own, text)
            if what is not None and end is not None:
                self._placed.append((self._length, self._length + end, what))
            self._length += end or 0
            text = text[end or 0 :]
        self._length += len(text)

    def taken(self, places: Iterable[tuple[int, int]], read: int) -> list[_T]:
        """The tokens of content. They are not taken again.

        places: from and to of each piece of it, in order. read: up to where it is known what is content; other tokens
            in front of that are dropped.
        """
        found: list[_T] = []
        kept: deque[tuple[int, int, _T]] = deque()
        for first, end, what in self._placed:
            is_content = any(first < b and (end > a or first == end == a) for a, b in places)
            if is_content:
                found.append(what)
            elif end > read or first == end == read:
                kept.append((first, end, what))
        self._placed = kept
        return found


def _end_of(own: str, text: str) -> int | None:
    """Where a token's own text ends in the text that begins with it; None if it is left out, as special tokens are."""
    for spelled in (own, own.lstrip(" ")):  # some tokenizers drop the first space of a text
        at = text.find(spelled, 0, len(spelled) + _MAX_GAP)
        if at >= 0 and (spelled or not own):
            return at + len(spelled)
    return None
