"""Counts the tokens of an answer's reasoning, as they are generated.

text         <think>why not</think>So
tokens end at      7 10  14      22 24     in characters of the text
reasoning           8 to 14                as the parser reads it: two tokens end there
"""

from collections import deque
from collections.abc import Sequence

from jpaged.text.token_decoders import token_decoder
from jpaged.text.tokenizer import Tokenizer
from jpaged.text.turns.parser import TurnParser


class ReasoningTokens:
    """The tokens of one choice's reasoning, without its marks.

    tokenizer: None without text; then nothing is counted.
    prompt_token_ids: of its prompt, whose last character the first token may complete.
    skips_special_tokens: whether the choice's text leaves special tokens out.

    Attributes:
        num_tokens: counted so far.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], *, skips_special_tokens: bool
    ) -> None:
        self.num_tokens = 0
        decoder = None if tokenizer is None else token_decoder(tokenizer, skips_special_tokens)
        self._stream = None if decoder is None else decoder.stream(prompt_token_ids)
        self._length = 0  # of the text of all tokens
        self._num_silent = 0  # they left a character incomplete, and count with the one that completes it
        self._waiting: deque[tuple[int, int]] = deque()  # where the text of tokens ends, and how many they are

    def add(self, token_ids: Sequence[int], *, ended: bool) -> None:
        """Takes further tokens, before the parser is fed their text. ended: these are the last."""
        if self._stream is None:
            return
        for token in token_ids:
            self._num_silent += 1
            self._place(*self._stream.push(token))
        if ended:
            self._place(*self._stream.flush())

    def settle(self, parser: TurnParser, *, ended: bool) -> None:
        """Counts the tokens whose text the parser has read; if `ended`, also those that a stop string has cut off."""
        if not self._waiting:
            return
        thoughts, read = parser.thoughts, parser.num_read
        while self._waiting and (ended or self._waiting[0][0] <= read):
            end, num_tokens = self._waiting.popleft()
            if any(first < min(end, read) <= last for first, last in thoughts):
                self.num_tokens += num_tokens

    def _place(self, retracted: int, new: str) -> None:
        """Notes where the text of the latest tokens ends."""
        self._length += len(new) - retracted
        if new:
            self._waiting.append((self._length, self._num_silent))
            self._num_silent = 0
