"""Every error a user of jpaged can meet.

A message names the thing, the value it had and what to do about it. All types derive from `JPagedError`; those
that blame an argument also derive from `ValueError`, so callers that know nothing of jpaged still catch them.
"""

_SHOWN_CHARACTERS = 100


def shown(value: object) -> str:
    """A value's repr, cut short, so that a message stays readable whatever a caller passed."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python converts, or a class whose own repr fails
        text = f"something of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


class JPagedError(Exception):
    """Base class of jpaged's own errors."""


class InvalidParameterError(JPagedError, ValueError):
    """A parameter is of the wrong type, out of range, or contradicts another one."""


class UnsupportedParameterError(JPagedError, ValueError):
    """A parameter or feature that this version does not support; it is refused rather than ignored."""


class InvalidPromptError(JPagedError, ValueError):
    """A prompt that cannot be served: empty, too long, or with token ids outside the vocabulary."""


class UnsupportedModelError(JPagedError, ValueError):
    """The checkpoint's architecture, or a feature of its configuration, is not implemented."""


class CheckpointError(JPagedError):
    """A checkpoint is missing, truncated, corrupt, or holds a tensor of an unexpected name, shape or type."""


class ModelNotFoundError(CheckpointError, FileNotFoundError):
    """The model is neither a local directory nor obtainable from the hub."""


class OutOfMemoryError(JPagedError, MemoryError):
    """The device cannot hold the weights and the KV pool of even one sequence."""


class MalformedRowError(JPagedError, ValueError):
    """A row of an input file that cannot be scored; the message begins with the file and the line."""


class OutputError(JPagedError, OSError):
    """Results cannot be written: the disk is full, or the place cannot be written to. What was finished is kept."""


class MissingPackageError(JPagedError, ImportError):
    """A package that an optional part of jpaged needs is not installed; the message says how to install it."""


class EngineAsleepError(JPagedError, RuntimeError):
    """The engine gave its memory back (`sleep`), and serves nothing until `wake_up`."""


class EngineDeadError(JPagedError, RuntimeError):
    """The engine met an internal error and cannot go on; the original exception is its `__cause__`."""


def error_of(kind: str, message: str) -> JPagedError:
    """An error that another process reported, as an exception of this one.

    kind: the name of its type. A type that is not one of the above becomes an `EngineDeadError` that names it.
    """
    if kind in _TYPES:
        return _TYPES[kind](message)
    return EngineDeadError(f"{kind}: {message}")


_TYPES = {name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, JPagedError)}
