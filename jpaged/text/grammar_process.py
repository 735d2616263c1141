"""A process that follows grammars: `python -P -m jpaged.text.grammar_process MEMORY THREADS WORDS FD FD...`.

    its parent, `GrammarCompiler`                                    this process
    first FD          Follow: guides and a token of each        -->  Followed; masks are in the shared memory
                      Resume: a guide and many of its tokens    -->  the same
    each other FD     Start: the tokenizer, on one of them      -->  what is wrong with it; empty if nothing is
                      Compile: a constraint                     -->  Compiled

Each FD is a socket (`frames.py`, msgpack) on which every message has one answer. The process ends with its parent.

It is a process of its own because making a tokenizer for grammars keeps all other Python threads of a process waiting,
for seconds where the vocabulary is large, and following grammars takes Python's lock many times a step.

**Lanes.** Copies of a matcher share its lexer, under one lock: masks of copies cannot be made at the same time. So a
grammar is compiled several times, and its sequences are spread over these lanes. A lane's lexer remembers what its
sequences have met, which makes later masks cheaper: more lanes than threads cost more than their balance brings (with
one lane a mask takes 0.4 ms once it has met much, with 32 lanes 1.1 to 1.4).
"""

import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text.frames import read_frame, write_frame
from jpaged.text.grammar_check import STACK_BYTES
from jpaged.text.grammars import GrammarTokenizer, grammar_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MASK_ROWS = 256
"""Masks that the shared memory holds."""
_COMPILER_STACK_BYTES = 4 * STACK_BYTES
"""Of virtual memory; what the checking process could compile can be compiled here."""
_QUICK_S = 0.1
"""Lanes of grammars that are compiled within this are made at once; those of others beside the work."""


class Start(msgspec.Struct, array_like=True, tag=True):
    """The tokenizer: `GrammarTokenizer`."""

    json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Compile(msgspec.Struct, array_like=True, tag=True):
    """A constraint. number: names the grammar from then on. forgotten: grammars that nobody has any more."""

    number: int
    params: StructuredOutputsParams
    forgotten: list[int]


class Compiled(msgspec.Struct, array_like=True):
    """error: why there is no grammar, or empty. forced, mask: as of `CompiledGrammar`; the mask as bytes."""

    error: str
    is_refused: bool = False
    forced: list[int] = []
    mask: bytes = b""


class Changes(msgspec.Struct, array_like=True):
    """What guides there are, since the last message.

    begun: [guide, grammar, whether the end of sequence is allowed only where nothing else is]. ended: guides that are
    no more. forgotten: as of Compile.
    """

    begun: list[tuple[int, int, bool]]
    ended: list[int]
    forgotten: list[int]


class Follow(msgspec.Struct, array_like=True, tag=True):
    """guides, tokens: a token for each of at most MASK_ROWS guides."""

    changes: Changes
    guides: list[int]
    tokens: list[int]


class Resume(msgspec.Struct, array_like=True, tag=True):
    """tokens: all that have followed where a guide begins, those that were forced included."""

    changes: Changes
    guide: int
    tokens: list[int]


class Followed(msgspec.Struct, array_like=True):
    """forced: for each guide the tokens that must follow, or why it cannot go on."""

    forced: list[list[int] | str]


class _Guide:
    """A sequence's place in its grammar. lane: which of the grammar's it was copied from."""

    __slots__ = ("ends_late", "grammar", "lane", "matcher")

    def __init__(self, grammar: "_Grammar", ends_late: bool) -> None:
        self.grammar, self.ends_late = grammar, ends_late
        self.lane, self.matcher = grammar.begin()


class _Grammar:
    """A compiled constraint: a matcher for each lane, behind the forced tokens, of which sequences get copies.

    forced: tokens that come first. num_live: how many sequences follow each lane.
    """

    def __init__(self, tokenizer: "LLTokenizer", text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        begun = time.perf_counter()
        first, self.forced = self._lane()
        self._compile_s = time.perf_counter() - begun
        self.num_live = [0]
        self._lanes = [first]
        self._is_growing = False

    def first_mask(self, mask: np.ndarray) -> str:
        """Writes what may follow the forced tokens. Returns what is wrong with the constraint."""
        self._lanes[0].unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._lanes[0].get_error()

    def grow(self, num_more: int, most: int, pool: ThreadPoolExecutor) -> None:
        """Makes lanes for so many more sequences, at best one for each, and at most `most`."""
        missing = min(most, sum(self.num_live) + num_more) - len(self._lanes)
        if missing <= 0 or self._is_growing:
            return
        if self._compile_s > _QUICK_S:
            self._is_growing = True
            pool.submit(self._grow_beside, missing)
        else:
            for lane, _ in pool.map(lambda _: self._lane(), range(missing)):
                self._add(lane)

    def begin(self) -> "tuple[int, LLMatcher]":
        """A copy of the lane that has the fewest sequences."""
        lane = min(range(len(self._lanes)), key=self.num_live.__getitem__)
        self.num_live[lane] += 1
        return lane, self._lanes[lane].deep_copy()

    def _grow_beside(self, missing: int) -> None:
        for _ in range(missing):
            self._add(self._lane()[0])
        self._is_growing = False

    def _add(self, lane: "LLMatcher") -> None:
        self.num_live.append(0)
        self._lanes.append(lane)

    def _lane(self) -> "tuple[LLMatcher, list[int]]":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._text, log_level=0)
        forced = matcher.compute_ff_tokens()
        matcher.consume_tokens(forced)
        return matcher, forced


