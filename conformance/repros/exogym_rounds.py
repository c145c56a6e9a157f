# pyright: reportMissingImports=false
"""EXO Gym's strategies on one number, in one process that is alone in its group.

    PYTHONPATH=CHECKOUT python conformance/repros/exogym_rounds.py

Its own functions for collectives are replaced by none, as one worker's mean is its own.
"""

import torch
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, diloco
from exogym.strategy import federated_averaging as fedavg

SGD = OptimSpec(torch.optim.SGD, lr=1.0)
for module in (diloco, fedavg):
    for name in ("all_reduce", "broadcast"):
        if hasattr(module, name):
            setattr(module, name, lambda *args, **options: None)


def make(strategy, first_count=0):
    """Returns a model of one 0, of rank 0 of two, whose partner agrees with it."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    strategy._init_node(model, 0, 2)
    strategy.local_step = first_count
    return model


def take_steps(strategy, model, count):
    for _ in range(count):
        model.weight.grad = -torch.ones(1, 1)
        strategy.step()


syncs = []
strategy = FedAvgStrategy(optim_spec=SGD, H=4)
model = make(strategy)
strategy.communication_modules[0].communicate = lambda *args: syncs.append(1)
lengths = []
since = 0
for _ in range(13):
    take_steps(strategy, model, 1)
    since += 1
    if syncs:
        lengths.append(since)
        since = 0
        syncs.clear()
print("rounds of FedAvgStrategy(H=4):", lengths, "H: [4, 4, 4]")

strategy = DiLoCoStrategy(SGD, OptimSpec(torch.optim.SGD, lr=1.0), H=2)
model = make(strategy, first_count=1)
diloco.DiLoCoCommunicator._set_master_grad = lambda self, model: [
    setattr(param, "grad", torch.zeros_like(param))
    for param in self.master_model.parameters()
]
take_steps(strategy, model, 2)
master = strategy.communication_modules[0].master_model
print("the master model after a sync:", master.weight.item())
take_steps(strategy, model, 1)
print("and after a local step of worker 0:", master.weight.item())

strategy = FedAvgStrategy(inner_optim=SGD, H=4)
make(strategy)
print("FedAvgStrategy(inner_optim=SGD) trains with", type(strategy.optim).__name__)
