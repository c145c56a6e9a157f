"""Refusals of combinators and their words: when made, or with the first state."""

import itertools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from support.problems.quadratics import START, train, unflatten

import syncalgos as sa
from syncalgos import _optax_states

AVERAGED = sa.model_averaging(4)
DECIDED = sa.dynamic_averaging(1)
LATE = sa.delayed(AVERAGED, 2)
MULTI = optax.MultiSteps(optax.sgd(0.1), 2)
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, momentum=0.5)
FEDAVG = sa.fedavg(4, fraction=0.5)
RESET = sa.reset(SGD)
GALORE = contrib.galore(0.1, rank=1)
MIXED = sa.gossip(mix_opt_state=True)
PALSGD = sa.palsgd(4, learning_rate=0.1)
SLOW = sa.async_diloco(4, slowest=0.5)


UserState = namedtuple("UserState", "arrays")
USER_OPTIMIZER = optax.GradientTransformation(
    UserState, lambda grads, state, params=None: (grads, state)
)


def make_state(strategy: sa.Strategy) -> Any:
    """Makes a strategy's first state."""
    return strategy.init(unflatten(START))


def weigh_alike(step: jax.Array, workers: int) -> jax.Array:
    return jnp.ones(workers)


def train_weighted(weights: Callable) -> None:
    """Trains workers of these weights."""
    train(sa.participating(AVERAGED, weights))


def sync_once(strategy: sa.Strategy) -> None:
    """Syncs a replica whose optimizer has momentum."""
    params = {"w": jnp.ones((3, 2))}
    strategy.sync(sa.Replica(params, MOMENTUM.init(params)), strategy.init(params), 0)


def find_second_moments(optimizer: Any) -> None:
    """Looks for the second moments of an optimizer."""
    _optax_states.map_moments(2, lambda tree: tree, optimizer.init(jnp.ones(2)))


# Clocks that may skip turns of a graph that changes with each.
IRREGULAR_CLOCKS = (
    lambda strategy: sa.when(strategy, lambda step: step % 3 == 0),
    lambda strategy: sa.every(strategy, lambda step: 2),
    lambda strategy: sa.every(sa.every(strategy, 2), 4),
    lambda strategy: sa.decided(strategy, weigh_alike),
)
CHANGING_GRAPHS = sa.gossip(), sa.gossip(topology=[np.eye(2), np.eye(2)[::-1]])

