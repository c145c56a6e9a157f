"""Every algorithm of the registry on every backend: the properties in `owed.py`."""

import functools
import inspect
import itertools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from owed import PERIOD, WITH, make, other_value, owed, parameters
from problems.conformance import loss, problem

import syncalgos
from syncalgos.engine.placement.make_layout import BACKENDS

NAMES, WORKERS = tuple(syncalgos.ALGORITHMS), (1, 2, 3, 4, 8)
ROUNDING = 1e-5  # of float32 after 8 steps: sums of workers in another order


SGD = optax.sgd(0.1, momentum=0.9)


def train(strategy, backend, workers, dtype=np.float32, optimizer=SGD):
    """Returns the trainer and the states after 0, PERIOD and 2 · PERIOD steps."""
    params, batches = problem(dtype)
    devices = [0, 1] if backend != "vmap" and workers % 2 == 0 else [0]
    trainer = syncalgos.DataParallel(
        loss,
        optimizer,
        strategy,
        workers=workers,
        backend=backend,
        placement=syncalgos.Placement(devices=devices),
    )
    state = trainer.init(params, {"seen": np.zeros(())})
    states = [jax.tree.map(np.asarray, state._replace(key=()))]
    compiled = []
    for first in (0, PERIOD):
        part = jax.tree.map(lambda x, a=first: x[a : a + PERIOD], batches)
        before = len(COMPILATIONS)
        state, metrics = trainer.run(state, part)
        compiled.append(len(COMPILATIONS) - before)
        states.append(jax.tree.map(np.asarray, state._replace(key=())))
    return trainer, state, states, jax.tree.map(np.asarray, metrics), compiled


COMPILATIONS: list[str] = []


def note_compilation(event, seconds, **_):
    if "backend_compile" in event:
        COMPILATIONS.append(event)


jax.monitoring.register_event_duration_secs_listener(note_compilation)


@functools.cache
def center_on(name, backend, workers):
    trainer, state, *_ = train(
        make(name), backend, workers, optimizer=owed(name).optimizer
    )
    return jax.tree.map(np.asarray, trainer.center(state))


def cases():
    """All pairs of names and numbers of workers, on the backends in turn."""
    pairs = itertools.product(enumerate(NAMES), enumerate(WORKERS))
    for (i, name), (j, workers) in pairs:
        backend = BACKENDS[(i + j) % len(WORKERS) % len(BACKENDS)]
        yield pytest.param(name, backend, workers, id=f"{name}-{backend}-{workers}")


@pytest.mark.sample(6, slow=36)
@pytest.mark.parametrize(("name", "backend", "workers"), list(cases()))
def test_algorithm_keeps_the_contract(name, backend, workers):
    trainer, state, states, metrics, compiled = train(
        make(name), backend, workers, optimizer=owed(name).optimizer
    )
    leaves = jax.tree.leaves(states[-1])
    assert all(np.isfinite(x).all() for x in leaves)
    told = dict.fromkeys(("loss", "error"), (PERIOD,))
    taken = owed(name).taken(PERIOD)
    told |= {} if taken is None else {"decided": taken.shape}
    assert {k: v.shape for k, v in metrics.items()} == told
    # Shapes, dtypes and the programs stay.
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in states]
    assert kinds[0] == kinds[1] == kinds[2]
    assert all(x.shape[:2] == trainer.layout.shape for x in jax.tree.leaves(state[:2]))
    assert compiled == [1, 0]
    if 2 * PERIOD - 1 in owed(name).agree_after:
        assert trainer.divergence(state) <= ROUNDING
    # The same numbers as another backend.
    center = trainer.center(state)
    other = center_on(name, "pmap" if backend == "vmap" else "vmap", workers)
    for mine, others in zip(
        jax.tree.leaves(center), jax.tree.leaves(other), strict=True
    ):
        np.testing.assert_allclose(mine, others, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.sample(5, slow=20)
@pytest.mark.parametrize("name", NAMES)
def test_replicas_drift_apart_between_syncs(name):
    """A sync that acted at the wrong steps would not show in its results alone."""
    params, batches = problem()
    optimizer = owed(name).optimizer
    trainer = syncalgos.DataParallel(
        loss, optimizer, make(name), workers=4, backend="vmap"
    )
    state = trainer.init(params, {"seen": np.zeros(())})
    agreed = []
    for step in range(2 * PERIOD):
        batch = jax.tree.map(lambda x, a=step: x[a : a + 1], batches)
        state, _ = trainer.run(state, batch)
        if trainer.divergence(state) <= ROUNDING:
            agreed.append(step)
    assert tuple(agreed) == owed(name).agree_after


@pytest.mark.sample(60)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_communication_is_what_the_algorithm_owes(name, workers):
    taken = owed(name).taken(2 * PERIOD)
    sent = syncalgos.communication(
        make(name), problem()[0], workers=workers, steps=2 * PERIOD, taken=taken
    )
    assert sent.bytes_per_worker == pytest.approx(owed(name).sent(workers))
    expected = owed(name).sends_at if workers > 1 else ()
    assert tuple(np.flatnonzero(np.diff(sent.per_step, prepend=0))) == expected
    assert sent.syncs == len(expected)


@pytest.mark.sample(5, slow=20)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_params_keep_their_dtype_and_state_is_float32(name):
    optimizer = owed(name).optimizer
    _, _, states, _, compiled = train(make(name), "vmap", 4, jnp.bfloat16, optimizer)
    dtypes = [jax.tree.map(lambda x: x.dtype, s) for s in states]
    assert dtypes[0] == dtypes[2]
    assert {str(x.dtype) for x in jax.tree.leaves(states[2].replica.params)} == {
        "bfloat16"
    }
    floats = [x for x in jax.tree.leaves(states[2].sync) if x.dtype.kind not in "iub"]
    assert {str(x.dtype) for x in floats} <= {"float32"}
    assert compiled == [1, 0]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_float32_params_stay_float32_where_float64_is_on(name):
    """Numbers and schedules are float64 then: params and state must not become so."""
    rates = [make(name)]
    if "learning_rate" in parameters(name):
        rates.append(make(name, learning_rate=lambda step: jnp.asarray(0.1, float)))
    with jax.enable_x64(True):
        for strategy in rates:  # traced step by step: changed dtypes are refused
            taken = owed(name).taken(2 * PERIOD)
            syncalgos.communication(
                strategy, problem()[0], workers=2, steps=2 * PERIOD, taken=taken
            )


EVERY_PARAMETER = [(name, p) for name in NAMES for p in parameters(name)]


@functools.cache
def result_of(name, *settings):
    """All replicas' params in a row."""
    strategy = make(name, **dict(settings))
    _, state, *_ = train(strategy, "vmap", 4, optimizer=owed(name).optimizer)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.replica.params)])


