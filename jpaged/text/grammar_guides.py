"""Compiled constraints and the sequences that follow them, as an engine has them: numbers that the shards know.

A sequence gets its shard with its first token. A constraint that is quickly compiled is compiled in any shard that gets
a sequence of it; for others there are more shards as they have more sequences.
"""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar_process import Changes, Compiled, Place
from jpaged.text.grammar_shards import Processes, Shard, take_all
from jpaged.text.token_tables import TokenTable

_QUICK_S = 0.02
"""A constraint that is compiled within this may be compiled while a shard's other sequences wait."""
_TABLE_FROM = 4
"""Sequences from which on a table is worth its seconds: many schemas are seen once."""
_MORE_IN_KNOWN = 4
"""Sequences that a shard may have more than another one that would have to compile the constraint first."""


class CompiledGrammar:
    """A constraint that sequences can follow; as `jpaged.engine.constraints.following.Grammar`.

    forced: tokens that come first. mask: uint32 [words]; what may follow these. params: what it was compiled from.
    shards: that know it. is_quick: whether others may compile it between two answers. num_begun: sequences.
    successor: the same in later processes, where its own have ended and a sequence went on. table: what the device
    follows it by; None until it is made, which begins with its fourth sequence without one, and where there is none.
    num_without_table: sequences that have begun without it.
    """

    def __init__(
        self,
        process: Processes,
        number: int,
        shard: Shard,
        compiled: Compiled,
        params: StructuredOutputsParams,
        grow: "Callable[[CompiledGrammar], None]",
    ) -> None:
        self.process, self.number, self.params = process, number, params
        self.forced, self.mask = tuple(compiled.forced), np.frombuffer(compiled.mask, np.uint32)
        self.shards = {shard}
        self.is_quick = compiled.seconds < _QUICK_S
        self.successor: CompiledGrammar | None = None
        self.table: TokenTable | None = None
        self.num_without_table = self._num_begun = 0
        self._grow = grow

    def begin(self, ignore_eos: bool, guesses: bool = False) -> "Guide":
        """A guide for a new sequence, behind the forced tokens. guesses: whether it may do without masks."""
        self._num_begun += 1
        if self.table is None:
            self.num_without_table += 1
            if self.num_without_table == _TABLE_FROM:
                self.process.tables.want(self)
        if not self.is_quick and self._num_begun > len(self.shards) < len(self.process.shards):
            self._grow(self)
        return Guide(self, ignore_eos, guesses)

    def lose_table(self) -> None:
        """Others need its room. It gets another one if as many sequences begin again."""
        self.table, self.num_without_table = None, 0

    def __del__(self) -> None:
        for shard in self.shards:
            shard.forgotten.append(self.number)


class Guide:
    """Where a sequence stands. ends_late: the end of sequence is allowed only where nothing else is. guesses: it may do
    without masks.

    is_begun: whether its shard knows it. address: its shard's route and its number, as one; -1 until it is begun.
    followed: its tokens so far, those included that must come next. made: its mask, which came without being asked for;
    None if none did.
    """

    __slots__ = ("_shard", "address", "ends_late", "followed", "grammar", "guesses", "is_begun", "made", "number")

    def __init__(self, grammar: CompiledGrammar, ends_late: bool, guesses: bool) -> None:
        self.ends_late, self.guesses = ends_late, guesses
        self.followed = array("i")
        self._shard: Shard | None = None
        self.begin(grammar)

    def begin(self, grammar: CompiledGrammar) -> None:
        """Begins to follow a grammar, in whose processes it is to be moved past its tokens."""
        self.grammar = grammar
        self.number = next(grammar.process.numbers)
        self._leave()
        self.is_begun, self.address = False, -1
        self.made: np.ndarray | str | None = None

    @property
    def shard(self) -> Shard:
        """The one that follows it: of those that may, that which has the fewest, rather one that knows the grammar."""
        if self._shard is None:
            known = self.grammar.shards.copy()
            shards = self.grammar.process.shards if self.grammar.is_quick else known
            self._shard = min(shards, key=lambda shard: shard.num_live + (0 if shard in known else _MORE_IN_KNOWN))
            self._shard.num_live += 1
        return self._shard

    @property
    def is_alive(self) -> bool:
        """Whether its processes run."""
        return self.grammar.process.is_alive

    def note(self, tokens: Sequence[int], place: Place) -> None:
        """Notes that it has been moved. tokens: that were sampled, as of `GrammarCompiler.advance`. place: where it
        stands.
        """
        if not (place.failure or place.is_refused):
            self.followed.append(tokens[place.num_refused])
            if place.forced:
                self.followed.extend(place.forced)

    def _leave(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.num_live -= 1
            if self.is_begun:
                shard.ended.append(self.number)

    def __del__(self) -> None:
        self._leave()


def changes_of(shard: Shard, guides: Sequence[Guide]) -> Changes:
    """What a shard is to be told before it is asked about guides. guides: at least those that it may not know yet."""
    forgotten = take_all(shard.forgotten)  # first, so that guides of these are among the ended
    begun, compiled = [], []
    for guide in guides:
        if not guide.is_begun:
            guide.is_begun, guide.address = True, shard.route << 32 | guide.number
            grammar = guide.grammar
            if shard not in grammar.shards:
                grammar.shards.add(shard)
                compiled.append((grammar.number, grammar.params))
            begun.append((guide.number, grammar.number, guide.ends_late, guide.guesses))
    return Changes(begun, compiled, take_all(shard.ended), forgotten)
