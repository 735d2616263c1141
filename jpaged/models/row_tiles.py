"""A forward pass whose rows' bits depend on that row alone.

Compilers choose how to compute a product or a sum by its shape, and what rounding comes of it differs in the last bits.
So they are given nothing that rounds and has the shape of the batch. The model is traced once, for a tile of a fixed
number of rows, and the trace is cut where attention mixes rows and where rows are multiplied with weights:

    tokens, positions [T] --> |segment| --> product --> |segment| --> attention --> product --> |segment| .. --> hidden
                               tiles       all rows      tiles       `attend_rows`  all rows     tiles

    product   rows [T, in] with weights [in, out], by a kernel that reads weights once and whose bits for a row depend
              neither on how many there are nor on where it stands (`pallas_kernels.invariant_product`)
    segment   everything else, tile by tile, behind borders which compilers do not fuse across: the same program
              wherever it stands, in decode and mixed steps of any size and in a trainer's forward pass

Where there is no such kernel (on a CPU, in float32, for quantized weights and experts) products stay in the segments.
What the model computes of its weights alone stays outside the loops. Models know nothing of this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.models.config import ModelConfig
from jpaged.models.model import Model
from jpaged.models.residual import Kernels
from jpaged.pallas_kernels import invariant_product, invariant_product_backend, split_qkv
from jpaged.pallas_kernels.devices import default_device
from jpaged.pallas_kernels.invariant_product.api import TILE_ROWS
from jpaged.pallas_kernels.registry import REFERENCE

_CPU_ROWS = 16
_WIDE_GPU_ROWS = 512
"""Of tiles without products: padding costs them next to nothing."""

_WIDE_TILES_APART = 4
"""Up to so many tiles without products stand one after another, in one CUDA graph with all else; more are turns of a
loop. The host starts each turn, which takes longer than the tile itself, but the code of many tiles takes long to
compile."""


def tile_rows() -> int:
    """Rows of a tile with products in it, on JAX's default device."""
    return _CPU_ROWS if default_device().platform == "cpu" else TILE_ROWS


def _wide_tile_rows() -> int:
    """Rows of a tile without products."""
    return _CPU_ROWS if default_device().platform == "cpu" else _WIDE_GPU_ROWS


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


def in_row_tiles(
    function: Callable[..., Any], live: jax.Array, *rows: jax.Array, size: int | None = None, apart: int = 0
) -> Any:
    """function(*rows), computed tile by tile.

    function: of arrays whose first axis is `size` long, to a tree of such arrays; it treats every row alike,
        whatever the others are.
    live: bool [T]; what comes out for other rows means nothing.
    rows: arrays [T, ...].
    size: rows of a tile, `tile_rows()` if None. Equal bits need equal sizes.
    apart: on a GPU so many tiles stand one after another; of more, and on a CPU, each is a turn of a loop.
    Returns a tree of arrays [T, ...].
    """
    size, total = size or tile_rows(), live.shape[0]
    count = -(-total // size)
    rows = tuple(jnp.pad(x, [(0, count * size - total), *[(0, 0)] * (x.ndim - 1)]) for x in rows)
    tiles = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in rows]
    shapes = jax.eval_shape(function, *tiles)
    if wrong := [x.shape for x in jax.tree.leaves(shapes) if x.shape[:1] != (size,)]:
        raise UnsupportedModelError(
            f"batch_invariant=True needs a model that keeps tokens apart outside attention, but of {size} tokens it"
            f" makes an array of shape {wrong[0]}; leave it out."
        )

    def compute(given: Sequence[jax.Array]) -> Any:
        return lax.optimization_barrier(function(*lax.optimization_barrier(given)))

    if 0 < count <= apart and default_device().platform != "cpu":
        given = [[lax.slice_in_dim(x, tile * size, (tile + 1) * size) for x in rows] for tile in range(count)]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[:total], *map(compute, given))

    def body(tile: jax.Array, out: Any) -> Any:
        begin = tile * size
        made = compute([lax.dynamic_slice_in_dim(x, begin, size) for x in rows])
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

    def of_tile(weights: Sequence[jax.Array], rows: Sequence[jax.Array], backend: str | None) -> jax.Array:
        tokens, positions, live = rows
        return model.forward(weights, tokens, positions, _cut, Kernels(None, backend, live))

    weights, rows, segments = tuple(weights), (tokens, positions, live), None
    if not model.quantized and _has_kernel((8, 8), model.dtype, backend):
        # Products as XLA would have them, one by one, so that they can be cut out. Those of experts cannot.
        segments = _Segments(partial(of_tile, backend=REFERENCE), weights, rows, _wide_tile_rows(), backend)
    if segments is None or not segments.are_cheap:
        segments = _Segments(partial(of_tile, backend=backend), weights, rows, tile_rows(), backend)
    return segments.run(weights, rows, live, attend_rows)


