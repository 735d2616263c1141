"""Turns tokens into text: one decoder for each kind of tokenizer, one stream for each sequence.

    byte level       a token is a piece of a UTF-8 byte string (GPT-2, OPT, Llama 3, Qwen)
    sentencepiece    a token is text with U+2581 for a space, or one byte (Llama 2, Mistral, Gemma, T5)
    window           any other (WordPiece, byte pairs with a suffix, tokenizers written in Python): the last tokens are
                     decoded together

What the text is. Let D be `tokenizer.decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)`.
The text of an output is `D(prompt + output)` without its beginning `D(prompt)`: so a first token that carries a
space keeps it, as it stands after a prompt. Two cases need more words:

- A prompt that ends inside a character (`prompt_token_ids` cut anywhere) leaves that character to the output. With
  `tail` for the tokens that hold its bytes, the text is `D(context + tail + output)` without `D(context)`.
- `tokenizers`' ByteFallback replaces *every* byte of a run of byte tokens by U+FFFD when any of them is invalid. A
  run is therefore provisional until it ends: its characters are searched for stop strings at once, but streamed
  when the next ordinary token, or the end, has settled them. A run does not reach back into the prompt.

Clean-up of spaces is left out because it rewrites text that was streamed already (" ." becomes "."), and damages
code; transformers leaves it out too for byte-pair tokenizers.

Cost: a token is looked up in a table of pieces that fills as tokens occur, about 1 us each; nothing is decoded twice.
The table covers ByteLevel and the sentencepiece decoders (Replace, Metaspace, ByteFallback, Fuse, Strip) and is
checked against the tokenizer's own decode before it is trusted; any other tokenizer is decoded over a short window.
`tokenizers.decoders.DecodeStream` is not used: in 0.23 it raises "Invalid prefix encountered" when a byte run turns
out invalid after a whole character, and re-decodes all pending tokens (quadratic) while the text ends in U+FFFD.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"
"""Replaces bytes that are not UTF-8."""

MAX_INCOMPLETE_BYTES = 3
"""Most bytes of an incomplete character."""


def decode_token(tokenizer: Any, token_id: int) -> str:
    """A token's own text, as it stands inside a text; special tokens by name, fragments of characters as U+FFFD."""
    return token_decoder(tokenizer, skip_special_tokens=False).token_text(token_id)


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """A token's own bytes, which may be part of a character; special tokens by name."""
    return token_decoder(tokenizer, skip_special_tokens=False).token_bytes(token_id)


