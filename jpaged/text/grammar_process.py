"""Processes that follow grammars, the **shards**: `python -P -m jpaged.text.grammar_process WORDS TABLES FDS FD FD...`.

    its parent, `grammar_shards.py`                                a shard
    first FD          Follow: guides and what each sampled    -->  Followed: where they stand; then Made, of those that
                                                                   must have masks, as many as it takes for all
                      Resume: a guide and many of its tokens  -->  Followed
                      MakeMasks: guides                       -->  Made, as many as it takes for all
    each other FD     Compile: a constraint                   -->  Compiled
    any of them                                                    Failed, before it ends by an error
    the very first    Start: the tokenizer                    -->  what is wrong with it; empty if nothing is

Each FD is a socket (`frames.py`, msgpack). A shard has FDS of them. The process that is started is the first shard: it
makes the tokenizer, and then forks the others, which share its memory; and one more, with the socket TABLES
(`table_process.py`). All end with their parent.

They are processes, not threads: llguidance moves a sequence past a token, and says what is forced, with Python's lock
held, some 40 us each. A grammar is compiled in each shard that has sequences of it. What a shard's lexer has met makes
later masks of its other sequences cheaper.
"""

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec
import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.api.structured_outputs import FEW_TOKENS, StructuredOutputsParams
from jpaged.text.frames import read_frame, write_frame
from jpaged.text.grammar_check import STACK_BYTES
from jpaged.text.grammars import GrammarTokenizer, grammar_text, refusal
from jpaged.text.guides import FollowedGrammar, Guide, Vocabulary, count_tokens, few_tokens
from jpaged.text.table_process import serve_tables

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_PORTION_S = 0.001
"""Masks are sent when so much time has been spent on them: those of other sequences need not wait for slow ones."""
MOST_KEPT = 256
"""Masks of a shard that both ends keep, as sequences of one schema need the same ones many times: 5 MB if all are
whole, with a vocabulary of 152,000 tokens."""
_MOST_TOKENS = 64
"""Of a guide in one message; a state of `Followed` is a byte."""
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


class Compiled(msgspec.Struct, array_like=True, tag=True):
    """error: why there is no grammar, or empty. forced, mask: as of `CompiledGrammar`; the mask as bytes. seconds: that
    it took.
    """

    error: str
    is_refused: bool = False
    forced: list[int] = []
    mask: bytes = b""
    seconds: float = 0.0


class Changes(msgspec.Struct, array_like=True):
    """What guides there are, since the last message.

    begun: [guide, grammar, whether the end of sequence is allowed only where nothing else is, whether it may do without
    masks]. compiled: grammars that this shard is to compile first. ended: guides that are no more. forgotten: as of
    Compile.
    """

    begun: list[tuple[int, int, bool, bool]]
    compiled: list[tuple[int, StructuredOutputsParams]]
    ended: list[int]
    forgotten: list[int]


class Follow(msgspec.Struct, array_like=True, tag=True):
    """What guides have sampled, in packed arrays.

    guides: int32 [guides]; their numbers. tokens: int32 [guides, most]; the token of each guide, or, where it is
    guessed, tokens in order of preference, NO_TOKEN behind the last. guessed: bool [guides]; of which it is to be said
    which of their tokens may follow. last: int64 [guides]; a bit for each of a guide's tokens that would end its
    sequence.
    """

    changes: Changes
    guides: bytes
    tokens: bytes
    guessed: bytes
    last: bytes

    @classmethod
    def of(
        cls,
        changes: Changes,
        numbers: "np.ndarray | Sequence[int]",
        tokens: np.ndarray,
        guessed: "np.ndarray | Sequence[bool]",
        last: "np.ndarray | Sequence[int]",
    ) -> "Follow":
        """Packs arrays. numbers: of the guides."""
        return cls(
            changes,
            np.asarray(numbers, np.int32).tobytes(),
            np.asarray(tokens, np.int32).tobytes(),
            np.asarray(guessed, np.bool_).tobytes(),
            np.asarray(last, np.int64).tobytes(),
        )


class Resume(msgspec.Struct, array_like=True, tag=True):
    """tokens: all that have followed where a guide begins, those that were forced included. guesses: behind them, as of
    Follow; empty: none.
    """

    changes: Changes
    guide: int
    tokens: list[int]
    guesses: list[int]
    last: int


