# pyright: reportMissingImports=false
"""Peers against the vectors of conformance/, a line for each case.

    DIR/bin/python -m benchmarks.peers.conformance

DIR is the environment that `benchmarks.peers` made, with `pip install hivemind` if it
is to take part. Each of a file's workers is a process, and takes the file's gradients
in float64 with PyTorch's SGD as the inner optimizer. A peer that is not installed is
left out. docs/conformance.md has what it prints.
"""

import importlib.util
import itertools
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers.torch_gloo import free_port
from conformance.check import check, read

TIMEOUT = timedelta(seconds=60)
Sgd = partial(torch.optim.SGD, lr=0.2, momentum=0.9)


class Model(nn.Module):
    """The params of a file, by leaf, whose loss has given gradients."""

    def __init__(self, vectors: dict[str, Any], names: list[str] | None = None):
        super().__init__()
        start, leaves = vectors["start"], vectors["leaves"]
        for name, shape in leaves.items():
            size = int(np.prod(shape))
            leaf, start = torch.tensor(start[:size], dtype=torch.float64), start[size:]
            if names is None or name in names:
                # torchft takes no parameter without axes.
                leaf = leaf.reshape(shape or [1])
                self.register_parameter(name, nn.Parameter(leaf))


def follow(
    models: list[Model], step: Callable[[], Any], vectors: dict[str, Any], rank: int
) -> list[np.ndarray]:
    """Takes a step with each gradient of a worker; returns the params after each."""
    leaves, path = [leaf for model in models for leaf in model.parameters()], []
    rows = [row["gradients"][rank] for row in vectors["steps"]]
    for gradient in torch.tensor(rows, dtype=torch.float64):
        parts = gradient.split([leaf.numel() for leaf in leaves])
        for leaf, part in zip(leaves, parts, strict=True):
            leaf.grad = part.reshape(leaf.shape).clone()
        step()
        path.append(nn.utils.parameters_to_vector(leaves).detach().numpy().copy())
    return path


def exogym(kind: str, first: int, rank: int, port: int, vectors: dict[str, Any]):
    """EXO Gym's strategies, without its Trainer; `first` is their count of steps."""
    from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec
    from exogym.strategy.strategy import SimpleReduceStrategy

    given = {name: x["value"] for name, x in vectors["hyperparameters"].items()}
    inner = OptimSpec(torch.optim.SGD, **Sgd.keywords)
    if kind == "all_reduce":
        strategy = SimpleReduceStrategy(optim_spec=inner)
    elif kind == "diloco":
        outer = {"lr": given["outer_lr"], "momentum": given["outer_momentum"]}
        outer = OptimSpec(torch.optim.SGD, **outer, nesterov=True)
        strategy = DiLoCoStrategy(inner, outer, H=given["period"])
    else:
        name = kind.removeprefix("fedavg, ")
        strategy = FedAvgStrategy(**{name: inner}, H=given["period"])
    address, workers = f"tcp://127.0.0.1:{port}", vectors["workers"]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=workers)
    model = Model(vectors)
    strategy._init_node(model, rank, workers)
    strategy.local_step = first
    path = follow([model], strategy.step, vectors, rank)
    dist.barrier()
    return path


