"""Measures the layout of the project: `make structure`.

Prints, for each package, its lines of code, docstrings, comments and imports, then the
figures of ratchet.toml beside their bounds: code lines of each folder, private imports
of the harness into the library, and the files of experiments/ that `argv` passes
through from the two commands.
"""

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("syncalgos", "models", "experiments", "benchmarks", "conformance")
RATCHET = Path(__file__).with_name("ratchet.toml")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Lines(NamedTuple):
    """Lines of a file, or of many: no line counts twice, blank lines not at all."""

    code: int
    docstrings: int
    comments: int

    def __add__(self, other: tuple) -> "Lines":  # type: ignore[override]
        return Lines(*(x + y for x, y in zip(self, other, strict=True)))


class File(NamedTuple):
    """A file as it was read."""

    path: str
    counts: Lines
    tree: ast.Module


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module and all its statements; of the expressions, which are most, none."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from statements(child)


@cache
def read(path: Path) -> File:
    """Reads one file of the project."""
    text = path.read_text()
    tree = ast.parse(text)
    docstrings = set()
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first:
                docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    code, comments = set(), set()
    silent = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in (*silent, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    counts = Lines(len(code - docstrings), len(docstrings), len(comments - code))
    return File(str(path.relative_to(ROOT)), counts, tree)


def files(package: str) -> dict[str, File]:
    """All files of a package by their paths."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {file.path: file for file in map(read, paths)}


@cache
def module_file(dotted: str) -> str | None:
    """The file of a module of the project, or None."""
    base = ROOT / dotted.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return str(path.relative_to(ROOT))
    return None


def imports(tree: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """(name in the file, file that it comes from, its name there; None: the module)."""
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                if file := module_file(f"{node.module}.{alias.name}"):
                    yield name, file, None
                elif file := module_file(node.module):
                    yield name, file, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if file := module_file(alias.name):
                    yield alias.asname or alias.name, file, None


def arrows(read_files: dict[str, File]) -> dict[str, set[str]]:
    """For each file, those that it imports; packages' faces are left out."""
    return {
        path: {
            target
            for _, target, _ in imports(file.tree)
            if target in read_files and not target.endswith("__init__.py")
        }
        - {path}
        for path, file in read_files.items()
        if not path.endswith("__init__.py")
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A way from a file through others back to itself; [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows between the entries of a package: its files and folders."""
    between: dict[str, set[str]] = {}
    for path, targets in graph.items():
        _, room, *_ = Path(path).parts
        others = {Path(target).parts[1] for target in targets} - {room}
        between.setdefault(room, set()).update(others)
    return between


def private_imports(harness: dict[str, File]) -> list[str]:
    """Modules of the library that the harness imports beside the public ones."""
    targets = {
        target for file in harness.values() for _, target, _ in imports(file.tree)
    }
    faces = [f"syncalgos/{x}__init__.py" for x in ("", "collectives/", "reducers/")]
    faces.append("syncalgos/network.py")
    return sorted(x for x in targets if x.startswith("syncalgos/") and x not in faces)


def measured() -> dict[str, dict[str, int]]:
    """The figures that ratchet.toml bounds, in its form."""
    from route import Route  # it reads files as this module does

    bounds = tomllib.loads(RATCHET.read_text())
    code = {
        folder: sum(file.counts.code for file in files(folder).values())
        for folder in bounds["code_lines"]
    }
    harness = files("experiments")
    routes = {}
    for name in ("run", "compare"):
        route = Route(harness)
        route.follow(f"experiments/{name}.py", "main", "argv")
        routes |= {f"{name}_stops": len(route.stops), f"{name}_returns": route.returns}
    modules = {"experiments": len(private_imports(harness))}
    return {"code_lines": code, "private_imports": modules, "argv": routes}


def report() -> Iterator[str]:
    """The measurements, line by line."""
    for package in PACKAGES:
        own = files(package)
        code, docstrings, comments = sum(
            (x.counts for x in own.values()), Lines(0, 0, 0)
        )
        graph = arrows(own)
        outside = rooms(graph)
        yield (
            f"{package}: {code} lines of code, docstrings {docstrings / code:.2f} and "
            f"comments {comments / code:.3f} of them; {sum(map(len, graph.values()))} "
            f"imports between files, {sum(map(len, outside.values()))} between rooms"
        )
    bounds = tomllib.loads(RATCHET.read_text())
    for table, figures in measured().items():
        for name, figure in figures.items():
            most = bounds[table][name]
            yield f"{table} {name}: {figure} of {most}{', too many' * (figure > most)}"


if __name__ == "__main__":
    print("\n".join(report()))
