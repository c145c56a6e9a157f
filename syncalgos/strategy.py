"""The interface: a strategy is four pure functions, and what they must return.

The functions run inside a mapped function (pmap, shard_map, vmap). Each sees one
worker's view and communicates only through collectives over named axes.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS as WORKERS
from syncalgos.collectives import Axis as Axis
from syncalgos.collectives import PyTree as PyTree
from syncalgos.dtypes import wide_dtype


class Replica(NamedTuple):
    """The model and the optimizer state that one worker holds.

    Attributes:
        params: the trained parameters, a pytree of float arrays.
        opt_state: the inner optimizer's state.
        buffers: state that is not trained, such as batch statistics.
        loss: the loss of this worker's local step, a float scalar, during a step of a
            strategy that `sees_loss`; () otherwise.

    Example:
        >>> import jax.numpy as jnp
        >>> from syncalgos import Replica
        >>> replica = Replica({"w": jnp.ones(2)})
        >>> replica._replace(params={"w": jnp.zeros(2)}).params["w"]
        Array([0., 0.], dtype=float32)
    """

    params: PyTree
    opt_state: PyTree = ()
    buffers: PyTree = ()
    loss: Any = ()

    if not TYPE_CHECKING:

        def __getitem__(self, place):
            """Says where the params are, for one who took it for them."""
            if isinstance(place, str):
                raise TypeError(f"a Replica has params: write .params[{place!r}]")
            return tuple.__getitem__(self, place)


class MeanCenter(NamedTuple):
    """The default center: the mean of the replicas, or of those leaves without another.

    Attributes:
        axis: the mapped axis or axes over which the workers lie.
        over: (mean, params, state) -> the center, for a strategy with a center for
            some leaves alone: it replaces these in the mean of the others. None: the
            mean is the center.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from syncalgos import MeanCenter
        >>> center = MeanCenter("workers")
        >>> replicas = jnp.array([1.0, 3.0])
        >>> jax.vmap(center, axis_name="workers", in_axes=(0, None))(replicas, ())
        Array([2., 2.], dtype=float32)
    """

    axis: Axis = WORKERS
    over: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None

    def __call__(self, params: PyTree, state: PyTree) -> PyTree:
        mean = collectives.mean(collectives.weighted(params), self.axis)
        return mean if self.over is None else self.over(mean, params, state)


class MeanOfGrads(NamedTuple):
    """A reduce that is declared to return the plain mean over all workers.

    The engine then computes one gradient over the merged batches of a device's lanes.

    Attributes:
        call: (grads, replica, state, step) -> (grads, state).

    Example:
        >>> import numpy as np
        >>> from syncalgos import MeanOfGrads, Strategy, collectives, communication
        >>> def mean(grads, replica, state, step):
        ...     return collectives.mean(grads), state
        >>> strategy = Strategy(reduce=MeanOfGrads(mean))
        >>> model = np.ones(10, np.float32)
        >>> communication(strategy, model, workers=2, steps=3).per_step
        array([ 40.,  80., 120.])
    """

    call: Callable[..., tuple[PyTree, PyTree]]

    def __call__(
        self, grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        return self.call(grads, replica, state, step)


def keep_grads(
    grads: PyTree, replica: Replica, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    """The default reduce: returns the gradients and the state as they are."""
    return grads, state


def keep_replica(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
    """The default sync: returns the replica and the state as they are."""
    return replica, state


def _no_state(params: PyTree) -> PyTree:
    """The default init: returns the empty state."""
    return ()


class Strategy(NamedTuple):
    """Four functions by which the workers' replicas agree, and what they declare.

    `step` counts local steps from 0 and is the same on all workers. Gradients, replicas
    and state keep their structure, shapes and dtypes.

    The fields from `acts` on are declarations: what the functions do, and nobody can
    see without running them. Each may be left out, and combinators hand them on.
    `reduce=MeanOfGrads(…)` and `center=MeanCenter(…)` declare a function to be a mean.

    Attributes:
        init: params -> state; default: none.
        reduce: (grads, replica, state, step) -> (grads, state), before the inner
            optimizer; default: keep.
        sync: (replica, state, step) -> (replica, state), after it; default: keep.
        center: (params, state) -> params, the model to evaluate and ship; default: the
            mean of the replicas.
        acts: step -> whether sync may do anything then, a scalar boolean found by jax
            operations from the step alone; None: it may at every step. At any other
            step sync must return exactly what it was given, and send nothing.
        sees_loss: whether it reads `replica.loss`.
        axis: the mapped axis or axes over which the workers lie, for the combinators
            around it; None: those of a MeanCenter, else WORKERS.
        late: local steps until a message is used; 0: the workers wait for it.
        unit_steps: whether entries move by about the learning rate, whatever the
            gradient, as with Adam.
        own_momentum: whether a momentum of its own takes the place of the inner
            optimizer's.

    `acts` is a promise, which sync keeps by itself: `every` and `when` make a sync that
    does, and declare it. Replace both together: `_replace(sync=…, acts=…)`. Where it is
    declared, `at_syncs` and `delayed` know the steps of the syncs, and the engine may
    run several local steps of one worker, then those of the next. The last three change
    no step: they are for those who choose rates, or model the time of a network.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, Strategy, collectives
        >>> def pull(replica, state, step):
        ...     mean = collectives.mean(replica.params)
        ...     return replica._replace(params=(replica.params + mean) / 2), state
        >>> loss = lambda x, batch: -x * batch.mean()
        >>> strategy = Strategy(sync=pull)
        >>> trainer = DataParallel(loss, optax.sgd(1.0), strategy, workers=2)
        >>> state = trainer.init(jnp.float32(0))
        >>> state, _ = trainer.run(state, jnp.array([[0.0, 4.0]]))
        >>> state.replica.params.ravel()
        Array([1., 3.], dtype=float32)
    """

    init: Callable[[PyTree], PyTree] = _no_state
    reduce: Callable[[PyTree, Replica, PyTree, Any], tuple[Any, Any]] = keep_grads
    sync: Callable[[Replica, PyTree, Any], tuple[Any, Any]] = keep_replica
    center: Callable[[PyTree, PyTree], PyTree] = MeanCenter()
    acts: Callable[[Any], Any] | None = None
    sees_loss: bool = False
    axis: Axis | None = None
    late: int = 0
    unit_steps: bool = False
    own_momentum: bool = False


def check_strategy(where: str, strategy: Any) -> None:
    """Refuses what is no Strategy.

    Args:
        where: the function that was called, for the message.
        strategy: what it was given.

    Raises:
        ValueError: no Strategy, or one of other functions than those that it describes.
    """
    if not isinstance(strategy, Strategy):
        called = callable(strategy) and getattr(strategy, "__name__", None)
        hint = f" (call it: {called}())" if called else ""
        if isinstance(strategy, str):
            hint = f" (a strategy is an object: syncalgos.{strategy}())"
        if hasattr(strategy, "update"):
            hint = " (an optimizer? it comes before the strategy)"
        got = checks.shown(strategy)
        raise ValueError(f"{where}: expected a Strategy, got {got}{hint}")
    for name in ("init", "reduce", "sync", "center"):
        names = list(inspect.signature(Strategy._field_defaults[name]).parameters)
        label = f"{where}: {name} of a Strategy"
        checks.called_with(label, getattr(strategy, name), names)
    if strategy.acts is not None and not callable(strategy.acts):
        raise ValueError(
            f"{where}: acts of a Strategy must be a function, local step -> bool, or "
            f"None, got {checks.shown(strategy.acts)}"
        )


def check_params(params: PyTree) -> None:
    """Refuses params that cannot be trained.

    Args:
        params: a pytree, arrays or their shapes.

    Raises:
        ValueError: no leaves at all, or one that is no float array, by its name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("params hold no arrays")
    _check_trained(params)
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, np.floating):
            kind = type(leaf).__name__ if dtype is None else f"of dtype {dtype}"
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {kind}, not a float array: "
                + _way_out(params, leaf)
            )


