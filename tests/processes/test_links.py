"""A client's end of the socket to an engine process."""

import asyncio
import socket

import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.processes.links import AsyncLink
from jpaged.processes.wire import MAX_FRAME_BYTES, Failed, FromEngine, Shutdown, frame

TOO_LONG = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
NO_MESSAGE = (1).to_bytes(4, "little") + b"\xc1"


@pytest.mark.parametrize("bad", [TOO_LONG, NO_MESSAGE], ids=["too long", "no message"])
def test_a_bad_frame_ends_the_connection_after_the_messages_before_it(bad: bytes) -> None:
    async def scene() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        came: list[FromEngine] = []
        ends: list[EngineDeadError | None] = []
        link = AsyncLink(0, ours)
        await link.connect(lambda _, message: came.append(message), lambda _, error: ends.append(error))
        good = Failed("EngineDeadError", "last words")
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(theirs, frame(good) + bad + frame(good))
        assert await asyncio.wait_for(loop.sock_recv(theirs, 1), timeout=60) == b"", "the link is closed"
        assert came == [good]
        assert isinstance(ends[0], EngineDeadError)
        assert ends[1:] == [None]
        theirs.close()

    asyncio.run(scene())


@pytest.mark.parametrize("is_connecting", [False, True])
def test_a_link_that_is_closed_before_it_is_connected_stays_closed(is_connecting: bool) -> None:
    """As when an engine process is started again while a new API process connects to it."""

    async def scene() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        link = AsyncLink(0, ours)
        connecting = asyncio.ensure_future(link.connect(lambda *_: None, lambda *_: None))
        if is_connecting:
            await asyncio.sleep(0)
        link.close()
        await connecting
        link.send(Shutdown())
        loop = asyncio.get_running_loop()
        assert await asyncio.wait_for(loop.sock_recv(theirs, 1), timeout=60) == b""

    asyncio.run(scene())
