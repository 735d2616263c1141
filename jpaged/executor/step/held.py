"""What a runner holds on the device between steps, by the names that programs take it by.

    weights   the model's flat tuple                         head      the part of it that `Model.head_logits` reads
    large     the part of it that bodies take as it is       small     the rest of it, in bundles (`bundles.py`)
    pools     keys and values (`cache/paged.py`)             state     slots, with their block tables (`state.py`)
    sampling  sampling parameters by slot                    full      penalties, masks and counts by slot; there when
    masks     what constrained slots may sample              recurrent states of sequences (`cache/states.py`), if any
    tables    of constraints (`sampling/tables.py`)          places    where slots stand in these
    exchange  of the one-shot all-reduce; there only where             some request asks for them
              some body sums by it                           expert_tokens  (`expert_load.py`); only if asked for

A program that changes any of it has it donated, and it lives in place for ever.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.executor.cache.paged import Pools
from jpaged.executor.cache.states import SlotArrays, States
from jpaged.executor.mesh import EXCHANGE, TOKEN_COUNTS, WHOLE, DeviceMesh, Specs
from jpaged.executor.sampling import state as sampling_state
from jpaged.executor.sampling.tables import init_places, init_tables
from jpaged.executor.step.expert_load import counts_shape
from jpaged.executor.step.program import Setup
from jpaged.executor.step.state import initial_slot_state
from jpaged.models import Weights
from jpaged.models.collectives import ExchangeState
from jpaged.pallas_kernels import initial_all_reduce_state
from jpaged.pallas_kernels.all_reduce.inbox import EMPTY

Held = dict[str, Any]
"""Trees of arrays by name."""

WEIGHTS = ("weights", "head", "large", "small")
"""What weights are held as."""


class HeldShapes(NamedTuple):
    """Shapes of something held, on all devices together, and how it is split over them."""

    shapes: Any
    spec: Specs

    @property
    def device_bytes(self) -> int:
        """Bytes of it on one device."""
        return sum(
            prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.shapes)
        )


def held_shapes(setup: Setup, mesh: DeviceMesh) -> dict[str, HeldShapes]:
    """The shapes of all that may be held."""
    model, config, cache = setup.model, setup.config, setup.cache
    weights = mesh.weights(model)
    full = jax.eval_shape(
        lambda: sampling_state.init_full_state(config.max_num_seqs, model.vocab_size, model.config.vocab_size)
    )
    full_spec = jax.tree.map(lambda _: WHOLE, full)._replace(token_counts=TOKEN_COUNTS)
    held = {
        "weights": HeldShapes(weights, None),
        "head": HeldShapes(model.head_weights(weights), None),
        "large": HeldShapes(tuple(weights[index] for index in setup.bundles.alone), None),
        "small": HeldShapes(setup.bundles.shapes(weights), None),
        "pools": HeldShapes(tuple(mesh.split(pool, cache.pools_spec) for pool in cache.pools), cache.pools_spec),
        "state": HeldShapes(jax.eval_shape(lambda: initial_slot_state(cache)), WHOLE),
        "sampling": HeldShapes(jax.eval_shape(lambda: sampling_state.init_state(config.max_num_seqs)), WHOLE),
        "masks": HeldShapes(
            jax.eval_shape(lambda: sampling_state.init_masks(config.max_num_seqs, model.vocab_size)), WHOLE
        ),
        "tables": HeldShapes(jax.eval_shape(lambda: init_tables(model.vocab_size)), WHOLE),
        "places": HeldShapes(jax.eval_shape(lambda: init_places(config.max_num_seqs)), WHOLE),
        "full": HeldShapes(full._replace(token_counts=mesh.split(full.token_counts, TOKEN_COUNTS)), full_spec),
    }
    if setup.states:
        spec = setup.states.states_spec
        shapes = tuple(
            SlotArrays(*(None if x is None else mesh.split(x, axes) for x, axes in zip(layer, spec, strict=True)))
            for layer in setup.states.shapes
        )
        held["recurrent"] = HeldShapes(shapes, (spec,) * len(shapes))
    if config.one_shot_rows:
        state = initial_all_reduce_state(mesh.size, config.one_shot_rows, model.config.hidden_size, model.dtype)
        shapes = jax.tree.map(lambda leaf: mesh.split(leaf, EXCHANGE), ExchangeState(*state))
        held["exchange"] = HeldShapes(shapes, EXCHANGE)
    if config.expert_load:
        held["expert_tokens"] = HeldShapes(counts_shape(model.config), WHOLE)
    return held


def initial_held(setup: Setup, mesh: DeviceMesh, weights: Sequence[jax.Array], pools: Pools | None = None) -> Held:
    """All that a runner begins with: beside the weights, empty pools and slots.

    weights: on the mesh. pools: where they are not to be made here (`VirtualMemory.pools`).
    """
    shapes = held_shapes(setup, mesh)
    held: Held = {
        **held_weights(setup, tuple(weights)),
        "pools": empty_pools(setup, mesh) if pools is None else pools,
        "state": mesh.whole(initial_slot_state(setup.cache)),
        "sampling": mesh.whole(sampling_state.init_state(setup.config.max_num_seqs)),
        "masks": mesh.whole(sampling_state.init_masks(setup.config.max_num_seqs, setup.model.vocab_size)),
        "tables": mesh.whole(init_tables(setup.model.vocab_size)),
        "places": mesh.whole(init_places(setup.config.max_num_seqs)),
    }
    if setup.states:
        held["recurrent"] = empty_states(setup, mesh)
    if "expert_tokens" in shapes:
        counts = shapes["expert_tokens"].shapes
        held["expert_tokens"] = mesh.whole(jnp.zeros(counts.shape, counts.dtype))
    if "exchange" in shapes:
        inbox, generations = shapes["exchange"].shapes
        # On all devices before any program runs: peers write to it as soon as theirs do.
        state = ExchangeState(mesh.full(inbox, EMPTY), mesh.full(generations, 0))
        held["exchange"] = jax.block_until_ready(state)
    return held


def held_weights(setup: Setup, weights: Weights) -> Held:
    """What weights are held as, by name. The bundles are copies; the rest are these same arrays."""
    large = tuple(weights[index] for index in setup.bundles.alone)
    values = weights, setup.model.head_weights(weights), large, setup.bundles.bundled(weights)
    return dict(zip(WEIGHTS, values, strict=True))


def empty_pools(setup: Setup, mesh: DeviceMesh) -> Pools:
    """Pools of zeros, as the paged layout has them."""
    spec = setup.cache.pools_spec
    return tuple(mesh.full(mesh.split(pool, spec), 0) for pool in setup.cache.pools)


def empty_states(setup: Setup, mesh: DeviceMesh) -> States:
    """States of zeros of all slots; none for a model without recurrent layers."""
    if not setup.states:
        return ()
    shapes: States = held_shapes(setup, mesh)["recurrent"].shapes
    return jax.tree.map(lambda leaf: mesh.full(leaf, 0), shapes)
