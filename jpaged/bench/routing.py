"""How many experts the tokens of a step touch: what a step of a mixture of experts has to read at least."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.experts import Routing, route

_SAMPLE = 16_384
"""Tokens that popularities are estimated from: an expert that one token in a hundred picks, to within 10 %."""


def popularity(routing: Routing, num_experts: int) -> np.ndarray:
    """The chance of each expert to be among a token's, float [num_experts], where logits are as of random weights:
    standard normal numbers, with the skew of `routing`. They add up to `routing.per_token`.
    """
    if not routing.zipf:
        return np.full(num_experts, routing.per_token / num_experts)
    logits = np.random.default_rng(0).standard_normal((_SAMPLE, num_experts), np.float32)
    correction = jnp.zeros(num_experts) if routing.biased else None
    experts, _ = jax.jit(route, static_argnums=1)(jax.jit(routing.skewed)(logits), routing, correction)
    return np.bincount(np.asarray(experts).ravel(), minlength=num_experts) / _SAMPLE


def experts_touched(routing: Routing, num_experts: int, tokens: int) -> float:
    """The experts of a layer that so many tokens are expected to have, which pick independently of one another."""
    return float(np.sum(1 - (1 - popularity(routing, num_experts)) ** tokens))