def with_weights(
    function: Callable[[Sequence[jax.Array], jax.Array], jax.Array],
    weights: Sequence[jax.Array],
    live: jax.Array,
    rows: jax.Array,
    backend: str | None = None,
) -> jax.Array:
    """function(weights, rows), row by row: [T, ...] of rows [T, ...], for what asks for no attention, such as a head.

    live, backend: as of `forward_in_row_tiles`.
    """
    weights = tuple(weights)
    segments = _Segments(lambda weights, rows: function(weights, *rows), weights, (rows,), tile_rows(), backend)
    return segments.run(weights, (rows,), live, _refuse_attention)


def _refuse_attention(asked: "Attention") -> jax.Array:
    raise UnsupportedModelError("batch_invariant=True: a model's head must not attend; leave it out.")


def _has_kernel(weight: tuple[int, int], dtype: Any, backend: str | None, outputs_first: bool = False) -> bool:
    """Whether a kernel multiplies all rows at once with a matrix of this shape and type."""
    x = jax.ShapeDtypeStruct((1, weight[1 if outputs_first else 0]), dtype)
    return invariant_product_backend(x, jax.ShapeDtypeStruct(weight, dtype), backend) is not None


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


@dataclass(frozen=True)
class _Product:
    """A `dot_general` of rows with a weight, as a product of matrices.

    lhs_order: axes of the rows in the order in which the weight has them, the rows' own first.
    outputs_first: as of `invariant_product`. outputs: the axes that they are. dtype: of the result.
    """

    lhs_order: tuple[int, ...]
    outputs_first: bool
    outputs: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, equation: Any) -> "_Product | None":
        """What an equation is, whose right side no rows are in; None if it is no such product."""
        if equation.primitive is not lax.dot_general_p:
            return None
        lhs, rhs = (x.aval for x in equation.invars)
        (lhs_axes, rhs_axes), (lhs_batch, _) = equation.params["dimension_numbers"]
        if lhs_batch or sorted(lhs_axes) != list(range(1, lhs.ndim)) or lhs.dtype != rhs.dtype:
            return None
        count = len(rhs_axes)
        outputs_first = sorted(rhs_axes) == list(range(rhs.ndim - count, rhs.ndim)) and count < rhs.ndim
        if not outputs_first and sorted(rhs_axes) != list(range(count)):
            return None  # the weight would have to be copied
        pairs = sorted(zip(rhs_axes, lhs_axes, strict=True))
        outputs = rhs.shape[: rhs.ndim - count] if outputs_first else rhs.shape[count:]
        dtype = equation.outvars[0].aval.dtype
        if dtype not in (lhs.dtype, jnp.float32):
            return None
        return cls((0, *(axis for _, axis in pairs)), outputs_first, outputs, dtype)

    def matrix(self, weight: Any) -> tuple[int, int]:
        """The shape of the weight as a matrix."""
        outputs = prod(self.outputs)
        inputs = weight.size // max(outputs, 1)
        return (outputs, inputs) if self.outputs_first else (inputs, outputs)

    def __call__(self, rows: jax.Array, weight: jax.Array, backend: str | None) -> jax.Array:
        """[T, *inputs] -> [T, *outputs]."""
        x = rows.transpose(self.lhs_order).reshape(rows.shape[0], -1)
        w = weight.reshape(self.matrix(weight))
        y = invariant_product(x, w, outputs_first=self.outputs_first, dtype=self.dtype, backend=backend)
        return y.reshape(rows.shape[0], *self.outputs)


