"""Grammars as sequences follow them, and the sequences' places in them: a part of the shards (`grammar_process.py`).

**Guesses.** Most tokens of a text need no mask. A row without truncation may sample among all tokens, and bring those
that it would have sampled in place of the first as well, in order: the first of them that is allowed is the one that a
mask would have led to. To say whether a token is allowed takes some microseconds; a mask, which tries them all, up to
milliseconds. So a guide that stands where a guess is likely to hold asks for no mask. In doubt it tries tokens at
random: if one of them is allowed, many are, and the row guesses; else a mask is made, which is quick where few are
allowed.

    at the beginning, after a guess that    guess; but if one of the last 32 guesses was refused, only where one of two
    was allowed, after a mask that allows   tokens tried at random is allowed: where few are, such a model is likely to
    more than half of all tokens            be refused
    after a mask that allows fewer          guess where one token tried at random is allowed
    after a guess that was refused          likewise, without what was refused; after three at this place not at all: a
                                            mask is made

A row that brings several tokens is less likely to be refused: two more are tried for it before a mask is made, and if
none of its tokens is allowed it does not guess again at this place.
"""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jpaged.text.frames import NO_TOKEN

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_random = Random(0)
_MOST_REFUSED = 2
"""After so many refused guesses at one place another one may be tried; if that is refused too, its mask is made."""
_TRUSTED = 32
"""So many guesses in a row that were allowed make others likely to be, too, however few tokens are."""
_MORE_TRIED = 2
"""Tokens that are tried besides where a row brings several."""


