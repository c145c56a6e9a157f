"""Losses in the forms that users give, and in the engine's single form."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks
from syncalgos._calls import suggest_arguments
from syncalgos._dtypes import widen
from syncalgos.collectives import PyTree

Loss = Callable[
    [PyTree, PyTree, PyTree, jax.Array], tuple[Any, tuple[PyTree, dict[str, Any]]]
]
PlainLoss = Callable[[PyTree, PyTree], Any] | Callable[[PyTree, PyTree, jax.Array], Any]
OF_WORKERS = "worker_loss"
WEIGHT = "microbatch_weight"


KEY_NAMES = "key", "rng"
# A third argument of these names is none of loss(params, batch, key).
OTHER_NAMES = "params", "buffers", "batch"


class _Stateless(NamedTuple):
    plain: Callable[..., Any]
    key_argument: inspect.Parameter | None

    def __call__(
        self, params: PyTree, buffers: PyTree, batch: PyTree, key: Any
    ) -> tuple[Any, tuple[PyTree, dict[str, Any]]]:
        value = self._call_plain(params, batch, key)
        if isinstance(value, tuple | list):
            raise ValueError(
                f"a loss(params, batch) must return a scalar, got {len(value)} values: "
                "to return metrics, write loss(params, buffers, batch, key) -> "
                "(scalar, (buffers, metrics))"
            )
        return value, (buffers, {})

    def _call_plain(self, params: PyTree, batch: PyTree, key: Any) -> Any:
        if self.key_argument is None:
            return self.plain(params, batch)
        if self.key_argument.kind is inspect.Parameter.POSITIONAL_ONLY:
            return self.plain(params, batch, key)
        return self.plain(params, batch, **{self.key_argument.name: key})


@suggest_arguments
def stateless(loss: PlainLoss) -> Loss:
    """Gives a plain loss the engine's form, as `DataParallel` itself does.

    A plain loss is `loss(params, batch) -> scalar`, or `loss(params, batch, key) ->
    scalar` if it draws random numbers. The third argument may have any name but
    "params", "buffers" and "batch". If it may be left out, or is keyword-only, it gets
    the key only if it is named "key" or "rng".

    Example:
        >>> from syncalgos import stateless
        >>> loss = stateless(lambda params, batch: (params - batch) ** 2)
        >>> loss(1.0, (), 3.0, None)
        (4.0, ((), {}))
    """
    return _Stateless(loss, find_key_argument(loss))


def find_key_argument(loss: Any) -> inspect.Parameter | None:
    """Returns the argument of a plain loss that gets the key; None if there is none.

    It is the only argument behind params and batch that must be given. If there is
    none, it is one named "key" or "rng" whose default is None.
    """
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # not a function, or one without a signature
        return None
    for parameter in list(signature.parameters.values())[2:]:
        if _takes_key(parameter) and _can_be_called(signature, parameter):
            return parameter
    return None


def has_key_third(loss: Any) -> bool:
    """Whether a loss is (params, batch, key, …), by the name of its third argument."""
    key_argument = find_key_argument(loss)
    if key_argument is None or key_argument.name not in KEY_NAMES:
        return False
    names = list(inspect.signature(loss).parameters)
    return names[2] == key_argument.name


def _takes_key(parameter: inspect.Parameter) -> bool:
    """Whether an argument behind params and batch asks for the key."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    if parameter.name in KEY_NAMES:
        return parameter.default is parameter.empty or parameter.default is None
    has_place = parameter.kind is not parameter.KEYWORD_ONLY
    is_required = parameter.default is parameter.empty
    return has_place and is_required and parameter.name not in OTHER_NAMES


def _can_be_called(signature: inspect.Signature, key: inspect.Parameter) -> bool:
    """Whether a loss needs no argument but params, batch and the key."""
    try:
        if key.kind is key.POSITIONAL_ONLY:
            signature.bind("params", "batch", "key")
        else:
            signature.bind("params", "batch", **{key.name: "key"})
    except TypeError:
        return False
    return True


