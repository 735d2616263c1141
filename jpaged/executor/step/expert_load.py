"""Tokens that each expert has had: counted on the device by the bodies, read when somebody asks.

    expert_tokens   uint32 [2, sparse layers, experts], low and high words; each body adds its step's (`add_counts`)
    read_expert_tokens    copies them, since the next body is given the array to update

It is there only with `EngineArgs.expert_load`; without, programs are as if it did not exist.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jpaged.api.errors import InvalidParameterError
from jpaged.engine.expert_load import ExpertLoad, RecentCounts, as_counts
from jpaged.executor.jax_settings import default_jax_settings
from jpaged.executor.step.program import Setup, SingleProgram
from jpaged.models import ModelConfig, SparseConfig


def sparse_layers(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers whose experts are counted.

    Raises:
        InvalidParameterError: the model has no experts.
    """
    if not isinstance(config, SparseConfig) or not config.num_experts:
        raise InvalidParameterError(
            f"expert_load=True is for mixtures of experts, and {config.architecture} is none; leave it out."
        )
    return tuple(layer for layer, is_dense in enumerate(config.dense_layers) if not is_dense)


def counts_shape(config: ModelConfig) -> jax.ShapeDtypeStruct:
    """Of `expert_tokens`."""
    return jax.ShapeDtypeStruct((2, len(sparse_layers(config)), config.num_experts), jnp.uint32)


def add_counts(totals: UInt[Array, "2 layers experts"], counts: Int[Array, "layers experts"]) -> Array:
    """The totals with a step's counts."""
    low = totals[0] + counts.astype(jnp.uint32)
    return jnp.stack([low, totals[1] + (low < totals[0])])


@dataclass(frozen=True)
class ReadExpertTokens(SingleProgram):
    """A copy of the totals."""

    kind = "read_expert_tokens"
    reads = ("expert_tokens",)

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return (cls(),) if setup.config.expert_load else ()

    def body(self, setup: Setup, *, expert_tokens: Array) -> tuple[dict[str, object], Array]:
        return {}, jnp.copy(expert_tokens)


class ExpertLoadReader:
    """What has been counted since it was made. It never makes a step wait: while steps run, a read gives the counts as
    of the previous one, or as of the last whose copy has arrived, and asks for newer ones.

    copy: runs `ReadExpertTokens`. now_s: the time, on a clock that only goes forward.
    """

    def __init__(
        self, config: ModelConfig, copy: Callable[[], jax.Array], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._layers, self._copy, self._now_s = sparse_layers(config), copy, now_s
        self._on_its_way: jax.Array | None = None
        self._start = _whole(copy())
        self._counts = np.zeros_like(self._start)
        self._recent = RecentCounts(self._counts, now_s())

    def read(self, wait: bool) -> ExpertLoad:
        """wait: for what was dispatched so far, as where nothing runs any more."""
        with default_jax_settings():
            return self._read(wait)

    def _read(self, wait: bool) -> ExpertLoad:
        arriving = self._on_its_way
        if wait or arriving is None:
            arriving = self._copy()
            arriving.copy_to_host_async()
        if wait or arriving.is_ready():  # type: ignore[attr-defined]  # JAX's stubs leave it out
            self._counts, arriving = _whole(arriving) - self._start, None
        self._on_its_way = arriving
        recent = self._recent.since(self._counts, self._now_s())
        return ExpertLoad(self._layers, as_counts(self._counts), as_counts(recent))


def _whole(words: jax.Array) -> np.ndarray:
    """int64 [layers, experts]."""
    low, high = np.asarray(words).astype(np.int64)
    return low + (high << 32)


KINDS = (ReadExpertTokens,)
