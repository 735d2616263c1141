"""An engine's side of the process that follows grammars (`grammar_process.py`).

    StructuredOutputsParams --compile--> CompiledGrammar --begin--> guide    cached by content
    guides, tokens --advance--> tokens that must follow, and who needs a mask
    guides --make_masks--> masks of what may follow                          on all cores

The process starts with the first constraint, or with `prepare`. If it dies, another one is started, and the sequences
are moved past their tokens there. What ends that one, too, while it takes up a sequence, fails that sequence.
"""

import mmap
import os
import socket
import subprocess
import tempfile
import threading
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import IO, Any

import msgspec
import numpy as np

from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text import grammar_process
from jpaged.text.frames import read_frame, write_frame
from jpaged.text.grammar_process import (
    MASK_ROWS,
    Changes,
    Compile,
    Compiled,
    Follow,
    Followed,
    Made,
    MakeMasks,
    Place,
    Resume,
    Start,
)
from jpaged.text.grammars import LARGE_VOCABULARY, GrammarTokenizer
from jpaged.text.helper_process import start_helper

_MOST_COMPILED = 256
_COMPILER_THREADS = 4
_REVIVING_THREADS = 2
"""The one that makes masks, and the engine's."""
_ENDED = Place(failure="the process that follows grammars has ended")


class _Process:
    """A running process.

    compilers: sockets on which constraints are compiled; a thread has one at a time. ended, forgotten: numbers of
    guides and grammars that are no more, of which the process is told with the next message.
    """

    def __init__(self, num_threads: int, num_words: int) -> None:
        pairs = [socket.socketpair() for _ in range(1 + _COMPILER_THREADS + _REVIVING_THREADS)]
        self._follower, *self.compilers = [ours for ours, _ in pairs]
        fds = [theirs.fileno() for _, theirs in pairs]
        with _shared_file(MASK_ROWS * num_words * 4) as memory:
            fds.append(memory.fileno())
            self._masks = np.frombuffer(mmap.mmap(memory.fileno(), 0), np.uint32).reshape(MASK_ROWS, num_words)
            arguments = [fds[-1], num_threads, num_words, *fds[:-1]]
            process = start_helper(grammar_process.__name__, *map(str, arguments), fds=fds)
        for _, theirs in pairs:
            theirs.close()
        self.pid = process.pid
        self.is_alive = True
        self.ended: deque[int] = deque()
        self.forgotten: deque[int] = deque()
        self.numbers = count()
        self.end = weakref.finalize(self, _end, process, [ours for ours, _ in pairs], os.getpid())

    def ask(self, sock: socket.socket, message: object, answer: Any) -> Any:
        """The answer to a message; None if the process has ended."""
        try:
            write_frame(sock, msgspec.msgpack.encode(message))
            frame = read_frame(sock)
        except OSError:
            frame = None
        if frame is None:
            self.is_alive = False
            return None
        return msgspec.msgpack.decode(frame, type=answer)

    def follow(
        self, guides: "Sequence[_Guide]", token_ids: list[int], guessed: list[bool], last: list[bool]
    ) -> list[Place]:
        """Moves guides past a token; as `GrammarCompiler.advance`. Where no guide guesses, their masks come as well."""
        at_once = len(guides) <= MASK_ROWS and not any(guide.guesses for guide in guides)
        message = Follow(self._changes(guides), [guide.number for guide in guides], token_ids, guessed, last, at_once)
        answer: Followed | None = self.ask(self._follower, message, Followed)
        if answer is None:
            return [_ENDED] * len(guides)
        if at_once:
            waiting = [guide for guide, place in zip(guides, answer.places, strict=True) if place.waits]
            for guide, made, mask in zip(waiting, answer.masks, self._masks, strict=False):
                guide.made = _made(made, None, mask)
        return answer.places

    def resume(self, guide: "_Guide", token_ids: Sequence[int], guessed: bool) -> Place:
        """Moves a guide past many tokens; as `GrammarCompiler.resume`. guessed: whether the last one may not follow."""
        message = Resume(self._changes([guide]), guide.number, list(token_ids), guessed)
        answer: Followed | None = self.ask(self._follower, message, Followed)
        return _ENDED if answer is None else answer.places[0]

    def make_masks(
        self, guides: "Sequence[_Guide]", before: Sequence[np.ndarray | None]
    ) -> "list[np.ndarray | str] | None":
        """As `GrammarCompiler.make_masks`, of at most MASK_ROWS guides. None if the process has ended."""
        message = MakeMasks(self._changes(guides), [guide.number for guide in guides])
        answer: Made | None = self.ask(self._follower, message, Made)
        if answer is None:
            return None
        return [_made(*one) for one in zip(answer.masks, before, self._masks, strict=False)]

    def _changes(self, guides: "Sequence[_Guide]") -> Changes:
        forgotten = take_all(self.forgotten)  # first, so that guides of these are among the ended
        begun = [guide for guide in guides if not guide.is_begun]
        for guide in begun:
            guide.is_begun = True
        return Changes(
            [(guide.number, guide.grammar.number, guide.ends_late, guide.guesses) for guide in begun],
            take_all(self.ended),
            forgotten,
        )


