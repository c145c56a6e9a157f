# pyright: reportMissingImports=false
"""fluke's FedAVGM throws the first round away; its FedOpt starts at v = 0.

And FedOpt multiplies the mean move by its rate before the moments.

One number from 0, two clients that are at 1 and 3 after each round.
"""

from math import sqrt

import torch
from fluke.algorithms.fedavgm import FedAVGMServer
from fluke.algorithms.fedopt import FedOptServer


def make_model(value):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def take_round(server):
    server.aggregate([None, None], [make_model(1.0), make_model(3.0)])
    return round(server.model.weight.item(), 4)


server = FedAVGMServer(make_model(0.0), None, [None, None], weighted=False)
print("FedAVGM", take_round(server), "Hsu et al.: 2.0")
server = FedOptServer(
    make_model(0.0), None, [None, None], "adam", 1.0, 0.0, 0.99, 0.1, weighted=False
)
expected = 2 / (sqrt(0.99 * 0.1**2 + 0.01 * 2**2) + 0.1)
print("FedOpt at rate 1", take_round(server), "algorithm 2:", round(expected, 4))
server = FedOptServer(
    make_model(0.0), None, [None, None], "adam", 0.5, 0.0, 0.99, 0.1, weighted=False
)
server.v_t["weight"].fill_(0.1**2)
step = take_round(server)
print("at rate 0.5, v from tau²", step, "algorithm 2:", round(0.5 * expected, 4))
