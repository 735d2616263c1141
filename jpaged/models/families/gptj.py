"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side behind one layer norm, the first columns of each
head rotated in neighbouring pairs, a head with a bias."""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from flax import nnx

from jpaged.models.blocks import Decoder, DecoderConfig, ParallelBlock, decoder_fields
from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader, divide_into_heads
from jpaged.models.layers import MLP, Attention
from jpaged.models.loading import pieces
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.norms import LayerNorm


class GPTJFamily:
    """All sizes."""

    model_type = "gptj"
    base_prefix = "transformer."
    derived_tensors = r"\.attn\.(masked_)?bias$|\.attn\.embed_positions$"

    def read_config(self, read: ConfigReader) -> DecoderConfig:
        read = read.with_other_names(
            n_embd="hidden_size",
            n_head="num_attention_heads",
            n_layer="num_hidden_layers",
            n_positions="max_position_embeddings",
        )
        hidden_size, num_heads = read.integer("n_embd", 4096), read.integer("n_head", 16)
        head_dim = divide_into_heads(hidden_size, num_heads)
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
            yield from pieces.separate_qkv(f"{theirs}.attn", attention, config, bias=False, order=config.columns)
            yield from pieces.output_projection(f"{theirs}.attn.out_proj", attention, config, bias=False)
            yield from pieces.linear(f"{theirs}.mlp.fc_in", f"{mlp}.up", hidden, inner, bias=True)
            yield from pieces.linear(f"{theirs}.mlp.fc_out", f"{mlp}.down", inner, hidden, bias=True)
        yield from pieces.layer_norm("transformer.ln_f", "norm", hidden)
        yield pieces.head("lm_head.weight", "transformer.wte.weight", config)
        head = "embedding" if config.tie_word_embeddings else "lm_head"
        yield pieces.as_is("lm_head.bias", f"{head}_bias", config.vocab_size)