class GrammarServer:
    """What the process does, without its sockets.

    masks: uint32 [MASK_ROWS, words]; shared with the parent. num_threads: that make masks.
    """

    def __init__(self, masks: np.ndarray, num_threads: int) -> None:
        from llguidance import LLExecutor

        self._masks, self._num_threads = masks, num_threads
        self._executor = LLExecutor(num_threads)
        self._pool = ThreadPoolExecutor(num_threads, "jpaged-lanes")
        self._tokenizer: LLTokenizer | None = None
        self._not_eos = np.full((masks.shape[1],), 0xFFFFFFFF, np.uint32)
        self._grammars: dict[int, _Grammar] = {}
        self._guides: dict[int, _Guide] = {}

    def start(self, message: Start) -> str:
        """Makes the tokenizer. Returns what is wrong with it."""
        try:
            self._tokenizer = GrammarTokenizer(message.json, message.vocab_size, message.eos_token_ids).make()
        except InvalidParameterError as error:
            return str(error)
        for token in message.eos_token_ids:
            self._not_eos[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        return ""

    def compile(self, message: Compile) -> Compiled:
        """Compiles a constraint, which is known by its number from then on."""
        self._forget(message.forgotten)
        assert self._tokenizer is not None
        kind = message.params.kind
        try:
            grammar = _Grammar(self._tokenizer, grammar_text(message.params))
        except InvalidParameterError as error:
            return Compiled(str(error), is_refused=True)
        except BaseException as error:  # whatever the bindings raise: a panic of the library is no Exception
            return Compiled(f"structured_outputs.{kind} cannot be compiled: {error}")
        mask = np.zeros((self._masks.shape[1],), np.uint32)
        if wrong := grammar.first_mask(mask):
            return Compiled(f"structured_outputs.{kind} cannot be used: {wrong}", is_refused=True)
        self._grammars[message.number] = grammar
        return Compiled("", False, grammar.forced, mask.tobytes())

    def follow(self, message: Follow) -> Followed:
        """Moves guides past their tokens and past what these force; writes what may follow into the shared masks."""
        self._take(message.changes)
        guides = [self._guides[number] for number in message.guides]
        self._executor.consume_token_par(
            [(guide.matcher, token) for guide, token in zip(guides, message.tokens, strict=True)]
        )
        forced = []
        for guide in guides:
            tokens = guide.matcher.compute_ff_tokens()
            if tokens:
                guide.matcher.consume_tokens(tokens)
            forced.append(tokens)
        return self._answer(guides, forced)

    def resume(self, message: Resume) -> Followed:
        """Moves a guide past its tokens; as `follow`. It fails at the first token that may not follow."""
        self._take(message.changes)
        guide = self._guides[message.guide]
        forced: deque[int] = deque()
        for token in message.tokens:
            if forced and forced[0] == token:
                forced.popleft()
            elif guide.matcher.consume_token(token):
                forced = deque(guide.matcher.compute_ff_tokens())
                guide.matcher.consume_tokens(list(forced))
        return self._answer([guide], [list(forced)])

    def _answer(self, guides: list[_Guide], forced: list[list[int]]) -> Followed:
        """Writes the masks of guides; says which tokens must follow, and which guides have failed."""
        by_lane = sorted(range(len(guides)), key=lambda i: (id(guides[i].grammar), guides[i].lane))
        masks = self._masks
        self._executor.unsafe_compute_mask_ptr(
            [(guides[i].matcher, i) for i in by_lane], masks.ctypes.data, masks.strides[0], len(masks)
        )
        for i, guide in enumerate(guides):
            if guide.ends_late:
                others = masks[i] & self._not_eos
                if others.any():
                    masks[i] = others
        return Followed(
            [
                guide.matcher.get_error().partition("\n")[0] if guide.matcher.is_error() else tokens
                for guide, tokens in zip(guides, forced, strict=True)
            ]
        )

    def _take(self, changes: Changes) -> None:
        for number in changes.ended:
            guide = self._guides.pop(number)
            guide.grammar.num_live[guide.lane] -= 1
        self._forget(changes.forgotten)
        for number, count in Counter(number for _, number, _ in changes.begun).items():
            self._grammars[number].grow(count, self._num_threads, self._pool)
        for number, grammar, ends_late in changes.begun:
            self._guides[number] = _Guide(self._grammars[grammar], ends_late)

    def _forget(self, grammars: list[int]) -> None:
        for number in grammars:
            del self._grammars[number]


def _serve(server: GrammarServer, sock: socket.socket) -> None:
    """Answers until the other end is closed, which ends the process."""
    decoder = msgspec.msgpack.Decoder(Start | Compile | Follow | Resume)
    while (frame := read_frame(sock)) is not None:
        message = decoder.decode(frame)
        answer: object
        if isinstance(message, Follow):
            answer = server.follow(message)
        elif isinstance(message, Resume):
            answer = server.resume(message)
        elif isinstance(message, Compile):
            answer = server.compile(message)
        else:
            answer = server.start(message)
        write_frame(sock, msgspec.msgpack.encode(answer))


def _serve_or_end(server: GrammarServer, sock: socket.socket) -> None:
    try:
        _serve(server, sock)
    finally:
        os._exit(0)


def main() -> None:
    """Serves each socket in a thread."""
    memory, num_threads, num_words, *sockets = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    shared = mmap.mmap(memory, MASK_ROWS * num_words * 4)
    server = GrammarServer(np.frombuffer(shared, np.uint32).reshape(MASK_ROWS, num_words), num_threads)
    threading.stack_size(_COMPILER_STACK_BYTES)
    threads = [threading.Thread(target=_serve_or_end, args=(server, socket.socket(fileno=fd))) for fd in sockets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
