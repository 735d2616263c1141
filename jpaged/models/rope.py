"""Rotary position embeddings (Su et al. 2021) and the ways in which checkpoints stretch them.

Frequencies are fixed when the model is built, so a key can be rotated when it is written to the pool and never again.
Dynamic NTK and LongRoPE pick them by the length that a sequence has reached. Here they are picked once, by the length
that the model is built for:

    built for                        frequencies                                   equal to transformers' for
    the original length (default)    short factors; no NTK                         all sequences
    more (`max_model_len`)           long factors; NTK's of `max_model_len`        LongRoPE: sequences longer than the
                                                                                   original; NTK: that length

A head of which only a part is rotated, or whose pairs are neighbours, has its columns reordered when the weights are
loaded (`Rope.column_order`). One layout, one kernel: column i pairs with column i + head_dim / 2, and pairs that are
not rotated come last in each half. Queries and keys are reordered alike, so their products stay what they were.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.api.checks import LARGEST_FLOAT32, is_number
from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown

_LONGEST_CONTEXT = 2**31 - 1


@dataclass(frozen=True)
class Rope:
    """What a rotation needs.

    kind: how the frequencies were made, as config.json says it: one of the names at the end of this module.
    theta: the base wavelength they were made from.
    frequencies: float32 [pairs], radians a token, of the pairs that are rotated.
    attention_scale: multiplies cos and sin (YaRN and LongRoPE), so attention scores get its square.
    unrotated: pairs of a head that are not rotated.
    interleaved: columns 2 i and 2 i + 1 of a checkpoint's head are a pair (GPT-J), not i and i + pairs (NeoX, Llama).
    """

    kind: str
    theta: float
    frequencies: tuple[float, ...] = field(repr=False)
    attention_scale: float = 1.0
    unrotated: int = 0
    interleaved: bool = False

    def table(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 [tokens, head_dim / 2], of int32 positions [tokens]."""
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        cos, sin = jnp.cos(angles) * self.attention_scale, jnp.sin(angles) * self.attention_scale
        if not self.unrotated:
            return cos, sin
        still = ((0, 0), (0, self.unrotated))
        return jnp.pad(cos, still, constant_values=1.0), jnp.pad(sin, still)

    @property
    def column_order(self) -> tuple[int, ...]:
        """Where the columns of a head of queries or keys come from, in a checkpoint's head; () if they stay in place.

        For `Piece.order`.
        """
        pairs, half = len(self.frequencies), len(self.frequencies) + self.unrotated
        rest = range(2 * pairs, 2 * half)
        rotated = range(2 * pairs)
        firsts, seconds = (rotated[::2], rotated[1::2]) if self.interleaved else (rotated[:pairs], rotated[pairs:])
        order = (*firsts, *rest[: self.unrotated], *seconds, *rest[self.unrotated :])
        return () if order == tuple(range(2 * half)) else order


