"""What a scheme declares: which layers it covers, what a checkpoint stores of each, and what that becomes.

checkpoint              Scheme.tensors: names, types, shapes      Scheme.arrays        Kind.linear
q_proj.weight_packed    ------------------------------------->    values [out, n]  ->  a Linear's parameters
q_proj.weight_scale                                               scales [out, G]
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.quantization.layers import Kind, RowOrder, StoredLayer
from jpaged.pallas_kernels.common.numerics import LEAST_SCALE, MOST_SCALE

FLOAT_TYPES = ("F32", "BF16", "F16")
"""Types that scales are stored in, as safetensors files name them."""


class BadTensor(Exception):
    """A tensor of a layer holds what cannot be served. suffix: of its name. reason: goes on after its name."""

    def __init__(self, suffix: str, reason: str) -> None:
        super().__init__(f"{suffix} {reason}")
        self.suffix, self.reason = suffix, reason


@dataclass(frozen=True)
class Stored:
    """A tensor of a layer in a checkpoint. types: safetensors' names of those it may have; shapes: likewise."""

    types: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False


@dataclass(frozen=True)
class Modules:
    """Which layers of a checkpoint are quantized.

    targets, ignored: names or parts of names, whole between dots ("mlp.gate" is not "mlp.gate_proj"), or regular
        expressions that match from a name's beginning, after "re:". "Linear" is every linear layer of torch. What is
        ignored is not quantized though it is a target. Names may be those of the text part of a multimodal checkpoint.
    """

    targets: tuple[str, ...] = ("re:",)
    ignored: tuple[str, ...] = ()

    def covers(self, name: str, *, is_linear: bool) -> bool:
        """name: of a layer, such as "model.layers.0.mlp.down_proj". is_linear: it is a linear layer of torch, not a
        parameter of another module, as all experts in one tensor may be."""
        spellings = (name, f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}")
        if any(_names(entry, one) for entry in self.ignored for one in spellings):
            return False
        named = any(_names(entry, one) for entry in self.targets for one in spellings)
        return named or (is_linear and "Linear" in self.targets)


