"""HTTP as it comes over the wire, in front of an application that only echoes."""

import asyncio
import contextlib
import json
import re
import resource
import socket
import threading
import time

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jpaged.serving import http_connection
from jpaged.serving.http_connection import limited_protocol
from jpaged.serving.limits import ServerLimits

TICK_S = 0.05
HASTY_S = 0.4
PATIENT_S = 2.0
"""For clients that should not be cut off, though a busy machine may keep them waiting."""


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def header(request: Request) -> Response:
    await request.body()
    return Response(dict(request.scope["headers"]).get(b"x-late", b"no"))


async def slow(request: Request) -> Response:
    async def ticks():
        for _ in range(20):
            yield b"tick\n"
            await asyncio.sleep(TICK_S)

    return StreamingResponse(ticks())


async def stopped(request: Request) -> Response:
    """Keeps the server's loop from going on until GO is set."""
    GO.wait(60)
    return Response()


GO = threading.Event()


async def endless(request: Request) -> Response:
    async def one_tick():
        yield b"tick\n"
        await asyncio.Event().wait()

    return StreamingResponse(one_tick())


async def parts(request: Request) -> Response:
    async def letters():
        for letter in b"parts":
            yield bytes([letter])
            await asyncio.sleep(0)

    return StreamingResponse(letters())


async def flood(request: Request) -> Response:
    """Writes without end; FLOOD knows how much, and whether somebody noticed that the client was cut off."""

    async def parts():
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)  # lets it be cancelled
                FLOOD["bytes"] += 65536
        finally:
            FLOOD["ended"].set()

    FLOOD.update(bytes=0, ended=threading.Event())
    return StreamingResponse(parts())


FLOOD = {}