@np.errstate(all="ignore")  # what overflows is refused at the end
def parse_rope(
    config: Mapping[str, Any],
    head_dim: int,
    max_position_embeddings: int,
    *,
    max_model_len: int | None = None,
    rotated_fraction: float | None = None,
    interleaved: bool = False,
    theta: float = 10000.0,
    layers: str | None = None,
) -> tuple[Rope, int]:
    """The rotation that a Hugging Face config.json describes, and the context length in tokens that it allows.

    Reads both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`.

    max_model_len: the length to build for, where the frequencies depend on it; None for the original length.
    rotated_fraction: of a head, where config.json has no partial_rotary_factor. None: the family rotates whole heads,
        and another factor is refused.
    interleaved: see `Rope`.
    theta: where config.json has none.
    layers: a layer type, where rope_parameters has entries for several.

    Raises:
        UnsupportedModelError: the type of RoPE is not implemented.
        CheckpointError: a parameter of that type is missing or not a number.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"config.json: rope_scaling must be an object or null, got {shown(parameters)}.")
    nested = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if nested and layers is not None:
        parameters = nested.get(layers, {})
    elif nested:
        first = next(iter(nested.values()))
        if any(value != first for value in nested.values()) or len(nested) != len(parameters):
            raise UnsupportedModelError(
                f"config.json: rope_parameters that differ from layer to layer are not supported: {shown(parameters)}."
            )
        parameters = first

    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if head_dim % 2:
        raise CheckpointError(f"config.json: RoPE needs an even head_dim, got {head_dim}.")
    if kind not in tuple(_STRETCHES) or "mrope_section" in parameters:
        found = "mrope" if "mrope_section" in parameters else kind
        raise UnsupportedModelError(
            f"config.json: RoPE of type {shown(found)} is not supported; supported types: {', '.join(_STRETCHES)}."
        )
    stated = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    fraction, rotated = _fraction(stated or rotated_fraction or 1.0), head_dim
    if kind != "proportional" and fraction != 1.0:
        if rotated_fraction is None:
            raise UnsupportedModelError(f"config.json: partial_rotary_factor {shown(stated)} is not supported, only 1.")
        rotated = _rotated_columns(fraction, head_dim, kind)

    read = _Parameters(kind, parameters, config, rotated, max_position_embeddings, theta, max_model_len, fraction)
    stretched = _STRETCHES[kind](read)
    if not np.isfinite(stretched.frequencies).all():
        raise CheckpointError(f"config.json: the RoPE parameters {shown(read.values)} overflow float32.")
    frequencies = tuple(float(f) for f in stretched.frequencies)
    unrotated = head_dim // 2 - len(frequencies)
    rope = Rope(kind, read.theta, frequencies, float(stretched.attention_scale), unrotated, interleaved)
    return rope, min(stretched.length, _LONGEST_CONTEXT)


def without_image_sections(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json without RoPE's sections for positions in images ("mrope"). A token of text has the same position in
    every section, so its rotation is the usual one."""
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(parameters := config.get(name), Mapping):
            kept = {key: value for key, value in parameters.items() if not key.startswith("mrope_")}
            kept |= {key: "default" for key in ("rope_type", "type") if kept.get(key) == "mrope"}
            config = {**config, name: kept}
    return config


def window_rope(config: Mapping[str, Any], head_dim: int, theta: float) -> Rope:
    """The rotation of layers with a window, in models that stretch that of the other layers alone (Gemma 3, OLMo 3).

    theta: used where config.json gives none for these layers.

    Raises: as `parse_rope`.
    """
    parameters = config.get("rope_parameters")
    by_kind = isinstance(parameters, Mapping) and any(isinstance(value, Mapping) for value in parameters.values())
    described = {"rope_parameters": parameters} if by_kind else {}
    return parse_rope(described, head_dim, _LONGEST_CONTEXT, layers="sliding_attention", theta=theta)[0]


def _fraction(said: Any) -> float:
    """partial_rotary_factor."""
    if not is_number(said) or not 0 < said <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor must be a number in (0, 1], got {shown(said)}.")
    return float(said)


def _rotated_columns(fraction: float, head_dim: int, kind: str) -> int:
    """How many columns of a head are rotated. Of an odd number the last one's pair is rotated, too, as in transformers,
    and frequencies are made from the odd number."""
    rotated = int(head_dim * fraction)
    if not rotated or (rotated % 2 and kind not in _OF_ODD_COLUMNS):
        raise CheckpointError(
            f"config.json: partial_rotary_factor {fraction} of heads of {head_dim} rotates {rotated} columns; RoPE of"
            f" type {kind!r} needs {'one at least' if kind in _OF_ODD_COLUMNS else 'an even number from 2 up'}."
        )
    return rotated


