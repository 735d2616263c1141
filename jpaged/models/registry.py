"""The model families that there are, by the architecture that a config.json names.

A family from outside this package becomes known in one of three ways:

    register("MyForCausalLM", MyFamily())          In this process only.
    JPAGED_MODELS=my_models,/path/to/family.py     An environment variable, which the processes that jpaged starts
                                                   inherit: replicas, the server's engines, helpers that compile,
                                                   workers that score. It names modules and files that call `register`.
                                                   They are imported when a family is first asked for.
    [project.entry-points."jpaged.models"]         An installed package, in every process and on every host that has it.
    MyForCausalLM = "my_models:FAMILY"             It is imported when a config.json names the architecture.
"""

import hashlib
import importlib.util
import os
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from jpaged.api.errors import InvalidParameterError, UnsupportedModelError, shown
from jpaged.models.family import Family

MODULES_VARIABLE = "JPAGED_MODELS"
ENTRY_POINT_GROUP = "jpaged.models"


class About(NamedTuple):
    """What `jpaged models` and docs/models.md say of a family.

    name: of the family. models: those that people know. features: what its layers have that a Llama's have not.
    """

    name: str
    models: str
    features: str


_families: dict[str, Family[Any]] = {}
_abouts: dict[str, About] = {}
_imported: set[str] = set()
_lock = threading.RLock()


def register(architecture: str, family: Family[Any], about: About | None = None) -> None:
    """Makes a family known to this process, in place of the one that had this architecture, if any.

    architecture: as config.json's "architectures" names it, for example "LlamaForCausalLM".
    about: for people; architectures of one family have the same.

    Raises:
        InvalidParameterError: the name is no string, or the family lacks part of the contract.
    """
    if not isinstance(architecture, str) or not architecture:
        raise InvalidParameterError(f"architecture must be a name, got {shown(architecture)}.")
    lacking = [name for name in _CONTRACT if not hasattr(family, name)]
    if lacking or isinstance(family, type):
        what = f"lacks {', '.join(lacking)}" if lacking else "is a class; register an object of it"
        raise InvalidParameterError(f"The family of {architecture} {what}; see jpaged.models.Family.")
    with _lock:
        _families[architecture] = family
        _abouts[architecture] = about or About(architecture, "", "")


def family_of(architecture: str) -> Family[Any]:
    """The family that runs an architecture.

    Raises:
        UnsupportedModelError: none does.
        InvalidParameterError: a module that should register one cannot be imported, or an installed package's entry
            point gives none.
    """
    family = _find(architecture)
    if family is None:
        raise _unsupported(architecture)
    return family


def architecture_of(config: Mapping[str, Any]) -> str:
    """Which of the architectures that a config.json names is supported; its model_type stands in for missing ones.

    Raises: as `family_of`.
    """
    _import_named_modules()
    named = config.get("architectures")
    if not named:
        return _architecture_by_type(config.get("model_type"))
    broken: list[InvalidParameterError] = []
    for architecture in named if isinstance(named, list | tuple) else [named]:
        if isinstance(architecture, str) and _runs(architecture, broken):
            return architecture
    if broken:
        raise broken[0]
    raise _unsupported(named)


def supported_architectures() -> tuple[str, ...]:
    """All of them, those of installed packages included."""
    _import_named_modules()
    return tuple(dict.fromkeys([*_families, *entry_points(group=ENTRY_POINT_GROUP).names]))


def described_architectures() -> tuple[tuple[About, tuple[str, ...]], ...]:
    """What there is to say of each family, and its architectures, in the order of the families' names; those of
    installed packages are by their architectures' names.
    """
    found: dict[About, list[str]] = {}
    for architecture in supported_architectures():
        found.setdefault(_abouts.get(architecture, About(architecture, "", "")), []).append(architecture)
    rows = sorted(found.items(), key=lambda row: row[0].name.lower())
    return tuple((about, tuple(architectures)) for about, architectures in rows)


