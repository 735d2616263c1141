"""What implementations of `fp8_product` and `int8_product` take."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check


class Operands(NamedTuple):
    """The arrays of one product: `api.py` says what each is."""

    x: jax.Array
    w: jax.Array
    scale: jax.Array
    input_scale: jax.Array | None


@dataclass(frozen=True)
class Options:
    """What is known of one while tracing, `dtype` always; hashable, so one static argument of a jit."""

    group: int | None
    activations: str
    upper_bound: float | None
    dtype: Any


def check_operands(
    operands: Operands, weights: Any, group: int | None, activations: str, known: Any, ungrouped: Collection[str]
) -> None:
    """Raises ValueError, which names the argument, unless all fit.

    weights: the type of w. known: the Literal of `activations`. ungrouped: those that need one scale a row of w.
    """
    x, w, scale, input_scale = operands
    check.check_floats("x", x, "M, K")
    check.check_array("w", w, weights, "N, K", (None, x.shape[1]))
    if group is not None and group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    groups = 1 if group is None else -(-x.shape[1] // group)
    check.check_array("scale", scale, jnp.float32, "N, G", (w.shape[0], groups))
    if activations not in get_args(known):
        raise ValueError(f"activations must be one of {', '.join(get_args(known))}, got {activations!r}")
    if activations in ungrouped and groups != 1:
        raise ValueError(f"activations={activations!r} needs one scale a row of w, got {groups}")
    if (input_scale is None) == (activations == "static"):
        raise ValueError("input_scale goes with activations='static', and with nothing else")
    if input_scale is not None:
        check.check_array("input_scale", input_scale, jnp.float32, "1", (1,))
