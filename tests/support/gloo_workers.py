# pyright: reportMissingImports=false
"""Processes that torch's gloo joins, each of which trains one worker over Peers."""

import functools
import os
import pickle
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import torch.distributed

import syncalgos
from examples.torch_loop import TorchGroup
from support import peer_training

NAMES = (
    "PEERS_NAMES"  # of the environment: the algorithms to train, separated by commas
)
TIMEOUT = timedelta(seconds=20)


class CountingGroup(TorchGroup):
    """TorchGroup, which counts what it sends; an all-reduce as by a ring."""

    sent_bytes = 0.0

    def meet(self):
        torch.distributed.barrier(self.group)

    def all_gather(self, arrays):
        self.sent_bytes += (self.size - 1) * sum(x.nbytes for x in arrays)
        return super().all_gather(arrays)

    def all_reduce(self, arrays):
        share = 2 * (self.size - 1) / self.size
        self.sent_bytes += share * sum(x.nbytes for x in arrays)
        return super().all_reduce(arrays)

    def send_receive(self, arrays, to, source):
        self.sent_bytes += sum(x.nbytes for x in arrays)
        return super().send_receive(arrays, to, source)


def join(process, processes, folder):
    torch.distributed.init_process_group(
        "gloo",
        f"file://{folder / 'store'}",
        rank=process,
        world_size=processes,
        timeout=TIMEOUT,
    )


def mean_of_bfloat16(group):
    """The mean of each process's number, 257 times: more than bfloat16 can count."""
    peers = syncalgos.Peers(group)
    values = jnp.full(257, 1 + group.rank, jnp.bfloat16)
    mean = peers.run(
        jax.jit(syncalgos.collectives.mean, static_argnums=1), values, peers
    )
    return np.asarray(mean.astype(jnp.float32))


def work(process, processes, folder):
    """Trains by each of the algorithms, and writes the runs."""
    join(process, processes, folder)
    runs = {}
    for name in os.environ[NAMES].split(","):
        make = functools.partial(peer_training.make_strategy, name)
        try:
            runs[name] = peer_training.train_over(CountingGroup(), make)
        except Exception as error:
            runs[name] = repr(error)
    runs["bfloat16"] = mean_of_bfloat16(CountingGroup())
    (folder / f"{process}.pickle").write_bytes(pickle.dumps(runs))
    torch.distributed.destroy_process_group()
