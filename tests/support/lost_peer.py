# pyright: reportMissingImports=false
"""Three processes that torch's gloo joins, of which one is killed in a step."""

import json
import os
import signal
from datetime import timedelta
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch.distributed

import syncalgos
from examples.torch_loop import TorchGroup
from support import peer_training

STEPS = 12
FATAL_STEP = 5
LOST_PROCESS = 2
TIMEOUT = timedelta(seconds=10)


class PeerWorker(NamedTuple):
    """What a process trains with in a process group."""

    peers: syncalgos.Peers
    strategy: syncalgos.Strategy
    step: Any


def join(name, process, processes, folder):
    torch.distributed.init_process_group(
        "gloo",
        f"file://{folder / name}",
        rank=process,
        world_size=processes,
        timeout=TIMEOUT,
    )
    peers = syncalgos.Peers(TorchGroup())
    strategy = syncalgos.bmuf(2, block_momentum=0.5, axis=peers)
    step = peer_training.make_step(strategy, peer_training.make_optimizer(strategy))
    return PeerWorker(peers, strategy, step)


def copy_arrays(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def work(process, processes, folder):
    """Trains, loses a peer in a sync, and trains on with the two that are left."""
    worker = join("three", process, processes, folder)
    optimizer = peer_training.make_optimizer(worker.strategy)
    params = jax.tree.map(jnp.asarray, peer_training.make_params())
    replica = syncalgos.Replica(params, optimizer.init(params))
    state = worker.strategy.init(params)
    batches = peer_training.make_batches(processes)
    messages = []
    step = 0
    while step < STEPS:
        if process == LOST_PROCESS and step == FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        arrays_before = copy_arrays((replica, state))
        try:
            replica, state = worker.peers.run(
                worker.step, replica, state, np.int32(step), batches[step, process]
            )
        except syncalgos.TransportError as error:
            messages.append(f"step {step}: {error}")
            for x, y in zip(copy_arrays((replica, state)), arrays_before, strict=True):
                np.testing.assert_array_equal(x, y)
            torch.distributed.destroy_process_group()
            worker = join("two", process, processes - 1, folder)
            continue
        step += 1
    center = worker.peers.run(worker.strategy.center, replica.params, state)
    lists = {name: np.asarray(x).tolist() for name, x in center.items()}
    result = {"messages": messages, "center": lists}
    (folder / f"{process}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
