"""Grammars as sequences follow them, and the sequences' places in them: a part of the process in `grammar_process.py`.

**Guesses.** Most tokens of a text need no mask. A row without truncation may sample among all tokens: where it comes to
one that is allowed, the mask would have led it there, too. To say whether a token is allowed takes some microseconds;
a mask, which tries them all, up to milliseconds. So a guide that stands where a guess is likely to hold asks for no
mask. In doubt it tries tokens at random: if one of them is allowed, many are, and the row guesses; else a mask is made,
which is quick where few are allowed.

    at the beginning, after a guess that    guess; but if one of the last 32 guesses was refused, only where one of two
    was allowed, after a mask that allows   tokens tried at random is allowed: where few are, such a model is likely to
    more than half of all tokens            be refused
    after a mask that allows fewer          guess where one token tried at random is allowed
    after a guess that was refused          likewise, without what was refused; after three at this place not at all: a
                                            mask is made

**Lanes.** Copies of a matcher share its lexer, under one lock: masks of copies cannot be made at the same time. So a
grammar is compiled several times, and its sequences are spread over these lanes. A lane's lexer remembers what its
sequences have met, which makes later masks cheaper: more lanes than threads cost more than their balance brings (with
one lane a mask takes 0.4 ms once it has met much, with 32 lanes 1.1 to 1.4).
"""

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_random = Random(0)
_MOST_REFUSED = 2
"""After so many refused guesses at one place another one may be tried; if that is refused too, its mask is made."""
_TRUSTED = 32
"""So many guesses in a row that were allowed make others likely to be, too, however few tokens are."""
_QUICK_S = 0.1
"""Lanes of grammars that are compiled within this are made at once; those of others beside the work."""


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
    masks. lane: which of the grammar's it was copied from.
    """

    __slots__ = (
        "_is_sure",
        "_num_allowed",
        "_num_refused",
        "_vocabulary",
        "ends_late",
        "grammar",
        "guesses",
        "lane",
        "matcher",
    )

    def __init__(self, grammar: "FollowedGrammar", vocabulary: Vocabulary, ends_late: bool, guesses: bool) -> None:
        self.grammar, self.ends_late, self.guesses = grammar, ends_late, guesses
        self.lane, self.matcher = grammar.begin()
        self._vocabulary = vocabulary
        self._is_sure = True  # a guess at the next place is likely to hold
        self._num_refused = 0  # guesses at this place that did not
        self._num_allowed = _TRUSTED  # guesses since the last one that did not

    def take_guess(self, token: int) -> bool:
        """Moves past a token if it may follow; otherwise nothing has changed."""
        matcher = self.matcher
        if token in self._vocabulary.ends:
            is_allowed = self._may_end(token)
        else:
            is_allowed = matcher.try_consume_tokens([token]) == 1
        self._is_sure = is_allowed
        if is_allowed:
            self._num_allowed, self._num_refused = self._num_allowed + 1, 0
        else:
            self._num_allowed, self._num_refused = 0, self._num_refused + 1
        return is_allowed

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
        return not any(self._allows_one_at_random() for _ in range(2 if self._is_sure else 1))

    def finish_mask(self, mask: np.ndarray) -> None:
        """Its mask has been made: uint32 [words]. The end of sequence is taken out where it must come late."""
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
    """A compiled constraint: a matcher for each lane, behind the forced tokens, of which sequences get copies.

    forced: tokens that come first. num_live: how many sequences follow each lane.
    """

    def __init__(self, tokenizer: "LLTokenizer", text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        begun = time.perf_counter()
        first, self.forced = self._lane()
        self._compile_s = time.perf_counter() - begun
        self.num_live = [0]
        self._lanes = [first]
        self._is_growing = False

    def first_mask(self, mask: np.ndarray) -> str:
        """Writes what may follow the forced tokens. Returns what is wrong with the constraint."""
        self._lanes[0].unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._lanes[0].get_error()

    def grow(self, num_more: int, most: int, pool: ThreadPoolExecutor) -> None:
        """Makes lanes for so many more sequences, at best one for each, and at most `most`."""
        missing = min(most, sum(self.num_live) + num_more) - len(self._lanes)
        if missing <= 0 or self._is_growing:
            return
        if self._compile_s > _QUICK_S:
            self._is_growing = True
            pool.submit(self._grow_beside, missing)
        else:
            for lane, _ in pool.map(lambda _: self._lane(), range(missing)):
                self._add(lane)

    def begin(self) -> "tuple[int, LLMatcher]":
        """A copy of the lane that has the fewest sequences."""
        lane = min(range(len(self._lanes)), key=self.num_live.__getitem__)
        self.num_live[lane] += 1
        return lane, self._lanes[lane].deep_copy()

    def _grow_beside(self, missing: int) -> None:
        for _ in range(missing):
            self._add(self._lane()[0])
        self._is_growing = False

    def _add(self, lane: "LLMatcher") -> None:
        self.num_live.append(0)
        self._lanes.append(lane)

    def _lane(self) -> "tuple[LLMatcher, list[int]]":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._text, log_level=0)
        forced = matcher.compute_ff_tokens()
        matcher.consume_tokens(forced)
        return matcher, forced


def few_tokens(masks: np.ndarray, counts: np.ndarray, most: int) -> list[list[int] | None]:
    """The tokens of each mask that allows at most so many; None for the others.

    masks: uint32 [n, words]. counts: int64 [n]; tokens that they allow.
    """
    found: list[list[int] | None] = [None] * len(masks)
    rows = np.flatnonzero(counts <= most)
    if not len(rows):
        return found
    of_row, words = np.nonzero(masks[rows] != 0)
    bits = masks[rows[of_row], words][:, np.newaxis] >> np.arange(32, dtype=np.uint32) & 1
    which, bit = np.nonzero(bits)
    tokens = (words[which] * 32 + bit).tolist()
    start = 0
    for row, count in zip(rows.tolist(), counts[rows].tolist(), strict=True):
        found[row] = tokens[start : start + count]
        start += count
    return found
