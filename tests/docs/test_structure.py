"""Imports: no circles between files, and one way between the rooms of a package."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.commands import ROOT

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


# What the library promises to keep. All else in it has an underscore, and may change.
PUBLIC_MODULES = {
    "syncalgos",
    "syncalgos.algorithms",
    "syncalgos.checks",
    "syncalgos.collectives",
    "syncalgos.graphs",
    "syncalgos.network",
    "syncalgos.reducers",
    "syncalgos.steps",
    "syncalgos.strategy",
    "syncalgos.writing",
}
USERS = ("experiments", "models", "examples", "benchmarks", "docs")


def find_attributes(tree: ast.Module) -> Iterator[str]:
    """The dotted names that begin with the library, under whatever name it has."""
    aliases = {"syncalgos": "syncalgos"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "syncalgos" and alias.asname:
                    aliases[alias.asname] = "syncalgos"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *attributes = ast.unparse(node).split(".")
            if root in aliases:
                yield ".".join([aliases[root], *attributes])


def find_private_uses(source: str) -> set[str]:
    """What a program uses of the library that is not public."""
    tree = ast.parse(source)
    dotted_names = {*imported_modules(tree), *find_attributes(tree)}
    dotted_names |= {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    private = set()
    for name in dotted_names:
        is_ours = name.startswith("syncalgos.") and name not in PUBLIC_MODULES
        if is_ours and find_module_file(name):
            private.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in PUBLIC_MODULES:
            private |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if alias.name.startswith("_")
            }
    return private


def test_only_public_modules_lack_an_underscore():
    """Files of algorithms are public, too: a reader opens them by their names."""
    public_modules = set()
    for path in (ROOT / "syncalgos").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        is_private = any(part.startswith("_") for part in module.split("."))
        if not is_private and not module.startswith("syncalgos.algorithms."):
            public_modules.add(module)
    assert public_modules == PUBLIC_MODULES


@pytest.mark.parametrize("folder", USERS)
def test_what_uses_the_library_uses_public_names_alone(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    private_uses = {
        str(path.relative_to(ROOT)): find_private_uses(path.read_text("utf-8"))
        for path in files
    }
    assert {path: uses for path, uses in private_uses.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from syncalgos import _keys",
        "from syncalgos import _names",
        "from syncalgos._engine import data_parallel",
        "from syncalgos.reducers import _stacking",
        "from syncalgos.reducers._stacking import Layered",
        "from syncalgos.network import _quantity",
        "import syncalgos._engine.worker",
        "import syncalgos._engine.worker as worker",
        "import syncalgos\nsyncalgos._combinators.introspection.acts",
        "import syncalgos as sa\nsa._keys.own_key",
        "def f():\n    from syncalgos._dtypes import widen",
        "import_module('syncalgos._ledger.counting')",
    ],
)
def test_a_private_use_is_seen(source):
    assert find_private_uses(source)


@pytest.mark.parametrize(
    "source",
    [
        "import syncalgos\nsyncalgos.collectives.mean",
        "from syncalgos import network, describe",
        "from syncalgos.writing import checks",
        "from syncalgos.reducers import Reducer",
    ],
)
def test_a_public_use_is_none(source):
    assert find_private_uses(source) == set()


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
