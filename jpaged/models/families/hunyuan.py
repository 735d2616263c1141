"""Hunyuan (Tencent 2025): Llama's layers, whose queries and keys are normed after the rotation; also with experts, of
which one is shared.

RoPE of type "dynamic" with an "alpha" has one base for all lengths: theta * alpha ** (d / (d - 2)), with d = head_dim.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.api.errors import CheckpointError, UnsupportedModelError, shown
from jpaged.models.blocks import decoder_fields
from jpaged.models.config_reader import ConfigReader
from jpaged.models.experts import Routing
from jpaged.models.family import Attend
from jpaged.models.layers import Attention
from jpaged.models.linear import PartialSum
from jpaged.models.loading import pieces
from jpaged.models.norms import HeadNorms, Norm
from jpaged.models.sparse_llama_family import SparseLlamaConfig, SparseLlamaFamily
from jpaged.pallas_kernels import split_qkv


class RotatedFirst(Attention):
    """Attention whose queries and keys are rotated, and then normed; both in XLA."""

    def __call__(
        self,
        x: Any,
        attend: Attend,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norms: tuple[Norm, ...] | HeadNorms | None = None,
        backend: str | None = "xla",
        temperature: jax.Array | None = None,
    ) -> PartialSum:
        """As `Attention.__call__`. norms: that of each query head and that of each key head."""
        assert isinstance(norms, tuple)
        of_queries, of_keys = norms

        def attend_normed(qkv: jax.Array, **features: Any) -> Any:
            tokens, kv_heads, slots, dim = qkv.shape
            q, k, v = split_qkv(qkv, rotation=rotation, norms=None)
            q = of_queries(q).reshape(tokens, kv_heads, slots - 2, dim)
            return attend(jnp.concatenate([q, of_keys(k)[:, :, None], v[:, :, None]], axis=2), **features)

        return super().__call__(x, attend_normed, None, None, backend, temperature)


class HunyuanFamily(SparseLlamaFamily):
    """With experts, or without."""

    attention = RotatedFirst
    norm_names = "query_layernorm", "key_layernorm"


def _read_dense(read: ConfigReader) -> SparseLlamaConfig:
    return _read(read, num_experts=0)


def _read_moe(read: ConfigReader) -> SparseLlamaConfig:
    return _read(read, num_experts=_same(read, "num_experts", read.integer("num_local_experts", 1)))


def _read(read: ConfigReader, num_experts: int) -> SparseLlamaConfig:
    read = _with_base(read)
    fields = decoder_fields(read, default_eps=1e-5)
    routing = Routing(per_token=_same(read, "moe_topk", read.integer("num_experts_per_tok", 1)) if num_experts else 1)
    if num_experts:
        routing.check(num_experts)
    inner, bias = fields["intermediate_size"], read.flag("attention_bias", False)
    return SparseLlamaConfig(
        **fields,
        num_experts=num_experts,
        routing=routing,
        expert_size=inner if num_experts else 0,
        shared_size=inner if num_experts else 0,
        dense_layers=(not num_experts,) * fields["num_layers"],
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _with_base(read: ConfigReader) -> ConfigReader:
    """With the base that RoPE's "alpha" stands for; other entries as they are.

    Raises:
        CheckpointError: heads are too narrow for the formula.
    """
    parameters = read.config.get("rope_scaling") or read.config.get("rope_parameters") or {}
    kind = parameters.get("rope_type") or parameters.get("type") if isinstance(parameters, Mapping) else None
    if kind != "dynamic" or not parameters.get("alpha"):
        return read
    default = read.integer("hidden_size") // read.integer("num_attention_heads")
    dim, of_rope = read.head_dim("head_dim", default), ConfigReader(read.architecture, parameters)
    theta = of_rope.number("rope_theta", read.number("rope_theta", 10000.0))
    if dim < 4:
        raise CheckpointError(f"config.json: RoPE with an alpha needs heads of 4 columns at least, got {dim}.")
    base = theta * of_rope.number("alpha", 1.0) ** (dim / (dim - 2))
    return read.with_entries(rope_theta=base, rope_scaling=None, rope_parameters=None)


def _same(read: ConfigReader, name: str, default: int) -> int:
    """A positive integer, or a list with an entry for each layer, all of them equal.

    Raises:
        UnsupportedModelError: layers differ.
    """
    value = read.config.get(name)
    if isinstance(value, list | tuple) and value:
        if any(one != value[0] for one in value):
            raise UnsupportedModelError(f"config.json: {name} that differs by layer is not supported: {shown(value)}.")
        read = read.with_entries(**{name: value[0]})
    return read.integer(name, default)


HUNYUAN = HunyuanFamily("hunyuan_v1_dense", _read_dense)
HUNYUAN_MOE = HunyuanFamily("hunyuan_v1_moe", _read_moe, pieces.ExpertNames(router="gate.wg", shared="shared_mlp"))
