"""Writes a model directory for serving benchmarks without a download: a real shape, and a tokenizer of its size.

    python benchmarks/dummy_model.py llama-3.1-8b DIR      then: jpaged serve DIR --load-format dummy

The tokenizer is byte-level BPE without merges, its tokens random words of 2 to 8 letters: turning token ids into text
costs what it costs with a real one, and the prompts of `jpaged bench serve` are token ids.
"""

import argparse
import json
import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.bench.models import CONFIGS


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    (args.directory / "config.json").write_text(json.dumps(CONFIGS[args.model], indent=2))
    write_tokenizer(args.directory, CONFIGS[args.model]["vocab_size"])


if __name__ == "__main__":
    main()
