"""Programs compiled before their first call, even for devices that are absent."""

from typing import Any, NamedTuple

import jax

from syncalgos.collectives import PyTree
from syncalgos.engine import arguments, worker
from syncalgos.engine.data_parallel import DataParallel, TrainState
from syncalgos.engine.inner_step import sending, with_optimizer
from syncalgos.engine.placement.layout import outside_meshes
from syncalgos.engine.program import Model
from syncalgos.ledger.counting import Sends, of_branches
from syncalgos.strategy import check_params


class Batches(NamedTuple):
    """Batches as `DataParallel.run` and `evaluate` take them."""

    batches: PyTree
    data: PyTree | None = None


@outside_meshes
def compile_all(
    trainer: DataParallel, state: TrainState, training: Batches, held_out: Batches
) -> None:
    """Compiles all programs that a training needs after `init`, without running them.

    On several cores, compiling them in parallel takes less time than compiling each at
    its first call. With several processes, this function does nothing, and each program
    is compiled at its first call.

    Args:
        trainer: the trainer whose programs are compiled.
        state: as in `run`; it stays usable.
        training: batches like those given to `run`.
        held_out: batches like those given to `evaluate`.

    Raises:
        ValueError: as in `run` and `evaluate`.
    """
    if trainer.layout.processes > 1:
        return
    compiled = trainer._compiled
    steps, _ = trainer._cut(*training, trainer._worker.accumulate)
    rows, _ = trainer._cut(*held_out, 1)
    calls = [
        compiled.of_state(worker.RUN, state, steps, training.data),
        compiled.of_state(worker.EVALUATE, state, rows, held_out.data),
        compiled.of_params(worker.DIVERGENCE, state),
        compiled.of_state(worker.CENTER, state),
    ]
    compiled.compile(calls)


class Lowered(NamedTuple):
    """Local steps before they are compiled.

    Attributes:
        state: the first state, shapes with their shardings.
        jaxpr: the traced `run`, in which a worker's mesh is one device.
        program: the lowered `run`; `program.compile()` calls the devices' compiler.
    """

    state: TrainState
    jaxpr: Any
    program: jax.stages.Lowered


@outside_meshes
def lower(
    trainer: DataParallel,
    params: PyTree,
    batches: PyTree,
    buffers: PyTree = (),
    data: PyTree | None = None,
) -> Lowered:
    """Lowers `trainer.run` as `jax.jit(f).lower` does; no array is allocated.

    The trainer's devices may be of `jax.experimental.topologies`.

    Args:
        trainer: a trainer with backend "shard_map".
        params: the params of one plain model, arrays or their shapes.
        batches: leaves (steps, global batch, ...) or, with data, rows (steps, global
            batch); arrays or their shapes.
        buffers: the model's buffers, arrays or their shapes.
        data: leaves (examples, ...), arrays or their shapes.

    Raises:
        ValueError: the backend is not "shard_map", or as in `init` and `run`.
    """
    layout = trainer.layout
    if layout.backend != "shard_map":
        raise ValueError(f"lower needs backend 'shard_map', got {layout.backend!r}")
    check_params(params)
    params, buffers, batches, data = map(_shapes, (params, buffers, batches, data))
    axes = "steps", "global_batch"
    steps, batch = arguments.leading_shape("batches", batches, axes)
    arguments.check_parts(batch, layout, trainer._worker.accumulate)
    sharding = trainer._shardings.of_model(params)

    def cut(x):
        shape = steps, *layout.shape, batch // layout.workers, *x.shape[2:]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    key = jax.eval_shape(lambda: jax.random.key(0))
    cuts = jax.tree.map(cut, batches)
    numbers = trainer._worker.hyperparams
    model = Model(params, buffers, key, jax.tree.map(jax.typeof, numbers))
    (own, common), traced = trainer._compiled.trace_run(model, cuts, data, sharding)
    state = TrainState(own.replica, own.sync, common.step, common.key, numbers)
    return Lowered(state, traced.jaxpr, traced.lower())


@outside_meshes
def sends(trainer: DataParallel, state: TrainState) -> Sends:
    """Counts what a device sends in a step in which it takes each branch once.

    A compiled program contains all branches of a step, so compare its sends with this
    count. `trainer.communication` counts only the branches that a step takes.

    Args:
        trainer: the trainer that lowered or initialized the state.
        state: arrays or their shapes; they lead with (places, lanes).

    Raises:
        ValueError: as in `syncalgos.communication`.
    """
    strategy = with_optimizer(trainer._worker.optimizer, trainer._worker.strategy)
    with sending(state.replica, trainer.layout) as shard:
        return of_branches(strategy, shard, trainer.layout.places)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
