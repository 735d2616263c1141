"""The sockets a server listens on: taken from nobody who answers, and left to whoever took their place."""

import os
import socket
import stat

import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.serving.listeners import Listeners
from jpaged.serving.options import ServerOptions


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the kernel takes paths of some 100 bytes only
    return "server.sock"


def left_by_a_killed_server(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)


def connects(path):
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


def test_a_socket_of_a_killed_server_is_replaced_and_removed_at_the_end(path):
    left_by_a_killed_server(path)
    listeners = Listeners.on_path(path)
    assert connects(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    listeners.close()
    assert not os.path.exists(path)
    listeners.close()


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_only_those_may_connect_whom_the_mode_names(path, mode):
    before = os.umask(0o022)
    try:
        listeners = Listeners.on_path(path, mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    listeners.close()


@pytest.mark.parametrize("backlog", [16, 0])
def test_a_socket_that_a_server_answers_on_is_left_to_it(path, backlog):
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(path)
        busy.listen(backlog)
        waiting.connect(path)  # a backlog of none is full with it
        with pytest.raises(OSError, match=rf"cannot listen on {path}: a server answers there; choose another path"):
            Listeners.on_path(path)
        assert stat.S_ISSOCK(os.stat(path).st_mode)


def test_a_server_that_loads_its_model_already_holds_its_socket(path):
    listeners = Listeners.on_path(path)
    with pytest.raises(OSError, match="a server answers there"):
        Listeners.on_path(path)
    listeners.close()


def test_a_server_that_ends_does_not_remove_the_socket_of_its_successor(path):
    old = Listeners.on_path(path)
    for sock in old.sockets:  # as when it drains
        sock.close()
    new = Listeners.on_path(path)
    old.close()
    assert connects(path)
    new.close()
    assert not os.path.exists(path)


def test_a_file_that_is_no_socket_is_not_touched(path):
    with open(path, "w") as file:
        file.write("precious")
    with pytest.raises(OSError, match=f"cannot listen on {path}: Address already in use"):
        Listeners.on_path(path)
    with open(path) as file:
        assert file.read() == "precious"


def test_what_is_wrong_with_a_path_is_said():
    with pytest.raises(OSError, match=r"cannot listen on a+: AF_UNIX path too long"):
        Listeners.on_path("a" * 200)
    with pytest.raises(InvalidParameterError, match="uds is empty"):
        ServerOptions(uds="")


@pytest.mark.parametrize("num_others", [1, 3])
@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_port_is_one_servers_alone_from_before_it_loads_its_model(num_processes, num_others):
    """However many processes of a server share it."""
    listeners = Listeners.on_port("127.0.0.1", 0, num_processes)
    ports = {sock.getsockname()[1] for sock in listeners.sockets}
    assert len(listeners.sockets) == num_processes
    assert len(ports) == 1
    with pytest.raises(OSError, match=r"cannot listen on 127.0.0.1 port \d+: Address already in use; choose another"):
        Listeners.on_port("127.0.0.1", ports.pop(), num_others)
    listeners.close()


def test_a_port_can_be_taken_again_though_connections_of_the_last_server_linger():
    with Listeners.on_port("127.0.0.1", 0).sockets[0] as sock:
        port = sock.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            sock.accept()[0].close()  # the side that closes first keeps the port for a while
            assert client.recv(1) == b""
    Listeners.on_port("127.0.0.1", port).close()


def test_each_process_gets_some_of_the_connections_to_their_port():
    listeners = Listeners.on_port("127.0.0.1", 0, 3)
    clients = [socket.create_connection(listeners.sockets[0].getsockname()) for _ in range(90)]
    accepted = [_accept_all(sock) for sock in listeners.sockets]
    assert sum(map(len, accepted)) == 90
    assert all(accepted)  # one of them is passed over with a probability of 1e-15
    for sock in (*clients, *(one for some in accepted for one in some)):
        sock.close()
    listeners.close()


def _accept_all(listener):
    listener.setblocking(False)
    found = []
    while True:
        try:
            found.append(listener.accept()[0])
        except BlockingIOError:
            return found
