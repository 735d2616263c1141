"""Finds what the keys and values of each layer are divided by in an FP8 cache, by how large they are.

built-in token ids --a forward pass, before there is a pool--> largest |key|, largest |value| of each layer
                                                               --> scales: powers of two, for the engine's life

The token ids depend on the size of the vocabulary alone, and powers of two do not feel the last bits of a sum: an
engine that is started again has the same scales, on any number of devices, and what it recomputes is what it wrote.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import frexp, ldexp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.api.errors import CheckpointError
from jpaged.models.dense import dense_causal_attend
from jpaged.models.model import Model
from jpaged.pallas_kernels import split_qkv
from jpaged.pallas_kernels.common.numerics import FP8_MAX

KVScales = tuple[tuple[float, float], ...]
"""Of keys and of values, layer by layer."""

_SEQUENCES, _LENGTH = 8, 256
_HEADROOM = 2.0
"""How much larger than those that were seen keys and values may be before any is clipped. e4m3 keeps its digits over 15
powers of two, of which this costs one, and rounding scales up to a power of two another one at most."""


def calibration_tokens(vocab_size: int, longest: int) -> np.ndarray:
    """int32 [8, 256], or shorter ones: the same for all models whose vocabulary is as large. In every other sequence
    all tokens are alike; in the others small ids are frequent, as early merges are in texts."""
    draws = np.random.Generator(np.random.PCG64(0)).random((_SEQUENCES, min(_LENGTH, longest)))
    draws[1::2] = np.expm1(draws[1::2] * np.log1p(vocab_size)) / vocab_size
    return np.minimum(draws * vocab_size, vocab_size - 1).astype(np.int32)


def largest_of(model: Model, weights: Sequence[jax.Array], tokens: jax.Array) -> jax.Array:
    """float32 [layers, 2]: the largest magnitudes of keys and of values of a sequence, over all shards, infinity where
    one is not finite; 0 of layers that keep none. Traced.

    model: a shard of one, or a whole one. tokens: int32 [T].
    """
    found: list[jax.Array] = []
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    model.forward(weights, tokens, positions, partial(measured_attend, found))
    of_layers = iter(found)
    keep = [state is None for state in model.config.layer_states]
    largest = jnp.stack([next(of_layers) if keeps else jnp.zeros(2) for keeps in keep])
    return model.collectives.all_max(largest)


def measured_attend(
    found: list[jax.Array],
    qkv: jax.Array,
    *,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    norm_eps: float = 1e-6,
    segment_ids: jax.Array | None = None,
    **features: Any,
) -> jax.Array:
    """`dense_causal_attend`, which also adds the largest magnitudes of keys and values to `found`: float32 [2], as of
    `largest_of`; zeros of latents. segment_ids: as of that; tokens of -1 are padding."""
    given: dict[str, Any] = {"rotation": rotation, "norms": norms, "norm_eps": norm_eps, "segment_ids": segment_ids}
    if features.get("value_dim") is not None:
        found.append(jnp.zeros(2, jnp.float32))
        return dense_causal_attend(qkv, **given, **features)
    _, *both = split_qkv(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps)
    if segment_ids is not None:
        both = [jnp.where((segment_ids >= 0)[:, None, None], one, 0) for one in both]
    # The maximum of a CPU may lose a NaN.
    largest = [jnp.where(jnp.all(jnp.isfinite(one)), jnp.max(jnp.abs(one)), jnp.inf) for one in both]
    found.append(jnp.stack(largest).astype(jnp.float32))
    return dense_causal_attend(qkv, **given, **features)


def calibrated_scales(model: Model, run: Callable[[np.ndarray], Any]) -> KVScales:
    """Scales for an engine: powers of two by which twice the largest key, or value, of the built-in sequences becomes
    at most 448; 1 where all are 0.

    run: of a sequence, int32 [T], `largest_of`.

    Raises:
        CheckpointError: keys or values are not finite.
    """
    rows = calibration_tokens(model.vocab_size, model.config.max_position_embeddings)
    largest = np.max([np.asarray(run(row)) for row in rows], axis=0)
    for layer, of_layer in enumerate(largest):
        scales_of(of_layer, layer)
    return tuple((_power_of_two(float(keys)), _power_of_two(float(values))) for keys, values in largest)


def scales_of(largest: np.ndarray, layer: int) -> tuple[float, float]:
    """Scales for a checkpoint: those by which the largest of a layer's keys and values, float32 [2], become 448, as
    compressed-tensors calculates them; 1 where all are 0.

    Raises:
        CheckpointError: keys or values are not finite.
    """
    if not np.isfinite(largest).all():
        what = "values" if np.isfinite(largest[0]) else "keys"
        raise CheckpointError(
            f"The model makes {what} of infinity or NaN in layer {layer}, which have no scale in FP8; its checkpoint"
            " may be damaged."
        )
    keys, values = (float(one / np.float32(FP8_MAX)) if one > 0 else 1.0 for one in largest.astype(np.float32))
    return keys, values


def _power_of_two(largest: float) -> float:
    """The least one by which _HEADROOM * largest becomes at most 448; 1 for 0."""
    if largest == 0:
        return 1.0
    mantissa, exponent = frexp(_HEADROOM * largest / FP8_MAX)
    return ldexp(1.0, max(exponent - (mantissa == 0.5), -100))
