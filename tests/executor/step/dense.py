"""What step programs must say, by dense attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models import Model, dense_causal_attend


def greedy(model: Model, weights, prompt: np.ndarray, count: int, length: int) -> list[int]:
    """The `count` most likely tokens after a prompt, by one whole pass a token. No token sees the padding that follows
    it. length: that every pass is padded to, so that it is compiled once.
    """
    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    for n in range(len(prompt), len(prompt) + count):
        tokens[n] = best_tokens(model, weights, tokens)[n - 1]
    return tokens[len(prompt) : len(prompt) + count].tolist()


@partial(jax.jit, static_argnums=0)
def best_tokens(model: Model, weights, tokens: jax.Array) -> jax.Array:
    """The most likely token after each."""
    hidden = model.forward(weights, tokens, jnp.arange(len(tokens)), dense_causal_attend)
    return model.logits(weights, hidden).argmax(-1)
