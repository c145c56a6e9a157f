# pyright: reportMissingImports=false
"""Hugging Face accelerate: LocalSGD."""

from importlib.metadata import version

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from conformance.adapters.local_steps import Vectors, read_settings
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Project
from conformance.adapters.torch_models import (
    TorchModel,
    flatten,
    list_gradients,
    make_sgd,
)


def local_sgd(worker: int, vectors: Vectors):
    model = TorchModel(vectors)
    accelerator = Accelerator(cpu=True)
    parallel, optimizer = accelerator.prepare(
        model, make_sgd(model.parameters(), vectors)
    )
    path = []
    with LocalSGD(
        accelerator=accelerator,
        model=parallel,
        local_sgd_steps=read_settings(vectors)["period"],
    ) as averager:
        for gradient in list_gradients(vectors, worker):
            optimizer.zero_grad()
            accelerator.backward(parallel(gradient))
            optimizer.step()
            averager.step()
            path.append(flatten(model))
    return path


PROJECT = Project(
    "accelerate",
    version("accelerate"),
    [AgreementRow("LocalSGD", "model_averaging", in_processes(local_sgd))],
)
