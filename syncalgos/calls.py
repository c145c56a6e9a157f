"""Calls of public functions: wrong arguments, and calls as text."""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from syncalgos import checks

Function = TypeVar("Function", bound=Callable[..., Any])


def suggest_arguments(function: Function) -> Function:
    """Decorates a function: for a wrong argument, it names the nearest one.

    The function's signature and its type stay the same.
    """
    function_name = function.__qualname__.removesuffix(".__init__")
    argument_names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name != "self"
    ]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_argument_names(function_name, kwargs, argument_names)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]  # the same type for its callers


def check_argument_names(
    function_name: str, names: Iterable[str], argument_names: Sequence[str]
) -> None:
    """Raises a TypeError for a name that no argument of a function has."""
    for name in names:
        if name not in argument_names:
            hint = checks.nearest(name, argument_names)
            possible = "it takes none by name"
            if argument_names:
                possible = f"one of: {', '.join(argument_names)}"
            raise TypeError(
                f"{function_name} has no argument {name!r}{hint} ({possible})"
            )


@dataclass(frozen=True, eq=False)
class Made:
    """A call and its result. It can stand for the init of the strategy that it made.

    Attributes:
        function: the function that was called.
        args: its arguments by position.
        kwargs: its arguments by name.
        result: the strategy or reducer that it returned.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def __call__(self, params: Any) -> Any:
        return self.result.init(params)

    @property
    def bound(self) -> inspect.BoundArguments:
        """All arguments of the call by name, with the defaults of those not given."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound

    def __repr__(self) -> str:
        """The call with all of its arguments but the usual axis."""
        bound, args, kwargs = self.bound, [], {}
        for name, x in bound.arguments.items():
            p = bound.signature.parameters[name]
            if p.kind is p.VAR_POSITIONAL:
                args += x
            elif p.kind is not p.KEYWORD_ONLY and p.default is p.empty:
                args.append(x)
            elif name != "axis" or x != p.default:
                kwargs[name] = x
        return written(self.function.__name__, args, kwargs)


class _Short(reprlib.Repr):
    """A repr in which functions are names, and arrays dtypes and shapes."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(made := getattr(x, "made_by", x), Made):
            return repr(made)
        if name := getattr(x, "__name__", None):
            return name
        if isinstance(x, functools.partial):
            return written("partial", (x.func, *x.args), x.keywords)
        if hasattr(x, "ndim"):
            return f"{x.dtype}{[*x.shape]}" if x.ndim else str(x)
        if isinstance(x, tuple) and type(x) is not tuple:
            return f"{type(x).__name__}(…)"
        return super().repr1(x, level)


_SHORT = _Short()
_SHORT.maxother = _SHORT.maxstring = 60


def written(name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns a call as a user writes it, each value on one short line."""
    named = [f"{key}={_SHORT.repr(x)}" for key, x in kwargs.items()]
    return " ".join(f"{name}({', '.join([*map(_SHORT.repr, args), *named])})".split())
