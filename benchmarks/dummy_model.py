"""Writes a model directory for serving benchmarks without a download: a real shape, and a tokenizer of its size.

    python benchmarks/dummy_model.py llama-3.1-8b DIR      then: jpaged serve DIR --load-format dummy
    python benchmarks/dummy_model.py llama-3.1-8b DIR --weights           jpaged serve DIR
    python benchmarks/dummy_model.py llama-3.1-8b DIR --scheme int4     jpaged serve DIR --load-format dummy

The tokenizer is byte-level BPE without merges, its tokens random words of 2 to 8 letters: turning token ids into text
costs what it costs with a real one, and the prompts of `jpaged bench serve` are token ids. With --train-tokenizer it is
trained on the sources of this Python and its packages, half a minute long: grammars follow such tokens as they follow a
real model's, with quotation marks and ends of lines within them. --weights writes a
checkpoint as well, where reading it is what is measured. --scheme makes the configuration one of a checkpoint that
`jpaged quantize` wrote.
"""

import argparse
import json
import random
import site
import string
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jpaged.bench.models import CONFIGS
from jpaged.models.quantization.recipes import RECIPES

_TEXT_BYTES = 64 << 20  # of program texts that a tokenizer is trained on


def program_texts(most_bytes: int) -> Iterator[str]:
    """Of Python and its packages, about so much of them."""
    for directory in (sysconfig.get_path("stdlib"), *site.getsitepackages()):
        for file in sorted(Path(directory).rglob("*.py")):
            if most_bytes <= 0:
                return
            text = file.read_text(errors="replace")
            most_bytes -= len(text)
            yield text


def trained_bpe(vocab_size: int, texts: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary, of at most this size, and merges of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def write_tokenizer(directory: Path, vocab_size: int, texts: Iterable[str] | None = None) -> None:
    """Of random words, or trained on texts; random words fill what training leaves of the vocabulary."""
    draw = random.Random(0)
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    if texts is not None:
        vocab, merges = trained_bpe(vocab_size, texts)
    while len(vocab) < vocab_size:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8)))
        vocab.setdefault(draw.choice(("Ġ", "")) + word, len(vocab))  # Ġ: a space, as byte-level BPE writes it
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


_SHARD_BYTES = 5 << 30  # as published checkpoints have


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the checkpoint of a model like Llama, or like Qwen3 or Qwen3-MoE, with experts in all layers."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    experts = config.get("num_experts", 0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (queries, hidden),
            layer + "self_attn.k_proj.weight": (keys, hidden),
            layer + "self_attn.v_proj.weight": (keys, hidden),
            layer + "self_attn.o_proj.weight": (hidden, queries),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
        if config["model_type"].startswith("qwen3"):
            shapes |= {layer + f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        if experts:
            shapes[layer + "mlp.gate.weight"] = (experts, hidden)
            inner = config["moe_intermediate_size"]
        for mlp in [f"mlp.experts.{expert}." for expert in range(experts)] or ["mlp."]:
            shapes |= {layer + mlp + f"{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[layer + mlp + "down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def write_weights(directory: Path, config: dict[str, Any]) -> None:
    """Safetensors files of `tensor_shapes`, of 5 GiB at most; one random pattern is written over and over."""
    shards: list[dict[str, Any]] = [{}]
    sizes = [0]
    for name, shape in tensor_shapes(config).items():
        size = 2 * int(np.prod(shape))
        if sizes[-1] + size > _SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [sizes[-1], sizes[-1] + size]}
        sizes[-1] += size
    pattern = (np.random.default_rng(0).standard_normal(1 << 25) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    count = len(shards)
    files = (
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )

    def write(file: str, header: dict[str, Any], size: int) -> None:
        described = json.dumps(header).encode()
        described += b" " * (-len(described) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(described).to_bytes(8, "little") + described)
            for begin in range(0, size, len(pattern)):
                out.write(pattern[: size - begin])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, files, shards, sizes))
    if count > 1:
        weight_map = {name: file for file, header in zip(files, shards, strict=True) for name in header}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--weights",
        action="store_true",
        help="random bfloat16 weights, for shapes like Llama's, Qwen3's and Qwen3-MoE's",
    )
    parser.add_argument(
        "--train-tokenizer", action="store_true", help="train the tokenizer on the sources of Python and its packages"
    )
    parser.add_argument("--scheme", choices=RECIPES, help="of weights in fewer bits, for --load-format dummy")
    args = parser.parse_args()
    if args.weights and args.scheme:
        parser.error("--weights writes bfloat16, which goes with no --scheme; quantize what it writes")
    args.directory.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[args.model]
    if args.scheme:
        config = config | {"quantization_config": RECIPES[args.scheme].config(["lm_head"])}
    (args.directory / "config.json").write_text(json.dumps(config, indent=2))
    texts = program_texts(_TEXT_BYTES) if args.train_tokenizer else None
    write_tokenizer(args.directory, CONFIGS[args.model]["vocab_size"], texts)
    if args.weights:
        write_weights(args.directory, CONFIGS[args.model])


if __name__ == "__main__":
    main()
