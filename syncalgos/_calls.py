"""Calls of public functions: wrong arguments, and calls as text."""

import functools
import inspect
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from syncalgos import checks

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a public function.

    Attributes:
        function: the function that was called.
        args: its arguments by position.
        kwargs: its arguments by name.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def given_arguments(self) -> dict[str, Any]:
        """The arguments by name, without those that were left out."""
        return self._bind().arguments

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, with the defaults of those not given."""
        bound = self._bind()
        bound.apply_defaults()
        return bound.arguments

    def _bind(self) -> inspect.BoundArguments:
        return inspect.signature(self.function).bind(*self.args, **self.kwargs)

    def repeat(self, **changes: Any) -> Any:
        """Calls the function again, with other values of some arguments."""
        bound = self._bind()
        bound.arguments |= changes
        return self.function(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        """The call with all of its arguments but the usual axis."""
        parameters = inspect.signature(self.function).parameters
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, value in self.arguments.items():
            p = parameters[name]
            if p.kind is p.VAR_POSITIONAL:
                args += value
            elif p.kind is p.VAR_KEYWORD:
                kwargs |= value
            elif p.kind is not p.KEYWORD_ONLY and p.default is p.empty and not kwargs:
                args.append(value)  # one behind defaults is shown by its name
            elif name != "axis" or value != p.default:
                kwargs[name] = value
        return written(self.function.__name__, args, kwargs)


def keep_call(function: Function, add_call: Callable[[Any, Call], Any]) -> Function:
    """Wraps a function so that what it makes keeps the call.

    The function's signature, its type and its source stay the same. For a wrong
    argument, it names the nearest one.

    Args:
        function: makes a strategy or a reducer.
        add_call: (what it made, the call) -> the same with the call. What the function
            was given, and returns, stays as it is: `delayed(strategy, 0)`.
    """
    checked = suggest_arguments(function)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = checked(*args, **kwargs)
        if any(result is argument for argument in (*args, *kwargs.values())):
            return result
        return add_call(result, Call(make, args, kwargs))

    def make(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    functools.update_wrapper(make, function)
    # inspect.getsourcefile, unlike getsource, does not look behind a wrapper.
    make.__code__ = make.__code__.replace(
        co_filename=function.__code__.co_filename,
        co_firstlineno=function.__code__.co_firstlineno,
    )
    return make  # type: ignore[return-value]  # the same type for its callers


def suggest_arguments(function: Function) -> Function:
    """Decorates a function: a wrong call is answered with what is possible.

    For an argument that the function does not have, with the nearest one; for too many
    by position, with those that may be; and for a missing one, `checks.REQUIRED` too,
    with its name. The function's signature and its type stay the same.
    """
    function_name = function.__qualname__.removesuffix(".__init__")
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.name != "self"
    ]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function  # it takes any name
    is_method = "self" in inspect.signature(function).parameters
    argument_names = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_argument_names(function_name, kwargs, argument_names)
        check_positions(function_name, len(args) - is_method, kwargs, parameters)
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


def check_positions(
    function_name: str,
    num_positions: int,
    names: Collection[str],
    parameters: Sequence[inspect.Parameter],
) -> None:
    """Checks how many arguments a call gives by position, and that none is missing.

    Args:
        function_name: the function that was called, for the message.
        num_positions: the number of arguments by position.
        names: the arguments by name.
        parameters: the function's.

    Raises:
        TypeError: there are more by position than the function takes, or an argument
            without a default is missing.
    """
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if num_positions > len(by_position):
        possible = ", ".join(by_position) or "nothing"
        remedy = "leave out the others"
        if by_name:
            remedy = f"give the others by name ({', '.join(by_name)})"
        raise TypeError(
            f"{function_name} takes {possible} by position, but the call has "
            f"{num_positions} by position: {remedy}"
        )
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.name not in names
        and p.name not in by_position[:num_positions]
    ]
    if missing:
        raise TypeError(
            f"{function_name} needs an argument {missing[0]!r}, which has no default "
            f"(its arguments: {', '.join([*by_position, *by_name])})"
        )


class _Short(reprlib.Repr):
    """A repr in which functions are names, and arrays dtypes and shapes."""

    def repr1(self, x: Any, level: int) -> str:
        call = getattr(x, "call", None)
        if isinstance(call, Call):
            return repr(call)
        name = getattr(x, "__name__", None)
        if name:
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
    arguments = [_SHORT.repr(x) for x in args]
    arguments += [f"{key}={_SHORT.repr(x)}" for key, x in kwargs.items()]
    # A value's own repr may have several lines.
    return " ".join(f"{name}({', '.join(arguments)})".split())