class TokenTexts:
    """The texts of tokens that follow each other, for log-probabilities. They add up to the text.

    A token that leaves a character incomplete has the text "", and the one that completes it the whole character.

    tokenizer: as for `token_decoder`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._incomplete = b""

    def text(self, token_id: int) -> str:
        """The text that a token would have next."""
        text = decode_token(self._tokenizer, token_id)
        if not self._incomplete and REPLACEMENT not in text:  # nearly always
            return text
        data = token_bytes(self._tokenizer, token_id)
        return codecs.utf_8_decode(self._incomplete + data, "replace", False)[0]

    def advance(self, token_id: int) -> None:
        """Takes a token as the next one."""
        if self._incomplete or REPLACEMENT in decode_token(self._tokenizer, token_id):
            self._incomplete = _incomplete_end(self._incomplete + token_bytes(self._tokenizer, token_id))


class TextStream(Protocol):
    """Tokens in, text out. `push` and `flush` return how many of the last characters are withdrawn, and new ones."""

    provisional: int
    """Characters at the end of the text that a later token may withdraw."""

    def push(self, token_id: int) -> tuple[int, str]: ...

    def flush(self) -> tuple[int, str]: ...


class TokenDecoder(Protocol):
    """What all sequences of one tokenizer share."""

    def stream(self, prompt_token_ids: Sequence[int]) -> TextStream: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


_decoders: "WeakKeyDictionary[Any, dict[bool, TokenDecoder]]" = WeakKeyDictionary()


def token_decoder(tokenizer: Any, skip_special_tokens: bool) -> TokenDecoder:
    """The decoder of a tokenizer, made at the first call. Tokens added to the tokenizer later are not seen."""
    tokenizer = getattr(tokenizer, "hf", tokenizer)
    decoders = _decoders.setdefault(tokenizer, {})
    if skip_special_tokens not in decoders:
        decoders[skip_special_tokens] = _new_decoder(tokenizer, skip_special_tokens)
    return decoders[skip_special_tokens]


def _new_decoder(tokenizer: Any, skip: bool) -> TokenDecoder:
    vocabulary = _Vocabulary(tokenizer, skip)
    for candidate in (ByteLevelDecoder.of(vocabulary), SentencePieceDecoder.of(vocabulary)):
        if candidate is not None and _agrees(candidate, vocabulary):
            return candidate
    return WindowDecoder(vocabulary)


def _agrees(decoder: TokenDecoder, vocabulary: "_Vocabulary") -> bool:
    """Whether a table decodes a sample of the vocabulary as the tokenizer does, which may override its decode."""
    size = len(vocabulary.tokenizer)  # less than the largest id where ids leave gaps; added tokens often stand above
    spread = {i * size // 128 for i in range(128)}
    sample = sorted(spread | set(range(max(0, size - 32), size)) | set(vocabulary.added_ids[-32:]))
    stream = decoder.stream(())
    text = ""
    for retracted, new in [*map(stream.push, sample), stream.flush()]:
        text = text[: len(text) - retracted] + new
    return text == vocabulary.decode(sample)


class _Vocabulary:
    """A tokenizer's tokens by id, and its own decode."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.backend = getattr(tokenizer, "backend_tokenizer", None)  # a tokenizers.Tokenizer, if it has one
        added = {} if self.backend is None else self.backend.get_added_tokens_decoder()
        self.added_ids = sorted(added)
        if self.backend is not None:
            self._special = {token.content for token in added.values() if token.special}
        else:
            self._special = set(tokenizer.all_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if it has no text: unknown, or special and to be skipped."""
        if token_id < 0:
            return None
        try:
            token = (self.backend.id_to_token if self.backend else self.tokenizer.convert_ids_to_tokens)(int(token_id))
        except (IndexError, KeyError, OverflowError):  # tokenizers written in Python; past 32 bits
            return None
        return None if self.skip_special_tokens and token in self._special else token

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def decoder_steps(self) -> list[dict[str, Any]]:
        """The steps of a `tokenizers` decoder as it serialises them; empty if there are none."""
        decoder = getattr(self.backend, "decoder", None)
        if decoder is None:
            return []
        state = json.loads(decoder.__getstate__())
        return state["decoders"] if state["type"] == "Sequence" else [state]


def _incomplete_end(data: bytes) -> bytes:
    """The bytes at the end that begin a character but do not complete it."""
    _, used = codecs.utf_8_decode(data, "replace", False)
    return data[used:]


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class ByteLevelDecoder:
    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def of(cls, vocabulary: _Vocabulary) -> "ByteLevelDecoder | None":
        return cls(vocabulary) if [s["type"] for s in vocabulary.decoder_steps()] == ["ByteLevel"] else None

    def stream(self, prompt_token_ids: Sequence[int]) -> "ByteLevelStream":
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = self.piece(token_id) + tail
            if len(tail) > MAX_INCOMPLETE_BYTES:
                break
        return ByteLevelStream(self, _incomplete_end(tail))

    def token_text(self, token_id: int) -> str:
        return self.piece(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.piece(token_id)

    def piece(self, token_id: int) -> bytes:
        """The token's bytes; none if it has no text."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._spell(self._vocabulary.token(token_id) or "")
        return piece

    @staticmethod
    def _spell(token: str) -> bytes:
        byte_of_char = _byte_of_char()
        try:
            return bytes(byte_of_char[c] for c in token)
        except KeyError:  # an added token, which is plain text
            return token.encode()


class ByteLevelStream:
    provisional = 0  # a byte sequence is replaced as soon as it cannot become a character, and only then

    def __init__(self, decoder: ByteLevelDecoder, incomplete: bytes) -> None:
        self._piece = decoder.piece
        self._incomplete = incomplete

    def push(self, token_id: int) -> tuple[int, str]:
        data = self._incomplete + self._piece(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        return 0, text

    def flush(self) -> tuple[int, str]:
        text = self._incomplete.decode("utf-8", "replace")
        self._incomplete = b""
        return 0, text


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SentencePieceDecoder:
    """Pieces under these steps of `tokenizers`, in this order, each optional: Replace and Metaspace, ByteFallback,
    Fuse, Strip (from the left, once fused)."""

    def __init__(self, vocabulary: _Vocabulary, steps: list[dict[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._steps = steps
        self._byte_fallback = any(s["type"] == "ByteFallback" for s in steps)
        self._first_differs = any(s["type"] == "Metaspace" and s["prepend_scheme"] != "never" for s in steps)
        strips = steps[-1]["type"] == "Strip"
        self.strip_char: str = steps[-1]["content"] if strips else " "
        self.max_stripped: int = steps[-1]["start"] if strips else 0
        self._pieces: dict[int, str | int | None] = {}

    @classmethod
    def of(cls, vocabulary: _Vocabulary) -> "SentencePieceDecoder | None":
        steps = vocabulary.decoder_steps()
        order = " ".join(s["type"] for s in steps)
        if not re.fullmatch(r"(Replace|Metaspace)( (Replace|Metaspace))*( ByteFallback)?( Fuse( Strip)?)?", order):
            return None
        if any(s["type"] == "Replace" and "String" not in s["pattern"] for s in steps):
            return None
        if steps[-1]["type"] == "Strip" and steps[-1]["stop"]:
            return None
        return cls(vocabulary, steps)

    def stream(self, prompt_token_ids: Sequence[int]) -> "SentencePieceStream":
        tail = b""
        for piece in self._pieces_backwards(prompt_token_ids):
            if not isinstance(piece, int) or len(tail) > MAX_INCOMPLETE_BYTES:
                break
            tail = bytes((piece,)) + tail
        stream = SentencePieceStream(self)
        stream.begin_after(prompt_token_ids, _incomplete_end(tail))
        return stream

    def token_text(self, token_id: int) -> str:
        piece = self.piece(token_id)
        if isinstance(piece, int):
            return chr(piece) if piece < 0x80 else REPLACEMENT
        return piece or ""

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode()

    def piece(self, token_id: int, first: bool = False) -> str | int | None:
        """The token's text, or its byte, or None if it has no text. `first`: no token precedes it."""
        if first and self._first_differs:
            return self._spell(token_id, first=True)
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self._spell(token_id, first=False)
            return piece

    def _spell(self, token_id: int, first: bool) -> str | int | None:
        token = self._vocabulary.token(token_id)
        if token is None:
            return None
        for step in self._steps:
            if step["type"] == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            elif step["type"] == "Metaspace":
                drops = first and step["prepend_scheme"] != "never"
                token = token.replace(step["replacement"], "" if drops else " ")
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return int(byte[1], 16) if byte else token

    def _pieces_backwards(self, token_ids: Sequence[int]) -> Iterator[str | int]:
        for token_id in reversed(token_ids):
            piece = self.piece(token_id)
            if piece is not None:
                yield piece


class SentencePieceStream:
    def __init__(self, decoder: SentencePieceDecoder) -> None:
        self.provisional = 0
        self._decoder = decoder
        self._first = True  # no token has had text yet
        self._to_strip = decoder.max_stripped  # characters that may still be stripped from the text's beginning
        self._run_length = 0  # byte tokens since the last token of text
        self._run_decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._run_valid = True

    def begin_after(self, prompt_token_ids: Sequence[int], incomplete: bytes) -> None:
        """Stands the stream behind a prompt that ends in the bytes of an incomplete character (usually none)."""
        for token_id in prompt_token_ids:  # ends with the first token that decides how the text's beginning is stripped
            if not self._first and not self._to_strip:
                break
            self.push(token_id)
        self._close_run()
        for byte in incomplete:
            self._push_byte(byte)

    def push(self, token_id: int) -> tuple[int, str]:
        piece = self._decoder.piece(token_id, self._first)
        if piece is None:
            return 0, ""
        self._first = False
        if isinstance(piece, int):
            return self._push_byte(piece)
        if not self._run_length:
            return 0, self._strip(piece) if self._to_strip else piece
        retracted, replaced = self._close_run()
        return retracted, replaced + self._strip(piece)

    def flush(self) -> tuple[int, str]:
        return self._close_run()

    def _push_byte(self, byte: int) -> tuple[int, str]:
        self._run_length += 1
        if not self._run_valid:
            return 0, ""
        try:
            new = self._strip(self._run_decoder.decode(bytes((byte,))))
        except UnicodeDecodeError:
            self._run_valid = False
            retracted, self.provisional = self.provisional, 0
            return retracted, ""
        self.provisional += len(new)
        return 0, new

    def _close_run(self) -> tuple[int, str]:
        retracted, new = 0, ""
        if not self._run_valid or self._run_decoder.getstate()[0]:
            retracted = self.provisional
            new = REPLACEMENT * self._run_length
            self._to_strip = 0
        self.provisional = 0
        self._run_length = 0
        self._run_valid = True
        self._run_decoder.reset()
        return retracted, new

    def _strip(self, text: str) -> str:
        """Strips the beginning of the whole text, of which `text` is the next part."""
        start = 0
        while self._to_strip and start < len(text):
            if text[start] == self._decoder.strip_char:
                start += 1
                self._to_strip -= 1
            else:
                self._to_strip = 0
        return text[start:]


class WindowDecoder:
    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._has_text: dict[int, bool] = {}

    def stream(self, prompt_token_ids: Sequence[int]) -> "WindowStream":
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(context) == WindowStream.CONTEXT:
                break
            if self.has_text(token_id):
                context.insert(0, token_id)
        return WindowStream(self.decode, self.has_text, context)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id]) if self.has_text(token_id) else ""

    def token_bytes(self, token_id: int) -> bytes:
        token = self._vocabulary.token(token_id)
        byte = None if token is None else _BYTE_TOKEN.fullmatch(token)
        return bytes((int(byte[1], 16),)) if byte else self.token_text(token_id).encode()

    def decode(self, token_ids: list[int]) -> str:
        return self._vocabulary.decode(token_ids)

    def has_text(self, token_id: int) -> bool:
        result = self._has_text.get(token_id)
        if result is None:
            result = self._has_text[token_id] = self._vocabulary.token(token_id) is not None
        return result


class WindowStream:
    """Decodes the last tokens together and returns what each adds to their text.

        ids    [ context, text returned | new ]
        text   [ given                  | new, less incomplete bytes at its end ]

    While the text ends in U+FFFD, all of these are held back: incomplete bytes may show as one, as one each, or (in
    `tokenizers`' ByteFallback) take the complete characters before them along. The window grows to LIMIT tokens and is
    then cut to about CONTEXT, between characters, where the text of the tokens kept is an end of the text of all of
    them; so a token costs O(LIMIT). Bytes that go on being invalid are given up waiting for, a few times LIMIT later.
    """

    CONTEXT = 6  # a character's bytes, and a token or two before them
    LIMIT = 24
    provisional = 0

    def __init__(self, decode: Callable[[list[int]], str], has_text: Callable[[int], bool], context: list[int]) -> None:
        self._decode = decode
        self._has_text = has_text
        self._ids = context
        text = decode(context) if context else ""
        self._given = max(len(text.rstrip(REPLACEMENT)), len(text) - MAX_INCOMPLETE_BYTES)

    def push(self, token_id: int) -> tuple[int, str]:
        if not self._has_text(token_id):
            return 0, ""
        self._ids.append(int(token_id))
        text = self._decode(self._ids)
        end = len(text.rstrip(REPLACEMENT))
        if len(text) - end > 2 * self.LIMIT:
            end = len(text) - MAX_INCOMPLETE_BYTES
        end = max(self._given, end)
        new = text[self._given : end]
        self._given = end
        if len(self._ids) > (self.LIMIT if end == len(text) else 4 * self.LIMIT):
            self._shrink(text)
        return 0, new

    def flush(self) -> tuple[int, str]:
        text = self._decode(self._ids) if self._ids else ""
        new = text[self._given :]
        self._given = len(text)
        return 0, new

    def _shrink(self, text: str) -> None:
        pending = len(text) - self._given
        for kept in range(self.CONTEXT, len(self._ids)):
            end = self._decode(self._ids[-kept:])
            if text.endswith(end) and len(end) > pending:
                self._ids = self._ids[-kept:]
                self._given = len(end) - pending
                return
