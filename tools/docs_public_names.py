"""An extension of mkdocstrings: a package's public function wins over a submodule of the same name.

    from jpaged.pallas_kernels.decode_attention.api import decode_attention      # in jpaged/pallas_kernels/__init__.py

To Python `jpaged.pallas_kernels.decode_attention` is then the function. Griffe reads the sources without running them
and takes the submodule; this extension gives it the function. mkdocs.yml names this file.
"""

from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """See the module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._correct(pkg)

    def _correct(self, package: griffe.Module) -> None:
        for module in list(package.modules.values()):
            if not module.is_alias:
                self._correct(module)
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
