"""Which form a device's lanes take, found by tracing.

Nothing is computed here: what losses and strategies do is read off their traces.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from syncalgos.collectives import WORKERS, PyTree
from syncalgos.combinators import introspection
from syncalgos.combinators.primitives import MeanOfGrads
from syncalgos.engine.lanes.execution import Form, InTurn, Joined, Together
from syncalgos.engine.lanes.mean_loss import is_mean
from syncalgos.engine.layout import Layout
from syncalgos.engine.losses import is_per_example
from syncalgos.engine.worker import Worker

FORMS = (Together.name, InTurn.name, Joined.name)

# On CPUs lanes are faster in turn where a step of all of them computes more than caches
# hold, unless one is so small that it takes as long to start (docs/performance.md).
CACHED = 4e6  # bytes
SMALL = 1e5


class Unfit(ValueError):
    """A form was asked for that this loss or this strategy cannot take."""


class Seen(NamedTuple):
    """What a worker's loss and inner optimizer do besides computing.

    Attributes:
        talks: they name the workers' axes, in collectives or to ask who they are.
        draws: the loss uses its key.
        convolves: it holds convolutions as such.
        tells: it has metrics of its own.
        bytes: of all that a forward pass and an update compute.
    """

    talks: bool
    draws: bool
    convolves: bool
    tells: bool
    bytes: int


def seen(worker: Worker, layout: Layout, arguments: PyTree) -> Seen:
    """Traces a local step of one worker.

    Args:
        worker: whose.
        layout: where the workers live.
        arguments: those of `spread`: (own, (shared, batches)).
    """

    def program(key, replica, batch, data):
        metrics = worker.metrics(replica, batch, key, 0, data)
        grads, buffers, loss = replica.params, replica.buffers, metrics["loss"]
        return metrics, worker.updated(replica, grads, buffers, loss)

    jaxpr, (metrics, _) = _traced(program, layout, _of_one(arguments))
    equations = [*_equations(jaxpr.jaxpr)]
    drawn = jaxpr.jaxpr.invars[0]
    return Seen(
        talks=_talks(worker, arguments),
        draws=any(v is drawn for e in jaxpr.jaxpr.eqns for v in e.invars),
        convolves=any(e.primitive.name == "conv_general_dilated" for e in equations),
        tells=len(metrics) > 1 + bool(worker.each),
        bytes=_computed(jaxpr.jaxpr),
    )


def _talks(worker: Worker, arguments: PyTree) -> bool:
    def program(key, replica, batch, data):
        grads, buffers, metrics = worker.gradients(replica, batch, key, data, 0)
        return worker.updated(replica, grads, buffers, metrics["loss"])

    try:
        jax.eval_shape(program, *_of_one(arguments))
    except NameError:  # of an axis, of which there is none here
        return True
    return False


def averages(worker: Worker, layout: Layout, arguments: PyTree) -> bool:
    """Whether the loss is seen to be a mean over its batch, of any size."""
    if layout.lanes == 1 or is_per_example(worker.loss):
        return True

    def loss(key, replica, batch, data):
        return worker.metrics(replica, batch, key, 0, data)["loss"]

    one, joined = _of_one(arguments), _of_one(arguments, layout.lanes)
    counts = [len(jax.tree.leaves(x)) for x in one]
    of_batch = np.repeat([False, False, True, False], counts).tolist()
    small = _traced(loss, layout, one)[0]
    try:
        large = _traced(loss, layout, joined)[0]
    except Exception:  # whatever it raises: it is written for batches of one size
        return False
    # A backward pass of its own may do anything with gradients, such as clip them.
    equations = _equations(small.jaxpr)
    own = any(e.primitive.name.startswith("custom_vjp") for e in equations)
    return not own and is_mean(small, large, of_batch, layout.lanes)


def _of_one(arguments: PyTree, lanes: int = 1) -> tuple[PyTree, ...]:
    """Shapes of one worker's key, replica and batch, and data; or of joined batches."""
    (replica, _), ((_, key, data), batches) = arguments

    def batch(x):
        kind = jax.typeof(x)  # has the dtype that jax makes of NumPy's int64
        return jax.ShapeDtypeStruct((lanes * x.shape[3], *x.shape[4:]), kind.dtype)

    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), replica)
    return jax.eval_shape(lambda x: x, key), one, jax.tree.map(batch, batches), data


