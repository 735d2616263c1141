"""Follows grammars for an engine's thread, which never waits for it; as `jpaged.engine.constraints.following.Follower`.

    put(job)      its parts go to the shards that have their guides
    take_all()    what shards have answered: where guides stand, and masks

The engine's thread writes to the shards and reads their answers itself: a thread in between would have to get Python's
lock for each, while the engine's holds it for milliseconds. Only sequences whose processes have ended are taken up by a
thread.
"""

import queue
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from jpaged.text.grammar_guides import Guide, changes_of
from jpaged.text.grammar_process import Follow, Followed, Place, Places
from jpaged.text.grammar_shards import ENDED, Masks, Processes, Shard


class Follows(Protocol):
    """`GrammarCompiler`."""

    def knows(self, guide: Guide) -> bool: ...
    def advance(
        self, guides: Sequence[Guide], tokens: np.ndarray, guessed: Sequence[bool], last: Sequence[int]
    ) -> Sequence[Place]: ...
    def make_masks(self, guides: Sequence[Guide]) -> Sequence["np.ndarray | str"]: ...


class Part(NamedTuple):
    """A shard's part of a job, or what is to be taken up in other processes; as `following.Job`."""

    slots: np.ndarray
    guides: list[Guide]
    tokens: np.ndarray
    guessed: np.ndarray
    last: np.ndarray

    def some(self, which: "np.ndarray | list[int]") -> "Part":
        """Those at these indices."""
        guides = [self.guides[i] for i in (which.tolist() if isinstance(which, np.ndarray) else which)]
        return Part(self.slots[which], guides, self.tokens[which], self.guessed[which], self.last[which])

    @property
    def without_tokens(self) -> "Part":
        """The same, for which only masks are to be made."""
        return self._replace(tokens=self.tokens[:0])


class Answer(NamedTuple):
    """As `following.Result`."""

    slots: np.ndarray
    places: Places | None
    masks: "Sequence[np.ndarray | str] | None"


