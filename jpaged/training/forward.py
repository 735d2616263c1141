"""A trainer's forward pass: log-probabilities of whole sequences' tokens, without a KV pool, with gradients.

batch_invariant=False    plain XLA, `dense_causal_attend`, autodiff
batch_invariant=True     forward: the tiles of rows and the attention of a batch_invariant engine, so that each
                         log-probability has the bits that the engine gave when it sampled the token
                         backward: autodiff of the plain form, which is computed again for it; the two differ in
                         rounding alone
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.api.config import INVARIANT_BACKENDS
from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.api.weights import flat_weights
from jpaged.executor.cache.chunks import mixed_chunks
from jpaged.executor.start.compilation import GPU_OPTIONS
from jpaged.executor.start.invariance import TRAINERS_BLOCK_SIZE, check_attention
from jpaged.executor.step.heads import logits_and_sums
from jpaged.models import Model, Weights, dense_causal_attend
from jpaged.models.row_tiles import Attention, check_rows_are_apart, forward_in_row_tiles
from jpaged.pallas_kernels import invariant_attention, registry
from jpaged.pallas_kernels.registry import or_reference

_HEAD_ROWS = 256
"""Rows of logits held at once: 156 MB of float32 at a vocabulary of 152,000."""


def compiler_options() -> dict[str, Any]:
    """What the engine compiles products with on this device: for `jax.jit(..., compiler_options=compiler_options())`
    around `token_logprobs`, whose bits depend on it on a GPU. Empty on a CPU."""
    return dict(GPU_OPTIONS) if jax.default_backend() == "gpu" else {}


def token_logprobs(
    model: Model,
    weights: Any,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"] | None = None,
    *,
    batch_invariant: bool = False,
    kernel_backend: str | None = None,
) -> Float[Array, "batch length"]:
    """The log-probability of each token after those before it, under the model's own distribution.

    It can be called under `jax.jit`, and differentiated with respect to the weights.

    Args:
        model: `jpaged.models.build(config, dtype)`; of an engine, `llm.engine.startup.model`. Weights are rounded to
            its dtype, as the engine rounds those that it is given.
        weights: the flat tuple of `Model.init`, a module that `Model.module` made or its `nnx.State`, or a mapping,
            nested or flat, from all of `Model.parameter_names` to arrays.
        tokens: int [batch, length], the sequences from their first token on; what is behind an end may be anything.
        lengths: int [batch]; tokens of each sequence, all by default.
        batch_invariant: compute as an engine with batch_invariant=True does, to the bit. The model is then whole on one
            device, as an engine's with tensor_parallel_size=1.
        kernel_backend: with batch_invariant=True, that of the engine; None (the default of both) picks by device.
    Returns:
        float32 [batch, length]; entry [b, i] is log p(tokens[b, i] | tokens[b, :i]). The first token of a sequence and
        what is behind its end have 0.
    Raises:
        InvalidParameterError: tokens or lengths of another shape or type, weights that are not the model's, a kernel
            backend that does not exist or cannot run here, or one without batch_invariant=True. Or, with it, the model
            has recurrent layers or latent attention.
        UnsupportedModelError: the model is quantized, or, with batch_invariant=True, mixes tokens outside attention.
    """
    if model.quantized:
        raise UnsupportedModelError(
            "token_logprobs takes models whose weights are not quantized; load them in 16 bits."
        )
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InvalidParameterError(f"tokens must be integers [batch, length], got {tokens.dtype}{list(tokens.shape)}.")
    batch, length = tokens.shape
    lengths = jnp.full((batch,), length) if lengths is None else jnp.asarray(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InvalidParameterError(
            f"lengths must be integers [{batch}], one for each row of tokens, got {lengths.dtype}{list(lengths.shape)}."
        )
    if batch_invariant:
        check_rows_are_apart(model.config)
        kernel_backend = _own_name(kernel_backend)
        check_attention(model, kernel_backend, TRAINERS_BLOCK_SIZE)
    elif kernel_backend is not None:
        raise InvalidParameterError(
            f"kernel_backend={kernel_backend!r} is for batch_invariant=True; what is not invariant is plain XLA. Leave"
            " it out."
        )
    if not batch or not length:
        return jnp.zeros((batch, length), jnp.float32)
    rounded = tuple(x.astype(want.dtype) for x, want in zip(_flat(model, weights), model.abstract_weights, strict=True))
    compute = partial(_tiled, model, kernel_backend) if batch_invariant else partial(_plain, model)
    return compute(rounded, tokens.astype(jnp.int32), lengths.astype(jnp.int32))


def _own_name(kernel_backend: str | None) -> str | None:
    """The backend's own name, where an alias is given."""
    if kernel_backend is None:
        return None
    if kernel_backend not in INVARIANT_BACKENDS:
        raise InvalidParameterError(
            f"kernel_backend must be None or one of {', '.join(INVARIANT_BACKENDS)}, got {kernel_backend!r}."
        )
    name = registry.canonical(kernel_backend)
    if (reason := registry.refuses_here(name)) is not None:
        raise InvalidParameterError(
            f"kernel_backend={kernel_backend!r} cannot do this: {reason}. Leave it out to choose by device."
        )
    return name


