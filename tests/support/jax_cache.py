"""JAX's own persistent cache of programs, for a test that depends on what is in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextmanager
def jax_cache(directory: Path | None, **settings: Any) -> Iterator[None]:
    """JAX's cache is in this directory, or nowhere; afterwards it is where it was.

    Once a program of this process has been looked up, JAX keeps to the directory of then, whatever is set, until it is
    reset. settings: of JAX, by name.
    """
    settings = {"jax_compilation_cache_dir": None if directory is None else str(directory), **settings}
    before = {name: jax.config.values[name] for name in settings}
    try:
        _set(settings)
        yield
    finally:
        _set(before)


def _set(settings: dict[str, Any]) -> None:
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
