# pyright: reportMissingImports=false
"""fluke's FedDyn corrects its local steps in the wrong direction.

A client with one number, from 0, at SGD's rate 0.1 on the loss 2 x: each round is a
step of gradient 2, and the server stays at 0. By algorithm 1 of Acar et al. with
alpha = 1, the first round ends at -0.2; then the gradient that is subtracted is
0 - 1 (-0.2 - 0) = 0.2, so the second round ends at -0.1 (2 - 0.2) = -0.18.
"""

import torch
from fluke.algorithms.feddyn import FedDynClient
from fluke.config import OptimizerConfigurator


def make_model():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


client = FedDynClient(
    index=0,
    train_set=[(torch.tensor([[2.0]]), torch.zeros(1))],
    test_set=None,
    optimizer_cfg=OptimizerConfigurator({"name": "SGD", "lr": 0.1}),
    loss_fn=lambda output, target: output.sum(),
    local_epochs=1,
    alpha=1.0,
    clipping=0,
)
client.weight = 1.0
client.model = make_model()
client.prev_grads = torch.zeros(1)
for expected in (-0.2, -0.18):
    with torch.no_grad():
        client.model.weight.zero_()
    client.fit()
    print(round(client.model.weight.item(), 4), "algorithm 1:", expected)
