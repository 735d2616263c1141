"""What happened to a request, for those who watch requests: traces (`traces.py`) and the log (`request_log.py`)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.api.errors import JPagedError
from jpaged.engine.sequences.request import Request


@dataclass(slots=True)
class RequestRecord:
    """A request, from its arrival until its consumer is done with it. Times are of `time.monotonic()`.

    request: with the times of its stages (`RequestStateStats`). replica: where it ended.
    headers: of the client's request: `traceparent` and `tracestate` say which trace it belongs to, `x-request-id` what
        the client calls it.
    num_resumed: how often it went on in another engine process.
    text_began, text_ended: when text was made for the first and the last time. text_busy_s: how long that took in all.
    error: what its consumer met. ended: when it was done.
    trace_id: of its trace, in hexadecimal digits, once it has one.
    """

    request: Request
    headers: Mapping[str, str] = field(default_factory=dict)
    replica: int = 0
    num_resumed: int = 0
    text_began: float | None = None
    text_ended: float | None = None
    text_busy_s: float = 0.0
    error: JPagedError | None = None
    ended: float = 0.0
    trace_id: str | None = None

    @contextmanager
    def making_text(self) -> Iterator[None]:
        """Around the work that turns new tokens into text."""
        begun = time.monotonic()
        if self.text_began is None:
            self.text_began = begun
        yield
        self.text_ended = time.monotonic()
        self.text_busy_s += self.text_ended - begun

    def stages(self) -> dict[str, tuple[float, float]]:
        """When each stage that it has reached began and ended; one that was cut off ended with the request.

        queue: until it first ran. prefill: until its first token. decode: until its last. detokenize: in this process,
        from the first text to the last.
        """
        stats, found = self.request.stats, {}
        begins = (stats.arrival_time, stats.first_scheduled_time, stats.first_token_time)
        for name, begin, end in zip(
            ("queue", "prefill", "decode"), begins, (*begins[1:], stats.last_token_time), strict=True
        ):
            if begin is not None:
                found[name] = begin, max(begin, self.ended if end is None else end)
        if self.text_began is not None:
            found["detokenize"] = self.text_began, self.text_ended or self.ended
        return found

    def num_generated(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(member.output_token_ids) for member in self.request.group.members)

    def finish_reasons(self) -> list[str]:
        """Of its sequences; "abort" for those that had not ended."""
        return [member.finish_reason or "abort" for member in self.request.group.members]


class RequestObserver(Protocol):
    """Is told of requests that have ended. Called on the event loop, so it must be quick, and may not raise."""

    def ended(self, record: RequestRecord) -> None: ...

    def close(self) -> None:
        """No more requests come. What was told is written or sent."""
