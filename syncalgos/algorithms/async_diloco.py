"""Asynchronous DiLoCo: workers of different speeds that do not wait for each other."""

import optax

from syncalgos import checks, collectives
from syncalgos.collectives import WORKERS, Axis
from syncalgos.combinators.asynchrony import (
    asynchronous,
    delayed_nesterov,
    even_speeds,
    new_server,
)
from syncalgos.reducers.reducer import check_optimizer
from syncalgos.strategy import Strategy


def async_diloco(
    period: int = 16,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    slowest: float = 0.5,
    dynamic_steps: bool = False,
    buffer: int | None = None,
    early_momentum: float = 0.0,
    optimizer: optax.GradientTransformation | None = None,
    axis: Axis = WORKERS,
) -> Strategy:
    """Asynchronous DiLoCo: each worker's round ends, and begins anew, by itself.

    After `period` local steps of its own, worker i has gone from y to θ. The server's
    model x moves by its update alone, in order of arrival, and i starts from there:

        Δ ← y - θ;   x ← delayed Nesterov step (x, Δ);   y, θ ← x

    Args:
        period: H, own local steps of a worker in a round, at least 1.
        outer_lr: η, the outer learning rate, above 0.
        outer_momentum: β, the outer Nesterov momentum, at least 0 and below 1.
        slowest: the slowest worker's speed, above 0; the fastest's is 1. Others lie
            evenly between, the first worker being the fastest.
        dynamic_steps: a worker of speed s takes s H steps in a round, rounded down, at
            least 1.
        buffer: B, updates between two steps of the momentum, at least 1; None means as
            many as workers.
        early_momentum: c, the part of the momentum that takes effect at each other
            update, at least 0 and at most 1 / B.
        optimizer: the inner one: its state rests as its worker does; None: it goes on.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        A Strategy. State: x, its momentum and buffer, shaped like params, at least
        float32, equal on all workers; own y and params, and opt_state. Where workers
        arrive all gather the updates of all: a simulation of a server, to which each
        would send its own. The center is x. Buffers stay local.

    Raises:
        ValueError: a parameter outside its range.

    A simulation: the clock is the fastest worker's local step, others make theirs at
    some. A steady drift goes mean(speed) η / (1 - β) times as far as plain averaging
    takes it without waiting. Workers that arrive together do so in their order.

    Source: Liu et al., "Asynchronous local-SGD training for language modeling", 2024,
    algorithm 3, and DyLU (dynamic_steps).
    """
    period = checks.whole("async_diloco: period", period, least=1)
    lr = checks.real("async_diloco: outer_lr", outer_lr, above=0)
    label = "async_diloco: outer_momentum"
    momentum = checks.real(label, outer_momentum, least=0, below=1)
    slowest = checks.share("async_diloco: slowest", slowest)
    early = checks.real("async_diloco: early_momentum", early_momentum, least=0)
    if buffer is not None:
        buffer = checks.whole("async_diloco: buffer", buffer, least=1)
    if optimizer is not None:
        check_optimizer("async_diloco: optimizer", optimizer)

    def clock_of(workers):
        return even_speeds(workers, slowest, period, dynamic_steps)

    def buffered():
        count = collectives.size(axis) if buffer is None else buffer
        if early * count > 1:
            raise ValueError(
                f"async_diloco: early_momentum must be at most 1 / {count}, with so "
                f"many updates in a buffer, got {early:g}"
            )
        return count

    def push(server, update):
        return delayed_nesterov(server, update, lr, momentum, buffered(), early)

    return asynchronous(new_server, push, clock_of, optimizer, axis)
