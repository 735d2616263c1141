"""Responses that are kept in memory, to be asked for again, for `previous_response_id` and for references to items.

    | conversations and answers of those that run | their events | those that have ended, with their events |
    0                                                                                         `--max-response-bytes`

Responses that run in the background hold memory, too (`Holding`). When one of them needs more than is left, the oldest
responses that have ended are dropped, then the oldest events of the running response that has most of them. If that is
not enough, the response that needs more fails.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from jpaged.serving.dialects.event_record import EventRecord
from jpaged.serving.errors import ApiError, OverloadedError
from jpaged.serving.limits import RETRY_AFTER_S, ServerLimits

MAX_STORED = 1024
_LEAST_SHRUNK = 64 << 10
"""At least so many bytes of events are dropped at once."""


@dataclass(frozen=True)
class _Kept:
    """messages: up to the response and with it; None if it was not finished, so that nothing can go on from it."""

    messages: list[dict[str, Any]] | None
    response: dict[str, Any]
    record: EventRecord | None
    num_bytes: int


class Holding:
    """The memory of a response that runs: its conversation, and its answer so far.

    record: of its events; None without.

    Attributes:
        num_bytes, num_event_bytes: as the store last counted them; of conversation and answer, and of events.
    """

    def __init__(self, store: "ResponseStore", record: EventRecord | None) -> None:
        self.record = record
        self.num_bytes = 0
        self.num_event_bytes = 0
        self._store = store

    def grow_to(self, num_bytes: int) -> None:
        """Says how many bytes it holds, apart from its events. If this raises, it holds none.

        Raises:
            OverloadedError: others leave no room.
            ApiError: 413, it is larger than the store.
        """
        self._store.make_room(self, num_bytes)

    def release(self) -> None:
        """It runs no more. May be called again."""
        self._store.release(self)


class ResponseStore:
    """The last responses and the conversations behind them, in memory.

    max_bytes: of kept and running responses together.
    """

    def __init__(self, max_bytes: int = ServerLimits.max_response_bytes) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0  # of those
        self._holdings: set[Holding] = set()
        self._num_running = 0

    def hold(self, num_bytes: int, record: EventRecord | None) -> Holding:
        """Room for a response that begins to run. Raises as `Holding.grow_to`."""
        if num_bytes > self._max_bytes:
            raise self._too_large(num_bytes)
        if self._num_running + num_bytes > self._max_bytes:
            raise self._full()
        holding = Holding(self, record)
        self._holdings.add(holding)
        self.make_room(holding, num_bytes)
        return holding

    def make_room(self, holding: Holding, num_bytes: int) -> None:
        """See `Holding.grow_to`."""
        if num_bytes > self._max_bytes:
            self.release(holding)
            raise self._too_large(num_bytes)
        self._count(holding, num_bytes)
        self._drop_oldest()
        while (excess := self._num_running - self._max_bytes) > 0:
            most = max(self._holdings, key=lambda one: one.num_event_bytes)
            if most.record is None or not most.num_event_bytes:
                error = self._full()
                self.release(holding)  # at once: others that want room before this run has ended shall not fail, too
                raise error
            most.record.drop(max(excess, _LEAST_SHRUNK))
            self._count(most, most.num_bytes)

    def release(self, holding: Holding) -> None:
        """See `Holding.release`."""
        if holding in self._holdings:
            self._holdings.remove(holding)
            self._num_running -= holding.num_bytes + holding.num_event_bytes

    def _count(self, holding: Holding, num_bytes: int) -> None:
        num_event_bytes = 0 if holding.record is None else holding.record.num_bytes
        self._num_running += num_bytes + num_event_bytes - holding.num_bytes - holding.num_event_bytes
        holding.num_bytes, holding.num_event_bytes = num_bytes, num_event_bytes

    def _too_large(self, num_bytes: int) -> ApiError:
        return ApiError(
            413,
            f"The response and its conversation take {num_bytes} bytes, and responses that run in the background"
            f" may take {self._max_bytes} (--max-response-bytes). Send less, or ask without background.",
            code="response_too_large",
        )

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"Responses that run in the background hold {self._num_running} bytes, of at most {self._max_bytes}"
            " (--max-response-bytes); try again later.",
            RETRY_AFTER_S,
        )

    def _drop_oldest(self) -> None:
        while self._kept and (len(self._kept) > MAX_STORED or self._num_bytes + self._num_running > self._max_bytes):
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str) -> list[dict[str, Any]]:
        """The messages up to a response, and it.

        Raises:
            ApiError: it is not kept, or not any more, or was not finished.
        """
        if not response_id.startswith("resp_"):
            raise ApiError(
                400,
                f"previous_response_id must begin with resp_, got {response_id[:80]!r}.",
                param="previous_response_id",
            )
        found = self._kept.get(response_id)
        if found is None:
            raise ApiError(
                404,
                f"previous_response_id: {response_id[:80]!r} is not kept here: the last {MAX_STORED} are, until"
                " the server ends. Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if found.messages is None:
            raise ApiError(
                400,
                f"previous_response_id: {response_id[:80]!r} was not finished, its status is"
                f" {found.response['status']}; nothing can go on from it.",
                param="previous_response_id",
            )
        self._kept.move_to_end(response_id)
        return found.messages

    def item(self, item_id: str) -> dict[str, Any]:
        """An item of one of the responses. Raises ApiError if it is not kept."""
        response_id = f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"
        kept = self._kept.get(response_id)
        items = [] if kept is None else kept.response["output"]
        found = next((item for item in items if item["id"] == item_id), None)
        if found is None:
            raise ApiError(
                404,
                f"input: there is no item {item_id[:80]!r} here: those of the last {MAX_STORED} responses are kept,"
                ' until the server ends. Send the item itself; clients do with "store": false.',
                param="input",
                code="item_not_found",
            )
        return found

    def response(self, response_id: str) -> dict[str, Any]:
        """A response as it was answered. Raises ApiError if it is not kept, or not any more."""
        return self._get(response_id).response

    def record(self, response_id: str) -> EventRecord | None:
        """The events of a response; None if they were not recorded. Raises ApiError if it is not kept."""
        return self._get(response_id).record

    def remove(self, response_id: str) -> None:
        """Forgets a response and its conversation. Raises ApiError if it is not kept."""
        kept = self._kept.pop(response_id, None)
        if kept is None:
            raise _not_found(response_id)
        self._num_bytes -= kept.num_bytes

    def put(
        self, messages: list[dict[str, Any]] | None, response: dict[str, Any], record: EventRecord | None = None
    ) -> None:
        """Keeps a response, the messages up to it and with it, and its events, unless these are too many."""
        num_bytes = len(msgspec.json.encode([messages, response]))
        room = self._max_bytes - self._num_running
        if num_bytes > room:
            return
        if record is not None and num_bytes + record.num_bytes > room:
            record = None
        num_bytes += 0 if record is None else record.num_bytes
        self._kept[response["id"]] = _Kept(messages, response, record, num_bytes)
        self._num_bytes += num_bytes
        self._drop_oldest()

    def _get(self, response_id: str) -> _Kept:
        kept = self._kept.get(response_id)
        if kept is None:
            raise _not_found(response_id)
        return kept


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {response_id[:80]!r} not found: the last {MAX_STORED} are kept, until the server ends,"
        ' but for those of requests with "store": false.',
        param="response_id",
        code="response_not_found",
    )