def _check_trained(params: PyTree) -> None:
    """Raises a ValueError for statistics of flax among the params."""
    # They are float arrays: trained, they would stay 0 and 1 without a word.
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= {*params}:
        raise ValueError(
            "params['batch_stats'] is not trained: give a model's variables to init in "
            "two parts, params = variables.pop('params') and variables"
        )

    def is_statistic(node: Any) -> bool:
        names = [kind.__name__ for kind in type(node).__mro__]
        return "Variable" in names and ("BatchStat" in names or "Cache" in names)

    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_statistic)
    for path, node in nodes:
        if is_statistic(node):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a {type(node).__name__}, which "
                f"is not trained: a module is taken apart by {_SPLITS['flax']}"
            )


# Modules that are pytrees: the library, and what takes their trained arrays out.
_SPLITS = {
    "equinox": "eqx.partition(model, eqx.is_inexact_array)",
    "flax": "nnx.split(model, nnx.Param, ...)",
}


def _way_out(params: PyTree, leaf: Any) -> str:
    """Suggests a remedy for a leaf of params that is no float array."""
    modules = [kind.__module__.partition(".")[0] for kind in type(params).__mro__]
    if split := next((_SPLITS[name] for name in modules if name in _SPLITS), None):
        return f"a module is taken apart by {split}"
    if isinstance(leaf, float):
        return f"say jnp.asarray({leaf})"
    return "what is not trained belongs in buffers"


