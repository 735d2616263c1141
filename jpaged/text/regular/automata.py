"""Deterministic finite automata over bytes. A text's state is all of it that matters for what may follow it.

Whatever would get too large raises `NotCovered`: bounds count states, so that an expression of few bytes cannot take
much time or memory.
"""

from typing import NamedTuple

import numpy as np

MOST_STATES = 8_192
"""Of an automaton. Nearly all of them are states of a table of tokens, too."""


class NotCovered(Exception):
    """No automaton is made of this: it is not regular, too large, or of a kind that is not translated."""


class NothingMatches(NotCovered):
    """No text is accepted."""


class Automaton(NamedTuple):
    """It begins in state 0.

    next: int32 [states, 256]; the state behind a byte, -1 where it may not follow.
    accepts: bool [states]; whether a text may end there.
    """

    next: np.ndarray
    accepts: np.ndarray

    def intersection(self, other: "Automaton") -> "Automaton":
        """The texts that both accept, minimal. A state is a pair of theirs (product construction).

        Raises:
            NotCovered: it has too many states.
            NothingMatches: no text is accepted by both.
        """
        pairs = {(0, 0): 0}
        rows: list[np.ndarray] = []
        order = [(0, 0)]
        for a, b in order:
            both = (self.next[a] >= 0) & (other.next[b] >= 0)
            row = np.full((256,), -1, np.int32)
            for byte in np.flatnonzero(both).tolist():
                pair = int(self.next[a, byte]), int(other.next[b, byte])
                if pair not in pairs:
                    pairs[pair] = len(pairs)
                    order.append(pair)
                    check_count(len(pairs), MOST_STATES, "states")
                row[byte] = pairs[pair]
            rows.append(row)
        accepts = np.array([self.accepts[a] and other.accepts[b] for a, b in order])
        return minimal(np.array(rows), accepts)


def minimal(following: np.ndarray, accepts: np.ndarray) -> Automaton:
    """The minimal automaton: without states from which no text is completed, and with equivalent states merged.

    following, accepts: as `Automaton.next` and `Automaton.accepts`, of any automaton that begins in state 0.

    Moore's partition refinement: after each round, states are together if both accept or neither does, and each byte
    leads them to states that were together before. A round compares hashes of 64 bits, not rows, so that numpy does it
    for all states at once; at the end the rows are compared.

    Raises:
        NothingMatches: no text is accepted.
        NotCovered: two hashes are equal by chance.
    """
    count = len(accepts)
    columns, of_byte = distinct_columns(following)  # bytes that lead everywhere to the same states, once
    columns = np.vstack([np.where(columns < 0, count, columns), np.full((1, columns.shape[1]), count)])  # -1: a state
    alive = np.append(accepts, False)
    while (grown := alive | alive[columns].any(axis=1)).sum() > alive.sum():
        alive = grown
    if not alive[0]:
        raise NothingMatches("no text is accepted")
    columns[~alive[columns]] = count
    random = np.random.default_rng(0)
    weights = random.integers(1 << 63, size=columns.shape[1], dtype=np.uint64) | np.uint64(1)
    marks = np.where(np.append(accepts, False), random.integers(1 << 63, dtype=np.uint64), np.uint64(0))
    marks[~alive] = np.uint64(1)
    hashes, num_groups = marks, 0
    while True:
        values, first, groups = np.unique(hashes, return_index=True, return_inverse=True)
        if len(values) == num_groups:
            break
        num_groups = len(values)
        mixed = hashes ^ (hashes >> np.uint64(29))
        hashes = marks + (mixed[columns] * weights).sum(axis=1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashes[~alive] = np.uint64(1)
    ends = np.append(accepts, False)
    if (groups[columns] != groups[columns[first]][groups]).any() or (ends != ends[first][groups]).any():
        raise NotCovered("two hashes of states were equal by chance")
    kept = first[alive[first]]  # a state of each group
    kept = np.concatenate([[first[groups[0]]], kept[kept != first[groups[0]]]])  # that of state 0 first
    numbers = np.full((num_groups,), -1, np.int32)
    numbers[groups[kept]] = np.arange(len(kept))
    return Automaton(numbers[groups[columns[kept]]][:, of_byte], accepts[kept])


def distinct_columns(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns of a matrix, each once, in the order in which they come first; and, int64 [columns], which of them
    each column is.
    """
    numbers: dict[bytes, int] = {}
    rows = np.ascontiguousarray(matrix.T)
    of_column = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], np.int64)
    return np.ascontiguousarray(rows[np.unique(of_column, return_index=True)[1]].T), of_column


def check_count(count: int, most: int, what: str) -> None:
    """Raises NotCovered if there are more than may be."""
    if count > most:
        raise NotCovered(f"more than {most} {what}")
