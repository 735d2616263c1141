"""Finds the request that ends the engine process, by letting those that may be it run one after another.

A request that was running when the engine process ended twice in a row, with next to nothing done between, is added on
trial. Requests on trial start one by one: the next starts when the one before has brought some tokens, or is over. If
the process ends meanwhile, its client knows which it was. What comes after them waits behind them.

    held      B*  C*  d  e            * on trial
    running   A*                      until it has brought as many tokens as can be under way, and one more

With fewer, a step that is to break the engine may be under way while the tokens of those before it are read.
"""

from collections import deque
from collections.abc import Callable, Iterable

from jpaged.processes.client_requests import ClientRequests
from jpaged.processes.connection import Connection
from jpaged.processes.wire import Add, Finish, Trial

Start = Callable[[Connection, Add], None]


class Trials:
    """Requests that wait for a trial, or behind one.

    requests: those that have started. start: starts one. num_tokens: that a request brings to pass.
    """

    def __init__(self, requests: ClientRequests, start: Start, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._requests = requests
        self._start = start
        self._held: deque[tuple[Connection, Add]] = deque()
        self._running: tuple[Connection, int, str, float] | None = None  # handle, request id, tokens that it must have

    def add(self, connection: Connection, message: Add) -> None:
        """Starts a request, now or when those before it have passed."""
        if message.on_trial or self._held or self._running is not None:
            self._held.append((connection, message))
            self.advance()
        else:
            self._start(connection, message)

    def advance(self) -> None:
        """Called in each turn of the loop, whether it makes a step or not: starts what need wait no longer."""
        if self._running is not None:
            connection, handle, request_id, wanted = self._running
            generated = self._requests.num_generated(request_id)
            if generated is not None and generated < wanted:
                return
            self._running = None
            connection.send(Trial(handle, passed=True))
        while self._held and self._running is None:
            connection, message = self._held.popleft()
            if message.on_trial:
                connection.send(Trial(message.handle, passed=False))
            self._start(connection, message)
            if message.on_trial:
                request_id = connection.request_id(message.handle)
                generated = self._requests.num_generated(request_id)
                if generated is None:  # it was refused
                    connection.send(Trial(message.handle, passed=True))
                else:
                    self._running = connection, message.handle, request_id, generated + self._num_tokens

    def abort(self, connection: Connection, handles: Iterable[int]) -> None:
        """Nobody waits for these any more, whether they are held or not."""
        if self._held:
            gone = set(handles)
            self._held = deque(one for one in self._held if one[0] is not connection or one[1].handle not in gone)

    def finish(self, connection: Connection, message: Finish) -> None:
        """A client has found a stop string in what it had, perhaps of a request that is held."""
        for one, add in self._held:
            if one is connection and add.handle == message.handle and add.resumed is not None:
                add.resumed.generated[message.index] = None
                if not any(part is not None for part in add.resumed.generated):
                    self.abort(connection, [message.handle])
                return

    def drop(self, connection: Connection) -> None:
        """A client is gone."""
        self._held = deque(one for one in self._held if one[0] is not connection)
