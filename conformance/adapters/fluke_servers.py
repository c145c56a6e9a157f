# pyright: reportMissingImports=false
"""fluke's servers, whose aggregate is called with models, and its clients."""

from functools import partial
from importlib.metadata import version
from typing import Any

import fluke.server
import numpy as np
import torch
from fluke.algorithms.fedavgm import FedAVGMServer
from fluke.algorithms.feddyn import FedDynClient, FedDynServer
from fluke.algorithms.fedopt import FedOptServer
from fluke.algorithms.fedprox import FedProxClient
from fluke.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer
from fluke.config import OptimizerConfigurator
from fluke.server import Server
from fluke.utils.model import aggregate_models

from conformance.adapters.local_steps import (
    Settings,
    Vectors,
    find_rate,
    follow_server,
    read_settings,
)
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import TorchModel, flatten, list_gradients


def make_model(vectors: Vectors, vector: np.ndarray):
    model = TorchModel(vectors)
    torch.nn.utils.vector_to_parameters(torch.tensor(vector), model.parameters())
    return model


def serve(make_server, vectors: Vectors, prepare=None):
    """Runs a server made of a model, clients and settings, after `prepare`."""
    clients = [None] * vectors["workers"]
    settings = read_settings(vectors)
    server = make_server(TorchModel(vectors), clients, settings)
    if prepare is not None:
        prepare(server, settings)

    def sync(params):
        server.aggregate(clients, [make_model(vectors, vector) for vector in params])
        return flatten(server.model)

    return follow_server(vectors, sync)


class RoundBatches:
    """A loader of the round's gradients, which keeps the params after each step."""

    def __init__(self):
        self.gradients = []
        self.path = []
        self.client: Any = None

    def __len__(self):
        return len(self.gradients)

    def __iter__(self):
        for gradient in self.gradients:
            yield gradient, gradient
            self.path.append(flatten(self.client.model))


def take_product(product, target):
    return product


def make_client(
    client_class, worker: int, vectors: Vectors, server, options: dict[str, Any]
):
    inner_optimizer = {
        "name": "SGD",
        "lr": find_rate(vectors, 0),
        "momentum": vectors["inner_optimizer"]["momentum"],
    }
    client = client_class(
        index=worker,
        train_set=RoundBatches(),
        test_set=None,
        optimizer_cfg=OptimizerConfigurator(inner_optimizer),
        loss_fn=take_product,
        local_epochs=1,
        **options,
    )
    client.train_set.client = client
    client.set_channel(server.channel)
    return client


