"""Which implementation of an op runs. This is the one place that picks.

    op               a contract (`<op>/api.py`) and its implementations, one a backend at most
    backend          a way to write kernels, and the devices it is chosen on; backends stand in order of preference
    implementation   a function, and `unsupported`, which says why it refuses arguments

    "hopper"  <op>/hopper.py     Pallas Mosaic GPU kernels, chosen on compute capability 9.x; JAX >= 0.11
    "triton"  <op>/triton.py     Triton kernels, chosen on `TRITON_CAPABILITIES`, and on 9.x for what Mosaic kernels do
                                 not take of quantized weights, keys and values; jax-triton, Python 3.12
    "cudnn"   <op>/cudnn.py      cuDNN's attention, for contiguous keys and values; only where it is forced
    "xla"     <op>/reference.py  plain XLA: every op, any device, any arguments

Without a forced backend an op takes the first one that is chosen on the device (by `runs_on`, or by the op's `also`),
can be built here, has an implementation of the op, finds the arguments worth its while and supports them. A forced
backend is taken on any device; if it cannot do the call, it raises an error that says why. Several may be named, the
preferred one first, separated by commas: the op takes the first that can do the call and finds it worth its while.

To add a backend to the package, add its line to `_BACKENDS` and a file named like it to each op's folder. The file has
a function named after each op it implements, which takes what the function in `reference.py` takes, and `unsupported`.
Where an op has many arrays, they come as a tuple with names (`Operands`, `Destination`, ...); many options come as one
hashable object (`Features`, `Options`). The annotations in `reference.py` name these types and import them from where
they are defined.
It is imported when its backend is first considered, so no other machine needs what it imports.

To add a backend from outside, call `register_backend` and `register_implementation`:

    register_backend("mine", runs_on=lambda device: device.platform == "gpu")
    register_implementation("decode_attention", "mine", my_decode_attention, unsupported=lambda q, kv_pool: None)
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common import native_calls
from jpaged.pallas_kernels.devices import Device

REFERENCE = "xla"
"""The backend that has every op. It is always the last."""

TRITON_CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (10, 0), (10, 3), (12, 0), (12, 1))
"""Compute capabilities of the GPUs that Triton kernels are chosen on: Ampere, Ada and Blackwell."""

_INSTALL = 'install "jpaged[cuda13]" or "jpaged[cuda12]" on Python 3.12 or newer'


def _nothing(*arguments: Any) -> None:
    return None


def _always(*arguments: Any) -> bool:
    return True


@dataclass(frozen=True)
class Backend:
    """A way to write kernels.

    Attributes:
        name: by which a caller forces it.
        runs_on: whether it is chosen by default on a device.
        missing: why this installation cannot build its kernels for any device; None if it can.
        refuses: why its kernels cannot run on a device, even if they are forced; None if they can.
        file: of its implementations in the ops' folders; None for a backend from outside, whose implementations are
            registered one by one.
    """

    name: str
    runs_on: Callable[[Device], bool]
    missing: Callable[[], str | None] = _nothing
    refuses: Callable[[Device], str | None] = _nothing
    file: str | None = None


@dataclass(frozen=True)
class Implementation:
    """One way to do an op.

    Attributes:
        backend: the name of its backend.
        run: does the op for arguments that its `api.py` has checked.
        unsupported: why it refuses arguments (dtypes, shapes); None if it takes them. Called with what the op passes to
            `Op.pick`. An implementation that some of its backend's devices lack asks `devices.default_device()` too.
        worthwhile: whether it is taken for these arguments unless it is forced; called with the same.
    """

    backend: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = _nothing
    worthwhile: Callable[..., bool] = _always


def _jax_version() -> tuple[int, ...]:
    """JAX's major and minor version."""
    return tuple(int(part) for part in jax.__version__.split(".")[:2])


@cache
def _mosaic_missing() -> str | None:
    """Why this JAX cannot build Mosaic GPU kernels; None if it can."""
    if _jax_version() < (0, 11):
        return f"the Mosaic kernels need JAX >= 0.11, this is {jax.__version__}"
    try:
        from jax.experimental.pallas import mosaic_gpu  # noqa: F401
    except ImportError as error:
        return f"Pallas Mosaic GPU cannot be imported: {error}"
    return None


