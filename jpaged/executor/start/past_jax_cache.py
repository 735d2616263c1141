"""Compiles past JAX's own persistent cache, in one thread, while other threads go on using it.

XLA's CPU client writes a program that it has itself read back without its functions. So what JAX's cache answers on a
CPU can never be kept by `ExecutableCache`, and every later start would trace and lower it again. JAX decides once in a
process whether its cache is used, so there is no setting to leave it out for one program. Instead, the thread's
programs get keys that no file has (JAX's hook for additions to a key), and none of them takes long enough to be kept (a
setting that each thread has for itself).
"""

import math
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import jax

_addition = threading.local()


@contextmanager
def past_jax_cache() -> Iterator[None]:
    """What this thread compiles is neither looked up in JAX's cache nor put there.

    A version of JAX that lacks what this needs uses its cache as always.
    """
    least_kept_s = _prepared()
    if least_kept_s is None:
        yield
        return
    _addition.value = secrets.token_hex(16)
    try:
        with least_kept_s(math.inf):
            yield
    finally:
        del _addition.value


def calls_python(lowered: jax.stages.Lowered) -> bool:
    """Whether a program calls Python, as interpreted kernels do. `ExecutableCache` cannot keep such a program; JAX's
    cache can, from JAX 0.11 on.
    """
    lowering = getattr(lowered, "_lowering", None)
    return bool(getattr(lowering, "compile_args", {}).get("host_callbacks"))


@cache
def _prepared() -> Callable[[float], AbstractContextManager[object]] | None:
    """Has JAX ask each thread for its addition to a key, beside what its hook says already. Returns the setting of how
    long a program must take to be kept.
    """
    try:
        from jax._src import cache_key
        from jax._src.config import persistent_cache_min_compile_time_secs

        usual = cache_key.custom_hook
    except (ImportError, AttributeError):
        return None
    cache_key.custom_hook = lambda: usual() + getattr(_addition, "value", "")
    return persistent_cache_min_compile_time_secs
