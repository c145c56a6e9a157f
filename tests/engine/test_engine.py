"""DataParallel: what it promises whatever the strategy."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.problems.linear import (
    BATCHES,
    DATA,
    ROWS,
    X,
    Y,
    make_params,
    make_trainer,
    plain_loss,
    plain_trainer,
)
from support.tiers import tiers
from support.trees import assert_close, assert_equal

import syncalgos
from syncalgos import Strategy, stateless
from syncalgos._engine.arguments import full_loss


def host(tree):
    return jax.tree.map(np.asarray, tree)


def test_any_split_into_dispatches_gives_the_same_numbers():
    def run_in_dispatches(count):
        trainer = plain_trainer()
        state = trainer.init(make_params())
        losses = []
        for start in range(0, 12, 12 // count):
            rows = slice(start, start + 12 // count)
            part = {name: x[rows] for name, x in BATCHES.items()}
            state, metrics = trainer.run(state, part)
            losses.append(np.asarray(metrics["loss"]))
        assert int(state.step) == 12
        return host((state.replica, state.sync)), np.concatenate(losses)

    one_dispatch = run_in_dispatches(1)
    assert_equal(one_dispatch, run_in_dispatches(3))  # in the middle of periods of 3
    # One step compiles without a loop, and XLA may order its sums otherwise.
    assert_close(one_dispatch, run_in_dispatches(12), rtol=1e-5, atol=1e-6)


def test_a_step_is_a_run_of_one_step_without_its_axis():
    trainer = plain_trainer()
    batch = jax.tree.map(lambda x: x[0], BATCHES)
    one_step_batches = jax.tree.map(lambda x: x[:1], BATCHES)
    state, metrics = trainer.step(trainer.init(make_params()), batch)
    expected, of_run = trainer.run(trainer.init(make_params()), one_step_batches)
    assert metrics["loss"].shape == ()
    assert_equal(metrics["loss"], of_run["loss"][0])
    assert_equal((state.replica, state.step), (expected.replica, expected.step))


def test_a_loss_of_three_arguments_gets_the_key():
    def keyed(params, batch, key):
        return params + batch + key

    def full(params, buffers, batch, key):
        return keyed(params, batch, key), (buffers, {})

    asking = (
        keyed,
        full,
        lambda params, batch, key=None: keyed(params, batch, key),
        lambda params, batch, *, key: keyed(params, batch, key),
        lambda params, batch, k: keyed(params, batch, k),
        lambda params, batch, rng, /: keyed(params, batch, rng),
        lambda params, batch, rng, train=1: keyed(params, batch, rng),
        lambda params, batch, rng=None: keyed(params, batch, rng),
        lambda params, batch, *, rng, train=1: keyed(params, batch, rng),
        lambda params, batch, *, train=1, key=None: keyed(params, batch, key),
        functools.partial(lambda scale, p, b, noise: scale * keyed(p, b, noise), 1),
        lambda params, buffers, batch, key=None: full(params, buffers, batch, key),
        lambda *arguments: full(*arguments),
    )
    keyless_losses = (
        lambda params, batch: params + batch,
        lambda params, batch, key=0: keyed(params, batch, key),  # it has a value
        lambda params, batch, noise=0: keyed(params, batch, noise),
        lambda params, batch, train=None: params + batch,
        lambda params, batch, *, train=None: params + batch,
    )
    for losses, expected in ((asking, 7), (keyless_losses, 3)):
        for loss in losses:
            assert full_loss(loss)(1, "held", 2, 4) == (expected, ("held", {}))


def test_rows_of_placed_data_are_the_batches():
    trainer = plain_trainer()
    a, of_batches = trainer.run(trainer.init(make_params()), BATCHES)
    data = trainer.place(DATA)
    b, of_rows = trainer.run(trainer.init(make_params()), ROWS, data)
    assert_equal((a.replica, of_batches), (b.replica, of_rows))
    assert_equal(trainer.evaluate(a, BATCHES), trainer.evaluate(b, ROWS, data))


def test_worker_trains_on_its_contiguous_slice_on_devices_in_any_order():
    def loss(params, buffers, batch, key):
        return jnp.sum(params["w"]) * 0.0, ({"seen": batch}, {})

    batches = np.arange(2 * 24, dtype=np.float32).reshape(2, 24)
    trainer = make_trainer(workers=6, loss=loss, devices=[2, 0])
    state = trainer.init(make_params(), {"seen": np.zeros(4, np.float32)})
    state, _ = trainer.run(state, batches)
    worker_batches = np.asarray(state.replica.buffers["seen"])
    np.testing.assert_array_equal(worker_batches, batches[1].reshape(2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pmap", "shard_map"])
def test_replicas_live_on_the_chosen_devices_in_their_order(backend):
    chosen = [2, 0]
    trainer = make_trainer(workers=6, backend=backend, devices=chosen)
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    leaves = jax.tree.leaves((state.replica, state.sync))
    assert len(leaves) == 8  # params, momentum, BMUF's center and velocity
    for leaf in leaves:
        shards = {x.index[0].start or 0: x.device.id for x in leaf.addressable_shards}
        assert [shards[row] for row in sorted(shards)] == chosen
    assert {x.id for x in state.step.devices()} == {*chosen}
    center = trainer.center(state).params
    devices = set().union(*(x.devices() for x in center.values()))
    assert [device.id for device in devices] == [chosen[0]]


def test_center_is_one_plain_model_that_can_start_a_run():
    trainer = plain_trainer()
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    center = trainer.center(state)
    assert type(center) is syncalgos.Replica
    assert center.opt_state == ()
    assert {k: v.shape for k, v in center.params.items()} == {"w": (6, 1), "b": (1,)}
    assert center.params["w"].devices() == {jax.devices()[0]}
    assert_equal(center.params["w"], state.sync.center["w"][0, 0])
    again = trainer.init(center.params)
    for worker in np.asarray(again.replica.params["w"]).reshape(4, 6, 1):
        assert_equal(worker, center.params["w"])
    trainer.run(again, BATCHES)
    jax.jit(plain_loss)(center.params, {"x": X, "y": Y})


@pytest.mark.parametrize(("resident", "examples"), [(False, 3), (True, 3), (False, 11)])
def test_evaluate_weighs_examples_that_workers_do_not_divide_as_all_others(
    resident, examples
):
    """By 4 workers, all of which may get too few."""
    trainer = plain_trainer()
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    old_arrays = host((state.replica, state.sync))
    batches = jax.tree.map(lambda x: x[:, :examples], BATCHES)
    data = None
    if resident:
        batches = ROWS[:, :examples]
        data = trainer.place(DATA)
    else:
        batches["empty"] = np.zeros((12, examples, 0))
    metrics = trainer.evaluate(state, batches, data)
    params = trainer.center(state).params
    for step in range(12):
        batch = jax.tree.map(lambda x, i=step: x[i, :examples], BATCHES)
        expected = plain_loss(params, batch)
        np.testing.assert_allclose(metrics["loss"][step], expected, rtol=1e-5)
    assert_equal(old_arrays, (state.replica, state.sync))


def test_evaluate_uses_the_evaluation_loss():
    def twice(params, buffers, batch, key):
        return 2 * plain_loss(params, batch), (buffers, {"hits": batch["x"][:, 0] > 0})

    plain = plain_trainer()
    other = make_trainer(eval_loss=twice)
    states = [t.init(make_params()) for t in (plain, other)]
    once = plain.evaluate(states[0], BATCHES)
    metrics = other.evaluate(states[1], BATCHES)
    np.testing.assert_allclose(metrics["loss"], 2 * once["loss"], rtol=1e-6)
    hits = (BATCHES["x"][..., 0] > 0).reshape(12, 4, 6).mean(1)
    np.testing.assert_allclose(metrics["hits"], hits, rtol=1e-6)


def test_buffers_are_local_in_training_and_averaged_in_the_center():
    def loss(params, buffers, batch, key):
        mean = 0.5 * buffers["mean"] + 0.5 * jnp.mean(batch["x"])
        buffers = {"mean": mean, "count": buffers["count"] + 1}
        return plain_loss(params, batch), (buffers, {"mean": mean})

    trainer = make_trainer(loss=loss)
    buffers = {"mean": np.zeros((), np.float32), "count": np.int32(0)}
    state, metrics = trainer.run(trainer.init(make_params(), buffers), BATCHES)
    slices = BATCHES["x"].reshape(12, 4, 6, 6).mean((2, 3), dtype=np.float64)
    local = np.zeros(4)
    for step in range(12):
        local = 0.5 * local + 0.5 * slices[step]
        np.testing.assert_allclose(metrics["mean"][step], local.mean(), atol=1e-6)
    means = np.asarray(state.replica.buffers["mean"]).reshape(4)
    np.testing.assert_allclose(means, local, atol=1e-6)
    center = trainer.center(state).buffers
    np.testing.assert_allclose(center["mean"], local.mean(), atol=1e-6)
    assert int(center["count"]) == 12


def test_params_that_hold_one_array_twice_are_trained_apart():
    shared = jnp.full((6, 1), 0.1)
    params = {"u": shared, "v": shared}

    def loss(params, batch):
        return jnp.mean(
            (batch["x"] @ (params["u"] - 2 * params["v"]) - batch["y"]) ** 2
        )

    trainer = make_trainer(loss=stateless(loss))
    state, _ = trainer.run(trainer.init(params), BATCHES)
    state, _ = trainer.run(state, BATCHES)
    center = trainer.center(state).params
    assert not np.allclose(center["u"], center["v"])
    np.testing.assert_array_equal(shared, np.full((6, 1), 0.1, np.float32))  # kept


def test_numpy_numbers_as_parameters_widen_nothing():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params())
    half = np.float64(0.5)
    for strategy in (
        syncalgos.bmuf(2, block_momentum=half, block_lr=half),
        syncalgos.diloco(np.int64(2), outer_lr=half, outer_momentum=half),
    ):  # traced step by step: changed dtypes are refused
        assert syncalgos.communication(strategy, params, workers=2, steps=4).syncs == 2


@pytest.mark.parametrize("backend", tiers(["pmap", "shard_map"], slow=["pmap"]))
def test_nothing_is_left_of_a_trainer_that_is_gone(backend):
    def train():
        offset = jnp.zeros(3)  # the user's data, which the loss holds

        def loss(params, batch):
            return plain_loss(params, batch) + jnp.sum(offset)

        trainer = make_trainer(backend=backend, loss=stateless(loss))
        state, _ = trainer.run(trainer.init(make_params()), BATCHES)
        trainer.evaluate(state, BATCHES)
        trainer.center(state)
        with jax.disable_jit():
            trainer.divergence(state)
        return [weakref.ref(x) for x in (loss, offset, trainer)]

    references = train()
    gc.collect()
    assert [x() for x in references] == [None, None, None]


@pytest.mark.slow
def test_a_mesh_that_the_users_program_has_set_changes_nothing():
    def train():
        trainer = make_trainer(backend="shard_map")
        state = trainer.init(jax.tree.map(jnp.asarray, make_params()))
        batches = jax.tree.map(jnp.asarray, BATCHES)
        state, metrics = trainer.run(state, batches)
        state = trainer.from_host(trainer.to_host(state))
        divergence = trainer.divergence(state)
        traffic = repr(trainer.communication(state, 3))
        evaluated = trainer.evaluate(state, batches)
        return (
            host((metrics, evaluated, trainer.center(state).params)),
            divergence,
            traffic,
        )

    expected = train()
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        results = train()
        assert jax.sharding.get_mesh() == mesh
    assert_equal(results[0], expected[0])
    assert results[1:] == expected[1:]


@pytest.mark.slow
def test_negatives_of_all_workers_are_those_of_the_whole_batch():
    """As docs/strategies.md has it: workers add up to one with their batches."""

    def loss(params, batch):
        left_embeddings = batch["x"] @ params["w"]
        other = batch["x"] ** 2 @ params["w"]
        everyone = syncalgos.collectives.gather(other).reshape(-1, other.shape[-1])
        labels = syncalgos.collectives.index() * len(left_embeddings) + jnp.arange(
            len(left_embeddings)
        )
        logits = left_embeddings @ everyone.T
        own_logits = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, 1) - own_logits)

    def train(workers, backend):
        trainer = make_trainer(syncalgos.sync_sgd(), workers, backend, stateless(loss))
        state, metrics = trainer.run(trainer.init(make_params()), BATCHES)
        return metrics["loss"], trainer.center(state).params["w"]

    for mine, whole_batch in zip(train(4, "auto"), train(1, "vmap"), strict=True):
        np.testing.assert_allclose(mine, whole_batch, rtol=1e-4)  # of float32


def test_auto_takes_pmap_where_jax_has_it(monkeypatch):
    if hasattr(jax, "pmap"):
        assert make_trainer(backend="auto").layout.backend == "pmap"
        monkeypatch.delattr(jax, "pmap")
    trainer = make_trainer(backend="auto")
    assert trainer.layout.backend == "shard_map" and "shard_map" in repr(trainer)
    trainer.run(trainer.init(make_params()), BATCHES)
    message = r"^backend 'pmap' is not available: jax .* has no jax\.pmap; use "
    with pytest.raises(ValueError, match=message):
        make_trainer(backend="pmap")


@pytest.mark.parametrize("backend", tiers(["pmap", "shard_map"], ["shard_map"]))
def test_jax_finds_a_nan_and_none_where_all_is_finite(backend):
    with jax.debug_nans(True):
        trainer = make_trainer(backend=backend)
        state, _ = trainer.run(trainer.init(make_params()), BATCHES)
        batches = {"x": BATCHES["x"].copy(), "y": BATCHES["y"]}
        batches["x"][2, 5, 1] = np.nan
        # Its class is private to jax.
        with pytest.raises(Exception, match=r"(?i)\bnan\b"):
            trainer.run(state, batches)


@pytest.mark.slow
def test_debugging_tools_of_jax_work():
    with jax.disable_jit():
        trainer = make_trainer(syncalgos.model_averaging(2), 2, backend="vmap")
        batches = {"x": X[ROWS[:2]], "y": Y[ROWS[:2]]}
        _, metrics = trainer.run(trainer.init(make_params()), batches)
        assert np.isfinite(metrics["loss"]).all()


def check_assessment(trainer, batches=BATCHES):
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    expected = (
        trainer.evaluate(state, batches),
        trainer.center(state),
        trainer.divergence(state),
    )
    assert expected[2] > 0
    assert_equal(host(trainer.assess(state, batches)), host(expected))


@pytest.mark.parametrize("backend", tiers(["pmap", "shard_map", "vmap"], ["shard_map"]))
def test_an_assessment_is_what_three_programs_tell(backend):
    # Its center is that of the last sync, before some local steps.
    strategy = syncalgos.bmuf(5, nesterov=True)
    check_assessment(make_trainer(strategy, backend=backend))


@pytest.mark.slow
def test_batches_that_do_not_divide_are_assessed_too():
    uneven = jax.tree.map(lambda x: x[:, :-1], BATCHES)
    check_assessment(make_trainer(syncalgos.bmuf(5)), uneven)


@pytest.mark.slow
def test_an_assessment_that_was_compiled_before_is_the_one_that_runs():
    trainer = make_trainer(syncalgos.bmuf(3))
    state = trainer.init(make_params())
    data = trainer.place(DATA)
    held_out = ROWS[:2], data
    trainer.compile(state, (ROWS, data), held_out, assesses=True)
    seconds = trainer.compile_seconds
    state, _ = trainer.run(state, ROWS, data)
    trainer.assess(state, *held_out)
    assert trainer.compile_seconds == seconds


@pytest.mark.slow
def test_programs_compiled_side_by_side_are_those_that_run():
    def make_started():
        trainer = make_trainer(syncalgos.bmuf(3))
        return trainer, trainer.init(make_params()), trainer.place(DATA)

    trainer, state, data = make_started()
    held_out = ROWS[:2], data
    trainer.compile(state, (ROWS, data), held_out)
    seconds = trainer.compile_seconds
    state, metrics = trainer.run(state, ROWS, data)
    results = metrics, trainer.evaluate(state, *held_out), trainer.divergence(state)
    assert trainer.compile_seconds == seconds
    trainer, state, data = make_started()
    state, metrics = trainer.run(state, ROWS, data)
    alone = metrics, trainer.evaluate(state, *held_out), trainer.divergence(state)
    assert_equal(results, alone)


def test_nothing_is_compiled_twice():
    compiled = []

    def note(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(event)

    def weakly(replica, state, step):  # a state that comes back weakly typed
        return replica, jax.tree.map(lambda x: jnp.where(step >= 0, 1.0, 0.0), state)

    weak = Strategy(init=lambda params: jnp.float32(0), sync=weakly)
    trainer = make_trainer(syncalgos.chain(syncalgos.bmuf(3), weak))
    params = {"w": jnp.ones((6, 1)), "b": jnp.asarray([0.0])}
    state = trainer.init(params)
    data = trainer.place(DATA)
    for rows in (ROWS, ROWS[:1]):
        state, _ = trainer.run(state, rows, data)
    trainer.evaluate(state, ROWS[:2], data)
    trainer.center(state)
    trainer.divergence(state)
    seconds = trainer.compile_seconds
    jax.monitoring.register_event_duration_secs_listener(note)
    for rows in (ROWS, ROWS[:1], ROWS):
        state, _ = trainer.run(state, rows, data)
        trainer.evaluate(state, ROWS[:2], data)
        trainer.center(state)
        trainer.divergence(state)
    assert compiled == []
    assert trainer.compile_seconds == seconds > 0


@pytest.mark.parametrize("backend", tiers(["pmap", "shard_map"], ["shard_map"]))
def test_many_dispatches_do_not_deadlock(backend):
    """Without throttling, executions in flight abort after 40 s (docs/design.md)."""
    trainer = make_trainer(syncalgos.sync_sgd(), workers=6, backend=backend)
    assert trainer.layout.shape == (3, 2)
    state = trainer.init(make_params())
    data = trainer.place(DATA)
    for _ in range(300):
        state, _ = trainer.run(state, ROWS[:1], data)
    assert int(state.step) == 300


@pytest.mark.parametrize(
    ("workers", "backend", "shape"),
    [
        (1, "pmap", (1, 1)),
        (2, "pmap", (2, 1)),
        (3, "shard_map", (3, 1)),
        (4, "pmap", (2, 2)),
        (7, "pmap", (1, 7)),
        (64, "shard_map", (2, 32)),
        (6, "vmap", (1, 6)),
    ],
)
def test_workers_take_the_most_devices_that_divide_them(workers, backend, shape):
    assert make_trainer(workers=workers, backend=backend).layout.shape == shape


def test_replicas_of_bfloat16_that_are_equal_are_not_apart():
    """Rounded to 8 bits, the mean of 3 equal numbers often is another number."""
    trainer = make_trainer(workers=3, backend="vmap")
    params = {"w": np.linspace(-2, 2, 200, dtype=jnp.bfloat16)}
    assert trainer.divergence(trainer.init(params)) == 0


def first_is_away(step, workers):
    return jnp.arange(workers) > 0


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("workers", tiers([3, 7], [3]))
def test_a_center_has_the_very_buffers_on_which_workers_agree(workers, is_weighted):
    """The mean of 3 or 7 equal numbers may be off in the last place."""
    equal = np.random.default_rng(0).normal(size=100).astype(np.float32)
    buffers = {"equal": equal, "least": np.float32(np.inf), "steps": np.int32(7)}
    strategy = syncalgos.model_averaging(1)
    if is_weighted:
        strategy = syncalgos.participating(strategy, first_is_away)

    def loss(params, buffers, batch, key):
        return jnp.sum((params - jnp.mean(batch)) ** 2), (buffers, {})

    trainer = syncalgos.DataParallel(
        loss, optax.sgd(0.1), strategy, workers=workers, backend="vmap"
    )
    state = trainer.init(equal, buffers)
    state, _ = trainer.run(state, np.arange(workers, dtype=np.float32)[None])
    jax.tree.map(np.testing.assert_array_equal, trainer.center(state).buffers, buffers)
    assert trainer.divergence(state) == 0


def test_a_center_leaves_out_the_buffers_of_a_first_worker_that_is_away():
    strategy = syncalgos.participating(syncalgos.model_averaging(1), first_is_away)

    def loss(params, buffers, batch, key):
        batch_values = jnp.where(batch[0] > 0, batch[0], jnp.nan)
        return jnp.sum(params**2), ({"seen": batch_values}, {})

    trainer = syncalgos.DataParallel(
        loss, optax.sgd(0.1), strategy, workers=3, backend="vmap"
    )
    state = trainer.init(np.ones(2, np.float32), {"seen": np.float32(0)})
    state, _ = trainer.run(state, np.array([[0, 3, 5]], np.float32))
    assert float(trainer.center(state).buffers["seen"]) == 4
