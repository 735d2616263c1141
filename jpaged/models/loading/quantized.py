"""Reads the tensors of quantized layers: which there are, what they become, and where that belongs.

q_proj.weight, q_proj.weight_scale  --Scheme.arrays-->  values, scales  --derived_piece-->  qkv, qkv_scale
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jpaged.api.errors import CheckpointError
from jpaged.models.loading.mxfp4 import PackedTensor
from jpaged.models.loading.pieces import Piece
from jpaged.models.loading.runs import Run, runs
from jpaged.models.loading.safetensors_file import StoredTensor
from jpaged.models.model import Model
from jpaged.models.quantization.layers import (
    StoredLayer,
    derived_piece,
    is_fused,
    is_transposed,
    row_order,
    stored_layer,
)
from jpaged.models.quantization.scheme import BadTensor, Stored

Tensors = dict[str, StoredTensor]
"""What a piece is filled from, by the family's names."""

_UNREAD = "input_scale"
"""Of experts, whose activations are not rounded. One that saw no token when it was calibrated may have a scale of 0."""

_FLOATS = ("F64", "F32", "F16", "BF16")


def expected_tensors(model: Model, piece: Piece) -> dict[str, Stored]:
    """What a checkpoint must have for a piece, by name."""
    layout, scheme = model.quantized.get(piece.parameter), model.config.quantization
    if scheme is not None and piece.parameter in model.dequantized:
        layer = StoredLayer(piece.tensor.removesuffix(".weight"), *piece.shape)
        return {f"{layer.name}.{suffix}": tensor for suffix, tensor in scheme.tensors(layer).items()}
    if layout is None or scheme is None or scheme.online:
        return {piece.tensor: Stored(_FLOATS, (piece.shape,))}
    if is_fused(piece, layout):
        return {f"{piece.tensor}{suffix}": tensor for suffix, tensor in scheme.fused_tensors(piece.shape).items()}
    layer = stored_layer(piece, layout)
    if is_transposed(piece, layout):
        raise CheckpointError(
            f"{layer.name} is stored transposed by a {model.config.architecture}, for which checkpoints in"
            f" {scheme.name} are not supported; use one that is not quantized."
        )
    wanted = scheme.tensors(layer)
    if layout.experts and _UNREAD in wanted:
        wanted[_UNREAD] = replace(wanted[_UNREAD], optional=True)
    return {f"{layer.name}.{suffix}": tensor for suffix, tensor in wanted.items()}


def repeated_scales(model: Model, shard: Model) -> dict[str, int]:
    """How often each scale stands in a parameter whose shards share those of groups (`Kind.in_groups_of`): by the
    parameter's name, of those that stand there more than once."""
    scheme = model.config.quantization
    if scheme is None or scheme.kind.group is None:
        return {}
    shapes = dict(zip(shard.parameter_names, shard.abstract_weights, strict=True))
    found = {}
    for name, layout in shard.quantized.items():
        if layout.splits_inputs and (scale := shapes.get(f"{name}_scale")) is not None:
            times = scheme.kind.group * scale.shape[-1] // layout.input_size
            if times > 1 and layout.input_size % scheme.kind.group:
                found[f"{name}_scale"] = times
    return found


