# pyright: reportMissingImports=false
"""pytorch_optimizer: Lookahead and DeMo."""

from importlib.metadata import version

import pytorch_optimizer

from conformance.adapters.local_steps import Vectors, follow, read_settings
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import (
    HeavyBall,
    TorchModel,
    flatten,
    follow_gradients,
    make_sgd,
    set_gradients,
)


def lookahead(pullback_momentum: str):
    """Returns the run of a row, whose k and α are the file's."""

    def run(vectors: Vectors):
        settings = read_settings(vectors)
        model = TorchModel(vectors)
        optimizer = pytorch_optimizer.Lookahead(
            make_sgd(model.parameters(), vectors),
            k=settings["period"],
            alpha=settings["slow_lr"],
            pullback_momentum=pullback_momentum,
        )

        def step(gradients):
            set_gradients(model, gradients[0])
            optimizer.step()
            return [flatten(model)]

        return follow(vectors, step)

    return run


def demo(worker: int, vectors: Vectors):
    settings = read_settings(vectors)
    model = TorchModel(vectors, least_axes=1)
    optimizer = pytorch_optimizer.DeMo(
        model.parameters(),
        lr=settings["learning_rate"],
        compression_decay=settings["decay"],
        compression_top_k=settings["top_k"],
        compression_chunk=settings["chunk"],
        weight_decay=0.0,
    )
    heavy_ball = HeavyBall(model.parameters(), vectors, settings["learning_rate"])
    return follow_gradients(
        model, vectors, worker, lambda: heavy_ball.step(optimizer.step)
    )


RESET = Cause(
    "differs by choice",
    'pullback_momentum="reset" zeroes the momentum at each sync, an option of '
    "the paper",
)

PROJECT = Project(
    "pytorch_optimizer",
    version("pytorch_optimizer"),
    [
        AgreementRow(
            'Lookahead(pullback_momentum="none")',
            "lookahead.one_worker",
            lookahead("none"),
        ),
        AgreementRow(
            'Lookahead(pullback_momentum="reset")',
            "lookahead.one_worker",
            lookahead("reset"),
            cause=RESET,
        ),
        AgreementRow(
            "DeMo",
            "demo.sign",
            in_processes(demo),
            help="the heavy ball takes its sign, and one axis for the scalar",
        ),
    ],
)
