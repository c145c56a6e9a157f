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
from syncalgos._engine.inner_step import uses_loss
from syncalgos._engine.lanes import groups, traces
from syncalgos._engine.lanes.execution import MergedComparison
from syncalgos._engine.lanes.traces import LossArguments
from syncalgos._engine.losses import WEIGHT, is_per_example
from syncalgos._engine.placement.backends import Replicated
from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.program import Inputs, WorkerState
from syncalgos._engine.state import drop_worker_axes
from syncalgos._engine.worker import LossResults, Worker
from syncalgos._jaxprs import equations, reads
from syncalgos.strategy import PyTree, Replica, apply_reduce, seeing

VECTORIZED = "vectorized"
SEQUENTIAL = "sequential"
MERGED = "merged"
FORMS = (VECTORIZED, SEQUENTIAL, MERGED)

# On CPUs, lanes are faster one after the other if a step of all lanes computes more
# than the caches hold. The exception is a lane so small that starting it takes as long
# as computing it (docs/measured.md).
CACHE_BYTES = 4e6  # bytes
SMALL_LANE_BYTES = 1e5


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
        worker_state: the state of all workers.
        inputs: the inputs of all workers.
        replicated: for each leaf of own, whether it is identical in all lanes.
    """

    worker: Worker
    layout: Layout
    worker_state: WorkerState
    inputs: Inputs
    replicated: Replicated

    @cached_property
    def loss_arguments(self) -> LossArguments:
        """One worker's arguments of a local step."""
        return traces.make_loss_arguments(self.worker_state, self.inputs)

    @cached_property
    def traced_step(self) -> tuple[Any, PyTree]:
        """The jaxpr of a local step without gradients, and its metrics."""

        def program(x: LossArguments) -> tuple[PyTree, Replica]:
            metrics = self.worker.compute_metrics(x.replica, x.batch, x.key, x.data, 0)
            results = LossResults(x.replica.params, x.replica.buffers, metrics)
            loss = metrics["loss"]
            return metrics, self.worker.take_inner_step(x.replica, results, loss)

        jaxpr, (metrics, _) = self.layout.trace(program, self.loss_arguments)
        return jaxpr.jaxpr, metrics

    @cached_property
    def convolves(self) -> bool:
        """Whether the loss contains convolutions."""
        jaxpr, _ = self.traced_step
        names = {equation.primitive.name for equation, _ in equations(jaxpr)}
        return "conv_general_dilated" in names

    @cached_property
    def communicates(self) -> bool:
        """Whether the loss or the optimizer names an axis."""
        _ = self.traced_step  # raises the error for a name that a loss lacks

        # With the backward pass, which takes 0.1 s to trace.
        def program(x: LossArguments) -> Replica:
            results = self.worker.compute_gradients(
                x.replica, x.batch, x.key, x.data, 0
            )
            loss = results.metrics["loss"]
            return self.worker.take_inner_step(x.replica, results, loss)

        try:
            jax.eval_shape(program, self.loss_arguments)
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
        strategy = self.worker.strategy
        replica, sync = drop_worker_axes(self.worker_state)
        if not introspection.has_reduce(strategy):
            return True
        # For an optimizer that asks for the loss, workers would share it at each step.
        if self.takes_mean or uses_loss(self.worker.optimizer, replica, np.float32(0)):
            return False

        def reduce(
            grads: PyTree, sync: PyTree, replica: Replica, step: Any
        ) -> tuple[PyTree, PyTree]:
            return apply_reduce(strategy, grads, replica, sync, step)

        replica = seeing(strategy, replica)
        closed_jaxpr, _ = self.layout.trace(
            reduce, replica.params, sync, replica, np.int32(0)
        )
        jaxpr = closed_jaxpr.jaxpr
        pairs = zip(jaxpr.outvars, jaxpr.invars, strict=False)
        return not jaxpr.effects and all(x is y for x, y in pairs)

    def choose_group(self) -> int | None:
        """The number of lanes that a merged gradient takes at a time; None is all."""
        layout = self.layout
        # XLA on CPU runs convolutions slowly inside a loop (docs/measured.md).
        if layout.lanes == 1 or self.convolves or not on_cpu(layout):
            return None
        lane_jaxpr, lanes_jaxpr = traces.trace_losses(
            self.worker, layout, self.loss_arguments
        )
        params = self.loss_arguments.replica.params
        return groups.choose_group_size(lane_jaxpr, lanes_jaxpr, layout.lanes, params)


_COMMUNICATES = "the loss or the inner optimizer communicates with other workers"


