"""The states of a table: all that llguidance's tokens lead to, checked against the automaton on the way.

    a state --a token--> a state where bytes are forced: the token's chain of forced tokens --> the state behind them
                         any other

At every state, reached by at least two of the tokens that lead there, llguidance's mask must equal the automaton's.
"""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jpaged.text.guides import FollowedGrammar, Vocabulary
from jpaged.text.regular.automata import Automaton, NotCovered
from jpaged.text.regular.spellings import Spellings
from jpaged.text.token_moves import Masks, Moves

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_STATES = 8_192
"""Those of forced tokens included; their numbers are int16. The schema of `jpaged/bench/structured.py` has 4,391: 14
for each character that a string may have (between its bytes, or within its escapes), and 33 for each white space."""
_MOST_ARRIVALS = 8_192
"""So many tokens in all, drawn at random, lead to states that are compared with llguidance, or two to each state if
those are more. To try all tokens from all states would take minutes; small tables have no more than this anyway."""
_MOST_FORCED_BYTES = 4_096
"""That are followed from one state. A longer run of them has no table."""


class Place(NamedTuple):
    """A state of the table. state: of the automaton. forced: tokens that must come first, which lead to that state."""

    state: int
    forced: tuple[int, ...] = ()


class Forced(NamedTuple):
    """The forced bytes of a state, and how they are spelled. States with equal bytes and equal masks between them share
    one.

    data: the bytes. chains: by function that has led to such a state, int32 [its tokens]; the chain behind each token.
    """

    data: bytes
    chains: dict[int, np.ndarray]


