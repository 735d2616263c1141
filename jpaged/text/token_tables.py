"""Regular constraints as finite automata over tokens: which tokens may follow in each state, and where they lead.

    automaton over bytes (`regular/`)         states between bytes
    moved by all tokens (`token_moves.py`)    states between tokens, and their masks; tokens that act alike
    walked with llguidance (`token_walk.py`)  the tokens that it forces; its masks, which are compared
    in columns (`token_columns.py`)           the next state for each class of tokens

llguidance has the last word: where its masks or forced tokens differ from the automaton's, there is no table. So a
sequence samples the same tokens whether it goes by the table or by `guides.py`.

**Forced tokens** lead through states of their own, each with a mask of one token. llguidance spells forced bytes
together with the token before them (`"` and `name"` may be other tokens than `{"` and `name"`), so which tokens are
forced in a state depends on the token that led there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jpaged.text.guides import FollowedGrammar, Vocabulary
from jpaged.text.regular.automata import Automaton
from jpaged.text.regular.spellings import Spellings
from jpaged.text.token_columns import columns
from jpaged.text.token_moves import Masks, Moves
from jpaged.text.token_walk import Walk

if TYPE_CHECKING:
    from llguidance import LLTokenizer


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
    moves = Moves(automaton, vocabulary, spell)
    masks = Masks(automaton, moves, vocabulary)
    walk = Walk(automaton, moves, masks, tokenizer, vocabulary, spell)
    start = walk.all_from(grammar)
    classes, following = columns(moves, walk)
    return TokenTable(np.stack(masks.arrays), np.array(walk.mask_of, np.int32), classes, following, walk.nodes[start])
