"""A process that compiles constraints of strangers within limits: `python -P -m jpaged.text.grammar_check FD`.

    its parent                                                        this process
    {"json": tokenizer, "vocab_size": n, "eos_token_ids": [...]} -->  what is wrong with it; empty if nothing is
    a grammar                                                    -->  the same

FD is a socket; each message (`frames.py`) is answered by one. A grammar that takes too much memory or stack ends the
process, and one that takes too long has it ended. It ends with its parent.
"""

import json
import resource
import signal
import socket
import sys
import threading

from jpaged.text.frames import read_frame, write_frame

MEMORY_BYTES = 2 * 2**30
"""Of virtual memory: some hundred MB are Python's, its libraries' and the tokenizer's."""
STACK_BYTES = 64 * 2**20
_MOST_SECONDS = 10
"""After which the process ends by itself, if its parent is gone."""


def _serve(sock: socket.socket) -> None:
    import llguidance
    import numpy as np

    told = json.loads(read_frame(sock) or b"null")
    if told is None:
        return
    try:
        tokenizer = llguidance.LLTokenizer(told["json"], told["vocab_size"], told["eos_token_ids"])
    except BaseException as error:  # whatever the bindings raise: a panic is no Exception
        write_frame(sock, str(error).encode() or type(error).__name__.encode())
        return
    write_frame(sock, b"")
    mask = np.zeros((-(-told["vocab_size"] // 32),), np.uint32)
    while (grammar := read_frame(sock)) is not None:
        signal.alarm(_MOST_SECONDS)
        matcher = llguidance.LLMatcher(tokenizer, grammar.decode(), log_level=0)
        if not matcher.is_error():
            matcher.compute_ff_tokens()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        wrong = matcher.get_error()
        del matcher  # takes stack as well
        signal.alarm(0)
        write_frame(sock, wrong.encode())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve, args=(socket.socket(fileno=int(sys.argv[1])),))
    server.start()
    server.join()
