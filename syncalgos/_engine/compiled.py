"""A trainer's compiled programs, one for each structure and shape of the arguments."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos._engine import arguments, lone_branches, worker
from syncalgos._engine.lanes import execution, replication, selection, traces
from syncalgos._engine.placement import backends, shardings
from syncalgos._engine.placement.backends import Replicated
from syncalgos._engine.placement.layout import DEVICES, Layout
from syncalgos._engine.program import (
    Inputs,
    Model,
    Outputs,
    Program,
    Shared,
    WorkerState,
)
from syncalgos._engine.sharded_tables import check_row_by_row
from syncalgos._engine.state import TrainState, drop_worker_axes
from syncalgos._jaxprs import equations
from syncalgos.collectives import WORKERS, PyTree
from syncalgos.reducers._stacking.shards import Sharding, known
from syncalgos.strategy import Replica


class Key(NamedTuple):
    """The conditions that a program is compiled for.

    Attributes:
        program: the program to compile.
        sharding: how a worker's arrays lie on its devices.
        replicated: for each leaf of the worker state, whether it is identical in all
            lanes.
        structure: the tree structure of the arguments.
        types: the shapes and dtypes of the arguments' leaves.
    """

    program: Program
    sharding: Sharding | None
    replicated: Replicated = None
    structure: Any = None
    types: tuple[Any, ...] = ()


# Options for a program that runs once, on CPUs: it compiles in two thirds of the time.
_FAST_COMPILE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}

# jax's own collectives that may fail over WORKERS, and their replacements.
_REPLACEMENTS = {
    "all_gather": ("all_gather", "gather"),
    "reduce_scatter": ("psum_scatter", "mean"),
    "ppermute": ("ppermute", "shift"),
}


class ProgramCall(NamedTuple):
    """A program with its arguments, which are already on the devices."""

    key: Key
    worker_state: Any
    inputs: Inputs


class Compiled:
    """The compiled programs of one worker, mapped over all workers.

    Attributes:
        programs: the programs compiled so far.
        seconds: seconds spent so far on tracing and compiling.
        temp_bytes: see `DataParallel`.
        form: the form of the lanes in the local steps compiled last; None before them.
        run_program: the local steps compiled last; None before them.
    """

    def __init__(self, worker: worker.Worker, layout: Layout, lane_form: str | None):
        self._worker = worker
        self._layout = layout
        self._lane_form = lane_form
        self._replication = replication.Replication(worker, layout)
        self._started_types: Any = None  # of the leaves of the model started last
        self.programs: dict[Key, Any] = {}
        self.seconds: float = 0.0
        self.temp_bytes: int | None = None
        self.form: str | None = None
        self.run_program: jax.stages.Compiled | None = None
        self._group_lanes: int | None = None
        self._has_checked_mean = False

    def start(self, model: Model, sharding: Sharding | None) -> Outputs:
        """Makes the first state of all workers."""
        layout = self._layout
        model_types = jax.tree.map(jax.typeof, model)
        if self._started_types != model_types:
            with known(sharding):
                self._worker = replication.with_own_keys(self._worker, layout, model)
                if layout.workers > 1:
                    check_row_by_row(
                        self._worker.sharded, self._worker.optimizer, model.params
                    )
            self._started_types = model_types
            self._replication.worker = self._worker
        indices = np.array(layout.own_workers, np.int32)
        indices = indices.reshape(layout.own_shape)  # (places, lanes)
        worker_indices = layout.split(indices, layout.sharding(DEVICES))
        call = self._make_call(worker.INIT, worker_indices, model, sharding=sharding)
        outputs = self.run(call)
        self._replication.note(outputs.worker_state)
        return outputs

    def call_on_state(
        self,
        program: Program,
        state: TrainState,
        batches: PyTree = (),
        data: PyTree | None = None,
    ) -> ProgramCall:
        """Makes the call of a program on all workers.

        Args:
            program: the program to call.
            state: the state of all workers.
            batches: each worker's part of each step's batch.
            data: the data whose rows batches name, if they do.

        Raises:
            ValueError: the state was donated to an earlier call, or has another layout.
        """
        sharding = shardings.read_sharding(state.replica.params, self._layout)
        with known(sharding):
            replicated = None
            if self._may_share_leaves:
                replicated = self._mark_replicated(state.own)
        shared = Shared(state.step, state.key, data, state.hyperparams)
        return self._make_call(
            program, state.own, shared, batches, replicated, sharding
        )

    def call_on_params(self, program: Program, state: TrainState) -> ProgramCall:
        """Makes the call of a program that reads only the workers' params."""
        sharding = shardings.read_sharding(state.replica.params, self._layout)
        worker_state = WorkerState(Replica(state.replica.params))
        return self._make_call(program, worker_state, Shared(), sharding=sharding)

    def run(self, call: ProgramCall) -> Outputs:
        """Runs a call; compiles its program first if necessary.

        The common part of the result lies on this process's devices.
        """
        key = call.key
        if key not in self.programs:
            self.compile([call])
        worker_state, common = self.programs[key](call.worker_state, call.inputs)
        layout = self._layout
        if layout.blocking:
            jax.block_until_ready((worker_state, common))
        # If a leaf of the given state was not replicated as expected, nothing is known
        # about the returned state.
        if key.program.takes_steps and key.replicated is not None:
            self._replication.note(worker_state)
        take_copy = (
            layout.take_first_worker_copy
            if key.program.makes_model
            else layout.one_copy
        )
        return Outputs(worker_state, jax.tree.map(take_copy, common))

    def put_back(self, worker_state: WorkerState, host_state: WorkerState) -> None:
        """Notes which leaves are replicated in a state from the host."""
        # Several processes would have to agree on the result.
        if self._may_share_leaves and self._layout.processes == 1:
            with known(
                shardings.read_sharding(worker_state.replica.params, self._layout)
            ):
                self._replication.note_if_replicated(worker_state, host_state)

    @property
    def _may_share_leaves(self) -> bool:
        """Whether lanes of a device may hold replicated leaves once."""
        if self._worker.sharded is not None:
            return False
        return self._layout.lanes > 1 and backends.is_compiled()

    def _mark_replicated(self, worker_state: WorkerState) -> Replicated:
        """Marks the leaves to hold once; None if none is known to be identical."""
        flags = self._replication.flags(worker_state)
        if not any(flags):
            return None
        if not self._replication.is_known(worker_state):
            pairs = zip(jax.tree.leaves(worker_state), flags, strict=True)
            shared_leaves = [x for x, is_replicated in pairs if is_replicated]
            call = self._make_call(replication.COMPARE, shared_leaves, Shared())
            if not np.asarray(self.run(call).common).all():
                return None
            self._replication.note(worker_state)
        return flags

    def trace_run(
        self, model: Model, batches: PyTree, data: PyTree, sharding: Sharding | None
    ) -> tuple[Outputs, jax.stages.Traced]:
        """Traces local steps from shapes alone, and allocates nothing.

        Args:
            model: shapes of the model from which all workers start.
            batches: shapes, (steps, places, lanes, batch, ...).
            data: shapes of the data on the devices, or None.
            sharding: the sharding of params if workers are meshes.

        Returns:
            Shapes of the first state, placed as `start` would, and the program.
        """
        layout = self._layout
        with known(sharding):
            init_arguments = jax.ShapeDtypeStruct(layout.shape, np.int32), Inputs(model)
            program = self._map_program(Key(worker.INIT, sharding), *init_arguments)
            shapes = jax.eval_shape(program, *init_arguments)
            output_shardings = backends.make_output_shardings(
                layout, worker.INIT, sharding, shapes
            )
            first_outputs = jax.tree.map(_place_shape, shapes, output_shardings)
            worker_state = first_outputs.worker_state
            replicated = None
            if self._may_share_leaves:
                replicated = self._replication.flags(worker_state)
            shared = first_outputs.common._replace(
                data=data, hyperparams=model.hyperparams
            )
            batch_sharding = layout.sharding(None, *layout.batch_spec)
            place_shared = partial(_place_shape, sharding=layout.sharding())
            place_batch = partial(_place_shape, sharding=batch_sharding)
            inputs = Inputs(
                jax.tree.map(place_shared, shared), jax.tree.map(place_batch, batches)
            )
            key = Key(worker.RUN, sharding, replicated)
            program = self._map_program(key, worker_state, inputs)
            return first_outputs, program.trace(worker_state, inputs)

    def compile(self, calls: Sequence[ProgramCall]) -> None:
        """Compiles the missing programs of these calls; runs nothing."""
        missing = [call for call in calls if call.key not in self.programs]
        if not missing:
            return
        start = time.perf_counter()
        if len(missing) == 1:
            compile_program = self._lower(missing[0])
            self._store(missing[0], compile_program())
        else:
            # XLA compiles each program on one core. This thread traces the next program
            # meanwhile: users' functions need not be thread-safe.
            with ThreadPoolExecutor(len(missing)) as pool:
                compilations = [pool.submit(self._lower(call)) for call in missing]
                for call, compilation in zip(missing, compilations, strict=True):
                    self._store(call, compilation.result())
        self.seconds += time.perf_counter() - start

    def _make_call(
        self,
        program: Program,
        worker_state: Any,
        shared: Shared | Model,
        batches: PyTree = (),
        replicated: Replicated = None,
        sharding: Sharding | None = None,
    ) -> ProgramCall:
        """Makes a program's call; raises a ValueError for another layout's state."""
        inputs = Inputs(self._place_shared(shared, sharding), batches)
        for leaf in jax.tree.leaves(worker_state):
            arguments.check_own(leaf, self._layout.shape)
        leaves, structure = jax.tree.flatten((worker_state, inputs))
        types = tuple(map(jax.typeof, leaves))
        key = Key(program, sharding, replicated, structure, types)
        return ProgramCall(key, worker_state, inputs)

    def _place_shared(self, shared: Shared | Model, sharding: Sharding | None) -> Any:
        """Puts the shared inputs on the devices, params with their sharding."""
        if sharding is None or not isinstance(shared, Model):
            return jax.tree.map(self._layout.copy, shared)

        def put(path: Any, x: Any) -> jax.Array:
            return self._layout.spread(x, sharding.spec(path, np.shape(x)))

        return jax.tree_util.tree_map_with_path(put, shared)

    def _lower(self, call: ProgramCall) -> Callable[[], Any]:
        """Traces a program, and returns a function that compiles it."""
        with known(call.key.sharding):
            try:
                self._check_loss(*call)
                mapped = self._map_program(*call)
                if call.key.program.takes_steps:
                    self._check_mean(*call)
                if not backends.is_compiled():
                    return lambda: mapped
                # Ahead of time, so that compile time can be separated from training
                # time, and nothing is compiled twice.
                lowered = backends.lower(
                    self._layout, mapped, call.worker_state, call.inputs
                )
                return lowered.compile
            except (AssertionError, IndexError, NotImplementedError):
                for name in self._find_failing_collectives(call):
                    theirs, ours = _REPLACEMENTS[name]
                    raise ValueError(
                        f"jax.lax.{theirs} fails with several workers on a device: "
                        f"over syncalgos.WORKERS, use syncalgos.collectives.{ours}"
                    ) from None
                raise

    def _check_loss(self, key: Key, worker_state: WorkerState, inputs: Inputs) -> None:
        """Raises a ValueError if only some workers would reach a collective of a loss.

        Lanes of one device compute both arms of a branch, and need no such check.
        """
        if key.program is not worker.RUN or self._layout.shape[0] == 1:
            return
        loss_arguments = traces.make_loss_arguments(worker_state, inputs)
        counts = [len(jax.tree.leaves(x)) for x in loss_arguments]
        jaxpr = traces.trace_loss(self._worker, self._layout, loss_arguments)
        # Each worker has its own key and batch; replicas may be equal.
        differs = np.repeat([True, False, True, False], counts).tolist()
        lone_branches.follow_differing(jaxpr, differs)

    def _check_mean(self, key: Key, worker_state: WorkerState, inputs: Inputs) -> None:
        """Raises a ValueError if lanes are merged whose loss is no mean over its batch.

        Runs once, on the first step's batches: a trainer has one loss for training.
        """
        layout = self._layout
        if self._has_checked_mean or self.form != selection.MERGED or layout.lanes == 1:
            return
        workers = max(2, self._group_lanes or layout.lanes)
        on_device = partial(
            execution.compare_merged,
            self._worker,
            workers,
            layout.lanes,
            key.replicated,
        )
        options = _FAST_COMPILE if selection.on_cpu(layout) else None
        # Rounded operands would make exact means differ. What is not finite tells
        # nothing here.
        with (
            jax.default_matmul_precision("highest"),
            jax.debug_nans(False),
            jax.debug_infs(False),
        ):
            mapped = backends.over_devices(layout, on_device, donate=False)
            lowered = backends.lower(layout, mapped, worker_state, inputs)
            program = lowered.compile(options)
            common = program(worker_state, inputs).common
            comparison = jax.tree.map(layout.one_copy, common)
        loss_arguments = traces.make_loss_arguments(worker_state, inputs)
        jaxpr = traces.trace_loss(self._worker, layout, loss_arguments)
        selection.check_mean(
            self._lane_form,
            workers,
            jax.tree.map(float, comparison),
            _coarsest_rounding(jaxpr),
        )
        self._has_checked_mean = True

    def _find_failing_collectives(self, call: ProgramCall) -> list[str]:
        """Finds collectives of `_REPLACEMENTS` that a program calls over WORKERS."""
        batches = jax.tree.map(lambda x: x[:, 0, 0], call.inputs.batches)
        worker_state = drop_worker_axes(call.worker_state)
        inputs = call.inputs._replace(batches=batches)
        program = partial(call.key.program.function, self._worker)
        try:
            jaxpr = self._layout.trace(program, worker_state, inputs)[0].jaxpr
        except Exception:  # the user's own, which the caller raises
            return []
        names = []
        for equation, _ in equations(jaxpr):
            name = equation.primitive.name
            if equation.params.get("axis_name") == WORKERS and name in _REPLACEMENTS:
                names.append(name)
        return names

    def _store(self, call: ProgramCall, compiled_program: Any) -> None:
        """Stores a compiled program and notes its memory."""
        self.programs[call.key] = compiled_program
        if not call.key.program.takes_steps or not backends.is_compiled():
            return
        self.run_program = compiled_program
        memory = compiled_program.memory_analysis()
        if memory:
            self.temp_bytes = max(self.temp_bytes or 0, memory.temp_size_in_bytes)

    def _map_program(self, key: Key, worker_state: Any, inputs: Inputs) -> Any:
        """A program of all workers, jitted: (worker_state, inputs) -> Outputs."""
        program, sharding, replicated, *_ = key
        form = selection.VECTORIZED
        group_lanes = None
        if program.takes_steps and backends.is_compiled():
            facts = selection.Facts(
                self._worker, self._layout, worker_state, inputs, replicated
            )
            with self._layout.inside():
                form, group_lanes = selection.choose(self._lane_form, facts)
            self.form = form
            self._group_lanes = group_lanes
        if form == selection.VECTORIZED:
            run = partial(backends.vectorized, partial(program.function, self._worker))
        elif form == selection.SEQUENTIAL:
            run = partial(execution.sequential, self._worker)
        else:
            run = partial(execution.merged, self._worker, group_lanes=group_lanes)
        on_device = partial(run, self._layout.lanes, replicated)
        mapped = backends.over_devices(self._layout, on_device, program.takes_steps)
        if not self._layout.axes:
            return mapped
        shapes = jax.eval_shape(mapped, worker_state, inputs)
        output_shardings = backends.make_output_shardings(
            self._layout, program, sharding, shapes
        )
        donated = (0,) if program.takes_steps else ()
        return jax.jit(mapped, out_shardings=output_shardings, donate_argnums=donated)


def _coarsest_rounding(jaxpr: Any) -> float:
    """The relative rounding of the coarsest floats that a jaxpr computes."""
    dtypes = set()
    for equation, _ in equations(jaxpr):
        dtypes |= {x.aval.dtype for x in equation.outvars}
    floats = [jnp.finfo(x) for x in dtypes if jnp.issubdtype(x, np.floating)]
    return max(float(x.eps) for x in floats)


def _place_shape(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """A shape with its sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
