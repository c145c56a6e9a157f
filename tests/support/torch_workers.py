# pyright: reportMissingImports=false
"""Two processes of a torch process group, which train by examples/torch_loop.py."""

import io
import json

import numpy as np
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import syncalgos
from examples.torch_loop import Synced, TorchGroup

STEPS = 22
BROKEN = 10
PERIOD = 4
LR = 0.05
MOMENTUM = 0.9
WORKERS = 2
BATCH = 16
INPUTS = 6
HIDDEN = 8


def strategies(**axis):
    """The strategies by name, over an axis."""
    diloco = syncalgos.diloco(PERIOD, **axis)
    return {
        "bmuf": syncalgos.bmuf(PERIOD, nesterov=True, **axis),
        "diloco": diloco,
        "sparseloco": syncalgos.sparseloco(PERIOD, **axis),
        "gossip": syncalgos.gossip(**axis),
        "sync_sgd": syncalgos.sync_sgd(**axis),
        "palsgd": syncalgos.palsgd(PERIOD, learning_rate=LR, **axis),
        "buffers": syncalgos.at_syncs(diloco, syncalgos.average("buffers", **axis)),
    }


def batches():
    """The inputs and targets: (steps, workers, batch, features)."""
    shape = STEPS, WORKERS, BATCH, INPUTS
    x = np.random.default_rng(1).normal(1, 2, shape).astype(np.float32)
    return x, np.tanh(x.sum(-1, keepdims=True))


def begun(strategy):
    """A model, the same in all processes, its optimizer and the loop's Synced."""
    torch.manual_seed(0)
    hidden = torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh()
    output_layer = torch.nn.Linear(HIDDEN, 1)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(INPUTS), *hidden, output_layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    # The optimizer's rate is the one that the strategy was told, if any.
    synced = Synced(model, optimizer, strategy._replace(learning_rate=None))
    return {"model": model, "optimizer": optimizer, "synced": synced}


def train(model, synced, number, steps):
    """Takes local steps."""
    inputs, targets = map(torch.from_numpy, batches())
    for step in steps:
        x = inputs[step, number]
        y = targets[step, number]
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        synced.step()


def copied(tensors):
    """The tensors as arrays that no step changes."""
    return {name: x.numpy().copy() for name, x in tensors.items()}


def ended(strategy, number):
    """A model at its start and end, its center, and the end of a resumed run."""
    parts = begun(strategy)
    model = parts["model"]
    synced = parts["synced"]
    states = {"first": copied(model.state_dict())}
    train(model, synced, number, range(STEPS))
    states |= {"held": copied(model.state_dict()), "center": copied(synced.center())}

    parts = begun(strategy)
    file = io.BytesIO()
    train(parts["model"], parts["synced"], number, range(BROKEN))
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    parts = begun(strategy)
    saved = torch.load(file)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    train(parts["model"], parts["synced"], number, range(BROKEN, STEPS))
    return states | {"again": copied(parts["model"].state_dict())}


def sharded(model):
    """The model with params cut over the processes, as DTensor."""
    fully_shard(model, mesh=init_device_mesh("cpu", (WORKERS,)))
    return model


def refused(number, peers):
    """The errors of strategies and models that the loop cannot serve."""
    axis = {"axis": peers}

    def see(replica, state, step):
        return replica, state

    averaging = syncalgos.model_averaging(1, **axis)
    cases = {
        "loss": syncalgos.Strategy(sync=see, sees_loss=True, **axis),
        "rate": syncalgos.slowmo(2, learning_rate=LR, **axis),
        "steps": syncalgos.zero_one_adam(learning_rate=LR, **axis),
        "moments": syncalgos.des_loc(1, **axis),
        "opt_state": syncalgos.chain(averaging, syncalgos.average("opt_state", **axis)),
        "axis": syncalgos.model_averaging(1),
        "ddp": averaging,
        "sharded": averaging,
    }
    wrapped = {"ddp": DistributedDataParallel, "sharded": sharded}
    messages = {}
    for name, strategy in cases.items():
        model = torch.nn.Linear(INPUTS, 1)
        wrapped_model = wrapped[name](model) if name in wrapped else model
        try:
            synced = Synced(
                wrapped_model, torch.optim.Adam(model.parameters()), strategy
            )
            train(model, synced, number, [0])
        except ValueError as error:
            messages[name] = str(error)
    return messages


def work(process, processes, folder):
    """Writes what one process found."""
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", store, rank=process, world_size=2)
    arrays_by_name = {}
    peers = syncalgos.Peers(TorchGroup())
    for name, strategy in strategies(axis=peers).items():
        for part, arrays in ended(strategy, process).items():
            arrays_by_name |= {f"{name} {part} {key}": x for key, x in arrays.items()}
    np.savez(folder / f"{process}.npz", **arrays_by_name)
    (folder / f"{process}.json").write_text(json.dumps(refused(process, peers)))
    torch.distributed.destroy_process_group()