class Walk:
    """Goes from state to state of the automaton, with a matcher of llguidance that stands there.

    A **chain** is the tokens that are forced behind a token; chain 0 has none. A **node** is the number of a `Place`,
    which becomes a state of the table.

    Attributes:
        nodes: by place.
        mask_of: by node, the number of its mask.
        chains: by number.
        forced: by state of the automaton, what is forced there; None where nothing is, whatever comes before.
        places: by state and chain, where tokens with that chain lead.
    """

    def __init__(
        self,
        automaton: Automaton,
        moves: Moves,
        masks: Masks,
        tokenizer: "LLTokenizer",
        vocabulary: Vocabulary,
        spell: Spellings,
    ) -> None:
        self.nodes: dict[Place, int] = {}
        self.mask_of: list[int] = []
        self.chains: list[tuple[int, ...]] = [()]
        self.forced: dict[int, Forced | None] = {}
        self.places: dict[tuple[int, int], Place] = {}
        self._automaton, self._moves, self._masks = automaton, moves, masks
        self._tokenizer, self._ends, self._texts = tokenizer, frozenset(vocabulary.ends), spell.texts
        self._chain_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._alike: dict[tuple[bytes, ...], Forced] = {}
        self._arrivals: Counter[tuple[int, int]] = Counter()  # at states, behind chains
        self._most_arrivals = max(2, _MOST_ARRIVALS // moves.dead)
        self._is_wanted = np.ones((moves.dead + 1,), np.bool_)  # states that still are to be arrived at
        self._random = np.random.default_rng(0)
        self._todo: list[tuple[int, LLMatcher]] = []

    def all_from(self, grammar: FollowedGrammar) -> Place:
        """Goes everywhere from where a sequence begins, before the first forced tokens. Returns that place.

        Raises:
            NotCovered: there are too many states or masks, or llguidance does otherwise.
        """
        start = self._arrive(0, tuple(grammar.forced), grammar.begin())
        while self._todo:
            state, matcher = self._todo.pop()
            self._leave(state, matcher)
        return start

    def _leave(self, state: int, matcher: "LLMatcher") -> None:
        """Follows a token of each function from a state, where that leads to states still to be arrived at. matcher:
        stands there.
        """
        moves = self._moves
        behind = moves.behind[:, state]
        alive = np.flatnonzero(moves.is_alive[:, state] & (moves.longest > 0))
        for function in alive[self._is_wanted[behind[alive]]].tolist():
            other, tokens = int(behind[function]), moves.tokens_of[function]
            forced = self._forced_at(other)
            if forced is not None:
                if function not in forced.chains:
                    forced.chains[function] = self._spelled(forced.data, tokens, matcher)
                chains = forced.chains[function]
                for chain in np.unique(chains).tolist():
                    if self._arrivals[other, chain] < self._most_arrivals:
                        self._arrivals[other, chain] += 1
                        own = tokens[chains == chain]
                        self.places[other, chain] = self._check(other, own, self.chains[chain], matcher)
            elif self._is_wanted[other]:
                self._arrivals[other, 0] += 1
                self._is_wanted[other] = self._arrivals[other, 0] < self._most_arrivals
                self._check(other, tokens, (), matcher)

    def _check(self, other: int, tokens: np.ndarray, forced: tuple[int, ...], matcher: "LLMatcher") -> Place:
        """Goes to the state `other` by one of these tokens, and by the forced ones behind it. Raises NotCovered if
        llguidance forces others.
        """
        there = matcher.deep_copy()
        there.consume_token(int(self._random.choice(tokens)))
        found = there.compute_ff_tokens()
        if tuple(found) != forced:
            raise NotCovered("tokens are forced that were not expected")
        there.consume_tokens(found)
        return self._arrive(other, forced, there)

    def _arrive(self, state: int, forced: tuple[int, ...], matcher: "LLMatcher") -> Place:
        """Notes a place and those behind its forced tokens. matcher: stands behind them."""
        end = state
        for token in forced:
            end = int(self._moves.behind[self._moves.function_of[token], end])
            if end == self._moves.dead or token in self._ends:
                raise NotCovered("a token is forced that may not follow, or ends")
        number = self._masks.at(end)
        expected = self._masks.arrays[number]
        mask = np.zeros_like(expected)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error() or (mask != expected).any():
            raise NotCovered("llguidance allows other tokens")
        if self._note(Place(end), number):
            self._todo.append((end, matcher))
        for i, token in enumerate(forced):
            self._note(Place(end, forced[i:]), self._masks.of_token(token))
        return Place(end, forced)

    def _note(self, place: Place, mask: int) -> bool:
        """Whether a place is a new one, which gets a number."""
        if place in self.nodes:
            return False
        if len(self.nodes) == MOST_STATES:
            raise NotCovered(f"it has more than {MOST_STATES} states")
        self.nodes[place] = len(self.nodes)
        self.mask_of.append(mask)
        return True

    def _forced_at(self, state: int) -> Forced | None:
        if state not in self.forced:
            self.forced[state] = self._find_forced(state)
        return self.forced[state]

    def _find_forced(self, state: int) -> Forced | None:
        of_tokens, moves = self._masks.of_tokens, self._moves
        data, end, passed = bytearray(), state, [of_tokens[state]]
        while not self._automaton.accepts[end] and len(data) < _MOST_FORCED_BYTES:
            (bytes_allowed,) = np.nonzero(self._automaton.next[end] >= 0)
            if len(bytes_allowed) != 1:
                break
            data.append(bytes_allowed[0])
            end = int(self._automaton.next[end, bytes_allowed[0]])
            passed.append(of_tokens[end])
        longest = moves.longest[moves.is_alive[:, state]].max(initial=0)
        # Few bytes force no token if a longer token may spell them together with what follows. Where llguidance does
        # otherwise, `_check` refuses the table.
        if not data or (len(data) <= 4 and longest > len(data)):
            return None
        return self._alike.setdefault((bytes(data), *passed), Forced(bytes(data), {}))

    def _spelled(self, data: bytes, tokens: np.ndarray, matcher: "LLMatcher") -> np.ndarray:
        """The chains, int32 [tokens], that follow each of these tokens, behind which these bytes are forced."""
        known: dict[tuple[int, ...], int] = {}
        chains = np.empty((len(tokens),), np.int32)
        for i, token in enumerate(tokens.tolist()):
            both = self._tokenizer.tokenize_bytes(self._texts[token] + data)
            rest = tuple(both[1:]) if both[:1] == [token] else ()
            if rest not in known:
                there = matcher.deep_copy()
                there.consume_token(token)
                forced = tuple(there.compute_ff_tokens())
                known[rest] = self._chain_numbers.setdefault(forced, len(self.chains))
                if known[rest] == len(self.chains):
                    self.chains.append(forced)
            chains[i] = known[rest]
        return chains
