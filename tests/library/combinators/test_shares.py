"""A worker of weight 2 counts like two workers, whatever it keeps for itself.

Three workers A, B and C of weights 2, 1 and 0 are held against A, A and B without
weights: what arrives at A and at B must be the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import relative_error
from support.problems.quadratics import ROUNDING, SGD, make_worker_inputs, train_all
from support.tiers import tiers

import syncalgos as sa
from syncalgos import reducers

pytestmark = pytest.mark.usefixtures("float64")

PART = {"body": True, "head": False}
CLIPPED = sa.reduce_with(optax.clip_by_global_norm(3.0))


def weigh_two_to_one(step: jax.Array, workers: int) -> jax.Array:
    return jnp.array([2.0, 1, 0])


def average_body(
    replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[sa.Replica, Any]:
    body = sa.collectives.mean(replica.params["body"])
    return replica._replace(params=replica.params | {"body": body}), state


def reduce_body(
    grads: Any, replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[Any, Any]:
    return grads | {"body": sa.collectives.mean(grads["body"])}, state


def clip_params(
    replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[sa.Replica, Any]:
    params = jax.tree.map(lambda x: jnp.clip(x, -0.2, 0.2), replica.params)
    return replica._replace(params=params), state


def average_in_a_loop(
    replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[sa.Replica, Any]:
    def average_again(number: int, params: Any) -> Any:
        return sa.collectives.mean(params)

    params = jax.lax.fori_loop(0, 2, average_again, replica.params)
    return replica._replace(params=params), state


def make_average(reducer: Any) -> sa.Strategy:
    return sa.every(sa.average("params", reducer), 4)


LOCAL_VALUES = {
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
SENT_VALUES = {
    "top_k": make_average(reducers.top_k(0.3)),
    "chunked_top_k": make_average(reducers.chunked_top_k(0.3)),
    "top_k in a chain": make_average(
        optax.chain(reducers.top_k(0.3, axis=sa.WORKERS), optax.scale(1.0))
    ),
    "sign": make_average(reducers.sign()),
    "bf16": make_average("bf16"),
    "low_bit": make_average(reducers.low_bit(8)),
    "random_k": make_average(reducers.random_k(0.5)),
    "power_sgd": make_average(reducers.power_sgd(1)),
    "error_feedback": make_average(reducers.error_feedback(reducers.top_k(0.3))),
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
STRATEGIES = LOCAL_VALUES | SENT_VALUES
DEFAULT = ["mixed at once", "params of an own sync", "local grads before a sync"]
DEFAULT += ["local params after a mean", "top_k", "pulseloco"]


def select_workers(workers: list[int]) -> Any:
    """The data of these of three workers."""

    def pick(x: jax.Array) -> jax.Array:  # (1, workers, …)
        return x[:, np.array(workers)]

    return jax.tree.map(pick, make_worker_inputs(workers=3))


@pytest.mark.parametrize("name", tiers(STRATEGIES, DEFAULT))
def test_a_worker_of_weight_two_counts_like_two_workers(name):
    strategy = STRATEGIES[name]
    optimizer = OPTIMIZERS.get(name, SGD)
    weighted = sa.participating(strategy, weigh_two_to_one)
    weighted_run = train_all({name: (weighted, optimizer)}, select_workers([0, 1, 2]))[
        name
    ]
    repeated_run = train_all({name: (strategy, optimizer)}, select_workers([0, 0, 1]))[
        name
    ]
    error = relative_error(weighted_run.replicas[:, :2], repeated_run.replicas[:, 1:])
    assert error <= ROUNDING
