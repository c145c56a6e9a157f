"""A strategy that declares it sees the loss of each worker's own step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos import collectives
from syncalgos.strategy import Strategy

WORKERS = 4
STEPS = 12
LR = 0.1
rng = np.random.default_rng(3)
TARGETS = rng.normal(size=(STEPS, WORKERS)).astype(np.float32)


def loss(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def averaging_those_whose_loss_fell():
    """State: the loss at the last sync."""

    def sync(replica, last_loss, step):
        fell = jnp.where(replica.loss < last_loss, 1.0, 0.0)
        count = collectives.mean(fell)
        mean = collectives.mean(fell * replica.params["w"]) / jnp.maximum(count, 1e-9)
        w = jnp.where(count > 0, mean, replica.params["w"])
        return replica._replace(params={"w": w}), replica.loss

    def init(params):
        return jnp.float32(jnp.inf)

    return Strategy(init, sync=sync, sees_loss=True)


def recurrence(period):
    """Yields the params of all workers after each step."""
    w = np.zeros(WORKERS)
    last_losses = np.full(WORKERS, np.inf)
    for step, target in enumerate(TARGETS.astype(float)):
        losses = (w - target) ** 2
        w = w - LR * 2 * (w - target)
        if (step + 1) % period == 0:
            fell = losses < last_losses
            last_losses = losses
            w = np.full(WORKERS, w[fell].mean()) if fell.any() else w
        yield w


def make_trainer(strategy, backend="vmap", form=None):
    return sa.DataParallel(
        loss,
        optax.sgd(LR),
        strategy,
        workers=WORKERS,
        backend=backend,
        placement=sa.Placement(lane_form=form),
    )


def trained(strategy, *options, parts=(STEPS,)):
    trainer = make_trainer(strategy, *options)
    state = trainer.init({"w": jnp.zeros(())})
    metrics = {}
    for part in np.split(TARGETS, np.cumsum(parts)[:-1]):
        state, metrics = trainer.run(state, part)
    assert state.replica.loss == ()  # it is given, and not kept
    return np.ravel(state.replica.params["w"]), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "form", "period"),
    [("shard_map", "vectorized", 1), ("pmap", "sequential", 4)],
)
def test_workers_whose_loss_fell_are_averaged(backend, form, period):
    strategy = sa.every(averaging_those_whose_loss_fell(), period)
    seen_losses, *_ = trained(strategy, backend, form, parts=(5, STEPS - 5))
    np.testing.assert_allclose(seen_losses, [*recurrence(period)][-1], rtol=2e-5)


def test_the_loss_passes_through_combinators():
    around = sa.every(averaging_those_whose_loss_fell(), 4)
    for wrap in (
        lambda x: sa.chain(x, sa.reset(optax.sgd(LR))),
        lambda x: sa.masked(x, True),
        lambda x: sa.at_syncs(x, sa.reset(optax.sgd(LR))),
        lambda x: sa.ema(x, 0.5),
        lambda x: sa.until(x, STEPS),
        lambda x: sa.after(x, 0),
        lambda x: sa.delayed(x, 0),
    ):
        around = wrap(around)
        assert around.sees_loss
    seen_losses, *_ = trained(around)
    np.testing.assert_allclose(seen_losses, [*recurrence(4)][-1], rtol=2e-5)


def test_a_vote_may_go_by_the_loss():
    def rose(replica, state, step):
        return replica.loss > 2.0

    metrics = trained(sa.decided(sa.average()._replace(sees_loss=True), rose))[1]
    w = np.zeros(WORKERS)
    expected = []
    for target in TARGETS:
        expected.append(((w - target) ** 2 > 2.0).any())
        w = w - LR * 2 * (w - target)
        w = np.full(WORKERS, w.mean()) if expected[-1] else w
    assert 0 < sum(expected) < STEPS
    np.testing.assert_array_equal(metrics["decided"][:, 0], expected)


def test_a_reduction_may_weigh_gradients_by_the_loss():
    def reduce(grads, replica, state, step):
        weights = collectives.mean(replica.loss)
        mean = collectives.mean(jax.tree.map(lambda g: g * replica.loss, grads))
        return jax.tree.map(lambda g: g / weights, mean), state

    seen_losses, *_ = trained(Strategy(reduce=reduce, sees_loss=True))
    w = 0.0
    for target in TARGETS.astype(float):
        losses = (w - target) ** 2
        grads = 2 * (w - target)
        w -= LR * (losses * grads).sum() / losses.sum()
    np.testing.assert_allclose(seen_losses, w, rtol=1e-5)


def test_it_is_counted_as_without():
    strategy = sa.every(averaging_those_whose_loss_fell(), 4)
    params = {"w": np.zeros((), np.float32)}
    traffic = sa.communication(strategy, params, workers=WORKERS, steps=8)
    assert (traffic.syncs, traffic.calls) == (2, 4)
    trainer = make_trainer(strategy)
    state = trainer.init({"w": jnp.zeros(())})
    assert trainer.communication(state, 8).bytes_per_worker == traffic.bytes_per_worker


def test_it_needs_no_workers():
    strategy = sa.every(averaging_those_whose_loss_fell(), 2)
    optimizer = sa.as_optimizer(strategy, optax.sgd(LR))
    params = {"w": jnp.zeros(())}
    state = optimizer.init(params)
    value, grads = jax.value_and_grad(loss)(params, TARGETS[0])
    with pytest.raises(ValueError, match="value=loss"):
        optimizer.update(grads, state, params)
    for _ in range(2):
        _, state = optimizer.update(grads, state, params, value=value)
    assert jax.tree.leaves(state)[0] == value


def test_what_it_lacks_is_said_where_it_was_not_declared():
    undeclared = averaging_those_whose_loss_fell()._replace(sees_loss=False)
    with pytest.raises(TypeError) as caught:
        trained(undeclared)
    assert "sees_loss=True" in caught.value.__notes__[0]
