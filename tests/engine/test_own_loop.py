"""A strategy written here: in the engine, on the command line, in a bare pmap loop."""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import ROOT
from owed import make

import syncalgos
from experiments.pipeline import sampler
from experiments.tasks.digits import digits as digits_task
from experiments.tasks.task import losses
from experiments.training.recording import params_sha256

DIGITS = digits_task().load()
WORKERS, STEPS, BATCH, SEED, LR = 2, 24, 32, 3, 0.1

# An elastic pull towards the mean, as a user would write it.
SOURCE = '''
import jax
from syncalgos import Strategy, collectives, every


def pulled(period: int = 4, pull: float = 0.5, axis=collectives.WORKERS):
    """Pulls each replica towards the mean.

    Args:
        period: local steps between two pulls.
        pull: how far, from 0 (not at all) to 1 (the mean).
    """

    def sync(replica, state, step):
        mean = collectives.mean(replica.params, axis)
        params = jax.tree.map(lambda p, m: p + pull * (m - p), replica.params, mean)
        return replica._replace(params=params), state + 1

    def center(params, state):
        return collectives.mean(params, axis)

    return every(period, Strategy(init=lambda p: 0, sync=sync, center=center))
'''


def load():
    names = {}
    exec(SOURCE, names)
    return names["pulled"]


def digits():
    task = digits_task()
    params, buffers = task.init(jax.random.key(SEED))
    rows = sampler.rows(SEED, 0, STEPS, BATCH, len(DIGITS.train["y"]))
    return task, params, buffers, rows


def by_engine(strategy):
    task, params, buffers, rows = digits()
    trainer = syncalgos.DataParallel(
        losses(task)[0], optax.sgd(LR), strategy, WORKERS, devices=[0, 1]
    )
    state = trainer.init(params, buffers, SEED)
    state, _ = trainer.run(state, rows, trainer.place(DIGITS.train))
    return trainer.center(state).params


def by_hand(make):
    """Training with jax.pmap over one axis of one's own, without DataParallel."""
    task, params, buffers, rows = digits()
    strategy, optimizer, loss = make(axis="batch"), optax.sgd(LR), losses(task)[0]

    def train(rows):  # one worker's rows: (steps, batch)
        replica = syncalgos.Replica(params, optimizer.init(params), buffers)
        state = strategy.init(params)

        def local_step(carry, row):
            replica, state, step = carry
            batch = jax.tree.map(lambda x: jnp.asarray(x)[row], DIGITS.train)
            grads = jax.grad(lambda p: loss(p, buffers, batch, None)[0])(replica.params)
            grads, state = strategy.reduce(grads, replica, state, step)
            updates, opt_state = optimizer.update(grads, replica.opt_state)
            stepped = optax.apply_updates(replica.params, updates)
            replica = replica._replace(params=stepped, opt_state=opt_state)
            replica, state = strategy.sync(replica, state, step)
            return (replica, state, step + 1), ()

        (replica, state, _), _ = jax.lax.scan(
            local_step, (replica, state, jnp.int32(0)), rows
        )
        return strategy.center(replica.params, state)

    own_rows = rows.reshape(STEPS, WORKERS, -1).swapaxes(0, 1)
    center = jax.pmap(train, axis_name="batch", devices=jax.devices()[:2])(own_rows)
    return jax.tree.map(lambda x: np.asarray(x)[0], center)


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)  # rounding of 24 steps


def test_custom_strategy_gives_the_same_numbers_in_a_bare_pmap_loop():
    assert_close(by_engine(load()()), by_hand(load()))


def test_library_strategy_gives_the_same_numbers_in_a_bare_pmap_loop():
    """All of them do: see test_own_axis.py."""
    assert_close(by_engine(make("bmuf")), by_hand(partial(make, "bmuf")))


@pytest.mark.slow
def test_custom_strategy_gives_the_same_numbers_on_the_command_line(tmp_path):
    (tmp_path / "strategies.py").write_text(SOURCE)
    flags = {
        "--algo": "strategies:pulled",
        "--workers": WORKERS,
        "--steps": STEPS,
        "--batch-size": BATCH,
        "--seed": SEED,
        "--lr": LR,
        "--devices": "0,1",
        "--out": tmp_path / "out",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "JAX_NUM_CPU_DEVICES": "2",
    }
    subprocess.run(
        [sys.executable, "-m", "experiments.run", *words],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        timeout=120,
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    center = syncalgos.Replica(by_engine(load()()))
    assert summary["params_sha256"] == params_sha256(center)