class _Parameters:
    """What config.json says of a RoPE.

    head_dim: columns of a head that are rotated. fraction: of a head's columns, as config.json or the family says.
    theta: see `Rope`. length: of the context, tokens. original_length: of the context before it was stretched.
    max_model_len: the length to build for; None for the original one.
    """

    def __init__(
        self,
        kind: str,
        values: Mapping[str, Any],
        config: Mapping[str, Any],
        head_dim: int,
        length: int,
        theta: float,
        max_model_len: int | None,
        fraction: float,
    ) -> None:
        self.kind = kind
        self.head_dim, self.fraction = head_dim, fraction
        self.length = length
        self.max_model_len = max_model_len
        # The entry at the top, where there is one, wins in transformers too.
        original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        self.values = {**values, "original_max_position_embeddings": original}
        self.theta = float(self.number("rope_theta", config.get("rope_theta") or theta, above=1.0))
        self.original_length = math.ceil(self.number("original_max_position_embeddings", length, above=1.0))

    def number(self, name: str, default: Any = None, above: float = 0.0) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if not is_number(value) or not above < value <= LARGEST_FLOAT32:
            raise CheckpointError(
                f"config.json: RoPE of type {self.kind!r} needs a number above {above:g} for {name!r},"
                f" got {shown(value)}."
            )
        return value


class _Stretched(NamedTuple):
    """frequencies: float32 [pairs]. length: tokens up to which they are right. attention_scale: see `Rope`."""

    frequencies: np.ndarray
    length: int
    attention_scale: float = 1.0


def _default(p: _Parameters) -> _Stretched:
    """RoFormer (Su et al. 2021, arXiv:2104.09864)."""
    return _Stretched(_plain_frequencies(p), p.length)


def _dynamic(p: _Parameters) -> _Stretched:
    """Dynamic NTK (`_compute_dynamic_ntk_parameters` in transformers): past the original length the base grows with the
    length of the sequence, here that of `max_model_len`."""
    if p.max_model_len is None or p.max_model_len <= p.length:
        return _Stretched(_plain_frequencies(p), p.length)
    factor = p.number("factor")
    if p.head_dim < 4:
        raise CheckpointError(f"config.json: RoPE of type 'dynamic' needs 4 columns to rotate, got {p.head_dim}.")
    grown = factor * p.max_model_len / p.length - (factor - 1)
    p.theta *= grown ** (p.head_dim / (p.head_dim - 2))
    return _Stretched(_plain_frequencies(p), p.max_model_len)


