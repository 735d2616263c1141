"""Sums over the devices of one mesh axis, added to the residual stream and normed: one op, two backends.

    inbox, generations                          of the shapes of `initial_all_reduce_state`, EMPTY and zeros; then the
                                                same arrays in all programs, donated to each
    peers = all_reduce_peers(inbox, ...)        once a program, before its first sum
    inbox, generations, residual, normed = all_reduce_add_norm(inbox, generations, peers, parts, residual, ...)
                                                as often as the program likes, one after the other

"hopper" is the one-shot kernel for Hopper GPUs that reach one another's memory; `all_reduce_unsupported` says whether
it takes a model's rows. "xla" is a `psum` with the kernel's rounding, which runs anywhere and counts the calls in
`generations` as the kernel does. All of it is called inside `shard_map`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.all_reduce.inbox import MAX_CTAS, MOST_WORDS, most_rows
from jpaged.pallas_kernels.all_reduce.operands import Operands
from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import Op, backends, is_reference

PEERS, ADD_NORM = Op("all_reduce_peers", __package__), Op("all_reduce_add_norm", __package__)


def all_reduce_unsupported(hidden: int, dtype: Any, num_devices: int, among: Sequence[str] | None = None) -> str | None:
    """Why no kernel can sum rows of this size over so many devices; None if one can.

    among: the backends that are asked, one at least, in order of preference; by default all that have kernels, whatever
        the device. The first one's reason is given.
    """
    asked = [name for name in backends() if not is_reference(name)] if among is None else among
    question = (hidden, dtype, num_devices)
    reasons = [PEERS.unsupported(name, *question) or ADD_NORM.unsupported(name, *question) for name in asked]
    return None if None in reasons else reasons[0]


def all_reduce_peers(inbox: jax.Array, *, axis: str, num_devices: int, backend: str | None = None) -> jax.Array:
    """Where this device's rows go in the others' inboxes: int32 [devices, 2], for `all_reduce_add_norm` alone."""
    hidden = 2 * inbox.shape[3]  # of 16 bits: sums of other rows are XLA's, which asks for no peers
    find = PEERS.pick(backend, hidden, jnp.bfloat16, num_devices).run
    return find(inbox, axis=axis, num_devices=num_devices)


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
        backend: None (by device), "hopper" or "xla".
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
    if inbox.size > MOST_WORDS:
        most = most_rows(num_devices, 2 * words)
        raise ValueError(f"inbox has room for {max_rows} rows of {hidden}, more than the {most} that can be counted")
    check.check_int32("generations", generations, "blocks", (min(max_rows, MAX_CTAS),))
    check.check_int32("peers", peers, "devices, 2", (num_devices, 2))
    check.check_array("residual", residual, parts.dtype, "rows, hidden", (rows, hidden))
    for name, one in (("bias", bias), ("scale", scale)):
        if one is not None:
            check.check_array(name, one, parts.dtype, "hidden", (hidden,))
    add = ADD_NORM.pick(backend, hidden, parts.dtype, num_devices).run
    operands = Operands(inbox, generations, peers, parts, residual, bias, scale)
    return add(operands, axis=axis, num_devices=num_devices, norm_eps=float(norm_eps))
