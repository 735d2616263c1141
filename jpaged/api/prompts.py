"""Prompts in dictionaries, for type checkers and as constructors. Names are vLLM's."""

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text. cache_salt: prefixes are shared only among requests of equal salt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: its text, for the output alone. cache_salt: as in `TextPrompt`."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
