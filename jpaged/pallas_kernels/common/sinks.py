"""Attention sinks: a number of each query head joins the softmax's denominator, and no value goes with it.

    with them     sum_i exp(s_i) v_i / (exp(sink) + sum_i exp(s_i))
    without       sum_i exp(s_i) v_i / sum_i exp(s_i)              = out, and lse = log(sum_i exp(s_i))

so attention with a sink is out * sigmoid(lse - sink): what any kernel gives, times a number of each row and head. The
kernels know nothing of sinks. They are counted where the results of all parts are together, so exactly once. The price
is one elementwise kernel of XLA's over the output, and an output that is rounded to its type twice.

Source: gpt-oss (arXiv:2508.10925), after StreamingLLM (arXiv:2309.17453).
"""

import jax
import jax.numpy as jnp


def count_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Attention with sinks, from all of it without.

    out: [rows, heads, head_dim]. lse: float32 [rows, heads], its log-sum-exp, natural. sinks: float32 [heads], or None
    for what was given.
    Returns the output, of out's dtype, and its log-sum-exp with the sinks; where a query saw nothing, they stay 0 and
    -inf.
    """
    if sinks is None:
        return out, lse
    wide = jnp.promote_types(out.dtype, jnp.float32)
    share = jax.nn.sigmoid(lse - sinks)  # of the softmax that the keys have
    counted = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks))
    return (out.astype(wide) * share[..., None].astype(wide)).astype(out.dtype), counted
