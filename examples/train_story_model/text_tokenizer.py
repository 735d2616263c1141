"""The tokenizer: byte-level byte-pair encoding, special tokens for the roles of a chat, and a chat template.

A conversation is laid out as

    <|begin|><|user|>Tell me a story.<|end|><|assistant|>Once upon a time ...<|end|>

and generation ends at <|end|>. Plain text (no chat) begins with <|begin|> too, and ends with <|end|>.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from conversations import converse
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BEGIN, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
CONTEXT = 1024

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant, got ' + message['role'] + '.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens: the special ones, all 256 bytes, and the merges that `texts` want."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts yield only {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for")
    # As Llama 3 does: plain text gets its first token here, a rendered chat template brings its own.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B:1", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes what transformers.AutoTokenizer reads: tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def corpus_sample(count: int, seed: int) -> Iterator[str]:
    """What the merges are learned from: every message of `count` conversations."""
    rng = random.Random(seed)
    for _ in range(count):
        for message in converse(rng, held_out=None):
            yield message["content"]
