"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts of the full inner width in every layer."""

from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing
from jpaged.models.families.sparse import Names, SparseLlamaConfig, SparseLlamaFamily, read_fields


def _read_mixtral(read: ConfigReader) -> SparseLlamaConfig:
    fields = read_fields(
        read,
        num_experts=read.integer("num_local_experts", 8),
        routing=Routing(per_token=read.integer("num_experts_per_tok", 2)),
        default_length=131072,
        default_theta=1e6,
    )
    num_layers = fields["num_layers"]
    window = read.integer("sliding_window") if read.config.get("sliding_window") is not None else None
    return SparseLlamaConfig(
        **fields,
        expert_size=fields["intermediate_size"],
        dense_layers=(False,) * num_layers,
        layer_windows=(window,) * num_layers,
    )


MIXTRAL = SparseLlamaFamily(
    "mixtral", _read_mixtral, Names(block="block_sparse_moe", gate="w1", up="w3", down="w2")
)