def serving(header_timeout_s, send_timeout_s=60.0, most_connections=None, most_turned_away=None):
    """The port of a server that gives headers, and clients who should read, so much time."""
    routes = [
        Route("/echo", echo, methods=["GET", "POST"]),
        Route("/header", header, methods=["POST"]),
        Route("/slow", slow),
        Route("/stopped", stopped),
        Route("/endless", endless),
        Route("/parts", parts),
        Route("/flood", flood),
    ]
    limits = ServerLimits(header_timeout_s=header_timeout_s, send_timeout_s=send_timeout_s, max_header_bytes=1000)
    protocol = limited_protocol(limits)
    protocol.most_connections = most_connections or protocol.most_connections
    protocol.most_turned_away = most_turned_away or protocol.most_turned_away
    config = uvicorn.Config(Starlette(routes=routes), http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        yield sock.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port():
    yield from serving(60.0)


@pytest.fixture(scope="module")
def hasty_port():
    yield from serving(HASTY_S, HASTY_S)


@pytest.fixture
def patient_port():
    yield from serving(60.0, PATIENT_S)


def talk(port, *parts):
    """All that comes back until the server closes the connection; parts are sent as they are, numbers waited for."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        for part in parts:
            if isinstance(part, float):
                time.sleep(part)
            else:
                sock.sendall(part)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def statuses(answer):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


def request(path, body=b"", headers=b""):
    head = b"%s %s HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % (b"POST" if body else b"GET", path, len(body))
    return head + headers + b"\r\n" + body


CLOSE = b"connection: close\r\n"
OFFER = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nx: \x00\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\na",
        b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /echo HTTP/1.1\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n",
        b"GET /echo HTTP/1.0\r\nhost: a\r\nhost: a\r\n\r\n",
    ],
    ids=repr,
)
def test_what_is_not_http_is_a_400_in_the_form_of_all_errors(port, wrong):
    answer = talk(port, wrong)
    assert statuses(answer) == [400]
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"identity, chunked"])
def test_a_transfer_coding_that_is_not_understood_is_a_501_and_the_body_not_read(port, coding):
    head = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: %s\r\n\r\n"
    answer = talk(port, head % coding + b"3\r\nabc\r\n0\r\n\r\n")
    assert statuses(answer) == [501]
    assert b"only chunked is understood" in answer
    assert statuses(talk(port, head % b"Chunked" + b"3\r\nabc\r\n0\r\n\r\n")) == [200]


def test_an_offer_of_another_protocol_is_passed_over_and_the_body_read(port):
    """As Java's client makes it, whole and in pieces, and on a connection that goes on."""
    first = request(b"/echo", b"first", OFFER)
    last = request(b"/echo", b"last", CLOSE)
    for parts in ([first + last], [first[:30], 0.02, first[30:-2], 0.02, first[-2:], last]):
        answer = talk(port, *parts)
        assert statuses(answer) == [200, 200]
        assert b"first" in answer
        assert answer.endswith(b"last")


def test_an_offer_of_a_websocket_is_passed_over(port):
    offer = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a\r\nsec-websocket-version: 13\r\n"
    assert statuses(talk(port, request(b"/echo", headers=offer) + request(b"/echo", headers=CLOSE))) == [200, 200]


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
@pytest.mark.parametrize("offer", [b"", b"connection: keep-alive\r\n"])
def test_an_answer_without_a_length_ends_with_the_connection_for_clients_that_know_no_chunks(port, version, offer):
    ask = b"GET %s HTTP/" + version + b"\r\n" + offer + b"\r\n"
    head, _, body = talk(port, ask % b"/parts").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"parts"
    head, _, body = talk(port, ask % b"/echo").partition(b"\r\n\r\n")
    assert b"content-length: 0" in head
    assert body == b""


def test_headers_are_bounded_whether_they_end_or_not(port):
    many = b"".join(b"x%d: %s\r\n" % (i, b"a" * 90) for i in range(12))
    assert statuses(talk(port, request(b"/echo", headers=many))) == [431]
    assert statuses(talk(port, request(b"/echo"), 0.05, b"GET /echo HTTP/1.1\r\nx: " + b"a" * 1000)) == [200, 431]
    assert statuses(talk(port, request(b"/echo", b"b" * 5000, CLOSE))) == [200]  # a body is no header


@pytest.mark.parametrize(
    ("begins", "endless"),
    [(b"0\r\n", b"x: y\r\n" * 120), (b"0\r\nx: ", b"a" * 700), (b"5;", b"e" * 700)],
    ids=["trailers", "a trailer", "an extension"],
)
def test_what_stands_around_chunks_is_bounded_like_headers(port, begins, endless):
    start = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert statuses(talk(port, start + b"5\r\nabcde\r\n", 0.05, begins + endless, 0.05, endless)) == [431]
    small = b"1;e=1\r\nb\r\n" * 700  # more around the body than in it, and more than headers may have
    assert statuses(talk(port, start.replace(b"host", CLOSE + b"host") + small + b"0\r\n\r\n")) == [200]


def test_what_comes_behind_a_body_is_no_header(port):
    start = b"POST /header HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + CLOSE + b"\r\n"
    answer = talk(port, start + b"1\r\nb\r\n", 0.05, b"0\r\nx-late: yes\r\n\r\n")
    assert statuses(answer) == [200]
    assert b"yes" not in answer


def test_headers_that_come_beside_an_answer_are_bounded_too(port):
    """What is too much ends the connection, and puts nothing into the answer that has begun."""
    many = b"GET /echo HTTP/1.1\r\nx: " + b"a" * 700
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(request(b"/endless"))
        answer = b""
        while b"tick\n\r\n" not in answer:
            answer += sock.recv(65536)
        sock.sendall(many)
        sock.sendall(many)
        answer += b"".join(iter(lambda: sock.recv(65536), b""))
    assert statuses(answer) == [200]
    assert answer.endswith(b"tick\n\r\n")


def test_headers_beside_an_answer_have_their_time_from_its_end(hasty_port):
    """The answer takes longer than headers may, and is not cut off."""
    assert 20 * TICK_S > 2 * HASTY_S
    answer = talk(hasty_port, request(b"/slow"), 0.1, b"GET /echo HT")
    assert statuses(answer) == [200, 408]
    assert answer.count(b"tick\n") == 20


def test_who_says_nothing_is_not_answered(hasty_port):
    assert talk(hasty_port) == b""
    assert talk(hasty_port, b"\r\n\r\n") == b""


def test_a_client_that_takes_nothing_is_cut_off_and_little_is_kept_for_it(hasty_port):
    with socket.create_connection(("127.0.0.1", hasty_port), timeout=60) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.sendall(request(b"/flood"))
        assert sock.recv(1)
        assert FLOOD["ended"].wait(60)
    assert FLOOD["bytes"] < 16 << 20  # what the kernel takes, and one part


def test_a_client_that_takes_a_little_at_a_time_is_not_cut_off(patient_port):
    """In all it takes longer than it may take nothing."""
    with socket.create_connection(("127.0.0.1", patient_port), timeout=60) as sock:
        sock.sendall(request(b"/flood"))
        sock.recv(1)
        for _ in range(6):
            time.sleep(PATIENT_S / 5)
            for _ in range(100):
                assert sock.recv(65536)
        assert not FLOOD["ended"].is_set()
    assert FLOOD["ended"].wait(60)


def test_a_server_that_drains_does_not_wait_long_for_a_client_that_takes_nothing(monkeypatch):
    monkeypatch.setattr(http_connection, "_DRAINING_SEND_S", 0.3)
    server = serving(60.0)
    with socket.create_connection(("127.0.0.1", next(server)), timeout=60) as sock:
        sock.sendall(request(b"/flood"))
        assert sock.recv(1)
        before = -1
        while FLOOD["bytes"] != before:  # until it stands still
            before = FLOOD["bytes"]
            time.sleep(0.2)
        next(server, None)
        assert FLOOD["ended"].is_set()


def test_connections_leave_descriptors_for_other_things_and_one_too_many_is_told_so():
    for port in serving(60.0, most_connections=2):
        idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2)]
        for one in idle:  # they are accepted
            one.sendall(request(b"/echo"))
            assert statuses(one.recv(65536)) == [200]
        answer = talk(port)
        assert statuses(answer) == [503]
        assert b"2 connections are open already" in answer
        idle.pop().close()
        wait_for_room(port)
        idle.pop().close()


