"""The work that `benchmarks.peers` gives to each contestant; needs NumPy alone.

It trains an MLP 784-256-256-10 with ReLU, cross entropy, plain SGD and float32, on 8192
random examples in memory, 32 per worker and step.
"""

import argparse
import json
from typing import NamedTuple

import numpy as np

SIZES = (784, 256, 256, 10)
BATCH = 32
PERIOD = 16
LR = 0.01
EXAMPLES = 8192
OUTER_LR = 0.7  # DiLoCo's, with Nesterov's momentum
OUTER_MOMENTUM = 0.9
WARMUP = PERIOD  # steps before the clock starts; syncalgos uses a whole dispatch


class PeerTask(NamedTuple):
    """A task to measure; steps is a multiple of PERIOD."""

    algorithm: str
    workers: int
    steps: int


def task() -> PeerTask:
    """Returns the task on the command line."""
    parser = argparse.ArgumentParser(description="One measurement of benchmarks.peers.")
    parser.add_argument("algorithm")
    parser.add_argument("workers", type=int)
    parser.add_argument("steps", type=int)
    return PeerTask(**vars(parser.parse_args()))


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns features (examples, 784) and labels (examples,), int64 as in PyTorch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, SIZES[0])).astype(np.float32)
    return x, rng.integers(0, SIZES[-1], EXAMPLES)


def draw_rows(steps: int, workers: int) -> np.ndarray:
    """Returns rows of examples, (steps, workers, batch), equal for all contestants."""
    return np.random.default_rng(1).integers(0, EXAMPLES, (steps, workers, BATCH))


def report_seconds(seconds: float) -> None:
    """Prints the seconds of the steps after the warm-up, for the parent process."""
    print(json.dumps({"seconds": seconds}), flush=True)
