"""From a projection's output to queries, keys and values, rotated and normed, and a written pool: the contracts."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import Op
from jpaged.pallas_kernels.rope_and_write import reference
from jpaged.pallas_kernels.rope_and_write.projection import Projection
from jpaged.pallas_kernels.round_rows.operands import Sums
from jpaged.pallas_kernels.write_kv.destination import Destination

OP = Op("rope_and_write", __package__, also={"triton": check.triton_on_hopper})


def rope_and_write(
    kv_pool: jax.Array,
    qkv: jax.Array | Sums,
    slot_mapping: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    norm_eps: float = 1e-6,
    kv_scales: jax.Array | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """From the projection's output to queries and a written pool: `split_qkv`, then `write_kv`, in one kernel.

    Args:
        kv_pool: [num_blocks, 2, kv_heads, block_size, head_dim].
        qkv, rotation, norms, norm_eps: as in `split_qkv`; qkv of the pool's dtype; any floats for one in e4m3. Or the
            sums [T, kv_heads * (group + 2) * head_dim] of an FP8 product, whose scales are then multiplied here.
        slot_mapping, kv_scales: int32 [T] and float32 [2], as in `write_kv`.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        The queries [T, kv_heads * group, head_dim], and the pool, in place when the caller's jit donates it.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_pool("kv_pool", kv_pool)
    _, _, kv_heads, _, head_dim = kv_pool.shape
    heads = _in_heads(qkv, kv_heads, head_dim) if isinstance(qkv, Sums) else qkv
    norm_eps = _check_qkv(heads, rotation, norms, norm_eps)
    if not check.goes_with_pool(heads.dtype, kv_pool):
        raise ValueError(f"qkv must have kv_pool's dtype {kv_pool.dtype}, got {heads.dtype}")
    if (heads.shape[1], heads.shape[3]) != (kv_heads, head_dim):
        raise ValueError(f"qkv must be [T, {kv_heads}, group + 2, {head_dim}] like kv_pool, got shape {heads.shape}")
    check.check_int32("slot_mapping", slot_mapping, "T", (heads.shape[0],))
    check.check_slots("kv_pool", kv_pool)
    check.check_kv_scales(kv_scales, kv_pool)
    picked = OP.pick(backend, kv_pool, heads)
    if heads.shape[0] == 0:
        return jnp.zeros((0, kv_heads * (heads.shape[2] - 2), head_dim), heads.dtype), kv_pool
    if not isinstance(qkv, Sums):
        projection = Projection(qkv, rotation, norms)
    elif picked.backend != "hopper":
        projection = Projection(qkv.array().reshape(heads.shape), rotation, norms)
    else:
        scales = qkv.of_rows, qkv.of_outputs.reshape(heads.shape[1:])
        projection = Projection(qkv.products.reshape(-1, *heads.shape[1:]), rotation, norms, scales)
    return picked.run(kv_pool, projection, Destination(slot_mapping, kv_scales), norm_eps=norm_eps)


