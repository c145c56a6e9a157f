"""The interface: a strategy is four pure functions; their results are checked here.

The functions run inside a mapped function (pmap, shard_map, vmap). Each sees one
worker's view and communicates only through collectives over named axes.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks
from syncalgos._calls import Call, Function, keep_call, written
from syncalgos._dtypes import wide_dtype
from syncalgos._host_arrays import check_ours
from syncalgos._jaxprs import CALLS, follow, runs
from syncalgos.collectives import WORKERS as WORKERS
from syncalgos.collectives import Axis as Axis
from syncalgos.collectives import PyTree as PyTree
from syncalgos.collectives._means import mean
from syncalgos.collectives._shares import noted_share


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
            """Points to `params` where a Replica is indexed by a name."""
            if isinstance(place, str):
                raise TypeError(f"a Replica has no {place!r}: use .params[{place!r}]")
            return tuple.__getitem__(self, place)


# jax.jit holds functions by weak references, and a NamedTuple has none.
@dataclass(frozen=True)
class MeanCenter:
    """The default center: the mean of the replicas, for all leaves or for some.

    Attributes:
        axis: the mapped axis or axes over which the workers lie.
        over: (mean, params, state) -> the center, for a strategy that defines a center
            for some leaves only: the function replaces these leaves in the mean. None:
            the mean is the center.

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
        # A center takes no share: workers that rest are left out by what is noted.
        mean_params = mean(params, self.axis, noted_share())
        if self.over is None:
            return mean_params
        return self.over(mean_params, params, state)


