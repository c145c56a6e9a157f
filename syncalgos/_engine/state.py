"""The state of a training run, on devices or on the host."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks
from syncalgos._combinators import arrivals, introspection
from syncalgos._engine import arguments
from syncalgos._engine.placement.layout import Layout
from syncalgos._engine.program import WorkerState
from syncalgos.steps import TABLED
from syncalgos.strategy import PyTree, Replica, Strategy


class TrainState(NamedTuple):
    """Everything needed to continue training after a call of `run`.

    Attributes:
        replica: the replicas of all workers; leaves begin with the axes (devices,
            lanes).
        sync: the strategy's state of all workers; leaves begin with the same axes.
        step: the number of local steps done, an int32 scalar.
        key: the key from which each worker's key of each step is folded.
        hyperparams: the numbers given to `init`; they may be replaced.

    `trainer.center(state)` returns one plain model, to evaluate and ship.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, bmuf
        >>> loss = lambda params, batch: (params - batch).mean() ** 2
        >>> trainer = DataParallel(loss, optax.sgd(0.1), bmuf(4), workers=6)
        >>> state = trainer.init(jnp.float32(0))
        >>> state, _ = trainer.run(state, jnp.ones((4, 6)))
        >>> int(state.step), state.replica.params.size
        (4, 6)
    """

    replica: Replica
    sync: PyTree
    step: jax.Array
    key: jax.Array
    hyperparams: PyTree = None

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Says where the params are; called only for missing attributes."""
            if name in Replica._fields:
                raise AttributeError(
                    f"TrainState has no attribute {name!r}: use "
                    f"trainer.center(state).{name} for one plain model, or "
                    f"state.replica.{name} for all workers"
                )
            raise checks.attribute_error("TrainState", name, self._fields)

    @property
    def own(self) -> WorkerState:
        """The data of all workers, in the form that programs take."""
        return WorkerState(self.replica, self.sync)


def drop_worker_axes(tree: PyTree, axes: int = 2) -> PyTree:
    """Returns the shapes of one worker's leaves, without the leading worker axes."""

    def leaf_shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(np.shape(x)[axes:], dtype)

    return jax.tree.map(leaf_shape, tree)


def waits_untrained(strategy: Strategy, num_steps: int, workers: int = 1) -> bool:
    """Whether the center is still the first model after so many local steps."""
    # Only a center of its own can wait longer than for some gradients.
    if num_steps > TABLED or not introspection.has_center(strategy):
        return False
    center_parts = arrivals.arrivals(strategy)
    return not arrivals.included(center_parts, num_steps, workers).any()


def as_data(numbers: PyTree, layout: Layout) -> PyTree:
    """Puts numbers on the devices."""

    def to_devices(x: Any) -> jax.Array:
        # From a Python number, which does not widen other arrays.
        return layout.copy(jnp.asarray(np.asarray(x).item()))

    return jax.tree.map(to_devices, numbers)


class StepCount:
    """Remembers the step of the last run's state, without waiting for that run."""

    def __init__(self):
        self._last_step: Callable[[], jax.Array | None] = lambda: None
        self._num_steps = 0

    def count_after(self, step: jax.Array, steps: int) -> int:
        """Returns the step of a state after some more local steps.

        Raises:
            ValueError: the result is not from 0 to 2³¹ - 1.
        """
        num_steps = self._num_steps if self._last_step() is step else int(step)
        arguments.check_step_count(num_steps + steps)
        return num_steps + steps

    def note(self, step: jax.Array, num_steps: int) -> None:
        """Notes the array of a step that a run returned, and its value."""
        self._last_step = weakref.ref(step)
        self._num_steps = num_steps
