"""Counts the tokens of a text that grows, such as an answer's reasoning.

"Once upon| a time there| was"      counted at a space, once there is enough of it; what is left is counted when asked
"""

from jpaged.text.tokenizer import Tokenizer

_PIECE = 512
"""Characters of a call of the tokenizer. It runs on the event loop, and takes as long as the JSON of a few tokens."""


class TokenCount:
    """How many tokens the tokenizer makes of a text; 0 without a tokenizer.

    A model may have written the text with other tokens, so it may have generated a few more or fewer.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._counted = 0
        self._rest = ""
        self._num_of_rest: int | None = 0  # None: not counted yet

    def add(self, text: str) -> None:
        """More of the text."""
        if not text:
            return
        begin, self._rest = 0, self._rest + text
        while len(self._rest) - begin > _PIECE:
            # Nearly all tokenizers split at spaces anyway; without any, the count may be one too high.
            end = self._rest.rfind(" ", begin + 1, begin + _PIECE)
            end = begin + _PIECE if end < 0 else end
            self._counted += self._len(self._rest[begin:end])
            begin = end
        self._rest, self._num_of_rest = self._rest[begin:], None

    @property
    def num_tokens(self) -> int:
        if self._num_of_rest is None:  # else: of another choice there is news
            self._num_of_rest = self._len(self._rest)
        return self._counted + self._num_of_rest

    def _len(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text and self._tokenizer else 0
