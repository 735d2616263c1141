"""What a helper process is started with."""

import json
import os
import socket
from pathlib import Path

import pytest

import jpaged
from jpaged.text.helper_process import start_helper

REPORT = """
import json, os, socket, sys
import jpaged
sock = socket.socket(fileno=int(sys.argv[1]))
sock.sendall(json.dumps([jpaged.__file__, os.environ["OPENBLAS_NUM_THREADS"], sys.path[0]]).encode())
"""


@pytest.mark.parametrize("path", [None, "/elsewhere"])
def test_a_helper_runs_the_package_of_its_parent_whatever_the_directory(tmp_path, monkeypatch, path):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "report.py").write_text(REPORT)
    (tmp_path / "jpaged.py").write_text("raise AssertionError")  # what a directory holds is not imported
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path / "helpers"), path])))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start_helper("report", str(theirs.fileno()), fds=[theirs.fileno()])
        theirs.close()
        with ours.makefile("rb") as stream:
            where, threads, first = json.loads(stream.read())
    process.wait()
    assert where == jpaged.__file__
    assert threads == "1"  # 64 of them would exceed the memory of the process that checks constraints
    assert Path(first) == Path(jpaged.__file__).parents[1]
