"""An engine's end of the processes that follow grammars (`grammar_process.py`).

    Processes --+-- Shard: its sequences; questions to it, and answers that are on their way, in order
                +-- Shard
                +-- compilers: sockets on which constraints are compiled, of all shards in turn
                '-- tables: the process beside the shards that makes tables (`grammar_tables.py`)

A shard answers in the order in which it is asked. Whoever asks says what is to be done with the answer, and `pump` does
it once the answer is there: the engine's thread asks all shards and goes on, and waits for none. Nor does it wait until
a shard reads: what a socket does not take at once is sent by a later `pump`. So no two ends that write wait for each
other.
"""

import logging
import os
import select
import socket
import struct
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import numpy as np

from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text import grammar_process
from jpaged.text.frames import framed, read_frame, write_frame
from jpaged.text.grammar_process import Compile, Compiled, Failed, Followed, KeptMasks, Made, Place, Start
from jpaged.text.grammar_tables import TableMaker
from jpaged.text.helper_process import start_helper

NUM_COMPILERS = 6
"""Threads that compile at a time: four for new constraints, one that takes sequences up, and the engine's."""
_READ_BYTES = 1 << 18
_serials, _routes = count(), count()
_LENGTH = struct.Struct("<I")
_decode = msgspec.msgpack.Decoder(Followed | Made | Failed).decode
_encode = msgspec.msgpack.encode

log = logging.getLogger("jpaged.engine")

ENDED = Place(failure="the process that follows grammars has ended")

Masks = list[np.ndarray | str]
"""For each guide its mask, or why there is none."""
Answer = Callable[["Followed | Masks | None"], bool]
"""Takes an answer, None if there will be none. False: another one follows."""


