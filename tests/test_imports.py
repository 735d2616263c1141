"""Which modules of jpaged import each other: no file may come to import itself."""

import grimp


def test_no_file_comes_to_import_itself_not_even_for_its_types():
    graph = grimp.build_graph("jpaged", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    cycles = {frozenset(_reachable(imports, module) & _importers(imports, module)) for module in imports}
    assert [sorted(cycle) for cycle in cycles if cycle] == []


def _reachable(imports: dict[str, set[str]], start: str) -> set[str]:
    """Modules that importing `start` imports, itself among them if they import it."""
    found: set[str] = set()
    to_do = [start]
    while to_do:
        new = imports[to_do.pop()] - found
        found |= new
        to_do += new
    return found


def _importers(imports: dict[str, set[str]], end: str) -> set[str]:
    """Modules that import `end`, at whatever distance."""
    backwards: dict[str, set[str]] = {module: set() for module in imports}
    for module, imported in imports.items():
        for one in imported:
            backwards[one].add(module)
    return _reachable(backwards, end)
