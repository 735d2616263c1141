"""What a model's parameters say of themselves, as metadata of their `nnx.Param`: how they start, how tensor parallelism
splits them, and what they are called.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Normal:
    """Starts a parameter from a normal distribution."""

    std: float

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (jax.random.normal(key, shape, dtype) * jnp.asarray(self.std, dtype)).astype(dtype)


@dataclass(frozen=True)
class Constant:
    """Starts a parameter from one value."""

    value: float

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


Start = Normal | Constant


def parameter(
    rngs: nnx.Rngs,
    start: Start,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    shard_axis: int | None = None,
    *,
    kv_heads: bool = False,
    suffix: str | None = None,
) -> nnx.Param:
    """A parameter, and its metadata.

    start: how it is initialised.
    shard_axis: the axis that tensor parallelism splits; None gives every shard all of it.
    kv_heads: the parameter is laid out [..., kv_heads, group + 2, head_dim], as `Attend` takes it. Where there are more
        shards than key-value heads, each head is stored several times (`pieces.repeat_kv_heads`).
    suffix: its name in `Model.parameter_names` is its module's name with this appended: "" for the kernel of a
        `Linear` called "mlp.down", whose name is then "mlp.down". None: the module's name, a dot, and its own.
    """
    return nnx.Param(
        start.draw(rngs.params(), shape, dtype), start=start, shard_axis=shard_axis, kv_heads=kv_heads, suffix=suffix
    )
