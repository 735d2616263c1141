"""The replicas of an `AsyncLLMEngine`: their links, from the first "ready" to the last end; and what is asked of them.

A replica's process may end at any time. `keeper.py` starts another one, or the process that has started them all hands
on a socket to it; `OpenRequests` has its requests meanwhile.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterable
from typing import TypeVar

from jpaged.api.config import EngineArgs, RestartOptions
from jpaged.api.errors import EngineDeadError, EngineRestartingError, JPagedError, error_of
from jpaged.engine.limits import RequestLimits
from jpaged.processes import handover, wire
from jpaged.processes.keeper import EngineKeeper
from jpaged.processes.launch import EngineProcesses, Link, ended_how
from jpaged.processes.links import AsyncLink
from jpaged.processes.open_requests import OpenRequests
from jpaged.processes.request_metrics import RequestMetrics
from jpaged.processes.router import Router

SHUTDOWN_S = 10.0
"""The engine process gets this long to end by itself, then it is killed."""
_LAST_WORDS_S = 0.5
"""After its socket has closed, we wait this long for its exit code, so that the error can name it."""

_AnswerT = TypeVar("_AnswerT", wire.Stats, wire.Pool, wire.Requests, wire.Changed, wire.Intact)

Answers = dict[AsyncLink, wire.Reply | wire.Error | None]
"""What each process that was asked has said; None: it ended, or did not answer in time."""


def raise_refusal(answers: Answers) -> None:
    """Raises the error of the first process that refuses, if one does."""
    for answer in answers.values():
        if isinstance(answer, wire.Error):
            raise error_of(answer.kind, answer.message)


class Fleet:
    """All replicas of a model, seen from one process that has requests for them.

    args, restarts: as of `AsyncLLMEngine`. processes: those that this process keeps; None if another one does.
    link: to them.
    begins: called once, when all that ever will serve do, with the first one's description.
    begins_again: called with a replica whose process has been replaced and serves, before it gets any request.

    Attributes:
        replicas: by number.
        requests: those that are open.
        keeper: of the processes; None if another process keeps them.
        description: the first replica's, with limits that all keep to; None until `ready` has returned.
        failure: why none serves or ever will; None while one does or may.
    """

    def __init__(
        self,
        args: EngineArgs,
        restarts: RestartOptions,
        processes: EngineProcesses | None,
        link: Link,
        begins: Callable[[wire.Ready], None],
        begins_again: Callable[[AsyncLink], None],
    ) -> None:
        self.processes = processes
        self.replicas = [AsyncLink(index, sock) for index, sock in enumerate(link.sockets)]
        router = Router(len(self.replicas), match_prefixes=args.enable_prefix_caching)
        metrics = RequestMetrics(link.board.metrics, link.board.worker)
        self.requests = OpenRequests(self.replicas, link.board, metrics, router, args.pipeline_depth)
        self.keeper: EngineKeeper | None = None
        if processes is not None:
            self.keeper = EngineKeeper(processes, restarts, self._replaced, self._given_up)
        self.description: wire.Ready | None = None
        self.failure: JPagedError | None = None
        self._begins, self._begins_again = begins, begins_again
        self._handover = link.handover
        self._is_ready: asyncio.Future[wire.Ready] | None = None
        self._failed = asyncio.Event()
        self._closing = False
        self._connecting: set[asyncio.Task[None]] = set()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, tuple[AsyncLink, asyncio.Future[wire.Answer | None]]] = {}
        self._told: dict[int, AsyncLink] = {}  # by call

    @property
    def is_kept_elsewhere(self) -> bool:
        """Whether another process has started the engine processes."""
        return self._handover is not None

    @property
    def is_restarting(self) -> bool:
        """Whether some replica's process is being started again."""
        return self.description is not None and any(one.ready is None and one.failure is None for one in self.replicas)

    async def ready(self) -> wire.Ready:
        """As `AsyncLLMEngine.ready`."""
        if self.description is not None:
            return self.description
        if self._is_ready is None:
            loop = asyncio.get_running_loop()
            self._is_ready = loop.create_future()
            if self._handover is not None:
                self._handover.setblocking(False)
                loop.add_reader(self._handover, self._take_over)
            if self.keeper is not None:
                self.keeper.watch_start()
            for replica in list(self.replicas):
                await replica.connect(self._take, self._end)
        return await asyncio.shield(self._is_ready)

    async def failed(self) -> JPagedError:
        """Waits until no replica serves or will serve again; returns why."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    def check_alive(self) -> None:
        """Raises EngineDeadError if none serves or ever will."""
        if self.failure is not None:
            raise EngineDeadError(str(self.failure)) from self.failure

    def check_health(self) -> None:
        """As `AsyncLLMEngine.check_health`."""
        self.check_alive()
        for replica in self.replicas:
            if replica.failure is not None:
                raise EngineDeadError(str(replica.failure)) from replica.failure
        if self.description is not None and not self.requests.serving():
            raise EngineRestartingError("The engine process is being started again; requests wait meanwhile.")

    async def ask(
        self, question: wire.Question, kind: type[_AnswerT], timeout_s: float | None = None
    ) -> dict[int, _AnswerT]:
        """Asks every replica that serves; returns the answers by replica number, of those that have come in time.

        kind: the type of the answers. Raises the error of one that refuses.
        """
        answers = await self.ask_each(question, timeout_s)
        raise_refusal(answers)
        return {replica.index: answer for replica, answer in answers.items() if isinstance(answer, kind)}

    async def ask_each(
        self, question: wire.Question, timeout_s: float | None = None, of: Iterable[AsyncLink] | None = None
    ) -> Answers:
        """The same; returns refusals, too, and which process said what: one that has answered may have been replaced
        before the last one does. All that were asked are in it.

        of: whom to ask, those that serve still; None: all that serve.
        """
        await self.ready()
        self.check_alive()
        futures: dict[AsyncLink, asyncio.Future[wire.Answer | None]] = {}
        serving = self.requests.serving()
        for replica in serving if of is None else [one for one in of if one in serving]:
            call_id = next(self._call_ids)
            futures[replica] = asyncio.get_running_loop().create_future()
            self._calls[call_id] = replica, futures[replica]
            replica.send(wire.Call(call_id, question))
        if futures:
            await asyncio.wait(futures.values(), timeout=timeout_s)
        came = {replica: future.result() if future.done() else None for replica, future in futures.items()}
        return {replica: None if answer is None else answer.value for replica, answer in came.items()}

    def tell(self, replica: AsyncLink, question: wire.Question) -> None:
        """Asks one. If it refuses, another process takes its place."""
        call_id = next(self._call_ids)
        self._told[call_id] = replica
        replica.send(wire.Call(call_id, question))

    def replace(self, replica: AsyncLink, reason: str) -> None:
        """Ends a process that is of no more use; another one takes its place, and its requests. For the process that
        keeps them.
        """
        self._end(replica, EngineDeadError(reason))

    async def shutdown(self) -> None:
        """Ends all requests, and the engine processes if this process keeps them. A second call does nothing."""
        self._closing = True
        if self._handover is not None and self._is_ready is not None:
            asyncio.get_running_loop().remove_reader(self._handover)
        for task in self._connecting:
            task.cancel()
        if self.processes is not None and self.keeper is not None:
            self.keeper.stop()
            if self.description is not None and not self.is_restarting:
                for replica in self.replicas:
                    replica.send(wire.Shutdown())
            else:
                self.processes.kill()
        for replica in self.replicas:
            self._die(replica, EngineDeadError("The engine was shut down."))
        if self.processes is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.processes.wait, SHUTDOWN_S)
        for replica in self.replicas:
            replica.close()

    def _take(self, replica: AsyncLink, message: wire.FromEngine) -> None:
        if replica.lost:  # another process has its requests
            return
        if isinstance(message, wire.Step):
            self.requests.take_step(replica, message)
        elif isinstance(message, wire.Answer):
            call, told = self._calls.pop(message.call_id, None), self._told.pop(message.call_id, None)
            if call is not None and not call[1].done():
                call[1].set_result(message)
            if told is not None and isinstance(message.value, wire.Error):
                self.replace(told, f"It could not go on where the one before it was: {message.value.message}")
        elif isinstance(message, wire.Refused):
            self.requests.refuse(message)
        elif isinstance(message, wire.Trial):
            self.requests.try_out(message)
        elif isinstance(message, wire.Ready):
            replica.ready = message
            if self.description is None:
                self._take_ready()
            else:
                self._rejoin(replica)
        elif isinstance(message, wire.Failed):
            error = error_of(message.kind, message.message)
            if self.description is not None and self.keeper is not None:
                self.keeper.last_words[replica.index] = str(error)
            elif self._handover is None:  # else: whoever started the process meets the same error
                self._die(replica, error)

    def _take_ready(self) -> None:
        """Begins when all replicas serve, or at least those that ever will."""
        ready = [one.ready for one in self.replicas if one.ready is not None]
        if len(ready) < sum(one.failure is None for one in self.replicas):
            return
        first = self.description = ready[0]
        self.requests.router.match_prefixes &= first.has_prefix_cache
        self._keep_to_least()
        self._begins(first)
        if self.keeper is not None:
            self.keeper.start(on_gpu=first.on_gpu)
        assert self._is_ready is not None
        if not self._is_ready.done():
            self._is_ready.set_result(first)

    def _rejoin(self, replica: AsyncLink) -> None:
        """A replica's new process serves: it takes the requests that wait for it."""
        assert self.description is not None
        assert replica.ready is not None
        if self.keeper is not None:
            self.keeper.serves(replica.index, replica.ready.startup_s)
        self._keep_to_least()
        self._begins_again(replica)
        if not replica.lost:  # as one is that cannot have the weights of the one before it
            self.requests.hand_on(replica)

    def _keep_to_least(self) -> None:
        """A request may get to any replica."""
        assert self.description is not None
        limits = RequestLimits.least(one.ready.limits for one in self.replicas if one.ready is not None)
        self.description.limits, self.requests.max_model_len = limits, limits.max_model_len

    def _lose(self, replica: AsyncLink) -> None:
        """A replica's process has ended. Its requests wait for another one, or move to other replicas at once."""
        if replica.lost or replica.failure is not None:
            return
        replica.lost, replica.ready = True, None
        replica.close()
        self.requests.router.forget_replica(replica.index)
        for asked, future in self._calls.values():
            if asked is replica and not future.done():
                future.set_result(None)
        self._calls = {call_id: call for call_id, call in self._calls.items() if call[0] is not replica}
        self._told = {call_id: told for call_id, told in self._told.items() if told is not replica}
        self.requests.hold(replica)
        self.requests.hand_on()

    def _replaced(self, index: int, sock: socket.socket) -> None:
        """A replica's process was started again."""
        self._lose(self.replicas[index])
        replica = self.replicas[index] = AsyncLink(index, sock)
        if self.keeper is not None:
            self.requests.metrics.count("engine_restarts", index)
        task = asyncio.ensure_future(replica.connect(self._take, self._end))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _given_up(self, index: int, error: EngineDeadError) -> None:
        """A replica's process is not started again."""
        replica = self.replicas[index]
        self._lose(replica)
        if self.description is None and any(one.failure is None for one in self.replicas if one is not replica):
            replica.failure = error
            self._take_ready()
        else:
            self._die(replica, error)

    def _take_over(self) -> None:
        """Reads what the process that started the engine processes says of them."""
        assert self._handover is not None
        while True:
            try:
                packet, sock = handover.receive(self._handover)
            except BlockingIOError:
                return
            except EOFError:  # that process has ended, and this one is about to
                asyncio.get_running_loop().remove_reader(self._handover)
                return
            if isinstance(packet, handover.Replaced):
                if sock is not None:
                    self._replaced(packet.replica, sock)
                else:  # where this was the last replica, this process ends, and another one takes its place
                    what = f"No descriptor was left for the socket to replica {packet.replica}; raise `ulimit -n`."
                    self._given_up(packet.replica, EngineDeadError(what))
            elif isinstance(packet, handover.GivenUp):
                self._given_up(packet.replica, EngineDeadError(packet.message))

    def _die(self, replica: AsyncLink, error: JPagedError) -> None:
        """Gives up on a replica. Its requests move to others, or fail with `error` where there are none; questions to
        it fail.
        """
        if replica.failure is not None:
            return
        replica.failure, replica.ready = error, None
        if self.description is None or all(one.failure is not None for one in self.replicas):
            self.failure = self.failure or error
            self._failed.set()
        if self.description is None and self._is_ready is not None and not self._is_ready.done():
            self._is_ready.set_exception(error)
            self._is_ready.exception()  # retrieved: nobody may be waiting for it
        given_up = self._closing or self.failure is not None
        self.requests.fail(replica, EngineDeadError(str(error)) if given_up else None)
        for asked, future in self._calls.values():
            if asked is replica and not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self._calls = {call_id: call for call_id, call in self._calls.items() if call[0] is not replica}
        if not self._closing and self.failure is None:
            self.requests.hand_on()

    def _end(self, replica: AsyncLink, error: EngineDeadError | None) -> None:
        """A connection is of no more use. error: None if the engine process has ended, or is about to."""
        if replica.failure is not None or replica.lost:
            return
        if self.keeper is not None and self.description is not None and not self._closing:
            self._lose(replica)
            if error is not None:
                self.keeper.last_words[replica.index] = str(error)
                self.keeper.kill(replica.index)
            return
        if self._handover is not None and error is None:
            self._lose(replica)
            return
        if error is None:
            code = None if self.processes is None else self.processes.exit_code(replica.index, _LAST_WORDS_S)
            how = "closed its socket" if code is None else ended_how(code)
            if self.keeper is not None:
                how = self.keeper.why_hung(replica.index) or how
            which = "" if len(self.replicas) == 1 else f" of replica {replica.index}"
            error = EngineDeadError(f"The engine process{which} {how}; start it anew.")
        self._die(replica, error)
