"""A replica of `ReplicatedEngine`: an `LLMEngine` in a process of its own, at the end of a pipe.

    python -m jpaged.replica_process FD        FD: an inherited socket; started by `ReplicatedEngine` only

In comes its `EngineArgs` and then calls: (method, arguments, keywords). Out go `Ready`, lists of outputs, (value,) for
calls that return one or (error,) for what they raise, `Refused` for requests, and `Failed`. It ends when the pipe does.
"""

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from jpaged.errors import JPagedError
from jpaged.llm_engine import LLMEngine
from jpaged.replicas import Failed, Ready, Refused


def main(fd: int) -> None:
    """Starts the engine and serves until the pipe closes or the engine fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent deals with it
    with Connection(fd) as connection:
        try:
            args = connection.recv()
            engine = LLMEngine(args)
            connection.send(Ready(engine.max_model_len, engine.vocab_size, engine.eos_token_ids, engine.startup.device))
            serve(engine, connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the parent is gone
        except Exception as error:
            connection.send(Failed(_sendable(error)))


def serve(engine: LLMEngine, connection: Connection) -> None:
    """Calls first, then a step: what arrived during a step is in the next one. EOFError: the other end closed."""
    while True:
        while not engine.has_unfinished_requests() or connection.poll():
            _answer(engine, connection, *connection.recv())
        outputs = engine.step()
        if outputs:
            connection.send(outputs)


def _answer(engine: LLMEngine, connection: Connection, method: str, arguments: Any, options: Any) -> None:
    try:
        value = getattr(engine, method)(*arguments, **options)
    except JPagedError as error:
        adds = method in ("add_request", "add_score_request")
        connection.send(Refused(arguments[0], error) if adds else (error,))
        return
    if value is not None:
        connection.send((value,))


def _sendable(error: Exception) -> Exception:
    """The error itself where the other side knows its type."""
    return error if isinstance(error, JPagedError) else RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