def run_rounds(classes, vectors: Vectors, make_options=None, prepare=None):
    """Runs an algorithm's server and clients, by rounds of the file's period.

    Args:
        classes: of the clients and of the server.
        vectors: the content of the file.
        make_options: makes the clients' options of the settings.
        prepare: called with each client before the first round.
    """
    client_class, server_class = classes
    settings = read_settings(vectors)
    workers = range(vectors["workers"])
    server = server_class(TorchModel(vectors), None, [], weighted=False)
    clients = []
    for worker in workers:
        options = make_options(settings) if make_options is not None else {}
        clients.append(make_client(client_class, worker, vectors, server, options))
        if prepare is not None:
            prepare(clients[-1])
    server.clients = clients
    server.n_clients = len(clients)
    gradients = [list_gradients(vectors, worker) for worker in workers]
    steps = len(vectors["steps"])
    period = settings["period"]
    for start in range(0, steps, period):
        server.broadcast_model(clients)
        for client, rows in zip(clients, gradients, strict=True):
            client.train_set.gradients = rows[start : start + period]
            client.local_update(start // period + 1)
        if start + period <= steps:
            models = server.receive_client_models(clients, state_dict=False)
            server.aggregate(clients, models)
            next_start = getattr(server, "cld_mdl", server.model)  # FedDyn's is another
            for client in clients:
                client.train_set.path[-1] = flatten(next_start)
    paths = [client.train_set.path for client in clients]
    return np.array(paths).swapaxes(0, 1)


class TurnedFedDynClient(FedDynClient):
    """A client whose sum of moves has the sign and the size of the authors' code."""

    def fit(self, override_local_epochs=0):
        old_sum = self.prev_grads.clone()
        start = torch.tensor(flatten(self.model))
        loss = super().fit(override_local_epochs)
        self.prev_grads = old_sum + torch.tensor(flatten(self.model)) - start
        return loss


def make_proximal(settings: Settings):
    return {"mu": settings["proximal"]}


def make_dynamic(settings: Settings):
    return {"alpha": settings["proximal"], "clipping": 0}


def set_weight(client):
    """Sets what clients get before the first round: their share of the data."""
    client.weight = 1.0


def make_fedavg(model, clients, settings: Settings):
    return Server(model, None, clients)


def make_fedavgm(model, clients, settings: Settings):
    return FedAVGMServer(
        model, None, clients, weighted=False, momentum=settings["block_momentum"]
    )


def make_fedopt(model, clients, settings: Settings):
    return FedOptServer(
        model,
        None,
        clients,
        mode=settings["method"],
        lr=settings["outer_lr"],
        beta1=settings["b1"],
        beta2=settings["b2"],
        tau=settings["tau"],
        weighted=False,
    )


def start_momentum(server, settings: Settings):
    """Sets the momentum to 0 before the first round, and the rate of the average."""
    server.hyper_params.lr = settings["block_lr"]
    state = server.model.state_dict()
    server.momentum_vector = {name: torch.zeros_like(x) for name, x in state.items()}


def start_at_tau2(server, settings: Settings):
    for leaf in server.v_t.values():
        leaf.fill_(server.hyper_params.tau**2)


def start_at_tau2_and_average(server, settings: Settings):
    """Lets the base class average at rate 1, too."""
    start_at_tau2(server, settings)
    fluke.server.aggregate_models = average_models


def average_models(model, models, weights, rate, inplace=True):
    return aggregate_models(model, models, weights, 1.0, inplace)


FIRST_ROUND = Cause(
    "fault",
    "the first round is thrown away: its aggregate sets the momentum to 0 and adds "
    "that alone; in Hsu et al., which it cites, the momentum gets that round's move",
    "fluke_servers.py",
)
WRONG_SIGN = Cause(
    "fault",
    "prev_grads gets α (x - θ), while the loss and the server add it as the authors' "
    "code adds the sum of θ - x: both are corrected in the wrong direction (algorithm "
    "1 of Acar et al. subtracts the gradient that this is)",
    "fluke_feddyn.py",
)
RATE_TWICE = Cause(
    "fault",
    "the server's rate is also that of the base class's average, so the mean move is "
    "multiplied by it before the moments; in algorithm 2 of Reddi et al. it is not",
    "fluke_servers.py",
)
V_FROM_0 = RATE_TWICE._replace(
    reason=f"{RATE_TWICE.reason}; v starts at 0, where a comment guarantees τ²"
)
FROM_TAU2 = "v_t filled with τ² before the first round"


def rows():
    yield AgreementRow(
        "Server (FedAVG)", "model_averaging", partial(serve, make_fedavg)
    )
    yield AgreementRow(
        "FedAVGMServer", "bmuf.plain", partial(serve, make_fedavgm), cause=FIRST_ROUND
    )
    yield AgreementRow(
        "FedAVGMServer, momentum from 0",
        "bmuf.plain",
        partial(serve, make_fedavgm, prepare=start_momentum),
        help="momentum_vector set to 0 before the first round, and the rate of the "
        "base class's average to the file's",
    )
    yield AgreementRow(
        "SCAFFOLD",
        "scaffold.constant_rate",
        partial(run_rounds, (SCAFFOLDClient, SCAFFOLDServer)),
    )
    yield AgreementRow(
        "FedProx",
        "fedprox",
        partial(run_rounds, (FedProxClient, Server), make_options=make_proximal),
    )
    yield AgreementRow(
        "FedDyn(clipping=0)",
        "feddyn",
        partial(
            run_rounds,
            (FedDynClient, FedDynServer),
            make_options=make_dynamic,
            prepare=set_weight,
        ),
        help="the clients' weights set to 1",
        cause=WRONG_SIGN,
    )
    yield AgreementRow(
        "FedDyn(clipping=0), sum of moves turned",
        "feddyn",
        partial(
            run_rounds,
            (TurnedFedDynClient, FedDynServer),
            make_options=make_dynamic,
            prepare=set_weight,
        ),
        help="the clients' weights set to 1; prev_grads as the authors' code has it",
    )
    for file in ("fedopt", "fedopt.yogi", "fedopt.adagrad"):
        yield AgreementRow(
            "FedOptServer", file, partial(serve, make_fedopt), cause=V_FROM_0
        )
        yield AgreementRow(
            "FedOptServer, v from τ²",
            file,
            partial(serve, make_fedopt, prepare=start_at_tau2),
            help=FROM_TAU2,
            cause=RATE_TWICE,
        )
    # From here on, the base class averages at rate 1.
    for file in ("fedopt", "fedopt.yogi", "fedopt.adagrad"):
        yield AgreementRow(
            "FedOptServer, v from τ², average at rate 1",
            file,
            partial(serve, make_fedopt, prepare=start_at_tau2_and_average),
            help=f"{FROM_TAU2}, and the base class's average at rate 1",
        )


PROJECT = Project("fluke", version("fluke-fl"), list(rows()))