class CompiledGrammar:
    """A constraint that sequences can follow; as `jpaged.engine.constraints.mask_maker.Grammar`.

    forced: tokens that come first. mask: uint32 [words]; what may follow these. params: what it was compiled from.
    successor: the same in a later process, where its own has ended and a sequence went on.
    """

    def __init__(
        self,
        process: _Process,
        number: int,
        forced: Sequence[int],
        mask: np.ndarray,
        params: StructuredOutputsParams,
    ) -> None:
        self.process, self.number = process, number
        self.forced, self.mask, self.params = tuple(forced), mask, params
        self.successor: CompiledGrammar | None = None

    def begin(self, ignore_eos: bool, guesses: bool = False) -> "_Guide":
        """A guide for a new sequence, behind the forced tokens. guesses: whether it may do without masks."""
        return _Guide(self, ignore_eos, guesses)

    def __del__(self) -> None:
        self.process.forgotten.append(self.number)


class _Guide:
    """Where a sequence stands. ends_late: the end of sequence is allowed only where nothing else is. guesses: it may do
    without masks.

    is_begun: whether the process knows it. followed: its tokens so far, those included that must come next. made: its
    mask, as `_made` returns it, which came without being asked for; None if none did.
    """

    __slots__ = ("ends_late", "followed", "grammar", "guesses", "is_begun", "made", "number")

    def __init__(self, grammar: CompiledGrammar, ends_late: bool, guesses: bool) -> None:
        self.ends_late, self.guesses = ends_late, guesses
        self.followed = array("i")
        self.begin(grammar)

    def begin(self, grammar: CompiledGrammar) -> None:
        """Begins to follow a grammar, in whose process it is to be moved past its tokens."""
        self.grammar = grammar
        self.number = next(grammar.process.numbers)
        self.is_begun = False
        self.made: np.ndarray | str | None = None

    def take_made(self, before: np.ndarray | None) -> np.ndarray | str | None:
        """Its mask, if it has come; the array of before where it is equal."""
        made, self.made = self.made, None
        if isinstance(made, np.ndarray) and before is not None and np.array_equal(made, before):
            return before
        return made

    def __del__(self) -> None:
        if self.is_begun:
            self.grammar.process.ended.append(self.number)