@pytest.mark.sample(3, slow=20)
@pytest.mark.parametrize(("name", "parameter"), EVERY_PARAMETER)
def test_every_parameter_changes_the_result(name, parameter):
    settings = WITH.get((name, parameter), {})
    other = settings | {parameter: other_value(name, parameter)}
    results = [result_of(name, *each.items()) for each in (settings, other)]
    assert np.abs(np.subtract(*results)).max() > 1e-4


@pytest.mark.sample(45, slow=90)
@pytest.mark.parametrize(("name", "parameter"), EVERY_PARAMETER)
def test_every_parameter_refuses_what_is_out_of_range(name, parameter):
    default = parameters(name)[parameter]
    if isinstance(default, bool):
        bad = []  # both values are legal: test_every_parameter_changes_the_result
    elif isinstance(default, str):
        bad = ["abc"]
    elif isinstance(default, int):
        bad = [-1, 1.5, "abc", True, float("nan")]
    else:
        bad = [-1.0, float("nan"), float("inf"), "abc"]
    for value in bad:
        rule = "unknown" if isinstance(default, str) else f"{parameter} must be"
        with pytest.raises(ValueError, match=f"{rule} .*{value}"):
            make(name, **{parameter: value})


@pytest.mark.parametrize("name", NAMES)
def test_axis_is_the_last_parameter(name):
    signature = inspect.signature(syncalgos.ALGORITHMS[name])
    last = list(signature.parameters.values())[-1]
    assert (last.name, last.default) == ("axis", syncalgos.WORKERS)


def test_every_algorithm_is_an_attribute_of_the_package():
    for name, factory in syncalgos.ALGORITHMS.items():
        assert getattr(syncalgos, name) is factory


@pytest.mark.sample(5, slow=20)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_is_not_finite_is_survived(name):
    """apply_if_finite skips the step, and no state of the strategy keeps a NaN."""
    optimizer = optax.apply_if_finite(owed(name).optimizer, 5)
    params, batches = problem()
    # Of two workers: fedavg leaves one of the three out of a round, and of its loss.
    batches["x"][1, [0, -1]] = np.nan
    trainer = syncalgos.DataParallel(
        loss, optimizer, make(name), workers=3, backend="vmap"
    )
    state, metrics = trainer.run(trainer.init(params, {"seen": np.zeros(())}), batches)
    assert not np.isfinite(metrics["loss"][1])
    assert np.isfinite(metrics["loss"][2:]).all()
    for x in jax.tree.leaves(
        (state.replica.params, state.sync, trainer.center(state).params)
    ):
        assert np.isfinite(np.asarray(x, np.float64)).all()


@pytest.mark.parametrize("name", NAMES)
def test_algorithms_promote_nothing_by_themselves(name):
    """jax refuses promotion then, in the user's own program too."""
    strategy, sizes = make(name), [*zip(syncalgos.WORKERS, (2, 2), strict=True)]
    params = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)}

    def steps(params, grads, step):
        opt_state = owed(name).optimizer.init(params)
        replica, state = syncalgos.Replica(params, opt_state), strategy.init(params)
        grads, state = strategy.reduce(grads, replica, state, step)
        replica, state = strategy.sync(replica, state, step)
        return grads, strategy.center(replica.params, state)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.make_jaxpr(steps, axis_env=sizes)(params, params, jnp.int32(0))
