# pyright: reportMissingImports=false
"""The authors' DeMo, bloc97/DeMo, which always takes the sign."""

import torch

from conformance.adapters.local_steps import Vectors, read_settings
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Project, add_checkout
from conformance.adapters.torch_models import (
    HeavyBall,
    TorchModel,
    follow_gradients,
)

COMMIT = add_checkout("DeMo")

import demo  # noqa: E402


def train(worker: int, vectors: Vectors, takes_sign: bool):
    if not takes_sign:
        torch.Tensor.sign_ = lambda x: x
    settings = read_settings(vectors)
    model = TorchModel(vectors, least_axes=1)
    rate = settings["learning_rate"] or 1.0
    optimizer = demo.DeMo(
        model.parameters(),
        lr=rate,
        compression_decay=settings["decay"],
        compression_topk=settings["top_k"],
        compression_chunk=settings["chunk"],
    )
    # Without the sign, a rate of 1 leaves the gradient as its size is.
    heavy_ball = HeavyBall(model.parameters(), vectors, rate)
    return follow_gradients(
        model, vectors, worker, lambda: heavy_ball.step(optimizer.step)
    )


PROJECT = Project(
    "DeMo (authors)",
    COMMIT,
    [
        AgreementRow(
            "DeMo",
            "demo.sign",
            in_processes(train, True),
            help="the heavy ball takes its sign, and one axis for the scalar",
        ),
        AgreementRow(
            "DeMo without sign_",
            "demo",
            in_processes(train, False),
            1e-6,
            help="sign_ replaced, the heavy ball takes the result, and one axis for "
            "the scalar; its DCT is float32",
        ),
    ],
)
