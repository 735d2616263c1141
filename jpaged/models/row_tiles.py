"""A forward pass whose rows are computed in tiles of one fixed size, so that a row's bits depend on that row alone.

Compilers choose how to compute a product or a sum by its shape, and what rounding comes of it differs in the last bits.
So nothing that is computed here has the shape of the batch. The model is traced once, for a tile of `tile_rows()` rows;
that trace is cut where attention mixes rows, and each segment is a loop over tiles:

    tokens, positions [T] --> |segment 0| --> q, k, v [T] --> attention --> |segment 1| --> q, k, v .. --> hidden [T]
                              loop over tiles                  `attend_rows`  loop over tiles

A loop is a border which compilers do not fuse across, so a segment is the same program wherever it stands: in decode
and mixed steps of any size, and in a trainer's forward pass. What the model computes of its weights alone stays outside
the loops. Models know nothing of this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.models.config import ModelConfig
from jpaged.models.model import Model
from jpaged.models.residual import Kernels
from jpaged.pallas_kernels import split_qkv
from jpaged.pallas_kernels.devices import default_device

_CPU_ROWS = 16
_GPU_ROWS = 128
"""As many rows as keep the tensor cores busy for as long as their weights take to arrive: an H200's 990 TFLOP/s in 16
bits and 4.8 TB/s meet at 206 rows (computed, not measured). Fewer would read weights in vain more often, more would pad
small batches."""


def tile_rows() -> int:
    """Rows of a tile on JAX's default device."""
    return _CPU_ROWS if default_device().platform == "cpu" else _GPU_ROWS


def check_rows_are_apart(config: ModelConfig) -> None:
    """Raises InvalidParameterError for models whose rows cannot be computed each by itself."""
    why = None
    if config.is_hybrid:
        why = "models with recurrent layers such as {}, whose states change in an order that steps decide"
    elif config.value_dim is not None:
        why = "{}, whose attention over latents has no form that computes each row by itself"
    if why is not None:
        raise InvalidParameterError(
            f"batch_invariant=True is not supported for {why.format(config.architecture)}; leave it out."
        )


def in_row_tiles(function: Callable[..., Any], live: jax.Array, *rows: jax.Array) -> Any:
    """function(*rows), computed tile by tile.

    function: of arrays whose first axis is `tile_rows()` long, to a tree of such arrays; it treats every row alike,
        whatever the others are.
    live: bool [T]; what comes out for other rows means nothing.
    rows: arrays [T, ...].
    Returns a tree of arrays [T, ...].
    """
    size, total = tile_rows(), live.shape[0]
    count = -(-total // size)
    rows = tuple(jnp.pad(x, [(0, count * size - total), *[(0, 0)] * (x.ndim - 1)]) for x in rows)
    tiles = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in rows]
    shapes = jax.eval_shape(function, *tiles)
    if wrong := [x.shape for x in jax.tree.leaves(shapes) if x.shape[:1] != (size,)]:
        raise UnsupportedModelError(
            f"batch_invariant=True needs a model that keeps tokens apart outside attention, but of {size} tokens it"
            f" makes an array of shape {wrong[0]}; leave it out."
        )

    def body(tile: jax.Array, out: Any) -> Any:
        begin = tile * size
        given = [lax.dynamic_slice_in_dim(x, begin, size) for x in rows]
        made = lax.optimization_barrier(function(*lax.optimization_barrier(given)))
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, begin, 0), out, made)

    out = jax.tree.map(lambda x: jnp.zeros((count * size, *x.shape[1:]), x.dtype), shapes)
    out = lax.fori_loop(0, _num_tiles(live, count, size), body, out)
    return jax.tree.map(lambda x: x[:total], out)


def _num_tiles(live: jax.Array, count: int, size: int) -> jax.Array | int:
    """Tiles up to the last live row, at most `count`.

    On a CPU the compiler does not know how many these are. It would make plain code of a loop that runs once, and fuse
    that with what stands around it. On a GPU it knows: otherwise it would ask the host before each turn. There barriers
    keep the code apart until everything is fused.
    """
    if default_device().platform != "cpu":
        return count
    last = jnp.max(jnp.where(live, jnp.arange(live.shape[0], dtype=jnp.int32) + 1, 0))
    return (last + size - 1) // size


@dataclass(frozen=True)
class Attention:
    """What a layer asks of attention; arguments as of `family.Attend`, of all rows. q, k, v: rotated and normed."""

    layer: int
    q: jax.Array
    k: jax.Array
    v: jax.Array
    features: dict[str, Any]


