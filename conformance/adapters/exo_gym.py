# pyright: reportMissingImports=false
"""EXO Gym's strategies, without its Trainer."""

from types import SimpleNamespace

import numpy as np
import torch

from conformance.adapters.local_steps import (
    Vectors,
    find_rate,
    read_settings,
    split_leaves,
)
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Cause, Project, add_checkout
from conformance.adapters.torch_models import (
    HeavyBall,
    TorchModel,
    follow_gradients,
)

COMMIT = add_checkout("gym")

from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec  # noqa: E402
from exogym.strategy import diloco as diloco_module  # noqa: E402
from exogym.strategy.demo import DeMoStrategy  # noqa: E402
from exogym.strategy.sparta import SPARTAStrategy  # noqa: E402
from exogym.strategy.strategy import SimpleReduceStrategy  # noqa: E402


def make_spec(vectors: Vectors):
    momentum = vectors["inner_optimizer"]["momentum"]
    return OptimSpec(torch.optim.SGD, lr=find_rate(vectors, 0), momentum=momentum)


def train(strategy, model, worker: int, vectors: Vectors, first_count: int = 0):
    """Takes each step; `first_count` is where the strategy's count of steps begins."""
    strategy._init_node(model, worker, vectors["workers"])
    strategy.local_step = first_count
    return follow_gradients(model, vectors, worker, strategy.step)


def all_reduce(worker: int, vectors: Vectors):
    strategy = SimpleReduceStrategy(optim_spec=make_spec(vectors))
    return train(strategy, TorchModel(vectors), worker, vectors)


def fedavg(worker: int, vectors: Vectors, argument: str, first_count: int):
    period = read_settings(vectors)["period"]
    strategy = FedAvgStrategy(**{argument: make_spec(vectors)}, H=period)
    return train(strategy, TorchModel(vectors), worker, vectors, first_count)


def diloco(
    worker: int, vectors: Vectors, first_count: int, copies_params: bool = False
):
    settings = read_settings(vectors)
    outer = OptimSpec(
        torch.optim.SGD,
        lr=settings["outer_lr"],
        momentum=settings["outer_momentum"],
        nesterov=True,
    )
    if copies_params:
        diloco_module.DiLoCoCommunicator._synchronize_master_model = copy_master
    strategy = DiLoCoStrategy(make_spec(vectors), outer, H=settings["period"])
    return train(strategy, TorchModel(vectors), worker, vectors, first_count)


def copy_master(communicator, model):
    """Sets a worker's params to copies of the master's."""
    state = communicator.master_model.state_dict()
    for name, param in model.named_parameters():
        param.data = state[name].data.to(param.device).clone()


class ChosenEntries:
    """A selector of the entries with a file's largest draws."""

    def __init__(self, model, vectors: Vectors):
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.vectors = vectors
        self.draws = {tuple(x["at"]): np.ravel(x["draw"]) for x in vectors["drawn"]}
        self.density = read_settings(vectors)["density"]

    def get_indices(self, param, iteration):
        leaves = split_leaves(self.vectors, self.draws[(iteration,)])
        draws = leaves[self.names[id(param)]]
        count = int(np.ceil(self.density * draws.size))
        threshold = np.sort(draws, axis=None)[-count]
        return torch.tensor(draws >= threshold)


def sparta(worker: int, vectors: Vectors):
    density = read_settings(vectors)["density"]
    strategy = SPARTAStrategy(optim_spec=make_spec(vectors), p_sparta=density)
    model = TorchModel(vectors)
    for communicator in strategy.communication_modules:
        communicator.index_selector = ChosenEntries(model, vectors)
    return train(strategy, model, worker, vectors)


def demo(worker: int, vectors: Vectors):
    settings = read_settings(vectors)
    strategy = DeMoStrategy(
        compression_decay=settings["decay"],
        compression_topk=settings["top_k"],
        compression_chunk=settings["chunk"],
    )
    rate = settings["learning_rate"]
    strategy.strategy_config = SimpleNamespace(optimizer_kwargs={"lr": rate})
    model = TorchModel(vectors, least_axes=1)
    strategy._init_node(model, worker, vectors["workers"])
    heavy_ball = HeavyBall(model.parameters(), vectors, rate)
    return follow_gradients(
        model, vectors, worker, lambda: heavy_ball.step(strategy.step)
    )


LONG_ROUND = Cause(
    "fault",
    "the first round has H + 1 steps: the count of steps starts at 0, is advanced "
    "after the sync, and 0 is left out, so syncs follow steps H, 2 H, …; llms.txt "
    "documents an average every H steps",
    "exogym_rounds.py",
)
SHARED_MEMORY = Cause(
    "fault",
    "on a CPU, after the first outer step, worker 0 and the master model share memory, "
    "as .to(device) copies nothing, so the local steps of worker 0 move the anchor",
    "exogym_rounds.py",
)
IGNORED = Cause(
    "fault",
    "the argument inner_optim is stored and never read: it trains with AdamW at 1e-3; "
    "llms.txt knows that, the README uses the argument",
    "exogym_rounds.py",
)
COUNTER = "its counter of steps starts at 1"

PROJECT = Project(
    "EXO Gym",
    COMMIT,
    [
        AgreementRow("SimpleReduceStrategy", "sync_sgd", in_processes(all_reduce)),
        AgreementRow(
            "FedAvgStrategy(optim_spec)",
            "model_averaging",
            in_processes(fedavg, "optim_spec", 0),
            cause=LONG_ROUND,
        ),
        AgreementRow(
            "FedAvgStrategy(optim_spec), counter from 1",
            "model_averaging",
            in_processes(fedavg, "optim_spec", 1),
            help=COUNTER,
        ),
        AgreementRow(
            "FedAvgStrategy(inner_optim), counter from 1",
            "model_averaging",
            in_processes(fedavg, "inner_optim", 1),
            help=COUNTER,
            cause=IGNORED,
        ),
        AgreementRow(
            "DiLoCoStrategy", "diloco", in_processes(diloco, 0), cause=LONG_ROUND
        ),
        AgreementRow(
            "DiLoCoStrategy, counter from 1",
            "diloco",
            in_processes(diloco, 1),
            help=COUNTER,
            cause=SHARED_MEMORY,
        ),
        AgreementRow(
            "DiLoCoStrategy, counter from 1, params copied",
            "diloco",
            in_processes(diloco, 1, True),
            help=f"{COUNTER}, and .clone() after .to(device)",
        ),
        AgreementRow(
            "SPARTAStrategy",
            "sparta",
            in_processes(sparta),
            help="the file's choice of entries as its selector",
        ),
        AgreementRow(
            "DeMoStrategy",
            "demo.sign",
            in_processes(demo),
            help="the rate as an attribute, the heavy ball takes its sign, and one "
            "axis for the scalar",
        ),
    ],
)
