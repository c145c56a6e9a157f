"""Simulated workers around a server, which do not wait for each other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from syncalgos import checks, collectives
from syncalgos._combinators import introspection
from syncalgos._combinators.introspection import Combination
from syncalgos._dtypes import narrow, rounded, select, widen
from syncalgos.reducers._reducer import check_optimizer
from syncalgos.reducers._stacking import shards
from syncalgos.steps import Where
from syncalgos.strategy import Axis, OwnGrads, PyTree, Strategy, apply_sync

UNIT = 1024
"""The speed of the fastest worker; other speeds are smaller whole numbers."""


class Clock(NamedTuple):
    """A common clock, which tells at which steps each worker trains or ends a round.

    The fastest worker makes a local step at each step of the clock. A worker of speed s
    makes one at a share s of these steps.

    Attributes:
        speeds: each worker's speed, in parts of UNIT.
        periods: the number of local steps in a round of each worker.
    """

    speeds: tuple[int | jax.Array, ...]
    periods: tuple[int | jax.Array, ...]

    def done(self, step: jax.Array) -> jax.Array:
        """Each worker's local steps before this step of the clock, (workers,)."""
        # Follows from the step alone, so it is the same on all workers, after a resume
        # and in the ledger. In two parts: step * speeds would overflow after 2^21.
        speeds = jnp.array(self.speeds, jnp.int32)
        return step // UNIT * speeds + step % UNIT * speeds // UNIT

    def moves(self, step: jax.Array) -> jax.Array:
        """Whether each worker makes a local step, (workers,) booleans."""
        return self.done(step + 1) > self.done(step)

    def arrives(self, step: jax.Array) -> jax.Array:
        """Whether each worker ends a round, (workers,) booleans."""
        ends = self.done(step + 1) % jnp.array(self.periods, jnp.int32) == 0
        return self.moves(step) & ends

    def waits(self, step: jax.Array) -> jax.Array:
        """Steps until each worker makes its next local step; 0: at this step."""
        speeds, rest = jnp.array(self.speeds, jnp.int32), step % UNIT
        # Of UNIT steps of the clock, the ⌈UNIT k / speed⌉-th has the k-th local step.
        following = rest * speeds // UNIT + 1
        return (following * UNIT + speeds - 1) // speeds - 1 - rest