@dataclass(frozen=True, repr=False)
class _Reduce:
    """A reduce of which something is declared."""

    call: Callable[..., tuple[PyTree, PyTree]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"

    def __call__(
        self, grads: PyTree, replica: Replica, state: PyTree, step: Any
    ) -> tuple[PyTree, PyTree]:
        return self.call(grads, replica, state, step)


class MeanOfGrads(_Reduce):
    """A reduce that is declared to return the plain mean over all workers.

    The engine may then compute one gradient over the merged batches of a device's
    lanes.

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


class OwnGrads(_Reduce):
    """A reduce after which each worker's gradients still come from its own batch alone.

    It may change them, as a pull to an anchor does, take notes in the state, and send
    params, but no worker's gradient reaches another. A delay does not apply to it, and
    workers may rest.

    Attributes:
        call: (grads, replica, state, step) -> (grads, state).
    """


def keep_grads(
    grads: PyTree, replica: Replica, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    """The default reduce: returns the gradients and the state unchanged."""
    return grads, state


def keep_replica(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
    """The default sync: returns the replica and the state unchanged."""
    return replica, state


def _no_state(params: PyTree) -> PyTree:
    """The default init: returns the empty state."""
    return ()


class Strategy(NamedTuple):
    """Four functions that bring the workers' replicas into agreement.

    `step` counts local steps from 0 and is the same on all workers. Gradients, replicas
    and state keep their structure, shapes and dtypes.

    The fields from `acts` on are declarations: they state what the functions do,
    because this cannot be seen without running them. All are optional, and combinators
    pass them on. `reduce=MeanOfGrads(…)` and `center=MeanCenter(…)` declare a function
    to be a mean.

    Attributes:
        init: params -> state; default: an empty state.
        reduce: (grads, replica, state, step) -> (grads, state), called before the inner
            optimizer; default: changes nothing.
        sync: (replica, state, step) -> (replica, state), called after the inner
            optimizer; default: changes nothing.
        center: (params, state) -> params, the model to evaluate and ship; default: the
            mean of the replicas.
        acts: step -> whether sync may do anything at this step, a scalar boolean
            computed by jax operations from the step alone; None: it may act at every
            step. At any other step, sync must return exactly its inputs, and send
            nothing.
        sees_loss: whether the strategy reads `replica.loss`.
        axis: the mapped axis or axes over which the workers lie, for the combinators
            around the strategy; None: the axis of a MeanCenter, else WORKERS.
        late: local steps until a message is used; 0: the workers wait for it.
        unit_steps: whether a step moves entries by about the learning rate, whatever
            the gradient, as with Adam.
        own_momentum: whether the strategy's own momentum replaces that of the inner
            optimizer.
        learning_rate: the inner optimizer's learning rate as given to the strategy, a
            number or a schedule of local steps; None: none was given.
        own_steps: whether a sync replaces params by sums of the strategy's own steps,
            so that only plain SGD at `learning_rate` may be inside.
        call: the call of the algorithm or combinator that made the strategy, which its
            repr shows and a pickle repeats; None: it was made by hand, or `_replace`
            has changed it.

    `acts` is a promise that sync itself must keep. `every` and `when` make such a sync
    and declare its steps. Replace both fields together: `_replace(sync=…, acts=…)`.
    With the declaration, `at_syncs` and `delayed` know the steps of the syncs, and the
    engine may run several local steps of one worker before those of the next. The
    fields from `late` on do not change any step: they help to choose learning rates, to
    model the time on a network, and to refuse inner optimizers that do not fit.

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
    learning_rate: checks.LearningRate | None = None
    own_steps: bool = False
    call: Call | None = None

    def __repr__(self) -> str:
        if self.call is not None:
            return repr(self.call)
        return written("Strategy", (), self._set_fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # Functions inside a function have no name to be pickled by; their call has.
        if self.call is not None:
            return _repeat, (self.call,)
        return functools.partial(Strategy, **self._set_fields), ()

    @property
    def _set_fields(self) -> dict[str, Any]:
        """The fields that are not the defaults, by name."""
        defaults = Strategy._field_defaults
        fields = self._asdict().items()
        return {name: value for name, value in fields if value is not defaults[name]}


def _repeat(call: Call) -> Strategy:
    """Makes a strategy again from its call."""
    return call.repeat()


if not TYPE_CHECKING:
    _replace_fields = Strategy._replace

    def _replace(self, /, **changes):
        """Replaces fields; the call that made the strategy would make another one."""
        return _replace_fields(self, **{"call": None, **changes})

    # A NamedTuple refuses the name in its body. copy.replace calls __replace__.
    Strategy._replace = Strategy.__replace__ = _replace


@overload
def factory(function: Function) -> Function: ...


@overload
def factory(*, static: Sequence[str]) -> Callable[[Function], Function]: ...


def factory(function: Any = None, *, static: Sequence[str] | None = None) -> Any:
    """Decorates a function that makes a strategy or a reducer, which keeps the call.

    The call is its repr, and a pickle repeats it. A strategy binds a reducer to its own
    axis by the same call with `axis`, unless the reducer was made with an axis. For a
    wrong argument, the function names the nearest one.

    Args:
        function: the function.
        static: the arguments, of floats and seeds, whose values must be Python numbers,
            as a density that decides shapes; all others may be traced. `()` says so of
            a function of your own, which the harness then compiles once for all values.

    Raises:
        ValueError: at a call, if the function returns neither a Strategy nor a Reducer,
            or returns a Reducer and has no argument `axis`; or `static` names no
            argument.

    Example:
        >>> from syncalgos.writing import Strategy, average, every, factory
        >>> @factory
        ... def rarely(*, period: int = 100) -> Strategy:
        ...     return every(average(), period)
        >>> rarely()
        rarely(period=100)
    """
    if function is None:
        return functools.partial(_decorate, static=static)
    return _decorate(function, static=None)


def _decorate(function: Function, static: Sequence[str] | None) -> Function:
    """Decorates a function; see `factory`."""

    def add_call(result: Any, call: Call) -> Any:
        if isinstance(result, Strategy):
            return result._replace(call=call)
        if hasattr(result, "with_call"):  # a Reducer, which this module does not know
            return result.with_call(call)
        raise ValueError(
            f"{function.__name__}: a function that is decorated by factory must return "
            f"a Strategy or a Reducer, got {checks.shown(result)}"
        )

    decorated: Any = keep_call(function, add_call)
    if static is not None:
        argument_names = [*inspect.signature(function).parameters]
        for name in static:
            checks.one_of(
                f"static argument of {function.__name__}", name, argument_names
            )
        decorated.static = tuple(static)
    return decorated


def check_strategy(where: str, strategy: Any) -> None:
    """Refuses an argument that is not a Strategy.

    Args:
        where: the function that was called, for the message.
        strategy: the argument that it was given.

    Raises:
        ValueError: it is not a Strategy, or one of its functions takes other arguments.
    """
    if not isinstance(strategy, Strategy):
        hint = ""
        function_name = getattr(strategy, "__name__", None)
        if callable(strategy) and function_name:
            hint = f" (call it: {function_name}())"
        if isinstance(strategy, str):
            hint = f" (a strategy is an object: syncalgos.{strategy}())"
        if hasattr(strategy, "update"):
            hint = " (an optimizer? check the order of the arguments)"
        raise ValueError(
            f"{where}: expected a Strategy, got {checks.shown(strategy)}{hint}"
        )
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
        ValueError: there are no leaves, or one is not a float array; it is named.
    """
    leaves = checks.named_leaves("params", params)
    if not leaves:
        raise ValueError("params hold no arrays")
    _check_trained(params)
    for name, leaf in leaves:
        check_ours(name, leaf)
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, np.floating):
            kind = type(leaf).__name__ if dtype is None else f"of dtype {dtype}"
            raise ValueError(
                f"{name} is {kind}, not a float array: {_way_out(params, leaf)}"
            )


def _check_trained(params: PyTree) -> None:
    """Raises a ValueError for flax's batch statistics among the params."""
    # They are float arrays: as params they would stay 0 and 1 without an error.
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= {*params}:
        raise ValueError(
            "params['batch_stats'] is not trained: pass variables.pop('params') as "
            "params, and the remaining variables as buffers"
        )

    def is_statistic(node: Any) -> bool:
        names = [kind.__name__ for kind in type(node).__mro__]
        return "Variable" in names and ("BatchStat" in names or "Cache" in names)

    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_statistic)
    for path, node in nodes:
        if is_statistic(node):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a {type(node).__name__}, which "
                f"is not trained: split the module by {_SPLITS['flax']}"
            )


