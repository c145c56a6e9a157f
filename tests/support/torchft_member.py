# pyright: reportMissingImports=false
"""A member of a job that trains by examples/torchft_members.py, for the tests.

    python tests/support/torchft_member.py NAME LIGHTHOUSE FOLDER
    python tests/support/torchft_member.py NAME algorithms FOLDER LIGHTHOUSE...

The first trains until FOLDER/stop holds a number of syncs, and writes a line of JSON
for each to FOLDER/NAME.log. Where FOLDER/NAME.pause names a place, it waits there
forever. The second trains by each algorithm, with a lighthouse for each.
"""

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from torchft_members import Members, Synced, join  # noqa: E402

import syncalgos  # noqa: E402

PERIOD = 8
RATE = 0.02
MOMENTUM = 0.5
SYNC_TIMEOUT = 4  # seconds
INPUTS = 6
NOISE = 0.1
STEPS = 24  # of each algorithm
NAMES = (
    "sync_sgd",
    "model_averaging",
    "bmuf",
    "slowmo",
    "diloco",
    "streaming_diloco",
)


def make_strategy(name: str, **axis) -> syncalgos.Strategy:
    """A strategy by its name, with the period of the tests."""
    if name == "sync_sgd":
        return syncalgos.sync_sgd(**axis)
    if name == "slowmo":
        return syncalgos.slowmo(PERIOD, learning_rate=RATE, **axis)
    if name == "streaming_diloco":
        return syncalgos.streaming_diloco(PERIOD, fragments=2, **axis)
    return syncalgos.ALGORITHMS[name](PERIOD, **axis)


def make_held_out() -> tuple[np.ndarray, np.ndarray]:
    """Makes examples on which no process trains."""
    return make_batch(np.random.default_rng(99), examples=1024)


def make_batch(
    rng: np.random.Generator, examples: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(1, 2, (examples, INPUTS)).astype(np.float32)
    noise = NOISE * rng.normal(size=(examples, 1))
    return x, (x.sum(1, keepdims=True) / 4 + noise).astype(np.float32)


def make_model(has_buffers: bool) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(INPUTS, 1)]
    if has_buffers:
        layers.insert(0, torch.nn.BatchNorm1d(INPUTS))
    return torch.nn.Sequential(*layers)


def take_step(synced: Synced, batch: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = map(torch.from_numpy, batch)
    synced.optimizer.zero_grad()
    (synced.model(x) - y).square().mean().backward()
    synced.step()


class Pauses:
    """Places at which a test stops this process for good."""

    def __init__(self, folder: Path, name: str) -> None:
        self.request = folder / f"{name}.pause"
        self.mark = folder / f"{name}.paused"

    def pause_if_asked(self, place: str) -> None:
        if self.request.exists() and self.request.read_text() == place:
            self.mark.write_text(place)
            time.sleep(1000)  # until it is killed


class PausedMembers(Members):
    """Members that may stop inside a sync."""

    pauses: Pauses

    def all_reduce(self, arrays):
        self.pauses.pause_if_asked("sync")
        return super().all_reduce(arrays)


class PausedSynced(Synced):
    """A Synced that may stop while it takes the state of another process."""

    pauses: Pauses

    def load_state_dict(self, saved):
        self.pauses.pause_if_asked("healing")
        super().load_state_dict(saved)


def measure_loss(synced: Synced) -> float:
    """Measures the center's loss on examples that no process trains on."""
    x, y = map(torch.from_numpy, make_held_out())
    center = {k: torch.from_dlpack(v) for k, v in synced.center().items()}
    synced.model.eval()
    with torch.no_grad():
        values = torch.func.functional_call(synced.model, center, x)
    synced.model.train()
    return float((values - y).square().mean())


def hash_center(synced: Synced) -> str:
    tensors = {**synced.center(), **synced.arrays(synced.buffers)}
    joined = b"".join(np.asarray(tensors[key]).tobytes() for key in sorted(tensors))
    return hashlib.sha256(joined).hexdigest()


def train_until_stopped(name: str, lighthouse: str, folder: Path) -> None:
    members = join(name, lighthouse, seconds=SYNC_TIMEOUT)
    members.__class__ = PausedMembers
    members.pauses = Pauses(folder, name)
    strategy = syncalgos.at_syncs(
        make_strategy("diloco", axis=members.peers),
        syncalgos.average("buffers", axis=members.peers),
    )
    model = make_model(has_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    PausedSynced.pauses = members.pauses
    synced = PausedSynced(model, optimizer, members, strategy)
    rng = np.random.default_rng(abs(hash((name, time.time()))))
    stop = folder / "stop"
    with (folder / f"{name}.log").open("a") as log:
        while not stop.exists() or synced.syncs < int(stop.read_text() or 10**9):
            members.pauses.pause_if_asked("steps")
            syncs = synced.syncs
            take_step(synced, make_batch(rng))
            time.sleep(0.01)
            if synced.syncs > syncs:
                row = {
                    "syncs": synced.syncs,
                    "steps": synced.steps,
                    "rank": members.rank,
                    "size": members.size,
                    "center": hash_center(synced),
                    "loss": measure_loss(synced),
                }
                print(json.dumps(row), file=log, flush=True)


def train_by_algorithms(name: str, folder: Path, lighthouses: list[str]) -> None:
    centers = {}
    for number, (algorithm, lighthouse) in enumerate(
        zip(NAMES, lighthouses, strict=True)
    ):
        members = join(name, lighthouse, seconds=60)
        model = make_model(has_buffers=False)
        strategy = make_strategy(algorithm, axis=members.peers)
        strategy = strategy._replace(learning_rate=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        synced = Synced(model, optimizer, members, strategy)
        rng = np.random.default_rng(int(name))
        for _ in range(STEPS):
            take_step(synced, make_batch(rng))
        assert members.size == 2, number
        for key, x in synced.center().items():
            centers[f"{algorithm} {key}"] = np.asarray(x)
    np.savez(folder / f"{name}.npz", **centers)
    members = join(name, lighthouses[0], seconds=60)
    (folder / f"{name}.refused").write_text(json.dumps(refuse(members)))


def refuse(members: Members) -> dict[str, str]:
    """The errors of strategies that are no means, or that a torch loop cannot serve."""
    errors = {}
    strategies = {
        "gossip": syncalgos.gossip(axis=members.peers),
        "sparseloco": syncalgos.sparseloco(500, axis=members.peers),
        "fedprox": syncalgos.fedprox(8, axis=members.peers),
        "slowmo": syncalgos.slowmo(8, learning_rate=0.1, axis=members.peers),
        "axis": syncalgos.diloco(8),
    }
    for name, strategy in strategies.items():
        model = make_model(has_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        try:
            Synced(model, optimizer, members, strategy)
        except ValueError as error:
            errors[name] = str(error)
    return errors


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    jax.config.update("jax_platforms", "cpu")
    name, lighthouse, folder, *lighthouses = sys.argv[1:]
    if lighthouses:
        train_by_algorithms(name, Path(folder), lighthouses)
    else:
        train_until_stopped(name, lighthouse, Path(folder))
    time.sleep(1)  # the others may still receive the last sync
    os._exit(0)  # torchft's threads do not end by themselves
