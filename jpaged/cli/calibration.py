"""Reads the texts of `jpaged quantize --calibration`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jpaged.api.errors import InvalidParameterError, InvalidPromptError, shown
from jpaged.text.tokenizer import Tokenizer


def read_texts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each line.

    path: a text a line; or, where its name ends with .jsonl, objects with "text", "prompt" or "messages", which go
        through the chat template.

    Raises:
        InvalidParameterError: the file cannot be read, has no text, or a line is no such object, or has messages that
            are not what the chat template takes.
    """
    try:
        # Not splitlines, which also cuts at characters that JSON strings may have, such as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"--calibration {path} cannot be read ({error}); name a text file.") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InvalidParameterError(f"--calibration {path} has no text.")
    if path.suffix != ".jsonl":
        return tokenizer.encode_batch([line for _, line in numbered])
    return list(_of_objects(path, numbered, tokenizer))


def _of_objects(path: Path, numbered: list[tuple[int, str]], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for number, line in numbered:
        try:
            found: Any = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict) and isinstance(found.get("messages"), list):
            try:
                yield tokenizer.apply_chat_template(found["messages"], add_generation_prompt=False)
            except InvalidPromptError as error:
                raise InvalidParameterError(f"--calibration {path}, line {number}: {error}") from error
            continue
        entries = found if isinstance(found, dict) else {}
        text = entries["prompt"] if entries.get("text") is None and "prompt" in entries else entries.get("text")
        if not isinstance(text, str):
            raise InvalidParameterError(
                f'--calibration {path}, line {number}: must be an object with "text", "prompt" or "messages", got'
                f" {shown(line)}."
            )
        yield tokenizer.encode(text)
