"""Tables sharded by rows over the workers, against whole ones on each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.mapped_workers import over_workers, shard_mapped
from support.problems.two_tables import (
    BATCH,
    BATCHES,
    FIRST_ROWS,
    LR,
    MOMENTUM,
    OPTIMIZER,
    PERIOD,
    ROWS,
    START,
    STEPS,
    STRATEGIES,
    TABLES,
    make,
)
from support.tiers import tiers
from support.trees import assert_close

import syncalgos as sa

pytestmark = pytest.mark.usefixtures("float64")

CLEARLY = 1e-3


def take(table, ids):
    return table[ids]


def gradient(params, batch):
    """The loss and its gradient, by hand in NumPy."""
    first, second, target = batch
    words = params["words"]
    pair = words[first] * words[second]
    kernel = params["rest"]["kernel"]
    output = pair @ kernel + params["rest"]["bias"] + params["scale"][first]
    error = (output - target) / len(target)
    grads = jax.tree.map(np.zeros_like, params)
    np.add.at(grads["words"], first, error[:, None] * words[second] * kernel)
    np.add.at(grads["words"], second, error[:, None] * words[first] * kernel)
    np.add.at(grads["scale"], first, error)
    grads["rest"] = {"bias": error.sum(), "kernel": error @ pair}
    return np.mean((output - target) ** 2) / 2, grads


def mean(trees):
    return jax.tree.map(lambda *xs: np.mean(xs, axis=0), *trees)


def literal(rule, workers):
    """Tables stepped along the mean gradient at each step, the rest as the rule says.

    Returns:
        The center and the workers' rests after STEPS, and each step's loss.
    """
    tables = {name: START[name] for name in ("scale", "words")}
    rests = [START["rest"]] * workers
    center = START["rest"]
    block = jax.tree.map(np.zeros_like, START["rest"])
    table_velocity = jax.tree.map(np.zeros_like, tables)
    rest_velocities = jax.tree.map(np.zeros_like, rests)
    losses = []

    def heavy_ball(velocity, grads):
        return jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)

    def stepped(params, velocity):
        return jax.tree.map(lambda x, v: x - LR * v, params, velocity)

    for step, batch in enumerate(zip(*BATCHES, strict=True)):
        parts = zip(*(np.split(x, workers) for x in batch), strict=True)
        models = [{**tables, "rest": rest} for rest in rests]
        gradients = [gradient(*x) for x in zip(models, parts, strict=True)]
        losses.append(np.mean([loss for loss, _ in gradients]))
        grads = [grads for _, grads in gradients]
        mean_grads = mean(grads)
        table_grads = {name: mean_grads[name] for name in tables}
        table_velocity = heavy_ball(table_velocity, table_grads)
        rest_velocities = heavy_ball(rest_velocities, [g["rest"] for g in grads])
        tables = stepped(tables, table_velocity)
        rests = stepped(rests, rest_velocities)
        if (step + 1) % PERIOD == 0:
            if rule == "bmuf":  # Δ ← μ Δ + mean(θ) - w;   w ← w + Δ
                block = jax.tree.map(
                    lambda d, x, w: 0.5 * d + x - w, block, mean(rests), center
                )
                center = jax.tree.map(np.add, center, block)
            else:
                center = mean(rests)
            rests = [center] * workers
            if rule == "reset":
                rest_velocities = jax.tree.map(np.zeros_like, rest_velocities)
    return {**tables, "rest": center}, rests, losses


def train(trainer):
    """Returns the state, the metrics and the center, after two dispatches."""
    state = trainer.init(START)
    losses = []
    for start in (0, STEPS // 2):
        part = [x[start : start + STEPS // 2] for x in BATCHES]
        state, metrics = trainer.run(state, tuple(part))
        losses.extend(metrics["loss"])
    return state, np.array(losses), trainer.center(state).params


@pytest.mark.parametrize(
    ("name", "backend", "parts"),
    [
        ("bmuf", "pmap", 3),
        pytest.param("reset", "shard_map", 1, marks=pytest.mark.slow),
    ],
)
def test_tables_step_synchronously_beside_what_the_strategy_does(name, backend, parts):
    trainer = make(STRATEGIES[name], backend=backend, accumulate=parts)
    state, losses, center = train(trainer)
    expected, rests, expected_losses = literal(name, workers=4)
    assert_close((center, losses), (expected, np.array(expected_losses)))
    worker_params = jax.tree.map(
        lambda x: x.reshape(4, *x.shape[2:]), state.replica.params
    )
    assert_close(worker_params["rest"], jax.tree.map(lambda *xs: np.stack(xs), *rests))
    assert_close(worker_params["words"], np.split(expected["words"], 4))
    assert np.abs(center["words"] - START["words"]).max() > CLEARLY
    evaluated = [gradient(center, batch)[0] for batch in zip(*BATCHES, strict=True)]
    assert_close(trainer.evaluate(state, BATCHES)["loss"], np.array(evaluated))


@pytest.mark.slow
def test_center_is_the_strategys_own_between_syncs():
    """BMUF's center is the last sync's; the tables are the last step's."""
    state, _, center = train(make(sa.bmuf(STEPS + 1), workers=2))
    assert_close(center["rest"], START["rest"])
    words = np.asarray(state.replica.params["words"])
    np.testing.assert_array_equal(center["words"], words.reshape(ROWS, 3))