def _traced(program: Callable, layout: Layout, arguments: PyTree) -> tuple[Any, PyTree]:
    """The jaxpr of a worker's program, and the shapes of what it returns."""
    sizes = [*zip(WORKERS, layout.shape, strict=True)]
    trace = jax.make_jaxpr(program, axis_env=sizes, return_shape=True)
    return trace(*arguments)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _computed(jaxpr: Any) -> int:
    """Bytes of all results of a jaxpr; of loops, in all turns that are known."""
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(map(_computed, core.jaxprs_in_params(equation.params)))
        own = sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
        total += inner * equation.params.get("length", 1) or own
    return total


def choose(
    asked: str | None,
    worker: Worker,
    layout: Layout,
    arguments: PyTree,
    equal: tuple[bool, ...] | None,
) -> Form:
    """The form of `Worker.run` for these arguments.

    Args:
        asked: one of FORMS; None takes what is known to be the fastest.
        worker: whose program it is.
        layout: where the workers live.
        arguments: those of `spread`: (own, (shared, batches)).
        equal: for each leaf of own, whether it is equal in all lanes; None: not known.

    Raises:
        Unfit: a form that this loss or this strategy cannot take, and why.
    """
    (replica, _), (_, batches) = arguments
    together = Together(Worker.run, equal)
    if asked == "vectorized":
        return together
    may_pay = (
        layout.devices[0].platform == "cpu"
        and layout.lanes > 1
        and jax.tree.leaves(batches)[0].shape[0] > 1
        and introspection.rests(worker.strategy)
        and worker.strategy.reduce is introspection.keep_grads
    )
    if asked is None and not may_pay and not _takes_mean(worker):
        return together  # whatever the loss is: no need to trace it
    looks = seen(worker, layout, arguments)
    against = {
        "merged": _against_joining(worker, layout, looks, replica, equal),
        "sequential": _against_turns(worker, looks),
    }
    if asked and against[asked]:
        raise Unfit(f"lanes cannot run {asked}: {against[asked]}")
    if asked == "merged" or (
        asked is None
        and not against["merged"]
        and (is_per_example(worker.loss) or not (looks.tells or worker.each))
        and averages(worker, layout, arguments)
    ):
        return Joined(equal)
    pays = (
        may_pay
        and looks.bytes > SMALL
        and looks.bytes * layout.lanes > CACHED
        and not looks.convolves
    )
    if asked == "sequential" or (asked is None and pays and not against["sequential"]):
        return InTurn(equal)
    return together


def _takes_mean(worker: Worker) -> bool:
    return isinstance(worker.strategy.reduce, MeanOfGrads)


def _against_joining(worker, layout, looks, replica, equal) -> str:
    """Why lanes' batches cannot be joined; empty if they can."""
    if not _takes_mean(worker):
        return "the strategy does not take the mean of all gradients"
    if jax.tree.leaves(replica.buffers):
        return "each worker has buffers of its own"
    if looks.draws:
        return "the loss draws from each worker's own key"
    if looks.talks:
        return "the loss or the inner optimizer talks to other workers"
    is_equal = equal is not None and all(equal[: len(jax.tree.leaves(replica))])
    if layout.lanes > 1 and not is_equal:
        return "the replicas are not known to be equal"
    return ""


def _against_turns(worker, looks) -> str:
    """Why lanes cannot run one after the other; empty if they can."""
    if worker.strategy.reduce is not introspection.keep_grads:
        return "the strategy reduces gradients"
    if looks.talks:
        return "the loss or the inner optimizer talks to other workers"
    return ""
