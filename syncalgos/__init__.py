"""Pluggable synchronization algorithms for data-parallel training in JAX."""

from syncalgos import collectives, reducers
from syncalgos.algorithms import ALGORITHMS
from syncalgos.algorithms.bmuf import bmuf
from syncalgos.algorithms.diloco import diloco
from syncalgos.algorithms.model_averaging import model_averaging
from syncalgos.algorithms.sync_sgd import sync_sgd
from syncalgos.base import Replica, Strategy, after, chain, every, until, when
from syncalgos.collectives import WORKERS
from syncalgos.ledger import Communication, communication
from syncalgos.parallel import DataParallel, TrainState, stateless
from syncalgos.reducers import mean
from syncalgos.syncs import average, outer_step, reduce_with, reset

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "WORKERS",
    "Communication",
    "DataParallel",
    "Replica",
    "Strategy",
    "TrainState",
    "after",
    "average",
    "bmuf",
    "chain",
    "collectives",
    "communication",
    "diloco",
    "every",
    "mean",
    "model_averaging",
    "outer_step",
    "reduce_with",
    "reducers",
    "reset",
    "stateless",
    "sync_sgd",
    "until",
    "when",
]
