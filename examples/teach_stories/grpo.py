"""GRPO (arXiv:2402.03300) with Flax and optax: one step of training on a batch of stories."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jpaged import RequestOutput
from jpaged.models import Model
from jpaged.training import compiler_options, token_logprobs

CLIP = 0.2
"""A token's ratio of new to old probability counts up to 1 + CLIP, and from 1 - CLIP on."""


class Batch(NamedTuple):
    """tokens: int32 [rows, length], prompts and stories. lengths: int32 [rows], of both together.
    is_story: bool [rows, length], the tokens that were sampled. logprobs: float32 [rows, length], as the sampler gave
    them. advantages: float32 [rows].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_story: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray


def make_batch(outputs: list[RequestOutput], rewards: np.ndarray, length: int) -> Batch:
    """rewards: [prompts, stories of each]. length: of the rows, at least that of the longest."""
    rows = rewards.size
    tokens, logprobs = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
    lengths, is_story = np.zeros(rows, np.int32), np.zeros((rows, length), bool)
    pairs = ((output.prompt_token_ids, completion) for output in outputs for completion in output.outputs)
    for row, (prompt, completion) in enumerate(pairs):
        story = list(completion.token_ids)
        start, end = len(prompt), len(prompt) + len(story)
        tokens[row, :end] = [*prompt, *story]
        logprobs[row, start:end] = [at[token].logprob for at, token in zip(completion.logprobs, story, strict=True)]
        lengths[row], is_story[row, start:end] = end, True
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = centred / (rewards.std(axis=1, keepdims=True) + 1e-4)
    return Batch(tokens, lengths, is_story, logprobs, advantages.reshape(-1).astype(np.float32))


class Trainer:
    """The model that learns, and its optimizer.

    module: a Flax module; `LLM.update_weights` takes it as it is.
    batch_invariant: as of the engine. The ratios of a batch are then exactly 1 before the first step on it.
    """

    def __init__(self, model: Model, module: Any, learning_rate: float, batch_invariant: bool) -> None:
        self.module = module
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
        self._state = optimizer.init(nnx.state(module, nnx.Param))

        def ratios(params: nnx.State, batch: Batch) -> jax.Array:
            found = token_logprobs(model, params, batch.tokens, batch.lengths, batch_invariant=batch_invariant)
            return jnp.where(batch.is_story, jnp.exp(found - batch.logprobs), 1.0)

        def loss(params: nnx.State, batch: Batch) -> jax.Array:
            ratio, advantage = ratios(params, batch), batch.advantages[:, None]
            clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
            gain = jnp.minimum(ratio * advantage, clipped * advantage)
            return -jnp.sum(jnp.where(batch.is_story, gain, 0.0)) / jnp.sum(batch.is_story)

        def update(
            params: nnx.State, state: optax.OptState, batch: Batch
        ) -> tuple[nnx.State, optax.OptState, jax.Array]:
            found, gradients = jax.value_and_grad(loss)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, found

        options = compiler_options()  # products as the engine has them, of whose bits batch_invariant speaks
        self._update = jax.jit(update, donate_argnums=(0, 1), compiler_options=options)
        self._distance = jax.jit(
            lambda params, batch: jnp.max(jnp.abs(ratios(params, batch) - 1)), compiler_options=options
        )

    def distance(self, batch: Batch) -> float:
        """How far the ratio of any sampled token is from 1: what the trainer and the sampler compute differently."""
        return float(self._distance(nnx.state(self.module, nnx.Param), batch))

    def update(self, batch: Batch) -> float:
        """One step; returns the loss."""
        params, self._state, loss = self._update(nnx.state(self.module, nnx.Param), self._state, batch)
        nnx.update(self.module, params)
        return float(loss)
