"""Sequences that wait for a slot, in the order in which they are to get one."""

import heapq

from jpaged.engine.sequences.request import Request, RequestStatus


class WaitingQueue:
    """A heap in policy order: "fcfs" by arrival, "priority" by priority and then arrival; of one request's sequences
    the lowest index first.

    A preempted sequence arrived before all that never ran (or outranks them), so it comes back to the front.
    """

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, int, int, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        rank = request.priority if self._by_priority else 0
        heapq.heappush(self._heap, (rank, request.arrival_number, request.index, request))
        self._size += 1

    def hold(self, request: Request) -> None:
        """As `push`, but its turn cannot come before `release`."""
        self._size += 1

    def release(self, request: Request) -> None:
        """The turn of a request on hold can come."""
        self._size -= 1
        self.push(request)

    def peek(self) -> Request | None:
        """The sequence whose turn it is; None if none waits."""
        while self._heap and self._heap[0][-1].status == RequestStatus.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def first(self, n: int) -> list[Request]:
        """At most n sequences, in the order in which their turns come."""
        entries = heapq.nsmallest(n, self._heap)
        return [entry[-1] for entry in entries if entry[-1].status != RequestStatus.FINISHED]

    def pop(self) -> Request:
        """Removes and returns what `peek` showed."""
        self._size -= 1
        return heapq.heappop(self._heap)[-1]

    def count_out(self) -> None:
        """Says that one of the waiting sequences has finished or is about to.

        Its entry is dropped when it comes up, or when such entries outnumber the others.
        """
        self._size -= 1
        if len(self._heap) > 2 * self._size + 16:
            self._heap = [entry for entry in self._heap if entry[-1].status != RequestStatus.FINISHED]
            heapq.heapify(self._heap)
