"""Selects the form in which a device runs its lanes.

Nothing is computed here: the choice follows from what losses and strategies declare,
and from traces. Whether a loss that is said to be a mean is one is checked with numbers
(`Compiled`), by `check_mean`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from syncalgos._combinators import introspection
from syncalgos._engine.inner_step import asks
from syncalgos._engine.lanes import groups, traces
from syncalgos._engine.lanes.execution import Compared
from syncalgos._engine.lanes.traces import One
from syncalgos._engine.losses import WEIGHT, is_per_example
from syncalgos._engine.placement.backends import Replicated
from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.program import Inputs, Own
from syncalgos._engine.state import of_one
from syncalgos._engine.worker import Found, Worker
from syncalgos._jaxprs import equations, reads
from syncalgos.strategy import PyTree, apply_reduce, seeing

FORMS = VECTORIZED, SEQUENTIAL, MERGED = "vectorized", "sequential", "merged"

# On CPUs, lanes are faster one after the other if a step of all lanes computes more
# than the caches hold. The exception is a lane so small that starting it takes as long
# as computing it (docs/measured.md).
CACHED = 4e6  # bytes
SMALL = 1e5


class LaneFormError(ValueError):
    """The lanes of a device cannot run in the form that was asked for.

    The message says why. It comes from the first `run`, for `lane_form` in a Placement,
    or for a loss of `per_example` that is no mean over its examples.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import syncalgos
        >>> trainer = syncalgos.DataParallel(
        ...     lambda params, batch: (params * batch).sum(),  # no mean
        ...     optax.sgd(0.1),
        ...     syncalgos.sync_sgd(),
        ...     workers=2,
        ...     placement=syncalgos.Placement(devices=[0], lane_form="merged"),
        ... )
        >>> try:
        ...     trainer.run(trainer.init(jnp.float32(1)), jnp.ones((1, 4)))
        ... except syncalgos.LaneFormError as error:
        ...     print(str(error)[:70])
        lane_form cannot be 'merged': the loss is no mean over independent exa
    """


@dataclass
class Facts:
    """Facts about local steps, each found when it is first asked for.

    Attributes:
        worker: the worker whose local steps are run.
        layout: the place of each worker.
        own: the state of all workers.
        inputs: the inputs of all workers.
        replicated: for each leaf of own, whether it is identical in all lanes.
    """

    worker: Worker
    layout: Layout
    own: Own
    inputs: Inputs
    replicated: Replicated

    @cached_property
    def one(self) -> One:
        """One worker's arguments of a local step."""
        return traces.of_one_worker(self.own, self.inputs)

    @cached_property
    def step(self) -> tuple[Any, PyTree]:
        """The jaxpr of a local step without gradients, and its metrics."""

        def program(one: One):
            metrics = self.worker.metrics(one.replica, one.batch, one.key, one.data, 0)
            found = Found(one.replica.params, one.replica.buffers, metrics)
            return metrics, self.worker.updated(one.replica, found, metrics["loss"])

        jaxpr, (metrics, _) = self.layout.traced(program, self.one)
        return jaxpr.jaxpr, metrics

    @cached_property
    def convolves(self) -> bool:
        """Whether the loss contains convolutions."""
        held = equations(self.step[0])
        return any(e.primitive.name == "conv_general_dilated" for e, _ in held)

    @cached_property
    def communicates(self) -> bool:
        """Whether the loss or the optimizer names an axis."""
        _ = self.step  # raises the error for a name that a loss lacks

        # With the backward pass, which takes 0.1 s to trace.
        def program(one: One):
            found = self.worker.gradients(one.replica, one.batch, one.key, one.data, 0)
            return self.worker.updated(one.replica, found, found.metrics["loss"])

        try:
            jax.eval_shape(program, self.one)
        except NameError:  # the program names an axis, and none exists here
            return True
        return False

    @property
    def takes_mean(self) -> bool:
        """Whether the strategy takes the mean of all gradients."""
        return introspection.takes_mean(self.worker.strategy)

    @cached_property
    def keeps_gradients(self) -> bool:
        """Whether the strategy's `reduce` returns gradients and its state unchanged.

        This includes a custom `reduce` if its trace shows that it changes nothing.
        """
        strategy, (replica, sync) = self.worker.strategy, of_one(self.own)
        if not introspection.has_reduce(strategy):
            return True
        # For an optimizer that asks for the loss, workers would share it at each step.
        if self.takes_mean or asks(self.worker.optimizer, replica, np.float32(0)):
            return False

        def reduce(grads, sync, replica, step):
            return apply_reduce(strategy, grads, replica, sync, step)

        given = replica.params, sync, seeing(strategy, replica), np.int32(0)
        jaxpr = self.layout.traced(reduce, *given)[0].jaxpr
        kept = zip(jaxpr.outvars, jaxpr.invars, strict=False)
        return not jaxpr.effects and all(x is y for x, y in kept)

    def group(self) -> int | None:
        """The number of lanes that a merged gradient takes at a time; None is all."""
        layout = self.layout
        # XLA on CPU runs convolutions slowly inside a loop (docs/measured.md).
        if layout.lanes == 1 or self.convolves or not on_cpu(layout):
            return None
        passes = traces.losses(self.worker, layout, self.one)
        return groups.size(*passes, layout.lanes, self.one.replica.params)


