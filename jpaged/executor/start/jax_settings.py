"""JAX's own settings (`jax.config`), on which programs depend: the precision of products, 64-bit types, and many more.

Which of them change a program is JAX's business and differs between its versions; so all count but a few that cannot.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import jax

_PLACES = ("jax_compilation_cache_", "jax_persistent_cache_", "jax_platform", "jax_default_device")
_REPORTS = ("jax_log", "jax_debug_log", "jax_explain_", "jax_dump_ir_", "jax_traceback_filtering")
"""What no program depends on: where things are (the device is another matter), and what is told of them."""


def jax_settings() -> dict[str, Any]:
    """All settings as they are here and now, inside their context managers too."""
    values = {name: _value(name) for name in jax.config.values}
    return {name: value for name, value in values.items() if _is_plain(value) and name != "jax_default_device"}


def settings_of_programs() -> tuple[tuple[str, Any], ...]:
    """The settings that programs may depend on, by name."""
    return tuple(sorted(item for item in jax_settings().items() if not item[0].startswith(_PLACES + _REPORTS)))


def adopt(settings: dict[str, Any]) -> None:
    """Makes another process's settings this one's, before it opens its devices."""
    for name, value in settings.items():
        if _value(name) != value:
            jax.config.update(name, value)


@contextmanager
def settings_as(settings: dict[str, Any]) -> Iterator[None]:
    """Sets these JAX settings for this thread; those without a context manager for the process. Puts them back at the
    end."""
    with ExitStack() as stack:
        for name, value in settings.items():
            now = _value(name)
            if now == value:
                continue
            context = getattr(jax, name.removeprefix("jax_"), None)
            if context is not None:
                stack.enter_context(context(value))
            else:
                stack.callback(jax.config.update, name, now)
                jax.config.update(name, value)
        yield


def _value(name: str) -> Any:
    """Here and now. Those that a context manager may change are attributes too; others are among the values alone."""
    return getattr(jax.config, name, jax.config.values[name])


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | Enum)
