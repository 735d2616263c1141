"""A model as the executor holds it: pure functions of a flat tuple of arrays.

    config.json -> ModelConfig -> build() -> Model
                                              |  abstract_weights, parameter_names   (parallel tuples)
    checkpoint -> load()  ----.               |
    Model.init()  ------------+-> weights --> forward(weights, tokens, positions, attend) -> hidden
    Model.flatten(module) ----'               logits(weights, hidden)

The Flax module exists only while a function is traced; a compiled step sees arrays.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.models.collectives import ALONE, Collectives, Exchange
from jpaged.models.config import ModelConfig
from jpaged.models.families.gpt2 import GPT2LMHeadModel
from jpaged.models.families.llama import LlamaForCausalLM
from jpaged.models.families.opt import OPTForCausalLM
from jpaged.models.layers import Attend, Constant, GatedMLP, Normal
from jpaged.models.loading.parts import Part

Weights = tuple[jax.Array, ...]
T = TypeVar("T")

DTYPES = ("float32", "bfloat16", "float16")


class CausalLM(Protocol):
    """What every family's module does; see `LlamaForCausalLM`."""

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | list[Any],
        exchange: Exchange | None = None,
    ) -> jax.Array: ...

    def logits(self, hidden: jax.Array) -> jax.Array: ...


_FAMILIES: dict[str, Any] = {"llama": LlamaForCausalLM, "opt": OPTForCausalLM, "gpt2": GPT2LMHeadModel}


def resolve_dtype(dtype: str, config: ModelConfig) -> jnp.dtype:
    """The type to run in: the one named, or for "auto" the checkpoint's own, float32 when that is unknown.

    Raises InvalidParameterError for a name that is none of "auto", "float32", "bfloat16", "float16", and
    UnsupportedModelError when "auto" meets a checkpoint of another type.
    """
    if dtype == "auto":
        dtype = config.dtype or "float32"
        if dtype not in DTYPES:
            raise UnsupportedModelError(
                f"The checkpoint's dtype {dtype!r} is not supported; choose dtype from {', '.join(DTYPES)}."
            )
    if dtype not in DTYPES:
        raise InvalidParameterError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}.")
    return jnp.dtype(dtype)


