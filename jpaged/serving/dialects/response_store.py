"""Responses that are kept in memory, for `previous_response_id` and for references to their items."""

from collections import OrderedDict
from typing import Any

import msgspec

from jpaged.serving.errors import ApiError

MAX_STORED = 1024
MAX_STORED_BYTES = 64 << 20
"""Of conversations that are kept for `previous_response_id`; the oldest give way."""


class ResponseStore:
    """The conversations behind the last responses, in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, response_id: str) -> list[dict[str, Any]]:
        """The messages up to a response, and it.

        Raises:
            ApiError: it is not kept, or not any more.
        """
        found = self._kept.get(response_id)
        if found is None:
            raise ApiError(
                404,
                f"previous_response_id: {response_id[:80]!r} is not kept here: the last {MAX_STORED} are, until"
                " the server ends. Send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end(response_id)
        return found[0]

    def item(self, item_id: str) -> dict[str, Any]:
        """An item of one of the responses. Raises ApiError if it is not kept."""
        response_id = f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"
        _, items, _ = self._kept.get(response_id, ((), (), 0))
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

    def put(self, response_id: str, messages: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
        """Keeps a conversation, and the items of its last answer."""
        num_bytes = len(msgspec.json.encode([messages, items]))
        if num_bytes > MAX_STORED_BYTES:
            return
        self._kept[response_id] = (messages, items, num_bytes)
        self._num_bytes += num_bytes
        while len(self._kept) > MAX_STORED or self._num_bytes > MAX_STORED_BYTES:
            _, (_, _, freed) = self._kept.popitem(last=False)
            self._num_bytes -= freed