_TALKS = "the loss or the inner optimizer communicates with other workers"


def _against_merged(x: Facts) -> Iterator[tuple[Any, str]]:
    leaves = len(jax.tree.leaves(x.own.replica))
    is_identical = x.layout.lanes == 1 or (x.replicated and all(x.replicated[:leaves]))
    yield not x.takes_mean, "the strategy does not take the mean of all gradients"
    yield jax.tree.leaves(x.own.replica.buffers), "each worker has buffers of its own"
    yield reads(x.step[0], 0), "the loss draws from each worker's own key"
    yield WEIGHT in x.step[1], f"the loss weighs its batches by {WEIGHT!r}"
    yield x.communicates, _TALKS
    yield not is_identical, "the replicas are not known to be identical"
    yield x.worker.strategy.sees_loss, "the strategy sees each worker's own loss"


def _against_sequential(x: Facts) -> Iterator[tuple[Any, str]]:
    yield not x.keeps_gradients, "the strategy reduces gradients"
    yield x.communicates, _TALKS


def _merging_pays(x: Facts) -> bool:
    return x.takes_mean and is_per_example(x.worker.loss)


def _turns_pay(x: Facts) -> bool:
    steps, lanes = jax.tree.leaves(x.inputs.batches)[0].shape[0], x.layout.lanes
    if not on_cpu(x.layout) or min(lanes, steps) == 1:
        return False
    if not introspection.rests(x.worker.strategy) or not x.keeps_gradients:
        return False
    computed = groups.results(x.step[0])
    return computed > SMALL and computed * lanes > CACHED and not x.convolves


# Forms that not all losses and strategies can take: whether one is the fastest for
# those that can, and what refuses it. Nothing is traced after the first refusal. No
# strategy fits both: merged needs the mean of the gradients, sequential needs gradients
# that are not reduced.
_TABLE = {
    MERGED: (_merging_pays, _against_merged),
    SEQUENTIAL: (_turns_pay, _against_sequential),
}


def choose(asked: str | None, facts: Facts) -> tuple[str, int | None]:
    """Selects the form of the lanes' local steps.

    Args:
        asked: one of FORMS; None takes the fastest known form.
        facts: facts about these steps.

    Returns:
        One of FORMS, and the number of lanes that a merged gradient takes at a time;
        None is all.

    Raises:
        LaneFormError: this loss or this strategy cannot take the form; the message
            says why.
    """
    for name, (pays, against) in _TABLE.items():
        if asked != name and (asked or not pays(facts)):
            continue
        reason = next((text for holds, text in against(facts) if holds), None)
        if asked and reason:
            raise LaneFormError(
                f"lane_form cannot be {asked!r}: {reason}: use lane_form={VECTORIZED!r}"
            )
        if not reason:
            return name, facts.group() if name == MERGED else None
    return VECTORIZED, None


def check_mean(
    asked: str | None, workers: int, comparison: Compared, rounding: float
) -> None:
    """Checks that a loss is a mean over its batch, as merged gradients need.

    Args:
        asked: the form that was asked for; None means that `per_example` made the
            loss.
        workers: the number of workers whose batches were merged.
        comparison: the loss and gradients of the merged batch beside those of its
            parts.
        rounding: the relative rounding of the coarsest numbers in the loss.

    Raises:
        LaneFormError: the loss is no mean; the message says what differs.
    """
    # Wide enough for sums in another order, and far below what a batch's size, masks
    # or statistics change.
    tolerance = rounding**0.5
    claim = f"lane_form cannot be {MERGED!r}" if asked else "per_example"
    # Written so that numbers that are not finite tell nothing.
    if abs(comparison.loss - comparison.mean) > tolerance * comparison.loss_size:
        raise LaneFormError(
            f"{claim}: the loss is no mean over independent examples: for the batches "
            f"of {workers} workers as one, it is {comparison.loss:.4g}, and their mean "
            f"{comparison.mean:.4g}; use lane_form={VECTORIZED!r}"
        )
    if comparison.apart > tolerance * comparison.size:
        percent = 100 * comparison.apart / comparison.size
        raise LaneFormError(
            f"{claim}: the loss is no mean over independent examples: for the batches "
            f"of {workers} workers as one, its gradient differs from the mean of "
            f"theirs by {percent:.2g} %; use lane_form={VECTORIZED!r}"
        )


def on_cpu(layout: Layout) -> bool:
    """Whether the layout's devices are CPUs."""
    return layout.devices[0].platform == "cpu"
