"""Checks arguments: an error is one line that says what is possible instead.

A number may be traced, as an argument of a compiled program; it then passes unchecked.
An argument that determines the program itself must be a Python value: a traced one is
refused. Importing this file does not import jax, so the command line starts quickly.
"""

import difflib
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

from syncalgos.graphs import ONE_WAY, SYMMETRIC

LearningRate = float | Callable[[Any], Any]
"""A number, or an optax schedule: local step -> learning rate."""

REQUIRED: Any = inspect.Parameter.empty
"""The default of an argument that has none, although those before it have.

Python's own syntax has that only for an argument by name. `inspect` shows this one
without a default, and `calls.suggest_arguments` refuses a call without it."""

Topology = Literal[*ONE_WAY, *SYMMETRIC] | Any
"""A graph of workers: its name, or another form that `syncalgos.graph` takes."""

Symmetric = Literal[*SYMMETRIC] | Any
"""A graph with a symmetric matrix of weights."""

_HOLDS = {"at least": operator.ge, "above": operator.gt, "below": operator.lt}
MOST_LISTED = 12  # names to list although a close one is suggested


def shown(value: Any) -> str:
    """Returns the value as errors show it: its repr on one line, at most 60 columns."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def misfit(function: Any, names: Sequence[str]) -> str:
    """Returns why a function cannot be called with these arguments; "" if it can.

    Args:
        function: the function; one without a signature, as some builtins, passes.
        names: the names of its positional arguments.
    """
    try:
        inspect.signature(function).bind(*names)
    except ValueError:  # no signature
        return ""
    except TypeError as error:
        return str(error)
    return ""


def called_with(label: str, function: Any, names: Sequence[str]) -> None:
    """Checks that a function takes the arguments that it will be called with.

    Args:
        label: the function's name, for the message.
        function: the value that was given.
        names: the names of its positional arguments.

    Raises:
        ValueError: it is not a function, or it takes other arguments.
    """
    call = ", ".join(names)
    if not callable(function):
        raise ValueError(
            f"{label} must be a function of ({call}), got {shown(function)}"
        )
    reason = misfit(function, names)
    if reason:
        signature = inspect.signature(function)
        raise ValueError(
            f"{label} is called with ({call}), but takes {signature}: {reason}"
        )


def is_traced(value: Any) -> bool:
    """Whether a value is a jax tracer, known only when the program runs."""
    # Without jax nothing is traced.
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def untraced(label: str, value: Any) -> None:
    """Raises a ValueError for a traced value, where tracing needs its number."""
    if is_traced(value):
        raise ValueError(
            f"{label} must be a Python number, not a traced one, because it determines "
            "the compiled program, such as its shapes or steps"
        )


def whole(label: str, value: Any, least: int) -> int:
    """Checks a whole number.

    Args:
        label: the argument's name, for the message.
        value: anything with `__index__` except a bool.
        least: the least value allowed.

    Returns:
        The value as an int.

    Raises:
        ValueError: the value is not a whole number from `least` to 2³¹ - 1.
    """
    untraced(label, value)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # also for an array, unless it holds one integer
        number = None
    if number is None or number < least:
        raise ValueError(
            f"{label} must be a whole number of at least {least}, got {shown(value)}"
        )
    # Local steps are int32 on the devices.
    if number >= 2**31:
        raise ValueError(f"{label} must be below 2**31, got {shown(value)}")
    return number


def seed(value: Any) -> int:
    """Returns a seed: a whole number of at least 0, or a traced one, unchecked."""
    return value if is_traced(value) else whole("seed", value, least=0)


def real(
    label: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Checks a number.

    Args:
        label: the argument's name, for the message.
        value: anything that float takes except a bool or a string; or a traced scalar.
        least: the least value allowed; None: no such bound.
        above: a bound that the value must exceed; None: no such bound.
        below: a bound that the value must stay below; None: no such bound.

    Returns:
        The value as a float. A traced value is not checked, and returned weakly typed.

    Raises:
        ValueError: the value is not a finite number within the bounds.
    """
    if is_traced(value):
        from syncalgos._dtypes import weak

        return weak(label, value)
    possible_bounds = {"at least": least, "above": above, "below": below}
    bounds = {}
    for word, bound in possible_bounds.items():
        if bound is not None:
            bounds[word] = bound
    rule = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items())
    if below is None:
        rule = f"a finite number {rule}".strip()
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    holds = (_HOLDS[word](number, bound) for word, bound in bounds.items())
    if not (math.isfinite(number) and all(holds)):
        raise ValueError(f"{label} must be {rule}, got {shown(value)}")
    return number


