"""HTTPS: handshakes are counted, bounded in time and number, and do not hold up a server that drains."""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.serving.http_connection import limited_protocol
from jpaged.serving.limits import ServerLimits
from jpaged.serving.options import ServerOptions
from jpaged.serving.server import _Server
from jpaged.serving.tls_listener import TlsListener

HASTY_S = 0.4
BEGIN_OF_HELLO = b"\x16\x03\x01\x02\x00\x01"


async def echo(request: Request) -> Response:
    return Response(request.url.scheme.encode() + b" " + await request.body())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Paths of a key and a certificate for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return str(key), str(certificate)


@contextlib.contextmanager
def serving(certificate, header_timeout_s=60.0, most_connections=None, most_turned_away=None):
    """The port of a server as `serve` runs it, whose application echoes; a call that ends it, and its protocol."""
    limits = ServerLimits(header_timeout_s=header_timeout_s)
    protocol = limited_protocol(limits)
    protocol.most_connections = most_connections or protocol.most_connections
    protocol.most_turned_away = most_turned_away or protocol.most_turned_away
    key, cert = certificate
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    config = uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", log_config=None, ssl_keyfile=key, ssl_certfile=cert
    )
    engine = SimpleNamespace(num_unfinished=0)
    options = ServerOptions(ssl_keyfile=key, ssl_certfile=cert, shutdown_timeout_s=60.0)
    live = SimpleNamespace(close=lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]  # which the server closes
        server = _Server(config, engine, options, (), live, header_timeout_s)

        def run():
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve(sockets=[sock]))

        thread = threading.Thread(target=run)
        thread.start()

        def end():
            server.should_exit = True
            thread.join()

        try:
            yield port, end, protocol
        finally:
            end()


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def half_done(port):
    """A connection whose handshake does not get on."""
    sock = connected(port)
    sock.sendall(BEGIN_OF_HELLO)
    return sock


def shaken(port, certificate):
    """A connection with TLS. Raises OSError."""
    sock = connected(port)
    try:
        return ssl.create_default_context(cafile=certificate[1]).wrap_socket(sock, server_hostname="localhost")
    except BaseException:
        sock.close()
        raise


def everything(sock):
    return b"".join(iter(lambda: sock.recv(65536), b""))


def asked(port, certificate, body=b"body"):
    """The answer to a request."""
    with shaken(port, certificate) as sock:
        head = f"POST /echo HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        return everything(sock)


def ask_until(port, certificate, status):
    """Until a request gets this status."""
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            if asked(port, certificate).startswith(b"HTTP/1.1 " + status):
                return
        assert time.monotonic() < end
        time.sleep(0.02)


def is_accepted(port, certificate):
    try:
        shaken(port, certificate).close()
    except OSError:
        return False
    return True


def test_requests_are_served_with_tls(certificate):
    body = os.urandom(1 << 20)
    with serving(certificate) as (port, *_):
        assert asked(port, certificate, body).endswith(b"\r\n\r\nhttps " + body)


def test_half_done_handshakes_count_as_connections(certificate):
    with serving(certificate, most_connections=3, most_turned_away=2) as (port, *_):
        flood = [half_done(port) for _ in range(2)]
        ask_until(port, certificate, b"200")
        flood.append(half_done(port))
        ask_until(port, certificate, b"503")  # it makes the fourth
        flood += [half_done(port) for _ in range(2)]
        while is_accepted(port, certificate):  # five are all that may be open
            time.sleep(0.02)
        with half_done(port) as one_too_many, contextlib.suppress(ConnectionResetError):
            assert everything(one_too_many) == b""
        for one in flood:
            one.close()
        ask_until(port, certificate, b"200")


def test_handshakes_that_come_at_once_are_counted_one_by_one(certificate):
    most_seen = 0

    class Connection(asyncio.Protocol):
        handshakes: ClassVar[set[asyncio.Protocol]] = set()

        def has_room_for_handshake(self):
            nonlocal most_seen
            most_seen = max(most_seen, len(self.handshakes))
            return len(self.handshakes) < 5

    async def trial(sock):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate[1], certificate[0])
        listener = TlsListener(sock, tls, Connection, 60.0)
        reader, _ = await asyncio.open_connection(*sock.getsockname())  # it is accepted behind all others
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        num_begun = len(Connection.handshakes)
        listener.close()
        await listener.wait_closed()
        return num_begun, len(Connection.handshakes)

    with socket.create_server(("127.0.0.1", 0)) as sock, contextlib.ExitStack() as clients:
        for _ in range(20):
            clients.enter_context(connected(sock.getsockname()[1]))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(trial(sock)) == (5, 0)
    assert most_seen == 5


def test_a_handshake_that_does_not_end_is_cut_off_when_headers_would_be(certificate):
    with serving(certificate, header_timeout_s=HASTY_S, most_connections=1, most_turned_away=1) as (port, *_):
        begun = time.monotonic()
        with half_done(port) as slow:
            with contextlib.suppress(ConnectionResetError):
                everything(slow)
            assert HASTY_S * 0.9 < time.monotonic() - begun < 30
            ask_until(port, certificate, b"200")


def test_what_is_no_tls_is_cut_off_and_takes_no_place(certificate):
    with serving(certificate, most_connections=1, most_turned_away=1) as (port, *_):
        for _ in range(4):
            with connected(port) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    assert b"HTTP" not in everything(plain)
        ask_until(port, certificate, b"200")


def test_a_server_that_drains_waits_for_no_handshake(certificate):
    with serving(certificate) as (port, end, protocol):
        assert b" 200 " in asked(port, certificate)
        slow = [half_done(port) for _ in range(5)]
        deadline = time.monotonic() + 60
        while len(protocol.handshakes) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        begun = time.monotonic()
        end()
        assert time.monotonic() - begun < 10
        for one in slow:
            with one, contextlib.suppress(ConnectionResetError):
                assert everything(one) == b""


def test_a_lack_of_descriptors_delays_a_connection_and_loses_none(certificate, monkeypatch, caplog):
    class Short(socket.socket):
        failures = 2

        def accept(self):
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(socket, "create_server", lambda address: listening(Short(), address))
    with serving(certificate) as (port, *_):
        assert b" 200 " in asked(port, certificate)
    assert caplog.text.count("Too many open files") == 2


def listening(sock, address):
    sock.bind(address)
    sock.listen()
    return sock
