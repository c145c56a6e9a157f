"""Follows one parameter through the calls of the project, file by file."""

import ast
from collections.abc import Iterator
from typing import Any, TypeGuard

from structure import FUNCTIONS, File, imports

# Other expressions make something new: a comparison, a sum, a text.
_PASSED_ON = ast.Attribute | ast.Subscript | ast.Starred | ast.Tuple | ast.IfExp
_PASSED_ON |= ast.Dict | ast.DictComp | ast.List | ast.ListComp


class Route:
    """The way of one parameter through calls, in the order of the code.

    A name is followed where it, or what was made of it, is an argument of a function of
    the project. A function is entered once; a second call still counts as a visit.
    """

    def __init__(self, read_files: dict[str, File]):
        self.stops: list[str] = []
        self._names = {
            path: {name: (target, there) for name, target, there in imports(file.tree)}
            for path, file in read_files.items()
        }
        self._defined = {
            path: {
                node.name: node
                for node in file.tree.body
                if isinstance(node, FUNCTIONS | ast.ClassDef)
            }
            for path, file in read_files.items()
        }
        methods = [
            (path, node)
            for path, file in read_files.items()
            for made in file.tree.body
            if isinstance(made, ast.ClassDef)
            for node in made.body
            if isinstance(node, FUNCTIONS)
        ]
        self._methods = {
            node.name: (path, node)
            for path, node in methods
            if sum(node.name == other.name for _, other in methods) == 1
        }
        self._seen: dict[tuple, bool] = {}

    def follow(self, path: str, function: str, parameter: str) -> None:
        """Begins with a parameter of a function."""
        self.enter(path, self._defined[path][function], frozenset({parameter}))

    @property
    def returns(self) -> int:
        """Stops in a file that was left before."""
        return len(self.stops) - len(set(self.stops))

    def enter(self, path: str, function: Any, names: frozenset[str]) -> bool:
        """Follows names through a function; returns whether it returns one of them."""
        if not self.stops or self.stops[-1] != path:
            self.stops.append(path)
        key = path, function.name
        if key not in self._seen:
            self._seen[key] = False
            self._seen[key] = self._through(path, function, set(names))
        return self._seen[key]

    def _through(self, path, function, held):
        returned = False
        for node in _in_order(function):
            value, targets = _flow(node)
            if value is None or not self._carries(path, value, held):
                continue
            held |= {x.id for t in targets for x in ast.walk(t) if _is_name(x)}
            returned |= isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)
        return returned

    def _carries(self, path, expression, held) -> bool:
        """Whether a value has what is followed; enters the calls that take it."""
        if isinstance(expression, ast.Lambda):  # it is called somewhere
            return self._carries(path, expression.body, held)
        if not isinstance(expression, ast.Call):
            if _is_name(expression):
                return expression.id in held
            for part in getattr(expression, "generators", ()):
                if self._carries(path, part.iter, held):
                    held |= {x.id for x in ast.walk(part.target) if _is_name(x)}
            children = list(ast.iter_child_nodes(expression))
            found = any([self._carries(path, x, held) for x in children])
            return found and isinstance(expression, _PASSED_ON)
        if _is_name(expression.func) and expression.func.id == "partial":
            called, *given = expression.args
            expression = ast.Call(called, given, expression.keywords)
        taken = [self._carries(path, x, held) for x in expression.args]
        # A list: several **mappings have the same name, None.
        named = [
            (x.arg, self._carries(path, x.value, held)) for x in expression.keywords
        ]
        on = isinstance(expression.func, ast.Attribute) and self._carries(
            path, expression.func.value, held
        )
        found = self._callee(path, expression.func)
        if found is None:
            return on or any(taken) or any(is_taken for _, is_taken in named)
        where, function = found
        parameters = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
        parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
        names = {p for p, is_taken in zip(parameters, taken, strict=False) if is_taken}
        names |= {name for name, is_taken in named if name and is_taken}
        if not names:
            return False
        # An object holds what it was made of.
        found = self.enter(where, function, frozenset(names))
        return found or function.name == "__init__"

    def _callee(self, path, called):
        target, name = path, None
        if _is_name(called):
            name = called.id
            if name in self._names[path]:
                target, name = self._names[path][name]
        elif isinstance(called, ast.Attribute) and _is_name(called.value):
            target, there = self._names[path].get(called.value.id, (None, ""))
            if there is not None:
                return self._methods.get(called.attr)
            name = called.attr
        elif isinstance(called, ast.Attribute):
            return self._methods.get(called.attr)
        found = self._defined.get(target, {}).get(name)
        if isinstance(found, ast.ClassDef):
            made = [x for x in found.body if isinstance(x, FUNCTIONS)]
            found = next((x for x in made if x.name == "__init__"), None)
        return (target, found) if found is not None else None


def _is_name(node: Any) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _flow(node: ast.AST) -> tuple[ast.expr | None, list[ast.AST]]:
    """The value in a statement, and where it goes."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return value, [*targets]
        case ast.AnnAssign(target=target, value=value):
            return value, [target]
        case ast.NamedExpr(target=target, value=value):
            return value, [target]
        case ast.For(target=target, iter=value):
            return value, [target]
        case ast.withitem(context_expr=value, optional_vars=target):
            return value, [target] if target else []
        case ast.Return() | ast.Yield() | ast.YieldFrom():
            return node.value, []
        case ast.If(test=value) | ast.While(test=value):
            return value, []
        # Such as found.append(value): the list has it then.
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as to))):
            return node.value, [to]
        case ast.Expr(value=value):
            return value, []
    return None, []


def _in_order(function: ast.AST) -> Iterator[ast.AST]:
    """Statements of a function as they stand, those of its closures included."""
    for node in ast.iter_child_nodes(function):
        yield node
        yield from _in_order(node)
