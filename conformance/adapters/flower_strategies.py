# pyright: reportMissingImports=false
"""Flower's server strategies, called as its server calls them.

Those of flwr.server get a round's results; those of flwr.serverapp get replies, here
without the network that Flower sends them through.
"""

import logging
from functools import partial

import flwr
import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common import (
    Code,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import strategy as strategies
from flwr.serverapp import strategy as new_strategies

from conformance.adapters.local_steps import (
    Settings,
    Vectors,
    follow_server,
    join_leaves,
    read_settings,
    split_leaves,
)
from conformance.adapters.rows import AgreementRow, Cause, Project

logging.getLogger("flwr").setLevel(logging.ERROR)


def to_parameters(vectors: Vectors, vector: np.ndarray):
    return ndarrays_to_parameters(list(split_leaves(vectors, vector).values()))


def serve(
    make_strategy,
    vectors: Vectors,
    first_round: int = 1,
    starts_v_at_tau2: bool = False,
):
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


class Reply:
    """A client's reply, with what a strategy reads of it."""

    def __init__(self, arrays):
        counts = MetricRecord({"num-examples": 10})
        self.content = RecordDict({"arrays": arrays, "metrics": counts})

    def has_content(self):
        return True

    def has_error(self):
        return False


def to_arrays(vectors: Vectors, vector: np.ndarray):
    leaves = split_leaves(vectors, vector)
    return ArrayRecord({name: Array(leaf) for name, leaf in leaves.items()})


def read_arrays(vectors: Vectors, arrays):
    return join_leaves(arrays[name].numpy() for name in vectors["leaves"])


def serve_replies(make_strategy, vectors: Vectors, starts_v_at_tau2: bool = False):
    """Runs a strategy of flwr.serverapp that `make_strategy` makes of settings."""
    settings = read_settings(vectors)
    strategy = make_strategy(settings)
    anchors = [np.array(vectors["start"])]
    if starts_v_at_tau2:
        v_start = np.full(len(vectors["start"]), settings["tau"] ** 2)
        strategy.v_t = split_leaves(vectors, v_start)

    def sync(params):
        # As configure_train does, which needs the network.
        strategy.current_arrays = split_leaves(vectors, anchors[-1])
        replies = [Reply(to_arrays(vectors, vector)) for vector in params]
        arrays, _ = strategy.aggregate_train(len(anchors), replies)
        anchors.append(read_arrays(vectors, arrays))
        return anchors[-1]

    return follow_server(vectors, sync)


def make_new_fedavg(settings: Settings):
    return new_strategies.FedAvg()


def make_new_adaptive(strategy, settings: Settings):
    options = {"eta": settings["outer_lr"], "tau": settings["tau"]}
    if strategy is new_strategies.FedAdagrad:
        return strategy(**options)
    return strategy(**options, beta_1=settings["b1"], beta_2=settings["b2"])


def make_fedavg(settings: Settings, start, **options):
    return strategies.FedAvg(initial_parameters=start, **options)


def make_fedavgm(settings: Settings, start):
    return strategies.FedAvgM(
        initial_parameters=start,
        server_learning_rate=settings["block_lr"],
        server_momentum=settings["block_momentum"],
    )


def make_adaptive(strategy, settings: Settings, start):
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
    reason="the correction for the start has exponent round + 1; nothing else differs"
)
V_FROM_0 = Cause(
    "departs from the paper",
    "v starts at 0; algorithm 2 of Reddi et al. requires at least τ²",
    "flower_adam.py",
)
FROM_TAU2 = "v_t set to τ² before the first round"
REPLIES = "replies without its network"


def rows_of_serverapp():
    """Yields the rows of the strategies that take replies."""
    yield AgreementRow(
        "serverapp FedAvg",
        "model_averaging",
        partial(serve_replies, make_new_fedavg),
        help=REPLIES,
    )
    for file, strategy, cause in (
        ("fedopt", new_strategies.FedAdam, EXPONENT),
        ("fedopt.yogi", new_strategies.FedYogi, V_FROM_0),
        ("fedopt.adagrad", new_strategies.FedAdagrad, V_FROM_0),
    ):
        name = f"serverapp {strategy.__name__}"
        run = partial(serve_replies, partial(make_new_adaptive, strategy))
        yield AgreementRow(name, file, run, help=REPLIES, cause=cause)
        if cause is V_FROM_0:
            yield AgreementRow(
                f"{name}, v from τ²",
                file,
                partial(run, starts_v_at_tau2=True),
                help=f"{REPLIES}; {FROM_TAU2}",
            )


PROJECT = Project(
    "Flower",
    flwr.__version__,
    [
        AgreementRow("FedAvg", "model_averaging", partial(serve, make_fedavg)),
        AgreementRow(
            "FedAvg(inplace=False)",
            "model_averaging",
            partial(serve, partial(make_fedavg, inplace=False)),
        ),
        AgreementRow("FedAvgM", "bmuf.plain", partial(serve, make_fedavgm)),
        AgreementRow("FedAdam", "fedopt", partial(serve, make_adam), cause=EXPONENT),
        AgreementRow(
            "FedAdam, v from τ²",
            "fedopt",
            partial(serve, make_adam, starts_v_at_tau2=True),
            help=FROM_TAU2,
            cause=EXPONENT_ALONE,
        ),
        AgreementRow(
            "FedAdam, v from τ², rounds from 10⁷",
            "fedopt",
            partial(serve, make_adam, first_round=10**7, starts_v_at_tau2=True),
            help=f"{FROM_TAU2}, and rounds so late that nothing is corrected",
        ),
        AgreementRow(
            "FedYogi", "fedopt.yogi", partial(serve, make_yogi), cause=V_FROM_0
        ),
        AgreementRow(
            "FedYogi, v from τ²",
            "fedopt.yogi",
            partial(serve, make_yogi, starts_v_at_tau2=True),
            help=FROM_TAU2,
        ),
        AgreementRow(
            "FedAdagrad", "fedopt.adagrad", partial(serve, make_adagrad), cause=V_FROM_0
        ),
        AgreementRow(
            "FedAdagrad, v from τ²",
            "fedopt.adagrad",
            partial(serve, make_adagrad, starts_v_at_tau2=True),
            help=FROM_TAU2,
        ),
        *rows_of_serverapp(),
    ],
)
