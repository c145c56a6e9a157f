"""Workers that do not wait for each other, around a server: simulated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree
from syncalgos.combinators.introspection import Combination
from syncalgos.dtypes import if_finite, narrow, widen
from syncalgos.strategy import Strategy

UNIT = 1024  # speeds are whole parts of it: their products with steps are exact


class Clock(NamedTuple):
    """When each worker makes its local steps, and ends its rounds.

    At each step of the clock the fastest worker makes a local step, one of speed s in
    s of them. All follows from the clock's step alone, so that it is the same on all
    workers, after a resume, and for the ledger.

    Attributes:
        speeds: of each worker, in parts of UNIT.
        periods: of each worker, its own local steps in a round.
    """

    speeds: tuple[int, ...]
    periods: tuple[int, ...]

    def done(self, step: jax.Array) -> jax.Array:
        """The local steps that each worker has made before this one of the clock."""
        speeds = jnp.array(self.speeds, jnp.int32)
        return step // UNIT * speeds + step % UNIT * speeds // UNIT

    def moves(self, step: jax.Array) -> jax.Array:
        """Which workers make a local step."""
        return self.done(step + 1) > self.done(step)

    def arrives(self, step: jax.Array) -> jax.Array:
        """Which workers end a round."""
        ends = self.done(step + 1) % jnp.array(self.periods, jnp.int32) == 0
        return self.moves(step) & ends


def even_speeds(workers: int, slowest: float, period: int, paced: bool) -> Clock:
    """A clock of workers whose speeds fall evenly, from 1 to that of the slowest.

    Args:
        workers: their number.
        slowest: its speed, above 0 and at most 1; of one worker it is 1.
        period: local steps of the fastest in a round.
        paced: whether others take fewer, as they are slower.
    """
    lost = UNIT - max(1, round(slowest * UNIT))
    speeds = [UNIT - lost * i // max(workers - 1, 1) for i in range(workers)]
    periods = [max(1, period * s // UNIT) if paced else period for s in speeds]
    return Clock(tuple(speeds), tuple(periods))


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

    return Strategy(
        init,
        # Slower workers rest, which is to act: only what arrives lands.
        sync=Combination(sync, lands=lands),
        center=lambda params, state: narrow(state.server.params, params),
    )


def _either(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """One of two trees."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


class Server(NamedTuple):
    """The model θ, its momentum m, the updates D since it moved, and their number."""

    params: PyTree
    velocity: PyTree
    total: PyTree
    arrived: jax.Array


def new_server(params: PyTree) -> Server:
    """A server to which nothing has come."""
    params = widen(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Server(params, zeros, zeros, jnp.int32(0))


def delayed_nesterov(
    server: Server,
    update: PyTree,
    lr: float,
    momentum: float,
    buffer: int,
    early: float,
) -> Server:
    """The server after an update Δ has come; it stays as it is if Δ is not finite.

    With D ← D + Δ, and B updates in a buffer:

        the last of a buffer: m ← β m + D / B;  θ ← θ - η ((1 - c B + c) β m + Δ / B);
                              D ← 0
        any other:            θ ← θ - η (c β m + Δ / B)

    Args:
        server: before.
        update: Δ, start - end of a worker's round.
        lr: η.
        momentum: β.
        buffer: B.
        early: c.

    Source: Liu et al., "Asynchronous local-SGD training for language modeling", 2024,
    algorithm 3.
    """
    is_last = (server.arrived + 1) % buffer == 0
    share = jnp.where(is_last, 1 - early * buffer + early, early)
    total = jax.tree.map(jnp.add, server.total, update)
    velocity = jax.tree.map(
        lambda m, d: jnp.where(is_last, momentum * m + d / buffer, m),
        server.velocity,
        total,
    )
    params = jax.tree.map(
        lambda x, m, u: x - lr * (share * momentum * m + u / buffer),
        server.params,
        velocity,
        update,
    )
    total = jax.tree.map(lambda d: jnp.where(is_last, 0, d), total)
    new = Server(params, velocity, total, (server.arrived + 1) % buffer)
    new = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), new, server)
    return if_finite(update, new, server)
