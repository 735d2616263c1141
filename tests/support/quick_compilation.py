"""Programs that are compiled with hardly any optimisation, for tests that run each of theirs a few times.

A conftest.py or a test module takes the fixture by its name:

    from tests.support.quick_compilation import quick_compilation as quick_compilation

To compile takes a third of the time then. The programs are several times slower: those of an engine that makes
hundreds of steps are better compiled as `tests/conftest.py` has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

_SETTING = "jax_disable_most_optimizations"


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
    """For all tests of a package or a module. On a GPU, whose kernels are what is tested there, nothing changes."""
    with _set_to(jax.default_backend() == "cpu"):
        yield


@pytest.fixture(scope="package", autouse=True)
def usual_compilation() -> Iterator[None]:
    """For a package or a module in one that compiles quickly."""
    with _set_to(False):
        yield


@contextmanager
def _set_to(value: bool) -> Iterator[None]:
    before = jax.config.values[_SETTING]
    jax.config.update(_SETTING, value)
    try:
        yield
    finally:
        jax.config.update(_SETTING, before)
