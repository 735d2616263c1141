"""An engine's side of the process that follows grammars (`grammar_process.py`).

    StructuredOutputsParams --compile--> CompiledGrammar --begin--> guide    cached by content
    guides, tokens --advance--> masks of what may follow, tokens that must   on all cores

The process starts with the first constraint, or with `prepare`. If it dies, the sequences that it followed cannot go
on, and the next constraint starts another.
"""

import mmap
import os
import socket
import subprocess
import tempfile
import threading
import weakref
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
from jpaged.text.grammar_process import MASK_ROWS, Changes, Compile, Compiled, Follow, Followed, Resume, Start
from jpaged.text.grammars import LARGE_VOCABULARY, GrammarTokenizer
from jpaged.text.helper_process import start_helper

_MOST_COMPILED = 256
_COMPILER_THREADS = 4
_ENDED = "the process that follows grammars has ended"


class _Process:
    """A running process.

    compilers: sockets on which constraints are compiled; a thread has one at a time. ended, forgotten: numbers of
    guides and grammars that are no more, of which the process is told with the next message.
    """

    def __init__(self, num_threads: int, num_words: int) -> None:
        pairs = [socket.socketpair() for _ in range(1 + _COMPILER_THREADS)]
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

    def follow(self, guides: "Sequence[_Guide]", token_ids: Sequence[int], masks: np.ndarray) -> list[list[int] | str]:
        """Moves at most MASK_ROWS guides past a token; as `GrammarCompiler.advance`."""
        return self._ask_for_masks(
            Follow(self._changes(guides), [guide.number for guide in guides], list(token_ids)), masks
        )

    def resume(self, guide: "_Guide", token_ids: Sequence[int], mask: np.ndarray) -> list[int] | str:
        """Moves a guide past many tokens; as `GrammarCompiler.resume`."""
        message = Resume(self._changes([guide]), guide.number, list(token_ids))
        return self._ask_for_masks(message, mask[np.newaxis])[0]

    def _changes(self, guides: "Sequence[_Guide]") -> Changes:
        forgotten = take_all(self.forgotten)  # first, so that guides of these are among the ended
        begun = [guide for guide in guides if not guide.is_begun]
        for guide in begun:
            guide.is_begun = True
        return Changes(
            [(guide.number, guide.grammar.number, guide.ends_late) for guide in begun], take_all(self.ended), forgotten
        )

    def _ask_for_masks(self, message: Follow | Resume, masks: np.ndarray) -> list[list[int] | str]:
        answer: Followed | None = self.ask(self._follower, message, Followed)
        if answer is None:
            return [_ENDED] * len(masks)
        masks[:] = self._masks[: len(masks)]
        return answer.forced


class CompiledGrammar:
    """A constraint that sequences can follow; as `jpaged.engine.constraints.grammars.Grammar`.

    forced: tokens that come first. mask: uint32 [words]; what may follow these.
    """

    def __init__(self, process: _Process, number: int, forced: Sequence[int], mask: np.ndarray) -> None:
        self.process, self.number = process, number
        self.forced, self.mask = tuple(forced), mask

    def begin(self, ignore_eos: bool) -> "_Guide":
        """A guide for a new sequence, behind the forced tokens."""
        return _Guide(self, ignore_eos)

    def __del__(self) -> None:
        self.process.forgotten.append(self.number)


class _Guide:
    """Where a sequence stands. ends_late: the end of sequence is allowed only where nothing else is.

    is_begun: whether the process knows it.
    """

    __slots__ = ("ends_late", "grammar", "is_begun", "number")

    def __init__(self, grammar: CompiledGrammar, ends_late: bool) -> None:
        self.grammar, self.ends_late = grammar, ends_late
        self.number = next(grammar.process.numbers)
        self.is_begun = False

    def __del__(self) -> None:
        if self.is_begun:
            self.grammar.process.ended.append(self.number)


class GrammarCompiler:
    """Compiles constraints and follows them; as `jpaged.engine.constraints.grammars.Grammars`.

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
        self._start_lock, self._follow_lock = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._work: deque[tuple[StructuredOutputsParams, Future[CompiledGrammar]]] = deque()
        self._num_compiling = 0

    def prepare(self) -> None:
        """Starts the process in the background if the first constraint would wait long for it."""
        if 32 * self.num_words >= LARGE_VOCABULARY:
            threading.Thread(target=self._try_to_start, name="jpaged-grammars", daemon=True).start()

    def compile(self, params: StructuredOutputsParams) -> "Future[CompiledGrammar]":
        """Compiles in the process, unless it is known already. The future may raise InvalidParameterError."""
        if self._process is not None and not self._process.is_alive:
            self._compiled.clear()
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
        self, guides: Sequence[_Guide], token_ids: Sequence[int], masks: np.ndarray
    ) -> list[tuple[int, ...] | str]:
        """Moves each guide past a token, and past what this forces.

        masks: uint32 [n, words]; what may follow is written here.
        Returns: for each guide the forced tokens, or why it cannot go on.
        """
        forced: list[list[int] | str] = [_ENDED] * len(guides)
        process = self._process
        alive = [i for i, guide in enumerate(guides) if process is guide.grammar.process and process.is_alive]
        with self._follow_lock:
            for begin in range(0, len(alive), MASK_ROWS):
                part = alive[begin : begin + MASK_ROWS]
                made = np.empty((len(part), self.num_words), np.uint32)
                assert process is not None
                found = process.follow([guides[i] for i in part], [token_ids[i] for i in part], made)
                masks[part] = made
                for i, one in zip(part, found, strict=True):
                    forced[i] = one
        return [one if isinstance(one, str) else tuple(one) for one in forced]

    def resume(self, guide: _Guide, token_ids: Sequence[int], mask: np.ndarray) -> tuple[int, ...] | str:
        """Moves a guide past many tokens at once, of which some were forced; as `advance`. mask: uint32 [words]."""
        process = guide.grammar.process
        if process is not self._process or not process.is_alive:
            return _ENDED
        with self._follow_lock:
            forced = process.resume(guide, token_ids, mask)
        return forced if isinstance(forced, str) else tuple(forced)

    def close(self) -> None:
        """Ends the process."""
        with self._start_lock:
            if self._process is not None:
                self._process.end()
                self._process.is_alive = False

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
        process = self._started()
        number = next(process.numbers)
        sock = process.compilers.pop()
        try:
            message = Compile(number, params, take_all(process.forgotten))
            answer: Compiled | None = process.ask(sock, message, Compiled)
        finally:
            process.compilers.append(sock)
        if answer is None:
            raise JPagedError(f"structured_outputs.{params.kind} cannot be compiled: {_ENDED}.")
        if answer.error:
            raise (InvalidParameterError if answer.is_refused else JPagedError)(answer.error)
        return CompiledGrammar(process, number, answer.forced, np.frombuffer(answer.mask, np.uint32))

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
