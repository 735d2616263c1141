"""Requests of every kind that a server takes, and what makes two answers to one of them the same.

All are greedy, seeded, or searched, so an answer depends on the request alone: not on what shares its steps, not on
the process that served it, and not on whether it was streamed.
"""

import random
from dataclasses import dataclass
from typing import Any

import msgspec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOGPROB_TOLERANCE = 2e-3
"""Between log-probabilities of a token in batches of different sizes, in float32."""

_OPENINGS = ("Once upon a time", "The snail", "In a deep wood there was a lantern", "Nobody knew why the fox")
_LONG = "There was a fox who had a lantern. " * 12
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"seed": 3, "n": 2},
    {"seed": 4, "logprobs": 3},
    {"temperature": 0, "stop": [" the ", "and", "e s"]},
    {"seed": 5, "stop": ["ing", "."], "include_stop_str_in_output": True, "n": 2},
    {"seed": 6, "stop_token_ids": list(range(200, 260))},
    {"seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"seed": 8, "logit_bias": {"300": 4, "301": -100}, "bad_words": ["fox"]},
    {"seed": 9, "allowed_token_ids": list(range(3, 600))},
    {"prompt": ["One snail", "Two snails", "Three snails"], "seed": 10},
    {"prompt": [5, 6, 7, 8, 9], "temperature": 0, "min_tokens": 4},
    {"prompt": _LONG, "seed": 11},
    {"prompt": _LONG + "And then", "temperature": 0, "cache_salt": "a"},
    {"seed": 12, "structured_outputs": {"json": _SCHEMA}, "max_tokens": 80},
    {"seed": 13, "guided_regex": "[a-f]{3,9}(-[0-9]{2,4}){1,4}"},
    {"temperature": 0, "guided_choice": ["a fox", "a snail", "a lantern"]},
    {"seed": 14, "best_of": 3, "n": 2, "logprobs": 1},
    {"use_beam_search": True, "best_of": 3, "n": 2, "temperature": 0, "max_tokens": 12},
    {"seed": 15, "echo": True, "logprobs": 1, "max_tokens": 8},
    {"seed": 16, "prompt_logprobs": 1, "max_tokens": 8},
)
_CHATS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 21, "n": 2},
    {"seed": 22, "logprobs": True, "top_logprobs": 2},
    {"seed": 23, "response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": _SCHEMA}}},
    {"seed": 24, "stop": ["!"], "max_completion_tokens": 30},
)
_WHOLE_ONLY = ("use_beam_search", "best_of", "echo", "prompt_logprobs")
"""Requests with these fields are not streamed."""


@dataclass(frozen=True)
class Asked:
    """A request. body: without `stream`. can_stream: whether the server streams such."""

    path: str
    body: dict[str, Any]

    @property
    def can_stream(self) -> bool:
        return not any(field in self.body for field in _WHOLE_ONLY)


def request_mix(num_tokens: int, seed: int = 0) -> list[Asked]:
    """One request of each kind, for at most so many tokens unless its kind says otherwise."""
    draw = random.Random(seed)
    common = {"max_tokens": num_tokens, "return_token_ids": True}
    asked = [
        Asked(COMPLETIONS, {"prompt": f"{draw.choice(_OPENINGS)}, number {i}"} | common | fields)
        for i, fields in enumerate(_COMPLETIONS)
    ]
    for i, fields in enumerate(_CHATS):
        messages = [{"role": "user", "content": f"{draw.choice(_OPENINGS)}, story {i}"}]
        asked.append(Asked(CHAT, {"messages": messages} | common | fields))
    return asked


def whole_answer(body: bytes) -> dict[str, Any]:
    """An answer that came at once, in the form that `difference` compares."""
    data = msgspec.json.decode(body)
    answer: dict[str, Any] = {"usage": data["usage"]["completion_tokens"], "choices": {}}
    for choice in data["choices"]:
        _add(answer, choice, choice.get("message"))
    return answer


class StreamedAnswer:
    """The same, from the lines of a stream. ended: [DONE] has come."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {"usage": None, "choices": {}}
        self.ended = False

    def take(self, line: str) -> None:
        """Raises RuntimeError for an error event."""
        if line == "data: [DONE]":
            self.ended = True
        elif line.startswith("data: "):
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                raise RuntimeError(f"error event: {event['error']['message']}")
            if event.get("usage"):
                self.answer["usage"] = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                _add(self.answer, choice, choice.get("delta"))


def _add(answer: dict[str, Any], choice: dict[str, Any], message: dict[str, Any] | None) -> None:
    empty: dict[str, Any] = {"text": "", "tokens": [], "logprobs": [], "end": None, "stop": None}
    found = answer["choices"].setdefault(choice["index"], empty)
    found["text"] += (choice["text"] if message is None else message.get("content")) or ""
    found["tokens"] += choice.get("token_ids") or []
    found["end"] = choice["finish_reason"] or found["end"]
    found["stop"] = choice.get("stop_reason") or found["stop"]
    logprobs = choice.get("logprobs") or {}
    found["logprobs"] += logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or ()]


def difference(answer: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """What an answer has that the other has not; None if nothing."""
    if answer["usage"] != expected["usage"]:
        return f"usage {answer['usage']}, not {expected['usage']}"
    if answer["choices"].keys() != expected["choices"].keys():
        return f"choices {sorted(answer['choices'])}, not {sorted(expected['choices'])}"
    for index, wanted in expected["choices"].items():
        found = answer["choices"][index]
        for field in ("tokens", "text", "end", "stop"):
            if found[field] != wanted[field]:
                return f"choice {index}: {field} {found[field]!r}, not {wanted[field]!r}"
        values, right = found["logprobs"], wanted["logprobs"]
        if len(values) != len(right):
            return f"choice {index}: {len(values)} log-probabilities, not {len(right)}"
        for a, b in zip(values, right, strict=True):
            if (a is None) != (b is None) or (a is not None and abs(a - b) > LOGPROB_TOLERANCE):
                return f"choice {index}: a log-probability of {a}, not {b}"
    return None
