"""The engine's programs and the records that they take and return.

All records are pytrees, so programs are mapped field by field: `WorkerState` has worker
axes; `Inputs.shared` and `Outputs.common` have none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from syncalgos.strategy import PyTree, Replica


class WorkerState(NamedTuple):
    """A worker's own data: its replica and the state of its strategy."""

    replica: Replica
    sync: PyTree = ()


class Model(NamedTuple):
    """One plain model, from which all workers start."""

    params: PyTree
    buffers: PyTree
    key: jax.Array
    hyperparams: PyTree = None


class Shared(NamedTuple):
    """Inputs without worker axes; a program leaves out those that it does not use.

    Attributes:
        step: local steps done, an int32 scalar.
        key: the key from which each worker's key of each step is folded.
        data: leaves (examples, ...); batches then hold row numbers. None means that
            batches hold the examples themselves.
        hyperparams: numbers of the optimizer and the strategy.
    """

    step: Any = None
    key: Any = None
    data: PyTree = None
    hyperparams: PyTree = None


class Inputs(NamedTuple):
    """Everything that a program takes besides each worker's own data.

    Attributes:
        shared: a Shared, or the Model of `init`; identical on all workers.
        batches: each worker's part of each step's batch, leaves (steps, ...).
    """

    shared: Any
    batches: PyTree = ()


class Outputs(NamedTuple):
    """The result of a program.

    Attributes:
        worker_state: each worker's WorkerState; () if the program returns none.
        common: results that are identical on all workers.
    """

    worker_state: PyTree
    common: Any


class Program(NamedTuple):
    """A program, before it is mapped over workers and compiled.

    Attributes:
        function: (worker, worker_state, inputs) -> Outputs, one worker's view.
        takes_steps: whether it takes local steps. Its lanes then have several forms,
            and the buffers of `worker_state` are given up to the result. Its common
            result is (the steps done so far, their metrics).
        makes_model: whether its common result is a model.
    """

    function: Callable[[Any, Any, Inputs], Outputs]
    takes_steps: bool = False
    makes_model: bool = False