def source_digest(*objects: object) -> str:
    """Names the sources of these objects' classes that are not part of jpaged, for caches of what was compiled of them.

    The source of a class is its file, or all Python files of its package. A class that was typed into an interpreter
    has none, and gets a name that never comes again.
    """
    digest = hashlib.sha256()
    for name in sorted({type(thing).__module__ for thing in objects}):
        package = name.partition(".")[0]
        if package == __package__.partition(".")[0]:
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return secrets.token_hex()
        root = getattr(sys.modules.get(package), "__path__", None)
        files = [Path(file)] if root is None else [path for folder in root for path in Path(folder).rglob("*.py")]
        for path in sorted(files):
            digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


_CONTRACT = ("model_type", "base_prefix", "derived_tensors", "read_config", "module", "tensors")


def _find(architecture: str) -> Family[Any] | None:
    _import_named_modules()
    if architecture not in _families:
        broken: InvalidParameterError | None = None
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=architecture):
            try:
                register(architecture, entry.load())
            except Exception as error:  # whatever the other package raises
                broken = _broken(entry, error)
        if broken is not None and architecture not in _families:
            raise broken
    return _families.get(architecture)


def _broken(entry: EntryPoint, error: Exception) -> InvalidParameterError:
    package = "an installed package" if entry.dist is None else f"the package {entry.dist.name!r}"
    described = InvalidParameterError(
        f"The entry point {entry.name} = {entry.value!r} of {package}, in the group {ENTRY_POINT_GROUP!r}, gives no"
        f" model family ({type(error).__name__}: {error}); mend, update or uninstall the package."
    )
    described.__cause__ = error
    return described


def _runs(architecture: str, broken: list[InvalidParameterError]) -> bool:
    """Whether there is a family for it. An entry point that gives none is appended to `broken`."""
    try:
        return _find(architecture) is not None
    except InvalidParameterError as error:
        broken.append(error)
        return False


def _architecture_by_type(model_type: Any) -> str:
    broken: list[InvalidParameterError] = []
    for architecture in supported_architectures():
        if _runs(architecture, broken):
            family = _families[architecture]
            if model_type in (family.model_type, *getattr(family, "other_types", ())):
                return architecture
    raise _unsupported(f"of model_type {model_type!r}", broken)


def _unsupported(architecture: Any, broken: Sequence[InvalidParameterError] = ()) -> UnsupportedModelError:
    """broken: what kept families from being asked."""
    return UnsupportedModelError(
        " ".join(
            [
                f"config.json: architecture {architecture} is not supported; supported:"
                f" {', '.join(supported_architectures())} (`jpaged models` says more). docs/adding_a_model.md adds one"
                f" in a file of your own. One from outside jpaged must be known in every process: by the environment"
                f" variable {MODULES_VARIABLE}, or an entry point of an installed package.",
                *map(str, broken),
            ]
        )
    )


def _import_named_modules() -> None:
    """Imports the modules that the environment variable names, each once."""
    with _lock:
        for name in filter(None, map(str.strip, os.environ.get(MODULES_VARIABLE, "").split(","))):
            if name in _imported:
                continue
            _imported.add(name)  # before it is imported, which may ask for a family
            try:
                if name.endswith(".py"):
                    _import_file(Path(name))
                else:
                    import_module(name)
            except BaseException as error:
                _imported.discard(name)
                if not isinstance(error, Exception):
                    raise
                raise InvalidParameterError(
                    f"{MODULES_VARIABLE} names {name!r}, which cannot be imported ({type(error).__name__}: {error});"
                    " correct it, or give the path of a .py file."
                ) from error


def _import_file(path: Path) -> None:
    """Imports a file as the module of its name, in which pickles of other processes look for its classes."""
    name, path = path.stem, path.absolute()
    known = sys.modules.get(name)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").absolute() != path:
            raise ImportError(f"there is another module {name!r}; rename the file")
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