def apply_reduce(
    strategy: Strategy, grads: PyTree, replica: Replica, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    """Calls `strategy.reduce`, and checks its result while it is traced.

    Args:
        strategy: whose reduce is called.
        grads: gradients, shaped like params.
        replica: this worker's.
        state: the strategy's.
        step: the local step, an int32 scalar.

    Returns:
        (grads, state), without weak types.

    Raises:
        ValueError: a result of another form; it names the first leaf that differs.
    """
    with _seeing(strategy):
        pair = strategy.reduce(grads, replica, state, step)
    return _checked("reduce", "grads", grads, state, pair)


def apply_sync(
    strategy: Strategy, replica: Replica, state: PyTree, step: Any
) -> tuple[Any, PyTree]:
    """Calls `strategy.sync`, and checks its result while it is traced.

    Args:
        strategy: whose sync is called.
        replica: this worker's.
        state: the strategy's.
        step: the local step, an int32 scalar.

    Returns:
        (replica, state), without weak types.

    Raises:
        ValueError: a result of another form; it names the first leaf that differs.
    """
    with _seeing(strategy):
        pair = strategy.sync(replica, state, step)
    return _checked("sync", "replica", replica, state, pair)


@contextmanager
def _seeing(strategy: Strategy) -> Iterator[None]:
    """Adds to an error that a strategy may have taken a loss which it is not shown."""
    try:
        yield
    except TypeError as error:
        if not strategy.sees_loss and "tuple" in str(error):
            error.add_note("replica.loss is () without Strategy(…, sees_loss=True)")
        raise


def _checked(
    changer: str, what: str, first: Any, state: PyTree, pair: Any
) -> tuple[Any, PyTree]:
    """The pair that reduce or sync returned, each part as it was before."""
    # A pair in a list is a pytree as well, and would fail far from here.
    is_pair = type(pair) is tuple and len(pair) == 2
    if not is_pair or (what == "replica" and not isinstance(pair[0], type(first))):
        kinds = [type(x).__name__ for x in pair] if type(pair) is tuple else []
        got = f"({', '.join(kinds)})" if kinds else type(pair).__name__
        raise ValueError(f"{changer} must return ({what}, state), got {got}")
    first = require_same(changer, what, first, pair[0])
    return first, require_same(changer, "state", state, pair[1])


def loss_dtype(params: PyTree) -> Any:
    """The dtype in which a strategy and an optimizer get the loss of such params."""
    return jnp.result_type(*(wide_dtype(x.dtype) for x in jax.tree.leaves(params)))


def seeing(strategy: Strategy, replica: Replica, loss: Any = 0.0) -> Replica:
    """Returns the replica with the loss of its step, where the strategy sees it."""
    if not strategy.sees_loss:
        return replica
    return replica._replace(loss=jnp.asarray(loss, loss_dtype(replica.params)))


def changes_params(
    strategy: Strategy, replica: Replica, state: PyTree, step: Any
) -> list[bool]:
    """Whether a sync may change each leaf of params, found by tracing it.

    Args:
        strategy: whose sync is traced.
        replica: this worker's.
        state: the strategy's.
        step: the local step.

    Returns:
        One boolean a leaf: False if the sync returns the very array that it was given.
    """
    changed: list[bool] = []

    def look(replica, state, step):
        new, _ = strategy.sync(replica, state, step)
        pairs = zip(*map(jax.tree.leaves, (new.params, replica.params)), strict=True)
        changed.extend(after is not before for after, before in pairs)

    jax.eval_shape(look, replica, state, step)
    return changed


def require_same(changer: str, what: str, before: PyTree, after: PyTree) -> PyTree:
    """Requires that a tree keeps its structure, shapes and dtypes.

    Args:
        changer: the function that returned `after`, for the message.
        what: the tree's name, for the message.
        before: the tree that it was given.
        after: the tree that it returned.

    Returns:
        `after`, without weak types.

    Raises:
        ValueError: naming the first leaf that differs.
    """
    if jax.tree.structure(after) != jax.tree.structure(before):
        why = checks.unlike(what, before, after)
        raise ValueError(f"{changer} changes the structure of {what}: {why}")

    def leaf(path, x, y):
        was, now = jax.typeof(x), jax.typeof(y)
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise ValueError(
                f"{changer} changes {what}{jax.tree_util.keystr(path)} from "
                f"{was.str_short()} to {now.str_short()}; shapes and dtypes must stay"
            )
        return y

    return strong(jax.tree_util.tree_map_with_path(leaf, before, after))


def strong(tree: PyTree) -> PyTree:
    """Returns the tree without weak types."""

    def leaf(x):
        kind = jax.typeof(x)
        # State that returns with a weaker type would compile the next dispatch anew.
        return jnp.asarray(x, kind.dtype) if kind.weak_type else x

    return jax.tree.map(leaf, tree)