def _linear(p: _Parameters) -> _Stretched:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): positions are divided by the factor."""
    factor = p.number("factor")
    return _Stretched(_plain_frequencies(p) / np.float32(factor), int(p.length * factor))


def _proportional(p: _Parameters) -> _Stretched:
    """The first pairs of a whole head turn as those of a head that is rotated whole, the others not at all
    (`_compute_proportional_rope_parameters` in transformers)."""
    frequencies = _plain_frequencies(p) / np.float32(p.number("factor", 1.0))
    turning = np.arange(frequencies.size) < int(p.fraction * p.head_dim // 2)
    return _Stretched(np.where(turning, frequencies, np.float32(0)), p.length)


def _llama3(p: _Parameters) -> _Stretched:
    """Llama 3.1 (`_compute_llama3_parameters` in transformers): divides the low frequencies by the factor, leaves the
    high ones, and blends in between. In Llama 4 Scout nothing is in between."""
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    if high < low:
        raise CheckpointError(
            f"config.json: RoPE of type 'llama3' needs a high_freq_factor ({high}) of at least its low_freq_factor"
            f" ({low})."
        )
    factor = p.number("factor")
    plain = _plain_frequencies(p)
    wavelengths = np.float32(2 * math.pi) / plain
    smooth = (np.float32(p.original_length) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * plain / np.float32(factor) + smooth * plain
    frequencies = np.where(
        wavelengths > p.original_length / low,
        plain / np.float32(factor),
        np.where(wavelengths <= p.original_length / high, plain, blended),
    )
    return _Stretched(frequencies.astype(np.float32), p.length)


def _yarn(p: _Parameters) -> _Stretched:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolates by the number of turns within the original context (its
    section 3.2), and sharpens attention (its equation 22)."""
    factor = p.number("factor", p.length / p.original_length)
    fast, slow = p.number("beta_fast", 32.0), p.number("beta_slow", 1.0)

    def pair_with_turns(turns: float) -> float:
        return p.head_dim * math.log(p.original_length / (turns * 2 * math.pi)) / (2 * math.log(p.theta))

    first, last = pair_with_turns(fast), pair_with_turns(slow)
    if bool(p.values.get("truncate", True)):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, p.head_dim - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(p.head_dim // 2, dtype=np.float32)
    interpolated = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    kept = 1 - interpolated
    wavelengths = _wavelengths(p)
    stretched = np.float32(1.0) / (np.float32(factor) * wavelengths)
    frequencies = stretched * (1 - kept) + (np.float32(1.0) / wavelengths) * kept

    weights = p.number("mscale", 0.0, above=-1.0), p.number("mscale_all_dim", 0.0, above=-1.0)
    length = max(p.length, int(p.original_length * factor))
    return _Stretched(frequencies, length, p.number("attention_factor", _yarn_scale(factor, *weights)))


def _yarn_scale(factor: float, numerator: float, denominator: float) -> float:
    """YaRN's temperature; a checkpoint that weighs it does so by two weights, as a ratio. One alone has no effect, as
    in transformers."""
    if not (numerator and denominator):
        return _temperature(factor, 1.0)
    return _temperature(factor, numerator) / _temperature(factor, denominator)


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_temperature(config: Mapping[str, Any]) -> float:
    """What DeepSeek's models multiply queries and keys by, in place of the rotation's cos and sin: the temperature of
    "mscale_all_dim" where config.json has that in its RoPE's parameters, else 1."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    weight, factor = parameters.get("mscale_all_dim") or 0.0, parameters.get("factor") or 1.0
    for name, value in (("mscale_all_dim", weight), ("factor", factor)):
        if not is_number(value) or not 0 <= value <= LARGEST_FLOAT32:
            raise CheckpointError(f"config.json: RoPE's {name!r} must be a number from 0 up, got {shown(value)}.")
    return _temperature(factor, weight) if kind != "default" else 1.0


def _longrope(p: _Parameters) -> _Stretched:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): short factors up to the original length, long ones beyond."""
    is_long = p.max_model_len is not None and p.max_model_len > p.original_length
    name, length = ("long_factor", p.length) if is_long else ("short_factor", min(p.original_length, p.length))
    factors: Any = p.values.get(name)
    valid = isinstance(factors, list) and len(factors) == p.head_dim // 2
    if not valid or not all(is_number(f) and 0 < f <= LARGEST_FLOAT32 for f in factors):
        raise CheckpointError(
            f"config.json: RoPE of type 'longrope' needs {p.head_dim // 2} positive numbers (half of"
            f" the columns of a head that are rotated) for {name!r}, got {shown(factors)}."
        )
    frequencies = np.float32(1.0) / (np.asarray(factors, np.float32) * _wavelengths(p))
    factor = p.number("factor", p.length / p.original_length)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(p.original_length))
    return _Stretched(frequencies, length, p.number("attention_factor", scale))


def _plain_frequencies(p: _Parameters) -> np.ndarray:
    return np.float32(1.0) / _wavelengths(p)


def _wavelengths(p: _Parameters) -> np.ndarray:
    """theta ** (2 i / head_dim) in float32, every step rounded as transformers rounds it (the power itself exactly)."""
    exponents = np.arange(0, p.head_dim, 2, dtype=np.float32) / np.float32(p.head_dim)
    return (p.theta ** exponents.astype(np.float64)).astype(np.float32)


_STRETCHES: dict[str, Callable[[_Parameters], _Stretched]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first Phi-3 checkpoints
}

_OF_ODD_COLUMNS = ("default", "linear", "llama3")
"""Kinds that are defined for an odd number of rotated columns."""