class Shard:
    """One of the processes.

    route: tells it from all others. ended, forgotten: numbers of guides and grammars that are no more, of which it is
    told with the next message. num_live: guides that it follows. lock: held by who asks or takes answers, and by nobody
    who waits.
    """

    def __init__(self, processes: "Processes", sock: socket.socket) -> None:
        self._processes = weakref.ref(processes)
        self.sock, self.route = sock, next(_routes)
        self.lock = threading.RLock()
        self.ended: deque[int] = deque()
        self.forgotten: deque[int] = deque()
        self.num_live = 0
        self._unsent = bytearray()
        self._space = memoryview(bytearray(_READ_BYTES))
        self._buffer = bytearray()
        self._expected: deque[Answer] = deque()
        self._masks = KeptMasks()

    @property
    def has_unsent(self) -> bool:
        """Whether the socket is to take more."""
        return bool(self._unsent)

    def ask(self, message: object, answer: Answer) -> None:
        """Sends a message, and says what is to be done with its answers."""
        with self.lock:
            self._expected.append(answer)
            self._unsent += framed(_encode(message))
            self._send()

    def pump(self) -> None:
        """Sends what is left to send, and takes answers that have come."""
        with self.lock:
            self._send()
            try:
                size = self.sock.recv_into(self._space, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if size:
                self._buffer += self._space[:size]
                self._take_frames()
            else:
                self.fail()

    def register(self, poll: select.poll) -> bool:
        """Has a poll wait for what `pump` would do. Returns False if the socket is closed."""
        if self.sock.fileno() < 0:
            return False
        poll.register(self.sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return True

    def _send(self) -> None:
        """As much as the socket takes now."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self.fail()
                return
            del self._unsent[:sent]

    def fail(self) -> None:
        """The process has ended: no answer will come."""
        processes = self._processes()
        if processes is not None:
            processes.ended()
        with self.lock:
            expected, self._expected = self._expected, deque()
            self._unsent.clear()
            for answer in expected:
                answer(None)

    def _has_frame(self) -> bool:
        return len(self._buffer) >= 4 and len(self._buffer) >= 4 + _LENGTH.unpack_from(self._buffer)[0]

    def _take_frames(self) -> None:
        while self._has_frame():
            end = 4 + _LENGTH.unpack_from(self._buffer)[0]
            message = _decode(memoryview(self._buffer)[4:end])
            del self._buffer[:end]
            if isinstance(message, Failed):
                log_failure(message)
                continue
            taken = self._masks.take(message) if isinstance(message, Made) else message
            if self._expected:  # else it failed, and nobody waits any more
                answer = self._expected.popleft()
                if not answer(taken):
                    self._expected.appendleft(answer)


class Processes:
    """The shards of one start. One that ends takes the others along.

    Args:
        num_shards: how many. num_words: uint32 words of a mask.

    Attributes:
        compilers: sockets on which constraints are compiled, and their shards; a thread has one at a time.
        tables: makes tables of constraints. If its process ends, the others do not.
        pid: of the first shard. serial: tells these processes from all others.
    """

    def __init__(self, num_shards: int, num_words: int) -> None:
        of_shard = 1 + -(-NUM_COMPILERS // num_shards)
        pairs = [socket.socketpair() for _ in range(1 + num_shards * of_shard)]
        of_tables, *ours = [own for own, _ in pairs]
        fds = [theirs.fileno() for _, theirs in pairs]
        arguments = map(str, [num_words, fds[0], of_shard, *fds[1:]])
        process = start_helper(grammar_process.__name__, *arguments, fds=fds)
        for _, theirs in pairs:
            theirs.close()
        self.pid = process.pid
        self.is_alive = True
        self.numbers = count()
        self.serial = next(_serials)
        self.shards = [Shard(self, ours[i * of_shard]) for i in range(num_shards)]
        self.compilers = deque(
            (shard, ours[i * of_shard + k]) for k in range(1, of_shard) for i, shard in enumerate(self.shards)
        )
        self.tables = TableMaker(of_tables)
        self.end = weakref.finalize(self, _end, process, self.tables, [of_tables, *ours], os.getpid())

    def start(self, message: Start) -> str | None:
        """What is wrong with a tokenizer, or empty; None if the process has ended."""
        return self._exchange(self.shards[0].sock, message, str)

    def compile(
        self, number: int, params: StructuredOutputsParams, shard: Shard | None = None
    ) -> tuple[Shard, Compiled] | None:
        """Compiles a constraint. shard: where; otherwise the shards take turns.

        Returns: where, and what came of it; None if the process has ended, or the shard has no compiler left.
        """
        with suppress(IndexError):
            own, sock = self.compilers.popleft()
            for _ in range(len(self.compilers)):
                if shard is None or own is shard:
                    break
                self.compilers.append((own, sock))
                own, sock = self.compilers.popleft()
            try:
                if shard is not None and own is not shard:
                    return None
                answer = self._exchange(sock, Compile(number, params, take_all(own.forgotten)), Compiled)
            finally:
                self.compilers.append((own, sock))
            return None if answer is None else (own, answer)
        return None

    def _exchange(self, sock: socket.socket, message: object, answer: Any) -> Any:
        try:
            write_frame(sock, _encode(message))
            frame = read_frame(sock)
        except OSError:
            frame = None
        if frame is None:
            self.ended()
            return None
        message = msgspec.msgpack.decode(frame, type=answer | Failed)
        if isinstance(message, Failed):
            log_failure(message)
            self.ended()
            return None
        return message

    def ended(self) -> None:
        """One of them has ended. The log says so once."""
        if self.is_alive:
            self.is_alive = False
            log.warning("The processes that follow grammars have ended; others take up their sequences.")


def log_failure(failed: Failed) -> None:
    """Says why a process ends."""
    log.error("A process that follows grammars has failed:\n%s", failed.traceback)


def take_all(numbers: deque[int]) -> list[int]:
    """Empties a queue that other threads append to, and empty as well."""
    taken: list[int] = []
    with suppress(IndexError):
        while True:
            taken.append(numbers.popleft())
    return taken


def _end(process: "subprocess.Popen[bytes]", tables: TableMaker, sockets: list[socket.socket], pid: int) -> None:
    is_own = os.getpid() == pid  # in a fork, the process and its connections are the parent's
    if is_own:
        tables.close()
    for sock in sockets:
        sock.close()
    if is_own:
        process.kill()
        process.wait()
