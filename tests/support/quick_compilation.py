"""Programs that are compiled with hardly any optimisation, for tests that run each of theirs a few times.

The conftest.py of a package takes the fixture by its name:

    from tests.support.quick_compilation import quick_compilation as quick_compilation

A test module takes `quick_compilation_of_module` instead: the other ends with the package, so it would hold for the
modules that follow. To compile takes a third of the time then. The programs are several times slower: those of an
engine that makes hundreds of steps are better compiled as `tests/conftest.py` has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

_SETTING = "jax_disable_most_optimizations"


@pytest.fixture(scope="package", autouse=True)
def quick_compilation() -> Iterator[None]:
    """For all tests of a package. On a GPU, whose kernels are what is tested there, nothing changes."""
    with _set_to(jax.default_backend() == "cpu"):
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_compilation_of_module() -> Iterator[None]:
    """For all tests of a module."""
    with _set_to(jax.default_backend() == "cpu"):
        yield


@pytest.fixture(scope="package", autouse=True)
def usual_compilation() -> Iterator[None]:
    """For a package in one that compiles quickly."""
    with _set_to(False):
        yield


@contextmanager
def _set_to(value: bool) -> Iterator[None]:
    before = jax.config.values[_SETTING]
    _change_to(value)
    try:
        yield
    finally:
        _change_to(before)


def _change_to(value: bool) -> None:
    """Forgets the programs in memory, too, if it is a change: JAX would take them whatever the setting is."""
    if jax.config.values[_SETTING] != value:
        jax.config.update(_SETTING, value)
        jax.clear_caches()
