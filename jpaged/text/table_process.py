"""The process that has tables of constraints made, each by a process of its own. The first shard forks it last
(`grammar_process.py`).

    its parent, `grammar_tables.py`      this process                 a process forked for each table
    MakeTable: a constraint          --> forks                    --> makes it
                                     <-------- MadeTable: its arrays' shapes; then the arrays
                                     <-- MadeTable: why there is none

It is apart from the shards, since a table takes seconds, with Python's lock held, and runs at a lower priority. A
constraint comes from a stranger: what takes too much time, memory or stack ends the process that was forked for it,
whose memory is free again in any case.
"""

import mmap
import os
import resource
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np

from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text.frames import read_frame, write_frame
from jpaged.text.grammar_check import MEMORY_BYTES, STACK_BYTES
from jpaged.text.grammars import grammar_text
from jpaged.text.guides import FollowedGrammar, Vocabulary
from jpaged.text.regular.constraints import automaton_of
from jpaged.text.regular.spellings import Spellings
from jpaged.text.token_tables import token_table

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_SECONDS = 20
"""That a table may take of a core. The schema of `jpaged/bench/structured.py` takes 4.3 on a slow one; without white
space, where much is forced behind strings, 12."""
_MOST_WAITED_S = 300
"""By the clock: at this priority, a busy machine may give it little time of a core."""
DTYPES = np.uint32, np.int32, np.int32, np.int16
"""Of a `TokenTable`'s arrays, in order."""
_NICENESS = 10
_TURN_MS = 20.0


class MakeTable(msgspec.Struct, array_like=True, tag=True):
    """A constraint."""

    params: StructuredOutputsParams


class MadeTable(msgspec.Struct, array_like=True, tag=True):
    """The answer. The arrays of a `TokenTable` follow, of these shapes and of `DTYPES`.
    refusal: why there is no table, or empty.
    """

    shapes: list[tuple[int, ...]] = []
    start: int = 0
    refusal: str = ""


def serve_tables(sock: socket.socket, tokenizer: "LLTokenizer", vocabulary: Vocabulary) -> NoReturn:
    """Answers until the other end is closed."""
    try:
        _run_behind_others()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        spell, answers = None, mmap.mmap(-1, 1)
        while (frame := read_frame(sock)) is not None:
            params = msgspec.msgpack.decode(frame, type=MakeTable).params
            spell = spell or Spellings(tokenizer, vocabulary.size)
            answers[0] = False
            child = os.fork()
            if child == 0:
                _answer(sock, answers, params, tokenizer, vocabulary, spell)
            status = _ended(child, sock)
            if answers[0] and status:
                break  # it ended within its answer, whose reader waits for the rest
            if not answers[0]:
                refusal = f"to make its table takes too much time or memory (its process ended with {status})"
                write_frame(sock, msgspec.msgpack.encode(MadeTable(refusal=refusal)))
    finally:
        os._exit(0)


def _run_behind_others() -> None:
    """Gives all others, the engine's threads first, the cores that they want. For a process that leads no group.

    Where Linux groups processes by session ("autogroup", the default), a niceness counts only within a session, and
    each session has one of its own.
    """
    os.setsid()
    os.nice(_NICENESS)
    with suppress(OSError):  # it does not group them
        Path("/proc/self/autogroup").write_text(f"{_NICENESS}")


def _ended(child: int, sock: socket.socket) -> int:
    """Waits for a process, and kills it if the other end of the socket is closed. Returns its exit code."""
    hangs_up = select.poll()
    hangs_up.register(sock, 0)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if hangs_up.poll(_TURN_MS):
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answer(
    sock: socket.socket,
    answers: mmap.mmap,
    params: StructuredOutputsParams,
    tokenizer: "LLTokenizer",
    vocabulary: Vocabulary,
    spell: Spellings,
) -> NoReturn:
    """Makes a table, within limits. answers: a byte that the parent process sees, set before anything is written to the
    socket: from there on the parent must not answer itself.
    """
    status = 1
    try:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, MEMORY_BYTES)
        _limit(resource.RLIMIT_STACK, STACK_BYTES)
        _limit(resource.RLIMIT_CPU, MOST_SECONDS)
        signal.alarm(_MOST_WAITED_S)
        arrays: list[np.ndarray] = []
        told = MadeTable()
        try:
            automaton = automaton_of(params)
            grammar = FollowedGrammar(tokenizer, grammar_text(params))
            *arrays, told.start = token_table(automaton, grammar, tokenizer, vocabulary, spell)
            told.shapes = [array.shape for array in arrays]
        except Exception as error:  # a schema may be malformed where llguidance does not look
            told.refusal = str(error) or type(error).__name__
        answers[0] = True
        write_frame(sock, msgspec.msgpack.encode(told))
        for array in arrays:
            sock.sendall(np.ascontiguousarray(array).data)
        status = 0
    finally:
        os._exit(status)


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
