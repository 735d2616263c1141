"""ERNIE 4.5 with experts (Baidu 2025): ERNIE 4.5's attention, and experts chosen by a softmax with a correction.

The correction is added to the softmax over all experts when they are picked; a token's weights are the softmax of those
picked, divided by their sum. Shared experts stand beside them. Layers that predict further tokens are not run.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jpaged.api.errors import CheckpointError, shown
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece
from jpaged.models.sparse_llama_family import SparseLlamaConfig, SparseLlamaFamily, sparse_fields


class ErnieMoeFamily(SparseLlamaFamily):
    """All sizes."""

    def sparse_mlp(self, theirs: str, ours: str, config: SparseLlamaConfig) -> Iterator[Piece]:
        """The correction is one row."""
        for piece in pieces.sparse_mlp(theirs, ours, config, self.names):
            is_correction = piece.tensor == f"{theirs}.{self.names.correction}"
            yield replace(piece, shape=(1, *piece.shape)) if is_correction else piece


def _read(read: ConfigReader) -> SparseLlamaConfig:
    read.refuse(("use_bias", False), ("moe_norm_min", 1e-12))
    read = read.with_defaults(num_key_value_heads=4, tie_word_embeddings=True)
    num_experts = read.integer("moe_num_experts", read.integer("num_experts", 64))
    routing = Routing(per_token=read.integer("moe_k", read.integer("num_experts_per_tok", 6)), biased=True)
    sizes: dict[str, Any] = {"default_length": 131072, "default_theta": 500000.0, "default_eps": 1e-5}
    fields = sparse_fields(read, num_experts=num_experts, routing=routing, interleaved=True, **sizes)
    expert_size = read.integer("moe_intermediate_size", 1536)
    return SparseLlamaConfig(
        **fields,
        expert_size=expert_size,
        shared_size=expert_size * _count(read, "moe_num_shared_experts", 2),
        dense_layers=_dense_layers(read, fields["num_layers"]),
    )


def _dense_layers(read: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has an ordinary MLP: between two layers, every so many have experts."""
    start, every = _count(read, "moe_layer_start_index", 1), read.integer("moe_layer_interval", 1)
    end = read.optional_integer("moe_layer_end_index")
    end = num_layers - 1 if end in (None, -1) else end
    return tuple((layer + 1) % every != 0 or not start <= layer <= end for layer in range(num_layers))


def _count(read: ConfigReader, name: str, default: int) -> int:
    """An integer from 0 up."""
    value = read.optional_integer(name)
    if value is not None and value < 0:
        raise CheckpointError(f"config.json: {name!r} must be an integer from 0 up, got {shown(value)}.")
    return default if value is None else value


ERNIE45_MOE = ErnieMoeFamily(
    "ernie4_5_moe",
    _read,
    pieces.ExpertNames(correction="moe_statics.e_score_correction_bias"),
    derived_tensors=r"rotary_emb\.inv_freq$|^model\.mtp_",
)
