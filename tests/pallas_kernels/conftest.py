"""Triton's interpreter where there is no GPU; programs that compile quickly; more threads for Pallas' interpreter, and
failures for the races that it only prints.

Each warpgroup that waits at a barrier holds one of XLA's threads. Of those there are as many as the machine has cores;
where that is two, none is left to run the warpgroup that the others wait for.
"""

import os
from collections.abc import Iterator

import pytest

from jpaged.pallas_kernels.devices import default_device
from jpaged.pallas_kernels.registry import missing
from tests.support.quick_compilation import quick_compilation as quick_compilation

if missing("hopper") is None:
    os.environ.setdefault("PJRT_NPROC", "8")  # read when JAX makes its CPU client

if missing("triton") is None and default_device().platform == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton's kernels are defined


@pytest.fixture(autouse=True)
def no_race(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fails a test in whose kernels the interpreter detected a race."""
    yield
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed
