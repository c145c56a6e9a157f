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
from syncalgos.collectives._axes import same_on_all
from syncalgos.reducers._reducer import check_optimizer
from syncalgos.reducers._stacking import shards
from syncalgos.steps import Where
from syncalgos.strategy import (
    Axis,
    OwnGrads,
    PyTree,
    Replica,
    Strategy,
    apply_sync,
)

UNIT = 1024
"""The speed of the fastest worker; other speeds are smaller whole numbers."""


class CommonClock(NamedTuple):
    """A common clock, which tells at which steps each worker trains or ends a round.

    The fastest worker makes a local step at each step of the clock. A worker of speed s
    makes one at a share s of these steps.

    Attributes:
        speeds: each worker's speed, in parts of UNIT.
        periods: the number of local steps in a round of each worker.
    """

    speeds: tuple[int | jax.Array, ...]
    periods: tuple[int | jax.Array, ...]

    def finished_steps(self, step: jax.Array) -> jax.Array:
        """Each worker's local steps before this step of the clock, (workers,)."""
        # Follows from the step alone, so it is the same on all workers, after a resume
        # and in the ledger. In two parts: step * speeds would overflow after 2^21.
        speeds = jnp.array(self.speeds, jnp.int32)
        return step // UNIT * speeds + step % UNIT * speeds // UNIT

    def makes_step(self, step: jax.Array) -> jax.Array:
        """Whether each worker makes a local step, (workers,) booleans."""
        return self.finished_steps(step + 1) > self.finished_steps(step)

    def ends_round(self, step: jax.Array) -> jax.Array:
        """Whether each worker ends a round, (workers,) booleans."""
        finished_steps = self.finished_steps(step + 1)
        is_whole_round = finished_steps % jnp.array(self.periods, jnp.int32) == 0
        return self.makes_step(step) & is_whole_round

    def waiting_steps(self, step: jax.Array) -> jax.Array:
        """Steps until each worker makes its next local step; 0: at this step."""
        speeds = jnp.array(self.speeds, jnp.int32)
        clock_step = step % UNIT
        # Of UNIT steps of the clock, the ⌈UNIT k / speed⌉-th has the k-th local step.
        next_local_step = clock_step * speeds // UNIT + 1
        return (next_local_step * UNIT + speeds - 1) // speeds - 1 - clock_step


def even_speeds(workers: int, slowest: float, period: int, paced: bool) -> CommonClock:
    """Makes a clock whose speeds fall evenly from 1 to that of the slowest worker.

    Args:
        workers: the number of workers, at least 1.
        slowest: the slowest worker's speed, above 0 and at most 1. A single worker has
            speed 1.
        period: the fastest worker's local steps in a round, at least 1.
        paced: whether slower workers make proportionally fewer steps in a round.
    """

    def scale_period(speed: int | jax.Array) -> int | jax.Array:
        if not paced:
            return period
        # ⌊speed · period / UNIT⌋, in int32 too.
        remainder = period % UNIT * speed // UNIT
        return rounded(period // UNIT * speed + remainder, 1)

    slowdown = UNIT - rounded(slowest * UNIT, 1)
    speeds = [UNIT - slowdown * i // max(workers - 1, 1) for i in range(workers)]
    return CommonClock(tuple(speeds), tuple(map(scale_period, speeds)))


def even_clocks(
    where: str, period: int, slowest: float, paced: bool = False
) -> Callable[[int], CommonClock]:
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
    init_server: Callable[[PyTree], Any],
    push: Callable[[Any, PyTree, jax.Array], Any],
    make_clock: Callable[[int], CommonClock],
    optimizer: optax.GradientTransformation | None,
    axis: Axis,
    read_model: Callable[[Any, jax.Array], PyTree] = lambda server, _: server.params,
) -> Strategy:
    """Sends each worker's update to a server at the end of the worker's round.

    The worker then starts its next round from the model that the server returns.

    Args:
        where: the algorithm, for error messages.
        init_server: params -> the server, whose attribute `params` is the model.
        push: (server, update, worker) -> the server after an update, start - end of a
            round, has arrived from the worker with this index.
        make_clock: workers -> the clock of their local steps and rounds.
        optimizer: the inner optimizer; its state stays the same while its worker rests.
            None: the state keeps changing.
        axis: the mapped axis or axes over which the workers lie.
        read_model: (server, worker) -> the model that this worker gets, in float32 at
            least.

    Returns:
        A Strategy. State: the server, identical on all workers, and the worker's own
        params at the start of its round. When any worker ends a round, all workers
        gather all updates; those that arrived are applied in the workers' order. The
        center is the server's model.

    Raises:
        ValueError: `optimizer` is not an optax optimizer.
    """

    @Where
    def ends_any_round(step: Any) -> jax.Array:
        return jnp.any(make_clock(collectives.size(axis)).ends_round(step))

    def act(
        replica: Replica, state: AsyncState, step: Any
    ) -> tuple[Replica, AsyncState]:
        step = same_on_all(step, axis)
        is_arriving = make_clock(collectives.size(axis)).ends_round(step)
        return lax.cond(
            ends_any_round(step),
            lambda: _apply_updates(replica, state, is_arriving, push, read_model, axis),
            lambda: (replica, state),
        )

    strategy = Strategy(
        lambda params: (init_server(params), widen(params)),
        sync=Combination(act, landing=ends_any_round),
        center=lambda params, state: narrow(state.server.params, params),
        axis=axis,
    )
    return _rest_between_steps(where, strategy, make_clock, optimizer)


def at_own_speeds(
    where: str,
    strategy: Strategy,
    make_clock: Callable[[int], CommonClock],
    optimizer: optax.GradientTransformation | None,
) -> Strategy:
    """Lets each worker make local steps at its own speed.

    Args:
        where: the algorithm, for error messages.
        strategy: a strategy that syncs replicas at steps of the common clock.
        make_clock: workers -> the clock of their local steps.
        optimizer: as for `asynchronous`.

    Returns:
        A Strategy. State: the strategy's, and params and opt_state for resting workers.
        It sends the same as the strategy, and has the same center.

    Raises:
        ValueError: `optimizer` is not an optax optimizer.
    """

    def act(
        replica: Replica, state: AsyncState, step: Any
    ) -> tuple[Replica, AsyncState]:
        replica, inner_state = apply_sync(strategy, replica, state.strategy, step)
        return replica, state._replace(server=inner_state)

    adapted = strategy._replace(
        init=lambda params: (strategy.init(params), ()),
        sync=Combination(act, landing=introspection.landing_steps(strategy)),
        center=introspection.inner_center(strategy),
        acts=None,
    )
    return _rest_between_steps(where, adapted, make_clock, optimizer)


def _rest_between_steps(
    where: str,
    strategy: Strategy,
    make_clock: Callable[[int], CommonClock],
    optimizer: optax.GradientTransformation | None,
) -> Strategy:
    """Makes workers rest at the steps of the clock at which they make no local step.

    The strategy's init returns the first two fields of AsyncState; its sync takes and
    returns the whole state.
    """
    if optimizer is not None:
        check_optimizer(f"{where}: optimizer", optimizer)
    axis = introspection.find_axis(strategy)

    def init(params: PyTree) -> AsyncState:
        server, start = strategy.init(params)
        opt_state = () if optimizer is None else optimizer.init(params)
        return AsyncState(server, start, (widen(params), opt_state))

    # At the start of a step: strategies chained behind this one have acted by then.
    def store_replica(
        grads: PyTree, replica: Replica, state: AsyncState, step: Any
    ) -> tuple[PyTree, AsyncState]:
        opt_state = () if optimizer is None else replica.opt_state
        old_values = widen(replica.params), opt_state
        require_inner(where, state.held, old_values)
        return grads, state._replace(held=old_values)

    def sync(
        replica: Replica, state: AsyncState, step: Any
    ) -> tuple[Replica, AsyncState]:
        clock = make_clock(collectives.size(axis))
        makes_step = clock.makes_step(step)[collectives.index(axis)]
        old_params, old_opt_state = state.held
        old_params = narrow(old_params, replica.params)
        params = select(makes_step, replica.params, old_params)
        if optimizer is not None:
            opt_state = select(makes_step, replica.opt_state, old_opt_state)
            replica = replica._replace(opt_state=opt_state)
        return strategy.sync(replica._replace(params=params), state, step)

    # It acts at every step to hold slower workers back; results land only on arrivals.
    resting = replace(introspection.combination(strategy), call=sync, is_steady=True)
    return strategy._replace(init=init, reduce=OwnGrads(store_replica), sync=resting)


def require_inner(where: str, old_values: PyTree, new_values: PyTree) -> None:
    """Requires that `optimizer=` of an algorithm is the inner optimizer.

    Args:
        where: the algorithm, for the message.
        old_values: what it keeps of a worker, made with its optimizer.
        new_values: the same of a replica.

    Raises:
        ValueError: the optimizers' states differ.
    """
    if jax.tree.structure(old_values) == jax.tree.structure(new_values):
        return
    if "MaskedNode" in str(jax.tree.structure(old_values)):
        raise ValueError(
            f"{where}: optimizer= keeps opt_state of all params while its worker "
            "rests, but `masked` gives it a part of them: leave optimizer= out"
        )
    raise ValueError(
        f"{where}: opt_state is of another optimizer than optimizer=: pass the same "
        "inner optimizer to both, with all that is around it"
    )


def _apply_updates(
    replica: Replica,
    state: AsyncState,
    is_arriving: jax.Array,
    push: Callable[[Any, PyTree, jax.Array], Any],
    read_model: Callable[[Any, jax.Array], PyTree],
    axis: Axis,
) -> tuple[Replica, AsyncState]:
    """The replica and the state after the updates of workers that end a round now."""
    own_index = collectives.index(axis)
    wide_params = widen(replica.params)
    own_update = jax.tree.map(jnp.subtract, state.start, wide_params)

    def apply_update(carry: Any, arrival: Any) -> tuple[Any, None]:
        server, params = carry
        worker, arrives, update = arrival
        server = select(arrives, push(server, update, worker), server)
        is_own = arrives & (worker == own_index)
        params = select(is_own, read_model(server, worker), params)
        return (server, params), None

    # One by one, as each update changes the server's model.
    updates = shards.gather_by_shard(own_update, axis)  # (workers, …)
    arrivals = jnp.arange(len(is_arriving)), is_arriving, updates
    carry, _ = lax.scan(apply_update, (state.server, wide_params), arrivals)
    server, wide_params = carry
    params = narrow(wide_params, replica.params)
    start = select(is_arriving[own_index], widen(params), state.start)
    return replica._replace(params=params), state._replace(server=server, start=start)
