"""Copies of the weights that an engine was given, for engine processes that are started again.

update_weights of    copies      missing
a b c                abc         -
b, partial           abc b       -
b, without a copy    abc         b
b, partial           abc b       -
"""

from collections.abc import Sequence

from jpaged.processes import wire
from jpaged.processes.shared_weights import SharedWeights


class KeptWeights:
    """What the engine processes have taken, in host memory.

    Attributes:
        copies: oldest first; a later one replaces parts of earlier ones.
        missing: names of arrays that were taken without a copy, and with none since. While there are any, a new process
            cannot have the weights of the one before it.
    """

    def __init__(self) -> None:
        self.copies: list[SharedWeights] = []
        self.missing: frozenset[str] = frozenset()

    def add(self, names: frozenset[str], copy: SharedWeights | None, *, partial: bool) -> None:
        """Engine processes have taken weights. Frees copies of which nothing is left.

        Args:
            names: of the arrays.
            copy: of the arrays, which is freed here from now on; None if none was made.
            partial: they go over the earlier weights, instead of replacing all.
        """
        for one in [one for one in self.copies if not partial or one.names <= names]:
            self.copies.remove(one)
            one.close()
        missing = self.missing if partial else frozenset()
        if copy is None:
            self.missing = missing | names
        else:
            self.missing = missing - names
            self.copies.append(copy)

    def questions(self) -> Sequence[wire.UpdateWeights]:
        """What gives a new process the weights, in order; only while nothing is missing."""
        return [wire.UpdateWeights(one.path, one.arrays, True, "recompute") for one in self.copies]

    def close(self) -> None:
        """Frees the copies."""
        for one in self.copies:
            one.close()
