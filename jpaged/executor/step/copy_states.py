"""The program that copies states of sequences, of recurrent layers: from slot to slot for forks and for beams, and to
snapshots and back for the prefix cache.

copy_states[N]    every entry is read before any is written
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from jaxtyping import Array, Int

from jpaged.executor.cache.states import States
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, StepProgram


@dataclass(frozen=True)
class CopyStates(StepProgram):
    """Copies in every recurrent layer: pairs of entries (from, to)."""

    pairs: int

    kind = "copy_states"
    writes = ("recurrent",)

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.state_copy_buckets) if setup.states else ()

    @classmethod
    def largest(cls, setup: Setup) -> Self | None:
        return cls(setup.config.state_copy_buckets[-1]) if setup.states else None

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(pairs=Field((self.pairs, 2), setup.states.null_row))

    def body(self, setup: Setup, *, recurrent: States, packed: Int[Array, " n"]) -> tuple[dict[str, object], None]:
        source, target = self.layout(setup).unpack(packed)["pairs"].T
        return {"recurrent": setup.states.copy(recurrent, source, target)}, None


KINDS = (CopyStates,)
