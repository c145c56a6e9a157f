"""Tasks that start in a moment, for runs that are stopped, killed and resumed."""

import os
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from experiments.data.feeding import Data, Source
from experiments.tasks.task import Task

EXAMPLES = 40
HELD_OUT = 8
FEATURES = 4
LABELS = 4
BATCH = 8  # five steps are an epoch


def _examples(count, seed):
    x = np.random.default_rng(seed).normal(size=(count, FEATURES))
    return {"x": x.astype(np.float32), "y": np.arange(count, dtype=np.int32) % LABELS}


def _load():
    train = _examples(EXAMPLES, 0)
    return Data(train, _examples(HELD_OUT, 1), {"label": train["y"]})


def _task(init, apply, load=_load):
    return Task(
        init=init,
        apply=apply,
        load=load,
        batch_size=BATCH,
        steps=11,
        lr={"": 0.05},
        dispatch_steps=1,
    )


def drawing(width: int = 6) -> Task:
    """A classifier with dropout, and buffers that statistics are kept in.

    Args:
        width: of the hidden layer.
    """

    def init(key):
        in_key, out_key = jax.random.split(key)
        params = {
            "in": jax.random.normal(in_key, (FEATURES, width)),
            "bias": jnp.zeros(width),
            "out": jax.random.normal(out_key, (width, LABELS)),
        }
        return params, {"mean": jnp.zeros(FEATURES), "seen": jnp.int32(0)}

    def apply(params, buffers, batch, key, train):
        x = batch["x"]
        if train:
            mean = 0.9 * buffers["mean"] + 0.1 * x.mean(0)
            buffers = {"mean": mean, "seen": buffers["seen"] + len(x)}
        hidden = jnp.tanh((x - buffers["mean"]) @ params["in"] + params["bias"])
        if train:
            hidden *= jax.random.bernoulli(key, 0.8, hidden.shape) / 0.8
        logits = hidden @ params["out"]
        right = jnp.argmax(logits, -1) == batch["y"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return {"loss": loss, "accuracy": right.astype(jnp.float32)}, buffers

    return _task(init, apply)


def rolling() -> Task:
    """A task whose default optimizer has momentum."""
    return drawing()._replace(momentum=0.9)


def shared(width: int = 6) -> Task:
    """A classifier whose matrices the devices of a worker share.

    Args:
        width: of the hidden layer.
    """

    def shardings(path, shape, sizes):
        if path == "bias":
            return PartitionSpec()
        fits = [size % sizes["fsdp"] == 0 for size in shape]
        return PartitionSpec(*[None] * fits.index(True), "fsdp")

    return drawing(width)._replace(shardings=shardings)


def poisoned(at: int = 5) -> Task:
    """A task whose loss is not finite from a step on, where an example has label 1.

    Args:
        at: the step, from 0.
    """

    def apply(params, buffers, batch, key, train):
        logits = batch["x"] @ params["out"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        if train:
            bad = (batch["y"] == 1) & (buffers["step"] >= at)
            loss = jnp.where(bad, jnp.nan, loss)
            buffers = {"step": buffers["step"] + 1}
        return {"loss": loss}, buffers

    def init(key):
        out = jax.random.normal(key, (FEATURES, LABELS))
        return {"out": out}, {"step": jnp.int32(0)}

    return _task(init, apply)


def entangled(depth: int = 300) -> Task:
    """A task that XLA compiles for long.

    Args:
        depth: of what it computes, one operation after the other.
    """

    def apply(params, buffers, batch, key, train):
        x = batch["x"] @ params["w"]
        for i in range(depth):
            x = jnp.sin(x @ params["w"]) + jnp.roll(x, i, 0)
        return {"loss": jnp.sum(x**2, 1)}, buffers

    return _task(lambda key: ({"w": jnp.eye(FEATURES)}, ()), apply)


def endless() -> Task:
    """A task whose data never comes, which it says."""

    def load():
        print("waiting in load", file=sys.stderr, flush=True)
        while not threading.Event().wait(0.1):  # a signal before a longer one is missed
            pass

    return drawing()._replace(load=load)


class Failing(Source):
    """Examples one of which cannot be read where a function is true."""

    def __init__(self, examples, bad, fails):
        self.examples = examples
        self.bad = bad
        self.fails = fails

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, number, /):
        if number == self.bad and self.fails():
            raise OSError("the disk is on fire")
        return {name: x[number] for name, x in self.examples.items()}


def read(kind: str = "source", bad: int = -1) -> Task:
    """A task whose examples are read one by one, unless they are arrays.

    Args:
        kind: source or arrays.
        bad: an example that cannot be read where ON_FIRE is set.
    """

    def load():
        data = _load()
        source = Failing(data.train, bad, lambda: "ON_FIRE" in os.environ)
        return data._replace(train=source) if kind == "source" else data

    return drawing()._replace(load=load)


def failing(when: str = "load") -> Task:
    """A task that raises on process 1 alone.

    Args:
        when: make, load, init or read.
    """

    def is_here():
        return jax.process_index() == 1

    def check(moment):
        if when == moment and is_here():
            raise RuntimeError(f"no {moment} here")

    def load():
        check("load")
        data = _load()
        source = Failing(data.train, 7, is_here)
        return data._replace(train=source) if when == "read" else data

    task = drawing()

    def init(key):
        check("init")
        return task.init(key)

    check("make")
    return task._replace(init=init, load=load)


def levels() -> Task:
    """A number, from 0, that is to equal labels: 0 and 1, and a batch has them all."""

    def apply(params, buffers, batch, key, train):
        return {"loss": (params["level"] - batch["y"]) ** 2}, buffers

    def load():
        y = np.arange(BATCH, dtype=np.int32) % 2
        return Data({"y": y}, {"y": y}, {"label": y})

    return _task(lambda key: ({"level": jnp.zeros(())}, ()), apply, load)


def unlucky(seed: int, at: int = 1, ends: str = "raise") -> Task:
    """A task that fails from one seed.

    Args:
        seed: of the run.
        at: the seed from which it fails.
        ends: raise, or kill: the process ends by SIGKILL.
    """
    if seed == at and ends == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == at:
        raise RuntimeError("no luck\nwith this seed")
    return drawing()


def local(path: str = "") -> Task:
    """A task whose data is a file of this machine, named by a variable.

    Args:
        path: unused; an empty one takes TINY_DATA.
    """

    def load():
        Path(path or os.environ["TINY_DATA"]).read_text()
        return _load()

    return drawing()._replace(load=load)
