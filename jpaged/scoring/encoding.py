"""Turns rows into token sequences, many at a time: the tokenizers library encodes a batch on all cores.

    text                 [special tokens, text]                     scored from its second token on
    prompt, completion   [special tokens, prompt | completion]      scored from the bar on

Prompt and completion are encoded together and the completion's tokens are those beyond the prompt's own, as lm-eval
does: blanks at the end of the prompt go to the completion first, where tokenizers expect them, and after an empty
prompt the completion follows the begin-of-sequence token (the end-of-sequence token, where there is none).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jpaged.api.errors import MalformedRowError, shown
from jpaged.scoring.rows import Row, Text
from jpaged.text.tokenizer import Tokenizer


class TokenSequence(NamedTuple):
    """tokens: int32 [n]; those from index first_scored (1 to n-1) on are scored."""

    tokens: np.ndarray
    first_scored: int


class Encoder:
    """Encodes rows for one model.

    tokenizer: None where rows hold token ids only. vocab_size: of the model's embedding.
    add_special_tokens: let the tokenizer begin texts and prompts as its model expects, with a begin-of-sequence token
        if it has one.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, *, add_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._special = add_special_tokens

    def encode(self, rows: Sequence[Row]) -> list[list[TokenSequence] | MalformedRowError]:
        """For each row its sequences, or the error that says why it has none."""
        wanted: dict[tuple[str, bool], list[int]] = {}  # a text, and whether with special tokens
        for row in rows:
            for context, continuation in _pairs(row):
                if isinstance(continuation, str):
                    if row.kind == "text" or context:
                        wanted[_join(context, continuation), self._special] = []
                    if context:
                        wanted[str(context), self._special] = []
                    elif row.kind != "text":
                        wanted[continuation, False] = []
        if wanted and self._tokenizer is not None:
            for special in (True, False):
                texts = [text for text, with_special in wanted if with_special == special]
                encoded = self._tokenizer.encode_batch(texts, add_special_tokens=special)
                wanted.update(zip(((text, special) for text in texts), encoded, strict=True))
        return [self._sequences(row, wanted) for row in rows]

    def _sequences(
        self, row: Row, encoded: dict[tuple[str, bool], list[int]]
    ) -> list[TokenSequence] | MalformedRowError:
        try:
            return [self._sequence(row, *pair, encoded) for pair in _pairs(row)]
        except MalformedRowError as error:
            return error

    def _sequence(
        self, row: Row, context: Text, continuation: Text, encoded: dict[tuple[str, bool], list[int]]
    ) -> TokenSequence:
        if isinstance(continuation, str) and self._tokenizer is None:
            raise MalformedRowError("the row is text, but there is no tokenizer (skip_tokenizer_init); give token ids.")
        if row.kind == "text":
            tokens = encoded[continuation, self._special] if isinstance(continuation, str) else continuation
            if len(tokens) < 2:
                raise MalformedRowError(
                    f"the text has {len(tokens)} token; a token is scored after another, so two are needed."
                )
            return self._checked(tokens, 1)
        if not context:
            tail = encoded[continuation, False] if isinstance(continuation, str) else continuation
            return self._checked([self._first_token(), *tail], 1)
        if isinstance(continuation, str):
            tokens = encoded[_join(context, continuation), self._special]
            first = len(encoded[str(context), self._special])
        else:
            tokens, first = [*_ids(context), *continuation], len(context)
        if first >= len(tokens):
            raise MalformedRowError(f"{shown(continuation)} adds no token to its prompt; there is nothing to score.")
        return self._checked(tokens, max(first, 1))

    def _checked(self, tokens: list[int], first_scored: int) -> TokenSequence:
        array = np.asarray(tokens, np.int32)
        if array.max() >= self._vocab_size:
            raise MalformedRowError(
                f"token id {array.max()} is outside the vocabulary of {self._vocab_size} tokens (0 to "
                f"{self._vocab_size - 1})."
            )
        return TokenSequence(array, first_scored)

    def _first_token(self) -> int:
        hf = None if self._tokenizer is None else self._tokenizer.hf
        for token in (hf and hf.bos_token_id, hf and hf.eos_token_id):
            if token is not None:
                return token
        raise MalformedRowError(
            "the prompt is empty, and there is no begin- or end-of-sequence token to stand for it; give a prompt."
        )


def _pairs(row: Row) -> list[tuple[Text, Text]]:
    """Context and continuation of each of a row's sequences; blanks at the end of the context moved over."""
    pairs: list[tuple[Text, Text]] = []
    for continuation in row.continuations:
        context = row.context
        if isinstance(context, str) and isinstance(continuation, str):
            bare = context.rstrip()
            context, continuation = bare, context[len(bare) :] + continuation
        pairs.append((context, continuation))
    return pairs


def _join(context: Text, continuation: Text) -> str:
    return str(context or "") + str(continuation)


def _ids(text: Text) -> list[int]:
    return text if isinstance(text, list) else []
