"""Train in two processes on this machine, which end with the same center.

    python examples/two_processes.py

It starts itself twice. Each process has two of the four workers, and gives their rows
of each batch. For processes on several machines see docs/many-hosts.md.
"""

import hashlib
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncalgos


def logits(params, x):
    return jax.nn.relu(x @ params["in"]) @ params["out"]


def loss(params, batch):
    scores = logits(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses.mean()


def train(number, address):
    """Trains as process 0 or 1, and prints a hash of the center."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Else process 0 would listen on all addresses of this machine.
    jax.distributed.initialize(address, 2, number, coordinator_bind_address=address)

    images, labels = load_digits(return_X_y=True)
    x = np.asarray(images, np.float32) / 16
    y = np.asarray(labels, np.int32)
    # One seed: both processes have the same model, and choose the same global batches.
    rng = np.random.default_rng(0)
    learned, test = np.split(rng.permutation(len(y)), [1500])
    rows = rng.choice(learned, (400, 128))  # (steps, batch of all workers together)
    params = {"in": rng.normal(0, 0.1, (64, 64)), "out": rng.normal(0, 0.1, (64, 10))}

    strategy = syncalgos.diloco(period=20)
    trainer = syncalgos.DataParallel(loss, optax.adam(3e-3), strategy, workers=4)
    rows = rows[:, trainer.layout.own_rows(128)]  # (steps, this process's part)
    state = trainer.init(jax.tree.map(np.float32, params))
    state, _ = trainer.run(state, {"x": x[rows], "y": y[rows]})

    center = jax.device_get(trainer.center(state).params)
    digest = hashlib.sha256(b"".join(a.tobytes() for a in jax.tree.leaves(center)))
    accuracy = np.mean(logits(center, x[test]).argmax(-1) == y[test])
    print(f"workers {[*trainer.layout.own_workers]}: test accuracy ", end="")
    print(f"{accuracy:.4f}, center {digest.hexdigest()[:16]}")


def start():
    """Starts both processes on this machine, and compares their centers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # a port that is free now
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    commands = [[sys.executable, __file__, number, address] for number in "01"]
    # They cannot share a GPU: on a machine with two each would have to take its own.
    on_cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(words, env=on_cpu, stdout=subprocess.PIPE, text=True)
        for words in commands
    ]
    printed = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("a process failed")
    # gloo prints lines before the last one.
    last_lines = [text.splitlines()[-1] for text in printed]
    centers = {line.split()[-1] for line in last_lines}
    verdict = "the same center" if len(centers) == 1 else "two centers"
    print(*last_lines, verdict, sep="\n")


if __name__ == "__main__":
    start() if len(sys.argv) == 1 else train(int(sys.argv[1]), sys.argv[2])
