"""Regular expressions as objects, and their automata.

Text(b"ab") + CharSet(...) | Repeat(...)
  |  Thompson's construction: a nondeterministic automaton, as a graph of nodes with edges for bytes
  |  subset construction: sets of its nodes are states
Automaton, minimal
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jpaged.text.regular.automata import MOST_STATES, Automaton, check_count, minimal

MOST_NODES = 65_536
"""Of an expression's graph: some hundred bytes each."""
_MOST_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


class Expression:
    """What a text, or a part of one, may be."""

    def __add__(self, other: "Expression") -> "Expression":
        return Concat((self, other))

    def __or__(self, other: "Expression") -> "Expression":
        return Union((self, other))


@dataclass(frozen=True)
class Text(Expression):
    """These bytes."""

    data: bytes


@dataclass(frozen=True)
class CharSet(Expression):
    """A character, in UTF-8, of these ranges of code points: (first, last)."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, characters: str) -> "CharSet":
        """One of these characters."""
        return cls(tuple((ord(one), ord(one)) for one in characters))

    @property
    def inverted(self) -> "CharSet":
        """All other characters."""
        begin, ranges = 0, []
        for low, high in sorted(self.ranges):
            if low > begin:
                ranges.append((begin, low - 1))
            begin = max(begin, high + 1)
        return CharSet((*ranges, (begin, _MOST_CODE_POINT)) if begin <= _MOST_CODE_POINT else tuple(ranges))


@dataclass(frozen=True)
class Concat(Expression):
    """Parts, one after the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Union(Expression):
    """One of these; none of them: nothing matches."""

    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat(Expression):
    """A part so many times. most: None for any number."""

    part: Expression
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, eq=False)
class Within(Expression):
    """What an automaton accepts, with some of its bytes written in another way, such as JSON's escapes.

    spellings: by byte, how it is written; others are written as they are. Empty: just the automaton as an expression.
    """

    automaton: Automaton
    spellings: Mapping[int, Expression]


NOTHING, EMPTY = Union(()), Text(b"")
ANY_CHARACTER = CharSet(((0, _MOST_CODE_POINT),))


def union(options: Sequence[Expression]) -> Expression:
    """One of these, of which some may be NOTHING."""
    options = [option for option in options if option != NOTHING]
    return options[0] if len(options) == 1 else Union(tuple(options))


def compiled(expression: Expression) -> Automaton:
    """The minimal automaton of an expression. Raises NotCovered if it is too large, or if nothing matches."""
    graph = _Graph()
    end = graph.node()
    return _determined(graph, graph.add(expression, end), end)


class _Graph:
    """A nondeterministic automaton, by number of node. edges: of each node, a low and a high byte and the node behind
    them. free: of each node, those that it is as well (edges without a byte). It is built from the end: a part is told
    which node follows, and returns where it begins.
    """

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []
        self.free: list[list[int]] = []
        self._begins: dict[tuple[int, int], int] = {}
        self._of_spellings: dict[tuple[int, tuple[int, ...]], Within] = {}

    def node(self) -> int:
        check_count(len(self.edges), MOST_NODES, "nodes")
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def add(self, expression: Expression, end: int) -> int:
        """An expression before a node. One that is there twice, as what follows a part that may be missing, is added
        once.
        """
        key = id(expression), end  # equal ones may be deep, and slow to compare
        if key not in self._begins:
            self._begins[key] = self._add(expression, end)
        return self._begins[key]

    def _add(self, expression: Expression, end: int) -> int:
        if isinstance(expression, Text):
            for byte in reversed(expression.data):
                end = self._step((byte, byte), end)
            return end
        if isinstance(expression, Concat):
            for part in reversed(expression.parts):
                end = self.add(part, end)
            return end
        begin = self.node()
        if isinstance(expression, Union):
            self.free[begin] += [self.add(option, end) for option in expression.options]
        elif isinstance(expression, CharSet):
            for low, high in expression.ranges:
                for ranges in _utf8_ranges(low, high):
                    behind = end
                    for one in reversed(ranges[1:]):
                        behind = self._step(one, behind)
                    self.edges[begin].append((*ranges[0], behind))
        elif isinstance(expression, Repeat):
            self.free[begin].append(self._repeated(expression, end))
        elif isinstance(expression, Within):
            self.free[begin].append(self._within(expression, end))
        return begin

    def _step(self, bytes_between: tuple[int, int], end: int) -> int:
        begin = self.node()
        self.edges[begin].append((*bytes_between, end))
        return begin

    def _repeated(self, repeat: Repeat, end: int) -> int:
        begin = end
        if repeat.most is None:
            begin = self.node()
            self.free[begin] += [self.add(repeat.part, begin), end]
        else:
            for _ in range(repeat.most - repeat.least):
                more = self.node()
                self.free[more] += [self.add(repeat.part, begin), end]
                begin = more
        for _ in range(repeat.least):
            begin = self.add(repeat.part, begin)
        return begin

    def _within(self, within: Within, end: int) -> int:
        automaton, respelled = within.automaton, sorted(within.spellings)
        nodes = [self.node() for _ in automaton.accepts]
        for node, row, accepts in zip(nodes, automaton.next, automaton.accepts.tolist(), strict=True):
            if accepts:
                self.free[node].append(end)
            others: dict[int, list[int]] = {}
            for byte, state in zip(respelled, row[respelled].tolist(), strict=True):
                others.setdefault(state, []).append(byte)
            plain = row.copy()
            plain[respelled] = -1
            self.edges[node] += [(low, high, nodes[state]) for low, high, state in _runs(plain)]
            for state, some in others.items():
                if state >= 0:
                    self.free[node].append(self._within(self._spelled(within, tuple(some)), nodes[state]))
        return nodes[0]

    def _spelled(self, within: Within, some: tuple[int, ...]) -> Within:
        """How some bytes are written, as few nodes: each state that they lead to takes as many."""
        key = id(within.spellings), some
        if key not in self._of_spellings:
            automaton = compiled(Union(tuple(within.spellings[byte] for byte in some)))
            self._of_spellings[key] = Within(automaton, {})
        return self._of_spellings[key]


