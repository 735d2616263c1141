"""Sums over the devices of one mesh axis, added to the residual stream and normed: one op, two backends.

    inbox, signals = initial_all_reduce_state(...)     zeros; then the same arrays in all programs, donated to each
    peers = all_reduce_peers(inbox, signals, ...)      once a program, before its first sum
    inbox, signals, residual, normed = all_reduce_add_norm(inbox, signals, peers, parts, residual, ...)     as often as
                                                       the program likes, one after the other

"mosaic" is the one-shot kernel for Hopper GPUs that reach one another's memory; `all_reduce_unsupported` says whether
it takes a model's rows. "xla" is a `psum` with the kernel's rounding, which runs anywhere and counts the calls in
`signals` as the kernel does. All of it is called inside `shard_map`.
"""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.pallas_kernels import arguments as check
from jpaged.pallas_kernels.backends import mosaic_missing, pick
from jpaged.pallas_kernels.reference import rms_norm

_MODULE = "jpaged.pallas_kernels.all_reduce_mosaic"


MAX_CTAS = 264
"""Thread blocks of a call, which share its rows out: row r is block r % 264's, on every device and in every call. A
block waits for those of the same number on the other devices, so all have to fit on a device at once."""

MIN_MULTIPROCESSORS = 132
"""Where they fit whatever their registers: two blocks of 128 threads on each."""

_MOST_ELEMENTS = 2**31
"""Of an inbox, which the kernel counts in 32 bits."""


def initial_all_reduce_state(
    num_devices: int, max_rows: int, hidden: int, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of a device's inbox and signals, which begin as zeros.

    They have to be zeros on every device before the first call is dispatched (`jax.block_until_ready`): a device that
    filled them after a faster peer's first signal would wipe it out, and wait for ever.

    inbox [2, devices - 1, max_rows, hidden], by generation and sender. signals int32 [devices + 1, blocks of threads]:
    each sender's last signal, and behind them this device's own last generation.
    """
    inbox = jax.ShapeDtypeStruct((2, num_devices - 1, max_rows, hidden), dtype)
    return inbox, jax.ShapeDtypeStruct((num_devices + 1, min(max_rows, MAX_CTAS)), jnp.int32)


def most_rows(num_devices: int, hidden: int) -> int:
    """That the inboxes of so many devices, two or more, may have room for."""
    return _MOST_ELEMENTS // (2 * (num_devices - 1) * hidden)


def all_reduce_unsupported(hidden: int, dtype: Any, num_devices: int) -> str | None:
    """Why the kernel cannot sum rows of this size over so many devices; None if it can."""
    return mosaic_missing() or import_module(_MODULE).unsupported(hidden, dtype, num_devices)


def all_reduce_peers(
    inbox: jax.Array, signals: jax.Array, *, axis: str, num_devices: int, backend: str | None = None
) -> jax.Array:
    """Where the other devices have their inbox and signals: int32 [devices + 1, 4], for `all_reduce_add_norm` alone."""
    if _backend(inbox, num_devices, backend) == "xla":
        return jnp.zeros((num_devices + 1, 4), jnp.int32)
    return import_module(_MODULE).all_reduce_peers(inbox, signals, axis=axis, num_devices=num_devices)


def all_reduce_add_norm(
    inbox: jax.Array,
    signals: jax.Array,
    peers: jax.Array,
    parts: jax.Array,
    residual: jax.Array,
    *,
    bias: jax.Array | None = None,
    scale: jax.Array | None = None,
    norm_eps: float = 1e-6,
    axis: str,
    num_devices: int,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """residual + the sum of all devices' parts + bias, in float32 and rounded once, and its RMS norm.

    Args:
        inbox, signals: of `initial_all_reduce_state`, as the call before left them.
        peers: of `all_reduce_peers`, for these arrays.
        parts: [rows, hidden], each device's own; at most max_rows rows.
        residual: [rows, hidden], the same on every device.
        bias: [hidden], added once.
        scale: [hidden], of the norm; None for no norm. norm_eps: added to its mean squares.
        axis: the mesh's one axis, along which `num_devices` lie; those of one process, in JAX's order.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        inbox, signals, the new residual [rows, hidden] and its norm, or None; of the same bits on all devices.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_rank("inbox", inbox, "2, devices - 1, max_rows, hidden")
    max_rows, hidden = inbox.shape[2:]
    check.check_rank("parts", parts, "rows, hidden")
    rows = parts.shape[0]
    if rows > max_rows:
        raise ValueError(f"parts has {rows} rows, more than the {max_rows} that inbox has room for")
    check.check_array(
        "inbox", inbox, inbox.dtype, "2, devices - 1, max_rows, hidden", (2, num_devices - 1, None, hidden)
    )
    if inbox.size > _MOST_ELEMENTS:
        most = most_rows(num_devices, hidden)
        raise ValueError(f"inbox has room for {max_rows} rows of {hidden}, more than the {most} that can be counted")
    check.check_int32("signals", signals, "devices + 1, blocks", (num_devices + 1, min(max_rows, MAX_CTAS)))
    check.check_int32("peers", peers, "devices + 1, 4", (num_devices + 1, 4))
    for name, x in (("parts", parts), ("residual", residual)):
        check.check_array(name, x, inbox.dtype, "rows, hidden", (rows, hidden))
    for name, one in (("bias", bias), ("scale", scale)):
        if one is not None:
            check.check_array(name, one, inbox.dtype, "hidden", (hidden,))
    if _backend(inbox, num_devices, backend) == "xla":
        return _with_psum(inbox, signals, parts, residual, bias, scale, norm_eps, axis, num_devices)
    return import_module(_MODULE).all_reduce_add_norm(
        inbox, signals, peers, parts, residual, bias, scale, num_devices=num_devices, norm_eps=float(norm_eps)
    )


def _backend(inbox: jax.Array, num_devices: int, backend: str | None) -> str:
    hidden, dtype = inbox.shape[3], inbox.dtype
    return pick("all_reduce_add_norm", backend, lambda: all_reduce_unsupported(hidden, dtype, num_devices))


def _with_psum(
    inbox: jax.Array,
    signals: jax.Array,
    parts: jax.Array,
    residual: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    norm_eps: float,
    axis: str,
    num_devices: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    total = residual.astype(jnp.float32) + lax.psum(parts.astype(jnp.float32), axis)
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    summed = total.astype(residual.dtype)
    signals = signals.at[num_devices, : min(parts.shape[0], MAX_CTAS)].add(1)
    return inbox, signals, summed, None if scale is None else rms_norm(summed, scale, norm_eps)
