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
from syncalgos._engine.program import Inputs, Model, Outputs, Own, Program, Shared
from syncalgos._engine.sharded_tables import check_row_by_row
from syncalgos._engine.state import TrainState, of_one
from syncalgos._jaxprs import equations
from syncalgos.collectives import WORKERS, PyTree
from syncalgos.reducers._stacking.shards import Sharding, known
from syncalgos.strategy import Replica


class Key(NamedTuple):
    """The conditions that a program is compiled for.

    Attributes:
        program: the program to compile.
        sharding: how a worker's arrays lie on its devices.
        replicated: for each leaf of `own`, whether it is identical in all lanes.
        structure: the tree structure of the arguments.
        types: the shapes and dtypes of the arguments' leaves.
    """

    program: Program
    sharding: Sharding | None
    replicated: Replicated = None
    structure: Any = None
    types: tuple[Any, ...] = ()


# Options for a program that runs once, on CPUs: it compiles in two thirds of the time.
_FAST: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}

# jax's own collectives that may fail over WORKERS, and their replacements.
_OURS = {
    "all_gather": ("all_gather", "gather"),
    "reduce_scatter": ("psum_scatter", "mean"),
    "ppermute": ("ppermute", "shift"),
}


class Call(NamedTuple):
    """A program with its arguments, which are already on the devices."""

    key: Key
    own: Any
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
        self._worker, self._layout, self._lane_form = worker, layout, lane_form
        self._replication = replication.Replication(worker, layout)
        self._seen: Any = None  # the form of the model that was started last
        self.programs: dict[Key, Any] = {}
        self.seconds: float = 0.0
        self.temp_bytes: int | None = None
        self.form: str | None = None
        self.run_program: jax.stages.Compiled | None = None
        self._group: int | None = None
        self._is_mean = False

    def start(self, model: Model, sharding: Sharding | None) -> Outputs:
        """Makes the first state of all workers."""
        layout = self._layout
        if self._seen != (form := jax.tree.map(jax.typeof, model)):
            with known(sharding):
                self._worker = replication.with_own_keys(self._worker, layout, model)
                if layout.workers > 1:
                    tables, optimizer = self._worker.sharded, self._worker.optimizer
                    check_row_by_row(tables, optimizer, model.params)
            self._seen, self._replication.worker = form, self._worker
        own = np.array(layout.own_workers, np.int32).reshape(layout.own_shape)
        numbers = layout.split(own, layout.sharding(DEVICES))
        outputs = self.run(self._call(worker.INIT, numbers, model, sharding=sharding))
        self._replication.note(outputs.own)
        return outputs

    def of_state(
        self,
        program: Program,
        state: TrainState,
        batches: PyTree = (),
        data: PyTree | None = None,
    ) -> Call:
        """Makes the call of a program on all workers.

        Args:
            program: the program to call.
            state: the state of all workers.
            batches: each worker's part of each step's batch.
            data: the data whose rows batches name, if they do.

        Raises:
            ValueError: the state was donated to an earlier call, or has another layout.
        """
        sharding = shardings.of_state(state.replica.params, self._layout)
        with known(sharding):
            replicated = self._replicated(state.own) if self._shares else None
        shared = Shared(state.step, state.key, data, state.hyperparams)
        return self._call(program, state.own, shared, batches, replicated, sharding)

    def of_params(self, program: Program, state: TrainState) -> Call:
        """Makes the call of a program that reads only the workers' params."""
        sharding = shardings.of_state(state.replica.params, self._layout)
        own = Own(Replica(state.replica.params))
        return self._call(program, own, Shared(), sharding=sharding)

    def run(self, call: Call) -> Outputs:
        """Runs a call; compiles its program first if necessary.

        The common part of the result lies on this process's devices.
        """
        key = call.key
        if key not in self.programs:
            self.compile([call])
        own, common = self.programs[key](call.own, call.inputs)
        layout = self._layout
        if layout.blocking:
            jax.block_until_ready((own, common))
        # If a leaf of the given state was not replicated as expected, nothing is known
        # about the returned state.
        if key.program.takes_steps and key.replicated is not None:
            self._replication.note(own)
        to_one = layout.of_first_worker if key.program.makes_model else layout.one_copy
        return Outputs(own, jax.tree.map(to_one, common))

    def put_back(self, own: Own, held: Own) -> None:
        """Notes which leaves are replicated in a state from the host, `held` there."""
        # Several processes would have to agree on the result.
        if self._shares and self._layout.processes == 1:
            with known(shardings.of_state(own.replica.params, self._layout)):
                self._replication.note_if_replicated(own, held)

    @property
    def _shares(self) -> bool:
        """Whether lanes of a device may hold replicated leaves once."""
        if self._worker.sharded is not None:
            return False
        return self._layout.lanes > 1 and backends.is_compiled()

    def _replicated(self, own: Own) -> Replicated:
        """Marks the leaves to hold once; None if none is known to be identical."""
        flags = self._replication.flags(own)
        if not any(flags):
            return None
        if not self._replication.is_known(own):
            pairs = zip(jax.tree.leaves(own), flags, strict=True)
            once = [x for x, is_once in pairs if is_once]
            same = self.run(self._call(replication.COMPARE, once, Shared()))
            if not np.asarray(same.common).all():
                return None
            self._replication.note(own)
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
            start = jax.ShapeDtypeStruct(layout.shape, np.int32), Inputs(model)
            program = self._mapped(Key(worker.INIT, sharding), *start)
            shapes = jax.eval_shape(program, *start)
            places = backends.places(layout, worker.INIT, sharding, shapes)
            first = jax.tree.map(_at, shapes, places)
            replicated = self._replication.flags(first.own) if self._shares else None
            shared = first.common._replace(data=data, hyperparams=model.hyperparams)
            same = partial(_at, sharding=layout.sharding())
            cut = partial(_at, sharding=layout.sharding(None, *layout.batch_spec))
            inputs = Inputs(jax.tree.map(same, shared), jax.tree.map(cut, batches))
            asked = first.own, inputs
            program = self._mapped(Key(worker.RUN, sharding, replicated), *asked)
            return first, program.trace(*asked)

    def compile(self, calls: Sequence[Call]) -> None:
        """Compiles the missing programs of these calls; runs nothing."""
        missing = [call for call in calls if call.key not in self.programs]
        if not missing:
            return
        start = time.perf_counter()
        if len(missing) == 1:
            self._note(missing[0], self._lower(missing[0])())
        else:
            # XLA compiles each program on one core. This thread traces the next program
            # meanwhile: users' functions need not be thread-safe.
            with ThreadPoolExecutor(len(missing)) as pool:
                ends = [pool.submit(end) for end in map(self._lower, missing)]
                for call, end in zip(missing, ends, strict=True):
                    self._note(call, end.result())
        self.seconds += time.perf_counter() - start

    def _call(
        self,
        program: Program,
        own: Any,
        shared: Shared | Model,
        batches: PyTree = (),
        replicated: Replicated = None,
        sharding: Sharding | None = None,
    ) -> Call:
        """Makes the call of a program; raises a ValueError if `own` does not fit."""
        inputs = Inputs(self._placed(shared, sharding), batches)
        for leaf in jax.tree.leaves(own):
            arguments.check_own(leaf, self._layout.shape)
        leaves, structure = jax.tree.flatten((own, inputs))
        types = tuple(map(jax.typeof, leaves))
        return Call(Key(program, sharding, replicated, structure, types), own, inputs)

    def _placed(self, shared: Shared | Model, sharding: Sharding | None) -> Any:
        """Puts the shared inputs on the devices, params with their sharding."""

        if sharding is None or not isinstance(shared, Model):
            return jax.tree.map(self._layout.copy, shared)

        def put(path, x):
            return self._layout.spread(x, sharding.spec(path, np.shape(x)))

        return jax.tree_util.tree_map_with_path(put, shared)

    def _lower(self, call: Call) -> Callable[[], Any]:
        """Traces a program, and returns a function that compiles it."""
        with known(call.key.sharding):
            try:
                self._check_loss(*call)
                mapped = self._mapped(*call)
                if call.key.program.takes_steps:
                    self._check_mean(*call)
                if not backends.is_compiled():
                    return lambda: mapped
                # Ahead of time, so that compile time can be separated from training
                # time, and nothing is compiled twice.
                lowered = backends.lower(self._layout, mapped, call.own, call.inputs)
                return lowered.compile
            except (AssertionError, IndexError, NotImplementedError):
                for name in self._unmapped(call):
                    theirs, ours = _OURS[name]
                    raise ValueError(
                        f"jax.lax.{theirs} fails with several workers on a device: "
                        f"over syncalgos.WORKERS, use syncalgos.collectives.{ours}"
                    ) from None
                raise

    def _check_loss(self, key: Key, own: Own, inputs: Inputs) -> None:
        """Raises a ValueError if only some workers would reach a collective of a loss.

        Lanes of one device compute both arms of a branch, and need no such check.
        """
        if key.program is not worker.RUN or self._layout.shape[0] == 1:
            return
        one = traces.of_one_worker(own, inputs)
        counts = [len(jax.tree.leaves(x)) for x in one]
        jaxpr = traces.loss(self._worker, self._layout, one)
        # Each worker has its own key and batch; replicas may be equal.
        is_own = np.repeat([True, False, True, False], counts).tolist()
        lone_branches.followed(jaxpr, is_own)

    def _check_mean(self, key: Key, own: Own, inputs: Inputs) -> None:
        """Raises a ValueError if lanes are merged whose loss is no mean over its batch.

        Runs once, on the first step's batches: a trainer has one loss for training.
        """
        layout = self._layout
        if self._is_mean or self.form != selection.MERGED or layout.lanes == 1:
            return
        workers = max(2, self._group or layout.lanes)
        compare = partial(execution.compared, self._worker, workers)
        on_device = partial(compare, layout.lanes, key.replicated)
        # Rounded operands would make exact means differ. What is not finite tells
        # nothing here.
        with (
            jax.default_matmul_precision("highest"),
            jax.debug_nans(False),
            jax.debug_infs(False),
        ):
            mapped = backends.over_devices(layout, on_device, donate=False)
            lowered = backends.lower(layout, mapped, own, inputs)
            program = lowered.compile(_FAST if selection.on_cpu(layout) else None)
            found = jax.tree.map(layout.one_copy, program(own, inputs).common)
        one = traces.of_one_worker(own, inputs)
        held = equations(traces.loss(self._worker, layout, one))
        kinds = {x.aval.dtype for e, _ in held for x in e.outvars}
        floats = [jnp.finfo(x) for x in kinds if jnp.issubdtype(x, np.floating)]
        rounding = max(float(x.eps) for x in floats)
        told = jax.tree.map(float, found)
        selection.check_mean(self._lane_form, workers, told, rounding)
        self._is_mean = True

    def _unmapped(self, call: Call) -> list[str]:
        """Returns the collectives of `_OURS` that a program calls over WORKERS."""
        batches = jax.tree.map(lambda x: x[:, 0, 0], call.inputs.batches)
        given = of_one(call.own), call.inputs._replace(batches=batches)
        program = partial(call.key.program.function, self._worker)
        try:
            jaxpr = self._layout.traced(program, *given)[0].jaxpr
        except Exception:  # the user's own, which the caller raises
            return []
        over = [x for x, _ in equations(jaxpr) if x.params.get("axis_name") == WORKERS]
        return [x.primitive.name for x in over if x.primitive.name in _OURS]

    def _note(self, call: Call, made: Any) -> None:
        """Stores a compiled program and notes its memory."""
        self.programs[call.key] = made
        if not call.key.program.takes_steps or not backends.is_compiled():
            return
        self.run_program = made
        if held := made.memory_analysis():
            self.temp_bytes = max(self.temp_bytes or 0, held.temp_size_in_bytes)

    def _mapped(self, key: Key, own: Any, inputs: Inputs) -> Any:
        """A program of all workers, jitted: (own, inputs) -> Outputs."""
        program, sharding, replicated, *_ = key
        form, group = selection.VECTORIZED, None
        if program.takes_steps and backends.is_compiled():
            facts = selection.Facts(self._worker, self._layout, own, inputs, replicated)
            with self._layout.inside():
                form, group = selection.choose(self._lane_form, facts)
            self.form, self._group = form, group
        if form == selection.VECTORIZED:
            run = partial(backends.vectorized, partial(program.function, self._worker))
        elif form == selection.SEQUENTIAL:
            run = partial(execution.sequential, self._worker)
        else:
            run = partial(execution.merged, self._worker, group=group)
        on_device = partial(run, self._layout.lanes, replicated)
        mapped = backends.over_devices(self._layout, on_device, program.takes_steps)
        if not self._layout.axes:
            return mapped
        shapes = jax.eval_shape(mapped, own, inputs)
        places = backends.places(self._layout, program, sharding, shapes)
        donated = (0,) if program.takes_steps else ()
        return jax.jit(mapped, out_shardings=places, donate_argnums=donated)


def _at(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """A shape with its sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
