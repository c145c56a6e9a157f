"""HALoS: Async DiLoCo in regions, with regional servers and one global server."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncalgos import checks, collectives
from syncalgos._anchors import outer_rates
from syncalgos._combinators import introspection
from syncalgos._combinators.introspection import Arrival
from syncalgos._dtypes import if_finite, narrow, select, widen
from syncalgos.algorithms._asynchrony import asynchronous, even_clocks
from syncalgos.algorithms.async_diloco import Nesterov, Server, init_server
from syncalgos.steps import Where
from syncalgos.strategy import WORKERS, Axis, PyTree, Strategy, factory


class Region(NamedTuple):
    """A region: its own server z, and its model s at its last exchange.

    `arrived` is the number of updates since that exchange, an int32 scalar.
    """

    server: Server
    merged: PyTree
    arrived: jax.Array


class Levels(NamedTuple):
    """The global server, and the regions."""

    top: Server
    regions: tuple[Region, ...]

    @property
    def params(self) -> PyTree:
        """The global model x."""
        return self.top.params

    def select_region(self, index: jax.Array) -> Region:
        """A region by its index."""
        chosen = self.regions[0]
        for i, region in enumerate(self.regions):
            chosen = select(index == i, region, chosen)
        return chosen


@factory
def halos(
    period: int = 16,
    regions: int = 2,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.4,
    global_lr: float = 0.5,
    global_momentum: float = 0.5,
    global_share: float = 0.25,
    updates: int = 4,
    slowest: float = 0.5,
    optimizer: optax.GradientTransformation | None = None,
    axis: Axis = WORKERS,
) -> Strategy:
    """HALoS: workers send to their region's server, and regions to a global server.

    A worker that has gone from y to θ in `period` of its local steps sends its update
    to its region's server z. After every K updates the region sends its own, since its
    model was s, to the global server x, and mixes. The worker restarts from z. With N a
    delayed Nesterov step for n workers in the region, and N' the same with η', β', m'
    and D', for n' regions that have workers:

        N(z, Δ): D ← D + Δ;   at every n-th update: m ← β m + D / n;   D ← 0
            z ← z - η β m;   at every update: z ← z - η Δ / n
        z ← N(z, y - θ)
        at every K-th update: x ← N'(x, s - z);   s, z ← (1 - α) z + α x
        y, θ ← z

    x, z and s start at the first params; all m and D start at 0.

    Args:
        period: H, a worker's local steps in a round, at least 1; 8 in the paper.
        regions: R, the number of regions, each of consecutive workers; at least 1.
        outer_lr: η, the learning rate of a region's server, above 0.
        outer_momentum: β, a region's Nesterov momentum, at least 0, below 1; paper:
            0.9.
        global_lr: η', the learning rate of the global server, above 0.
        global_momentum: β', the global server's Nesterov momentum, at least 0 and below
            1.
        global_share: α, how far a region goes to the global model, above 0 and at most
            1.
        updates: K, workers' updates between two updates of their region, at least 1.
        slowest: speed of the last worker, above 0 and at most 1; the first has speed 1,
            and speeds fall evenly in between.
        optimizer: the inner optimizer; if given, its state does not change while its
            worker rests. With None it keeps changing.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, each region's z and s, all m and D, at least float32,
        identical on all workers; each worker's own y, params and opt_state. At an
        arrival, each worker gathers all updates and acts as the servers would. The
        center is x. Buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    It runs on the clock of `async_diloco`, and drops updates that are not finite. A
    steady drift moves the center mean(speed) η η' / ((1 - β) (1 - β')) times as far as
    plain averaging: 0.875 times with the defaults. In the authors' simulator, a worker
    starts before the exchange has come back.

    Example:
        >>> import numpy as np
        >>> from syncalgos import communication, halos
        >>> sent = communication(halos(4), np.ones(9), workers=2, steps=16)
        >>> np.flatnonzero(np.diff(sent.per_step, prepend=0)) + 1
        array([ 4,  8, 12, 16])

    Source: Kim et al., "HALoS: hierarchical asynchronous local SGD over slow networks
    for geo-distributed large language model training", ICML 2025, algorithm 1.

    Family: Late arrivals.
    """
    make_clock = even_clocks("halos", period, slowest)
    regions = checks.whole("halos: regions", regions, least=1)
    region_rates = outer_rates("halos", outer_lr, outer_momentum)
    global_lr = checks.real("halos: global_lr", global_lr, above=0)
    global_momentum = checks.real(
        "halos: global_momentum", global_momentum, least=0, below=1
    )
    share = checks.share("halos: global_share", global_share)
    updates = checks.whole("halos: updates", updates, least=1)

    def find_region(worker: Any) -> Any:
        return worker * regions // collectives.size(axis)

    def init_levels(params: PyTree) -> Levels:
        region = Region(init_server(params), widen(params), jnp.int32(0))
        return Levels(init_server(params), (region,) * regions)

    def push(levels: Levels, update: PyTree, worker: jax.Array) -> Levels:
        workers = collectives.size(axis)
        worker_regions = find_region(np.arange(workers))  # (workers,)
        sizes = np.bincount(worker_regions, minlength=regions)  # (regions,)
        index = find_region(worker)
        if len({*sizes}) == 1:
            members = int(sizes[0])
        else:
            members = jnp.array(sizes, jnp.int32)[index]
        region = levels.select_region(index)
        server = Nesterov(*region_rates, members).step(region.server, update)
        is_exchange = region.arrived + 1 == updates
        move = jax.tree.map(jnp.subtract, region.merged, server.params)
        num_regions = int(np.sum(sizes > 0))
        new_top = Nesterov(global_lr, global_momentum, num_regions).step(
            levels.top, move
        )
        top = select(is_exchange, new_top, levels.top)
        mixed = jax.tree.map(
            lambda z, x: z + share * (x - z), server.params, top.params
        )
        server = server._replace(params=select(is_exchange, mixed, server.params))
        merged = select(is_exchange, mixed, region.merged)
        arrived = jnp.where(is_exchange, 0, region.arrived + 1)
        new_region = Region(server, merged, arrived)
        new_regions = tuple(
            select(index == i, new_region, old_region)
            for i, old_region in enumerate(levels.regions)
        )
        new_levels = narrow(Levels(top, new_regions), levels)
        return if_finite(update, new_levels, levels)

    def read_model(levels: Levels, worker: jax.Array) -> PyTree:
        return levels.select_region(find_region(worker)).server.params

    @Where
    def exchanges(step: Any) -> jax.Array:
        """Whether a region sends to the global server, unless updates were dropped."""
        workers = collectives.size(axis)
        clock = make_clock(workers)
        finished_steps = jnp.stack(
            [clock.finished_steps(step), clock.finished_steps(step + 1)]
        )
        rounds = finished_steps // jnp.array(clock.periods, jnp.int32)  # (2, workers)
        region_rounds = jnp.zeros((regions, 2), jnp.int32)
        region_rounds = region_rounds.at[find_region(np.arange(workers))].add(rounds.T)
        old_exchanges, new_exchanges = (region_rounds // updates).T
        return jnp.any(new_exchanges > old_exchanges)

    strategy = asynchronous(
        "halos", init_levels, push, make_clock, optimizer, axis, read_model
    )
    sync = replace(introspection.combination(strategy), arrives=(Arrival(exchanges),))
    return strategy._replace(sync=sync)
