"""A product with weights of 4 bits, in groups of inputs that share a scale (W4A16).

    x [M, K]    w uint8 [N, K / 2]    scale [N, K / group]    zero uint8 [N, K / group], or 8 throughout

    form      weight
    "int4"    (w - zero) * scale          scale float32
    "nvfp4"   w * (scale / outer)         scale e4m3, of 16 inputs; outer float32 [N]; w is one of +-0, 0.5, 1, 1.5, 2,
                                          3, 4, 6 (E2M1). Where outer is 0, so is the weight
    out [M, N] = x @ weight.T

Two values share a byte, of the two halves of a group ("nvfp4": of two groups), so that either half lies side by side
like the inputs it meets:

    byte j of 32 inputs      bits 0-3: value j      bits 4-7: value j + 16
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.int4_product.operands import Operands
from jpaged.pallas_kernels.registry import Op, is_hopper

OP = Op("int4_product", __package__, also={"triton": is_hopper})

Form = Literal["int4", "nvfp4"]
"""What a weight is, see above."""

NV_GROUP, NV_PACK = 16, 32
"""Inputs that share a scale in NVFP4, and those that share bytes."""

MIDDLE = 8
"""What is taken from values that have no zero points."""


def int4_product(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    group: int,
    form: Form = "int4",
    outer: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    backend: str | None = None,
) -> jax.Array:
    """x @ weight.T. Sums are float32; "xla" rounds weights to x's type first.

    Args:
        x: floats [M, K].
        w: uint8 [N, K / 2], see above.
        scale: float32 [N, K / group], of "nvfp4" float8_e4m3fn.
        zero: uint8 [N, K / group], with "int4" alone; None for 8.
        group: inputs that share a scale; even, and a divisor of K; 16 of "nvfp4", whose K 32 divides.
        form: see `Form`.
        outer: float32 [N], of "nvfp4" alone.
        dtype, backend: as of `fp8_product`.
    Returns:
        [M, N].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_floats("x", x, "M, K")
    inputs = x.shape[1]
    if form not in get_args(Form):
        raise ValueError(f"form must be one of {', '.join(get_args(Form))}, got {form!r}")
    check_group(form, group, inputs)
    check.check_array("w", w, jnp.uint8, "N, K / 2", (None, inputs // 2))
    kind = jnp.float8_e4m3fn if form == "nvfp4" else jnp.float32
    check.check_array("scale", scale, kind, "N, G", (w.shape[0], inputs // group))
    check_outer(form, outer, "N", w.shape[:1])
    if zero is not None:
        if form != "int4":
            raise ValueError(f"zero goes with form='int4', and not with {form!r}")
        check.check_array("zero", zero, jnp.uint8, "N, G", (w.shape[0], inputs // group))
    run = OP.pick(backend, x, w, group, form).run
    if 0 in (x.shape[0], w.shape[0]):
        return jnp.zeros((x.shape[0], w.shape[0]), dtype or x.dtype)
    return run(Operands(x, w, scale, zero, outer), group=group, dtype=dtype or x.dtype)


def check_group(form: str, group: int | None, inputs: int) -> None:
    """Raises ValueError for a group of 4-bit weights that does not fit."""
    if form == "nvfp4" and (group != NV_GROUP or inputs % NV_PACK):
        raise ValueError(
            f"group of form='nvfp4' must be {NV_GROUP}, and K a multiple of {NV_PACK}, got {group}, {inputs}"
        )
    if not isinstance(group, int) or group < 2 or group % 2 or inputs % group:
        raise ValueError(f"group must be even and divide K={inputs}, got {group!r}")


def check_outer(form: str, outer: jax.Array | None, axes: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a scale of outputs that does not fit."""
    if (outer is None) == (form == "nvfp4"):
        raise ValueError(f"outer goes with form='nvfp4', and with no other, got form={form!r}")
    if outer is not None:
        check.check_array("outer", outer, jnp.float32, axes, shape)
