"""Tiny models of every family with eight attention heads, so that eight shards have one each."""

from dataclasses import replace
from typing import Any

from tests.tiny_models import TinyModel, tiny_model

VOCAB_SIZE = 157
"""Padded by every degree."""

CASES = ("llama-gqa-d64-tied", "llama-biases", "mistral-window", "qwen2-window", "qwen3-tied-d64")
CASES += ("opt-125m-style", "opt-350m-style", "opt-no-biases-untied", "gpt2")
CASES += ("ministral3", "qwen3-moe", "qwen2-moe", "mixtral", "dots1")


def eight_heads(name: str, **changes: Any) -> TinyModel:
    """The case of that name with 8 heads, its 1, 2 or 8 key-value heads, and 157 tokens."""
    case = tiny_model(name)
    heads = {"n_head": 8} if case.family == "gpt2" else {"num_attention_heads": 8}
    if case.family == "llama":
        heads["head_dim"] = 16
    return replace(case, config=case.config | heads | {"vocab_size": VOCAB_SIZE} | changes)
