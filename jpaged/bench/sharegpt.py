"""Requests from a file of conversations in the format of ShareGPT_V3.

    [{"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, ...]

The first turn is the prompt; the second says how many tokens to generate. As is usual, conversations are left out that
have fewer turns, fewer than 4 tokens on either side, more than 1,024 in the prompt, or more than 2,048 together.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.workloads import BenchRequest
from jpaged.text.tokenizer import Tokenizer

LEAST_TOKENS = 4
MOST_PROMPT_TOKENS = 1024
MOST_TOKENS = 2048


def sharegpt_requests(
    turns: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    num_prompts: int,
    *,
    seed: int = 0,
    max_model_len: int = MOST_TOKENS,
) -> list[BenchRequest]:
    """Draws conversations at random, without repetition; the same ones for the same seed.

    turns: as `read_turns` gives them. max_model_len: longer conversations are left out, too.
    Raises InvalidParameterError if there are fewer conversations of usable length.
    """
    most = min(MOST_TOKENS, max_model_len)
    requests: list[BenchRequest] = []
    for index in np.random.default_rng(seed).permutation(len(turns)).tolist():
        if len(requests) == num_prompts:
            break
        prompt, answer = turns[index]
        prompt_token_ids = tokenizer.encode(prompt)
        output_len = len(tokenizer.encode(answer, add_special_tokens=False))
        if min(len(prompt_token_ids), output_len) < LEAST_TOKENS or len(prompt_token_ids) > MOST_PROMPT_TOKENS:
            continue
        if len(prompt_token_ids) + output_len <= most:
            requests.append(BenchRequest(prompt_token_ids, output_len))
    if len(requests) < num_prompts:
        raise InvalidParameterError(
            f"--num-prompts={num_prompts}, but --dataset-path has {len(requests)} conversations of a usable "
            f"length (at least {LEAST_TOKENS} tokens a turn, at most {MOST_PROMPT_TOKENS} in the first and {most} in "
            f"both); ask for fewer."
        )
    return requests


def read_turns(path: Path) -> list[tuple[str, str]]:
    """The first two turns of every conversation that has two.

    Raises InvalidParameterError, naming the file and the entry.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"--dataset-path {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise InvalidParameterError(f"--dataset-path {path} is not JSON: {error}.") from error
    if not isinstance(entries, list):
        raise InvalidParameterError(
            f"--dataset-path {path} must hold a list of conversations, not {type(entries).__name__}."
        )
    found = []
    for index, entry in enumerate(entries):
        where = f"--dataset-path {path}: entry {index}"
        conversation = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(conversation, list):
            raise InvalidParameterError(f'{where} must be an object with a list "conversations", got {_short(entry)}.')
        if len(conversation) >= 2:
            found.append((_text(conversation[0], f"{where}, turn 0,"), _text(conversation[1], f"{where}, turn 1,")))
    return found


def _text(turn: Any, where: str) -> str:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise InvalidParameterError(f'{where} must be an object with a text "value", got {_short(turn)}.')
    return turn["value"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
