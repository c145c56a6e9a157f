"""Selects the form in which a device runs its lanes.

Nothing is computed here: the choice follows from what losses and strategies declare,
and from traces. Whether a loss that is said to be a mean is one is checked with numbers
(`Compiled`), by `check_mean`.
"""

from typing import NamedTuple

import jax
import numpy as np

from syncalgos import checks
from syncalgos.combinators import introspection
from syncalgos.engine.inner_step import asks
from syncalgos.engine.lanes import groups, traces
from syncalgos.engine.lanes.execution import Compared
from syncalgos.engine.lanes.traces import One
from syncalgos.engine.losses import WEIGHT, is_per_example
from syncalgos.engine.placement.backends import Replicated
from syncalgos.engine.placement.layout import Layout
from syncalgos.engine.program import Inputs, Own
from syncalgos.engine.state import of_one
from syncalgos.engine.worker import Found, Worker
from syncalgos.jaxprs import equations, reads
from syncalgos.removed import LANE_FORMS
from syncalgos.strategy import apply_reduce, seeing

FORMS = VECTORIZED, SEQUENTIAL, MERGED = "vectorized", "sequential", "merged"

# On CPUs, lanes are faster one after the other if a step of all lanes computes more
# than the caches hold. The exception is a lane so small that starting it takes as long
# as computing it (docs/performance.md).
CACHED = 4e6  # bytes
SMALL = 1e5


def checked(asked: str | None) -> str | None:
    """Returns the form that was asked for; None stays None.

    Raises:
        ValueError: the name is unknown.
    """
    if asked is None:
        return None
    return checks.one_of("lane_form", asked, FORMS, LANE_FORMS)


class Unfit(ValueError):
    """The error for a form that this loss or this strategy cannot take."""


class Chosen(NamedTuple):
    """The form in which a device runs its lanes.

    Attributes:
        form: one of FORMS.
        group: the number of lanes that a merged gradient takes at a time; None is all.
    """

    form: str
    group: int | None = None


class Traits(NamedTuple):
    """Traits of a worker's loss and inner optimizer.

    Attributes:
        draws: the loss uses its key.
        weighs: the loss weighs its microbatches.
        convolves: the loss contains convolutions.
        bytes: the bytes of everything that a forward pass and an update compute.
    """

    draws: bool
    weighs: bool
    convolves: bool
    bytes: int


def choose(
    asked: str | None,
    worker: Worker,
    layout: Layout,
    own: Own,
    inputs: Inputs,
    replicated: Replicated,
) -> Chosen:
    """Selects the form of the lanes' local steps.

    Args:
        asked: one of FORMS; None takes the fastest known form.
        worker: the worker whose local steps are run.
        layout: the place of each worker.
        own: the state of all workers.
        inputs: the inputs of all workers.
        replicated: for each leaf of own, whether it is identical in all lanes.

    Raises:
        Unfit: this loss or this strategy cannot take the form; the message says why.
    """
    # No strategy fits both other forms: merged needs the mean of the gradients,
    # sequential needs gradients that are not reduced.
    takes_mean = introspection.takes_mean(worker.strategy)
    form = asked or (MERGED if takes_mean else SEQUENTIAL)
    may_merge = takes_mean and is_per_example(worker.loss)
    may_pay = asked or may_merge or _may_take_turns(worker, layout, own, inputs)
    if form == VECTORIZED or not may_pay:
        return Chosen(VECTORIZED)  # for any loss, so it need not be traced
    one = traces.of_one_worker(own, inputs)
    loss = traits(worker, layout, one)
    is_large = loss.bytes > SMALL and loss.bytes * layout.lanes > CACHED
    if not (asked or may_merge or (is_large and not loss.convolves)):
        return Chosen(VECTORIZED)  # no need to trace the backward pass: 0.1 s
    leaves = len(jax.tree.leaves(own.replica))
    once = replicated is not None and all(replicated[:leaves])
    identical = once or layout.lanes == 1
    # If the loss draws or communicates, a worker's own batch matters.
    talks = (
        _communicates(worker, one),
        "the loss or the inner optimizer communicates with other workers",
    )
    against = [
        (not takes_mean, "the strategy does not take the mean of all gradients"),
        (jax.tree.leaves(own.replica.buffers), "each worker has buffers of its own"),
        (loss.draws, "the loss draws from each worker's own key"),
        (loss.weighs, f"the loss weighs its batches by {WEIGHT!r}"),
        talks,
        (not identical, "the replicas are not known to be identical"),
        (worker.strategy.sees_loss, "the strategy sees each worker's own loss"),
    ]
    if form == SEQUENTIAL:
        keeps = keeps_gradients(worker, layout, own)
        against = [(not keeps, "the strategy reduces gradients"), talks]
    why = next((why for holds, why in against if holds), None)
    if asked and why:
        raise Unfit(f"lane_form cannot be {asked!r}: {why}")
    if why:
        return Chosen(VECTORIZED)
    if form == SEQUENTIAL:
        return Chosen(SEQUENTIAL)
    return Chosen(MERGED, _group(worker, layout, one, loss))