def torchft(kind: str, options: dict, rank: int, port: int, vectors: dict[str, Any]):
    """torchft's LocalSGD or DiLoCo, each worker a replica group of one process."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    from benchmarks.peers.torchft_diloco import manager_of

    workers = vectors["workers"]
    lighthouse = LighthouseServer(f"[::]:{port}", workers) if rank == 0 else None
    given = {name: x["value"] for name, x in vectors["hyperparameters"].items()}
    names = np.array_split([*vectors["leaves"]], given.get("fragments", 1))
    models = [Model(vectors, list(part)) for part in names]
    inner = Sgd([x for model in models for x in model.parameters()])
    store = dist.TCPStore("localhost", free_port(), is_master=True)
    manager = manager_of(models[0], rank, workers, store, f"http://localhost:{port}")
    if kind == "local_sgd":
        around = LocalSGD(manager, models[0], inner, given["period"])
    else:
        outer = [
            torch.optim.SGD(
                model.parameters(),
                given["outer_lr"],
                given["outer_momentum"],
                nesterov=True,
            )
            for model in models
        ]
        around = DiLoCo(manager, models, inner, outer, given["period"], **options)
    with around:
        path = follow(models, inner.step, vectors, rank)
    manager.shutdown(wait=False)
    if lighthouse:
        time.sleep(1)  # the others may still ask it
        lighthouse.shutdown()
    return path


def hivemind(kind: str, wait: float, rank: int, port: int, vectors: dict[str, Any]):
    """hivemind's TrainingAverager every period: it averages params in float32."""
    from hivemind import DHT, TrainingAverager

    workers, model = vectors["workers"], Model(vectors)
    period = vectors["hyperparameters"]["period"]["value"]
    inner = Sgd(model.parameters())
    store = dist.TCPStore("localhost", port, is_master=rank == 0)
    dht = DHT([store.get("address").decode()] if rank else [], start=True)
    if rank == 0:
        store.set("address", str(dht.get_visible_maddrs()[0]))
    averager = TrainingAverager(
        inner,
        average_parameters=True,
        average_gradients=False,
        initialize_optimizer=False,
        dht=dht,
        prefix="models",
        start=True,
        target_group_size=workers,
        min_group_size=workers,
        min_matchmaking_time=wait,
    )
    ends = itertools.cycle([False] * (period - 1) + [True])

    def step():
        inner.step()
        if next(ends):
            averager.step(timeout=TIMEOUT.total_seconds())

    path = follow([model], step, vectors, rank)
    averager.shutdown()
    return path


# Two buckets, which the first two and the last two leaves fill.
TWO = {"use_bucketization": True, "bucket_cap_mb": 16 * 8 / 2**20}
ARRIVAL = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.3}
CASES = (
    ("exogym", "sync_sgd", "all_reduce", 0),
    ("exogym", "model_averaging", "fedavg, optim_spec", 0),
    ("exogym", "model_averaging", "fedavg, optim_spec", 1),
    ("exogym", "model_averaging", "fedavg, inner_optim", 1),
    ("exogym", "diloco", "diloco", 0),
    ("exogym", "diloco", "diloco", 1),
    ("torchft", "model_averaging", "local_sgd", {}),
    ("torchft", "diloco", "diloco", {}),
    ("torchft", "diloco", "diloco", {"use_bucketization": True}),
    ("torchft", "diloco", "diloco", TWO),
    ("torchft", "streaming_diloco", "diloco", ARRIVAL),
    ("hivemind", "model_averaging", "averager", 2.0),
)
IN_FLOAT32 = ("hivemind",)


def run(peer: str, file: str, kind: str, how: Any) -> str:
    """Trains the workers of a file; returns whether they agree with it."""
    vectors, port = read(file), free_port()
    forked = multiprocessing.get_context("fork")  # importing torch takes long
    pipes = [forked.Pipe() for _ in range(vectors["workers"])]

    def work(rank):
        torch.set_num_threads(1)
        pipes[rank][1].send(globals()[peer](kind, how, rank, port, vectors))

    started = [forked.Process(target=work, args=(i,)) for i in range(len(pipes))]
    for process in started:
        process.start()
    alive: dict[Any, Any] = {process.sentinel: process for process in started}
    while ended := wait([*alive], TIMEOUT.total_seconds()):
        if any(alive.pop(x).exitcode for x in ended) or not alive:
            break
    for process in alive.values():
        process.kill()
    if not all(mine.poll() for mine, _ in pipes):
        return "no result"
    steps = iter(zip(*(mine.recv() for mine, _ in pipes), strict=True))
    tolerance = 1e-6 if peer in IN_FLOAT32 else 1e-9
    try:
        return f"agrees to {check(vectors, lambda _: next(steps), tolerance):.0e}"
    except AssertionError as error:
        return str(error)


def main() -> None:
    Sgd([nn.Parameter(torch.zeros(1))])  # so that the forked ones import little
    for peer, file, kind, how in CASES:
        if importlib.util.find_spec(peer):
            said = run(peer, file, kind, how)
            print(f"{peer} {version(peer)} {kind} {how}: {said}", flush=True)


if __name__ == "__main__":
    main()