def warn_of_unseen(losses: tuple[Any, Any], buffers: PyTree) -> None:
    """Warns if there are buffers but neither loss takes any: none would be updated."""
    if all(isinstance(x, _Stateless) for x in losses) and jax.tree.leaves(buffers):
        warnings.warn(
            "a loss(params, batch) never sees these buffers, which keep their values: "
            "write loss(params, buffers, batch, key) -> (scalar, (buffers, metrics))",
            stacklevel=4,  # points at the caller of init
        )


class _PerExample(NamedTuple):
    values: Callable[..., tuple[dict[str, Any], PyTree]]

    def __call__(
        self, params: PyTree, buffers: PyTree, batch: PyTree, key: Any
    ) -> tuple[Any, tuple[PyTree, dict[str, Any]]]:
        values, buffers = self.pair(params, buffers, batch, key)
        means = _means(values)
        return means.pop("loss"), (buffers, means)

    def pair(
        self, params: PyTree, buffers: PyTree, batch: PyTree, key: Any
    ) -> tuple[dict[str, Any], PyTree]:
        """Calls the function; raises a ValueError unless it returns such a pair."""
        with _explain_errors(self, params, buffers, batch):
            result = self.values(params, buffers, batch, key)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ValueError(
                "per_example: the function must return (values, buffers), got "
                f"{checks.shown(result)}"
            )
        if not isinstance(result[0], Mapping):
            raise ValueError(
                "per_example: values must be a dict, such as {'loss': (batch,)}, got "
                f"{checks.shown(result[0])}"
            )
        return dict(result[0]), result[1]


@suggest_arguments
def per_example(
    values: Callable[
        [PyTree, PyTree, PyTree, jax.Array], tuple[dict[str, Any], PyTree]
    ],
) -> Loss:
    """Makes a loss from a function that returns a value for each example.

    The loss is the mean of these values. The engine can then compute the batches of
    several workers as one ("merged", see `Placement`), and still reports each worker's
    own values. The first `run` of this form checks with numbers that the loss is a mean
    over independent examples.

    Args:
        values: (params, buffers, batch, key) -> ({"loss": (batch,), ...}, buffers). The
            values of an example must not depend on the others, except through buffers.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import per_example
        >>> @per_example
        ... def loss(params, buffers, batch, key):
        ...     apart = batch - params
        ...     return {"loss": apart**2, "hit": apart < 1}, buffers
        >>> value, (buffers, metrics) = loss(1.0, (), jnp.array([1.0, 3.0]), None)
        >>> float(value), float(metrics["hit"])
        (2.0, 0.5)
    """
    return _PerExample(values)


def is_per_example(loss: Loss) -> bool:
    """Whether `per_example` made the loss."""
    return isinstance(loss, _PerExample)


def normalized_loss(
    loss: Loss, workers: int = 0, merged: int | None = None
) -> Callable[..., Any]:
    """A loss in the engine's form: (params, buffers, batch, key, worker_index).

    Args:
        loss: the loss in a user's form.
        workers: the number of workers if the metrics hold each worker's loss, of shape
            (workers,); else 0. A mean over the workers keeps these losses.
        merged: the number of workers whose batches form one batch; its leaves lead with
            (merged, batch). None means one worker; leaves lead with (batch,).
            `worker_index` is the number of the first of these workers.

    Raises:
        ValueError: at a call, if the loss returns a result of another form.
    """

    def normalized(
        params: PyTree, buffers: PyTree, batch: PyTree, key: Any, worker_index: Any
    ) -> tuple[Any, tuple[PyTree, dict[str, Any]]]:
        # New nodes: a flax.nnx module writes into the nodes from which it is merged.
        buffers = jax.tree.map(lambda x: x, buffers)
        if merged is not None:
            batch = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), batch)
        if isinstance(loss, _PerExample):
            values, buffers = loss.pair(params, buffers, batch, key)
            metrics = _means(values)
            value = metrics["loss"]
            example_losses = values["loss"].reshape(merged or 1, -1)
            worker_losses = jnp.mean(example_losses, 1)  # (merged,)
        else:
            value, (buffers, metrics) = _call_loss(loss, params, buffers, batch, key)
            worker_losses = jnp.broadcast_to(value, merged or 1)
        if workers:
            all_losses = _place_losses(widen(worker_losses), workers, worker_index)
            metrics = {**metrics, OF_WORKERS: all_losses}  # (workers,)
        # Integer and boolean metrics are averaged, too, so all metrics become floats.
        metrics = jax.tree.map(lambda x: jnp.asarray(x) * 1.0, metrics)
        return value, (buffers, metrics)

    return normalized


