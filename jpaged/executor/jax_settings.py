"""Settings of JAX that a program around the engine has made for code of its own, and that would stop the engine: a
transfer guard (`jax.transfer_guard`), and `jax.disable_jit`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

_NOTHING: AbstractContextManager[object] = nullcontext()
_UNGUARDED = (None, "allow")


def default_jax_settings() -> AbstractContextManager[object]:
    """A context in which transfers are allowed, and compiled programs run. To enter JAX's own takes some microseconds,
    so they are entered only where something is set."""
    config: Any = jax.config
    to_device, to_host = config.jax_transfer_guard_host_to_device, config.jax_transfer_guard_device_to_host
    is_set = to_device not in _UNGUARDED or to_host not in _UNGUARDED or config.jax_disable_jit
    return _as_by_default() if is_set else _NOTHING


@contextmanager
def _as_by_default() -> Iterator[None]:
    with jax.transfer_guard("allow"), jax.disable_jit(False):
        yield
