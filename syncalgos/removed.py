"""Names and arguments that are gone, and what an error says to use now."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_SECOND = {"every": "period", "when": "active", "until": "s", "after": "s"}
_SECOND |= {"at_end": "steps", "decided": "vote"}
_WITH_AXIS = "masked", "ema", "decided", "paced", "participating"
_PLACED = "devices", "lanes", "lane_form", "mesh", "shardings", "batch_axes"

# What to use now in place of a public name, of FUNCTION.ARGUMENT (the function is
# decorated by `explained`), or of a call whose first argument is now the strategy.
INSTEAD = {
    "mean": "use syncalgos.reducers.mean",
    **dict.fromkeys(
        ("dgc.warmup", "post_local_sgd.switch", "one_bit_adam.switch"),
        "use dense_steps",
    ),
    **{
        f"{name}.beta{i}": f"use b{i}"
        for name in ("fedopt", "distributed_lion", "one_bit_adam")
        for i in (1, 2)
    },
    **{
        f"{name}.axis": "give it to the algorithm, as in bmuf(axis=…)"
        for name in (*_WITH_AXIS, "as_optimizer", "communication")
    },
    **{f"DataParallel.{x}": f"use placement=Placement({x}=…)" for x in _PLACED},
    "DataParallel.sharded": "use tables",
    **dict.fromkeys(
        ("DataParallel.sync_memory", "Placement.sync_memory"),
        "the algorithm's arrays stay in the device's memory",
    ),
    "Placement.setting_form": "settings train one after the other",
    **{f"{x}(strategy)": f"write {x}(strategy, {y})" for x, y in _SECOND.items()},
}
# The same for attributes of objects, by the name of their class.
ATTRIBUTES: dict[str, str] = dict.fromkeys(
    ("DataParallel.stack", "TrainState.setting", "TrainState.settings"),
    "train one state after the other, which compiles only once",
)
# Of `lane_form`.
LANE_FORMS = {
    "together": "use 'vectorized'",
    "in-turn": "use 'sequential'",
    "joined": "use 'merged'",
}


def missing(owner: str, name: str, hint: str = "") -> AttributeError:
    """Makes the error for an attribute that an object of a class does not have."""
    hint = ATTRIBUTES.get(f"{owner}.{name}", hint)
    told = f": {hint}" if hint else ""
    return AttributeError(f"{owner} has no attribute {name!r}{told}")


def explained(function: Function) -> Function:
    """Decorates a function: for an argument that is gone, it says what to use now.

    The function's signature and its type stay the same.
    """
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        for argument in kwargs:
            if now := INSTEAD.get(f"{name}.{argument}"):
                raise TypeError(f"{name} has no argument {argument!r}: {now}")
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]  # the same type for its callers
