"""Linear layers of which each expert has one: their values and their products in one object, as `linear.Linear` has.

rows of tokens and experts, sorted      gate_up             activation       down
x [A, hidden]                     --->  [A, 2, inner]  -->  [A, inner]  -->  [A, hidden], weighted
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jpaged.models.linear import LinearLayout
from jpaged.models.parameters import Normal, parameter
from jpaged.pallas_kernels import gated_grouped_product, weighted_grouped_product
from jpaged.pallas_kernels.grouped_product.api import tile_height
from jpaged.pallas_kernels.grouped_product.tiles import RowTiles


class Rows(NamedTuple):
    """The expert of each row: one of the two, as of `pallas_kernels.gated_grouped_product`, and None for the other.

    group_sizes: int32 [E], of rows that are sorted. groups: int32 [A], of rows in any order.
    tiles: of rows that are sorted, where they are known.
    row_indices: int32 [A], which row of x [T, inputs] each row is; None for all of x, in its order. Behind the last
        expert's rows they may be anything.
    """

    group_sizes: jax.Array | None
    groups: jax.Array | None
    tiles: RowTiles | None = None
    row_indices: jax.Array | None = None

    def of(self, x: jax.Array) -> "tuple[jax.Array, Rows]":
        """What a product reads of x [T, inputs], as rows of their own [A, inputs]."""
        if self.row_indices is None:
            return x, self
        return jnp.take(x, self.row_indices, axis=0, mode="clip"), self._replace(row_indices=None)


class GroupedProduct(Protocol):
    """Products of rows, each with the matrix of its expert."""

    def promoted(self, dtype: jnp.dtype) -> jnp.dtype:
        """What the product of rows in a type is in."""

    def gated(self, x: jax.Array, rows: Rows, *, activation: str, backend: str | None) -> jax.Array:
        """[A, inputs], or the rows of x that `rows` names -> activation(gate) * up, [A, inner], of outputs (2, inner).

        activation, backend: as of `pallas_kernels.gated_grouped_product`.
        """

    def multiply(self, x: jax.Array, rows: Rows, weights: jax.Array | None = None, *, backend: str | None) -> jax.Array:
        """[A, inputs], or the rows of x that `rows` names -> [A, all outputs], times weights.

        weights: float32 [A] or more, or None for ones. backend: as of `pallas_kernels.weighted_grouped_product`.
        """


@dataclass(frozen=True)
class PlainProduct:
    """A `GroupedProduct` of a kernel [E, inputs, *outputs]. Gradients pass with the backend "xla"."""

    kernel: jax.Array

    def promoted(self, dtype: jnp.dtype) -> jnp.dtype:
        return jnp.promote_types(dtype, self.kernel.dtype)

    def gated(self, x: jax.Array, rows: Rows, *, activation: str, backend: str | None) -> jax.Array:
        x, rows = rows.of(x)
        x, kernel = promote_dtype((x, self.kernel))  # who trains a model may keep some weights in float32
        sizes, groups, tiles, _ = rows
        return gated_grouped_product(
            x, kernel, sizes, groups=groups, tiles=tiles, activation=activation, backend=backend
        )

    def multiply(self, x: jax.Array, rows: Rows, weights: jax.Array | None = None, *, backend: str | None) -> jax.Array:
        x, rows = rows.of(x)
        x, kernel = promote_dtype((x, self.kernel))
        flat = kernel.reshape(*kernel.shape[:2], -1)
        sizes, groups, tiles, _ = rows
        weights = jnp.ones(x.shape[:1], jnp.float32) if weights is None else weights
        return weighted_grouped_product(x, flat, sizes, weights, groups=groups, tiles=tiles, backend=backend)


class GroupedLinear(nnx.Module):
    """y = x @ kernel[e], with the e of each row.

    Its kernel is [experts, *inputs, *outputs]. One that keeps its values in another form is a subclass, which
    `models.quantization` puts in its place, as of `Linear`.

    std: of the normal distribution that the kernel starts from.
    shard_axis: the axis of the kernel that tensor parallelism splits.
    """

    def __init__(
        self,
        experts: int,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        std: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        shard_axis: int,
    ) -> None:
        self.layout = LinearLayout(inputs, outputs, std, shard_axis, False, False, experts)
        self.kernel = parameter(rngs, Normal(std), (experts, *inputs, *outputs), dtype, shard_axis, suffix="")

    def tile_height(self, rows: int, backend: str | None) -> int:
        """Rows of a tile, at most, in which its products take so many sorted rows. backend: as of them."""
        return tile_height(rows, self.layout.experts, backend)

    def product(self) -> GroupedProduct:
        """Its products, where it is called."""
        return PlainProduct(self.kernel[...])