class Follower:
    """Asks the shards of a `GrammarCompiler`.

    Attributes:
        wake: has `has_news` say yes, and ends a `wait`. Any thread may call it, and who keeps it keeps nothing else.
    """

    def __init__(self, compiler: Follows) -> None:
        self._compiler = compiler
        self._processes: list[weakref.ref[Processes]] = []
        self._answers: deque[Answer] = deque()
        self._late: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._to_revive: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reviving, self._is_closed = threading.Lock(), False
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self.wake = partial(_wake, self._wakes)
        self._polled: tuple[list[int], list[bool]] | None = None
        self._poller = select.poll()
        self._by_fd: dict[int, Shard] = {}
        weakref.finalize(self, self._to_revive.put, None)

    def put(self, job: Any) -> None:
        """Hands over a job."""
        addresses = np.array([guide.address for guide in job.guides], np.int64)
        new = np.flatnonzero(addresses < 0).tolist()
        for i in new:
            guide = job.guides[i]
            addresses[i] = guide.shard.route << 32 | guide.number
        order = np.argsort(addresses >> 32, kind="stable")
        addresses, part = addresses[order], Part(*job).some(order)
        routes, numbers = addresses >> 32, (addresses & 0xFFFFFFFF).astype(np.int32)
        bounds = [0, *(np.flatnonzero(routes[1:] != routes[:-1]) + 1).tolist(), len(order)]
        for begin, end in pairwise(bounds):
            own = slice(begin, end)
            of_shard = Part(part.slots[own], part.guides[own], part.tokens[own], part.guessed[own], part.last[own])
            if self._compiler.knows(of_shard.guides[0]):
                self._ask(of_shard, numbers[own], bool(new))
            else:
                self._revive(of_shard)

    @property
    def has_news(self) -> bool:
        """Whether `take_all` has something, or `wake` was called since."""
        return self._wait(0)

    def wait(self, seconds: float) -> None:
        """Until there are news, at most so long."""
        self._wait(seconds)

    def take_all(self, waits: bool = False) -> list[Answer]:
        """What has come. Raises what following the grammars raised. waits: for something."""
        while True:
            self._pump()
            answers: list[Answer] = []
            with suppress(IndexError):
                while True:  # another thread that asks the same shards appends those that come meanwhile
                    answers.append(self._answers.popleft())
            while not self._late.empty():
                late = self._late.get()
                if isinstance(late, BaseException):
                    raise late
                answers.append(late)
            if answers or not waits:
                return answers
            self._wait(1.0)

    def close(self) -> None:
        """Ends its thread. What is still to come fails."""
        with self._reviving:
            self._is_closed = True
            self._to_revive.put(None)

    def _wait(self, seconds: float) -> bool:
        if self._answers or not self._late.empty() or not all(one.is_alive for one in self._known()):
            return True
        return bool(self._poll().poll(1e3 * seconds))

    def _known(self) -> list[Processes]:
        """The processes that it has asked, and that somebody still has."""
        return [processes for one in self._processes if (processes := one()) is not None]

    def _poll(self) -> select.poll:
        """Polls all sockets: one object for as long as they are the same ones, since to make one takes longer than to
        ask it.
        """
        known = self._known()
        shards = [shard for processes in known for shard in processes.shards]
        polled = [processes.serial for processes in known], [shard.has_unsent for shard in shards]
        if polled != self._polled:
            self._polled, self._poller = polled, select.poll()
            self._poller.register(self._woken, select.POLLIN)
            self._by_fd = {shard.sock.fileno(): shard for shard in shards if shard.register(self._poller)}
        return self._poller

    def _pump(self) -> None:
        for fd, _ in self._poll().poll(0):
            shard = self._by_fd.get(fd)
            if shard is not None:
                shard.pump()
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(4096, socket.MSG_DONTWAIT)
        for processes in [one for one in self._known() if not one.is_alive]:
            self._processes = [weakref.ref(one) for one in self._known() if one is not processes]
            for shard in processes.shards:
                shard.fail()

    def _ask(self, part: Part, numbers: np.ndarray, has_new: bool) -> None:
        """Asks the shard of a part. numbers: int32 [guides]. has_new: whether it may not know some of them yet."""
        answers, shard = self._answers, part.guides[0].shard
        waiting: list[int] | None = None

        def answer(message: Followed | Masks | None) -> bool:
            nonlocal waiting
            if isinstance(message, Followed):
                places = message.arrays
                _note(part, places)
                waiting = places.waiting
                answers.append(Answer(part.slots, places, None))
            elif message is not None:
                assert waiting is not None
                some, waiting = waiting[: len(message)], waiting[len(message) :]
                answers.append(Answer(part.slots[some], None, message))
            elif waiting is not None:
                self._revive(part.some(waiting).without_tokens)
            else:
                self._revive(part)
            return message is None or not waiting

        processes = part.guides[0].grammar.process
        known = self._known()
        if processes not in known:
            self._processes = [weakref.ref(one) for one in (*known, processes)]
        changes = changes_of(shard, part.guides if has_new else ())
        shard.ask(Follow.of(changes, numbers, part.tokens, part.guessed, part.last), answer)

    def _revive(self, part: Part) -> None:
        """Has sequences taken up in other processes; fails them if this is closed, as nothing follows them any more."""
        with self._reviving:
            if self._is_closed:
                count = len(part.slots)
                fails = (Places.of([ENDED] * count), None) if len(part.tokens) else (None, [ENDED.failure] * count)
                self._late.put(Answer(part.slots, *fails))
                return
            if self._thread is None:
                arguments = (self._compiler, self._to_revive, self._late, self._wakes)
                self._thread = threading.Thread(target=_revive, args=arguments, name="jpaged-grammars", daemon=True)
                self._thread.start()
            self._to_revive.put(part)


def _wake(wakes: socket.socket) -> None:
    with suppress(OSError):  # so many wait to be read, or nobody reads any more
        wakes.send(b"\0")


def _note(part: Part, places: Places) -> None:
    """As `Guide.note`, of all guides of a part."""
    went_on: Sequence[int]
    chosen = part.tokens[np.arange(len(part.guides)), places.num_refused].tolist()
    if places.failures or places.is_refused.any():
        passed_over = places.is_refused.copy()
        passed_over[list(places.failures)] = True
        went_on = np.flatnonzero(~passed_over).tolist()
    else:
        went_on = range(len(chosen))
    for i in went_on:
        part.guides[i].followed.append(chosen[i])
    for i, forced in places.forced.items():
        if i not in places.failures:
            part.guides[i].followed.extend(forced)


def _revive(
    compiler: Follows,
    parts: "queue.SimpleQueue[Part | None]",
    late: "queue.SimpleQueue[Answer | BaseException]",
    wakes: socket.socket,
) -> None:
    """In a thread, which knows nothing of who made it: until there is no part but None. A part without tokens has been
    moved past them, and waits for masks.
    """
    while (part := parts.get()) is not None:
        try:
            waiting = list(range(len(part.slots)))
            if len(part.tokens):
                given = part.guessed.tolist(), part.last.tolist()
                places = Places.of(compiler.advance(part.guides, part.tokens, *given))
                late.put(Answer(part.slots, places, None))
                waiting = places.waiting
            if waiting:
                masks = compiler.make_masks([part.guides[i] for i in waiting])
                late.put(Answer(part.slots[waiting], None, masks))
        except BaseException as error:  # raised again where the answers are read
            late.put(error)
        _wake(wakes)