def wait_for_room(port):
    """Until the server has noticed that a connection was closed."""
    answer = b""
    while statuses(answer) != [200]:
        with contextlib.suppress(ConnectionError):
            answer = talk(port, request(b"/echo", headers=CLOSE))


def connected(port, *parts):
    """A connection over which so much has been sent."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    for part in parts:
        sock.sendall(part)
    return sock


def everything(sock):
    return b"".join(iter(lambda: sock.recv(65536), b""))


def send_until_cut_off(sock, data, most):
    """Sends so often, or until the server has closed the connection for good."""
    for _ in range(most):
        try:
            sock.sendall(data)
        except ConnectionError:
            return
        time.sleep(0.01)
    pytest.fail("the server has not cut it off")


def test_who_is_turned_away_reads_the_503_though_a_request_was_sent_before_the_server_looked():
    for port in serving(60.0, most_connections=1):
        GO.clear()
        with connected(port, request(b"/stopped")) as first:
            many = [connected(port, request(b"/echo", b"b" * 50_000)) for _ in range(20)]
            GO.set()
            assert statuses(first.recv(65536)) == [200]
            for one in many:
                with one:
                    assert statuses(everything(one)) == [503]


def test_who_is_turned_away_takes_no_place_and_is_cut_off_for_too_many_bytes(monkeypatch):
    monkeypatch.setattr(http_connection, "_TURNED_AWAY_S", 3600.0)
    for port in serving(60.0, most_connections=1):
        with connected(port, request(b"/echo")) as idle:
            assert statuses(idle.recv(65536)) == [200]
            away = connected(port)
            assert statuses(everything(away)) == [503]
        wait_for_room(port)
        with away:
            send_until_cut_off(away, b"a" * 65536, 1000)


def test_who_is_turned_away_is_cut_off_in_time(monkeypatch):
    monkeypatch.setattr(http_connection, "_TURNED_AWAY_S", 0.05)
    for port in serving(60.0, most_connections=1):
        with connected(port, request(b"/echo")) as idle, connected(port) as away:
            assert statuses(idle.recv(65536)) == [200]
            assert statuses(everything(away)) == [503]
            send_until_cut_off(away, b"a", 6000)


def test_few_who_are_turned_away_are_waited_for_at_once(monkeypatch):
    monkeypatch.setattr(http_connection, "_TURNED_AWAY_S", 3600.0)
    for port in serving(60.0, most_connections=1, most_turned_away=1):
        with connected(port, request(b"/echo")) as idle:
            assert statuses(idle.recv(65536)) == [200]
            with connected(port) as waited_for, connected(port) as closed:
                assert statuses(everything(waited_for)) == [503]
                assert statuses(everything(closed)) == [503]
                send_until_cut_off(closed, b"a", 6000)
                waited_for.sendall(b"a")
                waited_for.sendall(b"a")


@pytest.mark.parametrize(("descriptors", "connections"), [(1024, 768), (100, 50), (resource.RLIM_INFINITY, None)])
def test_a_process_may_have_as_many_connections_as_leave_descriptors(monkeypatch, descriptors, connections):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert limited_protocol(ServerLimits()).most_connections == connections