def _names(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return f".{entry}." in f".{name}."


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to store quantized layers; a subclass for each.

    name: for people. kind: what layers keep of it. modules: which layers.
    online: the checkpoint is not quantized; its weights are while they are read.
    """

    name: str
    kind: Kind
    modules: Modules = field(default_factory=Modules)

    @property
    def online(self) -> bool:
        return False

    @property
    def fused_experts(self) -> bool:
        """Whether a checkpoint's tensors may each have all experts of a layer."""
        return False

    @property
    def separate_experts(self) -> bool:
        """Whether they may each have one."""
        return True

    def fused_tensors(self, shape: tuple[int, ...]) -> dict[str, Stored]:
        """What a checkpoint has of all experts of a layer in one tensor, by what the names end with behind the
        tensor's own. shape: [E, outputs, inputs], or [E, inputs, outputs]. `arrays` takes it."""
        raise NotImplementedError

    @property
    def dequantizes(self) -> bool:
        """Whether weights that no `Linear` has, such as those of latents, are read from a checkpoint in this scheme,
        too. They become plain numbers (`dequantized`)."""
        return False

    def tensors(self, layer: StoredLayer) -> dict[str, Stored]:
        """What a checkpoint has of a layer, by what its tensors' names end with, less the bias."""
        raise NotImplementedError

    def arrays(self, layer: StoredLayer, found: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """What the layer's parameters are filled with, by what their names end with ("" for the values).

        [outputs, n] for those that have a row for each output; [n] for others, whose largest values are kept where
        joined layers have several.

        found: the tensors, by the names of `tensors`; optional ones may lack.

        Raises:
            BadTensor: one holds what cannot be served.
        """
        raise NotImplementedError

    def rounded(self, weight: jax.Array, order: RowOrder) -> tuple[jax.Array, jax.Array]:
        """Of a scheme that is online: values [outputs, inputs] and scales [outputs, 1], the same bits as `arrays` makes
        of a weight, on the device that this is on. The weight must be finite.

        order: how it becomes [outputs, inputs].
        """
        raise NotImplementedError

    def dequantized(self, arrays: Mapping[str, Any], dtype: jnp.dtype) -> jax.Array:
        """A layer's weight [outputs, inputs], of what `arrays` made of it, on the device that they are on."""
        raise NotImplementedError

    def check_layer(self, layer: StoredLayer) -> None:
        """Raises UnsupportedModelError for a layer whose sizes the scheme cannot store."""


def checked_scales(found: Mapping[str, np.ndarray], suffix: str) -> np.ndarray:
    """A tensor of scales in float32.

    Raises:
        BadTensor: one is zero, negative, infinite or NaN, or too small or too large to compute with.
    """
    scales = np.asarray(found[suffix]).astype(np.float32)
    good = np.isfinite(scales) & (scales > 0)
    if not good.all():
        value = scales[~good].reshape(-1)[0]
        raise BadTensor(suffix, f"has a scale of {value:g}, which must be above 0 and finite")
    good = (scales >= LEAST_SCALE) & (scales <= MOST_SCALE)
    if not good.all():
        value = scales[~good].reshape(-1)[0]
        raise BadTensor(suffix, f"has a scale of {value:g}, which must be from {LEAST_SCALE:g} to {MOST_SCALE:g}")
    return scales


class Entries:
    """The entries of a "quantization_config", read as `ConfigReader` reads those of a config.json."""

    def __init__(self, entries: Mapping[str, Any], where: str = "quantization_config") -> None:
        self._entries, self._where = entries, where

    def get(self, name: str, default: Any = None) -> Any:
        value = self._entries.get(name)
        return default if value is None else value

    def one_of(self, name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        """Raises UnsupportedModelError for another value."""
        value = self.get(name, default)
        if not any(type(value) is type(one) and value == one for one in supported):
            listed = ", ".join(map(repr, supported))
            raise UnsupportedModelError(
                f"config.json: {self._where}: {name}={shown(value)} is not supported; supported: {listed}."
            )
        return value

    def names(self, *names: str) -> tuple[str, ...]:
        """The strings of the first of these lists that there is."""
        found: Any = next((self._entries[name] for name in names if self._entries.get(name) is not None), [])
        if not isinstance(found, list | tuple) or not all(isinstance(one, str) and one for one in found):
            raise CheckpointError(f"config.json: {self._where}: {names[0]} must list names, got {shown(found)}.")
        for one in found:
            if one.startswith("re:"):
                _check_expression(one.removeprefix("re:"), f"{self._where}: {names[0]} has {one!r}")
        return tuple(found)

    def expressions(self, prefix: str) -> tuple[str, ...]:
        """The names of entries behind this prefix, which are regular expressions, as `Modules` takes them.

        Raises:
            CheckpointError: one is no regular expression.
        """
        found = [name for name in self._entries if name.startswith(prefix)]
        for name in found:
            _check_expression(name.removeprefix(prefix), f"{self._where} has {name!r}")
        return tuple(f"re:{name.removeprefix(prefix)}" for name in found)

    def part(self, name: str) -> "Entries | None":
        """The entries of an object; None for null."""
        value = self._entries.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {self._where}: {name} must be an object, got {shown(value)}.")
        return Entries(value, f"{self._where}.{name}")

    def refuse(self, *names: str) -> None:
        """Raises UnsupportedModelError where one of these says anything."""
        for name in names:
            if self._entries.get(name):
                raise UnsupportedModelError(
                    f"config.json: {self._where}: {name}={shown(self._entries[name])} is not supported; leave it out."
                )

    def __iter__(self) -> Any:
        return iter(self._entries)


def _check_expression(pattern: str, what: str) -> None:
    """what: says where it is."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"config.json: {what}, which is no regular expression ({error}).") from error


def check_kv_cache(scheme: Entries | None) -> None:
    """Scales of keys and values in the cache, which `kv_cache_dtype="fp8"` reads, and nothing else does."""
    if scheme is not None:
        scheme.one_of("num_bits", (8,))
        scheme.one_of("type", ("float",))
        scheme.one_of("strategy", ("tensor",), "tensor")
        scheme.one_of("dynamic", (False,), False)
        scheme.one_of("symmetric", (True,), True)
