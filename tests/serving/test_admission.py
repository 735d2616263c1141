"""Room in the queue and in a client's share: taken when it is checked, and always given back."""

import asyncio
import os

import pytest
from starlette.requests import Request

from jpaged.serving.admission import Admission, ClientCounts, client_of
from jpaged.serving.errors import ApiError, OverloadedError
from jpaged.serving.limits import ServerLimits


class Queue:
    """The part of an engine that counts what waits."""

    def __init__(self):
        self.num_queued = self.num_queued_tokens = 0

    def reserve(self, num_requests, num_tokens=0):
        self.num_queued += num_requests
        self.num_queued_tokens += num_tokens


def test_requests_that_arrive_together_do_not_pass_the_limit():
    """All are checked before the first of them gets to the queue, as when their prompts are tokenized."""
    queue = Queue()
    admission = Admission(queue, ServerLimits(max_queued_requests=10, max_queued_tokens=100))

    async def request(num_prompts):
        try:
            ticket = admission.enter(b"", num_prompts)
        except OverloadedError:
            return None
        await asyncio.sleep(0.01)
        try:
            admission.take_tokens(ticket, 7 * num_prompts)
        except OverloadedError:
            ticket.close()
            return None
        return ticket

    async def run():
        return await asyncio.gather(*(request(2) for _ in range(1000)))

    tickets = [ticket for ticket in asyncio.run(run()) if ticket is not None]
    assert len(tickets) == 5
    assert (queue.num_queued, queue.num_queued_tokens) == (10, 70)
    for ticket in tickets:
        ticket.opened(7)  # the engine counts it itself from here on
        ticket.close()
        ticket.close()
    assert (queue.num_queued, queue.num_queued_tokens) == (0, 0)


def test_tokens_that_do_not_fit_give_everything_back_when_the_ticket_is_closed():
    queue = Queue()
    admission = Admission(queue, ServerLimits(max_queued_tokens=100))
    first = admission.enter(b"", 1)
    admission.take_tokens(first, 99)
    second = admission.enter(b"", 1)
    with pytest.raises(OverloadedError, match="99 tokens wait already"):
        admission.take_tokens(second, 2)
    second.close()
    assert (queue.num_queued, queue.num_queued_tokens) == (1, 99)


def test_one_client_cannot_take_the_place_of_others():
    admission = Admission(Queue(), ServerLimits(max_requests_per_client=3))
    held = [admission.enter(b"a", 2), admission.enter(b"a", 1)]
    with pytest.raises(ApiError, match="3 requests of this client wait or run already, of at most 3") as refused:
        admission.enter(b"a", 1)
    assert refused.value.status == 429
    assert refused.value.headers["retry-after"]
    admission.enter(b"b", 3)
    for ticket in held:
        ticket.opened(1)  # it runs, and still counts
    with pytest.raises(ApiError):
        admission.enter(b"a", 1)
    held[0].close()
    admission.enter(b"a", 2)


def test_a_clients_share_is_one_over_all_api_processes():
    fd = ClientCounts.shared(2)
    one, other = ClientCounts(2, 0, fd), ClientCounts(2, 1, fd)
    os.close(fd)
    assert one.add(b"a", 3) == 3
    assert other.add(b"a", 2) == 5
    assert other.add(b"b", 1) == 1
    assert one.add(b"a", -3) == 2


def test_clients_are_told_apart_by_key_or_by_address():
    def request(host, key=None):
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        client = None if host is None else (host, 1)
        return Request({"type": "http", "headers": headers, "client": client})

    assert client_of(request("10.0.0.1", "k"), ["k"]) == client_of(request("10.0.0.2", "k"), ["k"])
    assert client_of(request("10.0.0.1", "k"), ["k", "l"]) != client_of(request("10.0.0.1", "l"), ["k", "l"])
    assert client_of(request("10.0.0.1", "invented"), ()) == client_of(request("10.0.0.1"), ())
    assert client_of(request("10.0.0.1"), ()) != client_of(request("10.0.0.2"), ())
    assert client_of(request("2001:db8::1"), ()) == client_of(request("2001:db8::ffff:2"), ())
    assert client_of(request("2001:db8::1"), ()) != client_of(request("2001:db8:0:1::1"), ())
    assert client_of(request(None), ()) == b""
    assert client_of(request("fe80::1%eth0"), ()) == client_of(request("fe80::1"), ())