class Vocabulary(NamedTuple):
    """size: tokens that there are. ends: the end-of-sequence tokens. not_ends: uint32 [words]; a mask of the others."""

    size: int
    ends: frozenset[int]
    not_ends: np.ndarray

    @classmethod
    def of(cls, size: int, eos_token_ids: tuple[int, ...], num_words: int) -> "Vocabulary":
        not_ends = np.full((num_words,), 0xFFFFFFFF, np.uint32)
        for token in eos_token_ids:
            not_ends[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        return cls(size, frozenset(eos_token_ids), not_ends)


class Guide:
    """A sequence's place in its grammar.

    ends_late: the end of sequence is allowed only where nothing else is. guesses: whether its rows may do without
    masks.
    """

    __slots__ = (
        "_brings_several",
        "_is_sure",
        "_num_allowed",
        "_num_refused",
        "_vocabulary",
        "ends_late",
        "guesses",
        "matcher",
    )

    def __init__(self, grammar: "FollowedGrammar", vocabulary: Vocabulary, ends_late: bool, guesses: bool) -> None:
        self.ends_late, self.guesses = ends_late, guesses
        self.matcher = grammar.begin()
        self._vocabulary = vocabulary
        self._is_sure = True  # a guess at the next place is likely to hold
        self._num_refused = 0  # guesses at this place that did not
        self._num_allowed = _TRUSTED  # guesses since the last one that did not
        self._brings_several = False  # the last guess was of more tokens than one

    def take_guess(self, tokens: Sequence[int]) -> int:
        """Moves past the first of these tokens that may follow, and returns which it is; -1 if none may: then nothing
        has changed. NO_TOKEN ends them.
        """
        taken = -1
        for i, token in enumerate(tokens):
            if token == NO_TOKEN:
                break
            if self._takes(token):
                taken = i
                break
        self._brings_several = len(tokens) > 1 and tokens[1] != NO_TOKEN
        self._is_sure = taken >= 0
        if taken >= 0:
            self._num_allowed, self._num_refused = self._num_allowed + 1, 0
        else:
            refused = _MOST_REFUSED + 1 if self._brings_several else self._num_refused + 1
            self._num_allowed, self._num_refused = 0, refused
        return taken

    def _takes(self, token: int) -> bool:
        if token in self._vocabulary.ends:
            return self._may_end(token)
        return bool(self.matcher.try_consume_tokens([token]) == 1)

    def take_forced(self) -> list[int]:
        """Moves past the tokens that must follow, and returns them."""
        forced: list[int] = self.matcher.compute_ff_tokens()
        if forced:
            self.matcher.consume_tokens(forced)
        return forced

    def needs_mask(self) -> bool:
        """Whether its row is not to guess what follows."""
        if not self.guesses or self._num_refused > _MOST_REFUSED:
            return True
        if self._is_sure and self._num_allowed >= _TRUSTED:
            return False
        num_tried = (2 if self._is_sure else 1) + (_MORE_TRIED if self._brings_several else 0)
        return not any(self._allows_one_at_random() for _ in range(num_tried))

    def make_mask(self, mask: np.ndarray) -> None:
        """Writes what may follow: uint32 [words]. The end of sequence is left out where it must come late."""
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.ends_late:
            others = mask & self._vocabulary.not_ends
            if others.any():
                mask[:] = others

    def heed_mask(self, num_allowed: int) -> None:
        """Learns how many tokens its mask allows."""
        self._is_sure, self._num_refused = 2 * num_allowed > self._vocabulary.size, 0

    def _allows_one_at_random(self) -> bool:
        return bool(self.matcher.validate_tokens([_random.randrange(self._vocabulary.size)]))

    def _may_end(self, token: int) -> bool:
        """As `take_guess`, for an end-of-sequence token."""
        matcher = self.matcher
        if matcher.is_stopped():
            return not matcher.is_error()
        if self.ends_late:
            mask = np.zeros_like(self._vocabulary.not_ends)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if (mask & self._vocabulary.not_ends).any():
                return False
        return bool(matcher.try_consume_tokens([token]) == 1)


class FollowedGrammar:
    """A compiled constraint: a matcher behind the forced tokens, of which sequences get copies.

    forced: tokens that come first.
    """

    def __init__(self, tokenizer: "LLTokenizer", text: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, text, log_level=0)
        self.forced: list[int] = self._matcher.compute_ff_tokens()
        self._matcher.consume_tokens(self.forced)

    def first_mask(self, mask: np.ndarray) -> str:
        """Writes what may follow the forced tokens. Returns what is wrong with the constraint."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._matcher.get_error()

    def begin(self) -> "LLMatcher":
        """A copy for a sequence."""
        return self._matcher.deep_copy()


def count_tokens(masks: np.ndarray) -> np.ndarray:
    """How many tokens each mask allows: int64 [n]. masks: uint32 [n, words]."""
    return np.bitwise_count(_in_long_words(masks)).sum(axis=1, dtype=np.uint32).astype(np.int64)


def few_tokens(masks: np.ndarray, counts: np.ndarray, most: int) -> list[list[int] | None]:
    """The tokens of each mask that allows at most so many; None for the others.

    masks: uint32 [n, words]. counts: int64 [n]; tokens that they allow.
    """
    found: list[list[int] | None] = [None] * len(masks)
    rows = np.flatnonzero(counts <= most)
    if not len(rows):
        return found
    words = _in_long_words(masks)
    bits_of_row = 8 * words.itemsize * words.shape[1]
    some = words[rows].reshape(-1)
    places = np.flatnonzero(some != 0)  # of one axis: several times as fast as of two
    bits = np.flatnonzero(np.unpackbits(some[places].view(np.uint8), bitorder="little"))
    which, bit = np.divmod(bits, 8 * words.itemsize)
    tokens = ((places[which] * (8 * words.itemsize) + bit) % bits_of_row).tolist()
    start = 0
    for row, count in zip(rows.tolist(), counts[rows].tolist(), strict=True):
        found[row] = tokens[start : start + count]
        start += count
    return found


def _in_long_words(masks: np.ndarray) -> np.ndarray:
    """The same bits in words of 64, if they are so many: half as many to go through."""
    return masks.view(np.uint64) if masks.shape[1] % 2 == 0 else masks
