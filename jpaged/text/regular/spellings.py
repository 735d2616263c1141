"""What a vocabulary's tokens do to an automaton of bytes."""

from typing import TYPE_CHECKING

import numpy as np

from jpaged.text.regular.automata import Automaton, NotCovered, distinct_columns

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MOST_BYTES = 1 << 28
"""Of the functions of tokens and of their beginnings."""


class Spellings:
    """A vocabulary's tokens by their bytes.

    Attributes:
        lengths: int32 [vocab_size]; bytes of each token; 0: it never follows.
        texts: the bytes of each token; none of special tokens, which never follow.
    """

    def __init__(self, tokenizer: "LLTokenizer", vocab_size: int) -> None:
        self.texts = [
            b"" if tokenizer.is_special_token(i) else bytes(tokenizer.decode_bytes([i])) for i in range(vocab_size)
        ]
        self.lengths = np.array([len(text) for text in self.texts], np.int32)
        starts = np.cumsum(self.lengths) - self.lengths
        data = np.frombuffer(b"".join(self.texts), np.uint8)
        self._columns = []  # for each place in a token: the tokens that have it, int32 [n], and their bytes, uint8 [n]
        for place in range(int(self.lengths.max(initial=0))):
            tokens = np.flatnonzero(self.lengths > place).astype(np.int32)
            self._columns.append((tokens, data[starts[tokens] + place]))

    def moves(self, automaton: Automaton) -> tuple[np.ndarray, np.ndarray]:
        """What tokens do to all states at once: functions from states to states. Tokens are spelled byte by byte. Many
        have one function, as have many of their beginnings, and each is computed once.

        Returns:
            int16 [functions, states]: the state behind tokens of a function; the number of states where they may not
                follow. The first leads nowhere.
            int32 [vocab_size]: each token's function.

        Raises:
            NotCovered: there are too many functions.
        """
        count = len(automaton.accepts)
        steps, of_byte = distinct_columns(automaton.next)
        steps = np.ascontiguousarray(
            np.vstack([np.where(steps < 0, count, steps), np.full((1, steps.shape[1]), count)]).T
        )
        steps = steps.astype(np.int16)
        functions = [np.full((count,), count, np.int16), np.arange(count, dtype=np.int16)]
        numbers = {functions[0].tobytes(): 0}
        of_token: np.ndarray = np.where(self.lengths > 0, 1, 0).astype(np.int32)
        known: dict[int, int] = {}
        for tokens, data in self._columns:
            alive = of_token[tokens] > 0
            tokens, data = tokens[alive], data[alive]
            keys = of_token[tokens].astype(np.int64) * len(steps) + of_byte[data]
            values, inverse = np.unique(keys, return_inverse=True)
            found = np.zeros((len(values),), np.int32)
            for i, key in enumerate(values.tolist()):
                if key not in known:
                    before, step = divmod(key, len(steps))
                    moved = steps[step][functions[before]]
                    number = numbers.setdefault(moved.tobytes(), len(functions))
                    if number == len(functions):
                        functions.append(moved)
                        if len(functions) * moved.nbytes > _MOST_BYTES:
                            raise NotCovered("its tokens act in too many ways")
                    known[key] = number
                found[i] = known[key]
            of_token[tokens] = found[inverse]
        kept, of_token = np.unique(np.append(of_token, 0), return_inverse=True)
        return np.stack([functions[i] for i in kept.tolist()]), of_token[:-1].astype(np.int32)