def _may_take_turns(worker: Worker, layout: Layout, own: Own, inputs: Inputs) -> bool:
    """Whether lanes can run one after the other between syncs, and would be faster."""
    return (
        on_cpu(layout)
        and layout.lanes > 1
        and jax.tree.leaves(inputs.batches)[0].shape[0] > 1
        and introspection.rests(worker.strategy)
        and keeps_gradients(worker, layout, own)
    )


def traits(worker: Worker, layout: Layout, one: One) -> Traits:
    """Traces a local step of one worker."""

    def program(one: One):
        metrics = worker.metrics(one.replica, one.batch, one.key, one.data, 0)
        found = Found(one.replica.params, one.replica.buffers, metrics)
        return metrics, worker.updated(one.replica, found, metrics["loss"])

    jaxpr, (metrics, _) = traces.traced(program, layout, one)
    held = equations(jaxpr.jaxpr)
    return Traits(
        draws=reads(jaxpr.jaxpr, 0),
        weighs=WEIGHT in metrics,
        convolves=any(e.primitive.name == "conv_general_dilated" for e, _ in held),
        bytes=groups.results(jaxpr.jaxpr),
    )


def _group(worker: Worker, layout: Layout, one: One, found: Traits) -> int | None:
    """The number of lanes that a merged gradient takes at a time; None is all."""
    # XLA on CPU runs convolutions slowly inside a loop (docs/results.md).
    if layout.lanes == 1 or found.convolves or not on_cpu(layout):
        return None
    passes = traces.losses(worker, layout, one)
    return groups.size(*passes, layout.lanes, one.replica.params)


def check_mean(
    asked: str | None, workers: int, told: Compared, rounding: float
) -> None:
    """Checks that a loss is a mean over its batch, as merged gradients need.

    Args:
        asked: the form that was asked for; None means that `per_example` made the loss.
        workers: the number of workers whose batches were merged.
        told: the loss and gradients of the merged batch beside those of its parts.
        rounding: the relative rounding of the coarsest numbers in the loss.

    Raises:
        Unfit: the loss is no mean; the message says what differs.
    """
    # Wide enough for sums in another order, and far below what a batch's size, masks
    # or statistics change.
    near = rounding**0.5
    what = None
    # Written so that numbers that are not finite tell nothing.
    if abs(told.loss - told.mean) > near * told.loss_size:
        what = f"it is {told.loss:.4g}, and their mean {told.mean:.4g}"
    elif told.apart > near * told.size:
        percent = 100 * told.apart / told.size
        what = f"its gradient differs from the mean of theirs by {percent:.2g} %"
    if what:
        claim = f"lane_form cannot be {MERGED!r}" if asked else "per_example"
        raise Unfit(
            f"{claim}: the loss is no mean over independent examples: for the batches "
            f"of {workers} workers as one, {what}; use lane_form={VECTORIZED!r}"
        )


def keeps_gradients(worker: Worker, layout: Layout, own: Own) -> bool:
    """Whether the strategy's `reduce` returns gradients and its state unchanged.

    This includes a custom `reduce` if its trace shows that it changes nothing.
    """
    if not introspection.has_reduce(worker.strategy):
        return True
    if introspection.takes_mean(worker.strategy):
        return False  # no need to trace it
    replica, sync = of_one(own)
    # For an optimizer that asks for the loss, workers would share it at each step.
    if asks(worker.optimizer, replica, np.float32(0)):
        return False

    def reduce(grads, sync, replica, step):
        return apply_reduce(worker.strategy, grads, replica, sync, step)

    given = replica.params, sync, seeing(worker.strategy, replica), np.int32(0)
    jaxpr = traces.traced(reduce, layout, *given)[0].jaxpr
    kept = zip(jaxpr.outvars, jaxpr.invars, strict=False)
    return not jaxpr.effects and all(x is y for x, y in kept)


def on_cpu(layout: Layout) -> bool:
    """Whether the layout's devices are CPUs."""
    return layout.devices[0].platform == "cpu"


def _communicates(worker: Worker, one: One) -> bool:
    """Whether the loss or the optimizer names an axis."""

    def program(one: One):
        found = worker.gradients(one.replica, one.batch, one.key, one.data, 0)
        return worker.updated(one.replica, found, found.metrics["loss"])

    try:
        jax.eval_shape(program, one)
    except NameError:  # the program names an axis, and none exists here
        return True
    return False
