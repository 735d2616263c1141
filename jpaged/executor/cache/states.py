"""States of sequences, for recurrent layers: an array by slot for each, and snapshots behind the slots.

    arrays    of each such layer: history [entries, width - 1, channels], matrices [entries, heads, rows, columns]
    slot      a sequence's own, from its admission to its end, in which its other state lives, too (`step/state.py`)
    snapshot  a copy of what a slot held after whole blocks of its sequence, for the prefix cache

    entry     0 ..                      max_num_seqs ..                           null_row
              a slot each               a snapshot each                           outside: what pads calls

Nothing is allocated, and nothing is cleared: a sequence's first token finds `fresh` set, and its layers begin with
zeros whatever the slot holds. So its tokens must be computed from the first on, in its own slot; where it goes on from
another one (a fork, a beam) or from a snapshot, the runner has the states copied (`step/copy_states.py`). Snapshots are
entries of the same arrays so that one program copies in any direction, and what holds for slots holds for them: they
are donated, split over a mesh by heads, and given back while an engine sleeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from jpaged.executor.cache.paged import Layers, PagedAttention, Pools
from jpaged.executor.cache.spec import CacheSpec, StateCache
from jpaged.executor.config import ExecutorConfig
from jpaged.models.recurrence import Recurrence
from jpaged.models.sharding import MODEL_AXIS
from jpaged.pallas_kernels import gated_delta_rule, short_convolution, state_space_dual


class SlotArrays(NamedTuple):
    """What a layer holds of all slots and snapshots, or the shapes or specs of that.

    history: of the model's dtype [entries, width - 1, channels]; None of a layer that keeps none.
    matrices: float32 [entries, heads, rows, columns]; None of a layer that keeps none.
    """

    history: Any
    matrices: Any


States = tuple[SlotArrays, ...]


class StateRows(NamedTuple):
    """A step's rows, for recurrent layers.

    slots: `StateSlots.null_row` for rows that are not active. fresh: rows whose first token is the sequence's first.
    query_starts: as of `gated_delta_rule`.
    """

    slots: Int[Array, " rows"]
    fresh: Bool[Array, " rows"]
    query_starts: Int[Array, " rows+1"] | None = None


@dataclass(frozen=True)
class StateSlots:
    """The states of one device, for layers that keep `spec`.

    states_spec: how a layer's are split over a mesh: each device has its heads.
    """

    spec: CacheSpec
    config: ExecutorConfig

    states_spec: ClassVar[SlotArrays] = SlotArrays(
        PartitionSpec(None, None, MODEL_AXIS), PartitionSpec(None, MODEL_AXIS)
    )

    @cached_property
    def layers(self) -> tuple[StateCache, ...]:
        """The layers that have states, in their order."""
        return tuple(layer for layer in self.spec if isinstance(layer, StateCache))

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def null_row(self) -> int:
        """The entry that is none: reading it means nothing, and what is written there is dropped."""
        return self.config.max_num_seqs + self.config.num_state_snapshots

    @property
    def shapes(self) -> tuple[SlotArrays, ...]:
        """Shapes of the arrays, as trees of `ShapeDtypeStruct`s."""

        def of_entries(shape: tuple[int, ...] | None, dtype: Any) -> jax.ShapeDtypeStruct | None:
            return None if shape is None else jax.ShapeDtypeStruct((self.null_row, *shape), dtype)

        return tuple(
            SlotArrays(of_entries(layer.state.history, layer.dtype), of_entries(layer.state.matrices, jnp.float32))
            for layer in self.layers
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states in all layers."""
        return sum(layer.state.num_bytes(layer.dtype.itemsize) for layer in self.layers)

    def beside(self, attention: Layers, states: States, rows: StateRows) -> "HybridLayers":
        """What all layers call in a step. attention: of the layers that keep tokens."""
        recurrent = [SlotRecurrence(state, rows, self.config.optional_backend) for state in states]
        return HybridLayers(attention, recurrent, [isinstance(layer, StateCache) for layer in self.spec])

    def copy(self, states: States, source: Int[Array, " n"], target: Int[Array, " n"]) -> States:
        """Copies entries, source[i] to target[i], all of them read first; `null_row` is padding."""

        def copied(x: Array) -> Array:
            return x.at[target].set(x.at[source].get(mode="clip"), mode="drop")

        copies: States = jax.tree.map(copied, states)
        return copies


@jax.tree_util.register_dataclass
@dataclass
class SlotRecurrence(Recurrence):
    """The recurrence of one layer over a step's rows. A call replaces `state` by the updated one."""

    state: SlotArrays
    rows: StateRows
    backend: str | None = field(metadata={"static": True})

    def convolve(
        self,
        channels: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
        activation: Literal["silu"] | None = "silu",
    ) -> jax.Array:
        options: dict[str, Any] = {"bias": bias, "activation": activation, "backend": self.backend}
        mixed, history = short_convolution(self.state.history, channels, kernel, *self.rows, **options)
        self.state = self.state._replace(history=history)
        return mixed

    def gated_delta_rule(
        self, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
    ) -> jax.Array:
        operands = q, k, v, log_decay, beta
        out, matrices = gated_delta_rule(self.state.matrices, *operands, *self.rows, backend=self.backend)
        self.state = self.state._replace(matrices=matrices)
        return out

    def state_space_dual(
        self, x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array
    ) -> jax.Array:
        operands = x, dt, a, b, c, d
        out, matrices = state_space_dual(self.state.matrices, *operands, *self.rows, backend=self.backend)
        self.state = self.state._replace(matrices=matrices)
        return out


class HybridLayers(list[Any]):
    """What each layer calls, for `Model.forward`: `Layers` for the layers that keep tokens, with others among them.

    Attributes:
        pools, states: the arrays, as of the last layer that was put back.
    """

    def __init__(self, attention: Layers, recurrent: Sequence[SlotRecurrence], is_recurrent: Sequence[bool]) -> None:
        super().__init__([None] * len(is_recurrent))
        self._attention, self._recurrent = attention, list(recurrent)
        self._is_recurrent = list(is_recurrent)
        self._places = [is_recurrent[:i].count(kind) for i, kind in enumerate(is_recurrent)]

    @property
    def pools(self) -> Pools:
        return self._attention.pools

    @property
    def states(self) -> States:
        return tuple(layer.state for layer in self._recurrent)

    def __getitem__(self, layer: SupportsIndex) -> PagedAttention | SlotRecurrence:  # type: ignore[override]  # one layer
        place = self._places[layer]
        return replace(self._recurrent[place]) if self._is_recurrent[layer] else self._attention[place]

    def __setitem__(self, layer: SupportsIndex, called: PagedAttention | SlotRecurrence) -> None:  # type: ignore[override]
        place = self._places[layer]
        if isinstance(called, SlotRecurrence):
            self._recurrent[place] = called
        else:
            self._attention[place] = called
