"""Every error a user of jpaged can meet.

A message names the thing, the value it had and what to do about it. All types derive from `JPagedError`; those
that blame an argument also derive from `ValueError`, so callers that know nothing of jpaged still catch them.
"""

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN_CHARACTERS = 100


def shown(value: object) -> str:
    """A value's repr, cut short, so that a message stays readable whatever a caller passed."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python converts, or a class whose own repr fails
        text = f"something of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def suggestion(name: str, names: Iterable[str]) -> str:
    """ "did you mean ...?" with the name that is most like a misspelt one; "" where none is."""
    close = get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]}?" if close else ""


class JPagedError(Exception):
    """Base class of jpaged's own errors."""


class InvalidParameterError(JPagedError, ValueError):
    """A parameter is of the wrong type, out of range, or contradicts another one."""


class UnknownParameterError(InvalidParameterError, TypeError):
    """A parameter that does not exist; the message names the one that was meant, or says why there is none."""


class UnsupportedParameterError(JPagedError, ValueError):
    """A parameter or feature that this version does not support; it is refused rather than ignored."""


class InvalidPromptError(JPagedError, ValueError):
    """A prompt that cannot be served: empty, too long, or with token ids outside the vocabulary."""


class PromptTooLongError(InvalidPromptError):
    """A prompt that leaves no room for an answer within what the model can take."""


class UnsupportedModelError(JPagedError, ValueError):
    """The checkpoint's architecture, or a feature of its configuration, is not implemented."""


class CheckpointError(JPagedError):
    """A checkpoint is missing, truncated, corrupt, or holds a tensor of an unexpected name, shape or type."""


class ModelNotFoundError(CheckpointError, FileNotFoundError):
    """The model is neither a local directory nor obtainable from the hub."""


class OutOfMemoryError(JPagedError, MemoryError):
    """The device cannot hold the weights and the KV pool of even one sequence."""


class NoDeviceError(JPagedError, RuntimeError):
    """The device that was asked for is not there; the message says what is missing."""


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


class NonFiniteLogitsError(JPagedError, ArithmeticError):
    """The model's logits for a request are not finite (NaN or infinite), so no token can be taken from them. Mostly the
    checkpoint has such weights, or its values exceed what the dtype holds.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message or NOT_FINITE)


NOT_FINITE = (
    "The model's logits are not finite (NaN or infinite), so there is no next token. Check the checkpoint's weights; "
    "with dtype='float16' try 'bfloat16' or 'float32'."
)


class EngineRestartingError(JPagedError, RuntimeError):
    """The engine process has ended and is being started again; requests wait for it meanwhile."""


class SuspectRequestError(JPagedError, RuntimeError):
    """A request that was running each time the engine process ended, and is not tried again."""


class SlowConsumerError(JPagedError, RuntimeError):
    """A request's outputs were not taken while more came than is kept of them; the request was aborted."""


class Reworded:
    """A context whose errors of some kinds are raised again, of the same type and in other words.

    kinds: which. A subclass says what becomes of a message.

    It is no `@contextmanager`: since Python 3.12 a generator that raises another error keeps the first one, and with it
    what its frames hold, in a cycle until a collection, which takes 10 ms and more for large requests.
    """

    kinds: tuple[type[JPagedError], ...]

    def reword(self, said: str) -> str:
        raise NotImplementedError

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, self.kinds):
            raise type(error)(self.reword(str(error))) from error


def error_of(kind: str, message: str) -> JPagedError:
    """An error that another process reported, as an exception of this one.

    kind: the name of its type. A type that is not one of the above becomes an `EngineDeadError` that names it.
    """
    if kind in _TYPES:
        return _TYPES[kind](message)
    return EngineDeadError(f"{kind}: {message}")


_TYPES = {name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, JPagedError)}
