"""On Hopper GPUs a step runs the Triton kernel, where Triton is installed: there is nothing for tensor cores to do."""

from importlib import import_module
from typing import Any

import jax

from jpaged.pallas_kernels.registry import missing


def unsupported(states: jax.Array, q: jax.Array) -> str | None:
    """Why the kernel cannot take these (checked) arguments; None if it can."""
    if (reason := missing("triton")) is not None:
        return reason
    refused: str | None = _triton().unsupported(states, q)
    return refused


def gated_delta_step(*operands: Any) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of the package for rows of one token, checked."""
    stepped: tuple[jax.Array, jax.Array] = _triton().gated_delta_step(*operands)
    return stepped


def _triton() -> Any:
    return import_module("jpaged.pallas_kernels.gated_delta_rule.triton")
