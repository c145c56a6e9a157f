# pyright: reportMissingImports=false
"""hivemind: TrainingAverager every period, which averages in float32."""

from importlib.metadata import version

import torch.distributed as dist
from hivemind import DHT, TrainingAverager

from conformance.adapters.local_steps import Vectors, read_settings
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Project
from conformance.adapters.torch_models import (
    TorchModel,
    flatten,
    list_gradients,
    make_sgd,
    set_gradients,
)


def train(worker: int, vectors: Vectors, port: int):
    workers = vectors["workers"]
    period = read_settings(vectors)["period"]
    model = TorchModel(vectors)
    optimizer = make_sgd(model.parameters(), vectors)
    store = dist.TCPStore("localhost", port, is_master=worker == 0)
    first_peers = [store.get("address").decode()] if worker else []
    dht = DHT(first_peers, start=True)
    if worker == 0:
        store.set("address", str(dht.get_visible_maddrs()[0]))
    averager = TrainingAverager(
        optimizer,
        average_parameters=True,
        average_gradients=False,
        initialize_optimizer=False,
        dht=dht,
        prefix="models",
        start=True,
        target_group_size=workers,
        min_group_size=workers,
        min_matchmaking_time=2.0,
    )
    path = []
    for step, gradient in enumerate(list_gradients(vectors, worker)):
        set_gradients(model, gradient)
        optimizer.step()
        if (step + 1) % period == 0:
            averager.step(timeout=60.0)
        path.append(flatten(model))
    averager.shutdown()
    dht.shutdown()
    return path


PROJECT = Project(
    "hivemind",
    version("hivemind"),
    [
        AgreementRow(
            "TrainingAverager every period",
            "model_averaging",
            in_processes(train, has_group=False),
            1e-6,
        )
    ],
)
