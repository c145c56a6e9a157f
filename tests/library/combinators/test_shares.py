"""A worker of weight 2 counts like two workers, whatever it keeps for itself.

Three workers A, B and C of weights 2, 1 and 0 are held against A, A and B without
weights: what arrives at A and at B must be the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import relative_error
from support.problems.quadratics import ROUNDING, SGD, of_workers, train_all
from support.tiers import tiers

import syncalgos as sa
from syncalgos import reducers

pytestmark = pytest.mark.usefixtures("float64")

PART = {"body": True, "head": False}
CLIPPED = sa.reduce_with(optax.clip_by_global_norm(3.0))


def two_to_one(step, workers):
    return jnp.array([2.0, 1, 0])


def average_body(replica, state, step):
    body = sa.collectives.mean(replica.params["body"])
    return replica._replace(params=replica.params | {"body": body}), state


def reduce_body(grads, replica, state, step):
    return grads | {"body": sa.collectives.mean(grads["body"])}, state


def clip_params(replica, state, step):
    params = jax.tree.map(lambda x: jnp.clip(x, -0.2, 0.2), replica.params)
    return replica._replace(params=params), state


def average_in_a_loop(replica, state, step):
    def average_again(number, params):
        return sa.collectives.mean(params)

    params = jax.lax.fori_loop(0, 2, average_again, replica.params)
    return replica._replace(params=params), state


def average_by(reducer):
    return sa.every(sa.average("params", reducer), 4)


KEPT = {
    "mixed at once": sa.delayed(sa.model_averaging(4), 0, alpha=0.5),
    "mixed at once, delayed": sa.delayed(
        sa.delayed(sa.model_averaging(4), 0, alpha=0.5), 2
    ),
    "mixed at once, a part": sa.delayed(sa.masked(sa.diloco(4), PART), 0, alpha=0.25),
    "params of an own sync": sa.every(sa.Strategy(sync=average_body), 4),
    "params of an own jitted sync": sa.every(
        sa.Strategy(sync=jax.jit(average_body)), 4
    ),
    "params of an own loop": sa.every(sa.Strategy(sync=average_in_a_loop), 4),
    "grads of an own reduce": sa.Strategy(reduce=reduce_body),
    "local grads before a sync": sa.chain(CLIPPED, sa.model_averaging(4)),
    "local grads after a mean": sa.chain(sa.sync_sgd(), CLIPPED),
    "local params after a mean": sa.every(
        sa.chain(sa.average(), sa.Strategy(sync=clip_params)), 4
    ),
    "grads of a masked reducer": sa.reduce_with(optax.masked(reducers.mean(), PART)),
}
SENT = {
    "top_k": average_by(reducers.top_k(0.3)),
    "chunked_top_k": average_by(reducers.chunked_top_k(0.3)),
    "top_k in a chain": average_by(
        optax.chain(reducers.top_k(0.3, axis=sa.WORKERS), optax.scale(1.0))
    ),
    "sign": average_by(reducers.sign()),
    "bf16": average_by("bf16"),
    "low_bit": average_by(reducers.low_bit(8)),
    "random_k": average_by(reducers.random_k(0.5)),
    "power_sgd": average_by(reducers.power_sgd(1)),
    "error_feedback": average_by(reducers.error_feedback(reducers.top_k(0.3))),
    "outer error_feedback": sa.every(
        sa.outer_step(optax.sgd(0.7), reducers.error_feedback(reducers.top_k(0.3))), 4
    ),
    "reduced error_feedback": sa.reduce_with(
        reducers.error_feedback(reducers.top_k(0.3))
    ),
    "pulseloco": sa.pulseloco(4),
}
# Small steps, few of which show in bfloat16.
OPTIMIZERS = {"pulseloco": optax.sgd(1e-3)}
OF_EITHER = KEPT | SENT
DEFAULT = ["mixed at once", "params of an own sync", "local grads before a sync"]
DEFAULT += ["local params after a mean", "top_k", "pulseloco"]


def own_of(workers):
    """The data of these of three workers."""

    def pick(x):  # (1, workers, …)
        return x[:, np.array(workers)]

    return jax.tree.map(pick, of_workers(workers=3))


@pytest.mark.parametrize("name", tiers(OF_EITHER, DEFAULT))
def test_a_worker_of_weight_two_counts_like_two_workers(name):
    strategy = OF_EITHER[name]
    optimizer = OPTIMIZERS.get(name, SGD)
    weighted = sa.participating(strategy, two_to_one)
    found = train_all({name: (weighted, optimizer)}, own_of([0, 1, 2]))[name]
    expected = train_all({name: (strategy, optimizer)}, own_of([0, 0, 1]))[name]
    error = relative_error(found.replicas[:, :2], expected.replicas[:, 1:])
    assert error <= ROUNDING
