"""Gradients accumulated over microbatches are those of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.commands import ROOT
from support.placements import placed
from support.problems.linear import (
    BATCHES,
    DATA,
    ROWS,
    make_params,
    make_trainer,
    plain_loss,
    to_float64,
)
from support.trees import assert_close

import syncalgos

pytestmark = pytest.mark.usefixtures("float64")

EXAMPLES = 24 // 4  # of a worker, in batches of 24


def loss(params, buffers, batch, key):
    """With a buffer that adds up over examples, and a metric with weights."""
    value = plain_loss(params, batch)
    weighted = jnp.mean(batch["x"][:, 0] ** 2 * (batch["y"][:, 0] > 0))
    input_sums = buffers["seen"] + jnp.sum(batch["x"], axis=0)
    metrics = {"weighted": weighted, "each": jnp.mean(batch["x"], axis=0)}
    return value, ({"seen": input_sums}, metrics)


def train(optimizer, resident, **options):
    """Returns the center, all replicas and the metrics of 12 steps, and evaluation."""
    trainer = syncalgos.DataParallel(
        loss, optimizer, syncalgos.bmuf(3), workers=4, **placed(options)
    )
    state = trainer.init(to_float64(make_params()), {"seen": np.zeros(6)})
    batches = to_float64(BATCHES)
    data = None
    if resident:
        batches = ROWS
        data = trainer.place(to_float64(DATA))
    state, metrics = trainer.run(state, batches, data)
    evaluated = trainer.evaluate(state, batches, data)
    return trainer.center(state), state.replica, metrics, evaluated


@pytest.mark.parametrize(
    ("resident", "optimizer", "parts"),
    [
        pytest.param(False, optax.adam(0.05), EXAMPLES, marks=pytest.mark.slow),
        (True, optax.sgd(0.05, momentum=0.9), 2),
    ],
    ids=["batches", "rows"],
)
def test_microbatches_give_the_result_of_the_whole_batch(resident, optimizer, parts):
    unsplit_result = train(optimizer, resident)
    assert_close(train(optimizer, resident, accumulate=parts), unsplit_result)


def test_microbatches_are_consecutive_and_hand_buffers_on():
    def smoothed(params, buffers, batch, key):
        mean = 0.5 * buffers["mean"] + 0.5 * jnp.mean(batch["x"])
        return plain_loss(params, batch), ({"mean": mean}, {"mean": mean})

    trainer = make_trainer(loss=smoothed, accumulate=3)
    state = trainer.init(to_float64(make_params()), {"mean": np.zeros(())})
    state, metrics = trainer.run(state, to_float64(BATCHES))

    means = BATCHES["x"].astype(float).reshape(12, 4, 3, 2, 6).mean((-1, -2))
    mean = np.zeros(4)
    running_means = []  # of each worker
    for step in range(12):
        for microbatch in range(3):
            mean = 0.5 * mean + 0.5 * means[step, :, microbatch]
            running_means.append(mean.mean())
    assert_close(np.reshape(state.replica.buffers["mean"], 4), mean)
    assert_close(metrics["mean"], np.reshape(running_means, (12, 3)).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "k"),
    [pytest.param("pmap", 1, marks=pytest.mark.slow), ("shard_map", 2)],
)
def test_each_worker_step_and_microbatch_draws_from_its_own_key(backend, k):
    """The key of the step itself, where there is one microbatch."""

    def drawing(params, buffers, batch, key):
        drawn = jnp.roll(buffers["drawn"], -1).at[-1].set(jax.random.uniform(key))
        return jnp.sum(params["w"]) * 0.0, ({"drawn": drawn}, {})

    trainer = make_trainer(backend=backend, loss=drawing, accumulate=k)
    other, state = (
        trainer.init(make_params(), {"drawn": np.zeros(2 * k)}, seed) for seed in (6, 5)
    )
    of_run = state.key
    assert of_run != other.key
    state, _ = trainer.run(state, to_float64(BATCHES["y"][:2]))
    drawn = np.reshape(state.replica.buffers["drawn"], (4, 2, k))
    for worker in range(4):
        for step in range(2):
            of_step = jax.random.fold_in(jax.random.fold_in(of_run, step), worker)
            keys = [jax.random.fold_in(of_step, i) for i in (0, 1)]
            keys = [of_step] if k == 1 else keys
            expected = [jax.random.uniform(key) for key in keys]
            np.testing.assert_array_equal(drawn[worker, step], expected)


def test_gradients_of_short_floats_are_summed_in_float32():
    """In bfloat16, 1 + 2^-8 is 1: the small gradients would be lost."""

    def linear(params, batch):
        return jnp.mean(batch * params["w"])

    grads = jnp.array([[1, 2**-8, 2**-8, 0]], jnp.bfloat16)
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(linear),
        optax.sgd(1.0),
        syncalgos.sync_sgd(),
        workers=1,
        accumulate=4,
    )
    state, _ = trainer.run(trainer.init({"w": jnp.zeros((), jnp.bfloat16)}), grads)
    moved = trainer.center(state).params["w"]
    assert moved.dtype == jnp.bfloat16
    assert float(moved) == -(1 + 2**-7) / 4


PAGE = (ROOT / "docs" / "from-flax-and-optax.md").read_text()


def draw_masks(rng):
    """Five tokens an example, of which 0 to 5 count."""
    return (np.arange(5) < rng.integers(0, 6, (3, 24, 1))).astype(float)


def draw_sparse_masks(rng):
    """One token in 20: most microbatches have less than one for each worker."""
    return (rng.random((3, 24, 5)) < 0.05).astype(float)


def draw_small_weights(rng):
    """Weights up to 0.01: those of a worker's whole batch add up to less than 1."""
    return rng.random((3, 24, 5)) * 0.01


