"""Writes a model directory for serving benchmarks without a download: a real shape, and a tokenizer of its size.

    python benchmarks/dummy_model.py llama-3.1-8b DIR      then: jpaged serve DIR --load-format dummy
    python benchmarks/dummy_model.py llama-3.1-8b DIR --weights           jpaged serve DIR
    python benchmarks/dummy_model.py llama-3.1-8b DIR --scheme int4     jpaged serve DIR --load-format dummy

The tokenizer is byte-level BPE without merges, its tokens random words of 2 to 8 letters: turning token ids into text
costs what it costs with a real one, and the prompts of `jpaged bench serve` are token ids. --weights writes a
checkpoint as well, where reading it is what is measured. --scheme makes the configuration one of a checkpoint that
`jpaged quantize` wrote.
"""

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.bench.models import CONFIGS
from jpaged.models.quantization.recipes import RECIPES


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    draw = random.Random(0)
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocab) < vocab_size:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8)))
        vocab.setdefault(draw.choice(("Ġ", "")) + word, len(vocab))  # Ġ: a space, as byte-level BPE writes it
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_weights(directory: Path, config: dict[str, Any]) -> None:
    """A safetensors file of a Llama model; one random pattern is written over and over."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (queries, hidden),
            layer + "self_attn.k_proj.weight": (keys, hidden),
            layer + "self_attn.v_proj.weight": (keys, hidden),
            layer + "self_attn.o_proj.weight": (hidden, queries),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    pattern = (np.random.default_rng(0).standard_normal(1 << 25) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for begin in range(0, at, len(pattern)):
            file.write(pattern[: at - begin])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--weights", action="store_true", help="random bfloat16 weights, for shapes like Llama's")
    parser.add_argument("--scheme", choices=RECIPES, help="of weights in fewer bits, for --load-format dummy")
    args = parser.parse_args()
    if args.weights and args.scheme:
        parser.error("--weights writes bfloat16, which goes with no --scheme; quantize what it writes")
    args.directory.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[args.model]
    if args.scheme:
        config = config | {"quantization_config": RECIPES[args.scheme].config(["lm_head"])}
    (args.directory / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(args.directory, CONFIGS[args.model]["vocab_size"])
    if args.weights:
        write_weights(args.directory, CONFIGS[args.model])


if __name__ == "__main__":
    main()
