"""Regular constraints as finite automata over tokens: which tokens may follow in each state, and where they lead.

    automaton over bytes (`regular/`)         states between bytes
    moved by all tokens (`spellings.py`)      states between tokens; tokens that act alike are one class
    checked with llguidance at each state     its mask, and the tokens that it forces

llguidance has the last word: at every state, reached by at least two of the tokens that lead there, its mask must equal
the automaton's; otherwise there is no table. So a sequence samples the same tokens whether it goes by the table or by
`guides.py`.

**Forced tokens** lead through states of their own, each with a mask of one token. llguidance spells forced bytes
together with the token before them (`"` and `name"` may be other tokens than `{"` and `name"`), so which tokens are
forced in a state depends on the token that led there.

    state --a token--> a state where bytes are forced: the token's chain of forced tokens --> the state behind them
                       any other: the automaton's state
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jpaged.text.guides import FollowedGrammar, Vocabulary
from jpaged.text.regular.automata import Automaton, NotCovered
from jpaged.text.regular.spellings import Spellings

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_STATES = 8_192
"""Those of forced tokens included. The schema of `jpaged/bench/structured.py` has 4,391: 14 for each character that a
string may have (between its bytes, or within its escapes), and 33 for each white space."""
MOST_CLASSES = 32_768
"""Their numbers are int16 on the device."""
MOST_MASKS = 1_024
"""20 MB, with a vocabulary of 152,000 tokens. That schema has 941."""
MOST_ENTRIES = 4_194_304
"""Of `next`: 8 MB. That schema has 3.4 million."""
_MOST_ARRIVALS = 8_192
"""So many tokens in all, drawn at random, lead to states that are compared with llguidance, or two to each state if
those are more. To try all tokens from all states would take minutes; small tables have no more than this anyway."""
_MOST_FORCED_BYTES = 4_096
"""That are followed from one state. A longer run of them has no table."""


class TokenTable(NamedTuple):
    """A constraint as a finite automaton over tokens.

    masks: uint32 [masks, words], all different; bit v % 32 of word v // 32 is set for token v.
    mask_of: int32 [states]; the mask under which a sequence samples in a state. End-of-sequence tokens are allowed by
        it alone: they lead nowhere.
    classes: int32 [vocab_size]; tokens that lead to the same states from everywhere are one class. Class 0: nowhere.
    next: int16 [states, classes]; the state behind a token of a class; -1 where it may not follow.
    start: where a sequence begins, before the first forced tokens.
    """

    masks: np.ndarray
    mask_of: np.ndarray
    classes: np.ndarray
    next: np.ndarray
    start: int

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        return self.masks.nbytes + self.mask_of.nbytes + self.classes.nbytes + self.next.nbytes

    def follow(self, state: int, token_ids: Sequence[int]) -> int:
        """The state behind these tokens; -1 if one of them may not follow."""
        for token in token_ids:
            if state < 0:
                break
            state = int(self.next[state, self.classes[token]])
        return state


def token_table(
    automaton: Automaton, grammar: FollowedGrammar, tokenizer: "LLTokenizer", vocabulary: Vocabulary, spell: Spellings
) -> TokenTable:
    """The table of a constraint.

    automaton: of the constraint's texts. grammar: the constraint as sequences follow it. spell: the vocabulary's
    tokens.

    Raises:
        NotCovered: it would be too large, or differs from what llguidance does.
    """
    return _Builder(automaton, grammar, tokenizer, vocabulary, spell).build()


def _bits(tokens: "np.ndarray | Sequence[int]", num_words: int) -> np.ndarray:
    """A mask of these tokens."""
    bits = np.zeros((32 * num_words,), np.bool_)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


class _Place(NamedTuple):
    """A state of the table. state: of the automaton. forced: tokens that must come first, which lead to that state."""

    state: int
    forced: tuple[int, ...] = ()


class _Forced(NamedTuple):
    """The forced bytes of a state, and how they are spelled. States with equal bytes and equal masks between them share
    one.

    data: the bytes. chains: by function that has led to such a state, int32 [its tokens]; the chain behind each token.
    """

    data: bytes
    chains: dict[int, np.ndarray]


class _Builder:
    """Goes from state to state of the automaton, with a matcher of llguidance that stands there.

    A **function** is what some tokens do to all states (`Spellings.moves`). A **chain** is the tokens that are forced
    behind a token. A **node** is the number of a `_Place`, which becomes a state of the table.
    """

    def __init__(
        self,
        automaton: Automaton,
        grammar: FollowedGrammar,
        tokenizer: "LLTokenizer",
        vocabulary: Vocabulary,
        spell: Spellings,
    ) -> None:
        self._automaton, self._grammar, self._vocabulary = automaton, grammar, vocabulary
        self._texts = spell.texts
        self._tokenizer = tokenizer
        self._behind, self._function_of = spell.moves(automaton)
        self._dead = len(automaton.accepts)  # stands in `_behind` where tokens may not follow
        self._is_alive = self._behind != self._dead  # bool [functions, states]
        self._moving = self._function_of.copy()  # int32 [vocab_size]; each token's function where it is no end
        self._moving[list(vocabulary.ends)] = 0  # an end may be text as well, but ends all the same
        order = np.argsort(self._moving, kind="stable")
        bounds = np.searchsorted(self._moving[order], np.arange(len(self._behind) + 1)).tolist()
        self._tokens_of = [order[a:b] for a, b in pairwise(bounds)]  # by function
        self._rank = np.empty_like(order)  # of each token in its function
        self._rank[order] = np.concatenate([np.arange(len(some)) for some in self._tokens_of])
        self._longest = np.array([spell.lengths[some].max(initial=0) for some in self._tokens_of])  # bytes, by function
        self._alive = [row.tobytes() for row in np.packbits(self._is_alive.T, axis=1)]  # by state, a key for its mask
        self._ends = np.bitwise_not(vocabulary.not_ends)
        self._expected: dict[tuple[bytes, bool], int] = {}  # masks, by what may follow and whether the text may end
        self._mask_numbers: dict[bytes, int] = {}
        self._masks: list[np.ndarray] = []
        self._nodes: dict[_Place, int] = {}
        self._mask_of: list[int] = []  # by node
        self._arrivals: Counter[tuple[int, int]] = Counter()  # at states, behind chains
        self._most_arrivals = max(2, _MOST_ARRIVALS // self._dead)
        self._is_wanted = np.ones((self._dead + 1,), np.bool_)  # states that still are to be arrived at
        self._random = np.random.default_rng(0)
        self._todo: list[tuple[int, LLMatcher]] = []
        self._chains: list[tuple[int, ...]] = [()]
        self._chain_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._alike: dict[tuple[bytes, ...], _Forced] = {}
        self._forced: dict[int, _Forced | None] = {}  # by state
        self._places: dict[tuple[int, int], _Place] = {}  # by state and chain

    def build(self) -> TokenTable:
        matcher = self._grammar.begin()
        start = self._arrive(0, tuple(self._grammar.forced), matcher)
        while self._todo:
            state, matcher = self._todo.pop()
            self._leave(state, matcher)
        classes, following = self._columns()
        return TokenTable(
            np.stack(self._masks), np.array(self._mask_of, np.int32), classes, following, self._nodes[start]
        )

    def _leave(self, state: int, matcher: "LLMatcher") -> None:
        """Follows a token of each function from a state, where that leads to states still to be arrived at. matcher:
        stands there.
        """
        behind = self._behind[:, state]
        alive = np.flatnonzero(self._is_alive[:, state] & (self._longest > 0))
        for function in alive[self._is_wanted[behind[alive]]].tolist():
            other, tokens = int(behind[function]), self._tokens_of[function]
            forced = self._forced_at(other)
            if forced is not None:
                if function not in forced.chains:
                    forced.chains[function] = self._spelled(forced.data, tokens, matcher)
                chains = forced.chains[function]
                for chain in np.unique(chains).tolist():
                    if self._arrivals[other, chain] < self._most_arrivals:
                        self._arrivals[other, chain] += 1
                        own = tokens[chains == chain]
                        self._places[other, chain] = self._check(other, own, self._chains[chain], matcher)
            elif self._is_wanted[other]:
                self._arrivals[other, 0] += 1
                self._is_wanted[other] = self._arrivals[other, 0] < self._most_arrivals
                self._check(other, tokens, (), matcher)

    def _check(self, other: int, tokens: np.ndarray, forced: tuple[int, ...], matcher: "LLMatcher") -> _Place:
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

    def _arrive(self, state: int, forced: tuple[int, ...], matcher: "LLMatcher") -> _Place:
        """Notes a place and those behind its forced tokens. matcher: stands behind them."""
        end = state
        for token in forced:
            end = int(self._behind[self._function_of[token], end])
            if end == self._dead or token in self._vocabulary.ends:
                raise NotCovered("a token is forced that may not follow, or ends")
        mask = np.zeros_like(self._ends)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        number = self._mask_at(end)
        if matcher.is_error() or (mask != self._masks[number]).any():
            raise NotCovered("llguidance allows other tokens")
        if self._note(_Place(end), number):
            self._todo.append((end, matcher))
        for i, token in enumerate(forced):
            self._note(_Place(end, forced[i:]), self._mask_number(_bits([token], len(mask))))
        return _Place(end, forced)

    def _note(self, place: _Place, mask: int) -> bool:
        """Whether a place is a new one, which gets a number."""
        if place in self._nodes:
            return False
        if len(self._nodes) == MOST_STATES:
            raise NotCovered(f"it has more than {MOST_STATES} states")
        self._nodes[place] = len(self._nodes)
        self._mask_of.append(mask)
        return True

    def _mask_at(self, state: int) -> int:
        """The number of the automaton's mask in a state."""
        key = self._alive[state], bool(self._automaton.accepts[state])
        if key not in self._expected:
            alive = self._is_alive[:, state][self._function_of]
            mask = _bits(np.flatnonzero(alive), len(self._ends))
            self._expected[key] = self._mask_number(mask | self._ends if key[1] else mask)
        return self._expected[key]

    def _mask_number(self, mask: np.ndarray) -> int:
        number = self._mask_numbers.setdefault(mask.tobytes(), len(self._masks))
        if number == len(self._masks):
            if number == MOST_MASKS:
                raise NotCovered(f"it has more than {MOST_MASKS} masks")
            self._masks.append(mask)
        return number

    def _forced_at(self, state: int) -> _Forced | None:
        """What is forced in a state; None if no tokens are, whatever comes before."""
        if state not in self._forced:
            self._forced[state] = self._find_forced(state)
        return self._forced[state]

    def _find_forced(self, state: int) -> _Forced | None:
        data, end, passed = bytearray(), state, [self._alive[state]]
        while not self._automaton.accepts[end] and len(data) < _MOST_FORCED_BYTES:
            (bytes_allowed,) = np.nonzero(self._automaton.next[end] >= 0)
            if len(bytes_allowed) != 1:
                break
            data.append(bytes_allowed[0])
            end = int(self._automaton.next[end, bytes_allowed[0]])
            passed.append(self._alive[end])
        longest = self._longest[self._is_alive[:, state]].max(initial=0)
        # Few bytes force no token if a longer token may spell them together with what follows. Where llguidance does
        # otherwise, `_check` refuses the table.
        if not data or (len(data) <= 4 and longest > len(data)):
            return None
        key = bytes(data), *passed
        if key not in self._alike:
            self._alike[key] = _Forced(bytes(data), {})
        return self._alike[key]

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
                known[rest] = self._chain_numbers.setdefault(forced, len(self._chains))
                if known[rest] == len(self._chains):
                    self._chains.append(forced)
            chains[i] = known[rest]
        return chains

    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Each token's class, int32 [vocab_size], and where classes lead, int16 [nodes, classes]."""
        # Tokens of a group lead to the same nodes; so do some groups, which are then one class.
        _, tokens, group_of = np.unique(self._groups(), return_index=True, return_inverse=True)
        following = self._following(tokens)
        nowhere = np.full((1, len(self._nodes)), -1, np.int32)
        numbers = {nowhere.tobytes(): 0}
        classes = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in following], np.int32)
        if len(numbers) > MOST_CLASSES:
            raise NotCovered(f"it has more than {MOST_CLASSES} classes of tokens")
        if len(numbers) * len(self._nodes) > MOST_ENTRIES:
            raise NotCovered(f"it has more than {MOST_ENTRIES} entries")
        _, first = np.unique(classes, return_index=True)
        rows = following[first] if 0 in classes else np.concatenate([nowhere, following[first]])
        return classes[group_of], np.ascontiguousarray(rows.T, np.int16)

    def _groups(self) -> np.ndarray:
        """A group for each token, int64 [vocab_size]: tokens of a function, apart where other tokens are forced behind
        them, or where they are forced themselves.
        """
        groups = self._moving.astype(np.int64)
        for forced in self._alike.values():
            for function, chains in forced.chains.items():
                if (chains != chains[0]).any():
                    some = self._tokens_of[function]
                    keys = groups[some] * len(self._chains) + chains
                    groups[some] = groups.max() + 1 + np.unique(keys, return_inverse=True)[1]
        singles = np.array(sorted({token for place in self._nodes for token in place.forced}), np.int64)
        groups[singles] = groups.max() + 1 + np.arange(len(singles))
        return groups

    def _following(self, tokens: np.ndarray) -> np.ndarray:
        """Where these tokens, one of each group, lead: int32 [tokens, nodes]; -1 where one may not follow."""
        following = np.full((len(tokens), len(self._nodes)), -1, np.int32)
        plain = [place for place in self._nodes if not place.forced]
        states = np.array([place.state for place in plain])
        nodes = np.array([self._nodes[place] for place in plain])
        node_of = np.full((self._dead + 1,), -1, np.int32)  # by state; none where bytes are forced
        node_of[states] = nodes
        behind = self._behind[self._moving[tokens]][:, states]
        following[:, nodes] = node_of[behind]
        forced_at = {state: forced for state, forced in self._forced.items() if forced is not None}
        for i, k in np.argwhere(np.isin(behind, list(forced_at))).tolist():
            state = int(behind[i, k])
            chain = int(forced_at[state].chains[self._moving[tokens[i]]][self._rank[tokens[i]]])
            following[i, nodes[k]] = self._nodes[self._places[state, chain]]
        row_of = {int(token): i for i, token in enumerate(tokens.tolist())}
        for place, node in self._nodes.items():
            if place.forced:
                following[row_of[place.forced[0]], node] = self._nodes[_Place(place.state, place.forced[1:])]
        return following
