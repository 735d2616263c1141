"""The rows of an input, and their scores.

    {"text": ...}                       one sequence: every token of it is scored
    {"prompt": ..., "completion": ...}  one sequence: the completion is scored, the prompt is its context
    {"prompt": ..., "choices": [...]}   a sequence for each choice, and which of them is the best

A text, prompt, completion or choice is a string or a list of token ids. An "id", text or integer, is handed through.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from jpaged.api.errors import MalformedRowError, shown

Text = str | list[int]
"""Text, or its token ids."""

RowKind = Literal["text", "completion", "choices"]

_FIELDS: dict[RowKind, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "choices": ("prompt", "choices"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row, checked.

    kind: which of the three forms it has.
    context: the prompt; empty for a text.
    continuations: what is scored: the text, the completion, or each choice.
    id: the caller's name for it.
    """

    kind: RowKind
    context: Text
    continuations: tuple[Text, ...]
    id: str | int | None = None

    @property
    def size(self) -> int:
        """Its length in characters, all sequences together; a token id counts as four, which text has about."""
        return sum(_size(self.context) + _size(continuation) for continuation in self.continuations)


def parse_row(data: Mapping[str, Any]) -> Row:
    """Checks and parses a row.

    Raises:
        MalformedRowError: a field is missing, contradicts another, or is not what it should be.
    """
    if not isinstance(data, Mapping):
        raise MalformedRowError(f'a row must be an object such as {{"text": ...}}, got {_short(data)}.')
    kind = _kind_of(data)
    for name in _FIELDS[kind]:
        if name not in data:
            raise MalformedRowError(f'the row has "{kind}", so it needs "{name}" too; it has {_names(data)}.')
    context: Text = ""
    if kind != "text":
        context = _text("prompt", data["prompt"], may_be_empty=True)
    if kind == "choices":
        choices = data["choices"]
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise MalformedRowError(f'"choices" must be a list of at least one choice, got {_short(choices)}.')
        continuations = tuple(_text(f'"choices"[{i}]', choice) for i, choice in enumerate(choices))
    else:
        continuations = (_text(f'"{kind}"', data[kind]),)
    if kind != "text":
        for continuation in continuations:
            if context and isinstance(context, str) != isinstance(continuation, str):
                raise MalformedRowError("the prompt and what follows it must both be text or both be token ids.")
    return Row(kind, context, continuations, _id(data.get("id")))


@dataclass(frozen=True)
class SequenceScore:
    """The scored tokens of one sequence.

    token_ids: int32 [m]; logprobs: float32 [m], natural logarithms; greedy_tokens: bool [m], whether each is the
    most likely one.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    greedy_tokens: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def logprob(self) -> float:
        """The log-likelihood: the sum over the tokens, in float64."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def logprob_per_token(self) -> float:
        return self.logprob / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(-logprob_per_token); infinite where that overflows."""
        try:
            return math.exp(-self.logprob_per_token)
        except OverflowError:
            return math.inf

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding would give exactly these tokens."""
        return bool(self.greedy_tokens.all())


@dataclass(frozen=True)
class RowScore:
    """A row's sequences, one unless it has choices."""

    row: Row
    sequences: tuple[SequenceScore, ...]

    @property
    def score(self) -> SequenceScore:
        """The only sequence of a text or completion. ValueError for a row with choices."""
        if self.row.kind == "choices":
            raise ValueError("a row with choices has a score for each; read `sequences` and `best`.")
        return self.sequences[0]

    @property
    def best(self) -> int:
        """Index of the most likely choice, the first on ties."""
        return _argmax([sequence.logprob for sequence in self.sequences])

    @property
    def best_per_token(self) -> int:
        """Index of the choice with the largest log-likelihood per token."""
        return _argmax([sequence.logprob_per_token for sequence in self.sequences])

    @property
    def best_per_byte(self) -> int:
        """Index of the choice with the largest log-likelihood per byte of UTF-8 (per token, given as token ids)."""
        sizes = [len(c.encode()) if isinstance(c, str) else len(c) for c in self.row.continuations]
        return _argmax([sequence.logprob / size for sequence, size in zip(self.sequences, sizes, strict=True)])

    def record(self, index: int, *, logprobs: bool = False) -> dict[str, Any]:
        """The row of the output, as JSON has it. logprobs: with every scored token's id and log-probability."""
        record: dict[str, Any] = {"index": index}
        if self.row.id is not None:
            record["id"] = self.row.id
        if self.row.kind != "choices":
            return record | _sequence_record(self.sequences[0], logprobs)
        return record | {
            "choices": [_sequence_record(sequence, logprobs) for sequence in self.sequences],
            "best": self.best,
            "best_per_token": self.best_per_token,
            "best_per_byte": self.best_per_byte,
        }


def _sequence_record(sequence: SequenceScore, logprobs: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "num_tokens": sequence.num_tokens,
        "logprob": _finite(sequence.logprob),
        "logprob_per_token": _finite(sequence.logprob_per_token),
        "perplexity": _finite(sequence.perplexity),
        "greedy": sequence.greedy,
    }
    if logprobs:
        record["token_ids"] = sequence.token_ids.tolist()
        # The shortest decimals that are this float32, not those of the float64 that Python makes of it.
        record["token_logprobs"] = [_finite(float(str(value))) for value in sequence.logprobs]
    return record


def _finite(value: float) -> float | None:
    """Replaces infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def _argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _kind_of(data: Mapping[str, Any]) -> RowKind:
    kinds: list[RowKind] = [kind for kind in _FIELDS if kind in data]
    if len(kinds) != 1 or (kinds[0] == "text" and "prompt" in data):
        raise MalformedRowError(
            'a row needs "text", or "prompt" and "completion", or "prompt" and "choices", and no two of these; it has '
            f"{_names(data)}."
        )
    return kinds[0]


def _text(name: str, value: Any, *, may_be_empty: bool = False) -> Text:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str):
        _check_surrogates(name, value)
    elif not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise MalformedRowError(f"{name} must be a string or a list of token ids, got {_short(value)}.")
    if not value and not may_be_empty:
        raise MalformedRowError(f"{name} is empty; there is nothing to score.")
    return value


def _id(value: Any) -> str | int | None:
    if isinstance(value, str):
        _check_surrogates('"id"', value)
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return value
    raise MalformedRowError(f'"id" must be a string or an integer, got {_short(value)}.')


def _check_surrogates(name: str, text: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise MalformedRowError(f"{name} holds a lone surrogate, which is no text; remove it.")


def _size(text: Text) -> int:
    return len(text) if isinstance(text, str) else 4 * len(text)


def _names(data: Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in list(data)[:10]) or "no fields"


def _short(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"
