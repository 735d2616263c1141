"""A replica of `ReplicatedEngine`: an `LLMEngine` in a process of its own, at the end of a pipe.

    python -m jpaged.processes.replica_process FD        FD: an inherited socket; started by `ReplicatedEngine` only

    pipe --> reading thread --> inbox --> calls, steps --> pipe

In comes its `EngineArgs` and then one `Call` after the other; what goes out, `jpaged.processes.replicas` lists. A
thread reads, so that the other side can send while this one is in a step, or itself waits to send. The process ends
when the pipe does, whatever it is doing.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from jpaged.api.errors import JPagedError
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.processes.replicas import Aborted, Call, Failed, Ready, Refused, Reply


def main(fd: int) -> None:
    """Starts the engine and serves until the pipe closes or the engine fails."""
    connection = Connection(fd)
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), name="jpaged-inbox", daemon=True).start()
    try:
        engine = LLMEngine(inbox.get())
        limits, device = engine.request_limits(), engine.startup.device
        connection.send(Ready(limits, engine.vocab_size, engine.eos_token_ids, device))
        serve(engine, inbox, connection.send)
    except Exception as error:
        with suppress(OSError):  # the parent is gone
            connection.send(Failed(_sendable(error)))


def serve(engine: LLMEngine, inbox: "SimpleQueue[Call | Exception]", send: Callable[[Any], None]) -> None:
    """Calls first, then a step: what arrived during a step is in the next one. Returns only by what it raises."""
    while True:
        while not engine.has_unfinished_requests() or not inbox.empty():
            call = inbox.get()
            if isinstance(call, Exception):
                raise call
            _answer(engine, call, send)
        outputs = engine.step()
        if outputs:
            send(outputs)


def _answer(engine: LLMEngine, call: Call, send: Callable[[Any], None]) -> None:
    value: Any
    try:
        value = getattr(engine, call.method)(*call.arguments, **call.options)
    except JPagedError as error:
        if call.number is None:
            send(Refused(call.arguments[0], error))
            return
        value = error
    if call.method == "abort_request":
        send(Aborted(call.arguments[0]))
    if call.number is not None:
        send(Reply(call.number, value))


def _read(connection: Connection, inbox: "SimpleQueue[Any]") -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # nobody is left to serve, and nothing to save
        except Exception as error:  # it holds what this process does not know
            message = error
        inbox.put(message)


def _sendable(error: Exception) -> Exception:
    """The error itself where the other side knows its type."""
    return error if isinstance(error, JPagedError) else RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
