"""Names and arguments that are gone, and what an error says to use now."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from syncalgos.calls import written

Function = TypeVar("Function", bound=Callable[..., Any])

_SECOND = {"every": "period", "when": "active", "until": "steps"}
_SECOND |= {"after": "steps", "at_end": "steps", "decided": "vote"}
_WITH_AXIS = "masked", "ema", "decided", "paced", "participating"
_LAYERED = "choco_sgd", "decoupled_diloco", "demo", "dgc", "diloco_x", "dion", "ef21"
_LAYERED += "powersgd", "sign_sgd", "sparseloco", "streaming_diloco", "topk_sgd"
_LAYERED += "chunked_top_k", "power_sgd", "sign", "top_k"
_MOMENTS = "fedopt", "distributed_lion", "one_bit_adam"
_PLACED = "devices", "lanes", "lane_form", "mesh", "shardings", "batch_axes"

_RENAMED = {
    "steps": ("until.s", "after.s"),
    "dense_steps": ("dgc.warmup", "post_local_sgd.switch", "one_bit_adam.switch"),
    "b1": [f"{name}.beta1" for name in _MOMENTS],
    "b2": [f"{name}.beta2" for name in _MOMENTS],
    "layered": [f"{name}.stacked" for name in _LAYERED],
    "global_share": ["halos.alpha"],
    "entry_clip": ["co2.clip"],
    "leaf_clip": ["edit.clip"],
    "forgetting": ["edit.rate"],
}

# What to use now in place of a public name, of FUNCTION.ARGUMENT (the function is
# decorated by `explained`), or of a call whose first argument is now the strategy.
INSTEAD = {
    "mean": "use syncalgos.reducers.mean",
    **{old: f"use {new}" for new, names in _RENAMED.items() for old in names},
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
LANE_FORMS = {"together": "use 'vectorized'", "in-turn": "use 'sequential'"}
LANE_FORMS |= {"joined": "use 'merged'"}


def missing(owner: str, name: str, hint: str = "") -> AttributeError:
    """Makes the error for an attribute that an object of a class does not have."""
    hint = ATTRIBUTES.get(f"{owner}.{name}", hint)
    told = f": {hint}" if hint else ""
    return AttributeError(f"{owner} has no attribute {name!r}{told}")


def _name(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def explained(function: Function) -> Function:
    """Decorates a function: for an argument that is gone, it says what to use now.

    The function's signature and its type stay the same.
    """
    name = _name(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        for argument in kwargs:
            if now := INSTEAD.get(f"{name}.{argument}"):
                raise TypeError(f"{name} has no argument {argument!r}: {now}")
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]  # the same type for its callers


def keyword_only(function: Function) -> Function:
    """Decorates a function whose keyword-only arguments were positional until 0.4.

    It still takes them by position, and warns with the new call.
    """
    name = _name(function)
    parameters = inspect.signature(function).parameters
    leading = sum(p.kind is not p.KEYWORD_ONLY for p in parameters.values())

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        names = [*parameters][leading : len(args)]
        if names and len(args) <= len(parameters) and not kwargs.keys() & {*names}:
            kwargs |= zip(names, args[leading:], strict=True)
            args = args[:leading]
            now = written(name, args["self" in parameters :], kwargs)
            warnings.warn(
                f"write {now}: 0.5 refuses these arguments by position",
                DeprecationWarning,
                stacklevel=2,
            )
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]  # the same type for its callers
