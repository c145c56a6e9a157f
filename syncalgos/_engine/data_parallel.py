"""The engine: one loss, one inner optimizer, one strategy, many workers."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from syncalgos import checks
from syncalgos._calls import suggest_arguments
from syncalgos._combinators.introspection import check_mapped
from syncalgos._dtypes import narrow, widen
from syncalgos._engine import arguments, inner_step, sharded_tables, worker
from syncalgos._engine.agreement import as_text, check_agreement
from syncalgos._engine.compiled import Compiled
from syncalgos._engine.inner_fit import check_rate
from syncalgos._engine.lanes import selection
from syncalgos._engine.losses import WEIGHT, Loss, PlainLoss, warn_of_unseen
from syncalgos._engine.lowered import Lowered, ProgramSends, by_collective
from syncalgos._engine.placement import shardings
from syncalgos._engine.placement.layout import Layout, outside_meshes
from syncalgos._engine.placement.make_layout import Placement, make_layout
from syncalgos._engine.program import Model, WorkerState
from syncalgos._engine.state import (
    StepCount,
    TrainState,
    as_data,
    drop_worker_axes,
    waits_untrained,
)
from syncalgos._host_arrays import copy_host_arrays
from syncalgos._ledger.counting import Communication, counter, of_branches
from syncalgos.reducers._reducer import check_optimizer
from syncalgos.reducers._stacking.shards import Sharding, known
from syncalgos.strategy import PyTree, Replica, Strategy, check_params, check_strategy


class DataParallel:
    """Trains one model on many workers; a strategy keeps their replicas in agreement.

    Worker w trains on the w-th contiguous slice of each global batch, so all strategies
    and any number of workers see the same data.

    Args:
        loss: (params, buffers, batch, key) -> (scalar, (buffers, metrics)), a mean over
            its batch; metrics is a dict, to which "loss" is added. The key differs
            between workers and steps. Or a plain (params, batch) -> scalar, or (params,
            batch, key) -> scalar; see `stateless` for the names of the arguments.
        optimizer: the inner optimizer: any optax GradientTransformation or MultiSteps;
            each call is a local step. An optimizer with extra arguments gets the loss
            as `value`: the worker's own, or the mean over the workers if the strategy
            reduces gradients. Random keys in its state are each worker's own, unless
            the strategy gives all workers the same gradients. Or a function of
            hyperparams that returns the optimizer.
        strategy: the synchronization algorithm, such as `bmuf()`. Or a function of
            hyperparams that returns the strategy.
        workers: the number of workers, at least 1.
        backend: pmap, shard_map, vmap (one device), or auto. Auto takes pmap in one
            process if this jax has it, and shard_map otherwise. All give the same
            numbers.
        eval_loss: the loss for `evaluate` if it differs from `loss`, for example
            without dropout or with running batch statistics; None means `loss`.
        accumulate: the number of microbatches into which each worker's part of a
            training batch is cut. They are computed one after the other to save memory.
            Gradients and metrics are means over them, weighted by the metric
            "microbatch_weight" if the loss has it. Each microbatch passes its buffers
            to the next. Microbatch i draws from fold_in(key, i).
        tables: which leaves of params are tables sharded by rows over the workers (see
            `lookup`): a tree of booleans, or a function of params that returns one. The
            strategy does not see tables or their rows in opt_state. The inner optimizer
            sees only a worker's own rows, so an optimizer that derives the steps of
            other leaves or rows from them, as by a norm, is refused; so are accumulate
            with the metric "microbatch_weight", `participating` and `paced`.
        each_worker: whether the metrics of `run` also hold "worker_loss", of shape
            (steps, workers). With lane_form="merged" and a scalar loss, each lane gets
            the mean over the lanes of its device.
        hyperparams: a pytree of numbers, from which the optimizer and the strategy are
            made. Compiled programs take them as data, so different numbers given to
            `init` need no new compilation. Everything else, such as a period, is
            compiled in.
        placement: devices, lanes and meshes to use instead of the defaults.

    Attributes:
        layout: the place of each worker on the devices.
        workers: the number of workers.

    With several processes (`jax.distributed`), the workers lie on the devices of all
    processes. Each process calls the same methods in the same order, with its own
    contiguous rows of each batch (`layout.own_rows`).

    Raises:
        ValueError: an argument is unknown, out of range, or does not divide evenly.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import optax
        >>> from syncalgos import DataParallel, diloco
        >>> x = np.random.default_rng(0).normal(size=(64, 32, 3)).astype(np.float32)
        >>> y = x @ np.array([1.0, 2.0, 3.0], np.float32)
        >>> def loss(w, batch):
        ...     x, y = batch
        ...     return ((x @ w - y) ** 2).mean()
        >>> trainer = DataParallel(loss, optax.sgd(0.1), diloco(8), workers=4)
        >>> state = trainer.init(jnp.zeros(3))
        >>> state, metrics = trainer.run(state, (x, y))  # 64 steps of batch 32
        >>> metrics["loss"].shape, bool(metrics["loss"][-1] < 0.01)
        ((64,), True)
        >>> np.asarray(trainer.center(state).params).round(1)
        array([1., 2., 3.], dtype=float32)
    """

    @suggest_arguments
    def __init__(
        self,
        loss: Loss | PlainLoss,
        optimizer: optax.GradientTransformation
        | optax.MultiSteps
        | Callable[[Any], optax.GradientTransformation],
        strategy: Strategy | Callable[[Any], Strategy],
        *,
        workers: int = 8,
        backend: str = "auto",
        eval_loss: Loss | PlainLoss | None = None,
        accumulate: int = 1,
        tables: sharded_tables.Mask | None = None,
        each_worker: bool = False,
        hyperparams: PyTree = None,
        placement: Placement = Placement(),
    ):
        has_numbers = hyperparams is not None

        def make_with_numbers(hyperparams: PyTree) -> tuple[Any, Any]:
            def call_with_numbers(argument: Any) -> Any:
                if has_numbers and callable(argument):
                    return argument(hyperparams)
                return argument

            inner_optimizer = call_with_numbers(optimizer)
            worker_strategy = call_with_numbers(strategy)
            if isinstance(inner_optimizer, optax.MultiSteps):
                inner_optimizer = inner_optimizer.gradient_transformation()
            check_strategy("DataParallel", worker_strategy)
            check_mapped("DataParallel", worker_strategy)
            check_optimizer("optimizer", inner_optimizer)
            if tables is not None:
                worker_strategy = sharded_tables.hide_tables(
                    worker_strategy, tables, inner_optimizer
                )
            return inner_optimizer, worker_strategy

        hyperparams = arguments.python_numbers(hyperparams)
        inner_optimizer, worker_strategy = make_with_numbers(hyperparams)
        arguments.check_kind("placement", placement, Placement)
        train_loss = arguments.full_loss(loss)
        full_eval_loss = arguments.full_loss(eval_loss or loss)
        self.layout: Layout = make_layout(workers, backend, placement)
        self._shardings = shardings.UserShardings(placement.shardings, self.layout)
        self.workers: int = self.layout.workers
        accumulate = checks.whole("accumulate", accumulate, least=1)
        lane_form = placement.lane_form
        if lane_form is not None:
            checks.one_of("lane_form", lane_form, selection.FORMS)
        self._worker = worker.Worker(
            loss=train_loss,
            eval_loss=full_eval_loss,
            optimizer=inner_optimizer,
            strategy=worker_strategy,
            accumulate=accumulate,
            sharded=tables,
            reported_losses=self.workers if each_worker else 0,
            workers=self.workers,
            make=make_with_numbers,
            hyperparams=hyperparams,
        )
        self._compiled = Compiled(self._worker, self.layout, lane_form)
        self._counters: dict[Any, Callable[..., Communication]] = {}
        self._steps = StepCount()
        # The structures of this trainer's states and of their hyperparams.
        self._structures: tuple[Any, ...] = ()
        # Sharded tables are in the center at every step.
        self._may_be_untrained = tables is None

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Names the nearest attribute; called only for missing ones."""
            raise checks.attribute_error("DataParallel", name, dir(type(self)))

    def __repr__(self) -> str:
        return f"DataParallel({self})"

    def __str__(self) -> str:
        if self.lane_form and self.layout.lanes > 1:
            return f"{self.layout} {self.lane_form}, backend {self.layout.backend}"
        return f"{self.layout}, backend {self.layout.backend}"

    @property
    def compile_seconds(self) -> float:
        """Seconds spent so far on tracing and compiling."""
        return self._compiled.seconds

    @property
    def lane_form(self) -> str | None:
        """The form of the lanes in the last compiled `run`; None before the first."""
        return self._compiled.form

    @property
    def temp_bytes(self) -> int | None:
        """Bytes of the largest `run`'s intermediate results on a device, if known."""
        return self._compiled.temp_bytes

    @property
    def run_program(self) -> jax.stages.Compiled | None:
        """The program of the last compiled `run`; None before the first.

        `run_program.memory_analysis()` is XLA's own account of its memory, and
        `run_program.as_text()` shows its instructions.
        """
        return self._compiled.run_program

    @outside_meshes
    def init(
        self,
        params: PyTree,
        buffers: PyTree = (),
        seed: int = 0,
        hyperparams: PyTree | None = None,
    ) -> TrainState:
        """Puts the same model on all workers.

        Args:
            params: one plain model, a pytree of float arrays.
            buffers: arrays that are not trained, such as batch statistics. Each worker
                gets its own version of typed random keys.
            seed: the seed of the keys that the loss draws from, such as for dropout; at
                least 0 and below 2³¹.
            hyperparams: numbers that replace the trainer's, with the same structure.

        Raises:
            ValueError: a leaf of params is not a float array or is not trained, the
                rows of a table do not divide over the workers, buffers hold an untyped
                key, the strategy changes shapes or dtypes, or the optimizer makes the
                steps of leaves that are the same on all workers depend on leaves that
                are not; or the arguments, or the calls that made the strategy, differ
                between processes. The message names the leaf.
        """
        check_params(params)
        params = copy_host_arrays("params", params)
        buffers = copy_host_arrays("buffers", buffers)
        warn_of_unseen((self._worker.loss, self._worker.eval_loss), buffers)
        sharded_tables.check_table_rows(self._worker.sharded, params, self.workers)
        sharding = self._shardings.resolve_for_model(params)
        numbers = self._worker.hyperparams
        if hyperparams is not None:
            arguments.check_like(hyperparams, numbers)
            numbers = arguments.python_numbers(hyperparams)
        # This checks the ranges of the numbers, too.
        optimizer, strategy = self._worker.make(numbers)
        check_rate("optimizer", optimizer, strategy, params)
        seed = checks.whole("seed", seed, least=0)
        trees = {
            "params": params,
            "buffers": buffers,
            "seed": np.int32(seed),
            "hyperparams": numbers,
            "strategy": as_text(strategy),
        }
        check_agreement("init", trees, self.layout)
        numbers = as_data(numbers, self.layout)
        key = jax.random.key(seed)
        with arguments.explained_trace():
            model = Model(params, buffers, key, numbers)
            worker_state, first_shared = self._compiled.start(model, sharding)
        self._structures = _structures(worker_state, numbers)
        step, key = map(self.layout.copy, (first_shared.step, first_shared.key))
        return TrainState(worker_state.replica, worker_state.sync, step, key, numbers)

    @outside_meshes
    def run(
        self, state: TrainState, batches: PyTree, data: PyTree | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Trains for as many local steps as batches holds, in one dispatch.

        Any split of the steps into dispatches gives the same numbers, bit for bit.
        Only dispatches of one step, which compile without a loop, may differ in
        rounding.

        Args:
            state: from `init` or the last `run`. It cannot be used again afterwards.
            batches: leaves (steps, global_batch, ...) or, with data, integer row
                numbers (steps, global_batch). With several processes, each gives its
                own part.
            data: arrays on the devices, from `place`. A batch is then arrays[rows].

        Returns:
            The new state, and metrics with leaves (steps, ...): means over the workers
            of "loss" and of the loss's own metrics, and the decisions of `decided`.

        Raises:
            ValueError: leaves of batches disagree, batches do not divide over the
                workers, their devices or microbatches, or there are more than 2³¹ - 1
                local steps.
        """
        self._check(state)
        batches, data = self._cut(batches, data, self._worker.accumulate)
        steps = jax.tree.leaves(batches)[0].shape[0]
        total_steps = self._steps.count_after(state.step, steps)
        call = self._compiled.call_on_state(worker.RUN, state, batches, data)
        (replica, sync), (step, metrics) = self._compiled.run(call)
        step = self.layout.copy(step)
        self._steps.note(step, total_steps)
        return state._replace(replica=replica, sync=sync, step=step), metrics

    @outside_meshes
    def compile(
        self,
        state: TrainState,
        training: tuple[PyTree] | tuple[PyTree, PyTree | None],
        held_out: tuple[PyTree] | tuple[PyTree, PyTree | None],
        *,
        assesses: bool = False,
    ) -> None:
        """Compiles all programs that a training needs after `init`, and runs nothing.

        On several cores, compiling `run`, `evaluate`, `center` and `divergence` in
        parallel takes less time than compiling each at its first call. With several
        processes, this does nothing, and each is compiled at its first call.

        Args:
            state: as in `run`; it stays usable.
            training: the arguments of `run` after the state: (batches,), or (rows,
                data).
            held_out: those of `evaluate`, whose batches have to divide evenly.
            assesses: whether the training calls `assess` in place of `evaluate`,
                `center` and `divergence`.

        Raises:
            ValueError: as in `run` and `evaluate`.
        """
        if self.layout.processes > 1:
            return
        self._check(state)
        train_batches, train_data = self._cut_pair(training, self._worker.accumulate)
        eval_batches, eval_data = self._cut_pair(held_out, 1)
        compiled = self._compiled
        calls = [compiled.call_on_state(worker.RUN, state, train_batches, train_data)]
        if assesses and self._assesses_at_once:
            calls.append(
                compiled.call_on_state(worker.ASSESS, state, eval_batches, eval_data)
            )
        else:
            calls += [
                compiled.call_on_state(worker.EVALUATE, state, eval_batches, eval_data),
                compiled.call_on_params(worker.DIVERGENCE, state),
                compiled.call_on_state(worker.CENTER, state),
            ]
        compiled.compile(calls)

    @outside_meshes
    def lower(
        self,
        params: PyTree,
        batches: PyTree,
        buffers: PyTree = (),
        data: PyTree | None = None,
    ) -> Lowered:
        """Lowers `run` as `jax.jit(f).lower` does; no array is allocated.

        The trainer's devices may be absent ones of `jax.experimental.topologies`, for
        whose compiler this predicts memory and messages.

        Args:
            params: the params of one plain model, arrays or their shapes.
            batches: leaves (steps, global_batch, ...) or, with data, rows (steps,
                global_batch); arrays or their shapes.
            buffers: the model's buffers, arrays or their shapes.
            data: leaves (examples, ...), arrays or their shapes.

        Raises:
            ValueError: the backend is not "shard_map", or as in `init` and `run`.
        """
        layout = self.layout
        if layout.backend != "shard_map":
            raise ValueError(f"lower needs backend 'shard_map', got {layout.backend!r}")
        check_params(params)
        params, buffers, batches, data = map(_shapes, (params, buffers, batches, data))
        steps, batch = arguments.leading_shape(
            "batches", batches, ("steps", "global_batch")
        )
        arguments.check_parts(batch, layout, self._worker.accumulate)
        sharding = self._shardings.resolve_for_model(params)

        def cut(x: Any) -> jax.ShapeDtypeStruct:
            # (steps, places, lanes, batch, …)
            shape = steps, *layout.shape, batch // layout.workers, *x.shape[2:]
            return jax.ShapeDtypeStruct(shape, x.dtype)

        key = jax.eval_shape(lambda: jax.random.key(0))
        worker_batches = jax.tree.map(cut, batches)
        numbers = self._worker.hyperparams
        model = Model(params, buffers, key, jax.tree.map(jax.typeof, numbers))
        first_outputs, traced = self._compiled.trace_run(
            model, worker_batches, data, sharding
        )
        replica, sync = first_outputs.worker_state
        shared = first_outputs.common
        state = TrainState(replica, sync, shared.step, shared.key, numbers)
        return Lowered(state, traced.jaxpr, traced.lower())

    @outside_meshes
    def step(
        self, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one local step, for use in an ordinary loop; `run` is faster.

        Args:
            state: as in `run`.
            batch: leaves (global_batch, ...). With several processes, each gives its
                own part.

        Returns:
            The new state, and the metrics of `run` without an axis of steps.

        Raises:
            ValueError: as in `run`.
        """
        arguments.check_kind("state", state, TrainState)
        arguments.check_arrays("batch", batch)
        batches = jax.tree.map(lambda x: x[None], batch)
        arguments.check_batches(
            batches,
            None,
            self.layout,
            self._worker.accumulate,
            advice="for batches of several steps, call run",
        )
        state, metrics = self.run(state, batches)
        return state, _take_first_rows(metrics)

    @outside_meshes
    def evaluate(
        self, state: TrainState, batches: PyTree, data: PyTree | None = None
    ) -> dict[str, jax.Array]:
        """Computes the metrics of the center, divided over the workers; trains nothing.

        Most strategies set the center at the last sync: see `center`.

        Args:
            state: as in `run`; it stays usable.
            batches, data: as in `run`. In one process, the global batch need not divide
                over the workers if metrics are means over independent examples. All
                examples then weigh the same. With several processes, each gives its own
                part, or all give the whole; the process's workers must divide it.

        Returns:
            Metrics with leaves (steps, ...), as from `run`. Raises the errors of `run`.
        """
        self._check(state)
        self._warn_of_untrained(state)
        num_extra = arguments.count_extra_examples(batches, self.layout)
        if num_extra:
            return self._evaluate_padded(state, batches, data, num_extra)
        return self._evaluate(state, batches, data)

    def _evaluate_padded(
        self, state: TrainState, batches: PyTree, data: PyTree | None, num_extra: int
    ) -> dict[str, jax.Array]:
        """Evaluates batches that do not divide, which the last example fills up."""
        batch = np.shape(jax.tree.leaves(batches)[0])[1]
        readers = self.layout.readers
        num_padding = readers - num_extra
        padded_rows = np.minimum(np.arange(batch + num_padding), batch - 1)

        def evaluate_rows(rows: np.ndarray) -> dict[str, jax.Array]:
            row_batches = jax.tree.map(lambda x: x[:, rows], batches)
            return self._evaluate(state, row_batches, data)

        # The last example's own metrics are then subtracted again.
        padded_metrics = evaluate_rows(padded_rows)
        last_metrics = evaluate_rows(np.full(readers, batch - 1))
        if WEIGHT in padded_metrics:
            raise ValueError(
                f"batches of {batch} do not divide into {readers} parts, and {WEIGHT} "
                f"gives each part its own weight: drop the last {num_extra} examples"
            )

        def subtract_padding(
            padded_metric: jax.Array, last_metric: jax.Array
        ) -> jax.Array:
            if padded_metric.shape != last_metric.shape:
                raise ValueError(
                    f"a metric of shape {padded_metric.shape[1:]} depends on the batch "
                    f"size: drop the last {num_extra} examples, so that the batch "
                    "divides evenly"
                )
            # A float16 may overflow on the way.
            padded_mean, last_mean = widen((padded_metric, last_metric))
            padded_sum = (batch + num_padding) * padded_mean
            return narrow((padded_sum - num_padding * last_mean) / batch, padded_metric)

        return jax.tree.map(subtract_padding, padded_metrics, last_metrics)

    def _evaluate(
        self, state: TrainState, batches: PyTree, data: PyTree | None
    ) -> dict[str, jax.Array]:
        """Evaluates batches that divide evenly over the workers."""
        batches, data = self._cut(
            batches,
            data,
            1,
            "or call the loss on the remaining examples with trainer.center(state)",
        )
        call = self._compiled.call_on_state(worker.EVALUATE, state, batches, data)
        return self._compiled.run(call).common

    @outside_meshes
    def center(self, state: TrainState) -> Replica:
        """The model to evaluate and ship: one plain replica without worker axes.

        A strategy with its own center, such as bmuf or diloco, sets it at each sync. It
        does not include later local steps. Before the first sync, it is the model given
        to `init`, and a warning says so once.

        Returns:
            Replica(params, (), buffers) on the first worker's device or devices: the
            strategy's center (averaged over the workers if they differ), whole sharded
            tables, and the mean of the buffers' floats. Whole numbers and random
            keys among the buffers are those of the first worker.
        """
        self._check(state)
        self._warn_of_untrained(state)
        call = self._compiled.call_on_state(worker.CENTER, state)
        return self._compiled.run(call).common

    @outside_meshes
    def divergence(self, state: TrainState) -> float:
        """The root mean square over workers of a replica's distance to their mean.

        The distance is a 2-norm over all params except sharded ones.
        """
        arguments.check_kind("state", state, TrainState)
        # The strategy's state is left out because the program does not read it.
        call = self._compiled.call_on_params(worker.DIVERGENCE, state)
        return float(self._compiled.run(call).common)

    @outside_meshes
    def assess(
        self, state: TrainState, batches: PyTree, data: PyTree | None = None
    ) -> tuple[dict[str, jax.Array], Replica, float]:
        """Evaluates the center, and returns it and the divergence with its metrics.

        One program computes all three, which compiles in less time than one for each of
        `evaluate`, `center` and `divergence`. If workers are meshes, or share tables by
        rows, it calls these.

        Args:
            state: as in `run`; it stays usable.
            batches, data: as in `evaluate`.

        Returns:
            (the metrics of `evaluate`, the model of `center`, `divergence`).
        """
        is_even = not arguments.count_extra_examples(batches, self.layout)
        if not (self._assesses_at_once and is_even):
            metrics = self.evaluate(state, batches, data)
            return metrics, self.center(state), self.divergence(state)
        self._check(state)
        self._warn_of_untrained(state)
        batches, data = self._cut(batches, data, 1)
        call = self._compiled.call_on_state(worker.ASSESS, state, batches, data)
        metrics, center, divergence = self._compiled.run(call).common
        center = jax.tree.map(self.layout.take_first_worker_copy, center)
        return metrics, center, float(divergence)

    @property
    def _assesses_at_once(self) -> bool:
        """Whether one program can evaluate a model and return it."""
        # Whole tables need not fit on a device, and the model of a mesh is cut.
        return self._worker.sharded is None and not self.layout.axes

    def communication(
        self,
        state: TrainState,
        steps: int,
        *,
        workers: int | None = None,
        taken: ArrayLike | None = None,
    ) -> Communication:
        """Counts the most that any worker sends, as `syncalgos.communication` does.

        The count includes opt_state where a strategy sends it, the loss where workers
        share it for the optimizer, and what the optimizer sends. It does not include
        what a loss sends, as by `lookup`.

        Args:
            state: a state of this trainer.
            steps: the number of local steps.
            workers: the number of workers to count for; None means the trainer's.
            taken: metrics["decided"] of these steps, if the strategy decides.

        Raises:
            ValueError: as in `syncalgos.communication`.
        """
        return self.counter(state, steps, workers)(taken)

    @outside_meshes
    def counter(
        self, state: TrainState, steps: int, workers: int | None = None
    ) -> Callable[[ArrayLike | None], Communication]:
        """Makes `communication` a function of `taken`, traced and compiled once."""
        arguments.check_kind("state", state, TrainState)
        workers = self.workers if workers is None else workers
        leaves, structure = jax.tree.flatten(state.replica)
        leaf_types = [(x.shape, x.dtype, x.sharding) for x in leaves]
        layout_shape = self.layout.shape if workers == self.workers else None
        key = structure, *leaf_types, workers, steps
        if key not in self._counters:
            make = self._worker.make

            def make_counted_strategy(numbers: PyTree) -> Strategy:
                return inner_step.with_optimizer(*make(numbers))

            with inner_step.use_sent_shapes(state.replica, self.layout) as sent_shapes:
                self._counters[key] = counter(
                    make_counted_strategy,
                    self._worker.hyperparams,
                    sent_shapes,
                    workers,
                    steps,
                    layout_shape,
                )
        count = self._counters[key]
        num_devices = self.layout.devices_each
        return lambda taken: count(taken, state.hyperparams).times(num_devices)

    @outside_meshes
    def program_sends(self, state: TrainState) -> ProgramSends:
        """Counts what a device sends in a step in which it takes each branch once.

        A compiled program contains all branches of a step, so compare its collectives
        with this count. `communication` counts only the branches that a step takes.

        Args:
            state: a state of this trainer, or of its `lower`: arrays or their shapes.

        Raises:
            ValueError: as in `syncalgos.communication`.
        """
        strategy = inner_step.with_optimizer(
            self._worker.optimizer, self._worker.strategy
        )
        with inner_step.use_sent_shapes(state.replica, self.layout) as sent_shapes:
            sends = of_branches(strategy, sent_shapes, self.layout.places)
        return ProgramSends(by_collective(sends.always), by_collective(sends.branched))

    def shardings(self, params: PyTree) -> PyTree | None:
        """Returns how params are cut over the axes of a worker's mesh.

        Args:
            params: one plain model, arrays or their shapes.

        Returns:
            A tree of PartitionSpecs like params; None if a worker is on one device.

        Raises:
            ValueError: a leaf cannot be cut as the Placement says; the message names
                it.
        """
        sharding = self._shardings.resolve_for_model(params)
        if sharding is None:
            return None

        def spec(path: Any, x: Any) -> jax.sharding.PartitionSpec:
            return sharding.spec(path, np.shape(x))

        return jax.tree_util.tree_map_with_path(spec, params)

    @outside_meshes
    def place(self, arrays: PyTree) -> PyTree:
        """Copies arrays to every device once, for `run(state, rows, data)`.

        Args:
            arrays: leaves (examples, ...).

        Raises:
            ValueError: the leaves disagree on the number of examples, or hold whole
                numbers beyond jax's 32 bits.
        """
        arguments.check_arrays("data", arrays)
        arguments.leading_shape("data", arrays, ("examples",))
        return jax.tree.map(self.layout.copy, copy_host_arrays("data", arrays))

    @outside_meshes
    def to_host(self, state: TrainState) -> TrainState:
        """Copies the workers of this process (`layout.own_workers`) to the host.

        Returns:
            NumPy arrays (workers, ...), or `HeldPart`s of them; keys stay jax arrays.
        """
        arguments.check_kind("state", state, TrainState)
        replica, sync = jax.tree.map(self.layout.part, state.own)
        step, numbers = jax.device_get((state.step, state.hyperparams))
        return TrainState(replica, sync, step, self.layout.one_copy(state.key), numbers)

    @outside_meshes
    def from_host(self, held: TrainState) -> TrainState:
        """Puts the result of `to_host` back, on any layout with as many workers.

        Args:
            held: the state of the workers in `layout.own_workers`.

        Raises:
            ValueError: a leaf has a different number of workers, the step is out of
                range, or the step, the key, hyperparams, shapes or dtypes differ
                between processes.
        """
        arguments.check_kind("held", held, TrainState)
        arguments.check_like(held.hyperparams, self._worker.hyperparams)
        arguments.check_workers(held, len(self.layout.own_workers))
        arguments.check_step_count(int(held.step))
        held = copy_host_arrays("held", held)
        worker_shapes = drop_worker_axes(held.own, axes=1)
        sharding = self._shardings.resolve_for_host(worker_shapes.replica.params)
        self._check_fits("held", worker_shapes, sharding)
        trees = {
            "held.replica": worker_shapes.replica,
            "held.sync": worker_shapes.sync,
            "held.step": np.int32(held.step),
            "held.key": held.key,
            "held.hyperparams": held.hyperparams,
        }
        check_agreement("from_host", trees, self.layout)
        places = shardings.make_shardings(held.own, self.layout, sharding, 1)
        worker_state = WorkerState(*jax.tree.map(self.layout.unpart, held.own, places))
        step = self.layout.copy(np.int32(held.step))
        key = self.layout.copy(held.key)
        self._compiled.put_back(worker_state, held.own)
        numbers = as_data(held.hyperparams, self.layout)
        return TrainState(worker_state.replica, worker_state.sync, step, key, numbers)

    def _check(self, state: TrainState) -> None:
        """Raises a ValueError that says how a state differs from this trainer's."""
        arguments.check_kind("state", state, TrainState)
        arguments.check_untraced(state.step)
        structures = _structures(state.own, state.hyperparams)
        if structures != self._structures:
            arguments.check_like(state.hyperparams, self._worker.hyperparams)
            sharding = shardings.read_sharding(state.replica.params, self.layout)
            self._check_fits("state", drop_worker_axes(state.own), sharding)
            self._structures = structures

    def _check_fits(
        self, name: str, worker_shapes: WorkerState, sharding: Sharding | None
    ) -> None:
        """Checks that this strategy and this optimizer have made a state.

        Args:
            name: the state's name, for the message.
            worker_shapes: the shapes of one worker's part of the state.
            sharding: the sharding of params if workers are meshes.

        Raises:
            ValueError: another strategy, optimizer or mesh made the state; the message
                names the first node that differs.
        """
        optimizer = self._worker.optimizer
        strategy = self._worker.strategy
        replica = worker_shapes.replica

        # The state of some reducers leads with a leaf's shards, so it depends on the
        # mesh.
        def init(params: PyTree) -> tuple[PyTree, PyTree]:
            # Defined here: jax would reuse the trace of another mesh.
            return optimizer.init(params), strategy.init(params)

        with known(sharding):
            _, (opt_state, sync) = self.layout.trace(init, replica.params)
        difference = checks.unlike(
            f"{name}.replica.opt_state", opt_state, replica.opt_state
        )
        if difference:
            raise ValueError(f"{name} was made by another optimizer: {difference}")
        difference = checks.unlike(f"{name}.sync", sync, worker_shapes.sync)
        if difference:
            raise ValueError(f"{name} was made by another strategy: {difference}")
        sync_leaves = jax.tree_util.tree_leaves_with_path(worker_shapes.sync)
        expected_leaves = jax.tree.leaves(sync)
        for (path, x), expected in zip(sync_leaves, expected_leaves, strict=True):
            leaf_name = f"{name}.sync{jax.tree_util.keystr(path)}"
            if x.dtype != expected.dtype:
                raise ValueError(
                    f"{leaf_name} must be {expected.dtype}, as it is made for these "
                    f"params, got {x.dtype}"
                )
            if x.shape != expected.shape:
                raise ValueError(
                    f"{leaf_name} must have shape {expected.shape}, got {x.shape}: "
                    "this algorithm's state depends on how params are sharded, so it "
                    "can continue only on the same mesh"
                )

    def _warn_of_untrained(self, state: TrainState) -> None:
        """Warns once if local steps were taken but the center includes none of them."""
        if not self._may_be_untrained:
            return
        num_steps = self._steps.count_after(state.step, 0)
        if not num_steps:
            return
        numbers = arguments.python_numbers(state.hyperparams)
        strategy = self._worker.with_hyperparams(numbers).strategy
        if waits_untrained(strategy, num_steps, self.workers):
            warnings.warn(
                f"no sync came in the first local steps ({num_steps}): the center, the "
                "model to evaluate and ship, is still untrained",
                stacklevel=4,  # points at the caller of center or evaluate
            )
        self._may_be_untrained = False

    def _cut_pair(
        self,
        batches_and_data: tuple[PyTree] | tuple[PyTree, PyTree | None],
        accumulate: int,
    ) -> tuple[PyTree, PyTree | None]:
        """Cuts batches as `_cut` does, which may come without data."""
        if len(batches_and_data) == 1:
            return self._cut(batches_and_data[0], None, accumulate)
        return self._cut(*batches_and_data, accumulate)

    def _cut(
        self,
        batches: PyTree,
        data: PyTree | None,
        accumulate: int,
        advice: str = "for a single step, pass x[None]",
    ) -> tuple[PyTree, PyTree | None]:
        """Checks batches and cuts them to (steps, devices, lanes, batch, ...)."""
        arguments.check_batches(batches, data, self.layout, accumulate, advice)
        batches = copy_host_arrays("batches", batches)
        batches = jax.tree.map(self.layout.cut, batches)
        return batches, copy_host_arrays("data", data)


def _structures(worker_state: WorkerState, hyperparams: PyTree) -> tuple[Any, Any]:
    return jax.tree.structure(worker_state), jax.tree.structure(hyperparams)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@jax.jit
def _take_first_rows(tree: PyTree) -> PyTree:
    """The first row of each leaf, by one program."""
    return jax.tree.map(lambda x: x[0], tree)
