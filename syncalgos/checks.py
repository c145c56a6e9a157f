"""Refuse a user's mistake in one line: what was wrong, and what is possible.

Nothing here needs jax as it is imported: a command line uses this file by itself.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

LearningRate = float | Callable[[Any], Any]
"""A number, or an optax schedule: local step -> learning rate."""


def shown(value: Any) -> str:
    """The value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole(label: str, value: Any, least: int) -> int:
    """Returns value as an int from `least` to 2³¹ - 1, or raises a ValueError."""
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_whole or (number := value.__index__()) < least:
        raise ValueError(
            f"{label} must be a whole number of at least {least}, got {shown(value)}"
        )
    if number >= 2**31:  # steps are int32 on the devices
        raise ValueError(f"{label} must be below 2**31, got {shown(value)}")
    return number


def real(
    label: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Returns value as a finite float inside the bounds, or raises a ValueError."""
    bounds = {"at least": least, "above": above, "below": below}
    rule = " and ".join(f"{k} {v:g}" for k, v in bounds.items() if v is not None)
    rule = rule if below is not None else f"a finite number {rule}".strip()
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    inside = (
        math.isfinite(number)
        and (least is None or number >= least)
        and (above is None or number > above)
        and (below is None or number < below)
    )
    if not inside:
        raise ValueError(f"{label} must be {rule}, got {shown(value)}")
    return number


def share(label: str, value: Any) -> float:
    """Returns value as a float above 0 and at most 1, or raises a ValueError."""
    number = real(label, value, above=0)
    if number > 1:
        raise ValueError(f"{label} must be at most 1, got {shown(value)}")
    return number


def learning_rate(where: str, value: LearningRate | None) -> Callable[[Any], Any]:
    """Returns the learning rate as a schedule, or raises a ValueError."""
    if callable(value):
        return value
    import jax.numpy as jnp

    number = real(f"{where}: learning_rate", value, above=0)
    return lambda step: jnp.asarray(number, float)


def global_batch(batch: int, workers: int, accumulate: int = 1) -> None:
    """Raises a ValueError unless workers, and then microbatches, divide the batch."""
    unit, use = workers, "a multiple"
    refused = f"global batch of {batch} does not divide over {workers} workers"
    if batch and batch % workers == 0:
        unit, use = workers * accumulate, "a global batch that is a multiple"
        refused = (
            f"accumulate: {batch // workers} examples of each of {workers} workers do "
            f"not divide into {accumulate} microbatches"
        )
    if batch == 0 or batch % unit:
        below = batch - batch % unit
        around = " or ".join(str(n) for n in (below, below + unit) if n)
        raise ValueError(f"{refused}: use {use} of {unit}, such as {around}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the closest of names, or nothing.

    Capitals and the dashes of flags count for nothing: two flags would be alike by
    their dashes alone. A name that begins as the given one does is close.
    """
    written = name.casefold().lstrip("-")
    known = {other.casefold().lstrip("-"): other for other in names if other != name}
    close = difflib.get_close_matches(written, known, n=1, cutoff=0.66)
    if not close and len(written) > 2:
        close = sorted((x for x in known if x.startswith(written)), key=len)
    return f"; did you mean {known[close[0]]!r}?" if close else ""


def one_of(kind: str, name: str, names: Iterable[str]) -> str:
    """Returns name if it is one of names, else raises a ValueError that lists them."""
    names = list(names)
    if name not in names:
        hint = nearest(str(name), names)
        raise ValueError(f"unknown {kind} {name!r}{hint} (one of: {', '.join(names)})")
    return name


def labels(what: str, tree: Any, params: Any) -> list[Any]:
    """What a tree like params, or one for whole subtrees, says of each of their leaves.

    Raises:
        ValueError: a tree of another form.
    """
    import jax

    tree = tree(params) if callable(tree) else tree
    try:
        return jax.tree.leaves(jax.tree.broadcast(tree, params))
    except ValueError as error:
        form = jax.tree.structure(params)
        raise ValueError(
            f"{what} must be a tree like params, {form}, got {tree!r}"
        ) from error
