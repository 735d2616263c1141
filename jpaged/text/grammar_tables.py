"""An engine's end of the process that makes tables of constraints (`table_process.py`)."""

import logging
import queue
import socket
import threading
import weakref
from contextlib import suppress
from typing import Protocol

import msgspec
import numpy as np

from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text.frames import read_frame, write_frame
from jpaged.text.table_process import DTYPES, MadeTable, MakeTable
from jpaged.text.token_tables import TokenTable

log = logging.getLogger("jpaged.engine")

MOST_BYTES = 512 * 2**20
"""Of host memory for tables: twenty of them as large as that of `jpaged/bench/structured.py`, or hundreds of usual
ones.
"""


class HasTable(Protocol):
    """`CompiledGrammar`."""

    params: StructuredOutputsParams
    table: TokenTable | None
    num_without_table: int

    def lose_table(self) -> None:
        """Others need its room."""
        ...


class TableMaker:
    """Has tables made, one after the other, by a thread of its own: nobody waits for them. That of the constraint with
    the most sequences comes first: a table may take seconds, and strangers may send many. sock: of the process.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._wanted: list[weakref.ref[HasTable]] = []
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each that is wanted; False: it is over
        self._made: list[weakref.ref[HasTable]] = []  # the oldest first
        self._thread: threading.Thread | None = None
        self._is_over = False

    def want(self, grammar: HasTable) -> None:
        """Has the table of a grammar made, if it has one, and if somebody has the grammar still when its turn comes."""
        if self._is_over:
            return
        self._wanted.append(weakref.ref(grammar))
        self._news.put(True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_all, name="jpaged-tables", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, and the connection with the process."""
        self._is_over = True
        self._news.put(False)
        with suppress(OSError):  # the process has ended
            self._sock.shutdown(socket.SHUT_RDWR)

    def _make_all(self) -> None:
        try:
            while self._news.get():
                reference = self._wanted.pop(max(range(len(self._wanted)), key=self._num_sequences))
                if (grammar := reference()) is None:
                    continue
                params, grammar = grammar.params, None
                table = _made(self._sock, params)
                if table is not None and (grammar := reference()) is not None:
                    grammar.table, grammar = table, None
                    self._made.append(reference)
                    self._make_room()
        except (OSError, EOFError):
            if not self._is_over:
                self._is_over = True
                log.warning("The process that makes tables of constraints has ended; all are followed token by token.")

    def _num_sequences(self, i: int) -> int:
        grammar = self._wanted[i]()
        return 0 if grammar is None else grammar.num_without_table

    def _make_room(self) -> None:
        """Drops the tables that were made first, if all take too much."""
        kept = [grammar for reference in self._made if (grammar := reference()) is not None]
        num_bytes = 0
        for grammar in reversed(kept):
            num_bytes += grammar.table.num_bytes if grammar.table else 0
            if num_bytes > MOST_BYTES:
                grammar.lose_table()
        self._made = [weakref.ref(grammar) for grammar in kept if grammar.table is not None]


def _made(sock: socket.socket, params: StructuredOutputsParams) -> TokenTable | None:
    """A constraint's table. Raises EOFError if the process has ended."""
    write_frame(sock, msgspec.msgpack.encode(MakeTable(params)))
    frame = read_frame(sock)
    if frame is None:
        raise EOFError
    told = msgspec.msgpack.decode(frame, type=MadeTable)
    if told.refusal:
        log.debug("A constraint is followed token by token: %s.", told.refusal)
        return None
    masks, mask_of, classes, following = (
        _array(sock, shape, dtype) for shape, dtype in zip(told.shapes, DTYPES, strict=True)
    )
    return TokenTable(masks, mask_of, classes, following, told.start)


def _array(sock: socket.socket, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """The next array on the socket. Read in place: a copy of so much would hold Python's lock for milliseconds."""
    array: np.ndarray = np.empty(shape, dtype)
    left = array.data.cast("B")
    while left:
        size = sock.recv_into(left)
        if not size:
            raise EOFError
        left = left[size:]
    return array