def forward_in_row_tiles(
    model: Model,
    weights: Sequence[jax.Array],
    tokens: jax.Array,
    positions: jax.Array,
    live: jax.Array,
    attend_rows: Callable[[Attention], jax.Array],
    backend: str | None = "xla",
) -> jax.Array:
    """`Model.forward`, row by row.

    tokens, positions: int32 [T]. live: bool [T], False for padding, whose hidden states mean nothing.
    attend_rows: called once a layer, in order; returns [T, heads, head_dim], each row of which must depend on its own
        query and on the keys and values that it sees alone.
    backend: as of `Kernels`.
    Returns hidden states [T, hidden].

    Raises:
        UnsupportedModelError: the model mixes tokens outside attention.
    """
    tile = [jax.ShapeDtypeStruct((tile_rows(),), dtype) for dtype in (tokens.dtype, positions.dtype, bool)]

    def of_tile(weights: Sequence[jax.Array], tokens: jax.Array, positions: jax.Array, live: jax.Array) -> jax.Array:
        return model.forward(weights, tokens, positions, _cut, Kernels(None, backend, live))

    traced = jax.make_jaxpr(of_tile)(tuple(weights), *tile)
    segments = _Segments(traced, len(tuple(weights)))
    return segments.run(tuple(weights), (tokens, positions, live), live, attend_rows)


_CUT = core.Primitive("attend")
"""Marks where the trace of a tile is cut: (q, k, v, *named arrays) -> what attention gives."""


@_CUT.def_abstract_eval
def _shape_of_attention(q: Any, *_: Any, **__: Any) -> Any:
    return q


def _cut(
    qkv: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    norm_eps: float,
    **features: Any,
) -> jax.Array:
    """The `Attend` that the model is traced with."""
    q, k, v = split_qkv(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps)
    arrays = {name: value for name, value in features.items() if isinstance(value, jax.Array)}
    plain = tuple((name, value) for name, value in features.items() if name not in arrays)
    return _CUT.bind(q, k, v, *arrays.values(), names=tuple(arrays), plain=plain)


class _Segments:
    """The trace of a tile, cut at its calls of attention."""

    def __init__(self, traced: core.ClosedJaxpr, num_weights: int) -> None:
        jaxpr: Any = getattr(traced, "jaxpr", traced)  # JAX 0.12 has one type for both
        self._constants = list(zip(jaxpr.constvars, traced.consts, strict=True))
        self._weights, self._inputs = jaxpr.invars[:num_weights], jaxpr.invars[num_weights:]
        self._result = jaxpr.outvars[0]
        self._shared: list[Any] = []  # equations of weights and constants alone
        self._parts: list[list[Any]] = [[]]
        self._cuts: list[Any] = []
        of_rows = set(self._inputs)
        for equation in jaxpr.eqns:
            if equation.primitive is not _CUT and of_rows.isdisjoint(_read_by(equation)):
                self._shared.append(equation)
                continue
            of_rows.update(equation.outvars)
            if equation.primitive is _CUT:
                self._cuts.append(equation)
                self._parts.append([])
            else:
                self._parts[-1].append(equation)

    def run(
        self,
        weights: Sequence[jax.Array],
        inputs: Sequence[jax.Array],
        live: jax.Array,
        attend_rows: Callable[[Attention], jax.Array],
    ) -> jax.Array:
        """The result of all rows; the arguments are those of `forward_in_row_tiles`."""
        shared = dict(self._constants) | dict(zip(self._weights, weights, strict=True))
        _evaluate(self._shared, shared)
        rows: dict[Any, jax.Array] = dict(zip(self._inputs, inputs, strict=True))
        for number, part in enumerate(self._parts):
            # Lists in the order of the trace: that of a set differs from process to process, and so would programs.
            given = [variable for variable in rows if variable in _read_by(*part)]
            wanted = _read_by(*self._cuts[number:], *chain(*self._parts[number + 1 :])) | {self._result}
            left = [variable for equation in part for variable in equation.outvars if variable in wanted]
            of_tile = partial(_run_part, part, shared, given, left)
            made = in_row_tiles(of_tile, live, *(rows[variable] for variable in given))
            rows = {variable: value for variable, value in rows.items() if variable in wanted}
            rows |= dict(zip(left, made, strict=True))
            for cut in self._cuts[number : number + 1]:
                known = shared | rows
                q, k, v, *arrays = (known[variable] for variable in cut.invars)
                features = dict(cut.params["plain"]) | dict(zip(cut.params["names"], arrays, strict=True))
                rows[cut.outvars[0]] = attend_rows(Attention(number, q, k, v, features))
        return rows[self._result]


def _read_by(*equations: Any) -> set[Any]:
    """The variables that equations read."""
    return {x for equation in equations for x in equation.invars if not isinstance(x, core.Literal)}


def _run_part(
    part: Sequence[Any], shared: Mapping[Any, Any], given: Sequence[Any], left: Sequence[Any], *values: jax.Array
) -> list[jax.Array]:
    """What a part leaves of one tile, in the order of `left`.

    given: the variables that `values` are of. shared: values that are the same for all tiles.
    """
    known = dict(shared) | dict(zip(given, values, strict=True))
    _evaluate(part, known)
    return [known[variable] for variable in left]


def _evaluate(equations: Sequence[Any], known: dict[Any, Any]) -> None:
    """Adds what equations compute to the values of variables."""
    for equation in equations:
        params = equation.primitive.get_bind_params(equation.params)
        values = [x.val if isinstance(x, core.Literal) else known[x] for x in equation.invars]
        made = equation.primitive.bind(*values, **params)
        known.update(zip(equation.outvars, made if equation.primitive.multiple_results else [made], strict=True))
