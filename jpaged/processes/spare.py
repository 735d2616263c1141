"""An engine process started ahead of need: it has imported what it takes, and waits for its sockets.

    EngineProcesses      a channel      python -m jpaged.processes.engine_process --spare FD
    take(fds)        -- descriptors -->   pulse, control, a socket for each client: serves, like any other

A start imports for a second or more, in which requests of a process that ended would wait. Until it is taken a spare
uses no device, and some 300 MiB of host memory. It ends when its channel closes, or with its parent.
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jpaged.processes import handover

TAKEN = "jpaged-engine"
"""What a spare process is called from when it is taken."""
_MOST_FDS = 253
"""The kernel lets so many travel with one message (SCM_MAX_FD)."""


class Spare:
    """A spare process.

    command: of an engine process, without the descriptors that it is given later.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._channel, theirs = handover.socket_pair()
        try:
            self._process = subprocess.Popen(
                [*command, "--spare", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                process_group=0,
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self, fds: Sequence[int]) -> "subprocess.Popen[bytes] | None":
        """Gives it its descriptors. Returns the process, which serves from here on; None if it has ended."""
        if len(fds) > _MOST_FDS or self._process.poll() is not None:
            self.end()
            return None
        try:
            socket.send_fds(self._channel, [b"serve"], list(fds))
        except OSError:
            self.end()
            return None
        self._channel.close()
        return self._process

    def end(self) -> None:
        """Ends it, whatever it does."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


def await_descriptors(fd: int) -> list[int]:
    """What `Spare.take` gives to this process, whose channel is `fd`. Ends the process if that is closed before.

    From then on /proc/PID/comm and `ps -e` call the process `TAKEN`; its command line stays that of a spare.
    """
    with socket.socket(fileno=fd) as channel:
        message, fds, _, _ = socket.recv_fds(channel, 16, _MOST_FDS)
    if not message:
        os._exit(0)
    with suppress(OSError):  # where /proc cannot be written to, it keeps its name
        Path("/proc/self/comm").write_text(TAKEN)
    return fds