def _place_losses(
    worker_losses: jax.Array, workers: int, first_worker: Any
) -> jax.Array:
    """Places the losses of the workers from `first_worker` on, scaled for a mean."""
    # No scatter: it would take longer than a small model's step.
    num_losses = len(worker_losses)
    offsets = jnp.arange(workers) - first_worker
    is_own = jnp.logical_and(offsets >= 0, offsets < num_losses)
    losses = worker_losses
    if num_losses > 1:
        losses = worker_losses[jnp.clip(offsets, 0, num_losses - 1)]  # (workers,)
    return jnp.where(is_own, losses * (workers / num_losses), 0)


def _means(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the mean of each value; refuses values that are not per example."""
    shapes = {name: jnp.shape(value) for name, value in values.items()}
    if len(shapes.get("loss", ())) != 1 or len(set(shapes.values())) > 1:
        raise ValueError(
            "per_example: values must hold 'loss', and all have shape (batch,), got "
            f"shapes {shapes}"
        )
    if WEIGHT in values:
        raise ValueError(
            f"per_example: values cannot hold {WEIGHT!r}: all examples weigh the same"
        )
    return {name: jnp.mean(value) for name, value in values.items()}


@contextmanager
def _explain_errors(
    loss: Loss, params: PyTree, buffers: PyTree, batch: PyTree
) -> Iterator[None]:
    """Adds notes to an error inside a loss: what it was called with."""
    try:
        yield
    except Exception as error:
        leaves = checks.named_leaves("batch", batch)[:5]
        shapes = [f"params a {type(params).__name__}"]
        shapes += [f"{name} {jnp.shape(x)}" for name, x in leaves]
        shapes_text = ", ".join(shapes)
        if not isinstance(loss, _Stateless):
            error.add_note(
                f"called as loss(params, buffers, batch, key) with {shapes_text}"
            )
        elif loss.key_argument is not None:
            error.add_note(f"called as loss(params, batch, key) with {shapes_text}")
            if loss.key_argument.name not in KEY_NAMES:
                error.add_note(
                    f"the loss's third argument, {loss.key_argument.name!r}, got a "
                    "random key: a batch of several arrays is one argument, such as a "
                    "dict"
                )
        else:
            error.add_note(f"called as loss(params, batch) with {shapes_text}")
        if not (jax.tree.leaves(buffers) or isinstance(loss, _Stateless)):
            error.add_note("this loss got no buffers: pass them to init, after params")
        raise


def _call_loss(
    loss: Loss, params: PyTree, buffers: PyTree, batch: PyTree, key: Any
) -> Any:
    """Calls a loss, checks its result's form, and adds its value to the metrics."""
    with _explain_errors(loss, params, buffers, batch):
        result = loss(params, buffers, batch, key)
    try:
        value, (buffers, metrics) = result
        metrics = {**metrics, "loss": value}
    except (TypeError, ValueError):
        raise ValueError(
            "loss must return (scalar, (buffers, metrics)) with a dict of metrics, or "
            "take (params, batch) and return a scalar"
        ) from None
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        raise ValueError(
            f"loss must be a scalar, the mean over its batch, got {checks.shown(value)}"
        )
    if jnp.shape(value):
        raise ValueError(
            "loss must be a scalar, the mean over its batch, got shape "
            f"{jnp.shape(value)}"
        )
    if np.ndim(metrics.get(WEIGHT, 0)):
        raise ValueError(
            f"metric {WEIGHT!r} must be a scalar, got shape {np.shape(metrics[WEIGHT])}"
        )
    return value, (buffers, metrics)
