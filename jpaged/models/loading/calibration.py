"""Quantizes layer after layer by what each one's inputs are, of texts that the layers before it, quantized, have read.
On the way it finds how large the keys and values of each layer are.

    tokens --embedding--> rows of hidden states, on the host
    a layer:  weights --> device      run over all rows     --> hessian of the inputs of each `Linear`
              GPTQ, tensor by tensor  run over them again   --> rows of the next layer

The device holds one layer with its hessians. The host holds the hidden states, one tensor that is read, and a layer's
values, a byte each, until they are written.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError, shown
from jpaged.models.dense import dense_causal_attend
from jpaged.models.linear import Linear
from jpaged.models.loading.checkpoint import Tensors, match, read_each
from jpaged.models.loading.kv_calibration import measured_attend, scales_of
from jpaged.models.loading.safetensors_file import StoredTensor
from jpaged.models.model import Model
from jpaged.models.quantization.gptq import gptq
from jpaged.models.residual import Stream

ROW_TOKENS = 2048
"""Tokens that are run at a time; texts are cut to so many, and shorter ones share a row without seeing each other."""
MOST_ROWS = 128
"""Further texts are left out."""


class _Row(NamedTuple):
    """Texts side by side. x: [T, hidden], of the layer that comes. shared: what all layers read. texts: int32 [T], the
    number of each token's text; -1 for padding."""

    x: np.ndarray
    shared: Any
    texts: np.ndarray


