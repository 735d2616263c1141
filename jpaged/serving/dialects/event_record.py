"""The events of a response, for readers that come and go."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from itertools import islice

from jpaged.serving.errors import ApiError


class EventRecord:
    """The events of one response by their numbers.

    Args:
        max_bytes: of the events that are kept; the oldest give way.

    Attributes:
        num_bytes: of those that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self._first = 0  # the number of the first of them
        self._news = asyncio.Event()
        self._has_ended = False
        self.num_bytes = 0

    def add(self, events: bytes) -> None:
        """More events; an empty line ends each."""
        for event in events.split(b"\n\n")[:-1]:
            self._events.append(event + b"\n\n")
            self.num_bytes += len(event) + 2
        self.drop(self.num_bytes - self._max_bytes)
        self._wake()

    def drop(self, num_bytes: int) -> None:
        """The oldest events give way, until at least so many bytes are free or none is left."""
        least = self.num_bytes - num_bytes
        while self._events and self.num_bytes > least:
            self.num_bytes -= len(self._events.popleft())
            self._first += 1

    def end(self) -> None:
        """No more will come; readers end."""
        self._has_ended = True
        self._wake()

    def check(self, number: int) -> None:
        """Raises ApiError if the event of this number is not kept any more."""
        if number < self._first:
            raise ApiError(
                400,
                f"starting_after: events up to {self._first - 1} are not kept any more; ask for the response itself.",
                param="starting_after",
            )

    async def read(self, number: int = 0) -> AsyncGenerator[bytes, None]:
        """The events from this number on, as they come. Raises ApiError as `check`, before the first or later."""
        while True:
            self.check(number)
            num_new = self._first + len(self._events) - number
            if num_new > 0:
                events = list(islice(reversed(self._events), num_new))  # from the end, as most readers are near it
                events.reverse()
                number += len(events)
                yield b"".join(events)
            elif self._has_ended:
                return
            else:
                await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