def even_speeds(workers: int, slowest: float, period: int, paced: bool) -> Clock:
    """Makes a clock whose speeds fall evenly from 1 to that of the slowest worker.

    Args:
        workers: the number of workers, at least 1.
        slowest: the slowest worker's speed, above 0 and at most 1. A single worker has
            speed 1.
        period: the fastest worker's local steps in a round, at least 1.
        paced: whether slower workers make proportionally fewer steps in a round.
    """

    def of_period(speed):  # ⌊speed · period / UNIT⌋, in int32 too
        rest = period % UNIT * speed // UNIT
        return rounded(period // UNIT * speed + rest, 1) if paced else period

    lost = UNIT - rounded(slowest * UNIT, 1)
    speeds = [UNIT - lost * i // max(workers - 1, 1) for i in range(workers)]
    return Clock(tuple(speeds), tuple(map(of_period, speeds)))


def even_clocks(
    where: str, period: int, slowest: float, paced: bool = False
) -> Callable[[int], Clock]:
    """Returns a function, workers -> the clock of `even_speeds`, after checks.

    Args:
        where: the algorithm, for error messages.
        period: as for `even_speeds`, as are the other arguments.
    """
    period = checks.whole(f"{where}: period", period, least=1)
    slowest = checks.share(f"{where}: slowest", slowest)
    return lambda workers: even_speeds(workers, slowest, period, paced)


class AsyncState(NamedTuple):
    """State of `asynchronous` and `at_own_speeds`.

    Attributes:
        server: the server, identical on all workers; for `at_own_speeds` the state of
            the strategy inside.
        start: this worker's params at the start of its round, at least float32; () for
            `at_own_speeds`.
        held: the worker's params and opt_state before the local step.
    """

    server: Any
    start: PyTree
    held: PyTree

    @property
    def strategy(self) -> PyTree:
        """The state of the strategy inside `at_own_speeds`."""
        return self.server


def asynchronous(
    where: str,
    serve: Callable[[PyTree], Any],
    push: Callable[[Any, PyTree, jax.Array], Any],
    clock_of: Callable[[int], Clock],
    optimizer: optax.GradientTransformation | None,
    axis: Axis,
    model_of: Callable[[Any, jax.Array], PyTree] = lambda server, _: server.params,
) -> Strategy:
    """Sends each worker's update to a server at the end of the worker's round.

    The worker then starts its next round from the model that the server returns.

    Args:
        where: the algorithm, for error messages.
        serve: params -> the server, whose attribute `params` is the model.
        push: (server, update, worker) -> the server after an update, start - end of a
            round, has arrived from the worker with this index.
        clock_of: workers -> the clock of their local steps and rounds.
        optimizer: the inner optimizer; its state stays the same while its worker rests.
            None: the state keeps changing.
        axis: the mapped axis or axes over which the workers lie.
        model_of: (server, worker) -> the model that this worker gets, at least float32.

    Returns:
        A Strategy. State: the server, identical on all workers, and the worker's own
        params at the start of its round. When any worker ends a round, all workers
        gather all updates; those that arrived are applied in the workers' order. The
        center is the server's model.

    Raises:
        ValueError: `optimizer` is not an optax optimizer.
    """

    @Where
    def lands(step):
        return jnp.any(clock_of(collectives.size(axis)).arrives(step))

    def act(replica, state, step):
        arrived = clock_of(collectives.size(axis)).arrives(step)
        return lax.cond(
            lands(step),
            lambda: _arrived(replica, state, arrived, push, model_of, axis),
            lambda: (replica, state),
        )

    served = Strategy(
        lambda params: (serve(params), widen(params)),
        sync=Combination(act, landing=lands),
        center=lambda params, state: narrow(state.server.params, params),
        axis=axis,
    )
    return _resting(where, served, clock_of, optimizer)


def at_own_speeds(
    where: str,
    strategy: Strategy,
    clock_of: Callable[[int], Clock],
    optimizer: optax.GradientTransformation | None,
) -> Strategy:
    """Lets each worker make local steps at its own speed.

    Args:
        where: the algorithm, for error messages.
        strategy: a strategy that syncs replicas at steps of the common clock.
        clock_of: workers -> the clock of their local steps.
        optimizer: as for `asynchronous`.

    Returns:
        A Strategy. State: the strategy's, and params and opt_state for resting workers.
        It sends the same as the strategy, and has the same center.

    Raises:
        ValueError: `optimizer` is not an optax optimizer.
    """

    def act(replica, state, step):
        replica, inner = apply_sync(strategy, replica, state.strategy, step)
        return replica, state._replace(server=inner)

    held = strategy._replace(
        init=lambda params: (strategy.init(params), ()),
        sync=Combination(act, landing=introspection.landing_steps(strategy)),
        center=introspection.inner_center(strategy),
        acts=None,
    )
    return _resting(where, held, clock_of, optimizer)


def _resting(where, strategy, clock_of, optimizer):
    """Makes workers rest at the steps of the clock at which they make no local step.

    The strategy's init returns the first two fields of AsyncState; its sync takes and
    returns the whole state.
    """
    if optimizer is not None:
        check_optimizer(f"{where}: optimizer", optimizer)
    axis = introspection.axis_of(strategy)

    def init(params):
        server, start = strategy.init(params)
        held = widen(params), () if optimizer is None else optimizer.init(params)
        return AsyncState(server, start, held)

    # At the start of a step: strategies chained behind this one have acted by then.
    def note(grads, replica, state, step):
        opt_state = () if optimizer is None else replica.opt_state
        held = widen(replica.params), opt_state
        require_inner(where, state.held, held)
        return grads, state._replace(held=held)

    def sync(replica, state, step):
        moves = clock_of(collectives.size(axis)).moves(step)[collectives.index(axis)]
        params, opt_state = state.held
        params = select(moves, replica.params, narrow(params, replica.params))
        if optimizer is not None:
            opt_state = select(moves, replica.opt_state, opt_state)
            replica = replica._replace(opt_state=opt_state)
        return strategy.sync(replica._replace(params=params), state, step)

    # It acts at every step to hold slower workers back; results land only on arrivals.
    resting = replace(introspection.combination(strategy), call=sync, is_steady=True)
    return strategy._replace(init=init, reduce=OwnGrads(note), sync=resting)


def require_inner(where: str, kept: PyTree, now: PyTree) -> None:
    """Requires that `optimizer=` of an algorithm is the inner optimizer.

    Args:
        where: the algorithm, for the message.
        kept: what it keeps of a worker, made with its optimizer.
        now: the same of a replica.

    Raises:
        ValueError: the optimizers' states differ.
    """
    if jax.tree.structure(kept) == jax.tree.structure(now):
        return
    if "MaskedNode" in str(jax.tree.structure(kept)):
        raise ValueError(
            f"{where}: optimizer= keeps opt_state of all params while its worker "
            "rests, but `masked` gives it a part of them: leave optimizer= out"
        )
    raise ValueError(
        f"{where}: opt_state is of another optimizer than optimizer=: pass the same "
        "inner optimizer to both, with all that is around it"
    )


def _arrived(replica, state, arrived, push, model_of, axis):
    """The replica and the state after the updates of workers that end a round now."""
    me, own = collectives.index(axis), widen(replica.params)
    update = jax.tree.map(jnp.subtract, state.start, own)

    def come(carry, each):
        (server, own), (number, counts, update) = carry, each
        server = select(counts, push(server, update, number), server)
        own = select(counts & (number == me), model_of(server, number), own)
        return (server, own), None

    # (workers, ...): one by one, as each update changes the server's model.
    of_all = shards.gathered(update, axis)
    each = jnp.arange(len(arrived)), arrived, of_all
    (server, own), _ = lax.scan(come, (state.server, own), each)
    params = narrow(own, replica.params)
    start = select(arrived[me], widen(params), state.start)
    return replica._replace(params=params), state._replace(server=server, start=start)
