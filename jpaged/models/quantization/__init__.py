"""Weights in fewer bits: one file a scheme, found from a config.json or from what a user asks for.

registry.find_scheme(config.json, quantization=...)  ->  Scheme, which `ModelConfig.quantization` holds
quantize(module, ...)                                    puts its layers in the place of plain `Linear`s
models.loading.quantized                                 fills their parameters
models.loading.quantize                                  writes quantized checkpoints, by recipes.py

scheme.py               what a scheme declares
layers.py               what quantized layers have in common
fp8.py                  layers that keep FP8                 fp8_weights.py, compressed_tensors.py   checkpoints
int8.py                 layers that keep 8-bit integers      int8_weights.py, packed_weights.py
int4.py                 layers that keep 4 bits              packed_weights.py, compressed_tensors.py
nvfp4.py                layers that keep NVFP4               compressed_tensors.py, modelopt.py
grouped.py              those of experts, in any of these
row_scales.py           what checkpoints in FP8 and 8-bit integers have in common
online.py               checkpoints that are not quantized, of which layers are while they are read
"""

from collections.abc import Iterable
from math import gcd
from typing import Any

from flax import nnx

from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.models.grouped_linear import GroupedLinear
from jpaged.models.linear import DelicateLinear, Linear, LinearLayout
from jpaged.models.loading.pieces import Piece
from jpaged.models.quantization.layers import SUFFIXES, Kind, StoredLayer, is_fused, is_transposed, stored_layer
from jpaged.models.quantization.registry import find_scheme, stored_method
from jpaged.models.quantization.scheme import Scheme

__all__ = ["SUFFIXES", "Scheme", "find_scheme", "quantize", "stored_method"]


def quantize(
    module: Any, scheme: Scheme, pieces: Iterable[Piece], rngs: nnx.Rngs, shards: int
) -> tuple[dict[str, LinearLayout], frozenset[str]]:
    """Puts the scheme's layers in the place of a module's `Linear`s and experts, except for embeddings and heads.

    Online, those are quantized that tensor parallelism splits: the products of attention and MLPs, and of recurrent
    layers with what is one layer with these in checkpoints.

    pieces: of the whole model's checkpoint, whose names say which layers the scheme covers.
    shards: of the model; the module is one of them.
    Returns the layouts of those that were replaced, by their parameters' names; and the names of the other parameters
    that loading makes plain numbers (`Scheme.dequantizes`).

    Raises:
        UnsupportedModelError: layers that are one product here are only partly quantized, or none is.
        InvalidParameterError: shards would share the inputs of a scale.
    """
    of_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_parameter.setdefault(piece.parameter, []).append(piece)
    found: dict[str, tuple[Any, Any]] = {}
    others = []
    for path, node in nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(node, nnx.Param) and getattr(node, "of_linear", False):
            others.append(name)
        if scheme.online and isinstance(node, DelicateLinear):
            continue
        if type(node) in (Linear, DelicateLinear, GroupedLinear) and _covers(
            scheme, node.layout, name, of_parameter.get(name, [])
        ):
            found[name] = (path, node)
    if not found:
        raise UnsupportedModelError(f"The scheme {scheme.name!r} quantizes no layer of this model.")
    for path, node in found.values():
        kind = _split(scheme, node.layout, shards)
        owner: Any = module
        for part in path[:-1]:
            owner = owner[part] if isinstance(part, int) else getattr(owner, str(part))
        made = kind.linear if isinstance(node, Linear) else kind.grouped
        setattr(owner, str(path[-1]), made(node, rngs))
    layouts = {name: node.layout for name, (_, node) in found.items()}
    stored = (name for name in others if scheme.dequantizes and _is_stored(scheme, of_parameter.get(name, [])))
    return layouts, frozenset(stored)


def _is_stored(scheme: Scheme, pieces: list[Piece]) -> bool:
    """Whether the linear layers that a parameter of no `Linear` is made of are ones that the scheme covers."""
    layers = [StoredLayer(piece.tensor.removesuffix(".weight"), *piece.shape) for piece in pieces]
    if not all(_is_target(scheme, *both) for both in zip(layers, pieces, strict=True)):
        return False
    for layer in layers:
        scheme.check_layer(layer)
    return bool(layers)


def _is_target(scheme: Scheme, layer: StoredLayer, piece: Piece) -> bool:
    return scheme.modules.covers(layer.name, is_linear=piece.tensor.endswith(".weight"))


def _split(scheme: Scheme, layout: LinearLayout, shards: int) -> Kind:
    """What a shard's layer is of. layout: of a shard."""
    kind = scheme.kind
    if shards == 1 or not layout.splits_inputs:
        return kind
    if kind.group is not None and layout.input_size % kind.group:
        # A shard's inputs begin at a multiple of their number, and so within a group at one of this.
        finer = kind.in_groups_of(gcd(layout.input_size, kind.group))
        if finer is None:
            raise InvalidParameterError(
                f"tensor_parallel_size={shards} gives each device {layout.input_size} inputs of some products, which"
                f" {kind.group}, the inputs that a device needs together, do not divide; lower it."
            )
        kind = finer
    if kind.reorders_inputs:
        ways = "enable_expert_parallel=True, 1" if layout.experts else "1"
        raise InvalidParameterError(
            f"tensor_parallel_size={shards} is not supported for {scheme.name} with act-order, whose inputs of a scale"
            f" lie on several devices; use {ways}, or a checkpoint without act-order."
        )
    return kind


def _covers(scheme: Scheme, layout: LinearLayout, name: str, pieces: list[Piece]) -> bool:
    if scheme.online and layout.shard_axis is None and not layout.joined:
        return False
    layers = [stored_layer(piece, layout) for piece in pieces]
    covered = {layer.name: _is_target(scheme, layer, piece) for layer, piece in zip(layers, pieces, strict=True)}
    if len(set(covered.values())) > 1:
        names = [next(layer for layer, is_covered in covered.items() if is_covered == one) for one in (True, False)]
        raise UnsupportedModelError(
            f"config.json: quantization_config covers {names[0]} and not {names[1]}, which are one product ({name})"
            " here; both or neither must be quantized."
        )
    if not any(covered.values()):
        return False
    for layer, piece in zip(layers, pieces, strict=True):
        # What can be read of all experts has an axis for them, and inputs last, but in MXFP4.
        readable = scheme.fused_experts and len(piece.shape) == 3
        readable = readable and not (scheme.separate_experts and is_transposed(piece, layout))
        if is_fused(piece, layout) and not scheme.online and not readable:
            raise UnsupportedModelError(
                f"{layer.name} has all experts in one tensor, which is not supported in {scheme.name}; use a checkpoint"
                ' that is not quantized (quantization="fp8" or "int8" quantizes it here).'
            )
        if not scheme.separate_experts and not is_fused(piece, layout):
            raise UnsupportedModelError(
                f"{layer.name} in {scheme.name} is not supported, only checkpoints with all experts in one tensor."
            )
        scheme.check_layer(layer)
    return True
