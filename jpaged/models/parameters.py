"""What a model's parameters say of themselves, as metadata of their `nnx.Param`: how they start, how tensor parallelism
splits them, and what they are called.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Normal:
    """Starts a parameter from a normal distribution.

    Numbers are drawn in float32 and rounded: drawn in bfloat16 they have 128 values, whose mean is not 0 but -0.012
    standard deviations. Products with inputs that are positive on average would then add the same to all outputs, by
    which the tokens of a deep random model become alike, and a mixture sends them all to few experts.
    """

    std: float

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * self.std).astype(dtype)


@dataclass(frozen=True)
class Constant:
    """Starts a parameter from one value."""

    value: float

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


@dataclass(frozen=True)
class Bits:
    """Starts a parameter of 8-bit integers from random bits.

    halves_around_8: each has two numbers of four bits, which are 8 on average, since 0 becomes 8. Less 8 they are
    weights, and those of another average would add the same to all outputs: a mixture then sends all tokens to few
    experts.
    """

    halves_around_8: bool = False

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        bits = jax.random.bits(key, shape, jnp.uint8)
        if self.halves_around_8:
            lower, upper = bits & 15, bits >> 4
            bits = jnp.where(lower == 0, 8, lower) | jnp.where(upper == 0, 8, upper) << 4
        return jax.lax.bitcast_convert_type(bits, dtype)


@dataclass(frozen=True)
class Ascending:
    """Starts a vector, or each row of several, from 0, 1, 2, ..."""

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=dtype), shape)


Start = Normal | Constant | Bits | Ascending


class _OneKey(nnx.RngStream):
    """Gives the same key every time."""

    def __call__(self) -> jax.Array:
        return self.key[...]


def rngs_of_shapes() -> nnx.Rngs:
    """For modules of which only shapes are asked (`nnx.eval_shape`): to count the keys that a large model draws would
    take a second for every 20 layers.
    """
    rngs = nnx.Rngs(0)
    vars(rngs)["default"] = _OneKey(0, tag="default")
    return rngs


def parameter(
    rngs: nnx.Rngs,
    start: Start,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    shard_axis: int | None = None,
    *,
    kv_slots: int = 0,
    suffix: str | None = None,
    weights_each: int = 1,
    of_linear: bool = False,
) -> nnx.Param:
    """A parameter, and its metadata.

    start: how it is initialised.
    shard_axis: the axis that tensor parallelism splits; None gives every shard all of it.
    kv_slots: the parameter is laid out [..., kv_heads, group + kv_slots, head_dim, ...], as `Attend` takes it with 2,
        and split along the key-value heads. Where there are more shards than these, each is stored several times
        (`pieces.repeat_kv_heads`). 0 for any other parameter.
    suffix: its name in `Model.parameter_names` is its module's name with this appended: "" for the kernel of a
        `Linear` called "mlp.down", whose name is then "mlp.down". None: the module's name, a dot, and its own.
    weights_each: how many of a model's parameters an element stands for: two of 4 bits, none for a scale.
    of_linear: checkpoints have it as the weight of a linear layer, which may be quantized there, though no `Linear`
        keeps it.
    """
    return nnx.Param(
        start.draw(rngs.params(), shape, dtype),
        start=start,
        shard_axis=shard_axis,
        kv_slots=kv_slots,
        suffix=suffix,
        weights_each=weights_each,
        of_linear=of_linear,
    )
