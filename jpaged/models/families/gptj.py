"""GPT-J (Wang and Komatsuzaki 2021) and CodeGen (Nijkamp et al. 2022, arXiv:2203.13474): attention and MLP side by side
behind one layer norm, the first columns of each head rotated in neighbouring pairs, a head with a bias.

CodeGen's checkpoints have q, k, v in one tensor, in the four parts in which it was trained.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpaged.api.errors import CheckpointError
from jpaged.models.blocks import Decoder, DecoderConfig, ParallelBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm

_PARTS = 4
"""Of CodeGen's tensors of q, k, v."""


@dataclass(frozen=True)
class GPTJFamily:
    """One of the architectures. joined: q, k, v are one tensor."""

    model_type: str
    joined: bool

    base_prefix = "transformer."
    derived_tensors = r"\.attn\.(masked_)?bias$|\.attn\.(embed_positions|causal_mask)$"

    def read_config(self, read: ConfigReader) -> DecoderConfig:
        read = read.with_other_names(
            n_embd="hidden_size",
            n_head="num_attention_heads",
            n_layer="num_hidden_layers",
            n_positions="max_position_embeddings",
        )
        hidden_size, num_heads = read.integer("n_embd", 4096), read.integer("n_head", 16)
        head_dim = divide_into_heads(hidden_size, num_heads)
        if self.joined and hidden_size % _PARTS:
            raise CheckpointError(f"config.json: n_embd ({hidden_size}) must be a multiple of {_PARTS}.")
        known = {
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "num_hidden_layers": read.integer("n_layer", 28),
            "intermediate_size": read.integer("n_inner", 4 * hidden_size),
            "max_position_embeddings": read.integer("n_positions", 2048),
        }
        rope = {"rotated_fraction": read.integer("rotary_dim", 64) / head_dim, "interleaved": True}
        fields = decoder_fields(
            read.with_entries(**known),
            eps="layer_norm_epsilon",
            default_eps=1e-5,
            activation="activation_function",
            default_activation="gelu_new",
            rope=rope,
        )
        return DecoderConfig(**fields)

    def module(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        norm = partial(LayerNorm, config.hidden_size, config.norm_eps, dtype, rngs)

        def block(layer: int) -> ParallelBlock:
            mlp = MLP(config, config.activation, dtype, rngs, bias=True)
            return ParallelBlock(Attention(config, layer, dtype, rngs), mlp, attention_norm=norm())

        return Decoder(config, block, norm, dtype, rngs, collectives, head_bias=True)

    def tensors(self, config: DecoderConfig) -> Iterator[Piece | TiedTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        yield pieces.as_is("transformer.wte.weight", "embedding", config.vocab_size, hidden)
        for i in range(config.num_layers):
            theirs, ours = f"transformer.h.{i}", f"layers.{i}"
            attention, mlp = f"{ours}.attention", f"{ours}.mlp"
            yield from pieces.layer_norm(f"{theirs}.ln_1", f"{ours}.attention_norm", hidden)
            if self.joined:
                yield from _joined_qkv(f"{theirs}.attn.qkv_proj.weight", f"{attention}.qkv", config)
            else:
                yield from pieces.separate_qkv(f"{theirs}.attn", attention, config, bias=False, order=config.columns)
            yield from pieces.output_projection(f"{theirs}.attn.out_proj", attention, config, bias=False)
            yield from pieces.linear(f"{theirs}.mlp.fc_in", f"{mlp}.up", hidden, inner, bias=True)
            yield from pieces.linear(f"{theirs}.mlp.fc_out", f"{mlp}.down", inner, hidden, bias=True)
        yield from pieces.layer_norm("transformer.ln_f", "norm", hidden)
        yield pieces.head("lm_head.weight", "transformer.wte.weight", config)
        yield pieces.head_bias("lm_head.bias", config)


def _joined_qkv(tensor: str, parameter: str, config: DecoderConfig) -> Iterator[Piece]:
    """Each part of the tensor has rows of queries, then of values, then of keys; each of the three is in order."""
    hidden, split = config.hidden_size, (config.num_heads, 1, config.head_dim, config.hidden_size)
    for stored, slot in ((0, 0), (2, 1), (1, 2)):  # of queries, keys and values
        part = pieces.Part((_PARTS, 3, hidden // _PARTS, hidden), 1, stored, 1)
        options: dict[str, Any] = {"part": part, "order": config.columns if slot < 2 else (), "ordered_axis": 2}
        yield Piece(tensor, (3 * hidden, hidden), parameter, split, (3, 0, 1, 2), (0, 0, slot, 0), **options)


GPTJ = GPTJFamily("gptj", joined=False)
CODEGEN = GPTJFamily("codegen", joined=True)
