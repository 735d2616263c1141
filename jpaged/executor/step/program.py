"""What a step's programs are: one declaration a kind, which compiler, warm-up, memory plan and runner go by.

A declaration is a frozen dataclass. Its class says what a kind of program takes and gives; an instance is one program
of that kind, of one size, and is what compiled programs are found by:

    @dataclass(frozen=True)
    class CountActive(StepProgram):
        batch: int                                  # its size

        kind = "count_active"                       # in profiles count_active_64
        reads = ("state",)                          # values that stay on the device between steps (`held.py`)

        @classmethod
        def programs(cls, setup):                   # the sizes that exist
            return map(cls, setup.config.decode_buckets)

        def layout(self, setup):                    # what the host sends, in one buffer
            return PackedLayout(slots=Field((self.batch,), setup.config.null_slot))

        def body(self, setup, *, state, packed):    # a pure function
            slots = self.layout(setup).unpack(packed)["slots"]
            return {}, state.active[slots].sum()    # the held values that it updates (none); its result

The runner calls it, `self._run(CountActive(64), packed=buffer)`, and gets the result. `kinds.KINDS` lists all kinds: a
new one is added to the `KINDS` at the end of its file.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from jpaged.engine.interface import SamplingVariant
from jpaged.executor.cache.paged import PagedCache
from jpaged.executor.cache.spec import cache_spec, token_layers
from jpaged.executor.cache.states import StateSlots
from jpaged.executor.cache.virtual.contiguous import ContiguousCache
from jpaged.executor.cache.virtual.layout import VirtualCache
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import WHOLE, Specs
from jpaged.executor.sampling import sampler
from jpaged.executor.step.bundles import Bundles
from jpaged.executor.step.packing import PackedLayout
from jpaged.models import Model

PACKED = "packed"
"""The input that is the host's buffer."""


@dataclass(frozen=True)
class Setup:
    """What programs are made for.

    model: what each device of the mesh runs (`DeviceMesh.shard_of`).
    cache: where its layers keep keys and values. states: where recurrent ones keep theirs; false without any.
    bundles: which of its weights bodies take together.
    """

    model: Model
    config: ExecutorConfig
    cache: PagedCache
    states: StateSlots
    bundles: Bundles

    @staticmethod
    def of(model: Model, config: ExecutorConfig) -> "Setup":
        layout = PagedCache if config.geometry is None else VirtualCache
        if config.geometry is not None and config.contiguous_backend is not None:
            layout = ContiguousCache
        spec = cache_spec(model, config.kv_scales)
        return Setup(model, config, layout(token_layers(spec), config), StateSlots(spec, config), Bundles(model))

    def program_variant(self, variant: SamplingVariant) -> SamplingVariant:
        """The variant whose program draws for `variant` (`sampler.program_variant`)."""
        backend = self.config.optional_backend
        return sampler.program_variant(variant, self.model.vocab_size, self.model.collectives, backend)

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        """The shape of so many rows' hidden states."""
        return jax.ShapeDtypeStruct((rows, self.model.config.hidden_size), self.model.dtype)


class Signature(NamedTuple):
    """How a compiled program is called.

    takes: names of its arguments in order: held values that it reads, those that it updates, inputs that it consumes,
        and its other inputs.
    updates: names of its first results in order: new held values. Its own result comes after them.
    layout: of its packed input, if it has one.
    """

    takes: tuple[str, ...]
    updates: tuple[str, ...]
    layout: PackedLayout | None


@dataclass(frozen=True)
class StepProgram:
    """A program of one kind and size. The fields of a kind are its sizes and variants.

    A program works on held values, which stay on the device between steps (`held.py`), and on inputs, which its caller
    gives. Both go by name.

    kind: the name of the kind.
    reads: held values that it reads and leaves as they are.
    writes: held values that it updates, if these are the same for all programs of the kind: see `updates`.
    creates: held values that it makes.
    consumes: inputs that are donated to it; its result takes their memory.
    body: a pure function, body(setup, **arrays), of everything that `Signature.takes` names. It returns a dictionary of
        the held values that it updates and creates, and its result.
    """

    kind: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    creates: ClassVar[tuple[str, ...]] = ()
    consumes: ClassVar[tuple[str, ...]] = ()
    body: ClassVar[Callable[..., tuple[dict[str, Any], Any]]]

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        """The programs of this kind that a runner may need."""
        raise NotImplementedError

    @classmethod
    def first(cls, setup: Setup) -> Self | None:
        """The program of this kind that nearly every first request runs. It is compiled at start even where others wait
        until they are needed; so a model or kernel that cannot be traced is found there. None: of this kind, none.
        """
        return None

    @classmethod
    def largest(cls, setup: Setup) -> Self | None:
        """The program of this kind that the memory plan has to look at. None if a program of another kind always needs
        more memory to run and has larger results.
        """
        return None

    def reads_also(self, setup: Setup) -> tuple[str, ...]:
        """Further held values that it reads and leaves as they are, if these differ between programs of the kind."""
        return ()

    def updates(self, setup: Setup) -> tuple[str, ...]:
        """Held values that are donated to it. Its body returns their new contents."""
        return self.writes

    def layout(self, setup: Setup) -> PackedLayout | None:
        """The fields of its input "packed", which the host fills. None if the host sends it nothing."""
        return None

    def inputs(self, setup: Setup) -> dict[str, Any]:
        """Its other inputs, which are results of other programs: trees of `ShapeDtypeStruct`s by name, as one device
        has them.
        """
        return {}

    def input_specs(self, setup: Setup) -> dict[str, Specs]:
        """How inputs are split over a mesh. Inputs that are not named are whole on each device."""
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
        """Whether it has to be compiled again when the size of the pool changes."""
        return "pools" in (*self.reads, *self.updates(setup))

    def signature(self, setup: Setup) -> Signature:
        updates, layout = self.updates(setup), self.layout(setup)
        inputs = (*self.inputs(setup), *(() if layout is None else (PACKED,)))
        reads = (*self.reads, *self.reads_also(setup))
        takes = (*reads, *updates, *self.consumes, *(name for name in inputs if name not in self.consumes))
        return Signature(takes, (*updates, *self.creates), layout)


@dataclass(frozen=True)
class SingleProgram(StepProgram):
    """A kind of which there is one program, without sizes."""

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        yield cls()


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
