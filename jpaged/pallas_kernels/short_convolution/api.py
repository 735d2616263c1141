"""A causal convolution of a few taps over each channel, and SiLU or nothing: the contract.

    out[t] = silu(bias + sum over d of kernel[width - 1 - d] * x[t - d])        d = 0 .. width - 1, in the sequence

What a row's first tokens need of the tokens before them lives in a slot: the sequence's last width - 1 inputs.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.common.rows import Rows
from jpaged.pallas_kernels.registry import Op

OP = Op("short_convolution", __package__)


def short_convolution(
    history: jax.Array,
    x: jax.Array,
    kernel: jax.Array,
    slots: jax.Array,
    fresh: jax.Array,
    query_starts: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    activation: Literal["silu"] | None = "silu",
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolves tokens of several sequences, and updates their histories; in place when the caller's jit donates them.

    Sums are float32; the result alone is rounded.

    Args:
        history: floats [num_slots, width - 1, channels]; each sequence's last inputs, the oldest first.
        x: [T, channels], of history's dtype.
        kernel: [width, channels], of history's dtype; the last tap meets the token itself.
        slots, fresh, query_starts: as of `gated_delta_rule`; what comes before a fresh row is zeros.
        bias: [channels], of history's dtype; None for none.
        activation: "silu", or None for the sum as it is.
        backend: None (by device) or "xla".
    Returns:
        out [T, channels] of x's dtype, where tokens of no row hold anything; and the histories.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_floats("history", history, "num_slots, width - 1, channels")
    num_slots, before, channels = history.shape
    if not before:
        raise ValueError("history must keep one input of each sequence at least, got none: a kernel of two taps")
    check.check_rank("x", x, "T, channels")
    tokens = x.shape[0]
    check.check_like("x", x, "T, channels", (tokens, channels), "history", history.dtype)
    check.check_like("kernel", kernel, "width, channels", (before + 1, channels), "history", history.dtype)
    if bias is not None:
        check.check_like("bias", bias, "channels", (channels,), "history", history.dtype)
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    rows = Rows(slots, fresh, query_starts)
    rows.check(tokens)
    run = OP.pick(backend, history).run
    if not tokens or not slots.shape[0] or not num_slots:
        return jnp.zeros_like(x), history
    return run(history, x, kernel, rows, bias, activation=activation)
