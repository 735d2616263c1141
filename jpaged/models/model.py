"""A model as the executor holds it: pure functions of a flat tuple of arrays.

    config.json -> ModelConfig -> build() -> Model
                                              |  abstract_weights, parameter_names   (parallel tuples)
    checkpoint -> load()  ----.               |
    Model.init()  ------------+-> weights --> forward(weights, tokens, positions, attend) -> hidden
    Model.flatten(module) ----'               logits(weights, hidden)

The Flax module exists only while a function is traced; a compiled step sees arrays.
"""

import math
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.models.collectives import ALONE, Collectives
from jpaged.models.config import ModelConfig
from jpaged.models.family import Attend, CausalLM, Family
from jpaged.models.linear import LinearLayout
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.parameters import Start, rngs_of_shapes
from jpaged.models.quantization import SUFFIXES, quantize
from jpaged.models.registry import family_of, source_digest
from jpaged.models.residual import PLAIN_XLA, Kernels

Weights = tuple[jax.Array, ...]
T = TypeVar("T")

DTYPES = ("float32", "bfloat16", "float16")


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
    module_paths: where each is in the Flax module, such as ("layers", 0, "attention", "qkv", "kernel").
    abstract_weights: shape and type of each.
    pieces: the tensors of a Hugging Face checkpoint that is not quantized, and where they belong; none for a shard.
    quantized: the layouts of the `Linear`s that are quantized, by the names of their parameters.
    dequantized: the names of parameters that are quantized in the checkpoint only.
    tied_tensors: those that a checkpoint may hold beside them.
    base_prefix, derived_tensors, aliases: as of `Family`; derived_tensors with what is passed over.
    starts: for each weight what a random one is drawn from.
    shard_axes: for each weight the axis that tensor parallelism splits, or None.
    kv_slots: for each weight what `parameters.parameter` says of it; not 0 if it is laid out by key-value head.
    collectives: of the shards this is one of (`sharding.shard_of`); `config` and shapes are then the shard's.
    vocab_size: of the whole model.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        collectives: Collectives = ALONE,
        vocab_size: int | None = None,
        whole: "Model | None" = None,
    ) -> None:
        """whole: the model that this is a shard of."""
        family = family_of(config.architecture)
        self.config = config
        self.dtype = dtype
        self.collectives = collectives
        self.vocab_size = vocab_size or config.vocab_size
        tensors = tuple(family.tensors(config)) if whole is None else ()
        self.pieces: tuple[Piece, ...] = tuple(tensor for tensor in tensors if isinstance(tensor, Piece))
        self.tied_tensors: tuple[TiedTensor, ...] = tuple(t for t in tensors if isinstance(t, TiedTensor))
        self.quantized: dict[str, LinearLayout] = {}
        self.dequantized: frozenset[str] = frozenset()

        def make() -> CausalLM:
            module = family.module(config, dtype, rngs_of_shapes(), collectives)
            if config.quantization is not None:
                pieces = self.pieces if whole is None else whole.pieces
                found = quantize(module, config.quantization, pieces, rngs_of_shapes(), collectives.size)
                self.quantized, self.dequantized = found
            return module

        abstract = nnx.eval_shape(make)
        self._sources = (family, config, abstract)
        self._graph, state = nnx.split(abstract, nnx.Param)
        self._structure = jax.tree.structure(state)
        named = [(_name(path, variable), path, variable) for path, variable in nnx.to_flat_state(state)]
        leaves = jax.tree.leaves(state)
        # Sorted, so that the order depends on names alone, and not on how a Linear calls its arrays.
        self._places = sorted(range(len(named)), key=lambda place: named[place][0])
        ordered = [named[place] for place in self._places]
        self.parameter_names: tuple[str, ...] = tuple(".".join(map(str, name)) for name, _, _ in ordered)
        self.module_paths: tuple[tuple[Any, ...], ...] = tuple(path for _, path, _ in ordered)
        self.starts: tuple[Start, ...] = tuple(variable.start for _, _, variable in ordered)
        self.shard_axes: tuple[int | None, ...] = tuple(variable.shard_axis for _, _, variable in ordered)
        self.kv_slots: tuple[int, ...] = tuple(variable.kv_slots for _, _, variable in ordered)
        self.abstract_weights: tuple[jax.ShapeDtypeStruct, ...] = tuple(leaves[place] for place in self._places)
        self._weights_each = tuple(variable.weights_each for _, _, variable in ordered)
        if whole is None:
            _check_coverage(family, self.parameter_names, self.pieces, self.quantized)
        self.base_prefix: str = family.base_prefix
        self.derived_tensors: str = family.derived_tensors
        if (passed_over := getattr(family, "passed_over", None)) is not None:
            self.derived_tensors = "|".join(filter(None, (family.derived_tensors, passed_over(config))))
        aliases = getattr(family, "aliases", ())
        self.aliases: tuple[tuple[str, str], ...] = tuple(aliases(config) if callable(aliases) else aliases)

    def kv_head_copies(self, whole: "Model") -> tuple[int, ...]:
        """Of a shard: how often all shards together store each key-value head, for each weight; 1 for others.

        whole: the model that this is a shard of.
        """
        return tuple(
            1 if axis is None or not slots else part.shape[axis] * self.collectives.size // all_heads.shape[axis]
            for slots, axis, part, all_heads in zip(
                self.kv_slots, self.shard_axes, self.abstract_weights, whole.abstract_weights, strict=True
            )
        )

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(a.shape) * n for a, n in zip(self.abstract_weights, self._weights_each, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.abstract_weights)

    def forward(
        self,
        weights: Sequence[jax.Array],
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | list[Any],
        kernels: Kernels = PLAIN_XLA,
    ) -> jax.Array:
        """The model's body.

        tokens, positions: int32 [T]; the sequences' tokens flat, in any mixture that `attend` understands.
        attend: one for all layers, or a list of pytrees, one a layer, which is updated; see `run_layers`.
        kernels: what it may use beside XLA; by default nothing, so that gradients pass.
        Returns hidden states [T, hidden], after the final norm, in the model's type.
        """
        return self.module(weights)(tokens, positions, attend, kernels)

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
        return tuple(weights[i] for i in self.head_indices)

    @cached_property
    def head_indices(self) -> tuple[int, ...]:
        """Which of the weights `logits` reads."""
        hidden = jax.ShapeDtypeStruct((1, self.config.hidden_size), self.dtype)
        collectives = self.collectives
        axes = [] if collectives.axis is None else [(collectives.axis, collectives.size)]
        traced = jax.make_jaxpr(lambda *weights: self.module(weights[:-1]).logits(weights[-1]), axis_env=axes)(
            *self.abstract_weights, hidden
        )
        program: Any = getattr(traced, "jaxpr", traced)
        read = {id(variable) for equation in program.eqns for variable in equation.invars}
        return tuple(i for i, variable in enumerate(program.invars[:-1]) if id(variable) in read)

    def head_logits(self, head: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """`logits` of what `head_weights` returned."""
        weights: list[Any] = list(self.abstract_weights)
        for index, array in zip(self.head_indices, head, strict=True):
            weights[index] = array
        return self.logits(weights, hidden)

    @cached_property
    def source_digest(self) -> str:
        """Names the family's sources where it is from outside this package: what is compiled depends on them."""
        return source_digest(*self._sources)

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
        leaves: list[Any] = [None] * len(self._places)
        for place, weight in zip(self._places, weights, strict=True):
            leaves[place] = weight
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))

    def flatten(self, module: Any) -> Weights:
        """The weights that a module holds (or an `nnx.State` of its parameters), in the order used here."""
        state = module if isinstance(module, nnx.State) else nnx.state(module, nnx.Param)
        found = dict(nnx.to_flat_state(state))
        if set(found) != set(self.module_paths):
            wrong = sorted(".".join(map(str, path)) for path in set(found) ^ set(self.module_paths))
            raise InvalidParameterError(f"module is not one of this model: parameters {wrong[:5]} differ.")
        arrays = tuple(jax.tree.leaves(found[path])[0] for path in self.module_paths)
        for name, array, expected in zip(self.parameter_names, arrays, self.abstract_weights, strict=True):
            if array.shape != expected.shape:
                raise InvalidParameterError(f"{name} must have shape {expected.shape}, got {array.shape}.")
        return arrays