@cache
def _triton_missing() -> str | None:
    """Why this installation cannot build Triton kernels; None if it can."""
    if sys.version_info < (3, 12):
        return f"jax-triton needs Python 3.12 or newer, this is {sys.version_info[0]}.{sys.version_info[1]}; {_INSTALL}"
    if _jax_version() != (0, 11):
        return f"jax-triton 0.4 calls kernels under JAX 0.11, this is {jax.__version__}; {_INSTALL}"
    absent = [name for name in ("jax_triton", "triton") if find_spec(name) is None]
    return f"{' and '.join(absent)} cannot be imported; {_INSTALL}" if absent else None


def is_hopper(device: Device, *arguments: Any) -> bool:
    """Whether a device is a GPU of compute capability 9.x; whatever an op's arguments are, for `Op.also`."""
    return device.capability is not None and device.capability[0] == 9


def _not_hopper(device: Device) -> str | None:
    if is_hopper(device):
        return None
    return f"its kernels run on GPUs of compute capability 9.x (Hopper), this is {device}"


def _nowhere(device: Device) -> bool:
    return False


@cache
def _cudnn_missing() -> str | None:
    """Why this JAX cannot call cuDNN's attention; None if it can."""
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention  # noqa: F401
    except ImportError as error:
        return (
            f"this JAX ({jax.__version__}) does not have its call of cuDNN's attention where 0.10 and 0.11 do: {error}"
        )
    return None


def _not_for_cudnn(device: Device) -> str | None:
    if device.platform == "gpu" and device.capability is not None and device.capability >= (8, 0):
        return None
    return f"cuDNN's attention runs on NVIDIA GPUs of compute capability 8.0 (Ampere) or newer, this is {device}"


def _runs_triton(device: Device) -> bool:
    return device.capability in TRITON_CAPABILITIES


def _not_for_triton(device: Device) -> str | None:
    if device.capability is not None and device.capability >= TRITON_CAPABILITIES[0]:
        return None
    if device.platform == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "on a CPU its kernels run in Triton's interpreter only, with TRITON_INTERPRET=1 in the environment"
    return f"its kernels run on NVIDIA GPUs of compute capability 8.0 (Ampere) or newer, this is {device}"


_BACKENDS = [
    Backend("hopper", is_hopper, _mosaic_missing, _not_hopper, file="hopper"),
    Backend("triton", _runs_triton, _triton_missing, _not_for_triton, file="triton"),
    Backend("cudnn", _nowhere, _cudnn_missing, _not_for_cudnn, file="cudnn"),
    Backend(REFERENCE, _always, file="reference"),
]
"""In order of preference."""

_ALIASES = {"mosaic": "hopper"}

_OPS: dict[str, "Op"] = {}
_REGISTERED: dict[tuple[str, str], Implementation] = {}
"""From outside, by names of op and backend."""


