"""The idea: a strategy is four pure functions, and combinators make new ones of old.

The functions run inside a mapped function (pmap, shard_map, vmap). Each sees one
worker's view and talks to the others only through collectives over named axes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis, PyTree


class Replica(NamedTuple):
    """What one worker holds.

    Attributes:
        params: the trained parameters, a pytree of float arrays.
        opt_state: the inner optimizer's state.
        buffers: state that is not trained, such as batch statistics.
    """

    params: PyTree
    opt_state: PyTree = ()
    buffers: PyTree = ()


class MeanCenter(NamedTuple):
    """The center of a strategy that has none of its own: the mean of the replicas."""

    axis: Axis = WORKERS

    def __call__(self, params: PyTree, state: PyTree) -> PyTree:
        return collectives.mean(params, self.axis)


def _no_state(params: PyTree) -> PyTree:
    return ()


def _keep_grads(
    grads: PyTree, replica: Replica, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    return grads, state


def _keep_replica(replica: Replica, state: PyTree, step: Any) -> tuple[Replica, PyTree]:
    return replica, state


_Pair = tuple[Any, Any]


class Strategy(NamedTuple):
    """How the workers' replicas agree.

    `step` counts local steps from 0 and is the same on all workers. Gradients, replicas
    and state keep their structure, shapes and dtypes.

    Attributes:
        init: params -> state; default: none.
        reduce: (grads, replica, state, step) -> (grads, state), before the inner
            optimizer; default: keep.
        sync: (replica, state, step) -> (replica, state), after it; default: keep.
        center: (params, state) -> params, the model to evaluate and ship; default: the
            mean of the replicas.
    """

    init: Callable[[PyTree], PyTree] = _no_state
    reduce: Callable[[PyTree, Replica, PyTree, Any], _Pair] = _keep_grads
    sync: Callable[[Replica, PyTree, Any], _Pair] = _keep_replica
    center: Callable[[PyTree, PyTree], PyTree] = MeanCenter()


def chain(*strategies: Strategy) -> Strategy:
    """Applies strategies one after the other, in reduce and in sync.

    The center is that of the last one that defines its own, else the mean of the
    replicas. State: the tuple of their states.

    Raises:
        ValueError: an argument that is no Strategy.
    """
    for strategy in strategies:
        check_strategy("chain", strategy)

    def init(params):
        return tuple(strategy.init(params) for strategy in strategies)

    def reduce(grads, replica, state, step):
        states = []
        for strategy, own in zip(strategies, state, strict=True):
            grads, own = strategy.reduce(grads, replica, own, step)
            states.append(own)
        return grads, tuple(states)

    def sync(replica, state, step):
        states = []
        for strategy, own in zip(strategies, state, strict=True):
            replica, own = strategy.sync(replica, own, step)
            states.append(own)
        return replica, tuple(states)

    return Strategy(init, reduce, sync, _chained_center(strategies))


def _chained_center(strategies: tuple[Strategy, ...]) -> Callable:
    """That of the last strategy with its own, else the mean over their axis."""
    own = [i for i, s in enumerate(strategies) if not isinstance(s.center, MeanCenter)]
    if not own:
        means = [s.center for s in strategies if s.center != MeanCenter()]
        return means[-1] if means else MeanCenter()
    last = own[-1]
    return lambda params, state: strategies[last].center(params, state[last])


def when(active: Callable[[Any], Any], strategy: Strategy) -> Strategy:
    """Applies a strategy only at steps where `active(step)`; else nothing is sent.

    Args:
        active: local step -> whether to act: a scalar boolean, the same on all workers.
        strategy: what to apply.

    Raises:
        ValueError: an argument of another kind.
    """
    if not callable(active):
        raise ValueError(f"when: active must be a function, got {checks.shown(active)}")
    check_strategy("when", strategy)

    def reduce(grads, replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_reduce(strategy, grads, replica, state, step),
            lambda: (grads, state),
        )

    def sync(replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            lambda: (replica, state),
        )

    # A default that keeps everything needs no branch.
    return strategy._replace(
        reduce=_keep_grads if strategy.reduce is _keep_grads else reduce,
        sync=_keep_replica if strategy.sync is _keep_replica else sync,
    )


def every(period: int, strategy: Strategy) -> Strategy:
    """Applies a strategy after local steps period, 2 · period, …

    Args:
        period: local steps between syncs, at least 1, on the absolute clock.
        strategy: what to apply.

    Raises:
        ValueError: a period that is no whole number of at least 1.
    """
    period = checks.whole("period", period, least=1)
    check_strategy("every", strategy)
    if period == 1:
        return strategy
    return when(lambda step: (step + 1) % period == 0, strategy)


def until(s: int, strategy: Strategy) -> Strategy:
    """Applies a strategy at steps 0 … s-1.

    Where it has a center of its own, its state is `init` of the current params from
    step s on, as in `after` before s: the center does not go stale as others train on.

    Raises:
        ValueError: s that is no whole number of at least 0.
    """
    s = checks.whole("until: s", s, least=0)
    check_strategy("until", strategy)
    return _phase(lambda step: step < s, strategy)


def after(s: int, strategy: Strategy) -> Strategy:
    """Applies a strategy at steps s, s+1, …, its anchors starting at step s.

    Its state is made anew by `init` from the params held at step s: made at step 0 it
    would be stale, and BMUF after 20 synchronous steps would start with twenty times
    its proper velocity. Where the strategy has a center of its own, its state follows
    the params before s, so that the center is the current model. The replicas should
    agree at step s, as they do after a sync at s-1; else each worker's anchor starts
    from its own replica. `every` belongs inside, `after(s, every(period, …))`.

    Raises:
        ValueError: s that is no whole number of at least 0.
    """
    s = checks.whole("after: s", s, least=0)
    check_strategy("after", strategy)
    phase = _phase(lambda step: step >= s, strategy)

    def reduce(grads, replica, state, step):
        # A member chained behind this one may have moved the params since our sync.
        state = lax.cond(
            step == s,
            lambda: require_same("init", "state", state, strategy.init(replica.params)),
            lambda: state,
        )
        return phase.reduce(grads, replica, state, step)

    return phase._replace(reduce=reduce)


def _phase(active: Callable[[Any], Any], strategy: Strategy) -> Strategy:
    """`when`, but with a center that outside its steps is the current params."""
    if isinstance(strategy.center, MeanCenter):
        return when(active, strategy)

    def sync(replica, state, step):
        return lax.cond(
            active(step),
            lambda: apply_sync(strategy, replica, state, step),
            lambda: (
                replica,
                require_same("init", "state", state, strategy.init(replica.params)),
            ),
        )

    return when(active, strategy)._replace(sync=sync)


def check_strategy(where: str, strategy: Any) -> None:
    """Raises a ValueError unless it is given a Strategy."""
    if not isinstance(strategy, Strategy):
        called = callable(strategy) and getattr(strategy, "__name__", None)
        hint = f" (call it: {called}())" if called else ""
        got = checks.shown(strategy)
        raise ValueError(f"{where}: expected a Strategy, got {got}{hint}")


def apply_reduce(
    strategy: Strategy, grads: PyTree, replica: Replica, state: PyTree, step: Any
) -> tuple[PyTree, PyTree]:
    """Calls strategy.reduce; raises a ValueError that names a leaf it reshapes."""
    pair = strategy.reduce(grads, replica, state, step)
    if type(pair) is not tuple or len(pair) != 2:
        got = type(pair).__name__
        raise ValueError(f"reduce must return (grads, state), got {got}")
    grads = require_same("reduce", "grads", grads, pair[0])
    return grads, require_same("reduce", "state", state, pair[1])


def apply_sync(
    strategy: Strategy, replica: Replica, state: PyTree, step: Any
) -> tuple[Replica, PyTree]:
    """Calls strategy.sync; raises a ValueError that names a leaf it reshapes."""
    pair = strategy.sync(replica, state, step)
    if type(pair) is not tuple or len(pair) != 2 or not isinstance(pair[0], Replica):
        kinds = [type(x).__name__ for x in pair] if type(pair) is tuple else []
        got = f"({', '.join(kinds)})" if kinds else type(pair).__name__
        raise ValueError(f"sync must return (replica, state), got {got}")
    replica = require_same("sync", "replica", replica, pair[0])
    return replica, require_same("sync", "state", state, pair[1])


def require_same(changer: str, what: str, before: PyTree, after: PyTree) -> PyTree:
    """Returns `after`, strong; its structure, shapes and dtypes must be those before.

    Raises:
        ValueError: naming the first leaf that differs.
    """
    if (new := jax.tree.structure(after)) != (old := jax.tree.structure(before)):
        raise ValueError(f"{changer} changes the structure of {what}: {old} to {new}")

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
    """Returns the tree without weak types.

    State that came back weaker than it went in would compile the next dispatch anew.
    """

    def leaf(x):
        kind = jax.typeof(x)
        return jnp.asarray(x, kind.dtype) if kind.weak_type else x

    return jax.tree.map(leaf, tree)
