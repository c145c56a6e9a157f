"""Support for the calls of 0.2: until 0.4 they work, and warn with the new call."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from syncalgos.strategy import Strategy

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = dict[str, Any]


def accepts_former(
    order: str = "",
    renamed: Mapping[str, str] | None = None,
    changed: Callable[[Arguments], Arguments] | None = None,
    swaps: bool = False,
) -> Callable[[Function], Function]:
    """Makes a decorator that lets a function be called as in 0.2, too.

    The function's signature stays that of the new call, for type checkers too.

    Args:
        order: the names of the positional arguments in 0.2; default: today's.
        renamed: names in 0.2 -> today's names.
        changed: arguments by name, some from 0.2 -> today's arguments.
        swaps: whether a Strategy as the second argument shows a call of 0.2.
    """

    def decorate(function: Function) -> Function:
        today = inspect.signature(function).parameters
        placed = [n for n, p in today.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = order.split() or [*today]

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False))
            is_new = len(args) <= len(placed) and kwargs.keys() <= today.keys()
            is_new = is_new and not (swaps and _is_second(args))
            if is_new or len(args) > len(names) or given.keys() & kwargs.keys():
                return function(*args, **kwargs)
            given = {(renamed or {}).get(k, k): v for k, v in (given | kwargs).items()}
            given = changed(given) if changed else given
            if not given.keys() <= today.keys():
                return function(*args, **kwargs)  # its error says what is wrong
            made = function(**given)
            shown = [_shown(given.pop(n), n) for n in placed if n in given]
            shown += [f"{name}={_shown(x, name)}" for name, x in given.items()]
            name = function.__qualname__.removesuffix(".__init__")
            call = f"{name}({', '.join(x for x in shown if x != 'self')})"
            warnings.warn(
                f"{name} is called as in syncalgos 0.2; this stops working in 0.4: "
                f"write {call}",
                DeprecationWarning,
                stacklevel=2,
            )
            return made

        return called  # type: ignore[return-value]  # the same type for its callers

    return decorate


def _is_second(args: tuple[Any, ...]) -> bool:
    """Whether the second argument is a Strategy and the first one is not."""
    kinds = [isinstance(x, Strategy) for x in args[:2]]
    return kinds == [False, True]


def axis_of_member(given: Arguments) -> Arguments:
    """Moves the argument `axis` of a combinator into the strategy it was given."""
    axis, strategy = given.pop("axis", None), given.get("strategy")
    if axis is not None and isinstance(strategy, Strategy):
        given["strategy"] = strategy._replace(axis=axis)
    return given


def _shown(value: Any, name: str) -> str:
    """Returns a short value as Python writes it, and any other as its name."""
    if name == "placement":
        fields = value._asdict().items()
        parts = [f"{k}={_shown(x, k)}" for k, x in fields if x is not None]
        return f"Placement({', '.join(parts)})"
    short = bool | int | float | str | None
    return repr(value) if isinstance(value, short) else name
