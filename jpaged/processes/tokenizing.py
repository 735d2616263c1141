"""Prompts to token ids, without keeping the event loop from others.

    short text, token ids   at once, 1.6 ms for the longest
    long text or list       in a thread; refused before that if it cannot fit the model
    new constraints         in threads of their own, which wait for the processes that check them

While a thread encodes, short text goes to a thread too: the tokenizer is one, and the loop would wait for it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jpaged.api.errors import InvalidPromptError, PromptTooLongError
from jpaged.api.sampling_params import SamplingParams
from jpaged.frontend.inputs import InputProcessor, Params, ProcessedInput, Prompt
from jpaged.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 4096
"""Longer text is long."""
_INLINE_TOKENS = 65536
"""A longer list of token ids is checked in a thread."""
_THREADS = 2
_CHECKS = 4

_T = TypeVar("_T")


class AsyncTokenizer:
    """A tokenizer on an event loop.

    tokenizer: None: only token ids are taken.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jpaged-tokenize")
        self._checks = ThreadPoolExecutor(_CHECKS, thread_name_prefix="jpaged-check")

    async def process(self, prompt: Prompt, params: Params, inputs: InputProcessor) -> ProcessedInput:
        """As `InputProcessor.process`, which may be in a thread."""
        text: Any
        if isinstance(prompt, dict):
            text = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
        else:
            text = prompt
        if inputs.takes_long(params):
            return await asyncio.get_running_loop().run_in_executor(
                self._checks, lambda: inputs.process(prompt, params)
            )
        encodes = isinstance(text, str) or (isinstance(params, SamplingParams) and bool(params.bad_words))
        if isinstance(text, str):
            self.check_length(text, inputs.limits.max_model_len)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        is_long_list = isinstance(ids, list) and len(ids) > _INLINE_TOKENS
        if is_long_list or (encodes and self._takes_long(text)):
            return await self.in_thread(lambda: inputs.process(prompt, params))
        return inputs.process(prompt, params)

    async def encode(self, text: str, max_model_len: int, *, add_special_tokens: bool) -> list[int]:
        """Text to token ids. max_model_len: tokens that the model takes.

        Raises:
            InvalidPromptError: no text, one that cannot fit the model, or no tokenizer.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidPromptError("The prompt is text, but the engine was started without a tokenizer.")
        self.check_length(text, max_model_len)
        if not self._takes_long(text):
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.in_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs something that takes long for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._checks.shutdown(wait=False)

    def _takes_long(self, text: Any) -> bool:
        is_long = isinstance(text, str) and len(text) > INLINE_CHARACTERS
        return is_long or (self._tokenizer is not None and self._tokenizer.is_busy)

    def check_length(self, text: str, max_model_len: int) -> None:
        """Refuses a long text that cannot fit before it is tokenized, which takes time and memory with its length."""
        if self._tokenizer is None or len(text) <= INLINE_CHARACTERS:
            return
        longest = self._tokenizer.max_token_characters
        if len(text) > max_model_len * longest:
            raise PromptTooLongError(
                f"The prompt has {len(text)} characters; max_model_len={max_model_len} tokens of at most "
                f"{longest} characters cannot hold it. Shorten it or raise max_model_len."
            )
