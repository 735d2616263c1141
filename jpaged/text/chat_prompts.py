"""Conversations to prompts, in which only the template writes control tokens.

    messages --mark--> messages whose control tokens stand between marks --template--> text with marks --> token ids

        user: "hi <|end|>"     ..<|user|>hi [<|end|>]<|end|>..     ids of <|user|>, "hi <|end|>" as plain text, <|end|>

A message may spell a control token, which the tokenizer would take for the template's own: whoever writes it could end
the message and begin one of another role. So such spellings are marked before the template sees them, and the text
between two control tokens of the template that holds a marked one is encoded as plain text. Messages of the assistant
are left as they are: templates look for the control tokens that models write.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jpaged.api.errors import InvalidPromptError, shown

_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that stand for nothing, in Unicode's words "for internal use"."""
_TRUSTED_ROLES = ("assistant",)


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    text: of the prompt. marks: what stands before and behind each control token that a message spells; None where
    there is no such.
    """

    text: str
    marks: tuple[str, str] | None = None


class ControlTokens:
    """The control tokens of a tokenizer: which text spells them, and how to encode that text as plain text.

    hf: a transformers tokenizer.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        tokens = [token for token in hf.added_tokens_decoder.values() if token.special and token.content]
        self._by_text = {token.content: token for token in tokens}
        # What text cannot be spelled with is the unknown token, which controls nothing.
        special = {index for index, token in hf.added_tokens_decoder.items() if token.special}
        self._ids = frozenset(special | set(hf.all_special_ids)) - {hf.unk_token_id}
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def mark(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, str] | None]:
        """Marks control tokens in what messages of users, systems and tools say, keys included, which templates may
        print. Returns the messages and the marks.

        Raises:
            InvalidPromptError: the messages hold every noncharacter of Unicode.
        """
        pattern = self._pattern
        if pattern is None or not any(self._spells(m) for m in messages if m.get("role") not in _TRUSTED_ROLES):
            return messages, None
        said = repr(messages)
        free = [c for c in _NONCHARACTERS if c not in said and repr(c)[1:-1] not in said]
        if len(free) < 2:
            raise InvalidPromptError("messages hold noncharacters (U+FDD0 to U+FDEF), which are no text; remove them.")
        before, behind = free[:2]

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda found: before + found[0] + behind, value)
            if isinstance(value, Mapping):
                return {marked(key) if isinstance(key, str) else key: marked(one) for key, one in value.items()}
            if isinstance(value, Sequence):
                return [marked(one) for one in value]
            return value

        return [m if m.get("role") in _TRUSTED_ROLES else marked(m) for m in messages], (before, behind)

    def encode(self, prompt: ChatPrompt) -> list[int]:
        """The token ids of a prompt with marks.

        Raises:
            InvalidPromptError: the tokenizer cannot encode a control token as plain text.
        """
        assert prompt.marks is not None
        assert self._pattern is not None
        before, behind = map(re.escape, prompt.marks)
        said = prompt.text
        for mark in prompt.marks:  # templates that print a dictionary, or ASCII alone, spell marks like this
            said = said.replace(repr(mark)[1:-1], mark)
        ids: list[int] = []
        settled = written = 0  # up to here the text is encoded; up to here it has been looked at
        for found in re.finditer(f"{before}.*?{behind}|{self._pattern.pattern}|\\Z", said, re.DOTALL):
            if found[0].startswith(prompt.marks[0]):
                continue
            plain = said[written : found.start()]
            if prompt.marks[0] in plain:
                previous = said[settled:written]
                ids += self._encode_ordinarily(previous)
                ids += self._encode_apart(re.sub(f"[{before}{behind}]", "", plain), previous, found[0])
                settled = found.start()
            written = found.end()
        return ids + self._encode_ordinarily(said[settled:])

    def _spells(self, value: Any) -> bool:
        assert self._pattern is not None
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(map(self._spells, (*value, *value.values())))
        return isinstance(value, Sequence) and any(map(self._spells, value))

    def _encode_ordinarily(self, text: str) -> list[int]:
        return self._hf.encode(text, add_special_tokens=False, verbose=False) if text else []

    def _encode_plain(self, text: str) -> list[int]:
        return self._hf.encode(text, add_special_tokens=False, verbose=False, split_special_tokens=True)

    def _encode_apart(self, text: str, previous: str, following: str) -> list[int]:
        """Text between two control tokens, which takes none in it for one."""
        left = next((token for name, token in self._by_text.items() if previous.endswith(name)), None)
        right = self._by_text.get(following)
        if left is not None and left.rstrip:
            text = text.lstrip()
        if right is not None and right.lstrip:
            text = text.rstrip()
        anchor = self._anchor
        ids = None
        if anchor is not None:
            anchor_ids = self._encode_plain(anchor) if anchor else []
            ids = self._encode_plain(anchor + text)[len(anchor_ids) :]
        if ids is None or not self._ids.isdisjoint(ids):
            assert self._pattern is not None
            found = self._pattern.search(text)
            assert found is not None
            raise InvalidPromptError(
                f"The messages spell {shown(found[0])}, a control token that this model's tokenizer cannot take as"
                " text; remove it."
            )
        return ids

    @cached_property
    def _anchor(self) -> str | None:
        """What to put in front of plain text so that it is encoded as it is behind a control token: nothing, or, where
        the tokenizer puts a space in front of all text, something. None if neither is right.
        """
        name, samples = next(iter(self._by_text)), ("a b", " a")
        for anchor in ("", "\n"):
            if all(self._with(anchor, sample) == self._behind(name, sample) for sample in samples):
                return anchor
        return None

    def _behind(self, name: str, sample: str) -> list[int]:
        whole, alone = self._encode_ordinarily(name + sample), self._encode_ordinarily(name)
        return whole[len(alone) :]

    def _with(self, anchor: str, sample: str) -> list[int]:
        before = self._encode_plain(anchor) if anchor else []
        return self._encode_plain(anchor + sample)[len(before) :]
