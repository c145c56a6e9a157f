"""Workers that do not wait for each other, around a server: simulated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.combinators.introspection import Composed
from syncalgos.combinators.speeds import Clock
from syncalgos.dtypes import narrow, widen
from syncalgos.strategy import Strategy


class AsyncState(NamedTuple):
    """The server, this worker's start of its round, and what it held a step before.

    `began`: whether that holds of its opt_state, too; `init` sees params alone.
    """

    server: Any
    start: PyTree
    held: PyTree
    began: jax.Array


def asynchronous(
    serve: Callable[[PyTree], Any],
    push: Callable[[Any, PyTree], Any],
    clock_of: Callable[[int], Clock],
    optimizer: optax.GradientTransformation | None,
    axis: Axis,
) -> Strategy:
    """Sends what a worker did in its round to a server, and starts it from its model.

    Args:
        serve: params -> the server, whose attribute `params` is the model.
        push: (server, update) -> the server, once a worker's start - end has come.
        clock_of: workers -> when they make local steps and end their rounds.
        optimizer: the inner one: its state rests as its worker does; None: it goes on.
        axis: the mapped axis or axes over which the workers lie.

    The server is held by all, and equal on all: where workers arrive all gather the
    updates of all, of which those count that have arrived, in the workers' order.
    """

    def clock():
        # Also asked while jax computes at once: `collectives.size` needs a trace.
        return clock_of(lax.axis_size(axis))

    def lands(step):
        return jnp.any(clock().arrives(step))

    def init(params):
        opt_state = () if optimizer is None else optimizer.init(params)
        held = widen(params), opt_state
        return AsyncState(serve(params), widen(params), held, jnp.array(False))

    def rested(replica, state, step):
        """The replica, or what it was where its worker makes no local step now."""
        me = collectives.index(axis)
        moves = clock().moves(step)[me]
        params, opt_state = state.held
        params = _either(moves, replica.params, narrow(params, replica.params))
        if optimizer is None:
            return replica._replace(params=params)
        # Behind another phase of the training it has gone on since it was made.
        goes_on = moves | ~(state.began | (step == 0))
        opt_state = _either(goes_on, replica.opt_state, opt_state)
        return replica._replace(params=params, opt_state=opt_state)

    def arrive(replica, state, step):
        me, arrived = collectives.index(axis), clock().arrives(step)
        own = widen(replica.params)
        update = jax.tree.map(jnp.subtract, state.start, own)

        def come(carry, each):
            (server, own), (number, counts, update) = carry, each
            server = _either(counts, push(server, update), server)
            own = _either(counts & (number == me), server.params, own)
            return (server, own), None

        # (workers, ...): one by one, as each meets another model at the server.
        each = jnp.arange(len(arrived)), arrived, collectives.gather(update, axis)
        (server, own), _ = lax.scan(come, (state.server, own), each)
        params = narrow(own, replica.params)
        start = _either(arrived[me], widen(params), state.start)
        return replica._replace(params=params), state._replace(
            server=server, start=start
        )

    def sync(replica, state, step):
        replica = rested(replica, state, step)
        replica, state = lax.cond(
            lands(step),
            lambda: arrive(replica, state, step),
            lambda: (replica, state),
        )
        opt_state = () if optimizer is None else replica.opt_state
        held = widen(replica.params), opt_state
        return replica, state._replace(held=held, began=jnp.array(True))

    strategy = Strategy(
        init,
        sync=Composed(sync, (), lambda change: change(strategy), lands),
        center=lambda params, state: narrow(state.server.params, params),
    )
    return strategy


def _either(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """One of two trees."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)
