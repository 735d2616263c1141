"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) and Codestral Mamba: recurrent layers alone.

    x += mixer(norm(x))

A layer more does nothing, and keeps a small key and value of each token that nobody reads: by its blocks the engine
counts tokens, and finds the snapshots of states that prefixes have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, SequentialBlock
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.mamba import Mamba2, mamba_pieces
from jpaged.models.mamba_config import MambaOptions, read_mamba
from jpaged.models.norms import RMSNorm
from jpaged.models.states import MambaState

_USUAL = {
    **{"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
    **{"use_bias": False, "use_conv_bias": True},
}
"""Entries and their values where config.json has none."""
_NAMES = {
    **{"num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_size": "mamba_d_state"},
    **{"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"},
    **{"use_bias": "mamba_proj_bias", "use_conv_bias": "mamba_conv_bias"},
}
"""What other families call them."""

_COLUMNS = 16
"""Of the key and of the value, the fewest that kernels take."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """mamba: what the layers are like."""

    mamba: MambaOptions


class Mamba2Family:
    """All sizes."""

    model_type = "mamba2"
    base_prefix = "backbone."
    derived_tensors = ""
    aliases = (("backbone.embedding.", "backbone.embeddings."),)  # as the first checkpoints have it

    def read_config(self, read: ConfigReader) -> Mamba2Config:
        read = read.with_defaults(**_USUAL)
        inner = read.integer("expand", 2) * read.integer("hidden_size", 4096)
        known = read.with_entries(**{name: read.config[own] for own, name in _NAMES.items()})
        state, options = read_mamba(known, inner)
        layers = read.integer("num_hidden_layers", 64)
        return Mamba2Config(
            **read.common(),
            hidden_size=read.integer("hidden_size", 4096),
            num_layers=layers + 1,
            num_heads=state.heads,
            num_kv_heads=1,
            head_dim=_COLUMNS,
            intermediate_size=inner,
            max_position_embeddings=read.integer("max_position_embeddings", 262144),
            layer_states=(*(state,) * layers, None),
            counts_tokens_alone=True,
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            norm_eps=read.number("layer_norm_epsilon", 1e-5),
            activation="silu",
            mamba=options,
        )

    def module(self, config: Mamba2Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives) -> Decoder:
        hidden, layers, eps = config.hidden_size, config.num_layers, config.norm_eps
        norm = partial(RMSNorm, hidden, eps, dtype, rngs)

        def block(layer: int) -> SequentialBlock:
            state = config.layer_states[layer]
            if not isinstance(state, MambaState):
                return SequentialBlock(None, None)
            mixer = Mamba2(state, hidden, layers, eps, dtype, rngs, collectives, config.mamba)
            return SequentialBlock(mixer, None, attention_norm=norm(), rope=None)

        return Decoder(config, block, norm, dtype, rngs, collectives)

    def tensors(self, config: Mamba2Config) -> Iterator[Piece | TiedTensor]:
        hidden = config.hidden_size
        yield pieces.as_is("backbone.embeddings.weight", "embedding", config.vocab_size, hidden)
        for i, state in enumerate(config.layer_states):
            if isinstance(state, MambaState):
                theirs, ours = f"backbone.layers.{i}", f"layers.{i}"
                yield pieces.norm(f"{theirs}.norm", f"{ours}.attention_norm", hidden)
                yield from mamba_pieces(f"{theirs}.mixer", f"{ours}.attention", hidden, state, config.mamba)
        yield pieces.norm("backbone.norm_f", "norm", hidden)
        yield pieces.head("lm_head.weight", "backbone.embeddings.weight", config)
