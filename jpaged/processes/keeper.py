"""Keeps engine processes running: starts one that ended, or hangs, again, and hands its clients the new sockets.

    ends (its control channel closes) --.
    hangs (its pulse is silent) --kill--+--> start again --> this process's `AsyncLLMEngine`, other clients' channels
                                        '--> give up: too often within ten minutes

A process that does not serve long after its start hangs, too. One that served starts again at once; one that ended
before its first step, after a wait that doubles. On GPUs a spare process of each replica waits for this (`spare.py`).
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict

from jpaged.api.config import RestartOptions
from jpaged.api.errors import EngineDeadError
from jpaged.processes import handover
from jpaged.processes.flight_recorder import write_last_steps
from jpaged.processes.launch import EngineProcesses, ended_how

log = logging.getLogger("jpaged.engine")

WINDOW_S = 600.0
"""Restarts are limited within so long."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_LAST_WORDS_S = 0.5
"""After its sockets have closed, a process gets this long to end by itself."""
_MOST_CHARACTERS = 10_000
"""Of an error that goes to other processes, in one packet: XLA has errors of any length."""
_TRACEBACK_S = 0.2
"""A process that hangs gets this long to write where."""


class RestartLimit:
    """How often something may be started again, and after which wait.

    most: within `WINDOW_S`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: deque[float] = deque()
        self._fruitless = 0

    def wait_s(self, was_of_use: bool) -> float | None:
        """Counts a restart. Returns the seconds to wait before it; None: it has been too often.

        was_of_use: what has ended had done its work until then.
        """
        now = time.monotonic()
        while self._times and now - self._times[0] > WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        self._times.append(now)
        self._fruitless = 0 if was_of_use else self._fruitless + 1
        return min(_FIRST_WAIT_S * 2 ** (self._fruitless - 1), _LONGEST_WAIT_S) if self._fruitless else 0.0

    def __str__(self) -> str:
        return f"{len(self._times)} of at most {self._most} in {WINDOW_S / 60:g} minutes"


class EngineKeeper:
    """Watches the engine processes that this process has started. All methods are called from one event loop.

    on_replaced: called with the replica's number and this process's socket to its new process. on_given_up: with its
    number and why it is not started again.

    Attributes:
        channels: of the other clients, by their number; they get their sockets over these.
        last_words: what a replica's process said before it ended, by replica.
        why_not_again: why a process that ends from here on is given up, with what to do about it; empty: it is not.
    """

    def __init__(
        self,
        processes: EngineProcesses,
        options: RestartOptions,
        on_replaced: Callable[[int, socket.socket], None],
        on_given_up: Callable[[int, EngineDeadError], None],
    ) -> None:
        self.channels: dict[int, socket.socket] = {}
        self.last_words: dict[int, str] = {}
        self.why_not_again = ""
        self._processes = processes
        self._options = options
        self._on_replaced = on_replaced
        self._on_given_up = on_given_up
        self._limits = [RestartLimit(options.max_restarts) for _ in range(processes.num_replicas)]
        self._hung: dict[int, str] = {}  # what was wrong with it, by replica
        self._down: set[int] = set()  # replicas whose process has ended, and no other has been started yet
        self._num_written = 0
        self._ended_at: dict[int, float] = {}
        self._started_at: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._given_up: dict[int, EngineDeadError] = {}
        self._stopped = False
        self._keeps_spares = False

    def start(self, on_gpu: bool) -> None:
        """Begins to watch. All processes serve. on_gpu: they run on GPUs."""
        spares = self._options.spare_processes
        self._keeps_spares = bool(self._options.max_restarts) and (on_gpu if spares is None else spares)
        for replica in range(self._processes.num_replicas):
            self._watch(replica)
            self._make_spare(replica)

    def watch_start(self) -> None:
        """Looks for processes that hang from here on, in their first start too: those are killed."""
        self._run(self._find_hung())

    def why_hung(self, replica: int) -> str | None:
        """What was wrong with a process that was killed since it hung; None: it was not."""
        return self._hung.get(replica)

    def stop(self) -> None:
        """Lets the processes end as they will."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        for control in self._processes.controls:
            asyncio.get_running_loop().remove_reader(control)

    def add_client(self, client: int, channel: socket.socket) -> None:
        """Another process is this client from here on; it is told of what is down for good already."""
        old = self.channels.get(client)
        if old is not None:
            old.close()
        self.channels[client] = channel
        for replica, error in self._given_up.items():
            handover.send(channel, handover.GivenUp(replica, str(error)[:_MOST_CHARACTERS]))

    def serves(self, replica: int, startup_s: Mapping[str, float]) -> None:
        """A process that was started again serves. startup_s: seconds of its start, by phase. What they leave of it
        came before: Python and imports, which a spare has behind it.
        """
        ended, started, now = self._ended_at[replica], self._started_at[replica], time.monotonic()
        parts = {"import": max(0.0, now - started - sum(startup_s.values())), **startup_s}
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in parts.items())
        log.warning(
            "replica %d serves again %.2f s after its process ended: %.2f s until the next was started, %.2f s for its "
            "start (%s)", replica, now - ended, started - ended, now - started, phases
        )  # fmt: skip
        self._make_spare(replica)

    def _make_spare(self, replica: int) -> None:
        if self._keeps_spares:
            self._processes.make_spare(replica)

    def kill(self, replica: int) -> None:
        """Ends a replica's process that is of no more use."""
        self._processes.send_signal(replica, signal.SIGKILL)

    def _watch(self, replica: int) -> None:
        control = self._processes.controls[replica]

        def ended() -> None:
            self._ended_at[replica] = time.monotonic()
            self._down.add(replica)
            asyncio.get_running_loop().remove_reader(control)
            self._run(self._recover(replica))

        asyncio.get_running_loop().add_reader(control, ended)  # nothing comes over it: it is readable when it closes

    async def _find_hung(self) -> None:
        """Kills processes that hang."""
        step_s, start_s = self._options.step_timeout_s, self._options.start_timeout_s
        while True:
            await asyncio.sleep(min(step_s / 4, start_s / 4, 1.0))
            for replica, pulse in enumerate(self._processes.pulses):
                if replica in self._hung or replica in self._given_up or replica in self._down:
                    continue
                if pulse.silence_s() > step_s:
                    what = f"did not finish a step within {step_s:g} s (--step-timeout) and was killed"
                elif pulse.starting_s() > start_s:
                    what = f"did not serve within {start_s:g} s of its start (--start-timeout) and was killed"
                else:
                    what = ""
                if what:
                    self._hung[replica] = what
                    self._processes.send_signal(replica, signal.SIGUSR1)  # it writes where it hangs, if it can
                    await asyncio.sleep(_TRACEBACK_S)
                    if self._processes.pulses[replica] is pulse:  # else another process has taken its place
                        self.kill(replica)

    async def _recover(self, replica: int) -> None:
        """Starts a process that has ended again, or gives it up."""
        processes, limit = self._processes, self._limits[replica]
        try:
            code = await asyncio.to_thread(processes.end, replica, _LAST_WORDS_S)
        except RuntimeError:  # no thread can be started
            code = processes.end(replica, 0.0)
        if self._stopped:
            return
        which = "The engine process" if processes.num_replicas == 1 else f"The engine process of replica {replica}"
        what = f"{which} {ended_how(code)}"
        if hung := self._hung.pop(replica, ""):
            what = f"{which} {hung}"
        if words := self.last_words.pop(replica, ""):
            what = f"{which} has ended. {words.rstrip('.')}"
        await self._write_last_steps(replica, what)
        was_of_use = processes.pulses[replica].num_steps > 0
        while not self.why_not_again and (wait_s := limit.wait_s(was_of_use)) is not None:
            log.error("%s; starting it again%s (%s)", what, f" in {wait_s:g} s" if wait_s else "", limit)
            if wait_s:
                await asyncio.sleep(wait_s)
            self._started_at[replica] = time.monotonic()
            try:
                sockets = processes.restart(replica)
            except OSError as error:  # the machine has no memory, processes or files to spare at the moment
                what, was_of_use = f"{which} cannot be started ({error})", False
                continue
            self._hand_over(replica, sockets)
            return
        self._give_up(replica, EngineDeadError(f"{what}; {self.why_not_again or 'start it anew'}."))

    async def _write_last_steps(self, replica: int, what: str) -> None:
        """Writes what a process did last, if that is possible: requests wait for the next one."""
        pulse, args = self._processes.pulses[replica], asdict(self._processes.args)
        try:
            path = await asyncio.to_thread(write_last_steps, pulse, what, args, self._num_written)
        except Exception:  # a defect of the recorder, or no thread can be started
            log.exception("the last steps of replica %d cannot be written", replica)
            return
        if path is not None:
            self._num_written += 1
            log.error("the last steps of replica %d are in %s (jpaged bench steps --replay)", replica, path)

    def _hand_over(self, replica: int, sockets: Sequence[socket.socket]) -> None:
        """A process was started again. sockets: to it, one for each client, this process's first."""
        self._down.discard(replica)
        self._watch(replica)
        self._on_replaced(replica, sockets[0])
        for client, channel in self.channels.items():
            self._tell(channel, handover.Replaced(replica), sockets[client])
        for sock in sockets[1:]:
            sock.close()

    def _give_up(self, replica: int, error: EngineDeadError) -> None:
        log.error("%s", error)
        self._given_up[replica] = error
        self._processes.end_spare(replica)
        self._on_given_up(replica, error)
        for channel in self.channels.values():
            self._tell(channel, handover.GivenUp(replica, str(error)[:_MOST_CHARACTERS]))

    @staticmethod
    def _tell(channel: socket.socket, packet: handover.Packet, *sockets: socket.socket) -> None:
        with contextlib.suppress(OSError):  # that client has ended; one that takes its place gets sockets of its own
            handover.send(channel, packet, *sockets)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
