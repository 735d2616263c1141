"""A runner that is ready, and what is known of it: what an engine, `sleep` and weights that change need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ReferenceType

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.engine.interface import CacheGroup, Executor
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.jax_settings import default_jax_settings
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.memory import MemoryPlan
from jpaged.executor.start.on_first_use import OnFirstUse
from jpaged.executor.start.shapes import needed_pages
from jpaged.executor.start.weights import CheckpointReader, zero_weights
from jpaged.executor.step.compiled import Origin
from jpaged.executor.step.held import empty_pools, empty_states
from jpaged.executor.step.program import Setup
from jpaged.executor.step.runner import Runner
from jpaged.models import Model
from jpaged.models.loading.live import Update, WeightsForm, WeightUpdater
from jpaged.pallas_kernels import registry


class Leader(Executor, Protocol):
    """Runs plans here and in all other processes."""

    def close(self) -> None:
        """Ends these, and closes the runner here."""


@dataclass
class Startup:
    """A runner and what is known of it.

    setup: what its programs were made for.
    memory: of each device. seconds: by phase; loading and compiling overlap. origins: how many programs of each.
    mesh: what it runs on. load_weights: reads the checkpoint, again if need be.
    updater: knows the places of weights by name.
    has_given_weights: it has weights that somebody gave, and that no checkpoint holds.
    _given_before: what that was before weights came to an engine asleep at level 2; None once they can stay.
    on_first_use: what compiles programs when they are first needed; None: all are compiled.
    leader: what runs plans here and in all other processes, where there are several.
    user: the engine whose keys and values the pool holds: the last one that ran on it.
    asleep: the level of `sleep`; 0 while awake.
    """

    args: EngineArgs
    runner: Runner
    model: Model
    setup: Setup
    memory: MemoryPlan
    origins: Mapping[Origin, int]
    device: str
    mesh: DeviceMesh
    load_weights: CheckpointReader
    updater: WeightUpdater
    seconds: dict[str, float] = field(default_factory=dict)
    leader: Leader | None = None
    user: ReferenceType[Any] | None = None
    asleep: int = 0
    has_given_weights: bool = False
    _given_before: bool | None = None
    on_first_use: OnFirstUse | None = None

    @property
    def config(self) -> ExecutorConfig:
        """Shapes of the device state and of the programs."""
        return self.setup.config

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on GPUs."""
        return self.mesh.local_devices[0].platform == "gpu"

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers that have block tables of their own."""
        return self.setup.cache.groups

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that have memory, the null block included."""
        return self.memory.num_blocks

    @property
    def _num_backed(self) -> int:
        """Blocks that must have memory before the first request."""
        return self.num_blocks if self.args.kv_idle_release_s is None else needed_pages(self.setup)

    @property
    def _blocks(self) -> str:
        """What the pool is made of, in words."""
        geometry = self.config.geometry
        if geometry is None:
            return "blocks"
        return f"pages of {geometry.page_tokens} tokens ({geometry.page_layout}, {_size(self.memory.block)})"

    def close(self) -> None:
        """Frees what the runner holds on the device, and ends the other processes. The second time it does nothing."""
        (self.leader or self.runner).close()

    def sleep(self, level: int) -> None:
        """Gives memory back: 1 that of the KV pool, 2 that of the weights, too. Nothing runs, and what is in the pool
        is lost.

        Raises:
            InvalidParameterError: the model spans several hosts; or JAX is tracing.
        """
        _refuse_tracing("sleep")
        if self.leader is not None:
            raise InvalidParameterError("sleep is for a model on one host; this one spans several processes.")
        if level > self.asleep:
            self.runner.sleep(level)
            self.asleep, self._given_before = level, None

    def wake_up(self) -> None:
        """Takes the memory again that `sleep` gave back; weights are read from the checkpoint. Nothing if awake.

        Raises:
            OutOfMemoryError: others have it. The engine sleeps on.
            InvalidParameterError: the weights that it gave back are in no checkpoint, or JAX is tracing; it sleeps on.
        """
        if not self.asleep:
            return
        _refuse_tracing("wake_up")
        if self.asleep == 2 and self.has_given_weights:
            raise InvalidParameterError(
                "The engine gave back weights that it had from its caller, which no checkpoint holds; call"
                " update_weights before wake_up."
            )
        with self.mesh.as_default():
            try:
                weights = self.load_weights() if self.asleep == 2 else None
                pools = empty_pools(self.setup, self.mesh) if self.runner.memory is None else None
                states = empty_states(self.setup, self.mesh)
                jax.block_until_ready((weights, pools, states))
                self.runner.wake_up(self._num_backed, pools, states, weights)
            except jax.errors.JaxRuntimeError as error:
                wanted = f"the KV pool of {_size(self.memory.pool)}"
                if self.asleep == 2:
                    wanted = f"the weights of {_size(self.memory.weights)} and {wanted}"
                raise OutOfMemoryError(f"There is no room for {wanted}; let others give memory back.") from error
        self.asleep, self._given_before = 0, None

    def check_weights(self, weights: Any, *, partial: bool = False) -> Update:
        """Finds the places of weights, and changes nothing; as `WeightUpdater.match`.

        Raises:
            InvalidParameterError: they do not fit, or are the engine's own; or the model spans several hosts; or some
                are to be kept that `sleep` has given back; or JAX is tracing.
        """
        _refuse_tracing("update_weights")
        if self.leader is not None:
            raise InvalidParameterError("update_weights is for a model on one host; this one spans several processes.")
        with self.mesh.as_default():
            update = self.updater.match(weights, partial=partial)
        own = {id(array) for array in self.runner.weights or ()}
        if name := next((write.name for write in update.writes if id(write.array) in own), None):
            raise InvalidParameterError(
                f"weights: {name!r} is the engine's own array, which is written over; give a copy, as weights_as does."
            )
        if self.asleep == 2 and not update.is_complete:
            raise InvalidParameterError(
                "The engine sleeps at level 2 and has no weights to keep the others of; give all of them."
            )
        return update

    def update_weights(self, update: Update) -> None:
        """Writes weights in place. An engine that had given its weights back sleeps on at level 1.

        Raises:
            OutOfMemoryError: it had given its weights back, and others have the memory. It sleeps on at level 2.
            JaxRuntimeError: the device failed in the middle; the weights are of no more use.
        """
        with self.mesh.as_default():
            try:
                start = zero_weights(self.setup.model, self.mesh) if self.asleep == 2 else None
                self.runner.update_weights(lambda old: jax.block_until_ready(self.updater.apply(old, update)), start)
            except jax.errors.JaxRuntimeError as error:
                if self.asleep != 2:
                    raise
                raise OutOfMemoryError(
                    f"There is no room for the weights of {_size(self.memory.weights)}; let others give memory back."
                ) from error
        self._given_before = self.has_given_weights if self.asleep == 2 else None
        self.asleep = min(self.asleep, 1)
        self.has_given_weights = True

    def give_back_weights(self) -> bool:
        """Undoes the last `update_weights` of an engine that slept at level 2 then and sleeps still: it sleeps at level
        2 again, and `wake_up` does what it would have done before.

        Returns: False, and nothing is done, where the engine did not sleep at level 2 or has been woken since.
        """
        given = self._given_before
        if given is None:
            return False
        self.sleep(2)
        self.has_given_weights = given
        return True

    def weights_as(self, form: WeightsForm) -> Any:
        """Copies of the weights, as `WeightUpdater.read`.

        Raises:
            InvalidParameterError: there is no such form; or the model spans several hosts; or `sleep` has given the
                weights back; or JAX is tracing.
        """
        _refuse_tracing("weights_as")
        if self.leader is not None:
            raise InvalidParameterError("weights_as is for a model on one host; this one spans several processes.")
        weights = self.runner.weights
        if weights is None:
            raise InvalidParameterError("The engine sleeps at level 2 and has no weights; wake it up first.")
        with self.mesh.as_default():
            return self.updater.read(weights, form)

    def table(self, name: str) -> str:
        """What a user wants to know at start, in a few lines."""
        num_blocks, length = self.num_blocks - 1, self.config.max_model_len
        concurrency = num_blocks / self.setup.cache.sequence_blocks(length)
        tokens = num_blocks * self.config.block_size // len(self.cache_groups)
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
        reserved = f", {_size(self.memory.programs)} reserved for them to run" if self.memory.programs else ""
        in_fp8 = " in FP8" if self.config.kv_scales is not None else ""
        rows = [
            (
                "model",
                f"{name} ({self.model.config.architecture}, {self.model.num_parameters / 1e6:,.1f} M parameters)",
            ),
            ("device", self.device),
            ("kernels", self.args.kernel_backend or registry.preferred_here()),
            ("weights", f"{_size(self.memory.weights)} in {_types(self.model)}{self._reading}"),
            ("KV pool", f"{_size(self.memory.pool)}{in_fp8}: {self.num_blocks:,} {self._blocks}, {tokens:,} tokens"),
            *self._states_row(),
            ("max_model_len", f"{self.config.max_model_len:,} tokens; {concurrency:,.1f} such sequences fit the pool"),
            ("programs", f"{whence(self.origins)}{self._to_come}{reserved}"),
            ("start-up", f"{sum(self.seconds.values()):.1f} s: {phases}"),
        ]
        if self.config.one_shot_rows:
            rows.insert(-1, ("all-reduce", f"one-shot in steps of up to {self.config.one_shot_rows} rows"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"  {label:<{width}}  {text}" for label, text in rows)

    @property
    def _to_come(self) -> str:
        """How many programs are compiled later, in words; "" if none is."""
        missing = 0 if self.on_first_use is None else len(self.on_first_use.missing)
        return f", {missing} more when they are first needed" if missing else ""

    @property
    def _reading(self) -> str:
        """How fast the checkpoint was read, in words; "" where nothing was."""
        size, seconds = self.load_weights.num_bytes, self.load_weights.seconds
        return f"; {_size(size)} read in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s" if size else ""

    def _states_row(self) -> list[tuple[str, str]]:
        if not self.setup.states:
            return []
        slots, each = self.config.max_num_seqs, self.setup.states.slot_bytes
        count = self.config.num_state_snapshots
        snapshots = f"{_size(count * each)}: {count} of them for the prefix cache" if count else "none; no prefix cache"
        return [
            ("states", f"{_size(slots * each)}: {slots} sequences of {_size(each)}"),
            ("snapshots", snapshots),
        ]


def _refuse_tracing(what: str) -> None:
    """Raises InvalidParameterError under `jax.jit` and other traces, where there are no arrays."""
    with default_jax_settings():
        is_tracing = isinstance(jax.device_put(np.zeros((), np.int32)), jax.core.Tracer)
    if is_tracing:
        raise InvalidParameterError(f"{what} was called in a function that JAX traces; call it outside of jit.")


def whence(origins: Mapping[Origin, int]) -> str:
    """Where the programs came from, in words."""
    said: dict[Origin, str] = {
        "compiled": "compiled here",
        "shared": "compiled by other processes",
        "kept": "found in the cache",
        "jax": "lowered here and found in JAX's cache",
    }
    return ", ".join(f"{origins[origin]} {text}" for origin, text in said.items() if origins.get(origin))


def _types(model: Model) -> str:
    scheme, dtype = model.config.quantization, np.dtype(model.dtype).name
    return dtype if scheme is None else f"{scheme.name} and {dtype}"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