class Place(NamedTuple):
    """Where a guide stands; as `jpaged.engine.constraints.following.Place`.

    forced: tokens that must follow. needs_mask: what may follow them is made; otherwise a row may guess.
    num_refused: of what was guessed, the tokens before the first one that may follow, behind which the guide stands.
    is_refused: none of them may: it stands before them still; without a mask, others may be guessed. failure: why it
    cannot go on, or empty.
    """

    forced: tuple[int, ...] = ()
    needs_mask: bool = True
    num_refused: int = 0
    is_refused: bool = False
    failure: str = ""

    @property
    def waits(self) -> bool:
        """Whether a mask is to be made for it."""
        return self.needs_mask and not self.failure


class Places(NamedTuple):
    """Where guides stand, by array; as `jpaged.engine.constraints.following.Places`."""

    needs_mask: np.ndarray
    num_refused: np.ndarray
    is_refused: np.ndarray
    forced: dict[int, tuple[int, ...]]
    failures: dict[int, str]

    @classmethod
    def of(cls, places: Sequence[Place]) -> "Places":
        """The same of some guides one by one."""
        return Followed.of(places).arrays

    @property
    def waiting(self) -> list[int]:
        """The guides that masks are to be made for, by index."""
        waits: list[int] = np.flatnonzero(self.needs_mask).tolist()
        return [i for i in waits if i not in self.failures] if self.failures else waits


_PLACES = [Place((), *state) for state in product((True, False), range(_MOST_TOKENS), (True, False))]
_STATES = {place[1:4]: i for i, place in enumerate(_PLACES)}
"""Places without forced tokens and failures, and where they stand there: by needs_mask, num_refused and is_refused."""
_NEEDS_MASK, _NUM_REFUSED, _IS_REFUSED = (np.array(column) for column in list(zip(*_PLACES, strict=True))[1:4])


class Followed(msgspec.Struct, array_like=True, tag=True):
    """A place for each guide, in few bytes, since the engine's thread reads them: most places have neither forced
    tokens nor a failure.

    states: for each guide a byte, an index of `_PLACES`. forced, failures: of those that have any, by guide.
    """

    states: bytes
    forced: dict[int, tuple[int, ...]] = {}
    failures: dict[int, str] = {}

    @classmethod
    def of(cls, places: Sequence[Place]) -> "Followed":
        """Packs places."""
        return cls(
            bytes(_STATES[place[1:4]] for place in places),
            {i: place.forced for i, place in enumerate(places) if place.forced},
            {i: place.failure for i, place in enumerate(places) if place.failure},
        )

    @property
    def places(self) -> list[Place]:
        """The places, unpacked, in the guides' order."""
        places = [_PLACES[state] for state in self.states]
        for i, forced in self.forced.items():
            places[i] = places[i]._replace(forced=forced)
        for i, failure in self.failures.items():
            places[i] = places[i]._replace(failure=failure)
        return places

    @property
    def arrays(self) -> Places:
        """The places, unpacked, by array."""
        states = np.frombuffer(self.states, np.uint8)
        return Places(_NEEDS_MASK[states], _NUM_REFUSED[states], _IS_REFUSED[states], self.forced, self.failures)


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The last message of a shard that ends by an error. traceback: of it."""

    traceback: str


class MakeMasks(msgspec.Struct, array_like=True, tag=True):
    """Guides whose masks are to be made."""

    changes: Changes
    guides: list[int]


class Made(msgspec.Struct, array_like=True, tag=True):
    """Masks of the next guides that wait for them.

    numbers: of each guide's mask, in `KeptMasks`. new: masks that the other end does not have: number, whether it lists
    tokens, and the mask. The other end keeps it in place of what had the number before. A mask is int32 [n], the tokens
    that may follow, if they are few; or uint32 words. failures: why guides have no mask, by their index in `numbers`.
    """

    numbers: list[int]
    new: list[tuple[int, bool, bytes]]
    failures: dict[int, str] = {}


class KeptMasks:
    """The engine's end: the masks that a shard sent last, by their numbers."""

    def __init__(self) -> None:
        self._masks: dict[int, np.ndarray] = {}

    def take(self, made: Made) -> "list[np.ndarray | str]":
        """For each guide its mask, or why there is none. Equal masks are one array for as long as it is kept."""
        masks = self._masks
        for number, is_few, mask in made.new:
            masks[number] = np.frombuffer(mask, np.int32 if is_few else np.uint32)
        taken: list[np.ndarray | str] = [masks[number] for number in made.numbers]
        for i, failure in made.failures.items():
            taken[i] = failure
        return taken


