"""Algorithms, and one written here, in a loop and over an axis of one's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_tasks
from support.joint_strategies import loss_of_all, optimizers, strategies
from support.mapped_workers import shard_mapped
from support.plain_loop import local_steps
from support.problems.linear import make_params, plain_loss
from support.requirements import PERIOD, make, owed
from support.resumed_runs import run
from support.trees import assert_close

import syncalgos
from experiments.data import sampling
from experiments.tasks.task import losses
from experiments.training.summary import params_sha256
from syncalgos import Replica, collectives

WORKERS = 3
STEPS = 2 * PERIOD
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, WORKERS * 4, 6)).astype(np.float32)
BATCHES = {"x": X, "y": np.sin(X.sum(-1, keepdims=True))}


def of_workers():
    """Each worker's batches, (workers, steps, batch, …)."""
    return jax.tree.map(
        lambda x: x.reshape(STEPS, WORKERS, 4, -1).swapaxes(0, 1), BATCHES
    )


def own_loop(strategy, optimizer, start):
    """One worker's training from its batches, (steps, batch, …), to the center."""

    def train(batches):
        replica = Replica(start, optimizer.init(start))
        replica, state = jax.tree.map(
            jnp.asarray, (replica, strategy.init(replica.params))
        )

        gradient = jax.grad(loss_of_all(plain_loss))
        carry = (replica, state)
        _, centers = local_steps(strategy, optimizer, gradient, carry, batches)
        return jax.tree.map(lambda x: x[-1], centers)

    return train


def assert_trains_alike(factories, mapped, make_optimizers):
    """Trains what factories make, side by side: in the engine, and in our loop."""

    def make_strategies(**axis):
        return {name: factory(**axis) for name, factory in factories.items()}

    start = {name: make_params() for name in factories}
    optimizer = optimizers(make_optimizers)
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(loss_of_all(plain_loss)),
        optimizer,
        strategies(make_strategies()),
        workers=WORKERS,
        placement=syncalgos.Placement(devices=[0]),
    )
    state, _ = trainer.run(trainer.init(start), BATCHES)

    loop = own_loop(
        strategies(make_strategies(axis="batch"), "batch"), optimizer, start
    )
    center = mapped(loop, axis_name="batch")(of_workers())
    mean = jax.tree.map(lambda x: np.mean(x, axis=0), center)
    # Float32 after 8 steps, summed in another order.
    assert_close(mean, trainer.center(state).params, rtol=1e-5)


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

    return every(Strategy(init=lambda p: 0, sync=sync, center=center), period)
'''


def pulled(**axis):
    names = {}
    exec(SOURCE, names)
    return names["pulled"](**axis)


# Means, peers, parts that are gathered, groups, and votes: the recurrences are tested
# in a loop over an axis of jax.vmap, all of them.
KINDS = ("bmuf", "gossip", "topk_sgd", "hierarchical", "dynamic_averaging")


@pytest.mark.parametrize(
    "mapped", [pytest.param(jax.pmap, marks=pytest.mark.slow), shard_mapped]
)
def test_own_loop_trains_as_the_engine_does(mapped):
    factories = {name: partial(make, name) for name in KINDS} | {"own": pulled}
    optimizers_by_name = {name: owed(name).optimizer for name in KINDS} | {
        "own": optax.sgd(0.1)
    }
    assert_trains_alike(factories, mapped, optimizers_by_name)


@pytest.mark.slow
def test_a_strategy_of_ones_own_gives_the_same_numbers_on_the_command_line(
    tmp_path, monkeypatch
):
    """The engine trains on the same rows and from the same start."""
    (tmp_path / "pulling.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    words = (
        "--task support.tiny_tasks:drawing --algo pulling:pulled --workers 2 --seed 3"
    )
    ended = run(f"{words} --steps 11 --lr 0.1 --devices 0,1", tmp_path / "out")
    assert ended.code == 0, ended.stderr
    task = tiny_tasks.drawing()
    trainer = syncalgos.DataParallel(
        losses(task)[0],
        optax.sgd(0.1),
        pulled(),
        workers=2,
        placement=syncalgos.Placement(devices=[0, 1]),
    )
    state = trainer.init(*task.init(jax.random.key(3)), 3)
    rows = sampling.rows(3, 0, 11, tiny_tasks.BATCH, tiny_tasks.EXAMPLES)
    state, _ = trainer.run(state, rows, trainer.place(task.load().train))
    assert ended.summary["params_sha256"] == params_sha256(trainer.center(state))


CALLS = {
    "index": collectives.index,
    "mean": partial(collectives.mean, X[0, 0]),
    "agreed": partial(collectives.agreed, X[0, 0]),
    "group_mean": partial(collectives.group_mean, X[0, 0], 1),
    "gather": partial(collectives.gather, X[0, 0]),
    "shift": partial(collectives.shift, X[0, 0], 1),
    "exchange": partial(collectives.exchange, X[0, 0], [[1, 2, 0]], 0),
    "all_to_all": partial(collectives.all_to_all, X[0, :WORKERS]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_checked_shard_map_is_refused_in_one_line(name):
    """With it on, gradients of what all devices share are summed over them."""
    mapped_call = shard_mapped(
        lambda _: CALLS[name](axis="batch"), "batch", check_vma=True
    )
    with pytest.raises(ValueError, match=r"^call jax\.shard_map with check_vma=False"):
        mapped_call(np.zeros(WORKERS))


@pytest.mark.parametrize("name", CALLS)
def test_a_strategy_of_another_axis_is_told_to_name_it(name):
    with pytest.raises(NameError, match="make the strategy with axis='NAME'"):
        jax.vmap(lambda _: CALLS[name](), axis_name="batch")(np.zeros(WORKERS))