class Calibration:
    """Gives the 4-bit tensors of one layer after the other.

    model: not quantized, of one device. stored: its checkpoint's tensors.
    quantized: names of the parameters that are to be; none where keys and values alone are looked at.
    texts: token ids of each.
    group, damping: as of `gptq`.

    Raises:
        InvalidParameterError: there is no text, or a token that the model has not.
        UnsupportedModelError: the model has no list of layers.
    """

    def __init__(
        self,
        model: Model,
        stored: dict[str, StoredTensor],
        quantized: Collection[str],
        texts: Sequence[Sequence[int]],
        *,
        group: int,
        damping: float,
    ) -> None:
        self._model, self._group, self._damping = model, group, damping
        self._matched = match(model, stored)
        self._quantized = frozenset(quantized)
        if not isinstance(getattr(self._with({}), "layers", None), nnx.List):
            raise UnsupportedModelError(
                f"{model.config.architecture} has no list of layers, which calibration runs one by one; leave it out."
            )
        rows = list(_packed(texts, min(ROW_TOKENS, model.config.max_position_embeddings), model.vocab_size))
        self._rows = list(self._embedded(rows))
        self.kv_scales: list[tuple[float, float]] = []  # of the layers that were asked for

    def layer(self, number: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Of each quantized tensor of a layer, by the family's name: values int8 [outputs, inputs] and scales. Layers
        are asked for in their order.

        Raises:
            CheckpointError: a tensor cannot be read, or quantized.
        """
        prefix = f"layers.{number}."
        weights = self._read(prefix)
        hessians = self._observe(number, weights) if self._quantized else {}
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for index, tensors in self._matched.items():
            piece = self._model.pieces[index]
            if not piece.parameter.startswith(prefix) or piece.parameter not in self._quantized:
                continue
            if piece.tensor not in found:
                (tensor,) = tensors.values()
                weight, hessian = jnp.asarray(tensor.read()), hessians[piece.parameter]
                kept = jnp.float32 if weight.dtype == jnp.float64 else weight.dtype
                try:
                    made = gptq(weight, hessian, group=self._group, scale_dtype=kept, damping=self._damping)
                except ValueError as error:
                    raise CheckpointError(
                        f"{tensor.path}: tensor {tensor.name!r} {error}; download or write the checkpoint again."
                    ) from None
                found[piece.tensor] = np.asarray(made[0]), np.asarray(made[1])
            values, scales = found[piece.tensor]
            whole = values.astype(np.float32) * np.repeat(scales.astype(np.float32), self._group, axis=1)
            weights[piece.parameter] = piece.place(weights[piece.parameter], whole)
        self._advance(number, weights)
        return found

    def _read(self, prefix: str, *, outside: bool = False) -> dict[str, jax.Array]:
        """The parameters whose names begin with it; or those of no layer."""
        shapes = dict(zip(self._model.parameter_names, self._model.abstract_weights, strict=True))
        wanted: dict[int, Tensors] = {
            index: tensors
            for index, tensors in self._matched.items()
            if self._model.pieces[index].parameter.startswith(prefix) != outside
        }
        found: dict[str, jax.Array] = {}
        for piece, array, _ in read_each(self._model, wanted, None):
            leaf = shapes[piece.parameter]
            target = found.pop(piece.parameter, None)
            target = jnp.zeros(leaf.shape, leaf.dtype) if target is None else target
            found[piece.parameter] = piece.place(target, array)
        return found

    def _with(self, weights: Mapping[str, jax.Array]) -> Any:
        """The module with these parameters; others have shapes alone."""
        named = zip(self._model.parameter_names, self._model.abstract_weights, strict=True)
        known: Mapping[str, Any] = weights
        return self._model.module([known.get(name, leaf) for name, leaf in named])

    def _embedded(self, rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Iterator[_Row]:
        module = self._with(self._read("layers.", outside=True))
        module.layers = nnx.List([_Stop()])
        for tokens, positions, texts in rows:
            try:
                module(jnp.asarray(tokens), jnp.asarray(positions), dense_causal_attend)
            except _Reached as reached:
                yield _Row(np.asarray(reached.x), jax.tree.map(np.asarray, reached.shared), texts)

    def _observe(self, number: int, weights: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The hessians, by the names of the parameters."""
        layer, total = self._with(weights).layers[number], None
        for path, node in list(nnx.iter_graph(layer)):
            name = ".".join(map(str, ("layers", number, *path)))
            if type(node) is Linear and name in self._quantized:
                owner: Any = layer
                for part in path[:-1]:
                    owner = owner[part] if isinstance(part, int) else getattr(owner, str(part))
                setattr(owner, str(path[-1]), _Recorder(node, name.removeprefix(f"layers.{number}.")))
        graph, state = nnx.split(layer)
        for row in self._rows:
            _, found, _ = _run(graph, state, row.x, row.shared, row.texts, self._model.collectives)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        assert total is not None
        return {f"layers.{number}.{name}": hessian for name, hessian in total.items()}

    def _advance(self, number: int, weights: Mapping[str, jax.Array]) -> None:
        graph, state = nnx.split(self._with(weights).layers[number])
        largest = np.zeros(2, np.float32)
        for i, row in enumerate(self._rows):
            x, _, found = _run(graph, state, row.x, row.shared, row.texts, self._model.collectives)
            self._rows[i] = row._replace(x=np.asarray(x))
            largest = np.maximum(largest, np.asarray(found))
        self.kv_scales.append(scales_of(largest, number))


_recorded: ContextVar[dict[str, jax.Array] | None] = ContextVar("recorded", default=None)
_counts: ContextVar[jax.Array | None] = ContextVar("counts", default=None)


@partial(jax.jit, static_argnums=(0, 5))  # one program for layers of equal structure
def _run(
    graph: Any, state: Any, x: jax.Array, shared: Any, texts: jax.Array, collectives: Any
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """What a layer makes of x, the hessians that its recorders found, and the largest magnitudes of its keys and of its
    values."""
    found: dict[str, jax.Array] = {}
    largest: list[jax.Array] = []
    tokens = _recorded.set(found), _counts.set(texts >= 0)
    try:
        stream = Stream(x, None, None, collectives, "xla")
        nnx.merge(graph, state)(stream, *shared, partial(measured_attend, largest, segment_ids=texts))
    finally:
        _recorded.reset(tokens[0])
        _counts.reset(tokens[1])
    return stream.value(), found, jnp.max(jnp.stack(largest), axis=0) if largest else jnp.zeros(2)


class _Recorder(Linear):
    """A `Linear` that adds the outer products of its inputs to what `_run` records."""

    def __init__(self, plain: Linear, name: str) -> None:
        self.layout, self.dtype, self.name = plain.layout, plain.dtype, name
        self.kernel, self.bias = plain.kernel, plain.bias

    def _gated(self, x: jax.Array, activation: str, backend: str | None) -> jax.Array:
        self._record(x)
        return super()._gated(x, activation, backend)

    def _product(self, x: jax.Array, dtype: jnp.dtype | None, backend: str | None) -> jax.Array:
        self._record(x)
        return super()._product(x, dtype, backend)

    def _record(self, x: jax.Array) -> None:
        found, counts = _recorded.get(), _counts.get()
        assert found is not None
        assert counts is not None
        flat = jnp.where(counts[:, None], x.reshape(counts.size, -1), 0).astype(jnp.float32)
        product = jnp.dot(flat.T, flat, precision=jax.lax.Precision.HIGHEST)
        found[self.name] = found[self.name] + product if self.name in found else product


class _Reached(Exception):
    """The first layer is reached. x: the stream. shared: what layers read besides."""

    def __init__(self, x: jax.Array, shared: Any) -> None:
        super().__init__()
        self.x, self.shared = x, shared


class _Stop(nnx.Module):
    """Stands in the layers' place."""

    def __call__(self, stream: Stream, *arguments: Any) -> None:
        raise _Reached(stream.value(), arguments[:-1])


def _packed(
    texts: Sequence[Sequence[int]], length: int, vocab_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, positions and numbers of texts, int32 [length] each, of rows that texts fill one after the other."""
    kept = [found[:length] for found in (_tokens(text, vocab_size) for text in texts) if found.size]
    if not kept:
        raise InvalidParameterError("calibration must have texts with tokens, and has none.")
    rows: list[list[np.ndarray]] = []
    room = 0
    for text in kept:
        if text.size > room:
            if len(rows) == MOST_ROWS:
                break
            rows.append([])
            room = length
        rows[-1].append(text)
        room -= text.size
    for row in rows:
        fill = length - sum(text.size for text in row)
        positions = [np.arange(text.size, dtype=np.int32) for text in row]
        numbers = [np.full(text.size, i, np.int32) for i, text in enumerate(row)]
        empty = np.zeros(fill, np.int32)
        yield np.concatenate([*row, empty]), np.concatenate([*positions, empty]), np.concatenate([*numbers, empty - 1])


def _tokens(text: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32 [T]."""
    if not isinstance(text, str) and isinstance(text, Sequence | np.ndarray):
        for token in text:
            if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise InvalidParameterError(
                    f"calibration has the token {shown(token)}, which is not one of the model's {vocab_size}."
                )
        return np.asarray(text, np.int32)
    raise InvalidParameterError(f"calibration must be lists of token ids, one a text, and has {shown(text)}.")