class GrammarCompiler:
    """Compiles constraints and follows them; as `jpaged.engine.constraints.mask_maker.Grammars`.

    Args:
        tokenizer: called in a thread, once for each process.
        vocab_size: of the model's logits. num_threads: that make masks.

    Attributes:
        num_words: uint32 words of a mask.
    """

    def __init__(self, tokenizer: Callable[[], GrammarTokenizer], vocab_size: int, num_threads: int = 1) -> None:
        self.num_words = -(-vocab_size // 32)
        self._get_tokenizer, self._num_threads = tokenizer, num_threads
        self._process: _Process | None = None
        self._known_process: _Process | None = None  # by the constraints that are compiled
        self._start_lock, self._follow_lock = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, Future[CompiledGrammar]] = OrderedDict()
        self._revive_lock = threading.Lock()
        self._is_closed = False
        self._lock = threading.Lock()
        self._work: deque[tuple[StructuredOutputsParams, Future[CompiledGrammar]]] = deque()
        self._num_compiling = 0

    def prepare(self) -> None:
        """Starts the process in the background if the first constraint would wait long for it."""
        if 32 * self.num_words >= LARGE_VOCABULARY:
            threading.Thread(target=self._try_to_start, name="jpaged-grammars", daemon=True).start()

    def compile(self, params: StructuredOutputsParams) -> "Future[CompiledGrammar]":
        """Compiles in the process, unless it is known already. The future may raise InvalidParameterError."""
        process = self._process
        if process is not None:
            if not process.is_alive or self._known_process not in (None, process):
                self._compiled.clear()  # what a process has compiled keeps its sockets open
            self._known_process = process
        found = self._compiled.get(params)
        if found is not None:
            self._compiled.move_to_end(params)
            return found
        future: Future[CompiledGrammar] = Future()
        self._compiled[params] = future
        while len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        with self._lock:
            self._work.append((params, future))
            needs_thread = self._num_compiling < _COMPILER_THREADS
            self._num_compiling += needs_thread
        if needs_thread:
            threading.Thread(target=self._compile_all, name="jpaged-grammars", daemon=True).start()
        return future

    def advance(
        self, guides: Sequence[_Guide], token_ids: Sequence[int], guessed: Sequence[bool], last: Sequence[bool]
    ) -> list[Place]:
        """Moves each guide past a token, and past what this forces.

        guessed: of which tokens it is to be said first whether they may follow. last: which of those end their
        sequences.

        Returns: where each guide stands.
        """
        places = [_ENDED] * len(guides)
        process = self._process
        alive = [i for i, guide in enumerate(guides) if process is guide.grammar.process and process.is_alive]
        if alive:
            assert process is not None
            with self._follow_lock:
                found = process.follow(
                    [guides[i] for i in alive],
                    [token_ids[i] for i in alive],
                    [guessed[i] for i in alive],
                    [last[i] for i in alive],
                )
            for i, place in zip(alive, found, strict=True):
                places[i] = place
        every = zip(guides, token_ids, places, guessed, strict=True)
        return [self._followed(guide, [token], place, is_guess) for guide, token, place, is_guess in every]

    def resume(self, guide: _Guide, token_ids: Sequence[int]) -> Place:
        """Moves a guide past many tokens at once, of which some were forced; as `advance`."""
        return self._followed(guide, token_ids, self._resume(guide, token_ids, False), False)

    def make_masks(self, guides: Sequence[_Guide], before: Sequence[np.ndarray | None]) -> "list[np.ndarray | str]":
        """What may follow where guides stand.

        before: masks as this returns them, or None; the same array is returned where the mask is equal.

        Returns: for each guide its mask, uint32 [words]; or the tokens that it allows, int32 [n], if these are at most
            FEW_TOKENS; or why it cannot go on.
        """
        made: list[np.ndarray | str] = []
        for begin in range(0, len(guides), MASK_ROWS):
            made += self._make_masks(guides[begin : begin + MASK_ROWS], before[begin : begin + MASK_ROWS])
        return made

    def close(self) -> None:
        """Ends the process."""
        with self._start_lock:
            self._is_closed = True
            if self._process is not None:
                self._process.end()
                self._process.is_alive = False

    def _make_masks(
        self, guides: Sequence[_Guide], before: Sequence[np.ndarray | None]
    ) -> "Sequence[np.ndarray | str]":
        """As `make_masks`, of at most MASK_ROWS guides; once more, one by one, if a process ends meanwhile."""
        at_once = [guide.take_made(mask) for guide, mask in zip(guides, before, strict=True)]
        found = [made for made in at_once if made is not None]
        if len(found) == len(guides):
            return found
        process = self._process
        if process is not None and process.is_alive and all(guide.grammar.process is process for guide in guides):
            with self._follow_lock:
                made = process.make_masks(guides, before)
            if made is not None:
                return made
        return [self._make_mask(guide) for guide in guides]

    def _make_mask(self, guide: _Guide) -> "np.ndarray | str":
        """The mask of a guide, which takes up its tokens in another process if its own has ended."""
        for _ in range(2):
            process = guide.grammar.process
            if process is self._process and process.is_alive:
                with self._follow_lock:
                    made = process.make_masks([guide], [None])
                if made is not None:
                    return made[0]
            place = self._followed(guide, (), _ENDED, False)
            if place.failure:
                return place.failure
        return _ENDED.failure

    def _resume(self, guide: _Guide, token_ids: Sequence[int], guessed: bool) -> Place:
        process = guide.grammar.process
        if process is not self._process or not process.is_alive:
            return _ENDED
        with self._follow_lock:
            return process.resume(guide, token_ids, guessed)

    def _followed(self, guide: _Guide, token_ids: Sequence[int], place: Place, guessed: bool) -> Place:
        """Notes that a guide has been moved past tokens; moves it in another process if its own has ended.

        place, and what is returned: where it stands.
        """
        if place is _ENDED and not self._is_closed:
            try:
                guide.begin(self._alive(guide.grammar))
            except JPagedError as error:
                return Place(failure=str(error))
            place = self._resume(guide, [*guide.followed, *token_ids], guessed)
        if not place.failure and not place.is_refused:
            guide.followed.extend(token_ids)
            guide.followed.extend(place.forced)
        return place

    def _alive(self, grammar: CompiledGrammar) -> CompiledGrammar:
        """A grammar in the process that runs. Raises JPagedError if it cannot be compiled there."""
        with self._revive_lock:
            while grammar.process is not self._process or not grammar.process.is_alive:
                if grammar.successor is None:
                    grammar.successor = self._compile(grammar.params)
                grammar = grammar.successor
            return grammar

    def _compile_all(self) -> None:
        """In a thread, until nothing is left to compile."""
        while True:
            with self._lock:
                if not self._work:
                    self._num_compiling -= 1
                    return
                params, future = self._work.popleft()
            try:
                future.set_result(self._compile(params))
            except JPagedError as error:
                future.set_exception(error)
            except BaseException as error:  # of the tokenizer: a panic of its library is no Exception
                future.set_exception(JPagedError(f"structured_outputs.{params.kind} cannot be compiled: {error}"))

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compiles in the process; in another one, once, if that ends meanwhile."""
        answer: Compiled | None = None
        for _ in range(2):
            process = self._started()
            number = next(process.numbers)
            sock = process.compilers.pop()
            try:
                answer = process.ask(sock, Compile(number, params, take_all(process.forgotten)), Compiled)
            finally:
                process.compilers.append(sock)
            if answer is not None:
                break
        if answer is None:
            raise JPagedError(f"structured_outputs.{params.kind} cannot be compiled: {_ENDED.failure}.")
        if answer.error:
            raise (InvalidParameterError if answer.is_refused else JPagedError)(answer.error)
        return CompiledGrammar(process, number, answer.forced, np.frombuffer(answer.mask, np.uint32), params)

    def _started(self) -> _Process:
        """The process, which is started if there is none."""
        with self._start_lock:
            if self._process is None or not self._process.is_alive:
                tokenizer = self._get_tokenizer()
                process = _Process(self._num_threads, self.num_words)
                start = Start(tokenizer.json, tokenizer.vocab_size, tokenizer.eos_token_ids)
                wrong: str | None = process.ask(process.compilers[0], start, str)
                if wrong is None:
                    raise JPagedError("The process that follows grammars did not start.")
                if wrong:
                    process.end()
                    raise InvalidParameterError(wrong)
                self._process = process
            return self._process

    def _try_to_start(self) -> None:
        with suppress(Exception):  # the first constraint is told
            self._started()


def _made(made: list[int] | str | None, before: np.ndarray | None, shared: np.ndarray) -> np.ndarray | str:
    """A mask as `GrammarCompiler.make_masks` returns it. made: as of `Made`. shared: its row of the shared memory."""
    if isinstance(made, str):
        return made
    if made is None:
        return before if before is not None and np.array_equal(before, shared) else shared.copy()
    if before is not None and before.dtype == np.int32 and before.tolist() == made:
        return before
    return np.array(made, np.int32)


def take_all(numbers: deque[int]) -> list[int]:
    """Empties a queue that other threads append to, and empty as well."""
    taken: list[int] = []
    with suppress(IndexError):
        while True:
            taken.append(numbers.popleft())
    return taken


def _shared_file(num_bytes: int) -> IO[bytes]:
    """An open file of zeros without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("jpaged-masks"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.truncate(num_bytes)
    return file


def _end(process: "subprocess.Popen[bytes]", sockets: list[socket.socket], pid: int) -> None:
    for sock in sockets:
        sock.close()
    if os.getpid() == pid:  # else it is the parent's
        process.kill()
        process.wait()
