"""An extension of Griffe, which reads the sources for the API reference without running them (see mkdocs.yml).

Docstrings may have sections without blank lines between them, and a section's text beside its name:

    Returns: float32 [R, vocab].        becomes         Returns:
    Raises:                                                 float32 [R, vocab].
        ValueError: ...
                                                        Raises:
                                                            ValueError: ...

A package's function takes precedence over a submodule of the same name, as it does in Python:

    from jpaged.pallas_kernels.decode_attention.api import decode_attention      # in jpaged/pallas_kernels/__init__.py
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):(?: +(\S.*))?$")


class ApiReference(griffe.Extension):
    """See the module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._spread_sections(pkg)
        self._prefer_functions(pkg)

    def _spread_sections(self, parent: griffe.Object) -> None:
        if parent.docstring is not None:
            parent.docstring.value = "\n".join(_spread(parent.docstring.value.splitlines()))
        for member in parent.members.values():
            if isinstance(member, griffe.Object):
                self._spread_sections(member)

    def _prefer_functions(self, package: griffe.Module) -> None:
        for module in list(package.modules.values()):
            if not module.is_alias:
                self._prefer_functions(module)
        found = {name: self._imported(package, path) for name, path in package.imports.items()}
        for name, target in found.items():
            if target is not None:
                package.set_member(name, griffe.Alias(name, target, parent=package))

    def _imported(self, package: griffe.Module, path: str) -> griffe.Object | None:
        """The function or class that `path` names within the package; None if it names something else."""
        prefix = package.path + "."
        if not path.startswith(prefix):
            return None
        try:
            target = package.get_member(path.removeprefix(prefix))
        except KeyError:
            return None
        return None if target.is_alias or target.is_module else target


def _spread(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, each section behind a blank line and its text indented below its name."""
    beside = False  # whether the section's text began beside its name: its other lines are to be indented
    for line in lines:
        if (section := _SECTION.match(line)) is not None:
            yield ""
            yield f"{section[1]}:"
            beside = section[2] is not None
            if beside:
                yield f"    {section[2]}"
        else:
            beside = beside and bool(line)
            yield f"    {line.strip()}" if beside else line