def share(label: str, value: Any) -> float:
    """Returns the value as `real` does, or raises a ValueError unless 0 < value ≤ 1."""
    number = real(label, value, above=0)
    if not is_traced(number) and number > 1:
        raise ValueError(f"{label} must be at most 1, got {shown(value)}")
    return number


def density(where: str, value: Any) -> float:
    """Returns the share of entries to send as a float; it determines shapes.

    Args:
        where: the function that was called, for the message.
        value: above 0 and at most 1, and not traced.
    """
    untraced(f"{where}: density", value)
    return share(f"{where}: density", value)


def learning_rate(where: str, value: LearningRate) -> Callable[[Any], Any]:
    """Checks a learning rate.

    Args:
        where: the function that was called, for the message.
        value: a number above 0, or a schedule: local step -> learning rate.

    Returns:
        The learning rate as a schedule.

    Raises:
        ValueError: the value is neither a schedule nor a finite number above 0.
    """
    import jax.numpy as jnp

    if callable(value):

        def checked_rate(step: Any) -> Any:
            rate = value(step)
            if jnp.shape(rate):
                raise ValueError(
                    f"{where}: learning_rate must return a number for each step, got "
                    f"shape {jnp.shape(rate)}"
                )
            return rate

        return checked_rate
    number = real(f"{where}: learning_rate", value, above=0)
    return lambda step: jnp.asarray(number, float)


def global_batch(batch: int, workers: int, accumulate: int = 1) -> None:
    """Refuses a global batch that does not divide over workers and microbatches.

    Args:
        batch: examples in the global batch.
        workers: the number of workers.
        accumulate: microbatches of each worker.

    Raises:
        ValueError: it does not divide; the message suggests batches that do.
    """
    if batch == 0 or batch % workers:
        raise ValueError(
            f"global batch of {batch} does not divide over {workers} workers: use a "
            f"multiple of {workers}, such as {_multiples_near(batch, workers)}"
        )
    parts = workers * accumulate
    if batch % parts:
        raise ValueError(
            f"accumulate: {batch // workers} examples of each of {workers} workers do "
            f"not divide into {accumulate} microbatches: use a global batch that is a "
            f"multiple of {parts}, such as {_multiples_near(batch, parts)}"
        )


def _multiples_near(number: int, unit: int) -> str:
    """Returns the multiples around a number, such as "8 or 12"; none is 0."""
    below = number - number % unit
    return " or ".join(str(n) for n in (below, below + unit) if n)


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggests the closest of some names.

    Args:
        name: the name that the user wrote.
        names: the possible names.

    Returns:
        "; did you mean 'x'?", or "" if no name is close. A name that begins with the
        written one counts as close, as does one that has it as a word, as block_lr has
        lr.
    """
    # Compared in lower case and without the leading dashes that all flags share.
    written = name.casefold().lstrip("-")
    names_by_key = {x.casefold().lstrip("-"): x for x in names if x != name}
    close_keys = difflib.get_close_matches(written, names_by_key, n=1, cutoff=0.66)
    if not close_keys and len(written) > 2:
        beginning = (key for key in names_by_key if key.startswith(written))
        close_keys = sorted(beginning, key=len)
    if not close_keys:
        containing = (key for key in names_by_key if written in key.split("_"))
        close_keys = sorted(containing, key=len)
    return f"; did you mean {names_by_key[close_keys[0]]!r}?" if close_keys else ""


def attribute_error(owner: str, name: str, names: Iterable[str]) -> AttributeError:
    """Makes the error for an attribute that an object of a class does not have."""
    hint = nearest(name, names)
    # With its name, Python does not add a suggestion of its own.
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name)


def one_of(
    kind: str, name: str, names: Iterable[str], instead: Mapping[str, str] | None = None
) -> str:
    """Returns `name` if it is one of `names`.

    Args:
        kind: a noun for the name, for the message.
        name: the name that the user wrote.
        names: the possible names.
        instead: what to use for names that others have, such as "use 'diloco'".

    Raises:
        ValueError: another name. The message suggests the closest one, and lists the
            names if they are few or none is close.
    """
    names = list(names)
    if name not in names:
        if instead and name in instead:
            hint = f": {instead[name]}"
        else:
            hint = nearest(str(name), names)
        is_long = hint and len(names) > MOST_LISTED
        listed = "" if is_long else f" (one of: {', '.join(names)})"
        raise ValueError(f"unknown {kind} {name!r}{hint}{listed}")
    return name


ByLeaf = Callable[[str, tuple[int, ...]], Any] | Callable[[Any], Any]
"""A function of a leaf's path, such as "blocks/up/w", and its shape; or one of params,
which returns a tree."""


def is_function(value: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether a value is a function, and not a tree whose class can be called."""
    import jax

    return callable(value) and jax.tree_util.all_leaves([value])


