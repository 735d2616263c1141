"""The requests of an `AsyncLLMEngine` that are open: which replica has which, and what becomes of them when its process
ends.

    route --> open --> take_step ... --> close
                 |          ^
                 +-- hold --+ hand_on: another process adds the request with its tokens so far
"""

import math
import time
from array import array

from jpaged.api.errors import JPagedError, SlowConsumerError, SuspectRequestError, error_of
from jpaged.engine.sequences.request import Request
from jpaged.processes import wire
from jpaged.processes.board import Board
from jpaged.processes.links import AsyncLink
from jpaged.processes.request_metrics import RequestMetrics
from jpaged.processes.request_record import RequestObserver
from jpaged.processes.request_stream import RequestStream
from jpaged.processes.router import Router


class OpenRequests:
    """Puts requests on replicas, takes their tokens, and moves them when a replica's process ends.

    replicas: by number; whoever replaces one does so in this list. pipeline_depth: of the engines.

    Attributes:
        streams: by handle. request_ids: of these.
        router: what each replica has to do, of this process's requests.
        max_model_len: of the replicas; set before the first request is routed.
        metrics, observers: as of `AsyncLLMEngine`.
    """

    def __init__(
        self, replicas: list[AsyncLink], board: Board, metrics: RequestMetrics, router: Router, pipeline_depth: int
    ) -> None:
        self.streams: dict[int, RequestStream] = {}
        self.request_ids: set[str] = set()
        self.router = router
        self.max_model_len = 0
        self.metrics = metrics
        self.observers: list[RequestObserver] = []
        self._replicas = replicas
        self._board = board
        self._pipeline_depth = pipeline_depth

    def serving(self) -> list[AsyncLink]:
        """The replicas that serve."""
        return [replica for replica in self._replicas if replica.ready is not None]

    def next_handle(self) -> int:
        """Of a new request: no other process uses it."""
        return 1 + self._board.worker + self._board.num_workers * self._board.next_number()

    def route(self, handle: int, request: Request, only: AsyncLink | None = None) -> AsyncLink:
        """Picks the replica that a request will run on, or wait for if none serves, and counts the request there."""
        if len(self._replicas) == 1:
            return self._replicas[0]
        room = self.max_model_len - request.prompt_len
        most = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
        own, owed = self.router.outstanding, self._board.by_replica("owed_tokens")
        takers = self.serving() or [replica for replica in self._replicas if replica.failure is None]
        takers = takers if only is None else [only]
        elsewhere = [owed[r.index] - own[r.index] if r in takers else math.inf for r in self._replicas]
        new_tokens, prompt = most * request.num_sequences, request.prompt_token_ids.tolist()
        index = self.router.route(str(handle), prompt, new_tokens, request.cache_salt, elsewhere)
        self._board.set("owed_tokens", index, own[index])
        return self._replicas[index]

    def open(self, stream: RequestStream) -> None:
        """Sends a request to its replica, or lets it wait for one."""
        request = stream.request
        self.streams[stream.handle] = stream
        self.request_ids.add(request.request_id)
        replica = stream.replica
        self._board.add("unfinished", replica.index, 1)
        self._board.add("queued", replica.index, 1)
        self._board.add("queued_tokens", replica.index, request.prompt_len)
        if replica.ready is None:
            stream.held = True
        else:
            replica.send(wire.Add.of(stream.handle, request))

    def close(self, stream: RequestStream) -> None:
        """Forgets a stream; one whose request has not ended is aborted."""
        if self.streams.pop(stream.handle, None) is None:
            return
        request, replica = stream.request, stream.replica
        self.request_ids.discard(request.request_id)
        self._started(stream)
        self._board.add("unfinished", replica.index, -1)
        if len(self._replicas) > 1:
            self.router.finish(str(stream.handle))
            self._board.set("owed_tokens", replica.index, self.router.outstanding[replica.index])
        if stream.end():
            replica.send(wire.Abort([stream.handle]))
        if stream.is_counted:
            self.metrics.count_finished(replica.index, request)
        if stream.record is not None:
            record = stream.record
            record.replica, record.error, record.ended = replica.index, stream.error, time.monotonic()
            for observer in self.observers:
                observer.ended(record)

    def abort(self, stream: RequestStream) -> None:
        """Ends a request with what it has generated."""
        if stream.tells_end and stream.running:  # only the engine process has its tokens
            stream.aborting = True
            stream.replica.send(wire.Abort([stream.handle], reports=True))
        elif stream.end():
            stream.replica.send(wire.Abort([stream.handle]))
            stream.wake()

    def take_step(self, replica: AsyncLink, step: wire.Step) -> None:
        """Hands on the tokens of a step."""
        streams, now = self.streams, time.monotonic()
        for handle in array("q", step.started):
            stream = streams.get(handle)
            if stream is not None:
                self._started(stream)
                stream.running = True
        intervals = []
        for update in step.updates:  # first: those who wait for their first token should not wait for all the others
            stream = streams.get(update.handle)
            if stream is not None and not stream.group.members[update.index].finished:
                if stream.last_token_time and stream.request.reports_each_token and len(stream.pending) == 1:
                    intervals.append(now - stream.last_token_time)
                stream.take(update, now)
                if stream.has_overflowed:
                    self._overflow(stream)
        for handle, token_id in zip(array("q", step.handles), array("i", step.tokens), strict=True):
            stream = streams.get(handle)
            if stream is not None and not stream.request.finished:  # else: ended here while this was under way
                intervals.append(now - stream.last_token_time)
                stream.add_token(token_id, now)
        self.metrics.count_intervals(replica.index, intervals)

    def refuse(self, message: wire.Refused) -> None:
        """An engine process does not take a request."""
        stream = self.streams.get(message.handle)
        if stream is not None:
            stream.is_counted = False  # it has not run, nor waited
            stream.fail(error_of(message.kind, message.message))

    def try_out(self, message: wire.Trial) -> None:
        """A suspect runs alone, or has done so and ended nothing."""
        stream = self.streams.get(message.handle)
        if stream is not None:
            stream.on_trial = True
            if message.passed:
                stream.clear()

    def hold(self, replica: AsyncLink) -> None:
        """Keeps the requests of a process that has ended, until `hand_on`."""
        for stream in list(self.streams.values()):
            if stream.replica is not replica or stream.held:
                continue
            if stream.aborting:  # what it had generated ended with the process
                stream.end()
                stream.wake()
                continue
            stream.held = True
            if stream.running:
                stream.count_death(self._pipeline_depth + 1)
            if stream.is_convicted:
                self._suspect(stream)

    def fail(self, replica: AsyncLink, error: JPagedError | None) -> None:
        """Keeps the requests of a replica that is given up; with an error these, and all that wait, fail with it."""
        for stream in self.streams.values():
            if stream.replica is replica:
                stream.held = True
            if stream.held and error is not None:
                stream.fail(error)

    def hand_on(self, fresh: AsyncLink | None = None) -> None:
        """Adds the requests that no process has to those that serve. Those that may be what ended a process go to one
        that has nothing else to lose. fresh: it has just begun.
        """
        num_resumed: dict[int, int] = {}
        for stream in sorted(self.streams.values(), key=lambda one: (one.is_suspect, one.failed_trials)):
            if not stream.held or stream.closed or stream.group.finished:
                continue
            if stream.is_suspect and fresh is None:
                if all(one.ready is not None or one.failure is not None for one in self._replicas):
                    self._suspect(stream)
                continue
            if not self.serving():
                return
            replica = fresh if fresh is not None and stream.is_suspect else None
            self._move(stream, replica)
            if not stream.queued:
                num_resumed[stream.replica.index] = num_resumed.get(stream.replica.index, 0) + 1
        for index, number in num_resumed.items():
            self.metrics.count("requests_resumed", index, number)

    def _move(self, stream: RequestStream, replica: AsyncLink | None) -> None:
        """Adds a request to this replica, or to the best, with what has come of it."""
        request, before = stream.request, stream.replica.index
        if len(self._replicas) > 1:
            self.router.finish(str(stream.handle))
            self._board.set("owed_tokens", before, self.router.outstanding[before])
            picked = self.route(stream.handle, request)
            replica = replica or picked
        replica = replica or self._replicas[0]
        gauges = {"unfinished": 1.0}
        if stream.queued:
            gauges |= {"queued": 1.0, "queued_tokens": float(request.prompt_len)}
        for gauge, amount in gauges.items():
            self._board.add(gauge, before, -amount)
            self._board.add(gauge, replica.index, amount)
        stream.replica, stream.held = replica, False
        again = not stream.queued
        if again and stream.record is not None:
            stream.record.num_resumed += 1
        stream.tells_end &= not again
        replica.send(wire.Add.of(stream.handle, request, again=again, on_trial=stream.is_suspect))

    def _suspect(self, stream: RequestStream) -> None:
        """Refuses a request that ends engine processes."""
        stream.held = False
        self.metrics.count("requests_suspected", stream.replica.index)
        stream.fail(
            SuspectRequestError(
                "The engine process ended each time that this request was running, so it is not tried again; the "
                "server's log says how the process ended."
            )
        )

    def _started(self, stream: RequestStream) -> None:
        if stream.queued:
            stream.queued = False
            self._board.add("queued", stream.replica.index, -1)
            self._board.add("queued_tokens", stream.replica.index, -stream.request.prompt_len)

    def _overflow(self, stream: RequestStream) -> None:
        """Aborts a request whose outputs nobody takes, and gives back what they take."""
        if stream.end():
            stream.replica.send(wire.Abort([stream.handle]))
        stream.drop()
        stream.fail(
            SlowConsumerError(
                f"More than {stream.max_backlog_bytes} bytes of log-probabilities waited to be taken, so the request"
                " was aborted; read faster, or ask for fewer."
            )
        )
