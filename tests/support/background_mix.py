"""Responses in the background: requests of several kinds, and clients that poll, read twice and cancel them.

Each ends as the same request does that is waited for, whatever happens meanwhile.
"""

import asyncio
import random
from typing import Any

import httpx
import msgspec

from tests.support.request_mix import LOGPROB_TOLERANCE

RESPONSES = "/v1/responses"
HOW = ("polled", "read again", "cancelled early")
_ENDED = ("completed", "incomplete", "failed", "cancelled")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
_FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 31, "instructions": "Be brief."},
    {"seed": 32, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"seed": 33, "text": {"format": {"type": "json_schema", "name": "one", "schema": _SCHEMA}}},
    {"seed": 34, "top_p": 0.8, "stop": ["e s"]},
)


def background_mix(num_tokens: int) -> list[dict[str, Any]]:
    """Bodies, without `background`."""
    return [
        {"input": f"A story about snail {i}", "max_output_tokens": num_tokens} | fields
        for i, fields in enumerate(_FIELDS)
    ]


def ended_answer(response: dict[str, Any]) -> dict[str, Any]:
    """What of a response does not depend on when it was made."""
    parts = [part for item in response["output"] for part in item["content"]]
    return {
        "status": response["status"],
        "text": "".join(part["text"] for part in parts),
        "tokens": None if response["usage"] is None else response["usage"]["output_tokens"],
        "logprobs": [one["logprob"] for part in parts for one in part["logprobs"]],
    }


class BackgroundClient:
    """Asks for one response in the background. expected: `ended_answer` of one that was waited for.

    Methods raise RuntimeError for what is wrong.
    """

    def __init__(self, http: httpx.AsyncClient, body: dict[str, Any], expected: dict[str, Any]) -> None:
        self._http = http
        self._body = body | {"background": True}
        self._expected = expected
        self._draw = random.Random()

    async def ask(self, how: str) -> None:
        """how: one of `HOW`."""
        await {"polled": self._polled, "read again": self._read_again, "cancelled early": self._cancelled}[how]()

    async def _polled(self) -> None:
        begun = await self._call("POST", RESPONSES, json=self._body)
        self._check(await self._ended(begun["id"]))
        await self._forget(begun["id"])

    async def _read_again(self) -> None:
        most = self._draw.choice((1, 5, 20, 10_000))
        first = await self._events("POST", RESPONSES, most, json=self._body | {"stream": True})
        path = f"{RESPONSES}/{first[0]['response']['id']}"
        after = {"stream": "true", "starting_after": first[-1]["sequence_number"]}
        events = first + await self._events("GET", path, params=after)
        if [event["sequence_number"] for event in events] != list(range(len(events))):
            raise RuntimeError(f"events are missing: {[event['sequence_number'] for event in events]}")
        if await self._events("GET", path, params={"stream": "true"}) != events:
            raise RuntimeError("events that are read again differ")
        response = events[-1]["response"]
        self._check(response)
        said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        if said != self._expected["text"]:
            raise RuntimeError(f"events say {said!r}, not {self._expected['text']!r}")
        if await self._call("GET", path) != response:
            raise RuntimeError("the response differs from that of its last event")
        await self._forget(response["id"])

    async def _cancelled(self) -> None:
        begun = await self._call("POST", RESPONSES, json=self._body)
        await asyncio.sleep(self._draw.choice((0.0, 0.1, 0.5)))
        path = f"{RESPONSES}/{begun['id']}"
        response = await self._call("POST", f"{path}/cancel")
        answer = ended_answer(response)
        if answer["status"] != "cancelled":  # it was too late
            self._check(response)
        elif not self._expected["text"].startswith(answer["text"]):
            raise RuntimeError(f"{answer['text']!r} was cancelled, which does not begin {self._expected['text']!r}")
        if await self._call("GET", path) != response:
            raise RuntimeError("a response that has ended changes")
        await self._forget(begun["id"])

    async def _ended(self, response_id: str) -> dict[str, Any]:
        while (response := await self._call("GET", f"{RESPONSES}/{response_id}"))["status"] not in _ENDED:
            await asyncio.sleep(0.1)
        return response

    async def _forget(self, response_id: str) -> None:
        """Half of them stay until the server forgets them."""
        if self._draw.random() < 0.5:
            await self._call("DELETE", f"{RESPONSES}/{response_id}")
            gone = await self._http.get(f"{RESPONSES}/{response_id}")
            if gone.status_code != 404:
                raise RuntimeError(f"a response that was deleted is there: {gone.status_code} {gone.text}")

    def _check(self, response: dict[str, Any]) -> None:
        answer = ended_answer(response)
        values, right = answer.pop("logprobs"), dict(self._expected)
        wanted = right.pop("logprobs")
        if answer != right:
            raise RuntimeError(f"{answer}, not {right}; {response['error']}")
        if len(values) != len(wanted) or any(
            abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(values, wanted, strict=True)
        ):
            raise RuntimeError(f"log-probabilities {values}, not {wanted}")

    async def _call(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        answer = await self._http.request(method, path, **fields)
        if answer.status_code != 200:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    async def _events(self, method: str, path: str, most: int = 1 << 30, **fields: Any) -> list[dict[str, Any]]:
        """The first events of a stream, whose connection is closed then."""
        events: list[dict[str, Any]] = []
        async with self._http.stream(method, path, **fields) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{method} {path}: {answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(msgspec.json.decode(line[6:]))
                    if len(events) >= most:
                        break
        return events