class Op:
    """An op, as its `api.py` sees it: what picks among its implementations.

    Args:
        name: the op's, and that of the function which does it in its implementations' files.
        folder: the package that these files are in.
        also: backends that are chosen for this op on more devices than for others, and on which; called with the device
            and what the op passes to `pick`.
    """

    def __init__(self, name: str, folder: str, also: Mapping[str, Callable[..., bool]] | None = None) -> None:
        self.name, self.folder, self.also = name, folder, also or {}
        _OPS[name] = self

    def pick(self, backend: str | None, *arguments: Any) -> Implementation:
        """The implementation for one call.

        Args:
            backend: None to choose by device and arguments; the name of the backend that the caller forces; or several
                names separated by commas, the preferred one first, to choose among them by arguments.
            arguments: what `Implementation.unsupported` and `worthwhile` of this op are called with: arrays or
                ShapeDtypeStructs, of which only shapes and dtypes are looked at.
        Raises:
            ValueError: unknown backend, or a forced one that cannot do the call.
        """
        if backend is not None and "," in backend:
            return self._first([_backend(canonical(name)) for name in backend.split(",")], *arguments)
        if backend is not None:
            name = canonical(backend)
            if (reason := self.unsupported(name, *arguments)) is not None:
                raise ValueError(f"backend={backend!r} cannot do this {self.name}: {reason}")
            return self._implementation(_backend(name))
        device = devices.default_device()
        return self._first([one for one in _BACKENDS if self._chosen(one, device, *arguments)], *arguments)

    def _chosen(self, backend: Backend, device: Device, *arguments: Any) -> bool:
        """Whether a backend is chosen on a device for this call."""
        also = self.also.get(backend.name)
        return backend.runs_on(device) or (also is not None and also(device, *arguments))

    def _first(self, candidates: Sequence[Backend], *arguments: Any) -> Implementation:
        """That of the first candidate which can do the call and finds it worth its while.

        Raises:
            ValueError: none of them.
        """
        usable = (candidate for candidate in candidates if self.unsupported(candidate.name, *arguments) is None)
        found = next((one for one in map(self._implementation, usable) if one.worthwhile(*arguments)), None)
        if found is None:
            names = ", ".join(candidate.name for candidate in candidates)
            raise ValueError(f"no backend of {names} can do this {self.name}; add {REFERENCE!r}, which always can")
        return found

    def unsupported(self, backend: str, *arguments: Any) -> str | None:
        """Why a backend cannot do the op for these arguments, whatever the device; None if it can."""
        found = _backend(canonical(backend))
        if not self._may_have(found):
            return "there is no such kernel"
        if (reason := found.missing()) is not None:
            return reason
        return self._implementation(found).unsupported(*arguments) if self._has(found) else "there is no such kernel"

    def may_have(self, backend: str) -> bool:
        """Whether a backend has an implementation of the op, or a file that may have one.

        Raises:
            ValueError: there is no such backend.
        """
        return self._may_have(_backend(canonical(backend)))

    def _may_have(self, backend: Backend) -> bool:
        """Whether there is an implementation, or a file that may have one; imports nothing of the backend's."""
        if (self.name, backend.name) in _REGISTERED:
            return True
        return backend.file is not None and find_spec(f"{self.folder}.{backend.file}") is not None

    def _has(self, backend: Backend) -> bool:
        """Whether there is an implementation, of a backend that may have one and can be built."""
        if (self.name, backend.name) in _REGISTERED:
            return True
        return hasattr(import_module(f"{self.folder}.{backend.file}"), self.name)

    def _implementation(self, backend: Backend) -> Implementation:
        """That of a backend which has one."""
        if (registered := _REGISTERED.get((self.name, backend.name))) is not None:
            return registered
        module = import_module(f"{self.folder}.{backend.file}")
        unsupported, worthwhile = getattr(module, "unsupported", _nothing), getattr(module, "worthwhile", _always)
        return Implementation(backend.name, getattr(module, self.name), unsupported, worthwhile)


def backends() -> tuple[str, ...]:
    """The names of all backends, in the order in which they are preferred."""
    return tuple(backend.name for backend in _BACKENDS)


def canonical(backend: str) -> str:
    """A backend's name, from that or an alias of it.

    Raises:
        ValueError: there is no such backend.
    """
    name = _ALIASES.get(backend, backend)
    if name not in backends():
        raise ValueError(f"backend must be None or one of {', '.join(backends())}, got {backend!r}")
    return name


def is_reference(backend: str | None) -> bool:
    """Whether this names the backend that has every op and no kernels.

    Raises:
        ValueError: there is no such backend.
    """
    return backend is not None and canonical(backend) == REFERENCE


def or_reference(backend: str | None) -> str | None:
    """The `backend` of ops that an engine does not force. Where it forces one of the package's own, that one where it
    can do the call and finds it worth its while, and else the reference. None, to choose by device, where it forces
    nothing, or a backend from outside, which may have a few ops only.

    Raises:
        ValueError: there is no such backend.
    """
    if backend is None or _backend(canonical(backend)).file is None:
        return None
    return REFERENCE if is_reference(backend) else f"{canonical(backend)},{REFERENCE}"


def kernels_here(backend: str | None = None) -> tuple[str, ...]:
    """The backends with kernels that are chosen by default on JAX's default device, in order of preference.

    backend: the one that the caller forces, of which alone is asked; None asks of all.
    Raises:
        ValueError: there is no such backend.
    """
    asked = backends() if backend is None else (canonical(backend),)
    return tuple(name for name in asked if name != REFERENCE and runs_here(name))


def has_registered() -> bool:
    """Whether there is a backend from outside the package."""
    return any(backend.file is None for backend in _BACKENDS)


def missing(backend: str) -> str | None:
    """Why this installation cannot build a backend's kernels for any device; None if it can."""
    return _backend(canonical(backend)).missing()


def refuses_here(backend: str) -> str | None:
    """Why a backend's kernels cannot run on JAX's default device, even if they are forced; None if they can."""
    found = _backend(canonical(backend))
    return found.missing() or found.refuses(devices.default_device())


