"""What a vocabulary's tokens do to the states of a constraint's automaton, and the masks that follow from that."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from jpaged.text.guides import Vocabulary
from jpaged.text.regular.automata import Automaton, NotCovered
from jpaged.text.regular.spellings import Spellings

MOST_MASKS = 1_024
"""20 MB, with a vocabulary of 152,000 tokens. The schema of `jpaged/bench/structured.py` has 941."""


class Moves:
    """What tokens do, by **function**: all tokens of a function lead to the same state from every state.

    Attributes:
        behind: int16 [functions, states]; the state behind a function's tokens; `dead` where they may not follow.
            Function 0 leads nowhere.
        dead: the number of states.
        is_alive: bool [functions, states]; whether they may follow.
        function_of: int32 [vocab_size]; each token's function.
        going_on: int32 [vocab_size]; the same of tokens that end no sequence, 0 of those that do.
        tokens_of: by function, its tokens that end no sequence, int64 [n], in order.
        rank: int64 [vocab_size]; each token's place among these.
        longest: int32 [functions]; bytes of the longest of these.

    Raises:
        NotCovered: tokens act in too many ways.
    """

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary, spell: Spellings) -> None:
        self.behind, self.function_of = spell.moves(automaton)
        self.dead = len(automaton.accepts)
        self.is_alive = self.behind != self.dead
        self.going_on = self.function_of.copy()
        self.going_on[list(vocabulary.ends)] = 0  # an end may be text as well, but ends all the same
        order = np.argsort(self.going_on, kind="stable")
        bounds = np.searchsorted(self.going_on[order], np.arange(len(self.behind) + 1)).tolist()
        self.tokens_of = [order[a:b] for a, b in pairwise(bounds)]
        self.rank = np.empty_like(order)
        self.rank[order] = np.concatenate([np.arange(len(some)) for some in self.tokens_of])
        self.longest = np.array([spell.lengths[some].max(initial=0) for some in self.tokens_of])


class Masks:
    """The masks of a table, each with a number, in the order in which they are first asked for.

    Attributes:
        arrays: uint32 [words] each, all different.
        of_tokens: by state, a key: states with equal keys allow the same tokens, but for the ends.
    """

    def __init__(self, automaton: Automaton, moves: Moves, vocabulary: Vocabulary) -> None:
        self.arrays: list[np.ndarray] = []
        self.of_tokens = [row.tobytes() for row in np.packbits(moves.is_alive.T, axis=1)]
        self._accepts, self._moves = automaton.accepts, moves
        self._ends = np.bitwise_not(vocabulary.not_ends)
        self._by_key: dict[tuple[bytes, bool], int] = {}  # by what may follow, and whether the text may end
        self._by_content: dict[bytes, int] = {}

    def at(self, state: int) -> int:
        """The mask of all tokens that may follow in a state of the automaton. Raises NotCovered if there are too many
        masks.
        """
        key = self.of_tokens[state], bool(self._accepts[state])
        if key not in self._by_key:
            tokens = np.flatnonzero(self._moves.is_alive[:, state][self._moves.function_of])
            self._by_key[key] = self._number(self._bits(tokens) | self._ends if key[1] else self._bits(tokens))
        return self._by_key[key]

    def of_token(self, token: int) -> int:
        """The mask of one token alone. Raises NotCovered if there are too many masks."""
        return self._number(self._bits([token]))

    def _bits(self, tokens: np.ndarray | Sequence[int]) -> np.ndarray:
        bits = np.zeros((32 * len(self._ends),), np.bool_)
        bits[tokens] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _number(self, mask: np.ndarray) -> int:
        number = self._by_content.setdefault(mask.tobytes(), len(self.arrays))
        if number == len(self.arrays):
            if number == MOST_MASKS:
                raise NotCovered(f"it has more than {MOST_MASKS} masks")
            self.arrays.append(mask)
        return number
