"""Responses that are kept in memory, to be asked for again, for `previous_response_id` and for references to items."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from jpaged.serving.dialects.event_record import EventRecord
from jpaged.serving.errors import ApiError

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20
"""Of conversations that are kept for `previous_response_id`; the oldest give way."""


@dataclass(frozen=True)
class _Kept:
    """messages: up to the response and with it; None if it was not finished, so that nothing can go on from it."""

    messages: list[dict[str, Any]] | None
    response: dict[str, Any]
    record: EventRecord | None
    num_bytes: int


class ResponseStore:
    """The last responses and the conversations behind them, in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0

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
        if num_bytes > MAX_STORED_BYTES:
            return
        if record is not None and num_bytes + record.num_bytes > MAX_STORED_BYTES:
            record = None
        num_bytes += 0 if record is None else record.num_bytes
        self._kept[response["id"]] = _Kept(messages, response, record, num_bytes)
        self._num_bytes += num_bytes
        while len(self._kept) > MAX_STORED or self._num_bytes > MAX_STORED_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

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
