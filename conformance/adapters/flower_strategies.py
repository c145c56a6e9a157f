# pyright: reportMissingImports=false
"""Flower's server strategies, called as its server calls them."""

import logging
from functools import partial

import flwr
import numpy as np
from flwr.common import (
    Code,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import strategy as strategies

from conformance.adapters.local_steps import (
    follow_server,
    join_leaves,
    read_settings,
    split_leaves,
)
from conformance.adapters.rows import Cause, Project, Row

logging.getLogger("flwr").setLevel(logging.ERROR)


def to_parameters(vectors, vector):
    return ndarrays_to_parameters(list(split_leaves(vectors, vector).values()))


def serve(make_strategy, vectors, first_round=1, starts_v_at_tau2=False):
    """Runs a strategy that `make_strategy` makes of settings and first parameters."""
    start = to_parameters(vectors, np.array(vectors["start"]))
    strategy = make_strategy(read_settings(vectors), start)
    if starts_v_at_tau2:
        strategy.v_t = [
            np.full_like(leaf, strategy.tau**2) for leaf in strategy.current_weights
        ]
    rounds = iter(range(first_round, first_round + len(vectors["steps"])))

    def sync(params):
        results = [
            (None, FitRes(Status(Code.OK, ""), to_parameters(vectors, vector), 10, {}))
            for vector in params
        ]
        new_parameters, _ = strategy.aggregate_fit(next(rounds), results, [])
        return join_leaves(parameters_to_ndarrays(new_parameters))

    return follow_server(vectors, sync)


def make_fedavg(settings, start, **options):
    return strategies.FedAvg(initial_parameters=start, **options)


def make_fedavgm(settings, start):
    return strategies.FedAvgM(
        initial_parameters=start,
        server_learning_rate=settings["block_lr"],
        server_momentum=settings["block_momentum"],
    )


def make_adaptive(strategy, settings, start):
    options = {"eta": settings["outer_lr"], "tau": settings["tau"]}
    if strategy is strategies.FedAdagrad:
        return strategy(initial_parameters=start, **options)
    betas = {"beta_1": settings["b1"], "beta_2": settings["b2"]}
    return strategy(initial_parameters=start, **options, **betas)


make_adam = partial(make_adaptive, strategies.FedAdam)
make_yogi = partial(make_adaptive, strategies.FedYogi)
make_adagrad = partial(make_adaptive, strategies.FedAdagrad)

EXPONENT = Cause(
    "fault",
    "the correction for the start has exponent round + 1: the first step is 0.74 of "
    "Adam's for β₁ = 0.9 and β₂ = 0.99 (Kingma and Ba, algorithm 1, whose rate the "
    "code cites, begin at 1; algorithm 2 of Reddi et al. has no correction); v "
    "starts at 0",
    "flower_adam.py",
)
EXPONENT_ALONE = EXPONENT._replace(
    reason="the correction for the start alone, with exponent round + 1"
)
V_FROM_0 = Cause(
    "departs from the paper",
    "v starts at 0; algorithm 2 of Reddi et al. requires at least τ²",
    "flower_adam.py",
)
FROM_TAU2 = "v_t set to τ² before the first round"

PROJECT = Project(
    "Flower",
    flwr.__version__,
    [
        Row("FedAvg", "model_averaging", partial(serve, make_fedavg)),
        Row(
            "FedAvg(inplace=False)",
            "model_averaging",
            partial(serve, partial(make_fedavg, inplace=False)),
        ),
        Row("FedAvgM", "bmuf.plain", partial(serve, make_fedavgm)),
        Row("FedAdam", "fedopt", partial(serve, make_adam), cause=EXPONENT),
        Row(
            "FedAdam, v from τ²",
            "fedopt",
            partial(serve, make_adam, starts_v_at_tau2=True),
            help=FROM_TAU2,
            cause=EXPONENT_ALONE,
        ),
        Row(
            "FedAdam, v from τ², rounds from 10⁷",
            "fedopt",
            partial(serve, make_adam, first_round=10**7, starts_v_at_tau2=True),
            help=f"{FROM_TAU2}, and rounds so late that nothing is corrected",
        ),
        Row("FedYogi", "fedopt.yogi", partial(serve, make_yogi), cause=V_FROM_0),
        Row(
            "FedYogi, v from τ²",
            "fedopt.yogi",
            partial(serve, make_yogi, starts_v_at_tau2=True),
            help=FROM_TAU2,
        ),
        Row(
            "FedAdagrad", "fedopt.adagrad", partial(serve, make_adagrad), cause=V_FROM_0
        ),
        Row(
            "FedAdagrad, v from τ²",
            "fedopt.adagrad",
            partial(serve, make_adagrad, starts_v_at_tau2=True),
            help=FROM_TAU2,
        ),
    ],
)