def build(config: ModelConfig, dtype: str = "auto") -> Model:
    """The model of a configuration. Allocates nothing.

    dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
    """
    return Model(config, resolve_dtype(dtype, config))


def _check_coverage(
    family: Family[Any], parameters: Sequence[str], pieces: Sequence[Piece], quantized: Collection[str]
) -> None:
    """That every parameter is filled from a checkpoint, and nothing else. Quantized layers' are by their scheme."""
    filled = {piece.parameter for piece in pieces}
    filled |= {f"{name}{suffix}" for name in quantized for suffix in SUFFIXES if f"{name}{suffix}" in parameters}
    unfilled, unknown = [name for name in parameters if name not in filled], sorted(filled - set(parameters))
    for names, what in ((unfilled, "fills nothing of"), (unknown, "fills, and the module has not,")):
        if names:
            raise ValueError(f"{type(family).__name__}.tensors {what} {', '.join(names[:5])} ({len(names)} in all).")


def _name(path: tuple[Any, ...], variable: Any) -> tuple[str | int, ...]:
    """A parameter's name, split at the dots."""
    if variable.suffix is None:
        return path
    *outer, owner, _ = path
    return (*outer, f"{owner}{variable.suffix}")


def init_key(seed: int, index: int) -> np.ndarray:
    """What `Model.init` draws its weight of that index from: uint32 [4]."""
    return np.array((seed % 2**32, index, 0, 0), np.uint32)


def draw(key: Any, start: Start, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """A random weight. With XLA's own generator, which compiles in half the time of JAX's default one."""
    return start.draw(jax.random.wrap_key_data(key, impl="rbg"), shape, dtype)


_draw = partial(jax.jit, static_argnums=(1, 2, 3))(draw)
