"""Counts the tokens of a text that grows, such as an answer's reasoning.

"Once upon| a time there| was"      counted at a space, once there is enough of it; what is left is counted when asked
"""

from jpaged.text.tokenizer import Tokenizer

_PIECE = 512
"""Characters that are counted at once: in the time of a few tokens' JSON, on the event loop."""


class TokenCount:
    """How many tokens a text has, as the tokenizer writes it. Without a tokenizer it has none.

    A model may have written it with other tokens, so this may differ a little from how many it generated.
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