def test_each_worker_holds_its_rows_only():
    state = make(sa.bmuf(PERIOD), optimizer=optax.adam(0.1)).init(START)
    words = np.asarray(state.replica.params["words"])
    np.testing.assert_array_equal(words.reshape(ROWS, 3), START["words"])
    moments = state.replica.opt_state[0]
    for tree in (state.replica.params, moments.mu, moments.nu):
        assert tree["words"].shape == (1, 4, ROWS // 4, 3)
        assert tree["scale"].shape == (1, 4, ROWS // 4)
        assert tree["rest"]["kernel"].shape == (1, 4, 3)
    of_strategy = jax.tree.leaves(state.sync)  # w and Δ of the rest
    assert sorted(x.shape for x in of_strategy) == [(1, 4)] * 2 + [(1, 4, 3)] * 2


@pytest.mark.slow
def test_divergence_is_that_of_what_has_replicas():
    trainer = make(sa.Strategy())
    state, *_ = train(trainer)
    worker_rests = jax.tree.map(
        lambda x: np.reshape(x, (4, -1)), state.replica.params["rest"]
    )
    vectors = np.concatenate(jax.tree.leaves(worker_rests), axis=1)
    distances = vectors - vectors.mean(0)
    expected = np.sqrt(np.mean(np.sum(distances**2, axis=1)))
    assert expected > CLEARLY
    assert_close(trainer.divergence(state), expected)


def test_a_model_of_tables_alone_leaves_nothing_to_the_strategy():
    def loss(params, batch):
        return jnp.mean((sa.lookup(params["scale"], batch[0]) - batch[2]) ** 2)

    trainer = sa.DataParallel(
        sa.stateless(loss), OPTIMIZER, sa.bmuf(PERIOD), workers=4, tables=True
    )
    state = trainer.init({"scale": START["scale"]})
    state, _ = trainer.run(state, tuple(x[:1] for x in BATCHES))
    expected = START["scale"].copy()
    error = START["scale"][FIRST_ROWS[0]] - BATCHES[2][0]
    np.add.at(expected, FIRST_ROWS[0], -LR * 2 * error / BATCH)
    assert_close(trainer.center(state).params["scale"], expected)
    assert trainer.divergence(state) == 0
    assert trainer.communication(state, STEPS).bytes_per_worker == 0


def test_what_is_sent_for_tables_is_none_of_the_strategys():
    replicated_trainer = make(sa.sync_sgd(), look=take, tables=None)
    parts = make(sa.sync_sgd())
    traffic = [t.communication(t.init(START), 3) for t in (replicated_trainer, parts)]
    ring = 2 * 3 / 4 * 8  # bytes that one of four sends of each number
    assert traffic[0].bytes_per_worker == 3 * ring * (4 + 4 * ROWS)
    assert traffic[1].bytes_per_worker == 3 * ring * 4


@pytest.mark.slow
def test_averages_of_opt_state_do_not_mix_rows():
    """Under synchronous SGD the moments of the rest agree: their mean is no change."""
    optimizer = optax.adam(0.1)
    averaging = sa.chain(sa.sync_sgd(), sa.every(sa.average("opt_state"), PERIOD))
    plain = train(make(sa.sync_sgd(), optimizer=optimizer))[2]
    assert_close(train(make(averaging, optimizer=optimizer))[2], plain)


ROWS_TOGETHER = {
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(0.1),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(1e9), OPTIMIZER),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(1e9), OPTIMIZER),
    "second step": optax.chain(
        optax.clip_by_block_rms(1e9), optax.apply_every(2), OPTIMIZER
    ),
    "muon": optax.contrib.muon(0.1),
}


@pytest.mark.parametrize("name", tiers(ROWS_TOGETHER, ["clip_by_block_rms", "muon"]))
def test_optimizers_that_take_rows_together_are_refused(name):
    """Each worker would take those of its own part together."""
    optimizer = ROWS_TOGETHER[name]
    with pytest.raises(ValueError, match="tables: the step of a row of params"):
        make(sa.sync_sgd(), optimizer=optimizer).init(START)
    make(sa.sync_sgd(), optimizer=optimizer, workers=1).init(START)
    make(sa.sync_sgd(), optimizer=optimizer, look=take, tables=None).init(START)


def test_an_optimizer_may_take_the_rest_together():
    parts = {"tables": OPTIMIZER, "rest": optax.lamb(0.1)}
    optimizer = optax.multi_transform(
        parts, {**dict.fromkeys(START, "tables"), "rest": "rest"}
    )
    make(sa.sync_sgd(), optimizer=optimizer).init(START)


def by_name(params):
    return {name: name != "rest" for name in params}


