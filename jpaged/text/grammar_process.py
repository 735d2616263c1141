"""A process that follows grammars: `python -P -m jpaged.text.grammar_process MEMORY THREADS WORDS FD FD...`.

    its parent, `GrammarCompiler`                                    this process
    first FD          Follow: guides and a token of each        -->  Followed: which of them must have masks
                      Resume: a guide and many of its tokens    -->  the same
                      MakeMasks: guides                         -->  Made; the masks are in the shared memory
    each other FD     Start: the tokenizer, on one of them      -->  what is wrong with it; empty if nothing is
                      Compile: a constraint                     -->  Compiled

Each FD is a socket (`frames.py`, msgpack) on which every message has one answer. The process ends with its parent.

It is a process of its own because making a tokenizer for grammars keeps all other Python threads of a process waiting,
for seconds where the vocabulary is large, and following grammars takes Python's lock many times a step.
"""

import mmap
import os
import signal
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.api.structured_outputs import FEW_TOKENS, StructuredOutputsParams
from jpaged.text.frames import read_frame, write_frame
from jpaged.text.grammar_check import STACK_BYTES
from jpaged.text.grammars import GrammarTokenizer, grammar_text
from jpaged.text.guides import FollowedGrammar, Guide, Vocabulary, few_tokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MASK_ROWS = 256
"""Masks that the shared memory holds."""
_COMPILER_STACK_BYTES = 4 * STACK_BYTES
"""Of virtual memory; what the checking process could compile can be compiled here."""


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

    begun: [guide, grammar, whether the end of sequence is allowed only where nothing else is, whether it may do without
    masks]. ended: guides that are no more. forgotten: as of Compile.
    """

    begun: list[tuple[int, int, bool, bool]]
    ended: list[int]
    forgotten: list[int]


class Follow(msgspec.Struct, array_like=True, tag=True):
    """tokens: a token for each guide. guessed: of which tokens it is to be said first whether they may follow.
    last: which of them end their sequences. with_masks: the masks of those that need one are made at once; of at most
    MASK_ROWS guides.
    """

    changes: Changes
    guides: list[int]
    tokens: list[int]
    guessed: list[bool]
    last: list[bool]
    with_masks: bool


class Resume(msgspec.Struct, array_like=True, tag=True):
    """tokens: all that have followed where a guide begins, those that were forced included. guessed: as of Follow, for
    the last one.
    """

    changes: Changes
    guide: int
    tokens: list[int]
    guessed: bool


class Place(NamedTuple):
    """Where a guide stands; as `jpaged.engine.constraints.mask_maker.Place`.

    forced: tokens that must follow. needs_mask: what may follow them is to be asked for; otherwise a row may guess.
    is_refused: the token was guessed and must not follow: the guide stands before it still; without a mask, another one
    may be guessed. failure: why it cannot go on, or empty.
    """

    forced: tuple[int, ...] = ()
    needs_mask: bool = True
    is_refused: bool = False
    failure: str = ""

    @property
    def waits(self) -> bool:
        """Whether a mask is to be made for it."""
        return self.needs_mask and not self.failure


class Followed(msgspec.Struct, array_like=True):
    """A place for each guide. masks: of those that need one, in order, as of Made; empty if none were asked for."""

    places: list[Place]
    masks: list[list[int] | str | None] = []


class MakeMasks(msgspec.Struct, array_like=True, tag=True):
    """At most MASK_ROWS guides; the mask of each is written to the row of its place here."""

    changes: Changes
    guides: list[int]


class Made(msgspec.Struct, array_like=True):
    """For each guide the tokens that may follow, if they are few; None where the mask says it; or why it has failed."""

    masks: list[list[int] | str | None]


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
        self._vocabulary = Vocabulary.of(0, (), masks.shape[1])
        self._grammars: dict[int, FollowedGrammar] = {}
        self._guides: dict[int, Guide] = {}

    def start(self, message: Start) -> str:
        """Makes the tokenizer. Returns what is wrong with it."""
        try:
            self._tokenizer = GrammarTokenizer(message.json, message.vocab_size, message.eos_token_ids).make()
        except InvalidParameterError as error:
            return str(error)
        self._vocabulary = Vocabulary.of(message.vocab_size, message.eos_token_ids, self._masks.shape[1])
        return ""

    def compile(self, message: Compile) -> Compiled:
        """Compiles a constraint, which is known by its number from then on."""
        self._forget(message.forgotten)
        assert self._tokenizer is not None
        kind = message.params.kind
        try:
            grammar = FollowedGrammar(self._tokenizer, grammar_text(message.params))
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
        """Moves guides past their tokens and past what these force."""
        self._take(message.changes)
        guides = [self._guides[number] for number in message.guides]
        sampled = zip(guides, message.tokens, message.guessed, strict=True)
        masked = [(guide.matcher, token) for guide, token, guessed in sampled if not guessed]
        if masked:
            self._executor.consume_token_par(masked)
        every = zip(guides, message.tokens, message.guessed, message.last, strict=True)
        places = [_followed(*one) for one in every]
        if not message.with_masks:
            return Followed(places)
        return Followed(
            places, self._masks_of([guide for guide, place in zip(guides, places, strict=True) if place.waits])
        )

    def resume(self, message: Resume) -> Followed:
        """Moves a guide past its tokens; as `follow`. It fails at the first token that may not follow."""
        self._take(message.changes)
        guide = self._guides[message.guide]
        forced: deque[int] = deque()
        tokens, last = message.tokens, 0
        if message.guessed:
            *tokens, last = tokens
        for token in tokens:
            if forced and forced[0] == token:
                forced.popleft()
            elif guide.matcher.consume_token(token):
                forced = deque(guide.take_forced())
        if message.guessed:
            return Followed([_followed(guide, last, True, False)])
        return Followed([_place(guide, forced)])

    def make_masks(self, message: MakeMasks) -> Made:
        """Writes what may follow into the shared masks."""
        self._take(message.changes)
        return Made(self._masks_of([self._guides[number] for number in message.guides]))

    def _masks_of(self, guides: list[Guide]) -> list[list[int] | str | None]:
        """Writes their masks, in order; returns as `Made` has it."""
        masks = self._masks
        by_lane = sorted(range(len(guides)), key=lambda i: (id(guides[i].grammar), guides[i].lane))
        self._executor.unsafe_compute_mask_ptr(
            [(guides[i].matcher, i) for i in by_lane], masks.ctypes.data, masks.strides[0], len(masks)
        )
        for i, guide in enumerate(guides):
            guide.finish_mask(masks[i])
        made = masks[: len(guides)]
        counts = np.bitwise_count(made).sum(axis=1, dtype=np.int64)
        for guide, count in zip(guides, counts.tolist(), strict=True):
            guide.heed_mask(count)
        few = few_tokens(made, counts, FEW_TOKENS)
        return [_failure(guide) or tokens or None for guide, tokens in zip(guides, few, strict=True)]

    def _take(self, changes: Changes) -> None:
        for number in changes.ended:
            guide = self._guides.pop(number)
            guide.grammar.num_live[guide.lane] -= 1
        self._forget(changes.forgotten)
        for number, count in Counter(number for _, number, *_ in changes.begun).items():
            self._grammars[number].grow(count, self._num_threads, self._pool)
        for number, grammar, ends_late, guesses in changes.begun:
            self._guides[number] = Guide(self._grammars[grammar], self._vocabulary, ends_late, guesses)

    def _forget(self, grammars: list[int]) -> None:
        for number in grammars:
            del self._grammars[number]


def _followed(guide: Guide, token: int, guessed: bool, is_last: bool) -> Place:
    """Where a guide stands behind a token. guessed: it is moved past the token here, if it may follow."""
    if guessed and not guide.take_guess(token):
        failure = _failure(guide)
        return Place(failure=failure) if failure else Place((), guide.needs_mask(), is_refused=True)
    if is_last:
        return Place(needs_mask=False)
    return _place(guide, guide.take_forced())


def _place(guide: Guide, forced: Iterable[int]) -> Place:
    failure = _failure(guide)
    return Place(failure=failure) if failure else Place(tuple(forced), guide.needs_mask())


def _failure(guide: Guide) -> str:
    return guide.matcher.get_error().partition("\n")[0] if guide.matcher.is_error() else ""


def _serve(server: GrammarServer, sock: socket.socket) -> None:
    """Answers until the other end is closed, which ends the process."""
    decoder = msgspec.msgpack.Decoder(Start | Compile | Follow | Resume | MakeMasks)
    while (frame := read_frame(sock)) is not None:
        message = decoder.decode(frame)
        answer: object
        if isinstance(message, Follow):
            answer = server.follow(message)
        elif isinstance(message, MakeMasks):
            answer = server.make_masks(message)
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
