"""Measures the layout of the project: `make structure`.

Prints, for each package, its layers, imports, lines of code, docstrings and comments
and nesting, then the figures of ratchet.toml beside their bounds: code lines of each
folder, private imports of the harness into the library, and the files of experiments/
that `argv` passes through from the two commands.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("syncalgos", "models", "experiments", "benchmarks")
RATCHET = Path(__file__).with_name("ratchet.toml")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


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
    lines: int
    counts: Lines
    tree: ast.Module


def read(path: Path) -> File:
    """Reads one file of the project."""
    text = path.read_text()
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
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
            code |= set(range(token.start[0], token.end[0] + 1))
    counts = Lines(len(code - docstrings), len(docstrings), len(comments - code))
    return File(str(path.relative_to(ROOT)), len(text.splitlines()), counts, tree)


def files(package: str) -> dict[str, File]:
    """All files of a package by their paths."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {file.path: file for file in map(read, paths)}


def module_file(dotted: str) -> str | None:
    """The file of a module of the project, or None."""
    base = ROOT / dotted.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return str(path.relative_to(ROOT))
    return None


def imports(tree: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """(name in the file, file that it comes from, its name there; None: the module)."""
    for node in ast.walk(tree):
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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that import each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def rooms(graph: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """The arrows between the entries of a package: its files and folders."""

    def room(path):
        parts = Path(path).parts
        return parts[1] if parts[0] == package else parts[0]

    between: dict[str, set[str]] = {}
    for path, targets in graph.items():
        between.setdefault(room(path), set()).update(
            {room(x) for x in targets} - {room(path)}
        )
    return between


def layers(graph: dict[str, set[str]]) -> int:
    """The longest way down, in files; 0 where a circle has none."""
    if circles(graph):
        return 0
    heights: dict[str, int] = {}

    def height(node):
        if node not in heights:
            heights[node] = 1 + max(map(height, graph.get(node, ())), default=0)
        return heights[node]

    return max(map(height, graph), default=0)


def nesting(function: ast.AST) -> int:
    """Finds how deep blocks lie in a function; elif is no deeper than if."""

    def depth(node, is_elif=False):
        nested = 0
        for child in ast.iter_child_nodes(node):
            chained = (
                isinstance(node, ast.If) and [child] == node.orelse
            ) and isinstance(child, ast.If)
            nested = max(nested, depth(child, chained))
        deeper = isinstance(node, NESTING) and not is_elif
        return nested + deeper

    own = [x for x in ast.iter_child_nodes(function) if not isinstance(x, FUNCTIONS)]
    return max(map(depth, own), default=0)


def functions(file: File) -> list[ast.AST]:
    return [node for node in ast.walk(file.tree) if isinstance(node, FUNCTIONS)]


def private_imports(harness: dict[str, File]) -> list[str]:
    """Modules of the library that the harness imports beside the public ones."""
    targets = {
        target for file in harness.values() for _, target, _ in imports(file.tree)
    }
    faces = [f"syncalgos/{x}__init__.py" for x in ("", "collectives/", "reducers/")]
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
    everything = {path: file for name in PACKAGES for path, file in files(name).items()}
    graph = arrows(everything)
    for package in PACKAGES:
        own = {p: f for p, f in everything.items() if p.startswith(package + "/")}
        yield from _of_package(package, own, graph)
    for circle in circles(graph):
        yield f"circle: {', '.join(circle)}"
    bounds = tomllib.loads(RATCHET.read_text())
    for table, figures in measured().items():
        for name, figure in figures.items():
            yield f"{table} {name}: {figure} of at most {bounds[table][name]}"


def _of_package(
    package: str, own: dict[str, File], graph: dict[str, set[str]]
) -> Iterator[str]:
    inside = {
        path: targets & own.keys() for path, targets in graph.items() if path in own
    }
    total = sum((file.counts for file in own.values()), Lines(0, 0, 0))
    between = rooms(inside, package)
    depths = [nesting(x) for file in own.values() for x in functions(file)]
    deep = sum(depth >= 3 for depth in depths)
    largest = max(own.values(), key=lambda file: file.lines)
    yield (
        f"{package}: {layers(inside)} layers, "
        f"{sum(map(len, inside.values()))} imports between files, "
        f"{sum(map(len, between.values()))} between rooms"
    )
    for circle in circles(between):
        yield f"  rooms that import each other: {', '.join(circle)}"
    yield (
        f"  {total.code} lines of code, docstrings {total.docstrings / total.code:.2f} "
        f"and comments {total.comments / total.code:.3f} of them; nesting of 3 or more "
        f"in {deep / max(len(depths), 1):.1%} of {len(depths)} functions; largest file "
        f"{largest.path} with {largest.lines} lines"
    )


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    print("\n".join(report()))