# Libraries whose modules are pytrees, and the call that takes out the trained arrays.
_SPLITS = {
    "equinox": "eqx.partition(model, eqx.is_inexact_array)",
    "flax": "nnx.split(model, nnx.Param, ...)",
}


def _way_out(params: PyTree, leaf: Any) -> str:
    """Suggests a remedy for a leaf of params that is not a float array."""
    if isinstance(params, type):
        return f"make an object of this class, {params.__name__}(…)"
    modules = [kind.__module__.partition(".")[0] for kind in type(params).__mro__]
    for module in modules:
        if module in _SPLITS:
            return f"split the module by {_SPLITS[module]}"
    if isinstance(leaf, float):
        return f"use jnp.asarray({leaf})"
    return "an array that is not trained belongs in buffers"


def apply_reduce(
    strategy: Strategy, grads: PyTree, replica: Replica, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    """Calls `strategy.reduce`, and checks its result while it is traced.

    Args:
        strategy: the strategy.
        grads: gradients, shaped like params.
        replica: this worker's replica.
        state: the strategy's state.
        step: the local step, an int32 scalar.

    Returns:
        (grads, state), without weak types.

    Raises:
        ValueError: the result has another form; the first differing leaf is named.
    """
    return _apply(strategy, "reduce", "grads", grads, replica, state, step)


def apply_sync(
    strategy: Strategy, replica: Replica, state: PyTree, step: Any
) -> tuple[Any, PyTree]:
    """Calls `strategy.sync`, and checks its result while it is traced.

    Args:
        strategy: the strategy.
        replica: this worker's replica.
        state: the strategy's state.
        step: the local step, an int32 scalar.

    Returns:
        (replica, state), without weak types.

    Raises:
        ValueError: the result has another form; the first differing leaf is named.
    """
    return _apply(strategy, "sync", "replica", replica, state, step)


def _apply(
    strategy: Strategy, changer: str, tree_name: str, tree: Any, *arguments: Any
) -> tuple[Any, PyTree]:
    """Returns the pair from reduce or sync, whose parts must keep their form."""
    try:
        pair = getattr(strategy, changer)(tree, *arguments)
    except TypeError as error:
        if not strategy.sees_loss and "tuple" in str(error):
            error.add_note("replica.loss is () unless the Strategy has sees_loss=True")
        raise
    # A list of two is a pytree as well, but would fail far from here.
    is_pair = type(pair) is tuple and len(pair) == 2
    if not is_pair or (tree_name == "replica" and not isinstance(pair[0], type(tree))):
        shown_pair = type(pair).__name__
        if type(pair) is tuple and pair:
            shown_pair = f"({', '.join(type(x).__name__ for x in pair)})"
        raise ValueError(
            f"{changer} must return ({tree_name}, state), got {shown_pair}"
        )
    *_, state, _ = arguments
    new_tree = require_same(changer, tree_name, tree, pair[0])
    return new_tree, require_same(changer, "state", state, pair[1])


def loss_dtype(params: PyTree) -> Any:
    """The dtype of the loss for a strategy and an optimizer, given these params."""
    return jnp.result_type(*(wide_dtype(x.dtype) for x in jax.tree.leaves(params)))


def seeing(strategy: Strategy, replica: Replica, loss: Any = 0.0) -> Replica:
    """Returns the replica, with its step's loss if the strategy sees the loss."""
    if not strategy.sees_loss:
        return replica
    return replica._replace(loss=jnp.asarray(loss, loss_dtype(replica.params)))


def changes_params(
    strategy: Strategy, replica: Replica, state: PyTree, step: Any
) -> list[bool]:
    """Traces a sync, and tells which leaves of params it may change.

    Args:
        strategy: the strategy.
        replica: this worker's replica.
        state: the strategy's state.
        step: the local step.

    Returns:
        One boolean per leaf: False if the sync returns the very array it was given.
    """

    def sync_params(replica: Replica, state: PyTree, step: Any) -> PyTree:
        return strategy.sync(replica, state, step)[0].params

    def visit(equation: Any, values: list[Any]) -> list[Any]:
        # A sync under jit returns new arrays even for those that it does not change.
        if equation.primitive.name in CALLS:
            return follow(*runs(equation, values).arms[0], visit)
        return [None] * len(equation.outvars)

    jaxpr = jax.make_jaxpr(sync_params)(replica, state, step)
    num_inputs = len(jaxpr.jaxpr.invars)
    num_params = len(jax.tree.leaves(replica.params))
    # A value is the number of a leaf of params, which are the first of a replica.
    values = [*range(num_params), *[None] * (num_inputs - num_params)]
    results = follow(jaxpr, values, visit, literals=False)
    return [result != number for number, result in enumerate(results)]


def require_same(
    changer: str,
    tree_name: str,
    old_tree: PyTree,
    new_tree: PyTree,
    casts: bool = False,
) -> PyTree:
    """Requires that a tree keeps its structure, shapes and dtypes.

    Whatever a user's part returns, such as a reducer or an optimizer, is held against
    what it was given: jax would broadcast a result of another shape without a word.

    Args:
        changer: the function that returned `new_tree`, for the message.
        tree_name: the tree's name, for the message.
        old_tree: the tree that it was given.
        new_tree: the tree that it returned.
        casts: whether a leaf may have another dtype of floats.

    Returns:
        `new_tree`, without weak types.

    Raises:
        ValueError: the tree changed; the first leaf that differs is named.
    """
    if jax.tree.structure(new_tree) != jax.tree.structure(old_tree):
        difference = checks.unlike(tree_name, old_tree, new_tree)
        raise ValueError(
            f"{changer} changes the structure of {tree_name}: {difference}"
        )

    def check_leaf(path: Any, x: Any, y: Any) -> Any:
        old_type = jax.typeof(x)
        new_type = jax.typeof(y)
        is_cast = casts and all(
            jnp.issubdtype(kind.dtype, np.floating) for kind in (old_type, new_type)
        )
        has_same_dtype = is_cast or old_type.dtype == new_type.dtype
        if old_type.shape != new_type.shape or not has_same_dtype:
            raise ValueError(
                f"{changer} changes {tree_name}{jax.tree_util.keystr(path)} from "
                f"{old_type.str_short()} to {new_type.str_short()}: shape and dtype "
                "must stay"
            )
        return y

    return strong(jax.tree_util.tree_map_with_path(check_leaf, old_tree, new_tree))


def take_step(
    changer: str,
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **extra: Any,
) -> tuple[PyTree, PyTree]:
    """Takes a step of an optimizer, whose updates must fit the params.

    Args:
        changer: the optimizer's name, for the message.
        optimizer: any optax optimizer.
        grads: gradients, shaped like params.
        opt_state: the optimizer's state.
        params: the params before the step.
        extra: arguments for optimizers that take them.

    Returns:
        (params, opt_state) after the step.

    Raises:
        ValueError: the updates have another form; the first differing leaf is named.
    """
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(grads, opt_state, params, **extra)
    require_same(changer, "updates", params, updates, casts=True)
    return optax.apply_updates(params, updates), opt_state


def strong(tree: PyTree) -> PyTree:
    """Returns the tree without weak types."""

    def make_strong(x: Any) -> Any:
        kind = jax.typeof(x)
        # State that returns with a weak type would make the next call compile again.
        return jnp.asarray(x, kind.dtype) if kind.weak_type else x

    return jax.tree.map(make_strong, tree)