class QuantizedLayers:
    """Reads one after the other. device: where weights are quantized; the default device if None. repeated: as
    `repeated_scales`, of the shards that are filled."""

    def __init__(self, model: Model, device: jax.Device | None, repeated: Mapping[str, int]) -> None:
        self._model, self._device, self._repeated = model, device, repeated
        self._orders: dict[tuple[str, int], int] = {}

    def are_plain(self, piece: Piece) -> bool:
        """Whether a piece is of a stored tensor as it stands."""
        return self._model.config.quantization is None or not (
            piece.parameter in self._model.quantized or piece.parameter in self._model.dequantized
        )

    def runs(self, piece: Piece, tensors: Mapping[str, StoredTensor], most_bytes: int) -> list[Run]:
        """What a piece is made of, where its tensor takes more than so many bytes: see `runs`.

        One tensor of all experts is cut between them, and a layer that is quantized here between outputs. A layer that
        the checkpoint has quantized is read as a whole.
        """
        layout, scheme = self._model.quantized.get(piece.parameter), self._model.config.quantization
        if layout is None:
            return runs(piece, tensors[piece.tensor], most_bytes) if self.are_plain(piece) else []
        assert scheme is not None
        if is_fused(piece, layout):
            cuttable = scheme.online or not scheme.separate_experts
            # Never within an expert, whose rows may be inputs that share scales (DBRX).
            most_bytes = max(most_bytes, tensors[piece.tensor].array_bytes // piece.split[piece.axes[0]])
        else:
            cuttable = scheme.online and not is_transposed(piece, layout)
        return runs(piece, tensors[piece.tensor], most_bytes) if cuttable else []

    def arrays(self, piece: Piece, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """What the layer's tensors become: see `Scheme.arrays`; {} where they are not quantized.

        Raises:
            CheckpointError: they hold what cannot be served.
        """
        layout, scheme = self._model.quantized.get(piece.parameter), self._model.config.quantization
        plain = piece.parameter in self._model.dequantized
        if scheme is None or self.are_plain(piece):
            return {}
        if layout is None:
            layer = StoredLayer(piece.tensor.removesuffix(".weight"), *piece.shape)
        else:
            layer = stored_layer(piece, layout)
        fused = layout is not None and is_fused(piece, layout)
        prefix = piece.tensor if fused else f"{layer.name}."
        found: dict[str, Any]
        if scheme.online:
            assert layout is not None
            weight = jax.device_put(tensors[piece.tensor].read(), self._device)
            found = {"weight": weight, "order": row_order(piece, layout)}
        elif fused and not scheme.separate_experts:
            found = self._packed(tensors[piece.tensor])
        else:
            named = {name.removeprefix(prefix): one for name, one in tensors.items()}
            if layout is not None and layout.experts:
                named.pop(_UNREAD, None)
            found = {suffix: one.read() for suffix, one in named.items()}
        try:
            arrays = scheme.arrays(layer, found)
        except BadTensor as error:
            at_fault = tensors[piece.tensor if scheme.online else f"{prefix}{error.suffix}"]
            raise CheckpointError(
                f"{at_fault.path}: tensor {at_fault.name!r} {error.reason}; download or quantize it again."
            ) from None
        if plain:
            here = {suffix: jax.device_put(array, self._device) for suffix, array in arrays.items()}
            return {"": scheme.dequantized(here, self._model.dtype)}
        if "_order" in arrays:
            expert = piece.offsets[0] if layout is not None and layout.experts else 0
            order = hash(np.asarray(arrays["_order"]).tobytes())
            if self._orders.setdefault((piece.parameter, expert), order) != order:
                raise CheckpointError(
                    f"{layer.name} orders its inputs in another way than the layers that are one product with it"
                    f" ({piece.parameter}), which is not supported; use a checkpoint without act-order."
                )
        return arrays

    def _packed(self, tensor: StoredTensor) -> dict[str, Any]:
        if not isinstance(tensor, PackedTensor):
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} is not in MXFP4, though config.json's quantization_config says"
                " so; correct it, or download the checkpoint again."
            )
        blocks, scales = tensor.blocks.read_bytes(), tensor.scales.read_bytes()
        return {"blocks": jax.device_put(blocks, self._device), "scales": jax.device_put(scales, self._device)}

    def pieces(self, piece: Piece, arrays: Mapping[str, Any]) -> Iterator[tuple[Piece, Any]]:
        """Where arrays belong. arrays: of the layer; or of a plain piece, whose tensor is the only one."""
        layout = self._model.quantized.get(piece.parameter)
        for suffix, array in arrays.items():
            if (times := self._repeated.get(piece.parameter + suffix, 1)) > 1:
                array = np.repeat(array, times, axis=1)
            yield (piece if layout is None else derived_piece(piece, layout, suffix, array.shape)), array