@pytest.mark.parametrize("mask", [by_name, {**TABLES, "scale": np.True_}], ids=[0, 1])
def test_masks_may_be_functions_and_numpy_booleans(mask):
    trainer = make(sa.sync_sgd(), tables=mask)
    assert trainer.init(START).replica.params["words"].shape == (1, 4, 3, 3)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize(("backend", "workers"), [("pmap", 4), ("shard_map", 1)])
def test_lookup_is_the_rows_of_the_table_bit_for_bit(backend, workers):
    """Tables of any shape and dtype, with zeros of both signs and values not finite."""
    rng = np.random.default_rng(0)
    tables = {}
    for dtype, shape in zip(DTYPES, [(), (3,), (2, 2), (1,)], strict=True):
        values = rng.normal(size=(ROWS, *shape))
        values[:4] = np.array([-0.0, 0, np.nan, -np.inf]).reshape(4, *[1] * len(shape))
        tables[dtype] = np.asarray(jnp.asarray(values, dtype))
    requests = {
        "none": np.zeros((workers, 0), int),
        "one": rng.integers(0, ROWS, workers),
        "many": rng.integers(0, ROWS, (workers, 5, 4)).astype(np.uint8),
    }

    def program(inputs):
        parts, requests = inputs
        rows_by_dtype = []
        for dtype in DTYPES:
            part = parts[dtype]
            rows = {name: sa.lookup(part, ids) for name, ids in requests.items()}
            rows_by_dtype.append(rows)
        return rows_by_dtype

    parts = {d: np.stack(np.split(x, workers)) for d, x in tables.items()}
    inputs = parts, requests
    rows_by_dtype = over_workers(program, inputs, backend, min(workers, 2))
    for dtype, rows in zip(DTYPES, rows_by_dtype, strict=True):
        for name, ids in requests.items():
            expected = tables[dtype][ids]
            assert rows[name].dtype == expected.dtype
            np.testing.assert_array_equal(bits(rows[name]), bits(expected))


def test_rows_outside_of_the_table_are_nan_and_take_no_gradient():
    ids = np.array([[-1, 0], [ROWS, ROWS - 1], [-ROWS, 5], [10**6, 5]])
    parts = np.split(START["words"], 4)

    def program(inputs):
        part, ids = inputs
        rows, pullback = jax.vjp(lambda part: sa.lookup(part, ids), part)
        return rows, pullback(jnp.ones_like(rows))[0]

    rows, grads = over_workers(program, (np.stack(parts), ids), "vmap", 1)
    assert np.isnan(rows[:, 0]).all()
    np.testing.assert_array_equal(rows[:, 1], START["words"][ids[:, 1]])
    expected = np.zeros((ROWS, 3))
    np.add.at(expected, ids[:, 1], 1 / 4)
    np.testing.assert_array_equal(grads.reshape(ROWS, 3), expected)


def mean_loss(words, kernels, batch):
    """A loss of no symmetry, of all workers, from the whole table, in NumPy."""
    rows = words[batch[0]] * np.sin(words[batch[1]])  # (workers, batch, 3)
    return np.mean((np.einsum("wbd,wd->wb", rows, kernels) - batch[2]) ** 3)


def loss_gradient(axis):
    """One worker's gradient of its own loss with respect to its part of the table."""

    def program(inputs):
        part, kernel, first, second, target = inputs

        def loss(part):
            rows = sa.lookup(part, first, axis=axis) * jnp.sin(
                sa.lookup(part, second, axis=axis)
            )
            return jnp.mean((rows @ kernel - target) ** 3)

        return jax.grad(loss)(part)

    return program


def gradient_problem(workers):
    kernels = np.random.default_rng(1).normal(size=(workers, 3))
    batch = [x[0].reshape(workers, -1) for x in BATCHES]
    parts = np.stack(np.split(START["words"], workers))
    expected = np.zeros((ROWS, 3))
    step = 1e-5
    for entry in np.ndindex(ROWS, 3):
        change = np.zeros((ROWS, 3))
        change[entry] = step
        above = mean_loss(START["words"] + change, kernels, batch)
        below = mean_loss(START["words"] - change, kernels, batch)
        expected[entry] = (above - below) / (2 * step)
    return (parts, kernels, *batch), expected


# Central differences: the square of the step, 1e-10, and rounding by it, 1e-16 / 1e-5.
BY_DIFFERENCES = 1e-8


@pytest.mark.parametrize(("backend", "devices"), [("pmap", 2), ("vmap", 1)])
def test_gradient_is_that_of_the_mean_loss_by_finite_differences(backend, devices):
    inputs, expected = gradient_problem(4)
    grads = over_workers(loss_gradient(sa.WORKERS), inputs, backend, devices)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(grads.reshape(ROWS, 3), expected, atol=BY_DIFFERENCES)


@pytest.mark.parametrize("mapped", [jax.vmap, shard_mapped])
def test_lookup_works_over_an_axis_of_ones_own(mapped):
    inputs, expected = gradient_problem(3)
    grads = jax.jit(mapped(loss_gradient("batch"), axis_name="batch"))(inputs)
    np.testing.assert_allclose(grads.reshape(ROWS, 3), expected, atol=BY_DIFFERENCES)
