# pyright: reportMissingImports=false
"""timm: Lookahead, from its file alone, as the package needs torchvision."""

from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

from conformance.adapters.local_steps import Vectors, follow, read_settings
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import (
    TorchModel,
    flatten,
    make_sgd,
    set_gradients,
)


def load_lookahead():
    """Returns the class.

    Raises:
        ModuleNotFoundError: timm is not installed.
    """
    package = find_spec("timm")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'timm'")
    path = Path(package.origin).parent / "optim" / "lookahead.py"
    spec = spec_from_file_location("timm_lookahead", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Lookahead


Lookahead = load_lookahead()


def lookahead(syncs_first: bool):
    """Returns the run of a row, in which slow weights may be set before step 0."""

    def run(vectors: Vectors):
        settings = read_settings(vectors)
        model = TorchModel(vectors)
        base = make_sgd(model.parameters(), vectors)
        optimizer = Lookahead(base, alpha=settings["slow_lr"], k=settings["period"])
        if syncs_first:
            set_gradients(model, np.zeros(len(vectors["start"])))
            optimizer.sync_lookahead()

        def step(gradients):
            set_gradients(model, gradients[0])
            optimizer.step()
            return [flatten(model)]

        return follow(vectors, step)

    return run


LATE = Cause(
    "departs from the paper",
    "the slow weights are set at the first sync, to the fast weights of k steps, so "
    "that sync changes nothing; in algorithm 1 they start where training does",
    "lookahead.py",
)

PROJECT = Project(
    "timm",
    version("timm"),
    [
        AgreementRow("Lookahead", "lookahead.one_worker", lookahead(False), cause=LATE),
        AgreementRow(
            "Lookahead, sync_lookahead() first",
            "lookahead.one_worker",
            lookahead(True),
            help="gradients of 0 before that call, which passes over params without",
        ),
    ],
)
