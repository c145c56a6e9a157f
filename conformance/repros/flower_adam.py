# pyright: reportMissingImports=false
"""Flower's adaptive strategies in their first round, one client that moved by 0.5.

FedAdam with eta = 1 and a tiny tau: Adam's first step is 1 whatever the move (Kingma
and Ba, algorithm 1); Flower's is 0.742, as it corrects by the exponents 2. FedYogi and
FedAdagrad begin at v = 0, algorithm 2 of Reddi et al. at tau² or more.
"""

from math import sqrt

import numpy as np
from flwr.common import (
    Code,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.strategy import FedAdagrad, FedAdam, FedYogi

MOVE = 0.5
TAU = 0.1


def take_round(strategy, **options):
    server = strategy(
        initial_parameters=ndarrays_to_parameters([np.zeros(1)]), eta=1.0, **options
    )
    parameters = ndarrays_to_parameters([np.array([MOVE])])
    result = FitRes(Status(Code.OK, ""), parameters, 1, {})
    new_parameters, _ = server.aggregate_fit(1, [(None, result)], [])
    return parameters_to_ndarrays(new_parameters)[0][0]


step = take_round(FedAdam, beta_1=0.9, beta_2=0.99, tau=1e-9)
print(f"FedAdam {step:.4f}, Adam 1")
step = take_round(FedYogi, beta_1=0.0, beta_2=0.99, tau=TAU)
expected = MOVE / (sqrt(TAU**2 + 0.01 * MOVE**2) + TAU)
print(f"FedYogi {step:.4f}, algorithm 2: {expected:.4f}")
step = take_round(FedAdagrad, tau=TAU)
expected = MOVE / (sqrt(TAU**2 + MOVE**2) + TAU)
print(f"FedAdagrad {step:.4f}, algorithm 2: {expected:.4f}")