def _flat(model: Model, weights: Any) -> Weights:
    """The weights in the order of `Model.parameter_names`."""
    if isinstance(weights, nnx.Module | nnx.State):
        return model.flatten(weights)
    if isinstance(weights, Mapping):
        named = flat_weights(weights)
        names = set(model.parameter_names)
        if wrong := sorted(names ^ set(named)):
            raise InvalidParameterError(
                f"weights must have exactly the model's parameters (Model.parameter_names); {', '.join(wrong[:5])}"
                f" {'is missing' if wrong[0] in names else 'is none of them'}. For checkpoint names, begin with"
                ' llm.weights_as("parameters").'
            )
        weights = [named[name] for name in model.parameter_names]
    found = tuple(jnp.asarray(weight) for weight in weights)
    shapes = [weight.shape for weight in model.abstract_weights]
    if len(found) != len(shapes):
        raise InvalidParameterError(
            f"weights must be {len(shapes)} arrays, as Model.init makes them, got {len(found)}."
        )
    for name, weight, shape in zip(model.parameter_names, found, shapes, strict=True):
        if weight.shape != shape:
            raise InvalidParameterError(f"{name} must have shape {shape}, got {weight.shape}.")
    return found


@partial(jax.jit, static_argnums=0)
def _plain(model: Model, weights: Weights, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    batch, length = tokens.shape
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)

    def by_sequences(
        qkv: jax.Array, *, rotation: tuple[jax.Array, jax.Array] | None, segment_ids: jax.Array, **features: Any
    ) -> jax.Array:
        del segment_ids  # which recurrent layers read

        def of_sequence(qkv: jax.Array, rotation: tuple[jax.Array, jax.Array] | None) -> jax.Array:
            return dense_causal_attend(qkv, rotation=rotation, **features)

        by_sequence = jax.tree.map(lambda x: x.reshape(batch, length, *x.shape[1:]), (qkv, rotation))
        out = jax.vmap(of_sequence)(*by_sequence)
        return out.reshape(batch * length, *out.shape[2:])

    attend = partial(by_sequences, segment_ids=jnp.repeat(jnp.arange(batch, dtype=jnp.int32), length))

    @jax.checkpoint
    def score(rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, targets, _ = rows
        logits = model.logits(weights, hidden)
        return _at(logits, targets) - jax.nn.logsumexp(logits, axis=1)

    hidden = model.forward(weights, jnp.maximum(tokens, 0).reshape(-1), positions, attend)
    return _scored(score, hidden, tokens, _is_scored(tokens, lengths))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@partial(jax.jit, static_argnums=(0, 1))
def _tiled(
    model: Model, kernel_backend: str | None, weights: Weights, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    backend = or_reference(kernel_backend)
    batch, length = tokens.shape
    block_size = TRAINERS_BLOCK_SIZE
    blocks = -(-length // block_size)
    tables = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    # What is behind an end stays in its row: nobody sees it. That it hangs on the tokens keeps the compiler from
    # knowing how often loops run (`models.row_tiles`).
    live = (positions < lengths[:, None]) & (tokens >= 0)
    kv_lens = jnp.where(jnp.any(live, axis=1), length, 0)
    starts = jnp.arange(batch + 1, dtype=jnp.int32) * length

    def attend(asked: Attention) -> jax.Array:
        kv = jnp.stack([asked.k, asked.v], axis=1)  # [B * L, 2, KVH, D]
        kv = kv.reshape(batch, length, *kv.shape[1:])
        kv = jnp.pad(kv, ((0, 0), (0, blocks * block_size - length), (0, 0), (0, 0), (0, 0)))
        pool = kv.reshape(batch * blocks, block_size, *kv.shape[2:]).transpose(0, 2, 3, 1, 4)
        features = dict(asked.features)
        rows = tables, kv_lens, starts
        if features.pop("chunked", False):  # of the context (Llama 4): as the engine has them
            chunk = features.pop("sliding_window")
            rows = mixed_chunks(*rows, jnp.int32(0), chunk, block_size, length)
        return invariant_attention(asked.q, pool, *rows, backend=kernel_backend, **features)

    flat = jnp.maximum(tokens, 0).reshape(-1), positions.reshape(-1), live.reshape(-1)
    hidden = forward_in_row_tiles(model, weights, *flat, attend, backend)
    head = model.head_weights(weights)

    def score(rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, targets, wanted = rows
        logits, sums = logits_and_sums(model, head, hidden, wanted, backend)
        return _at(logits, targets) - sums[:, 0]

    return _scored(score, hidden, tokens, _is_scored(tokens, lengths))


def _tiled_forward(
    model: Model, kernel_backend: str | None, weights: Weights, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Any]:
    return _tiled(model, kernel_backend, weights, tokens, lengths), (weights, tokens, lengths)


def _tiled_backward(
    model: Model, kernel_backend: str | None, saved: Any, gradient: jax.Array
) -> tuple[Any, None, None]:
    weights, tokens, lengths = saved
    _, backward = jax.vjp(lambda weights: _plain(model, weights, tokens, lengths), weights)
    return backward(gradient)[0], None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _is_scored(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """bool [batch, length]: whether a token has another before it, and is before the end."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return (position > 0) & (position < lengths[:, None]) & (tokens >= 0)


def _scored(score: Any, hidden: jax.Array, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
    """score((hidden, targets, wanted)) of some rows at a time, each token's target being the one after it: float32
    [batch, length], 0 where nothing is wanted. hidden: [batch * length, hidden]."""
    batch, length = tokens.shape
    total = batch * length
    rows = min(_HEAD_ROWS, total)

    def in_parts(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, -total % rows), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(-1, rows, *x.shape[1:])

    behind = jnp.roll(jnp.maximum(tokens, 0), -1, axis=1), jnp.roll(wanted, -1, axis=1)
    parts = lax.map(score, (in_parts(hidden), *(in_parts(x.reshape(-1)) for x in behind)))
    found = jnp.roll(parts.reshape(-1)[:total].reshape(batch, length), 1, axis=1)
    return jnp.where(wanted, found, 0.0)


def _at(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
