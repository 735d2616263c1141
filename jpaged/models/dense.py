"""Causal attention over whole sequences, no pool and no cache: for training and for tests."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels import split_latents, split_qkv
from jpaged.pallas_kernels.common.numerics import precision_of


def dense_causal_attend(
    qkv: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    norm_eps: float = 1e-6,
    scale: float,
    sliding_window: int | None = None,
    chunked: bool = False,
    logit_softcap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """An `Attend` in which token i of the T given sees tokens 0..i.

    It is differentiable and can be mapped over a batch with `jax.vmap`. Scores and softmax are float32.
    Memory grows with T squared.

    qkv, rotation, norms, norm_eps: as in `pallas_kernels.split_qkv`; with value_dim as in `split_latents`.
    sliding_window: a token sees this many tokens, itself included.
    chunked: of these it sees only its own chunk: chunks of sliding_window tokens follow each other from its sequence's
        first token on.
    alibi_slopes: float32 [heads]; the score loses slope times distance.
    sinks: float [heads]; logits without values, which join the softmax of every token.
    segment_ids: int32 [T]; for several sequences in one row of tokens, each sees only its own. Bind it with
        `functools.partial`.
    Returns [T, heads, head_dim], or [T, heads, value_dim].
    """
    if value_dim is None:
        q, k, v = split_qkv(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps)
    else:
        q, k = split_latents(qkv, rotation=rotation, norms=norms)
        v = k[..., :value_dim]
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    precision = precision_of(q.dtype)
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("qkgd,skd->kgqs", grouped, k, precision=precision, preferred_element_type=jnp.float32) * scale
    if logit_softcap is not None:
        scores = jnp.tanh(scores / logit_softcap) * logit_softcap
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.reshape(kv_heads, heads // kv_heads, 1, 1)
        scores = scores - slopes * distance
    seen = distance >= 0
    if sliding_window is not None:
        seen &= distance < sliding_window
        if chunked:
            numbers = _positions(tokens, segment_ids) // sliding_window
            seen &= numbers[:, None] == numbers[None, :]
    if segment_ids is not None:
        seen &= segment_ids[:, None] == segment_ids[None, :]
    # Every token sees itself, so no row of the softmax is empty.
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :-1]
    out = jnp.einsum("kgqs,skd->qkgd", weights.astype(v.dtype), v, precision=precision)
    return out.reshape(tokens, heads, -1)


def _positions(tokens: int, segment_ids: jax.Array | None) -> jax.Array:
    """int32 [T]: the place of each token in its sequence."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    if segment_ids is None:
        return index
    begins = jnp.concatenate([jnp.ones((1,), bool), segment_ids[1:] != segment_ids[:-1]])
    return index - jax.lax.cummax(jnp.where(begins, index, 0))
