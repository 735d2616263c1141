"""Processes that wait to take the place of one that ends."""

import os
import socket
import subprocess
from pathlib import Path

from jpaged.host.devices import package_environment
from jpaged.processes import handover
from jpaged.processes.launch import python_command
from jpaged.processes.pulse import Pulse
from jpaged.processes.spare import TAKEN, Spare


def engine_process() -> Spare:
    return Spare(python_command("jpaged.processes.engine_process"), package_environment(os.environ))


def test_a_spare_engine_process_serves_with_the_sockets_that_it_is_given():
    ours, theirs = socket.socketpair()
    control, its_control = handover.socket_pair()
    process = engine_process().take([Pulse.create().fd, its_control.fileno(), theirs.fileno()])
    assert process is not None
    name = Path(f"/proc/{process.pid}/comm")
    while name.read_text().strip() != TAKEN:
        assert process.poll() is None
    theirs.close()
    its_control.close()
    ours.close()  # as a client that is gone before it says what to start
    assert process.wait(60) == 0
    control.close()


def test_a_spare_ends_with_its_channel_and_is_not_taken_once_it_has_ended():
    spare = engine_process()
    spare.end()
    assert spare.take([0]) is None
    other = Spare(["true"], os.environ)
    other._process.wait(60)
    assert other.take([0]) is None


def test_a_spare_whose_parent_closes_the_channel_ends():
    ours, theirs = handover.socket_pair()
    command = [*python_command("jpaged.processes.engine_process"), "--spare", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=package_environment(os.environ))
    theirs.close()
    ours.close()
    assert process.wait(60) == 0
