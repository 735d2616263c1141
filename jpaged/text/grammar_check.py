"""A process that compiles constraints of strangers within limits: `python -P -m jpaged.text.grammar_check FD`.

    its parent                                                        this process
    {"json": tokenizer, "vocab_size": n, "eos_token_ids": [...]} -->  made
    a grammar                                                    -->  what is wrong with it; empty if nothing is

FD is a socket. Every message is its length, 4 bytes little-endian, and its bytes; each is answered by one. A grammar
that takes too much memory or stack ends the process, and one that takes too long has it ended. It ends with its parent.
"""

import json
import resource
import signal
import socket
import struct
import sys
import threading
from io import BufferedRWPair
from typing import IO

MEMORY_BYTES = 2 * 2**30
"""Of virtual memory: some hundred MB are Python's, its libraries' and the tokenizer's."""
STACK_BYTES = 64 * 2**20
_MOST_SECONDS = 10
"""After which the process ends by itself, if its parent is gone."""


Stream = IO[bytes] | BufferedRWPair


def send(stream: Stream, message: bytes) -> None:
    """Writes a message."""
    stream.write(struct.pack("<I", len(message)) + message)
    stream.flush()


def receive(stream: Stream) -> bytes | None:
    """Reads a message; None at the end."""
    length = stream.read(4)
    if len(length) < 4:
        return None
    return stream.read(struct.unpack("<I", length)[0])


def _serve(stream: Stream) -> None:
    import llguidance
    import numpy as np

    told = json.loads(receive(stream) or b"null")
    if told is None:
        return
    tokenizer = llguidance.LLTokenizer(told["json"], told["vocab_size"], told["eos_token_ids"])
    send(stream, b"")
    mask = np.zeros((-(-told["vocab_size"] // 32),), np.uint32)
    while (grammar := receive(stream)) is not None:
        signal.alarm(_MOST_SECONDS)
        matcher = llguidance.LLMatcher(tokenizer, grammar.decode(), log_level=0)
        if not matcher.is_error():
            matcher.compute_ff_tokens()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        wrong = matcher.get_error()
        del matcher  # takes stack as well
        signal.alarm(0)
        send(stream, wrong.encode())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve, args=(socket.socket(fileno=int(sys.argv[1])).makefile("rwb"),))
    server.start()
    server.join()