def lost_here() -> str | None:
    """What this installation loses on JAX's default device, and how to get it: the kernels that would be chosen there
    but cannot be built. None where nothing is lost."""
    device = devices.default_device()
    reasons = {one.name: one.missing() for one in _BACKENDS if one.runs_on(device)}
    lost = [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]
    if not lost or any(reason is None for name, reason in reasons.items() if name != REFERENCE):
        return None
    return (
        f"No kernels are used on this {device}: it runs plain XLA, whose attention gathers each sequence's whole"
        f" context in every step. What is missing: {'; '.join(lost)}."
    )


def slower_calls_here(backend: str | None) -> str | None:
    """Why jaxlib launches Triton's kernels on JAX's default device, which makes small steps slower. None where XLA
    launches them, no Triton kernel runs, or JPAGED_TRITON_CALLS says who shall launch them.

    backend: the forced one; None: chosen by device.
    """
    if devices.default_device().platform != "gpu" or (backend or preferred_here()) != "triton":
        return None
    if native_calls.asked_for() is not None or (reason := native_calls.why_not_default()) is None:
        return None
    return (
        f"jaxlib launches Triton's kernels, so small steps take longer: {reason}. {native_calls.VARIABLE}=ffi silences"
        " this."
    )


def compilers() -> tuple[str, ...]:
    """Names and versions of the packages beside JAX that kernels are compiled by, as far as they are installed, and
    whether Triton's kernels are called natively.

    Raises:
        ValueError: JPAGED_TRITON_CALLS is neither ffi nor native.
    """
    found = ["native calls"] if native_calls.wanted() else []
    for package in ("jax-triton", "triton"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return tuple(found)


def preferred_here() -> str:
    """The backend that is asked first on JAX's default device; ops that it lacks go to the next ones."""
    device = devices.default_device()
    return next(one.name for one in _BACKENDS if one.runs_on(device) and one.missing() is None)


def runs_here(backend: str) -> bool:
    """Whether a backend is chosen by default on JAX's default device."""
    return _backend(canonical(backend)).runs_on(devices.default_device())


def _backend(name: str) -> Backend:
    return next(backend for backend in _BACKENDS if backend.name == name)


def register_backend(
    name: str,
    *,
    runs_on: Callable[[Device], bool],
    missing: Callable[[], str | None] = _nothing,
    before: str = REFERENCE,
) -> None:
    """Adds a backend, for which implementations can be registered then.

    Programs that are traced already keep what they have: register before the first call.

    Args:
        name: by which a caller forces it.
        runs_on: whether it is chosen by default on a device; it may be forced on others.
        missing: why this installation cannot build its kernels for any device; None if it can.
        before: the backend that it is preferred to, where both are chosen on a device; by default, "xla".
    Raises:
        ValueError: there is a backend of this name, or none called `before`.
    """
    if name in backends() or name in _ALIASES:
        raise ValueError(f"there is a backend {name!r} already")
    position = backends().index(canonical(before))
    _BACKENDS.insert(position, Backend(name, runs_on, missing))


def unregister_backend(name: str) -> None:
    """Removes a backend that was registered, and its implementations.

    Raises:
        ValueError: there is no such backend, or it is one of the package's own.
    """
    _BACKENDS.remove(_backend(_from_outside(name)))
    for key in [key for key in _REGISTERED if key[1] == name]:
        del _REGISTERED[key]


def register_implementation(
    op: str,
    backend: str,
    run: Callable[..., Any],
    *,
    unsupported: Callable[..., str | None] = _nothing,
    worthwhile: Callable[..., bool] = _always,
) -> None:
    """Adds a registered backend's implementation of an op.

    Args:
        op: name of the op, such as "decode_attention".
        backend: name that `register_backend` was called with.
        run: takes and gives what the op's function in `<op>/reference.py` does. Arguments are checked; it is called
            while the op is traced.
        unsupported, worthwhile: see `Implementation`.
    Raises:
        ValueError: there is no such op or backend, the backend is one of the package's own, or it has an implementation
            of the op.
    """
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
    name = _from_outside(backend)
    if (op, name) in _REGISTERED:
        raise ValueError(f"{name!r} has an implementation of {op} already")
    _REGISTERED[op, name] = Implementation(name, run, unsupported, worthwhile)


def _from_outside(backend: str) -> str:
    """Its name. Raises ValueError unless it is a backend that was registered."""
    name = canonical(backend)
    if _backend(name).file is not None:
        raise ValueError(f"{name!r} is one of the package's own backends")
    return name