def leaf_name(path: Any) -> str:
    """Returns a leaf's path in a tree as text, such as "blocks/up/w"."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree_name: str, tree: Any) -> list[tuple[str, Any]]:
    """Returns each leaf of a tree with its name for messages: what['w'], …"""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(tree_name + jax.tree_util.keystr(path), x) for path, x in leaves]


def labels(tree_name: str, tree: Any, params: Any) -> list[Any]:
    """Returns a label for each leaf of params.

    Args:
        tree_name: the argument's name, for the message.
        tree: a tree of labels like params, in which one label may stand for a whole
            subtree; or a function, (a leaf's path, its shape) -> label, or params ->
            such a tree.
        params: the model.

    Returns:
        The labels, in the order of the leaves of params.

    Raises:
        ValueError: the tree has another structure, or the function takes other
            arguments.
    """
    import jax
    import numpy as np

    if is_function(tree) and misfit(tree, ["params"]):
        called_with(tree_name, tree, ["path", "shape"])
        leaves = jax.tree.leaves_with_path(params)
        return [tree(leaf_name(path), np.shape(x)) for path, x in leaves]
    tree = tree(params) if is_function(tree) else tree
    try:
        return jax.tree.leaves(jax.tree.broadcast(tree, params))
    except ValueError as error:
        difference = unlike(tree_name, params, tree, prefix=True)
        raise ValueError(
            f"{tree_name} must be a tree like params: {difference}"
        ) from error


def unlike(tree_name: str, expected_tree: Any, tree: Any, prefix: bool = False) -> str:
    """Names the first node at which the structures of two trees differ.

    Args:
        tree_name: the name of `tree`, for the message.
        expected_tree: the expected tree.
        tree: the tree to compare with it.
        prefix: whether a leaf of `tree` may stand for a whole subtree.

    Returns:
        A text such as "buffers['dropout'] is missing"; "" if the structures agree.
    """
    import jax

    def is_leaf(node: Any) -> bool:
        return jax.tree_util.all_leaves([node])

    def kind(node: Any) -> str:
        if is_leaf(node):
            return "array"
        is_empty = node is None or (type(node) is tuple and not node)
        return str(node) if is_empty else type(node).__name__

    expected_nodes = _nodes(expected_tree)
    nodes = _nodes(tree)
    for path, expected in expected_nodes.items():
        name = tree_name + jax.tree_util.keystr(path)
        if path not in nodes:
            parent = path[:-1]
            if prefix and (parent not in nodes or is_leaf(nodes[parent])):
                continue
            return f"{name} is missing"
        node = nodes[path]
        if kind(node) != kind(expected) and not (prefix and is_leaf(node)):
            return f"{name} is {kind(node)}, not {kind(expected)}"
    for path in nodes:
        if path not in expected_nodes:
            return f"{tree_name}{jax.tree_util.keystr(path)} is unexpected"
    if prefix:
        return ""
    # Static fields of a node, such as a module's settings; the innermost node first.
    for path, expected in reversed(expected_nodes.items()):
        if jax.tree.structure(expected) != jax.tree.structure(nodes[path]):
            name = tree_name + jax.tree_util.keystr(path)
            return f"{name}, a {type(expected).__name__}, has other static fields"
    return ""


def _nodes(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Returns all nodes of a tree by their paths, outer nodes before inner ones."""
    import jax

    nodes_by_path: dict[tuple[Any, ...], Any] = {}

    def note(path: tuple[Any, ...], node: Any) -> bool:
        nodes_by_path[path] = node
        return False

    jax.tree_util.tree_flatten_with_path(tree, note, is_leaf_takes_path=True)
    return nodes_by_path
