"""Small real tokenizers of each kind, built with `tokenizers`, and text that is hard on them."""

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a small cat.",
    "def main():\n    return 1\n\n    print('hello world')",
    "你好世界 こんにちは 안녕하세요 नमस्ते שלום عالم café naïve 😀🎉",
] * 4
WHOLE = [
    "😀",
    "👨‍👩‍👧‍👦",
    "🏳️‍🌈",
    "e\u0301",
    "你好",
    "こんにちは",
    "שלום עולם",
    "مرحبا",
    "ༀ་",
    "\u200d",
    "\n\n",
    "\t",
    "   ",
    " a",
    "the ",
]
SPECIAL = ["<s>", "</s>", "<|user|>"]
ADDED = ["<tool call>", "日本", "  x"]
"""Added tokens that are not special: with a space, outside Latin-1, with spaces in front."""

texts = st.lists(
    st.sampled_from(WHOLE) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=8
).map("".join)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _byte_level() -> Tokenizer:
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    t.train_from_iterator(CORPUS, trainer)
    return t


def _byte_fallback(*, strip: bool, metaspace: bool = False, reordered: bool = False) -> Tokenizer:
    """As Llama 2's (strip), Gemma's (no strip), with Metaspace in place of Replace, or in an order nobody uses."""
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(t.to_str())["model"]
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *model["vocab"], "▁▁"]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(m) for m in model["merges"]]
    t = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    t.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    spaces = decoders.Metaspace(prepend_scheme="first") if metaspace else decoders.Replace("▁", " ")
    stripping = [decoders.Strip(" ", 1, 0)] if strip else []
    t.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *stripping])
    if reordered:
        t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    return t


def _unigram(prepend_scheme: str) -> Tokenizer:
    t = Tokenizer(models.Unigram())
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    t.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    t.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    )
    return t


def _word_piece() -> Tokenizer:
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    t.decoder = decoders.WordPiece()
    t.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=250, special_tokens=["[UNK]"], show_progress=False)
    )
    return t


def _word_end() -> Tokenizer:
    """As the first GPT's: words end in "</w>"."""
    t = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.decoder = decoders.BPEDecoder("</w>")
    t.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False),
    )
    return t


class SlowTokenizer:
    """Stands for a tokenizer written in Python: bytes and ASCII words, decoded as the sentencepiece library does.

    Ids 0-255 are bytes, 256 and on are words; 500 is special.
    """

    WORDS = ("▁the", "▁a", "cat", "▁", "日本", "e", "\u0301")
    all_special_tokens = ("<end>",)

    def __len__(self) -> int:
        return 501

    def convert_ids_to_tokens(self, token_id: int) -> str:
        if token_id == 500:
            return "<end>"
        return f"<0x{token_id:02X}>" if token_id < 256 else self.WORDS[token_id - 256]  # IndexError past the end

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        data = b""
        for i in ids:
            if i == 500:
                data += b"" if skip_special_tokens else b"<end>"
            elif i < 256:
                data += bytes((i,))
            elif i - 256 < len(self.WORDS):
                data += self.WORDS[i - 256].replace("▁", " ").encode()
        text = data.decode("utf-8", "surrogateescape")
        text = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        return text.removeprefix(" ")


_BUILDERS: dict[str, Any] = {
    "byte-level": lambda: _wrap(_byte_level()),
    "byte-fallback, strip": lambda: _wrap(_byte_fallback(strip=True)),
    "byte-fallback, no strip": lambda: _wrap(_byte_fallback(strip=False)),
    "byte-fallback, metaspace": lambda: _wrap(_byte_fallback(strip=False, metaspace=True)),
    "unigram, always": lambda: _wrap(_unigram("always")),
    "unigram, never": lambda: _wrap(_unigram("never")),
    "word piece": lambda: _wrap(_word_piece()),
    "word end": lambda: _wrap(_word_end()),
    "slow": SlowTokenizer,
    "byte-fallback, reordered": lambda: _wrap(_byte_fallback(strip=False, reordered=True)),
}
BYTE_EXACT = ["byte-level", "byte-fallback, strip", "byte-fallback, no strip"]
"""Those that can spell any text."""
ALL = [name for name in _BUILDERS if name != "byte-fallback, reordered"]
"""The last replaces whole byte runs behind a decoder that is not known: only valid text comes out exactly."""


@cache
def tokenizer(name: str) -> Any:
    return _BUILDERS[name]()
