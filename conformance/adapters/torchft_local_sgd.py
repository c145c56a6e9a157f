# pyright: reportMissingImports=false
"""torchft: LocalSGD and DiLoCo, each worker a replica group of one process."""

import time
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from conformance.adapters.local_steps import Settings, Vectors, read_settings
from conformance.adapters.processes import find_port, in_processes
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import (
    TorchModel,
    follow_gradients,
    make_sgd,
)

TIMEOUT = timedelta(seconds=60)


def make_manager(model, worker: int, workers: int, store, lighthouse: str):
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=workers,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker_{worker}",
        hostname="localhost",
        init_sync=False,
    )


def make_wrapper(
    kind: str,
    manager,
    fragments,
    inner_optimizer,
    settings: Settings,
    options: dict[str, Any],
):
    period = settings["period"]
    if kind == "LocalSGD":
        return LocalSGD(manager, fragments[0], inner_optimizer, period)
    outers = [
        torch.optim.SGD(
            fragment.parameters(),
            settings["outer_lr"],
            settings["outer_momentum"],
            nesterov=True,
        )
        for fragment in fragments
    ]
    return DiLoCo(manager, fragments, inner_optimizer, outers, period, **options)


def train(
    worker: int,
    vectors: Vectors,
    kind: str,
    options: dict[str, Any],
    least_axes: int,
    port: int,
):
    """Trains one worker; worker 0 has the lighthouse, at this port."""
    workers = vectors["workers"]
    settings = read_settings(vectors)
    lighthouse = LighthouseServer(f"[::]:{port}", workers) if worker == 0 else None
    groups = np.array_split(list(vectors["leaves"]), settings.get("fragments", 1))
    fragments = [TorchModel(vectors, least_axes, names=list(names)) for names in groups]
    model = torch.nn.ModuleList(fragments)
    inner_optimizer = make_sgd(model.parameters(), vectors)
    store = dist.TCPStore("localhost", find_port(), is_master=True)
    address = f"http://localhost:{port}"
    manager = make_manager(model, worker, workers, store, address)
    with make_wrapper(kind, manager, fragments, inner_optimizer, settings, options):
        path = follow_gradients(model, vectors, worker, inner_optimizer.step)
    manager.shutdown(wait=False)
    if lighthouse is not None:
        time.sleep(1)  # the others may still ask it
        lighthouse.shutdown()
    return path


def in_groups(kind: str, least_axes: int = 1, **options):
    return in_processes(train, kind, options, least_axes, has_group=False)


BUCKETS = Cause(
    "fault",
    "only the last bucket is averaged: the function that copies a bucket's mean back "
    "reads variables that the next bucket has replaced",
    "torchft_buckets.py",
)
SCALAR = Cause(
    "fault",
    "TypeError for a parameter without axes, as it is copied for the fragment; the "
    "documents exclude none",
    "torchft_scalar.py",
    "TypeError",
)
ONE_AXIS = "one axis for the scalar"
# Two buckets, which the first two and the last two leaves fill.
TWO_BUCKETS = {"use_bucketization": True, "bucket_cap_mb": 16 * 8 / 2**20}

PROJECT = Project(
    "torchft",
    version("torchft"),
    [
        AgreementRow("LocalSGD", "model_averaging", in_groups("LocalSGD", 0)),
        AgreementRow("DiLoCo", "diloco", in_groups("DiLoCo"), help=ONE_AXIS),
        AgreementRow(
            "DiLoCo, scalar without axes",
            "diloco",
            in_groups("DiLoCo", 0),
            cause=SCALAR,
        ),
        AgreementRow(
            "DiLoCo(use_bucketization), one bucket",
            "diloco",
            in_groups("DiLoCo", use_bucketization=True),
            help=ONE_AXIS,
        ),
        AgreementRow(
            "DiLoCo(use_bucketization), two buckets",
            "diloco",
            in_groups("DiLoCo", **TWO_BUCKETS),
            help=ONE_AXIS,
            cause=BUCKETS,
        ),
        AgreementRow(
            "DiLoCo, two fragments with a delay",
            "streaming_diloco",
            in_groups("DiLoCo", fragment_sync_delay=1, fragment_update_alpha=0.3),
            help=ONE_AXIS,
        ),
    ],
)
