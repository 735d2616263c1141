"""More threads for the kernels' interpreter, and failures for the races that it only prints.

Each warpgroup that waits at a barrier holds one of XLA's threads. Of those there are as many as the machine has cores;
where that is two, none is left to run the warpgroup that the others wait for.
"""

import os
from collections.abc import Iterator

import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is None:
    os.environ.setdefault("PJRT_NPROC", "8")  # read when JAX makes its CPU client


@pytest.fixture(autouse=True)
def no_race(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fails a test in whose kernels the interpreter detected a race."""
    yield
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed
