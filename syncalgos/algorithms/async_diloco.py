"""Asynchronous DiLoCo: workers of different speeds that do not wait for each other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from syncalgos import checks, collectives
from syncalgos._anchors import outer_rates
from syncalgos._dtypes import if_finite, narrow, weak, widen, zeros
from syncalgos.algorithms._asynchrony import asynchronous, even_clocks
from syncalgos.reducers._reducer import over_leaves
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, factory


@factory
def async_diloco(
    period: int = 16,
    outer_lr: float = 0.7,
    # A value that is stable with stale updates at this rate (docs/studies/atlas.md).
    # The paper's 0.9 makes small models oscillate.
    outer_momentum: float = 0.4,
    *,
    slowest: float = 0.5,
    dynamic_steps: bool = False,
    buffer: int | None = None,
    early_momentum: float = 0.0,
    optimizer: optax.GradientTransformation | None = None,
    axis: Axis = WORKERS,
) -> Strategy:
    """Asynchronous DiLoCo: each worker ends its round, and begins the next, by itself.

    A worker that has gone from y to θ in `period` of its local steps sends its update
    to a server. The server applies updates in order of arrival to its model x, by
    delayed Nesterov steps with m and D, 0 at first. The worker restarts from x:

        Δ ← y - θ;   D ← D + Δ
        at every B-th update: m ← β m + D / B;   D ← 0
            x ← x - η ((1 - c B + c) β m + Δ / B)
        at any other update: x ← x - η (c β m + Δ / B)
        y, θ ← x

    Args:
        period: H, a worker's local steps in a round, at least 1.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: β, the outer Nesterov momentum, at least 0 and below 1; 0.9 in
            the paper.
        slowest: speed of the last worker, above 0 and at most 1; the first has speed 1,
            and speeds fall evenly in between.
        dynamic_steps: whether a worker of speed s makes ⌊s H⌋ local steps a round, at
            least 1, instead of H.
        buffer: B, updates per momentum step, at least 1; None means one per worker.
        early_momentum: c, the share of the momentum applied at updates between momentum
            steps, at least 0 and at most 1 / B.
        optimizer: the inner optimizer; if given, its state does not change while its
            worker rests. With None it keeps changing.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, m and D, shaped like params, at least float32, identical
        on all workers; each worker's own y, params and opt_state. At an arrival, each
        worker gathers all updates and acts as the server would. The center is x.
        Buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    This simulates asynchrony on the clock of the fastest worker: slower workers skip
    some of its steps. A steady drift moves the center mean(speed) η / (1 - β) times as
    far as plain averaging without waiting. Simultaneous updates are applied in the
    order of the workers; updates that are not finite are dropped.

    Example:
        >>> import numpy as np
        >>> from syncalgos import async_diloco, communication
        >>> strategy = async_diloco(3, slowest=0.75)
        >>> sent = communication(strategy, np.ones(9), workers=2, steps=12)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 3,  4,  6,  8,  9, 12])

    Source: Liu et al., "Asynchronous local-SGD training for language modeling", 2024,
    algorithm 3, and DyLU (dynamic_steps).

    Family: Late arrivals.
    """
    make_clock = even_clocks("async_diloco", period, slowest, dynamic_steps)
    lr, momentum = outer_rates("async_diloco", outer_lr, outer_momentum)
    early = checks.real("async_diloco: early_momentum", early_momentum, least=0)
    if buffer is not None:
        buffer = checks.whole("async_diloco: buffer", buffer, least=1)

    def push(server: Server, update: PyTree, worker: jax.Array) -> Server:
        count = collectives.size(axis) if buffer is None else buffer
        if not checks.is_traced(early) and early * count > 1:
            raise ValueError(
                f"async_diloco: early_momentum must be at most 1 / {count}, for a "
                f"buffer of {count} updates, got {early:g}"
            )
        return Nesterov(lr, momentum, count, early).step(server, update)

    return asynchronous("async_diloco", init_server, push, make_clock, optimizer, axis)


class Server(NamedTuple):
    """The server of an algorithm with delayed Nesterov steps.

    Attributes:
        params: the model x.
        velocity: the momentum m.
        total: D, the sum of the updates since the momentum last changed.
        arrived: the number of these updates, an int32 scalar.
    """

    params: PyTree
    velocity: PyTree
    total: PyTree
    arrived: jax.Array


def init_server(params: PyTree) -> Server:
    """The server before any update, at least float32."""
    zero = zeros(params)
    return Server(widen(params), zero, zero, jnp.int32(0))


class Nesterov(NamedTuple):
    """Delayed Nesterov steps: η, β, B and c in the formulas of `async_diloco`.

    As in the paper and in HALoS's code: the published toy weighs updates by staleness,
    and lacks the immediate Δ / B.
    """

    lr: float
    momentum: float
    buffer: int | jax.Array
    early: float = 0.0

    def step(self, server: Server, update: PyTree) -> Server:
        """The server after an update Δ, which is dropped unless it is finite."""
        buffer = self.buffer
        early = self.early
        changes_momentum = (server.arrived + 1) % buffer == 0
        share = jnp.where(changes_momentum, 1 - early * buffer + early, early)
        divisor = buffer if isinstance(buffer, int) else weak("buffer", buffer)

        def step_leaf(
            x: jax.Array, m: jax.Array, d: jax.Array, u: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            d = d + u
            m = jnp.where(changes_momentum, self.momentum * m + d / divisor, m)
            x = x - self.lr * (share * self.momentum * m + u / divisor)
            return x, m, jnp.where(changes_momentum, 0, d)

        params, velocity, total = over_leaves(step_leaf, 3, *server[:3], update)
        arrived = (server.arrived + 1) % buffer
        new_server = Server(params, velocity, total, arrived)
        return if_finite(update, narrow(new_server, server), server)
