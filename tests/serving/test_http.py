"""Bodies that are no JSON; `unless_disconnected`: work for a client that may go away."""

import asyncio
import weakref

import msgspec
import pytest

from jpaged.host.garbage import without_collections
from jpaged.serving.errors import ApiError
from jpaged.serving.http import ClientDisconnected, guarded, unless_disconnected
from jpaged.serving.openai_routes import _parsed


class _Client:
    """What a server's `receive` says of one. It is there until `leave`."""

    def __init__(self) -> None:
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, str]:
        await self._left.wait()
        return {"type": "http.disconnect"}


class _Work:
    """Work that never ends by itself. ended: whether it was cancelled, and has cleaned up."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), False

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.ended = True


def test_work_for_a_client_that_leaves_is_cancelled_and_has_ended_when_the_caller_hears_of_it():
    async def run():
        client, work = _Client(), _Work()
        task = asyncio.ensure_future(unless_disconnected(client.receive, work.run()))
        await work.begun.wait()
        client.leave()
        with pytest.raises(ClientDisconnected):
            await task
        assert work.ended

    asyncio.run(run())


def test_a_task_goes_on_after_its_client_has_left():
    async def run():
        client = _Client()
        client.leave()
        with pytest.raises(ClientDisconnected):
            await unless_disconnected(client.receive, _Work().run())
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(run())


def test_a_task_that_is_cancelled_stays_cancelled_though_its_client_leaves_at_once():
    async def run():
        client, work = _Client(), _Work()
        task = asyncio.ensure_future(unless_disconnected(client.receive, work.run()))
        await work.begun.wait()
        client.leave()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.ended

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, KeyError("k")])
def test_what_the_work_returns_or_raises_comes_through_and_nobody_watches_the_client_any_more(error):
    async def work() -> str:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return "done"

    async def run():
        client = _Client()
        if error is None:
            assert await unless_disconnected(client.receive, work()) == "done"
        else:
            with pytest.raises(KeyError):
                await unless_disconnected(client.receive, work())
        client.leave()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [b'{"prompt":"\\ud800","n":1}', b'{"prompt":"\\ud800"}', b'"\\\\\\uDBFF"', b'{"prompt":"\\udc00 text"}'],
    ids=repr,
)
def test_a_lone_surrogate_is_called_one_wherever_it_stands(body):
    with pytest.raises(ApiError, match="a string holds a lone surrogate, which is no text; remove it"):
        _parsed(body, msgspec.json.Decoder())


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"ud800',
        b'{"prompt":"\\ud83d',
        b'{"prompt":"\\ud83d\\ude',
        b'{"prompt":"\\\\ud800"',
        b'{"prompt":"\\\\\\\\ud800"',
    ],
    ids=repr,
)
def test_a_body_that_ends_too_soon_is_called_truncated(body):
    with pytest.raises(ApiError, match="not JSON: Input data was truncated"):
        _parsed(body, msgspec.json.Decoder())


def test_another_fault_behind_an_escaped_backslash_is_called_what_it_is():
    with pytest.raises(ApiError, match="malformed"):
        _parsed(b'{"a":"\\\\ud800"]', msgspec.json.Decoder())


def test_a_request_that_is_refused_is_freed_at_once():
    """Not by a collection, of which a large body makes a long one."""

    class Body:
        pass

    bodies = []

    async def refuse(request):
        body = Body()
        bodies.append(weakref.ref(body))
        raise ApiError(400, "Not this one.")

    with without_collections():
        assert asyncio.run(guarded(refuse)(None)).status_code == 400
        assert bodies[0]() is None