class MaskNumbers:
    """A shard's end: the numbers of the masks that the engine has, those used last at the end."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[bool, bytes], int] = OrderedDict()

    def pack(self, masks: list[tuple[bool, bytes]], failures: dict[int, str]) -> Made:
        """Masks for the engine, those that it has by number alone. masks: `MOST_KEPT` at most, as in `Made.new`."""
        known, numbers, new = self._numbers, [], []
        for mask in masks:
            number = known.get(mask)
            if number is None:
                number = known.popitem(last=False)[1] if len(known) == MOST_KEPT else len(known)
                known[mask] = number
                new.append((number, *mask))
            else:
                known.move_to_end(mask)
            numbers.append(number)
        return Made(numbers, new, failures)


class GrammarServer:
    """What a shard does, without its sockets. num_words: uint32 words of a mask."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._tokenizer: LLTokenizer | None = None
        self._vocabulary = Vocabulary.of(0, (), num_words)
        self._grammars: dict[int, FollowedGrammar] = {}
        self._guides: dict[int, Guide] = {}
        self._sent = MaskNumbers()

    def start(self, message: Start) -> str:
        """Makes the tokenizer. Returns what is wrong with it."""
        try:
            self._tokenizer = GrammarTokenizer(message.json, message.vocab_size, message.eos_token_ids).make()
        except InvalidParameterError as error:
            return str(error)
        self._vocabulary = Vocabulary.of(message.vocab_size, message.eos_token_ids, self._num_words)
        return ""

    def forked(self) -> "GrammarServer":
        """Another one with the same tokenizer, which knows no grammar."""
        other = GrammarServer(self._num_words)
        other._tokenizer, other._vocabulary = self._tokenizer, self._vocabulary
        return other

    def serve_tables(self, sock: socket.socket) -> NoReturn:
        """As `table_process.serve_tables`."""
        assert self._tokenizer is not None
        serve_tables(sock, self._tokenizer, self._vocabulary)

    def compile(self, message: Compile) -> Compiled:
        """Compiles a constraint, which is known by its number from then on."""
        self._forget(message.forgotten)
        assert self._tokenizer is not None
        kind, begun = message.params.kind, time.perf_counter()
        try:
            grammar = FollowedGrammar(self._tokenizer, grammar_text(message.params))
        except InvalidParameterError as error:
            return Compiled(str(error), is_refused=True)
        except BaseException as error:  # whatever the bindings raise: a panic of the library is no Exception
            return Compiled(f"structured_outputs.{kind} cannot be compiled: {error}")
        seconds = time.perf_counter() - begun
        mask = np.zeros((self._num_words,), np.uint32)
        if wrong := grammar.first_mask(mask):
            return Compiled(refusal(message.params, wrong), is_refused=True)
        self._grammars[message.number] = grammar
        return Compiled("", False, grammar.forced, mask.tobytes(), seconds)

    def follow(self, message: Follow) -> tuple[Followed, list[Guide]]:
        """Moves guides past tokens and past what these force. Also returns those that wait for masks."""
        self._take(message.changes)
        guides = [self._guides[number] for number in np.frombuffer(message.guides, np.int32).tolist()]
        tokens = np.frombuffer(message.tokens, np.int32).reshape(len(guides), -1).tolist()
        guessed = np.frombuffer(message.guessed, np.bool_).tolist()
        last = np.frombuffer(message.last, np.int64).tolist()
        every = zip(guides, tokens, guessed, last, strict=True)
        places = [_followed(*one) for one in every]
        return Followed.of(places), [guide for guide, place in zip(guides, places, strict=True) if place.waits]

    def resume(self, message: Resume) -> Followed:
        """Moves a guide past its tokens; as `follow`. It fails at the first token that may not follow."""
        self._take(message.changes)
        guide = self._guides[message.guide]
        forced: deque[int] = deque()
        for token in message.tokens:
            if forced and forced[0] == token:
                forced.popleft()
            elif guide.matcher.consume_token(token):
                forced = deque(guide.take_forced())
        if message.guesses:
            return Followed.of([_followed(guide, message.guesses, True, message.last)])
        return Followed.of([_place(guide, forced)])

    def guides_of(self, message: MakeMasks) -> list[Guide]:
        """The guides whose masks are asked for."""
        self._take(message.changes)
        return [self._guides[number] for number in message.guides]

    def make_masks(self, guides: list[Guide]) -> Iterator[Made]:
        """Their masks, in order."""
        done = 0
        while done < len(guides):
            begun, some = time.perf_counter(), []
            for guide in guides[done : done + MOST_KEPT]:
                some.append(mask := np.zeros((self._num_words,), np.uint32))
                guide.make_mask(mask)
                if time.perf_counter() - begun > _PORTION_S:
                    break
            masks = np.stack(some) if len(some) > 1 else some[0][np.newaxis]
            yield self._made(guides[done : done + len(some)], masks)
            done += len(some)

    def _made(self, guides: list[Guide], masks: np.ndarray) -> Made:
        counts = count_tokens(masks)
        for guide, count in zip(guides, counts.tolist(), strict=True):
            guide.heed_mask(count)
        few = few_tokens(masks, counts, FEW_TOKENS)
        failures = {i: failure for i, guide in enumerate(guides) if (failure := _failure(guide))}
        packed = [
            (False, mask.tobytes()) if tokens is None else (True, np.array(tokens, np.int32).tobytes())
            for tokens, mask in zip(few, masks, strict=True)
        ]
        return self._sent.pack(packed, failures)

    def _take(self, changes: Changes) -> None:
        for number in changes.ended:
            del self._guides[number]
        self._forget(changes.forgotten)
        for number, params in changes.compiled:
            self.compile(Compile(number, params, []))
        for number, grammar, ends_late, guesses in changes.begun:
            self._guides[number] = Guide(self._grammars[grammar], self._vocabulary, ends_late, guesses)

    def _forget(self, grammars: list[int]) -> None:
        for number in grammars:
            del self._grammars[number]