def _in_heads(qkv: Sums, kv_heads: int, head_dim: int) -> jax.ShapeDtypeStruct:
    """The array that sums stand for; raises ValueError unless they are whole heads."""
    tokens, outputs = qkv.shape
    if outputs % (kv_heads * head_dim):
        raise ValueError(f"qkv must have whole heads of {head_dim} for {kv_heads} KV heads, got {outputs} columns")
    return jax.ShapeDtypeStruct((tokens, kv_heads, outputs // (kv_heads * head_dim), head_dim), qkv.dtype)


def split_qkv(
    qkv: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    norm_eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output of a product with q, k and v in one, as what attention takes. Plain XLA: differentiable, batchable.

    Args:
        qkv: [T, kv_heads, group + 2, head_dim]; of each KV head its `group` query heads, its key, its value.
        rotation: cos and sin, float32 [T, head_dim / 2] each, of the angles by which queries and keys are rotated
            (RoPE, arXiv:2104.09864); entries i and i + head_dim / 2 of a head are a pair. In float32, rounded once.
        norms: scales [head_dim] of the RMS norms of queries and of keys, before the rotation; in float32. Scales of
            qkv's dtype are applied after rounding to it, float32 ones before.
        norm_eps: added to those norms' mean squares.
    Returns:
        Queries [T, kv_heads * group, head_dim], keys and values [T, kv_heads, head_dim].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    norm_eps = _check_qkv(qkv, rotation, norms, norm_eps)
    return reference.split_qkv(Projection(qkv, rotation, norms), norm_eps)


def split_latents(
    qkv: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What attention over latents takes, where a layer has rotated and normed it: keys that are values, too.

    Args:
        qkv: [T, kv_heads, group + 1, head_dim]; of each KV head its `group` query heads and its key.
        rotation, norms: None; there is no kernel that computes them for latents.
    Returns:
        Queries [T, kv_heads * group, head_dim], keys [T, kv_heads, head_dim].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_floats("qkv", qkv, "T, kv_heads, group + 1, head_dim")
    tokens, kv_heads, slots, head_dim = qkv.shape
    if slots < 2:
        raise ValueError(f"qkv must have queries and a key for each KV head, got shape {tuple(qkv.shape)}")
    for name, pair in (("rotation", rotation), ("norms", norms)):
        if pair is not None:
            raise ValueError(f"{name} must be None for latents: rotate and norm them first")
    return qkv[:, :, :-1].reshape(tokens, kv_heads * (slots - 1), head_dim), qkv[:, :, -1]


def split_queries(q: jax.Array, *, rotation: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
    """What attention over keys and values of another layer takes. Plain XLA.

    Args:
        q: [T, kv_heads, group, head_dim]; of each KV head its `group` query heads.
        rotation: as in `split_qkv`.
    Returns:
        Queries [T, kv_heads * group, head_dim].
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_floats("q", q, "T, kv_heads, group, head_dim")
    tokens, kv_heads, group, head_dim = q.shape
    _check_rotation(rotation, q)
    heads = q.reshape(tokens, kv_heads * group, head_dim)
    return heads if rotation is None else reference.rotate(heads, *rotation)


def _check_rotation(rotation: tuple[check.ArrayLike, check.ArrayLike] | None, qkv: check.ArrayLike) -> None:
    """Raises ValueError unless it is None or fits heads [T, ..., head_dim]."""
    if rotation is None:
        return
    _check_pair("rotation", rotation)
    tokens, head_dim = qkv.shape[0], qkv.shape[-1]
    if head_dim % 2:
        raise ValueError(f"rotation needs an even head_dim, got {head_dim}")
    for i, table in enumerate(rotation):
        check.check_like(f"rotation[{i}]", table, "T, head_dim / 2", (tokens, head_dim // 2), "qkv", jnp.float32.dtype)


def _check_pair(name: str, pair: object) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name} must be None or a pair of arrays, got {type(pair).__name__}")


def _check_qkv(
    qkv: check.ArrayLike,
    rotation: tuple[check.ArrayLike, check.ArrayLike] | None,
    norms: tuple[check.ArrayLike, check.ArrayLike] | None,
    norm_eps: float,
) -> float:
    """The eps; raises ValueError unless `qkv` is [T, kv_heads, group + 2, head_dim] and the others fit it."""
    check.check_rank("qkv", qkv, "T, kv_heads, group + 2, head_dim")
    _, kv_heads, slots, head_dim = qkv.shape
    if qkv.dtype not in check.FLOATS or kv_heads < 1 or slots < 3 or head_dim < 1:
        raise ValueError(f"qkv must be floats [T, kv_heads, group + 2, head_dim], got {qkv.dtype}{tuple(qkv.shape)}")
    _check_rotation(rotation, qkv)
    if norms is not None:
        _check_pair("norms", norms)
    for i, scale in enumerate(norms or ()):
        dtype = scale.dtype if scale.dtype == jnp.float32 else qkv.dtype
        check.check_like(f"norms[{i}]", scale, "head_dim", (head_dim,), "qkv", dtype)
    if norms is not None and norms[0].dtype != norms[1].dtype:
        raise ValueError(f"norms must be of one dtype, got {norms[0].dtype} and {norms[1].dtype}")
    return check.check_eps("norm_eps", norm_eps)