class Model:
    """See `build`.

    config, dtype: what it computes, and the type of weights and residual stream.
    parameter_names: names such as "layers.0.attention.qkv"; the order of every tuple of weights.
    abstract_weights: shape and type of each.
    parts: the tensors of a Hugging Face checkpoint and where they belong; none for a shard.
    base_prefix: what the checkpoint's names begin with; checkpoints of the bare body leave it out.
    starts: for each weight what a random one is drawn from.
    shard_axes: for each weight the axis that tensor parallelism splits, or None.
    collectives: of the shards this is one of (`sharding.shard_of`); `config` and shapes are then the shard's.
    vocab_size: of the whole model.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        collectives: Collectives = ALONE,
        vocab_size: int | None = None,
    ) -> None:
        family = _FAMILIES[config.family]
        self.config = config
        self.dtype = dtype
        self.collectives = collectives
        self.vocab_size = vocab_size or config.vocab_size
        abstract = nnx.eval_shape(lambda: family(config, dtype, nnx.Rngs(0), collectives))
        self._graph, state = nnx.split(abstract, nnx.Param)
        named = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
        self.parameter_names: tuple[str, ...] = tuple(named)
        self.starts: tuple[Normal | Constant, ...] = tuple(variable.start for variable in named.values())
        self.shard_axes: tuple[int | None, ...] = tuple(variable.shard_axis for variable in named.values())
        self._structure = jax.tree.structure(state)
        self.abstract_weights: tuple[jax.ShapeDtypeStruct, ...] = tuple(jax.tree.leaves(state))
        self.parts: tuple[Part, ...] = tuple(family.parts(config)) if collectives.size == 1 else ()
        self.base_prefix: str = family.base_prefix
        head = {"lm_head" if "lm_head" in named else "embedding", "project_out"}
        self._head_indices = tuple(i for i, name in enumerate(self.parameter_names) if name in head)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(a.shape) for a in self.abstract_weights)

    @property
    def num_bytes(self) -> int:
        """Of all weights on the device."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.abstract_weights)

    def forward(
        self,
        weights: Sequence[jax.Array],
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | list[Any],
        exchange: Exchange | None = None,
        backend: str | None = "xla",
    ) -> jax.Array:
        """The model's body.

        tokens, positions: int32 [T]; the sequences' tokens flat, in any mixture that `attend` understands.
        attend: one for all layers, or a list of pytrees, one a layer, which is updated; see `run_layers`.
        exchange: of shards, for sums by the one-shot kernel, which update its state; all-reduces of XLA without one.
        backend: of products that have kernels (`GatedMLP`): "xla", through which gradients pass, or None to pick by
            device and shapes.
        Returns hidden states [T, hidden], after the final norm, in the model's type.
        """
        module = self.module(weights)
        if backend != "xla":
            cast(nnx.Module, module).set_attributes(GatedMLP, backend=backend, raise_if_not_found=False)
        return module(tokens, positions, attend, exchange)

    def logits(self, weights: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden], rows of what `forward` returned -> float32 [R, vocab].

        A shard gives the logits of its own part of the vocabulary; those of padding are minus infinity.
        """
        logits = self.module(weights).logits(hidden)
        width = self.config.vocab_size
        if width * self.collectives.size == self.vocab_size:
            return logits
        token_ids = self.collectives.first(width) + jnp.arange(width, dtype=jnp.int32)
        return jnp.where(token_ids < self.vocab_size, logits, -jnp.inf)

    def head_weights(self, weights: Sequence[T]) -> tuple[T, ...]:
        """The few of the weights (or of things parallel to them, such as `abstract_weights`) that `logits` reads,
        for a program that takes nothing else: an argument costs 0.4 us a call.
        """
        return tuple(weights[i] for i in self._head_indices)

    def head_logits(self, head: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """`logits` of what `head_weights` returned."""
        weights: list[Any] = list(self.abstract_weights)
        for index, array in zip(self._head_indices, head, strict=True):
            weights[index] = array
        return self.logits(weights, hidden)

    def init(self, seed: int = 0, device: jax.Device | None = None) -> Weights:
        """Random weights, made on the device (the default one if none is given), one small program for each
        distinct shape. Every product keeps its input's scale, so activations stay finite in any type and depth.
        """
        with jax.default_device(device):
            return tuple(
                _draw(init_key(seed, index), self.starts[index], leaf.shape, leaf.dtype)
                for index, leaf in enumerate(self.abstract_weights)
            )

    def module(self, weights: Sequence[jax.Array]) -> CausalLM:
        """The Flax module that holds these weights, for example to train it with `nnx.value_and_grad`."""
        state = jax.tree.unflatten(self._structure, list(weights))
        return cast(CausalLM, nnx.merge(self._graph, state))

    def flatten(self, module: Any) -> Weights:
        """The weights that a module holds (or an `nnx.State` of its parameters), in the order used here."""
        state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
        named = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
        if set(named) != set(self.parameter_names):
            wrong = sorted(set(named) ^ set(self.parameter_names))
            raise InvalidParameterError(f"module is not one of this model: parameters {wrong[:5]} differ.")
        arrays = tuple(jax.tree.leaves(named[name])[0] for name in self.parameter_names)
        for name, array, expected in zip(self.parameter_names, arrays, self.abstract_weights, strict=True):
            if array.shape != expected.shape:
                raise InvalidParameterError(f"{name} must have shape {expected.shape}, got {array.shape}.")
        return arrays


def build(config: ModelConfig, dtype: str = "auto") -> Model:
    """The model of a configuration. Allocates nothing.

    dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
    """
    return Model(config, resolve_dtype(dtype, config))


def init_key(seed: int, index: int) -> np.ndarray:
    """What `Model.init` draws its weight of that index from: uint32 [4]."""
    return np.array((seed % 2**32, index, 0, 0), np.uint32)


def draw(key: Any, start: Normal | Constant, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """A random weight. With XLA's own generator, which compiles in half the time of JAX's default one."""
    return start.draw(jax.random.wrap_key_data(key, impl="rbg"), shape, dtype)


_draw = partial(jax.jit, static_argnums=(1, 2, 3))(draw)