@pytest.mark.parametrize(
    ("draw_weights", "microbatches"),
    [
        (draw_masks, 3),
        (draw_sparse_masks, 6),
        (draw_small_weights, 1),
        pytest.param(draw_small_weights, 3, marks=pytest.mark.slow),
    ],
)
def test_tokens_weigh_the_same_over_workers_and_microbatches(
    draw_weights, microbatches
):
    """By the loss on the page, as one gradient over all tokens of the batch."""
    section = PAGE.partition("## Losses weighted by tokens")[2]
    page = {}
    exec(section.partition("```python\n")[2].partition("```")[0], page)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 24, 5, 6))
    y = rng.normal(size=(3, 24, 5))
    weights = draw_weights(rng)
    weights[:, :4] = 0  # two thirds of the first worker's examples
    trainer = syncalgos.DataParallel(
        page["loss"],
        optax.sgd(0.05),
        syncalgos.sync_sgd(),
        workers=4,
        accumulate=microbatches,
    )
    state, metrics = trainer.run(
        trainer.init(np.zeros(6)), {"x": x, "y": y, "mask": weights}
    )

    params = np.zeros(6)
    for step in range(3):
        differences = x[step] @ params - y[step]
        total = weights[step].sum()
        assert_close(
            metrics["loss"][step], (weights[step] * differences**2).sum() / total
        )
        grads = 2 * np.einsum("et,et,etf->f", weights[step], differences, x[step])
        params = params - 0.05 * grads / total
    assert_close(trainer.center(state).params, params)
    assert_close(metrics["microbatch_weight"], weights.sum((1, 2)) / 4)


def memory_of_training(**options):
    """Temporary bytes of the compiled program: a wide layer's activations."""

    def wide_layer(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["in"]) @ params["out"])

    trainer = syncalgos.DataParallel(
        *(wide_layer, optax.sgd(0.1), syncalgos.sync_sgd()),
        **placed({"workers": 2, "backend": "vmap", **options}),
    )
    state = trainer.init({"in": np.ones((4, 256)), "out": np.ones(256)})
    trainer.run(state, np.zeros((2, 512), int), trainer.place(np.ones((3, 4))))
    return trainer.temp_bytes or 0


@pytest.mark.slow
def test_microbatches_take_less_memory():
    """Though their rows are gathered from data on the device."""
    whole_batch_bytes = memory_of_training()
    activations = 512 * 256 * 8  # of one layer, all workers
    assert whole_batch_bytes > activations
    assert memory_of_training(accumulate=8) < whole_batch_bytes / 4