class _Segments:
    """The trace of a tile of `size` rows, cut at its calls of attention and at its products with weights.

    are_cheap: whether no product is left in the segments, nor a call of a kernel, which may be one.
    """

    def __init__(
        self,
        of_tile: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array],
        weights: Sequence[jax.Array],
        rows: Sequence[jax.Array],
        size: int,
        backend: str | None,
    ) -> None:
        """of_tile: of weights and rows, of which `size` make a tile. backend: of products."""
        tile = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in rows]
        traced = jax.make_jaxpr(of_tile)(weights, tile)
        jaxpr: Any = getattr(traced, "jaxpr", traced)  # JAX 0.12 has one type for both
        self._size, self._backend = size, backend
        self._constants = list(zip(jaxpr.constvars, traced.consts, strict=True))
        self._weights, self._inputs = jaxpr.invars[: len(weights)], jaxpr.invars[len(weights) :]
        self._result = jaxpr.outvars[0]
        self._shared: list[Any] = []  # equations of weights and constants alone
        self._parts: list[list[Any]] = [[]]
        self._cuts: list[tuple[Any, _Product | None]] = []  # behind each part but the last; None: attention
        of_rows = set(self._inputs)
        for equation in jaxpr.eqns:
            if equation.primitive is not _CUT and of_rows.isdisjoint(_read_by(equation)):
                self._shared.append(equation)
                continue
            product = None if equation.primitive is _CUT else self._product(equation, of_rows)
            of_rows.update(equation.outvars)
            if equation.primitive is _CUT or product is not None:
                self._cuts.append((equation, product))
                self._parts.append([])
            else:
                self._parts[-1].append(equation)
        self.are_cheap = not any(_is_costly(equation) for part in self._parts for equation in part)

    def _product(self, equation: Any, of_rows: set[Any]) -> _Product | None:
        """What is computed for all rows at once; None for all else."""
        product = _Product.of(equation)
        if product is None or any(isinstance(x, core.Literal) for x in equation.invars):
            return None
        rows, weight = equation.invars
        matrix = product.matrix(weight.aval)
        has_kernel = 0 not in matrix and _has_kernel(matrix, rows.aval.dtype, self._backend, product.outputs_first)
        return product if has_kernel and weight not in of_rows else None

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
        attended = 0
        for number, part in enumerate(self._parts):
            # Lists in the order of the trace: that of a set differs from process to process, and so would programs.
            given = [variable for variable in rows if variable in _read_by(*part)]
            cuts = (cut for cut, _ in self._cuts[number:])
            wanted = _read_by(*cuts, *chain(*self._parts[number + 1 :])) | {self._result}
            left = [variable for equation in part for variable in equation.outvars if variable in wanted]
            made = self._run(part, shared, given, left, live, [rows[variable] for variable in given])
            rows = {variable: value for variable, value in rows.items() if variable in wanted}
            rows |= dict(zip(left, made, strict=True))
            for cut, product in self._cuts[number : number + 1]:
                known = shared | rows
                if product is not None:
                    x, weight = (known[variable] for variable in cut.invars)
                    rows[cut.outvars[0]] = product(x, weight, self._backend)
                    continue
                q, k, v, *arrays = (known[variable] for variable in cut.invars)
                features = dict(cut.params["plain"]) | dict(zip(cut.params["names"], arrays, strict=True))
                rows[cut.outvars[0]] = attend_rows(Attention(attended, q, k, v, features))
                attended += 1
        return rows[self._result]

    def _run(
        self,
        part: Sequence[Any],
        shared: Mapping[Any, Any],
        given: Sequence[Any],
        left: Sequence[Any],
        live: jax.Array,
        values: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """What a part leaves of all rows, in the order of `left`."""
        if not left:
            return []
        made: list[jax.Array] = in_row_tiles(
            partial(_run_part, part, shared, given, left),
            live,
            *values,
            size=self._size,
            apart=_WIDE_TILES_APART if self.are_cheap else 0,
        )
        return made


_KERNELS = {"pallas_call", "core_map", "mpmd_map", "run_state", "triton_kernel_call", "custom_vmap_call", "ffi_call"}
_DEAR = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}


def _is_costly(equation: Any) -> bool:
    """Whether an equation multiplies with weights, or calls what may."""
    if equation.primitive.name in _KERNELS | _DEAR:
        return True
    values = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    programs = [getattr(x, "jaxpr", x) for x in values]
    return any(_is_costly(one) for program in programs for one in getattr(program, "eqns", ()))


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
