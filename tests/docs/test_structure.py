"""Imports: no circles between files, and one way between the rooms of a package."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from commands import ROOT

PACKAGES = ("syncalgos", "models", "experiments", "benchmarks", "conformance")

# From each file or room to those that it imports.
Graph = dict[str, set[str]]


@cache
def find_module_file(module: str) -> str | None:
    """The file of a module of the project, as a path from its root."""
    base = ROOT / module.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return str(path.relative_to(ROOT))
    return None


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, those within its functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if find_module_file(submodule) else node.module


@cache
def read_imports(package: str) -> Graph:
    """The imports of each file; an `__init__.py` only collects names for others."""
    graph: Graph = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name == "__init__.py":
            continue
        source_file = str(path.relative_to(ROOT))
        targets = set()
        for module in imported_modules(ast.parse(path.read_text("utf-8"))):
            target = find_module_file(module)
            if target and not target.endswith("__init__.py"):
                targets.add(target)
        graph[source_file] = targets - {source_file}
    return graph


def join_rooms(graph: Graph, package: str) -> Graph:
    """The imports between the rooms of a package: its folders and its other files."""
    rooms: Graph = {}
    for source_file, targets in graph.items():
        room = Path(source_file).parts[1]
        imported_rooms = rooms.setdefault(room, set())
        for target in targets:
            target_package, target_room, *_ = Path(target).parts
            if target_package == package and target_room != room:
                imported_rooms.add(target_room)
    return rooms


def find_circle(graph: Graph) -> list[str]:
    """A way along imports that comes back to its start; [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other():
    graph: Graph = {}
    for package in PACKAGES:
        graph |= read_imports(package)
    assert len(graph) > 100
    assert find_circle(graph) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_rooms_go_one_way(package):
    assert find_circle(join_rooms(read_imports(package), package)) == []


def test_circle_is_found():
    graph = {"p/a.py": {"p/room/b.py"}, "p/room/c.py": {"p/a.py"}, "p/room/b.py": set()}
    assert find_circle(graph) == []
    assert set(find_circle(join_rooms(graph, "p"))) == {"a.py", "room"}