def _reasons_against_merged(facts: Facts) -> Iterator[tuple[Any, str]]:
    replica = facts.worker_state.replica
    num_leaves = len(jax.tree.leaves(replica))
    has_replicated = facts.replicated and all(facts.replicated[:num_leaves])
    is_identical = facts.layout.lanes == 1 or has_replicated
    yield not facts.takes_mean, "the strategy does not take the mean of all gradients"
    yield jax.tree.leaves(replica.buffers), "each worker has buffers of its own"
    jaxpr, metrics = facts.traced_step
    yield reads(jaxpr, 0), "the loss draws from each worker's own key"
    yield WEIGHT in metrics, f"the loss weighs its batches by {WEIGHT!r}"
    yield facts.communicates, _COMMUNICATES
    yield not is_identical, "the replicas are not known to be identical"
    yield facts.worker.strategy.sees_loss, "the strategy sees each worker's own loss"


def _reasons_against_sequential(facts: Facts) -> Iterator[tuple[Any, str]]:
    yield not facts.keeps_gradients, "the strategy reduces gradients"
    yield facts.communicates, _COMMUNICATES


def _merging_pays(facts: Facts) -> bool:
    return facts.takes_mean and is_per_example(facts.worker.loss)


def _sequential_pays(facts: Facts) -> bool:
    steps = jax.tree.leaves(facts.inputs.batches)[0].shape[0]
    lanes = facts.layout.lanes
    if not on_cpu(facts.layout) or min(lanes, steps) == 1:
        return False
    if not introspection.rests(facts.worker.strategy) or not facts.keeps_gradients:
        return False
    jaxpr, _ = facts.traced_step
    lane_bytes = groups.count_result_bytes(jaxpr)
    if lane_bytes <= SMALL_LANE_BYTES or lane_bytes * lanes <= CACHE_BYTES:
        return False
    return not facts.convolves


# Forms that not all losses and strategies can take: whether one is the fastest for
# those that can, and what refuses it. Nothing is traced after the first refusal. No
# strategy fits both: merged needs the mean of the gradients, sequential needs gradients
# that are not reduced.
_FORM_RULES = {
    MERGED: (_merging_pays, _reasons_against_merged),
    SEQUENTIAL: (_sequential_pays, _reasons_against_sequential),
}


def choose(lane_form: str | None, facts: Facts) -> tuple[str, int | None]:
    """Selects the form of the lanes' local steps.

    Args:
        lane_form: one of FORMS; None takes the fastest known form.
        facts: facts about these steps.

    Returns:
        One of FORMS, and the number of lanes that a merged gradient takes at a time;
        None is all.

    Raises:
        LaneFormError: this loss or this strategy cannot take the form; the message
            says why.
    """
    for form, (is_fastest, list_reasons) in _FORM_RULES.items():
        if lane_form != form and (lane_form or not is_fastest(facts)):
            continue
        reason = next((text for holds, text in list_reasons(facts) if holds), None)
        if lane_form and reason:
            raise LaneFormError(
                f"lane_form cannot be {lane_form!r}: {reason}: use "
                f"lane_form={VECTORIZED!r}"
            )
        if not reason:
            return form, facts.choose_group() if form == MERGED else None
    return VECTORIZED, None


def check_mean(
    lane_form: str | None, workers: int, comparison: MergedComparison, rounding: float
) -> None:
    """Checks that a loss is a mean over its batch, as merged gradients need.

    Args:
        lane_form: the form that was asked for; None means that `per_example` made the
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
    claim = f"lane_form cannot be {MERGED!r}" if lane_form else "per_example"
    # Written so that numbers that are not finite tell nothing.
    if abs(comparison.loss - comparison.mean_loss) > tolerance * comparison.loss_size:
        raise LaneFormError(
            f"{claim}: the loss is no mean over independent examples: for the batches "
            f"of {workers} workers as one, it is {comparison.loss:.4g}, and their mean "
            f"{comparison.mean_loss:.4g}; use lane_form={VECTORIZED!r}"
        )
    if comparison.grads_distance > tolerance * comparison.grads_size:
        percent = 100 * comparison.grads_distance / comparison.grads_size
        raise LaneFormError(
            f"{claim}: the loss is no mean over independent examples: for the batches "
            f"of {workers} workers as one, its gradient differs from the mean of "
            f"theirs by {percent:.2g} %; use lane_form={VECTORIZED!r}"
        )


def on_cpu(layout: Layout) -> bool:
    """Whether the layout's devices are CPUs."""
    return layout.devices[0].platform == "cpu"
