# pyright: reportMissingImports=false
"""torch_optimizer: Lookahead."""

from importlib.metadata import version

import torch_optimizer

from conformance.adapters.local_steps import Vectors, follow, read_settings
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import (
    TorchModel,
    flatten,
    make_sgd,
    set_gradients,
)


def lookahead(vectors: Vectors):
    settings = read_settings(vectors)
    model = TorchModel(vectors)
    optimizer = torch_optimizer.Lookahead(
        make_sgd(model.parameters(), vectors),
        k=settings["period"],
        alpha=settings["slow_lr"],
    )

    def step(gradients):
        set_gradients(model, gradients[0])
        optimizer.step()
        return [flatten(model)]

    return follow(vectors, step)


AFTER_STEP_0 = Cause(
    "departs from the paper",
    "the first sync follows step 0, and sets the slow weights to the fast ones there; "
    "in algorithm 1 they start where training does, and syncs follow k steps",
    "lookahead.py",
)

PROJECT = Project(
    "torch_optimizer",
    version("torch_optimizer"),
    [AgreementRow("Lookahead", "lookahead.one_worker", lookahead, cause=AFTER_STEP_0)],
)
