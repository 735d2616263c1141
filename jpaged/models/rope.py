"""Rotary position embeddings (Su et al. 2021) and the ways in which checkpoints stretch them.

Every stretching supported here changes the frequencies once and for all, so a key can be rotated when it is
written to the pool and never again. Two published ones do not: dynamic NTK and LongRoPE pick the frequencies by
the length that the whole sequence has reached, which would rotate keys already cached. Up to the length where
their frequencies first change they are constant too, and that length is the context that a model gets here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.checks import LARGEST_FLOAT32, is_number
from jpaged.errors import CheckpointError, UnsupportedModelError, shown

_LONGEST_CONTEXT = 2**31 - 1

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """What a rotation needs.

    kind: one of `ROPE_TYPES`, how the frequencies were made.
    theta: the base wavelength they were made from.
    frequencies: float32 [head_dim / 2], radians a token.
    attention_scale: multiplies cos and sin (YaRN and LongRoPE), so attention scores get its square.
    """

    kind: str
    theta: float
    frequencies: tuple[float, ...] = field(repr=False)
    attention_scale: float = 1.0

    def table(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 [tokens, head_dim / 2], of int32 positions [tokens]."""
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        return jnp.cos(angles) * self.attention_scale, jnp.sin(angles) * self.attention_scale


@np.errstate(all="ignore")  # what overflows is refused at the end
def parse_rope(config: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> tuple[Rope, int]:
    """The rotation that a Hugging Face config.json describes, and the context length in tokens that it allows.

    Reads both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`.

    Raises:
        UnsupportedModelError: the type of RoPE is not implemented.
        CheckpointError: a parameter of that type is missing or not a number.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"config.json: rope_scaling must be an object or null, got {shown(parameters)}.")
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    if nested:
        if any(value != nested[0] for value in nested) or len(nested) != len(parameters):
            raise UnsupportedModelError(
                f"config.json: rope_parameters that differ from layer to layer are not supported: {shown(parameters)}."
            )
        parameters = nested[0]

    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES or "mrope_section" in parameters:
        found = "mrope" if "mrope_section" in parameters else kind
        raise UnsupportedModelError(
            f"config.json: RoPE of type {shown(found)} is not supported; supported types: {', '.join(ROPE_TYPES)}."
        )
    rotated_fraction = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if rotated_fraction != 1.0:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor {rotated_fraction} is not supported, only 1.")

    def number(name: str, default: Any = None, above: float = 0.0) -> float:
        value = parameters.get(name)
        if value is None:
            value = default
        if not is_number(value) or not above < value <= LARGEST_FLOAT32:
            raise CheckpointError(
                f"config.json: RoPE of type {kind!r} needs a number above {above:g} for {name!r}, got {shown(value)}."
            )
        return value

    theta = float(number("rope_theta", config.get("rope_theta") or 10000.0, above=1.0))
    plain = _plain_frequencies(theta, head_dim)
    # The entry at the top, where there is one, wins in transformers too.
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    parameters = {**parameters, "original_max_position_embeddings": original}
    original_length = int(number("original_max_position_embeddings", max_position_embeddings, above=1.0))
    scale = 1.0
    length = max_position_embeddings
    if kind in ("default", "dynamic"):
        frequencies = plain
    elif kind == "linear":
        factor = number("factor")
        frequencies = plain / np.float32(factor)
        length = int(max_position_embeddings * factor)
    elif kind == "llama3":
        low = number("low_freq_factor")
        high = number("high_freq_factor", above=low)
        frequencies = _llama3_frequencies(plain, number("factor"), low, high, original_length)
    elif kind == "yarn":
        factor = number("factor", max_position_embeddings / original_length)
        frequencies = _yarn_frequencies(
            theta,
            head_dim,
            factor,
            original_length,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(parameters.get("truncate", True)),
        )
        scale = _yarn_scale(factor, number("mscale", 1.0), number("mscale_all_dim", 0.0, above=-1.0))
        scale = number("attention_factor", scale)
        length = max(max_position_embeddings, int(original_length * factor))
    else:
        factors: Any = parameters.get("short_factor")
        valid = isinstance(factors, list) and len(factors) == head_dim // 2
        if not valid or not all(isinstance(f, int | float) and 0 < f <= LARGEST_FLOAT32 for f in factors):
            raise CheckpointError(
                f"config.json: RoPE of type 'longrope' needs {head_dim // 2} positive numbers (half of"
                f" head_dim) for 'short_factor', got {shown(factors)}."
            )
        frequencies = np.float32(1.0) / (np.asarray(factors, np.float32) * _wavelengths(theta, head_dim))
        factor = number("factor", max_position_embeddings / original_length)
        default_scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_length))
        scale = number("attention_factor", default_scale)
        length = min(original_length, max_position_embeddings)
    if not np.isfinite(frequencies).all():
        raise CheckpointError(f"config.json: the RoPE parameters {shown(dict(parameters))} overflow float32.")
    rope = Rope(kind, theta, tuple(float(f) for f in frequencies), float(scale))
    return rope, min(length, _LONGEST_CONTEXT)


def _wavelengths(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2 i / head_dim) in float32, every step rounded as transformers rounds it (the power itself exactly)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (theta ** exponents.astype(np.float64)).astype(np.float32)


def _plain_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return np.float32(1.0) / _wavelengths(theta, head_dim)


def _llama3_frequencies(plain: np.ndarray, factor: float, low: float, high: float, original_length: int) -> np.ndarray:
    """Llama 3.1: divides the low frequencies by factor, leaves the high ones, and blends in between."""
    wavelengths = np.float32(2 * math.pi) / plain
    smooth = (np.float32(original_length) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * plain / np.float32(factor) + smooth * plain
    return np.where(
        wavelengths > original_length / low,
        plain / np.float32(factor),
        np.where(wavelengths < original_length / high, plain, blended),
    ).astype(np.float32)


def _yarn_frequencies(
    theta: float,
    head_dim: int,
    factor: float,
    original_length: int,
    *,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """YaRN (Peng et al. 2023, section 3.2): interpolates by the number of turns within the original context."""

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with_turns(beta_fast), pair_with_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    interpolated = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    kept = 1 - interpolated
    wavelengths = _wavelengths(theta, head_dim)
    slow = np.float32(1.0) / (np.float32(factor) * wavelengths)
    return slow * (1 - kept) + (np.float32(1.0) / wavelengths) * kept


def _yarn_scale(factor: float, numerator: float, denominator: float) -> float:
    """YaRN's temperature (its equation 22); a checkpoint that weighs it does so by two weights, as a ratio."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return temperature(numerator) / temperature(denominator) if denominator else temperature(1.0)
