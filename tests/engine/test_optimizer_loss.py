"""Inner optimizers that look at the loss: whose it is, however lanes are run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.placements import placed
from support.problems.linear import BATCHES, make_params, plain_loss, to_float64
from support.resumed_runs import run

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

WORKERS = 4
STEPS = len(BATCHES["x"])
PARAMS = 8 * 7  # bytes of float64
ROUNDING = 1e-12


def scaled_by_loss():
    """SGD with momentum whose steps are as long as the loss is large."""

    def update(updates, state, params=None, *, value, **_):
        scaled = jax.tree.map(lambda u: value * u, updates)
        return scaled, {"seen": state["seen"] + value}

    def init(params):
        return {"seen": jnp.zeros(())}

    transformation = optax.GradientTransformationExtraArgs(init, update)
    return optax.chain(optax.sgd(0.02, momentum=0.5), transformation)


def by_hand(synchronous):
    """The params of all workers after all steps, in NumPy."""
    w = [np.append(make_params()["w"][:, 0], 0.0).astype(float)] * WORKERS
    velocity = [np.zeros(7)] * WORKERS
    pairs = zip(*map(to_float64, (BATCHES["x"], BATCHES["y"])), strict=True)
    for step, (x, y) in enumerate(pairs):
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        parts = [*zip(*(np.split(z, WORKERS) for z in (x, y[:, 0])), strict=True)]
        errors = [
            a @ worker_params - b
            for worker_params, (a, b) in zip(w, parts, strict=True)
        ]
        losses = [np.mean(e**2) for e in errors]
        grads = [2 * a.T @ e / len(e) for (a, _), e in zip(parts, errors, strict=True)]
        if synchronous:
            grads = [np.mean(grads, axis=0)] * WORKERS
            losses = [np.mean(losses)] * WORKERS
        velocity = [0.5 * v + g for v, g in zip(velocity, grads, strict=True)]
        moves = [0.02 * loss * v for loss, v in zip(losses, velocity, strict=True)]
        w = [worker_params - move for worker_params, move in zip(w, moves, strict=True)]
        if not synchronous and (step + 1) % 3 == 0:
            w = [np.mean(w, axis=0)] * WORKERS
    return np.array(w)


def make_trainer(strategy, backend="vmap", **options):
    return sa.DataParallel(
        plain_loss,
        scaled_by_loss(),
        strategy,
        workers=WORKERS,
        backend=backend,
        **placed(options),
    )


EXPECTED = {"local": by_hand(synchronous=False), "synchronous": by_hand(True)}


def strategies(kind):
    return {"local": sa.every(sa.average(), 3), "synchronous": sa.sync_sgd()}[kind]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("local", {"backend": "pmap", "lane_form": "sequential", "accumulate": 3}),
        pytest.param("local", {"each_worker": True}, marks=pytest.mark.slow),
        pytest.param(
            "synchronous",
            {"backend": "pmap", "lane_form": "merged", "accumulate": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_local_steps_see_the_workers_own_loss_and_shared_ones_the_mean(kind, options):
    trainer = make_trainer(strategies(kind), **options)
    state, _ = trainer.run(trainer.init(to_float64(make_params())), to_float64(BATCHES))
    params = [np.asarray(state.replica.params[k]) for k in ("w", "b")]
    params = np.concatenate([x.reshape(WORKERS, -1) for x in params], 1)
    np.testing.assert_allclose(params, EXPECTED[kind], ROUNDING, ROUNDING)


def test_a_shared_loss_is_counted_and_an_own_one_is_not_sent():
    owed = {"local": 4 * PARAMS, "synchronous": STEPS * (PARAMS + 8)}
    for kind, expected in owed.items():
        trainer = make_trainer(strategies(kind))
        traffic = trainer.communication(trainer.init(to_float64(make_params())), STEPS)
        assert traffic.bytes_per_worker == 2 * (WORKERS - 1) / WORKERS * expected


def test_optimizers_that_do_not_look_at_the_loss_send_none():
    """Though optax's chains, muon and apply_if_finite all take extra arguments."""
    for optimizer in (optax.adam(0.1), optax.apply_if_finite(optax.sgd(0.1), 3)):
        trainer = sa.DataParallel(
            plain_loss, optimizer, sa.sync_sgd(), workers=2, backend="vmap"
        )
        state = trainer.init(to_float64(make_params()))
        assert trainer.communication(state, 1).bytes_per_worker == PARAMS


def keeping_the_loss():
    """SGD that notes the loss in its state, and does nothing else with it."""

    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda g: -0.1 * g, updates), value

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


def test_a_loss_that_is_only_kept_is_shared_too():
    trainer = sa.DataParallel(
        plain_loss, keeping_the_loss(), sa.sync_sgd(), workers=WORKERS, backend="vmap"
    )
    state, _ = trainer.run(trainer.init(to_float64(make_params())), to_float64(BATCHES))
    lowest_losses = np.ravel(state.replica.opt_state)
    np.testing.assert_array_equal(lowest_losses, lowest_losses[0])


FOLLOWING = optax.chain(
    optax.sgd(1e-9), optax.contrib.reduce_on_plateau(patience=3, rtol=0.9)
)


def test_reduce_on_plateau_reduces():
    trainer = sa.DataParallel(plain_loss, FOLLOWING, sa.sync_sgd(), workers=WORKERS)
    state, _ = trainer.run(trainer.init(to_float64(make_params())), to_float64(BATCHES))
    plateau = state.replica.opt_state[-1]
    assert (np.asarray(plateau.scale) < 0.2).all()


PLATEAU = (
    "--task support.tiny_tasks:drawing --workers 2 --steps 40 --eval-every 20 --lr 1e-7"
)


@pytest.mark.slow
def test_a_run_on_a_plateau_ends_at_a_lower_rate_and_says_so(tmp_path):
    with jax.enable_x64(False):
        ended = run(f"{PLATEAU} --schedule plateau --algo sync_sgd", tmp_path / "out")
    assert ended.code == 0, ended.stderr
    # The mean loss of each step counts: it rises and falls by dropout alone, so that
    # the rate falls within 40 steps as far as it may.
    assert ended.lines[-1]["learning_rate"] == pytest.approx(1e-10)
    assert ended.summary["learning_rate"] == pytest.approx(1e-10)
    assert ended.stderr.splitlines()[-1].endswith("lr 1e-10")
    assert "1e-07 nominal, 1e-07 effective; 1e-10 nominal at the end" in ended.stdout


@pytest.mark.slow
def test_lines_have_the_rate_of_their_last_step(tmp_path):
    words = (
        "--task support.tiny_tasks:drawing --workers 2 --steps 8 "
        "--eval-every 2 --lr 0.1 "
    )
    with jax.enable_x64(False):
        ended = run(f"{words} --schedule step --warmup-steps 2", tmp_path / "out")
    rates = {2: 0.1, 4: 0.1, 6: 0.01, 8: 0.001}
    assert {x["step"]: x["learning_rate"] for x in ended.lines} == rates


@pytest.mark.long
def test_rounds_end_at_syncs_where_a_loss_is_shared_at_every_step(tmp_path):
    """By an optimizer that needs the loss."""
    words = (
        "--task support.tiny_tasks:drawing --workers 2 --steps 10 --lr 0.1 --period 4"
    )
    with jax.enable_x64(False):
        command = f"{words} --optimizer momo --algo bmuf --sync-until 2 --eval-every 2"
        ended = run(command, tmp_path / "out").with_code(0)
    assert (ended.summary["syncs"], ended.summary["center_step"]) == (10, 8)
    assert ended.lines[-1]["train_loss"] < ended.lines[0]["train_loss"]
