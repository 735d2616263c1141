"""Token ids to text, one token at a time: characters split over tokens, stop strings, streamed deltas.

    token ids --stream--> text so far                      what a caller may see
                          [ settled      | provisional ]   [ settled, less what may begin a stop string ]

`token_decoders` says what the text of tokens is and why some of it is provisional.
"""

import io
from collections.abc import Sequence
from typing import Any

from jpaged.api.sampling_params import SamplingParams
from jpaged.text.token_decoders import token_decoder


class Detokenizer:
    """The text of one sequence, as its tokens arrive.

        d = Detokenizer(tokenizer, prompt_token_ids, params)
        stop = d.append(token_ids)          # the stop string that ended it, or None
        delta = d.next_delta()              # what is new and decided
        ...
        delta = d.next_delta(finished=True) # the rest; d.text is now complete

    Args:
        tokenizer: a transformers tokenizer, or a `jpaged.text.tokenizer.Tokenizer`.
        prompt_token_ids: the prompt, for its last characters; it is never searched for stop strings.
        params: reads `stop`, `include_stop_str_in_output`, `skip_special_tokens` and `min_tokens`.

    Attributes:
        num_output_tokens: tokens that belong to the output: all that were appended, or, once a stop string was met,
            those up to the one that completed it.
        stop_string: the stop string that ended the output, or None.

    Not thread safe: one sequence, one owner. The tables behind it are shared, and safe to share.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.num_output_tokens = 0
        self.stop_string: str | None = None
        self._stream = token_decoder(tokenizer, params.skip_special_tokens).stream(prompt_token_ids)
        self._checker = StopChecker(params.stop_strings) if params.stop_strings else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._buffer = io.StringIO()  # settled and provisional text; appends are amortised O(1), unlike str's
        self._length = 0  # characters in the buffer
        self._sent = 0  # characters that `next_delta` has returned
        self._finished = False

    def append(self, token_ids: Sequence[int], *, stop_token: bool = False) -> str | None:
        """Takes the next tokens; returns the stop string that they complete, if any.

        A stop string counts from the first token after `min_tokens`. When several are found with one token, the one
        that begins first ends the output, and of those the shortest. Tokens after the one that completes it are
        surplus: they are dropped, now and in later calls.

        Args:
            token_ids: sampled tokens, in order. Ids that the tokenizer does not know have no text.
            stop_token: the last of them is a stop token (or the end-of-sequence token) that ended the sequence. Its
                text is left out unless `include_stop_str_in_output`; it counts as an output token.
        """
        if self.stop_string is not None or self._finished:
            return self.stop_string
        num_with_text = len(token_ids) - (stop_token and not self._include_stop)
        for i in range(num_with_text):
            self.num_output_tokens += 1
            retracted, new = self._stream.push(token_ids[i])
            if (retracted or new) and self._write(retracted, new):
                return self.stop_string
        self.num_output_tokens += len(token_ids) - num_with_text
        return None

    def finish(self) -> None:
        """No more tokens will come: releases the text held back. An incomplete character becomes U+FFFD."""
        if not self._finished and self.stop_string is None:
            retracted, new = self._stream.flush()
            self._replace(retracted, new)
        self._finished = True

    def next_delta(self, finished: bool = False) -> str:
        """The text decided since the last call. `finished` says that no more tokens will come."""
        if finished:
            self.finish()
        end = self._visible_length()
        if end <= self._sent:
            return ""
        self._buffer.seek(self._sent)
        self._sent = end
        return self._buffer.read(end - self._buffer.tell())

    @property
    def text(self) -> str:
        """The text decided so far, cut at the stop string; complete after a stop string or `finish`. O(its length)."""
        return self._buffer.getvalue()[: self._visible_length()]

    def _visible_length(self) -> int:
        if self._finished or self.stop_string is not None:
            return self._length
        provisional = self._stream.provisional
        settled = self._length - provisional
        if self._checker is None or self._include_stop:
            return settled
        tail = self._read_tail(self._checker.max_length - 1 + provisional)
        visible = self._length - self._checker.held_back(tail)
        if provisional:  # should it be retracted, the settled text alone may begin a stop string
            visible = min(visible, settled - self._checker.held_back(tail[: len(tail) - provisional]))
        return visible

    def _write(self, retracted: int, new: str) -> bool:
        """Appends text; returns whether it ends the output."""
        self._replace(retracted, new)
        if self._checker is None or self.num_output_tokens <= self._min_tokens:
            return False
        tail = self._read_tail(self._checker.max_length - 1 + len(new))
        found = self._checker.find(tail, len(new))
        if found is None:
            return False
        self.stop_string, start = found
        self._length += start - len(tail) + (len(self.stop_string) if self._include_stop else 0)
        return True

    def _replace(self, retracted: int, new: str) -> None:
        if retracted:
            self._length -= retracted
            self._buffer.truncate(self._length)
        self._buffer.seek(self._length)
        self._buffer.write(new)
        self._length += len(new)

    def _read_tail(self, length: int) -> str:
        self._buffer.seek(max(0, self._length - length))
        return self._buffer.read()


class StopChecker:
    """Searches growing text for stop strings.

    Args:
        stop: the stop strings, none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(sorted(set(stop), key=len))
        self.max_length = len(self._stop[-1])

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """The stop string that begins first in `text`, of those that end within its last `num_new` characters.

        Returns:
            The string (the shortest, if two begin together) and its index in `text`, or None.
        """
        found: tuple[str, int] | None = None
        first_new = len(text) - num_new
        for stop in self._stop:
            index = text.find(stop, max(0, first_new - len(stop) + 1))
            if index >= 0 and (found is None or index < found[1]):
                found = (stop, index)
        return found

    def held_back(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        held = 0
        for stop in self._stop:
            index = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while index >= 0 and not stop.startswith(text[index:]):
                index = text.find(stop[0], index + 1)
            if index >= 0:
                held = max(held, len(text) - index)
        return held