def _followed(guide: Guide, tokens: list[int], guessed: bool, last: int) -> Place:
    """Where a guide stands behind a token. guessed: it is moved past the first that may follow, if any."""
    taken = 0
    if guessed:
        taken = guide.take_guess(tokens)
        if taken < 0:
            failure = _failure(guide)
            return Place(failure=failure) if failure else Place((), guide.needs_mask(), is_refused=True)
    else:
        guide.matcher.consume_token(tokens[0])
    if last >> taken & 1:
        return Place((), False, taken)
    return _place(guide, guide.take_forced(), taken)


def _place(guide: Guide, forced: Iterable[int], num_refused: int = 0) -> Place:
    failure = _failure(guide)
    return Place(failure=failure) if failure else Place(tuple(forced), guide.needs_mask(), num_refused)


def _failure(guide: Guide) -> str:
    return guide.matcher.get_error().partition("\n")[0] if guide.matcher.is_error() else ""


def answers_to(server: GrammarServer, message: object) -> Iterator[object]:
    """What a shard answers to a message."""
    if isinstance(message, Follow):
        followed, waiting = server.follow(message)
        yield followed
        yield from server.make_masks(waiting)
    elif isinstance(message, MakeMasks):
        yield from server.make_masks(server.guides_of(message))
    elif isinstance(message, Resume):
        yield server.resume(message)
    elif isinstance(message, Compile):
        yield server.compile(message)


def _serve_or_end(server: GrammarServer, sock: socket.socket) -> None:
    """Answers until the other end is closed, or something is raised: either ends the process."""
    decoder, encode = msgspec.msgpack.Decoder(Compile | Follow | Resume | MakeMasks), msgspec.msgpack.encode
    status = 0
    try:
        while (frame := read_frame(sock)) is not None:
            for answer in answers_to(server, decoder.decode(frame)):
                write_frame(sock, encode(answer))
    except BaseException:  # a panic of the library is no Exception
        status = 1
        with suppress(OSError):  # its parent has ended
            write_frame(sock, encode(Failed(traceback.format_exc())))
    finally:
        os._exit(status)


def _forked(shards: list[list[int]]) -> list[int]:
    """Forks a process for each of these but the first. Returns this process' FDs; those of the others are closed."""
    for i in range(1, len(shards)):
        if os.fork() == 0:
            for fd in shards[0]:
                os.close(fd)
            return _alone(shards[i:])
        for fd in shards[i]:
            os.close(fd)
    return shards[0]


def _alone(shards: list[list[int]]) -> list[int]:
    for others in shards[1:]:
        for fd in others:
            os.close(fd)
    return shards[0]


def main() -> None:
    """Serves each socket in a thread."""
    num_words, tables, of_shard, *fds = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = GrammarServer(num_words)
    first = socket.socket(fileno=os.dup(fds[0]))
    started = read_frame(first)
    if started is None:
        return
    try:
        wrong = server.start(msgspec.msgpack.decode(started, type=Start))
    except BaseException:
        write_frame(first, msgspec.msgpack.encode(Failed(traceback.format_exc())))
        raise
    write_frame(first, msgspec.msgpack.encode(wrong))
    first.close()
    if wrong:
        return
    gc.freeze()
    own = _forked([*(fds[i : i + of_shard] for i in range(0, len(fds), of_shard)), [tables]])
    if own == [tables]:
        server.serve_tables(socket.socket(fileno=tables))
    threading.stack_size(_COMPILER_STACK_BYTES)
    threads = [threading.Thread(target=_serve_or_end, args=(server, socket.socket(fileno=fd))) for fd in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
