"""Sums over the devices of one mesh axis, added to the residual stream and normed: one op, two backends.

    inbox, generations                          of the shapes of `initial_all_reduce_state`, EMPTY and zeros; then the
                                                same arrays in all programs, donated to each
    peers = all_reduce_peers(inbox, ...)        once a program, before its first sum
    inbox, generations, residual, normed = all_reduce_add_norm(inbox, generations, peers, parts, residual, ...)
                                                as often as the program likes, one after the other

"mosaic" is the one-shot kernel for Hopper GPUs that reach one another's memory; `all_reduce_unsupported` says whether
it takes a model's rows. "xla" is a `psum` with the kernel's rounding, which runs anywhere and counts the calls in
`generations` as the kernel does. All of it is called inside `shard_map`.
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

EMPTY = -1
"""A word of an inbox that has not arrived: as 16-bit floats, two NaNs."""

_MOST_WORDS = 2**31
"""Of an inbox, which the kernel counts in 32 bits."""


def initial_all_reduce_state(
    num_devices: int, max_rows: int, hidden: int, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of a device's inbox and generations, int32; the inbox begins as EMPTY, generations as zeros.

    They have to be that on every device before the first call is dispatched (`jax.block_until_ready`): a device that
    filled them after a faster peer's first row would wipe it out, and wait for ever.

    inbox [2, devices - 1, max_rows, words], by generation and sender. generations [blocks of threads]: the calls that
    each took part in.
    """
    words = hidden * jnp.dtype(dtype).itemsize // 4
    inbox = jax.ShapeDtypeStruct((2, num_devices - 1, max_rows, words), jnp.int32)
    return inbox, jax.ShapeDtypeStruct((min(max_rows, MAX_CTAS),), jnp.int32)


def most_rows(num_devices: int, hidden: int) -> int:
    """Of 16-bit floats, that the inboxes of so many devices, two or more, may have room for."""
    return _MOST_WORDS // ((num_devices - 1) * hidden)


def all_reduce_unsupported(hidden: int, dtype: Any, num_devices: int) -> str | None:
    """Why the kernel cannot sum rows of this size over so many devices; None if it can."""
    return mosaic_missing() or import_module(_MODULE).unsupported(hidden, dtype, num_devices)


def all_reduce_peers(inbox: jax.Array, *, axis: str, num_devices: int, backend: str | None = None) -> jax.Array:
    """Where this device's rows go in the others' inboxes: int32 [devices, 2], for `all_reduce_add_norm` alone."""
    hidden = 2 * inbox.shape[3]  # of 16 bits: sums of other rows are XLA's, which asks for no peers
    if _backend(hidden, jnp.bfloat16, num_devices, backend) == "xla":
        return jnp.zeros((num_devices, 2), jnp.int32)
    return import_module(_MODULE).all_reduce_peers(inbox, axis=axis, num_devices=num_devices)


def all_reduce_add_norm(
    inbox: jax.Array,
    generations: jax.Array,
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
        inbox, generations: of `initial_all_reduce_state`, as the call before left them.
        peers: of `all_reduce_peers`, for this inbox.
        parts: [rows, hidden], each device's own; at most max_rows rows.
        residual: [rows, hidden], the same on every device.
        bias: [hidden], added once.
        scale: [hidden], of the norm; None for no norm. norm_eps: added to its mean squares.
        axis: the mesh's one axis, along which `num_devices` lie; those of one process, in JAX's order.
        backend: None (by device), "xla" or "mosaic".
    Returns:
        inbox, generations, the new residual [rows, hidden] and its norm, or None; of the same bits on all devices.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_rank("inbox", inbox, "2, devices - 1, max_rows, words")
    check.check_rank("parts", parts, "rows, hidden")
    max_rows = inbox.shape[2]
    rows, hidden = parts.shape
    if rows > max_rows:
        raise ValueError(f"parts has {rows} rows, more than the {max_rows} that inbox has room for")
    words = hidden * parts.dtype.itemsize // 4
    check.check_int32("inbox", inbox, "2, devices - 1, max_rows, words", (2, num_devices - 1, None, words))
    if inbox.size > _MOST_WORDS:
        most = most_rows(num_devices, 2 * words)
        raise ValueError(f"inbox has room for {max_rows} rows of {hidden}, more than the {most} that can be counted")
    check.check_int32("generations", generations, "blocks", (min(max_rows, MAX_CTAS),))
    check.check_int32("peers", peers, "devices, 2", (num_devices, 2))
    check.check_array("residual", residual, parts.dtype, "rows, hidden", (rows, hidden))
    for name, one in (("bias", bias), ("scale", scale)):
        if one is not None:
            check.check_array(name, one, parts.dtype, "hidden", (hidden,))
    if _backend(hidden, parts.dtype, num_devices, backend) == "xla":
        return _with_psum(inbox, generations, parts, residual, bias, scale, norm_eps, axis)
    return import_module(_MODULE).all_reduce_add_norm(
        inbox, generations, peers, parts, residual, bias, scale, num_devices=num_devices, norm_eps=float(norm_eps)
    )


def _backend(hidden: int, dtype: Any, num_devices: int, backend: str | None) -> str:
    return pick("all_reduce_add_norm", backend, lambda: all_reduce_unsupported(hidden, dtype, num_devices))


def _with_psum(
    inbox: jax.Array,
    generations: jax.Array,
    parts: jax.Array,
    residual: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    norm_eps: float,
    axis: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    total = residual.astype(jnp.float32) + lax.psum(parts.astype(jnp.float32), axis)
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    summed = total.astype(residual.dtype)
    generations = generations + (jnp.arange(generations.size) < parts.shape[0])
    return inbox, generations, summed, None if scale is None else rms_norm(summed, scale, norm_eps)