def _runs(row: np.ndarray) -> list[tuple[int, int, int]]:
    """The ranges of bytes that lead to one state: first, last, state."""
    bounds = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), 256]
    return [(a, b - 1, int(row[a])) for a, b in pairwise(bounds) if row[a] >= 0]


def _utf8_ranges(low: int, high: int) -> list[list[tuple[int, int]]]:
    """The characters between two code points as sequences of ranges of bytes."""
    if low <= _SURROGATES[1] and high >= _SURROGATES[0]:
        outside = [(low, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, high)]
        return [ranges for a, b in outside if a <= b for ranges in _utf8_ranges(a, b)]
    for most in (0x7F, 0x7FF, 0xFFFF):  # of so many bytes
        if low <= most < high:
            return _utf8_ranges(low, most) + _utf8_ranges(most + 1, high)
    for bits in (6, 12, 18):  # whole groups of continuation bytes
        if high > 0x7F and low >> bits != high >> bits:
            rest = (1 << bits) - 1
            if low & rest:
                return _utf8_ranges(low, low | rest) + _utf8_ranges((low | rest) + 1, high)
            if high & rest != rest:
                return _utf8_ranges(low, (high & ~rest) - 1) + _utf8_ranges(high & ~rest, high)
    return [list(zip(chr(low).encode(), chr(high).encode(), strict=True))]


def _determined(graph: _Graph, start: int, end: int) -> Automaton:
    """The minimal automaton of the texts that lead from a node to another one."""
    closures: dict[int, frozenset[int]] = {}

    def closure(node: int) -> frozenset[int]:
        """The nodes with edges, and the end, that a node is as well."""
        if node not in closures:
            seen, stack = {node}, [node]
            while stack:
                for other in graph.free[stack.pop()]:
                    if other not in seen:
                        seen.add(other)
                        stack.append(other)
            closures[node] = frozenset(one for one in seen if graph.edges[one] or one == end)
        return closures[node]

    numbers = {closure(start): 0}
    order = [closure(start)]
    rows: list[np.ndarray] = []
    for state in order:
        edges = [edge for node in state for edge in graph.edges[node]]
        bounds = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        behind: dict[int, set[int]] = {low: set() for low in bounds}
        places = {low: i for i, low in enumerate(bounds)}
        for low, high, node in edges:
            for i in range(places[low], places[high + 1]):
                behind[bounds[i]].add(node)
        row = np.full((256,), -1, np.int32)
        for low, high in pairwise(bounds):
            if not behind[low]:
                continue
            following = frozenset().union(*map(closure, behind[low]))
            number = numbers.get(following)
            if number is None:
                number = numbers[following] = len(order)
                order.append(following)
                check_count(len(order), MOST_STATES, "states")
            row[low:high] = number
        rows.append(row)
    return minimal(np.array(rows), np.array([end in state for state in order]))
