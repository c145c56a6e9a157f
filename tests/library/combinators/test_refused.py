"""Refusals of combinators and their words: when made, or with the first state."""

from collections import namedtuple

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


Own = namedtuple("Own", "arrays")
OWN = optax.GradientTransformation(
    Own, lambda grads, state, params=None: (grads, state)
)


def made(strategy):
    """Makes a strategy's first state."""
    return strategy.init(unflatten(START))


def alike(step, workers):
    return jnp.ones(workers)


def weighing(weights):
    """Trains workers of these weights."""
    train(sa.participating(AVERAGED, weights))


def synced(strategy):
    """Syncs a replica whose optimizer has momentum."""
    params = {"w": jnp.ones((3, 2))}
    strategy.sync(sa.Replica(params, MOMENTUM.init(params)), strategy.init(params), 0)


def moments_of(optimizer):
    """Looks for the second moments of an optimizer."""
    _optax_states.map_moments(2, lambda tree: tree, optimizer.init(jnp.ones(2)))


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
        lambda: made(sa.average("buffers", optax.trace(0.9))),
        "cannot average buffers: use one without state",
    ),
    *(
        (lambda late=late: made(sa.every(sa.average(reduce=late), 2)), "begin with 0")
        for late in (
            sa.reducers.late,
            sa.reducers.error_feedback(sa.reducers.late("int8")),
            optax.chain(sa.reducers.late(), optax.scale(1.0)),
            sa.reducers.ef21("int8"),
        )
    ),
    (
        lambda: synced(
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
            lambda mask=mask: synced(sa.masked(sa.reset(MOMENTUM), mask)),
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
        (lambda around=around, graph=graph: around(graph), "graph changes with each")
        for around in (
            lambda x: sa.when(x, lambda step: step % 3 == 0),
            lambda x: sa.every(x, lambda step: 2),
            lambda x: sa.every(sa.every(x, 2), 4),
            lambda x: sa.decided(x, alike),
        )
        for graph in (sa.gossip(), sa.gossip(topology=[np.eye(2), np.eye(2)[::-1]]))
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
        (lambda late=late: made(late), "no local step would be kept")
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
    (lambda: sa.participating(sa.bmuf, alike), "participating: expected a Strategy"),
    (lambda: sa.participating(AVERAGED, 0.5), "schedule must be a function, got 0.5"),
    (lambda: sa.participating(SLOW, alike), "participating: .* acts at every local"),
    (lambda: sa.participating(DECIDED, alike), "participating: .* they depend on"),
    (lambda: weighing(lambda *_: jnp.ones(3)), r"the 4 workers, got shape \(3,\)"),
    (
        lambda: weighing(lambda *_: np.r_[1, np.nan, 1, 1]),
        "finite and at least 0, got nan for worker 1 at local step 0",
    ),
    (
        lambda: weighing(lambda step, _: jnp.r_[1, 1, 1, 5 - step]),
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
        (lambda around=around: around(FEDAVG), words)
        for around, words in [
            (lambda x: sa.participating(x, alike), "already weights its workers"),
            (lambda x: sa.at_syncs(x, FEDAVG), "already weights its workers"),
            (lambda x: sa.decided(x, alike), "decided: the weights of `participating`"),
        ]
    ),
    (lambda: sa.paced(sa.chain(sa.ema(AVERAGED, 0.5)), [0, 9]), "ema around the whole"),
    *(
        (lambda around=around: sa.paced(around(PALSGD), [4, 2]), "paced: palsgd would")
        for around in (
            lambda x: x,
            lambda x: sa.ema(x, 0.5),
            lambda x: sa.at_syncs(x, RESET),
        )
    ),
    (lambda: train(sa.paced(AVERAGED, [1, 2])), "4 workers: give one for each worker"),
    # Masks and fragments.
    (lambda: sa.masked(sa.bmuf, True), r"masked: expected a Strategy.*bmuf\(\)"),
    (lambda: made(sa.masked(AVERAGED, 1)), "must hold booleans or slices, got 1"),
    (lambda: made(sa.masked(AVERAGED, {"body": "yes", "head": False})), "got 'yes'"),
    (lambda: made(sa.masked(AVERAGED, {"boddy": True, "head": False})), "masked"),
    (
        lambda: made(sa.masked(AVERAGED, {"body": True, "head": slice(0, 1)})),
        "mask of a leaf without axes must be",
    ),
    (
        lambda: sa.streaming_diloco(cut="rows"),
        r"unknown cut 'rows' \(one of: leaves, bytes, layers\)",
    ),
    *(
        (lambda cut=cut: made(sa.streaming_diloco(cut=cut)), words)
        for cut, words in [
            (lambda path, shape: 4, "a fragment must be below fragments = 4, got 4"),
            (lambda path, shape: True, "cut: a fragment must be a whole .* got True"),
            (lambda: 0, r"cut is called with \(path, shape\), but takes \(\)"),
        ]
    ),
    # Decisions, what follows a sync, and moving averages.
    (lambda: sa.decided(sa.average(), 3), "vote must be a function, got 3"),
    (lambda: sa.decided(sa.average, alike), r"a Strategy, .*call it: average\(\)"),
    (lambda: sa.decided(sa.sync_sgd(), alike), "replicas and not reduce gradients"),
    (lambda: sa.decided(sa.Strategy(), alike), "decided: strategy must sync"),
    (lambda: sa.decided(LATE, alike), "must not act at every step"),
    (lambda: sa.decided(sa.after(sa.bmuf(4), 4), alike), "must not act at every step"),
    (lambda: sa.decided(PALSGD, alike), "must not act at every"),
    (lambda: sa.decided(SLOW, alike), "decided: this strategy acts at every local"),
    *(
        (lambda strategy=strategy: sa.at_syncs(strategy, sa.reset(SGD)), words)
        for strategy, words in [
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
        (lambda settings=settings: train(sa.async_diloco(2, **settings)), words)
        for settings, words in [
            ({"early_momentum": 0.3}, r"must be at most 1 / 4, .* got 0.3"),
            ({"slowest": 1.5}, "slowest must be at most 1, got 1.5"),
            ({"optimizer": optax.sgd}, "optimizer must be an optax optimizer"),
        ]
    ),
    *(
        (lambda held=held: train(held, MOMENTUM), "another optimizer than optimizer=")
        for held in (
            sa.heloco(2, optimizer=SGD),
            sa.halos(2, optimizer=optax.apply_if_finite(MOMENTUM, 9)),
            sa.palsgd(2, learning_rate=0.1, optimizer=SGD),
        )
    ),
    *(
        (
            lambda held=held: train(sa.masked(held, {"body": True, "head": False})),
            "leave optimizer= out",
        )
        for held in (
            sa.async_diloco(2, optimizer=MOMENTUM),
            sa.palsgd(2, learning_rate=0.1, optimizer=MOMENTUM),
        )
    ),
    *(
        (lambda held=held: sa.every(held, 4), "when: this strategy acts at every local")
        for held in (
            SLOW,
            sa.chain(sa.average("buffers"), SLOW),
            sa.paced(SLOW, [4, 2]),
        )
    ),
    (lambda: moments_of(contrib.madgrad(0.1)), r"\(MadgradState\) has no moments"),
    (lambda: moments_of(optax.chain(MOMENTUM, OWN)), r"\(Own\) has no moments"),
    (lambda: moments_of(GALORE), r"\(GaLoreState\) has no mean over the workers"),
    *(
        (lambda held=held: train(held, optimizer=GALORE), r"GaLoreState\) has no mean")
        for held in (sa.at_syncs(AVERAGED, sa.average("opt_state")), MIXED)
    ),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_what_cannot_be_is_refused(call, words):
    with jax.enable_x64(True), pytest.raises(ValueError, match=words):
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
def test_what_is_no_mean_takes_no_weights(name):
    strategy = sa.participating(NO_MEANS[name], alike)
    with pytest.raises(ValueError, match="is not a mean over the workers"):
        sa.communication(strategy, unflatten(START), workers=4, steps=2)
