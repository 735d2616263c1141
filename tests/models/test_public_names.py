"""What a family from outside imports is in packages whose names are promised."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = ("jpaged.models", "jpaged.pallas_kernels", "jpaged.api.errors")
FAMILIES = sorted(path for path in (ROOT / "jpaged/models/families").glob("*.py") if path.stem != "__init__")


def imports_of(code: str) -> Iterator[tuple[str, str]]:
    """The module and the name of each thing that is imported from jpaged."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("jpaged"):
            yield from ((node.module, alias.name) for alias in node.names)


def exported() -> dict[str, object]:
    modules = map(import_module, PUBLIC)
    return {name: getattr(module, name) for module in modules for name in getattr(module, "__all__", vars(module))}


def test_the_file_in_the_docs_imports_from_public_packages_only() -> None:
    page = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    for code in re.findall(r'```python title="phi.py"\n(.*?)```', page, re.DOTALL):
        imported = list(imports_of(code))
        assert imported
        assert {module for module, _ in imported} <= set(PUBLIC)
        assert {name for _, name in imported} <= exported().keys()


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_a_family_of_jpaged_uses_nothing_that_one_from_outside_could_not_import(path: Path) -> None:
    public = exported()
    imported = list(imports_of(path.read_text(encoding="utf-8")))
    assert imported
    for module, name in imported:
        assert public.get(name) is getattr(import_module(module), name), f"{module}.{name}"
