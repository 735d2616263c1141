"""What a step's programs are: one declaration a kind, which compiler, warm-up, memory plan and runner go by.

A declaration is a frozen dataclass. Its class says what a kind of program takes and gives; an instance is one program
of that kind, of one size, and is what compiled programs are found by:

    @dataclass(frozen=True)
    class CountActive(StepProgram):
        batch: int                                  # its size

        kind = "count_active"                       # its name in profiles: count_active_64
        reads = ("state",)                          # held on the device between steps; by name (`held.py`)

        @classmethod
        def programs(cls, setup):                   # the sizes that exist
            return map(cls, setup.config.decode_buckets)

        def layout(self, setup):                    # what the host sends, in one buffer
            return PackedLayout(slots=Field((self.batch,), setup.config.null_slot))

        def body(self, setup, *, state, packed):    # a pure function
            slots = self.layout(setup).unpack(packed)["slots"]
            return {}, state.active[slots].sum()    # what it changed of what is held, by name; its result

The runner calls it, `self._run(CountActive(64), packed=buffer)`, and gets the result. A kind takes part once it is in
`kinds.KINDS`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from jpaged.executor.cache.paged import PagedCache
from jpaged.executor.cache.spec import cache_spec
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import WHOLE, Specs
from jpaged.executor.step.packing import PackedLayout
from jpaged.models import Model

PACKED = "packed"
"""The input that is the host's buffer."""


@dataclass(frozen=True)
class Setup:
    """What programs are made for.

    model: what each device of the mesh runs (`DeviceMesh.shard_of`).
    cache: where its layers keep keys and values.
    """

    model: Model
    config: ExecutorConfig
    cache: PagedCache

    @staticmethod
    def of(model: Model, config: ExecutorConfig) -> "Setup":
        return Setup(model, config, PagedCache(cache_spec(model), config))

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of so many rows' hidden states."""
        return jax.ShapeDtypeStruct((rows, self.model.config.hidden_size), self.model.dtype)


class Signature(NamedTuple):
    """How a program is called.

    takes: names of its arguments, in order: what it reads, what it updates, what it consumes, its other inputs.
    updates: names of its first results, in order: what is held on the device from then on. One more result follows.
    layout: of its packed input, if it has one.
    """

    takes: tuple[str, ...]
    updates: tuple[str, ...]
    layout: PackedLayout | None


@dataclass(frozen=True)
class StepProgram:
    """A program of some kind and size. Fields of a kind are its sizes and variants, in the order of its name.

    kind: names it.
    reads: what it reads of what is held on the device.
    creates: what it makes anew of what is held on the device.
    consumes: inputs that are donated to it, whose memory its result takes.
    body: what it computes: body(setup, **arrays) takes all that `Signature.takes` names, and gives what it updates and
        creates, by name, and its result.
    """

    kind: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    creates: ClassVar[tuple[str, ...]] = ()
    consumes: ClassVar[tuple[str, ...]] = ()
    body: ClassVar[Callable[..., tuple[dict[str, Any], Any]]]

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        """Those of this kind that a runner may need."""
        raise NotImplementedError

    @classmethod
    def largest(cls, setup: Setup) -> Self | None:
        """The one of this kind that may need most memory while it runs, or have the largest results, of all programs;
        None if one of another kind always needs more.
        """
        return None

    def updates(self, setup: Setup) -> tuple[str, ...]:
        """What of what is held on the device is donated to it, and returned anew by its body."""
        return ()

    def layout(self, setup: Setup) -> PackedLayout | None:
        """Of what the host sends, its input "packed"; None if it sends nothing."""
        return None

    def inputs(self, setup: Setup) -> dict[str, Any]:
        """Shapes of its other inputs, trees of `ShapeDtypeStruct`s by name, on one device. Other programs made them."""
        return {}

    def input_specs(self, setup: Setup) -> dict[str, Specs]:
        """How these are split over a mesh, by name; those not named are whole on each device."""
        return {}

    def result_spec(self, setup: Setup) -> Specs:
        """How its result is split over a mesh."""
        return WHOLE

    def product_rows(self, setup: Setup) -> int:
        """Rows of its matrix products; 0 if it has none."""
        return 0

    @property
    def name(self) -> str:
        """In profiles: its kind, sizes and variant."""
        return "_".join([self.kind, *(str(int(getattr(self, field.name))) for field in fields(self))])

    def uses_pool(self, setup: Setup) -> bool:
        """Whether it is another program when the pool has another size."""
        return "pools" in (*self.reads, *self.updates(setup))

    def signature(self, setup: Setup) -> Signature:
        updates, layout = self.updates(setup), self.layout(setup)
        inputs = (*self.inputs(setup), *(() if layout is None else (PACKED,)))
        takes = (*self.reads, *updates, *self.consumes, *(name for name in inputs if name not in self.consumes))
        return Signature(takes, (*updates, *self.creates), layout)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