# A call, and a pattern in its refusal.
CALLS = [
    (lambda: sa.chain(sa.bmuf), r"chain: expected a Strategy, .*bmuf\(\)"),
    (lambda: sa.chain(sa.average(), 3), "chain: expected a Strategy, got 3"),
    (
        lambda: sa.chain(sa.gossip(), sa.every(sa.paced(AVERAGED, [1, 2]), 2)),
        "chain: put paced first, or around the whole chain",
    ),
    (lambda: sa.average("parms"), "field of Replica 'parms'; did you mean 'params'"),
    (lambda: sa.average(reduce=3), "average: expected an optax GradientTransformation"),
    (
        lambda: make_state(sa.average("buffers", optax.trace(0.9))),
        "cannot average buffers: use one without state",
    ),
    *(
        (
            lambda late=late: make_state(sa.every(sa.average(reduce=late), 2)),
            "begin with 0",
        )
        for late in (
            sa.reducers.late,
            sa.reducers.error_feedback(sa.reducers.late("int8")),
            optax.chain(sa.reducers.late(), optax.scale(1.0)),
            sa.reducers.ef21("int8"),
        )
    ),
    (
        lambda: sync_once(
            sa.outer_step(
                optax.sgd(1.0), optax.chain(sa.reducers.late(), optax.scale(1.0))
            )
        ),
        r"late: .* put late around it, as late\(optax.chain",
    ),
    (lambda: sa.outer_step(optax.sgd), r"outer_step: outer must.*call it: sgd"),
    (lambda: sa.outer_step(0.7), "must be an optax optimizer, got 0.7"),
    (lambda: sa.reset(3), "reset: optimizer must be an optax optimizer, got 3"),
    (lambda: sa.reset(MULTI), r"pass its \.gradient_transformation\(\)"),
    *(
        (
            lambda mask=mask: sync_once(sa.masked(sa.reset(MOMENTUM), mask)),
            "outside masked",
        )
        for mask in ({"w": False}, {"w": slice(0, 2)})
    ),
    (lambda: sa.reduce_with(abs), "with a keyword axis, got .*optax.stateless"),
    # Periods and phases.
    (lambda: sa.when(sa.average(), 3), "active must be a function, got 3"),
    (lambda: sa.every(3, 3), "every: expected a Strategy, got 3"),
    (lambda: sa.every(AVERAGED, 0), "period must be .* at least 1, got 0"),
    (lambda: sa.every(AVERAGED, 2**40), r"period must be below 2\*\*31"),
    (lambda: sa.every(AVERAGED, 5, offset=5), "offset must be below the period of 5"),
    (lambda: sa.every(AVERAGED, 5, offset=-1), "every: offset must be .* at least 0"),
    (lambda: sa.every(AVERAGED, lambda s: 5, offset=1), "offset must be 0 with"),
    (lambda: sa.after(AVERAGED, "x"), "after: steps must be .* at least 0, got 'x'"),
    (
        lambda: sync_once(sa.when(AVERAGED, lambda step: jnp.array([True, False]))),
        r"a condition of local steps must return a boolean .* shape \(2,\)",
    ),
    (
        lambda: sync_once(sa.every(AVERAGED, lambda step: jnp.array([2, 2]))),
        r"a schedule of periods must return a number .* shape \(2,\)",
    ),
    (
        lambda: sync_once(sa.decided(AVERAGED, lambda *_: jnp.array([True, False]))),
        "decided: vote must return a boolean, .* as by jnp.any",
    ),
    # Clocks inside clocks.
    (
        lambda: sa.every(sa.streaming_diloco(4, fragments=2), 4),
        "every 4 steps, but never at the end of a period of 4",
    ),
    (
        lambda: sa.every(sa.at_end(sa.bmuf(4), 24), 4, offset=1),
        "every 4 steps, but never at the end of a period of 4",
    ),
    *(
        (lambda wrap=wrap, graph=graph: wrap(graph), "graph changes with each")
        for wrap, graph in itertools.product(IRREGULAR_CLOCKS, CHANGING_GRAPHS)
    ),
    (
        lambda: sa.every(sa.qg_dsgdm(topology="exponential", learning_rate=0.1), 2),
        "graph changes with each",
    ),
    (lambda: sa.every(sa.gasloc(topology=[np.eye(2)] * 2), 32), "graph changes with"),
    (lambda: sa.at_end(sa.every, 20), "at_end: expected a Strategy"),
    (lambda: sa.at_end(sa.scaffold(8, learning_rate=0.1), 20), "rounds are not"),
    (lambda: sa.at_end(sa.when(AVERAGED, lambda s: s == 7), 20), "rounds are not"),
    (lambda: sa.at_end(LATE, 20), "for its delay of 2"),
    (lambda: sa.at_end(DECIDED, 20), "they depend on the workers' data"),
    (lambda: sa.at_end(SLOW, 20), "acts at every local step, as async_diloco"),
    # Delays.
    (lambda: sa.delayed(sa.bmuf, 1), r"delayed: expected a Strategy.*bmuf\(\)"),
    (lambda: sa.delayed(AVERAGED, -1), "delayed: delay must be .* at least 0, got -1"),
    (lambda: sa.delayed(AVERAGED, 1, alpha=-0.1), "alpha must be .* at least 0"),
    (lambda: sa.delayed(AVERAGED, 0, alpha=2.0), "alpha must be at most 1, got 2.0"),
    (lambda: sa.delayed(AVERAGED, 1, arrival="ad"), "unknown arrival of delayed 'ad'"),
    (lambda: sa.delayed(LATE, 2), "delayed already: add up the"),
    (lambda: sa.delayed(sa.streaming_diloco(delay=1), 2), "delayed already"),
    (lambda: sa.until(LATE, 8), "a delay of 2, params sent just before local step 8"),
    (lambda: sa.delayed(sa.until(AVERAGED, 5), 2), "would arrive only after that step"),
    (lambda: sa.delayed(SLOW, 1), "delayed: this strategy acts at every local"),
    (lambda: sa.delayed(DECIDED, 2), "they depend on the workers' data"),
    # A steady drift would end where it started.
    *(
        (lambda late=late: make_state(late), "no local step would be kept")
        for late in (
            sa.delayed(sa.diloco(4), 8, alpha=0.5),
            sa.delayed(sa.every(sa.average(), lambda step: 4), 6),
            sa.delayed(sa.chain(sa.model_averaging(8), sa.average()), 1),
        )
    ),
    # Weights and speeds.
    (lambda: sa.sampled(0), "sampled: fraction must be .* above 0, got 0"),
    (lambda: sa.sampled(1.5), "sampled: fraction must be at most 1, got 1.5"),
    (lambda: sa.sampled(0.5, least=0), "sampled: least must be .* at least 1, got 0"),
    (
        lambda: sa.participating(sa.bmuf, weigh_alike),
        "participating: expected a Strategy",
    ),
    (lambda: sa.participating(AVERAGED, 0.5), "schedule must be a function, got 0.5"),
    (
        lambda: sa.participating(SLOW, weigh_alike),
        "participating: .* acts at every local",
    ),
    (
        lambda: sa.participating(DECIDED, weigh_alike),
        "participating: .* they depend on",
    ),
    (
        lambda: train_weighted(lambda *_: jnp.ones(3)),
        r"the 4 workers, got shape \(3,\)",
    ),
    (
        lambda: train_weighted(lambda *_: np.r_[1, np.nan, 1, 1]),
        "finite and at least 0, got nan for worker 1 at local step 0",
    ),
    (
        lambda: train_weighted(lambda step, _: jnp.r_[1, 1, 1, 5 - step]),
        "finite and at least 0, got -1.0 for worker 3 at local step 6",
    ),
    (lambda: sa.paced(sa.bmuf, [1]), "paced: expected a Strategy"),
    (lambda: sa.paced(AVERAGED, [1, 0.5]), "each of local_steps must be a whole"),
    (lambda: sa.paced(AVERAGED, 4), "local_steps must be a list of numbers, got 4"),
    (lambda: sa.paced(sa.sync_sgd(), [1, 2, 3, 4]), "paced.* pace one that does"),
    *(
        (lambda strategy=strategy: sa.paced(strategy, [0, 9]), "paced: .* send theirs")
        for strategy in (sa.gpa(), sa.post_local_sgd(), sa.gradient_tracking())
    ),
    *(
        (lambda wrap=wrap: wrap(FEDAVG), pattern)
        for wrap, pattern in [
            (lambda x: sa.participating(x, weigh_alike), "already weights its workers"),
            (lambda x: sa.at_syncs(x, FEDAVG), "already weights its workers"),
            (
                lambda x: sa.decided(x, weigh_alike),
                "decided: the weights of `participating`",
            ),
        ]
    ),
    (lambda: sa.paced(sa.chain(sa.ema(AVERAGED, 0.5)), [0, 9]), "ema around the whole"),
    *(
        (lambda wrap=wrap: sa.paced(wrap(PALSGD), [4, 2]), "paced: palsgd would")
        for wrap in (
            lambda x: x,
            lambda x: sa.ema(x, 0.5),
            lambda x: sa.at_syncs(x, RESET),
        )
    ),
    (lambda: train(sa.paced(AVERAGED, [1, 2])), "4 workers: give one for each worker"),
    # Masks and fragments.
    (lambda: sa.masked(sa.bmuf, True), r"masked: expected a Strategy.*bmuf\(\)"),
    (lambda: make_state(sa.masked(AVERAGED, 1)), "must hold booleans or slices, got 1"),
    (
        lambda: make_state(sa.masked(AVERAGED, {"body": "yes", "head": False})),
        "got 'yes'",
    ),
    (lambda: make_state(sa.masked(AVERAGED, {"boddy": True, "head": False})), "masked"),
    (
        lambda: make_state(sa.masked(AVERAGED, {"body": True, "head": slice(0, 1)})),
        "mask of a leaf without axes must be",
    ),
    (
        lambda: sa.streaming_diloco(cut="rows"),
        r"unknown cut 'rows' \(one of: leaves, bytes, layers\)",
    ),
    *(
        (lambda cut=cut: make_state(sa.streaming_diloco(cut=cut)), pattern)
        for cut, pattern in [
            (lambda path, shape: 4, "a fragment must be below fragments = 4, got 4"),
            (lambda path, shape: True, "cut: a fragment must be a whole .* got True"),
            (lambda: 0, r"cut is called with \(path, shape\), but takes \(\)"),
        ]
    ),
    # Decisions, what follows a sync, and moving averages.
    (lambda: sa.decided(sa.average(), 3), "vote must be a function, got 3"),
    (
        lambda: sa.decided(sa.average, weigh_alike),
        r"a Strategy, .*call it: average\(\)",
    ),
    (
        lambda: sa.decided(sa.sync_sgd(), weigh_alike),
        "replicas and not reduce gradients",
    ),
    (lambda: sa.decided(sa.Strategy(), weigh_alike), "decided: strategy must sync"),
    (lambda: sa.decided(LATE, weigh_alike), "must not act at every step"),
    (
        lambda: sa.decided(sa.after(sa.bmuf(4), 4), weigh_alike),
        "must not act at every step",
    ),
    (lambda: sa.decided(PALSGD, weigh_alike), "must not act at every"),
    (
        lambda: sa.decided(SLOW, weigh_alike),
        "decided: this strategy acts at every local",
    ),
    *(
        (lambda strategy=strategy: sa.at_syncs(strategy, sa.reset(SGD)), pattern)
        for strategy, pattern in [
            (sa.bmuf, "at_syncs: expected a Strategy"),
            (sa.sync_sgd(), "never syncs"),
            (sa.until(sa.masked(sa.sync_sgd(), True), 4), "never syncs"),
            (sa.delayed(sa.sync_sgd(), 2), "never syncs"),
        ]
    ),
    (lambda: sa.at_syncs(AVERAGED, sa.reset), "at_syncs: expected a Strategy"),
    (lambda: sa.ema(sa.bmuf, 0.9), "ema: expected a Strategy.*call it: bmuf"),
    *(
        (lambda decay=decay: sa.ema(AVERAGED, decay), f"ema: decay must be .*{decay}")
        for decay in (1, -0.1, float("nan"))
    ),
    # Workers that do not wait.
    *(
        (lambda settings=settings: train(sa.async_diloco(2, **settings)), pattern)
        for settings, pattern in [
            ({"early_momentum": 0.3}, r"must be at most 1 / 4, .* got 0.3"),
            ({"slowest": 1.5}, "slowest must be at most 1, got 1.5"),
            ({"optimizer": optax.sgd}, "optimizer must be an optax optimizer"),
        ]
    ),
    *(
        (
            lambda strategy=strategy: train(strategy, MOMENTUM),
            "another optimizer than optimizer=",
        )
        for strategy in (
            sa.heloco(2, optimizer=SGD),
            sa.halos(2, optimizer=optax.apply_if_finite(MOMENTUM, 9)),
            sa.palsgd(2, learning_rate=0.1, optimizer=SGD),
        )
    ),
    *(
        (
            lambda strategy=strategy: train(
                sa.masked(strategy, {"body": True, "head": False})
            ),
            "leave optimizer= out",
        )
        for strategy in (
            sa.async_diloco(2, optimizer=MOMENTUM),
            sa.palsgd(2, learning_rate=0.1, optimizer=MOMENTUM),
        )
    ),
    *(
        (
            lambda strategy=strategy: sa.every(strategy, 4),
            "when: this strategy acts at every local",
        )
        for strategy in (
            SLOW,
            sa.chain(sa.average("buffers"), SLOW),
            sa.paced(SLOW, [4, 2]),
        )
    ),
    (
        lambda: find_second_moments(contrib.madgrad(0.1)),
        r"\(MadgradState\) has no moments",
    ),
    (
        lambda: find_second_moments(optax.chain(MOMENTUM, USER_OPTIMIZER)),
        r"\(UserState\) has no moments",
    ),
    (
        lambda: find_second_moments(GALORE),
        r"\(GaLoreState\) has no mean over the workers",
    ),
    *(
        (
            lambda strategy=strategy: train(strategy, optimizer=GALORE),
            r"GaLoreState\) has no mean",
        )
        for strategy in (sa.at_syncs(AVERAGED, sa.average("opt_state")), MIXED)
    ),
]


@pytest.mark.parametrize(
    ("call", "pattern"), CALLS, ids=[pattern for _, pattern in CALLS]
)
def test_a_combination_that_makes_no_sense_is_refused(call, pattern):
    with jax.enable_x64(True), pytest.raises(ValueError, match=pattern):
        call()


NO_MEANS = {
    "median": sa.reduce_with("median"),
    "trimmed": sa.average(reduce="trimmed"),
    "clipped": sa.outer_step(optax.sgd(1.0), "clipped"),
    "votes": sa.sign_sgd(majority=True),
    "mean signs": sa.distributed_lion(majority=False),
    "choco_sgd": sa.chain(sa.choco_sgd()),
    "eager_diloco": sa.delayed(sa.eager_diloco(2), 1),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_strategy_that_takes_no_mean_is_given_no_weights(name):
    strategy = sa.participating(NO_MEANS[name], weigh_alike)
    with pytest.raises(ValueError, match="is not a mean over the workers"):
        sa.communication(strategy, unflatten(START), workers=4, steps=2)
