# pyright: reportMissingImports=false
"""NVFlare: its FedOpt, whose server takes PyTorch's optimizers."""

from functools import partial
from importlib.metadata import version

import numpy as np
import torch
from nvflare.app_opt.pt.fedopt import PTFedOptModelShareableGenerator

from conformance.adapters.local_steps import (
    Settings,
    Vectors,
    follow_server,
    join_leaves,
    read_settings,
    split_leaves,
)
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import TorchModel


def serve(make_optimizer, vectors: Vectors):
    """Runs the server's update with the optimizer made of params and settings."""
    model = TorchModel(vectors)
    server = PTFedOptModelShareableGenerator(
        {"path": "torch.optim.SGD", "args": {}}, source_model=model, device="cpu"
    )
    server.model = model
    server.device = torch.device("cpu")
    server.optimizer = make_optimizer(model.parameters(), read_settings(vectors))
    anchors = [np.array(vectors["start"])]

    def sync(params):
        difference = np.mean(params, axis=0) - anchors[-1]
        leaves = split_leaves(vectors, difference)
        state, _ = server.server_update(leaves)
        anchors.append(join_leaves(leaf.numpy() for leaf in state.values()))
        return anchors[-1]

    return follow_server(vectors, sync)


def make_momentum(params, settings: Settings):
    return torch.optim.SGD(
        params, lr=settings["block_lr"], momentum=settings["block_momentum"]
    )


def make_nesterov(params, settings: Settings):
    return torch.optim.SGD(
        params,
        lr=settings["outer_lr"],
        momentum=settings["outer_momentum"],
        nesterov=True,
    )


def make_adam(params, settings: Settings):
    return torch.optim.Adam(
        params,
        lr=settings["outer_lr"],
        betas=(settings["b1"], settings["b2"]),
        eps=settings["tau"],
    )


def make_adagrad(params, settings: Settings):
    return torch.optim.Adagrad(
        params,
        lr=settings["outer_lr"],
        initial_accumulator_value=settings["tau"] ** 2,
        eps=settings["tau"],
    )


ADAM = Cause(
    "differs by choice",
    "PyTorch's Adam, documented as such: v starts at 0, and both moments are corrected "
    "for that; algorithm 2 of Reddi et al. has neither",
)
CALLED = "its server_update is called with the mean of the differences"

PROJECT = Project(
    "NVFlare",
    version("nvflare"),
    [
        AgreementRow(
            "FedOpt, SGD(momentum)",
            "bmuf.plain",
            partial(serve, make_momentum),
            help=CALLED,
        ),
        AgreementRow(
            "FedOpt, SGD(nesterov)",
            "diloco",
            partial(serve, make_nesterov),
            help=CALLED,
        ),
        AgreementRow(
            "FedOpt, Adagrad",
            "fedopt.adagrad",
            partial(serve, make_adagrad),
            help=f"{CALLED}; its sums start at τ²",
        ),
        AgreementRow(
            "FedOpt, Adam",
            "fedopt",
            partial(serve, make_adam),
            help=CALLED,
            cause=ADAM,
        ),
    ],
)
