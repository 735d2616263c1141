"""Engine processes that break where a test says so."""

import os

import pytest

from jpaged.processes import launch


@pytest.fixture
def fragile_processes(monkeypatch):
    """Engine processes are those of `tests.support.fragile_engine`, which variables tell where to break."""

    def command(module, *arguments):
        return real(module.replace("jpaged.processes.engine_process", "tests.support.fragile_engine"), *arguments)

    real = launch.python_command
    monkeypatch.setattr(launch, "python_command", command)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
