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
from typing import Any, NamedTuple, Protocol

import numpy as np

from jpaged.text.grammar_guides import Guide, follow_message
from jpaged.text.grammar_process import Followed, Made, Place
from jpaged.text.grammar_shards import ENDED, Processes, Shard, changed


class Follows(Protocol):
    """`GrammarCompiler`."""

    def knows(self, guide: Guide) -> bool: ...
    def advance(
        self, guides: Sequence[Guide], tokens: np.ndarray, guessed: Sequence[bool], last: Sequence[int]
    ) -> Sequence[Place]: ...
    def make_masks(
        self, guides: Sequence[Guide], before: Sequence[np.ndarray | None]
    ) -> Sequence["np.ndarray | str"]: ...


class Part(NamedTuple):
    """A shard's part of a job, or what is to be taken up in other processes; as `following.Job`."""

    slots: list[int]
    guides: list[Guide]
    tokens: np.ndarray
    guessed: list[bool]
    last: list[int]
    before: list[np.ndarray | None]


class Answer(NamedTuple):
    """As `following.Result`."""

    slots: list[int]
    places: Sequence[Place] | None
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
        by_shard: dict[Shard, list[int]] = {}
        ended: list[int] = []
        are_known: dict[Processes, bool] = {}
        for i, guide in enumerate(job.guides):
            process = guide.grammar.process
            is_known = are_known.get(process)
            if is_known is None:
                is_known = are_known[process] = self._compiler.knows(guide)
            if is_known:
                by_shard.setdefault(guide.shard, []).append(i)
            else:
                ended.append(i)
        for shard, some in by_shard.items():
            self._ask(shard, _part(job, some))
        if ended:
            self._revive(_part(job, ended))

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
            answers = list(self._answers)
            self._answers.clear()
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

    def _ask(self, shard: Shard, part: Part) -> None:
        answers = self._answers
        waiting: deque[int] = deque()
        told: list[bool] = []
        tokens = part.tokens.tolist()

        def answer(message: Followed | Made | None) -> bool:
            if isinstance(message, Followed):
                told.append(True)
                for i, (guide, place) in enumerate(zip(part.guides, message.places, strict=True)):
                    guide.note(tokens[i], place)
                    if place.needs_mask and not place.failure:
                        waiting.append(i)
                answers.append(Answer(part.slots, message.places, None))
            elif message is not None:
                some = [waiting.popleft() for _ in message.masks]
                masks = [changed(made, part.before[i]) for i, made in zip(some, message.arrays, strict=True)]
                answers.append(Answer([part.slots[i] for i in some], None, masks))
            elif told:
                self._revive(_part(part, list(waiting))._replace(tokens=part.tokens[:0]))
            else:
                self._revive(part)
            return message is None or not waiting

        processes = part.guides[0].grammar.process
        known = self._known()
        if processes not in known:
            self._processes = [weakref.ref(one) for one in (*known, processes)]
        shard.ask(follow_message(part.guides, part.tokens, part.guessed, part.last), answer)

    def _revive(self, part: Part) -> None:
        """Has sequences taken up in other processes; fails them if this is closed, as nothing follows them any more."""
        with self._reviving:
            if self._is_closed:
                count = len(part.slots)
                fails = ([ENDED] * count, None) if len(part.tokens) else (None, [ENDED.failure] * count)
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


def _part(job: Any, some: list[int]) -> Part:
    slots, guides, guessed, last, before = (
        [column[i] for i in some] for column in (job.slots, job.guides, job.guessed, job.last, job.before)
    )
    return Part(slots, guides, job.tokens[some], guessed, last, before)


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
                places = compiler.advance(part.guides, part.tokens, part.guessed, part.last)
                late.put(Answer(part.slots, places, None))
                waiting = [i for i, place in enumerate(places) if place.waits]
            if waiting:
                masks = compiler.make_masks([part.guides[i] for i in waiting], [part.before[i] for i in waiting])
                late.put(Answer([part.slots[i] for i in waiting], None, masks))
        except BaseException as error:  # raised again where the answers are read
            late.put(error)
        _wake(wakes)
