"""The forms in which a device runs its lanes: all give the same numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.problems.linear import (
    BATCHES,
    DATA,
    ROWS,
    make_params,
    make_trainer,
    plain_loss,
    to_float64,
)
from support.requirements import make
from support.tiers import tiers
from support.trees import assert_close

import syncalgos
from syncalgos import per_example, stateless
from syncalgos._engine.lanes import groups, selection
from syncalgos._engine.losses import is_per_example

pytestmark = pytest.mark.usefixtures("float64")

SLOW = pytest.mark.slow
RTOL = 1e-12  # of float64: sums in another order

# Rounds of every kind: with a velocity, with workers that rest, of fragments, between
# peers, with residuals, and ended by a vote.
IN_TURN = {
    "bmuf": "pmap",
    "fedavg": "vmap",
    "streaming_diloco": "shard_map",
    "noloco": "pmap",
    "sparseloco": "vmap",
    "dynamic_averaging": "shard_map",
}


PARAMS = to_float64(make_params())
WIDE_BATCHES = to_float64(BATCHES)


def drawing(params, buffers, batch, key):
    """A loss with all that one may have: a key, buffers and metrics."""
    noise = jax.random.normal(key, batch["y"].shape)
    error = batch["x"] @ params["w"] + params["b"] - batch["y"] + 0.1 * noise
    buffers = {"seen": buffers["seen"] + 1, "last": jnp.mean(error)}
    return jnp.mean(error**2), (buffers, {"error": jnp.mean(jnp.abs(error))})


def values(params, buffers, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return {"loss": error[:, 0] ** 2, "error": jnp.abs(error[:, 0])}, buffers


def train(
    strategy,
    ends=(12,),
    loss=None,
    buffers=(),
    batches=WIDE_BATCHES,
    data=None,
    **options,
):
    """Returns the trainer, the last state and the metrics of all steps."""
    trainer = make_trainer(strategy, loss=loss, **options)
    state = trainer.init(PARAMS, buffers)
    reported = []
    data = data and trainer.place(data)
    for start, end in zip((0, *ends), ends, strict=False):
        part = jax.tree.map(lambda x, a=start, b=end: x[a:b], batches)
        state, metrics = trainer.run(state, part, data)
        reported.append(metrics)
    return trainer, state, jax.tree.map(lambda *x: np.concatenate(x), *reported)


def assert_same(mine, expected, rtol=RTOL):
    assert_close(mine._replace(key=()), expected._replace(key=()), rtol, atol=1e-13)


def choose_lane_form(
    strategy, loss=None, buffers=(), params=PARAMS, batches=WIDE_BATCHES, **options
):
    """The form that is chosen: local steps are traced and not compiled."""
    trainer = make_trainer(strategy, loss=loss, backend="shard_map", **options)
    trainer.lower(params, batches, buffers)
    return trainer.lane_form


@pytest.mark.parametrize(
    "name", tiers(IN_TURN, slow=["bmuf", "streaming_diloco", "dynamic_averaging"])
)
def test_sequential_lanes_are_vectorized_ones(name):
    options = {"loss": drawing, "buffers": BUFFERS, "backend": IN_TURN[name]}
    trained = [
        train(make(name), (6, 12), **options, lane_form=form)
        for form in ("vectorized", "sequential")
    ]

    (_, vectorized, reported), (_, sequential, sequential_metrics) = trained
    assert_same(sequential, vectorized)
    for metric, expected in reported.items():
        np.testing.assert_allclose(sequential_metrics[metric], expected, RTOL)


@pytest.mark.parametrize(
    ("backend", "accumulate"), [("pmap", 3), pytest.param("shard_map", 1, marks=SLOW)]
)
def test_merged_lanes_are_vectorized_ones(backend, accumulate):
    options = {"backend": backend, "accumulate": accumulate, "each_worker": True}
    train_lanes = partial(train, syncalgos.sync_sgd(), **options)
    per_example_loss = per_example(values)
    _, expected, reported = train_lanes(loss=per_example_loss, lane_form="vectorized")
    trainer, mean_state, mean_metrics = train_lanes(
        loss=stateless(plain_loss), lane_form="merged"
    )
    _, example_state, example_metrics = train_lanes(
        loss=per_example_loss, lane_form="merged", batches=ROWS, data=to_float64(DATA)
    )

    for state in (mean_state, example_state):
        assert_same(state, expected)
    assert reported["worker_loss"].shape == (12, 4)
    for metric in reported:  # of examples, each worker's own are known
        np.testing.assert_allclose(example_metrics[metric], reported[metric], RTOL)
    np.testing.assert_allclose(reported["worker_loss"].mean(1), reported["loss"], RTOL)
    assert np.ptp(reported["worker_loss"], axis=1).min() > 0
    # Of a scalar, those of a device's lanes.
    lanes = 4 // trainer.layout.shape[0]
    devices = reported["worker_loss"].reshape(12, -1, lanes).mean(2)
    np.testing.assert_allclose(
        mean_metrics["worker_loss"], np.repeat(devices, lanes, 1), RTOL
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "accumulate", "loss"),
    [
        pytest.param(1, 1, stateless(plain_loss), marks=SLOW),
        (2, 3, per_example(values)),
    ],
    ids=["plain", "microbatches of examples"],
)
def test_groups_of_merged_lanes_are_vectorized_ones(
    group, accumulate, loss, monkeypatch
):
    monkeypatch.setattr(groups, "choose_group_size", lambda *arguments: group)
    options = {"backend": "vmap", "accumulate": accumulate, "loss": loss}
    options["each_worker"] = is_per_example(loss)
    (_, expected, reported), (trainer, state, merged_metrics) = (
        train(syncalgos.sync_sgd(), lane_form=form, **options)
        for form in ("vectorized", "merged")
    )
    assert trainer._compiled._group_lanes == group
    assert_same(state, expected)
    for metric in reported:
        np.testing.assert_allclose(merged_metrics[metric], reported[metric], RTOL)


@pytest.mark.parametrize(
    ("width", "examples", "expected"),
    # In float64 a lane computes 3 × 8 × width × examples bytes, 0.8 kB, 154 and 3.1 MB.
    # Its weights, 2 × 8 × width², take 4.2 MB in the last case: 5.3 lanes have four
    # times as much, and of the divisors of 12 the nearest is 6.
    [(8, 4, 12), (64, 100_000, 1), (512, 256, 6)],
    ids=["small", "large", "heavy"],
)
def test_groups_fill_the_caches_and_outweigh_the_weights(width, examples, expected):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) @ w)

    w = jax.ShapeDtypeStruct((width, width), float)
    inputs = [jax.ShapeDtypeStruct((n * examples, width), float) for n in (1, 12)]
    passes = [jax.make_jaxpr(loss)(w, x).jaxpr for x in inputs]
    assert groups.choose_group_size(*passes, 12, w) == expected


def talking(params, batch):
    return plain_loss(params, batch) + syncalgos.collectives.mean(params["w"][0, 0])


BUFFERS = {"seen": np.zeros((), int), "last": np.zeros(())}


SEEING = syncalgos.sync_sgd()._replace(sees_loss=True)


def talking_values(params, buffers, batch, key):
    loss_values, buffers = values(params, buffers, batch, key)
    return {"loss": loss_values["loss"] + talking(params, batch)}, buffers


def drawn_values(params, buffers, batch, key):
    loss_values, buffers = values(params, buffers, batch, key)
    return {"loss": loss_values["loss"] * jax.random.bernoulli(key)}, buffers


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"loss": per_example(values)}, "merged"),
        ({"loss": per_example(values), "each_worker": True}, "merged"),
        ({"loss": per_example(values), "buffers": BUFFERS}, "vectorized"),
        ({"loss": per_example(drawn_values)}, "vectorized"),
        ({"loss": per_example(talking_values)}, "vectorized"),
        ({"loss": per_example(talking_values), "workers": 1}, "vectorized"),
        ({"loss": per_example(values), "strategy": SEEING}, "vectorized"),
        ({}, "vectorized"),
    ],
    ids=[
        *("per example", "each worker", "own buffers", "own key", "talking"),
        *("one that talks", "own loss", "not said to be a mean"),
    ],
)
def test_gradients_are_merged_where_nothing_depends_on_it(options, form):
    assert choose_lane_form(**{"strategy": syncalgos.sync_sgd()} | options) == form


def error(params, batch):
    return batch["x"] @ params["w"] + params["b"] - batch["y"]


def masked(params, batch):
    return jnp.mean(error(params, batch) ** 2, where=batch["x"][:, :1] > -1)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


MEANS = {
    "terms": (jax.jit(lambda p, b: plain_loss(p, b) + jnp.sum(p["w"] ** 2) + 3), RTOL),
    "short floats": (
        lambda p, b: jnp.mean(error(p, b).astype(jnp.bfloat16) ** 2),
        0.05,
    ),
}
# The words say which of the two numbers differs.
NO_MEANS = {
    "weighted by its batch": (masked, "their mean"),
    "clipped": (
        lambda p, b: plain_loss(jax.tree.map(clipped, p), b),
        "its gradient differs",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "rtol"), MEANS.values(), ids=MEANS)
def test_losses_said_to_be_means_are_merged(loss, rtol):
    options = {"loss": stateless(loss), "ends": (4,)}
    trainer, state, _ = train(syncalgos.sync_sgd(), lane_form="merged", **options)
    assert trainer.lane_form == "merged"
    assert_same(state, train(syncalgos.sync_sgd(), **options)[1], rtol)


@pytest.mark.parametrize(("loss", "words"), NO_MEANS.values(), ids=NO_MEANS)
def test_losses_wrongly_said_to_be_means_are_refused(loss, words):
    options = {"loss": stateless(loss), "ends": (4,), "backend": "vmap"}
    message = (
        f"lane_form cannot be 'merged': the loss is no mean .* 4 workers .*{words}"
    )
    with pytest.raises(ValueError, match=message):
        train(syncalgos.sync_sgd(), lane_form="merged", **options)


def normed_values(params, buffers, batch, key):
    """A batch norm without running statistics."""
    errors = error(params, batch)[:, 0]
    return {"loss": ((errors - errors.mean()) / (errors.std() + 1)) ** 2}, buffers


def test_values_that_depend_on_other_examples_are_refused():
    trainer = make_trainer(
        *(syncalgos.sync_sgd(), 4, "vmap", per_example(normed_values)), accumulate=3
    )
    state = trainer.init(PARAMS)
    message = r"^per_example: the loss is no mean .*; use lane_form='vectorized'$"
    for _ in range(2):  # the state was not given up
        with pytest.raises(ValueError, match=message):
            trainer.run(state, WIDE_BATCHES)


@pytest.mark.slow
def test_a_mean_is_checked_once(monkeypatch):
    checked = []
    check = selection.check_mean
    monkeypatch.setattr(
        selection, "check_mean", lambda *x: (checked.append(x), check(*x))
    )
    train(syncalgos.sync_sgd(), (2, 6, 12), per_example(values), devices=[0])
    assert len(checked) == 1
    train(syncalgos.sync_sgd(), (2,), per_example(values), workers=2)  # of one lane
    train(syncalgos.bmuf(3), (2,), per_example(normed_values))  # not merged
    assert len(checked) == 1


def test_a_loss_that_is_not_finite_is_no_reason_to_refuse():
    bad = WIDE_BATCHES | {"y": np.full_like(WIDE_BATCHES["y"], np.nan)}
    trainer, _, reported = train(
        syncalgos.sync_sgd(), (2,), per_example(values), batches=bad
    )
    assert trainer.lane_form == "merged" and np.isnan(reported["loss"]).all()


def test_replicas_that_differ_are_not_merged():
    diverged_state = train(syncalgos.model_averaging(100))[1]._replace(sync=())
    expected = None
    for form in ("vectorized", None):
        trainer = make_trainer(
            syncalgos.sync_sgd(), loss=per_example(values), lane_form=form
        )
        state = jax.tree.map(jnp.copy, diverged_state._replace(key=()))._replace(
            key=diverged_state.key
        )
        state = state._replace(sync=trainer.init(PARAMS).sync)
        for _ in range(2):  # that they differed is known the next time, too
            state, _ = trainer.run(state, WIDE_BATCHES)
            assert trainer.lane_form == "vectorized"
        expected = expected or state
    assert_same(state, expected)
    assert np.ptp(np.asarray(state.replica.params["w"]), axis=(0, 1)).max() > 1e-3


LARGE = {
    "params": {"w": np.zeros((150, 150)), "b": np.zeros(150)},
    "batches": {name: np.ones((4, 8, 150)) for name in "xy"},
    "devices": [0],
}


@pytest.mark.parametrize(("lanes", "expected"), [(2, "vectorized"), (8, "sequential")])
def test_large_steps_are_sequential_and_small_ones_vectorized(lanes, expected):
    assert choose_lane_form(syncalgos.bmuf(2), workers=lanes, **LARGE) == expected


def plain_functions():
    """Model averaging by functions that no combinator made."""
    strategy = syncalgos.model_averaging(2)
    return syncalgos.Strategy(
        partial(strategy.init),
        lambda grads, replica, state, step: (grads, state),
        partial(strategy.sync),
        partial(strategy.center),
        lambda step: (step + 1) % 2 == 0,
    )


@pytest.mark.slow
def test_plain_functions_that_say_when_they_act_run_as_the_librarys():
    (_, state, _), (_, expected, _) = (
        train(strategy, lane_form="sequential")
        for strategy in (plain_functions(), syncalgos.model_averaging(2))
    )
    assert_same(state._replace(sync=()), expected._replace(sync=()), 0)
    silent = plain_functions()._replace(acts=None)
    for strategy, form in ((silent, "vectorized"), (plain_functions(), "sequential")):
        assert choose_lane_form(strategy, workers=8, **LARGE) == form


@pytest.mark.slow
def test_what_follows_from_means_is_replicated():
    def replicated(strategy, **options):
        trainer, state, _ = train(strategy, lane_form="vectorized", **options)
        parts = state.replica, state.sync
        [key] = [x for x in trainer._compiled.programs if x.program.takes_steps]
        return jax.tree.unflatten(jax.tree.structure(parts), key.replicated)

    replica, sync = replicated(syncalgos.bmuf(3))
    assert all(jax.tree.leaves(sync)) and not any(jax.tree.leaves(replica))
    replica, sync = replicated(syncalgos.powersgd(rank=1))
    assert all(jax.tree.leaves(replica)) and not all(jax.tree.leaves(sync))


@pytest.mark.parametrize("form", tiers(["sequential", "merged"], ["sequential"]))
def test_replicas_are_not_copied(form):
    strategy = syncalgos.sync_sgd() if form == "merged" else syncalgos.bmuf(3)
    trainer, state, _ = train(strategy, lane_form=form)

    programs = trainer._compiled.programs.items()
    [program] = [x for key, x in programs if key.program.takes_steps]
    memory = program.memory_analysis()
    state_bytes = sum(x.nbytes for x in jax.tree.leaves((state.replica, state.sync)))
    assert memory.alias_size_in_bytes == state_bytes / trainer.layout.shape[0]


def test_a_sum_over_lanes_is_numpys_and_has_its_gradient():
    x = np.random.default_rng(0).normal(size=(2, 3, 100_000))

    def mean(x):
        return syncalgos.collectives.mean(x)

    def mean_and_gradient(x):
        return mean(x), jax.grad(lambda x: jnp.sum(mean(jnp.sin(x)) ** 2))(x)

    over_lanes = jax.vmap(mean_and_gradient, axis_name="lanes")
    means, grads = jax.jit(jax.vmap(over_lanes, axis_name="devices"))(x)
    expected = np.broadcast_to(x.mean((0, 1)), x.shape)
    np.testing.assert_allclose(means, expected, RTOL, 1e-15)
    # Each of 6 workers adds the square of the mean.
    expected = 2 * np.sin(x).mean((0, 1)) * np.cos(x)
    np.testing.assert_allclose(grads, expected, 1e-9, 1e-12)


@pytest.mark.parametrize("form", ["vectorized", pytest.param("sequential", marks=SLOW)])
def test_many_lanes_of_short_floats_are_summed_in_wide_ones(form):
    """A sum of 512 ones in 8 bits would be 256."""
    params = {"w": jnp.ones((600, 1), jnp.bfloat16)}
    loss = stateless(lambda p, b: jnp.mean(b) + 0 * jnp.sum(p["w"]))
    options = {"loss": loss, "workers": 512, "lanes": 512, "lane_form": form}
    trainer = make_trainer(syncalgos.model_averaging(2), **options)
    state, reported = trainer.run(trainer.init(params), np.ones((2, 512), jnp.bfloat16))
    assert (np.asarray(state.replica.params["w"], np.float32) == 1).all()
    assert reported["loss"].dtype == jnp.bfloat16 and (reported["loss"] == 1).all()
