"""Every algorithm of the registry: the properties in `requirements.py`, on two layouts.

Most is asked of the traced program alone. Those that are trained share one program.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import joint_strategies
from support.chosen_tests import chosen_values, split_around
from support.commands import ROOT
from support.problems import conformance
from support.requirements import COMPANIONS, PERIOD, make, other_value, owed, parameters
from support.tiers import tiers

import syncalgos
from experiments.checkpoint import shards, state_arrays
from experiments.checkpoint.shards import load_workers
from syncalgos.strategy import apply_reduce, apply_sync, strong

NAMES = tuple(syncalgos.ALGORITHMS)
ROUNDING = 1e-5  # of float32 after 8 steps: sums of workers in another order

# The numbers

# Each algorithm trains on vmap, and on devices with one to three lanes on each.
ON_DEVICES = [(6, "pmap", 2), (6, "shard_map", 3), (3, "pmap", 3), (4, "shard_map", 2)]
LAYOUT = dict(zip(NAMES, itertools.cycle(ON_DEVICES), strict=False))
# A round of some, decisions, peers.
KINDS = ("fedavg", "dynamic_averaging", "gossip")
LAYOUT |= dict.fromkeys(KINDS, ON_DEVICES[0])
# Of these, each sends and keeps what another does that is not among them.
SLOW_NAMES = ("slowmo", "lookahead", "co2", "gpa", "ema_nesterov", "muloco", "diloco_x")
SLOW_NAMES += ("eager_diloco", "heloco", "halos", "decoupled_diloco", "noloco", "d2")
SLOW_NAMES += ("qg_dsgdm", "gradient_tracking", "fedprox", "fedopt", "feddyn", "qsr")
SLOW_NAMES += ("post_local_sgd", "des_loc", "sparta", "pulseloco", "topk_sgd", "ef21")
SLOW_NAMES += ("sign_sgd", "distributed_lion", "loco", "dion")
TOGETHER = 8  # the compiler needs more than twice as long for twice as many

# Two leaves are trained; the others have no gradient.
MODEL = {
    "empty": np.zeros((0, 3), np.float32),
    "in": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    "scale": np.float32(0.5),
    "still": np.ones(2, np.float32),
}


def loss(params: Any, batch: Any) -> jax.Array:
    """The squared error of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["in"]).sum(1)
    return jnp.mean((hidden * params["scale"] - batch["y"][:, 0]) ** 2)


class TrainingResults(NamedTuple):
    """Results of an algorithm's training.

    Attributes:
        replicas: all workers' params after each step, leaves (steps, workers, …).
        state: of the strategy, leaves (workers, …).
        center: the model to ship.
    """

    replicas: Any
    state: Any
    center: Any


class Trained(NamedTuple):
    """Three trainings by one program.

    Attributes:
        usual: by the batches of the problem.
        resumed: the same, whose state came from a file after HALF steps.
        poisoned: by batches of which one is not finite on all workers but the first:
            `fedavg` leaves some of them out of a round.
    """

    usual: TrainingResults
    resumed: TrainingResults
    poisoned: TrainingResults


STEPS = 2 * PERIOD
HALF = PERIOD + 1


def train(
    names: Sequence[str], workers: int, backend: str, devices: int, folder: Path
) -> dict[str, Trained]:
    """Trains algorithms side by side; by name, what is `Trained`.

    The optimizer skips steps whose gradients are not finite.
    """
    optimizers = {
        name: optax.apply_if_finite(owed(name).optimizer, 5) for name in names
    }
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(joint_strategies.loss_of_all(loss)),
        joint_strategies.optimizers(optimizers),
        joint_strategies.strategies({name: make(name) for name in names}),
        workers=workers,
        backend=backend,
        placement=syncalgos.Placement(devices=range(devices)),
    )
    _, batches = conformance.problem()
    num_decisions = 0
    for name in names:
        decided = owed(name).decided
        if decided:
            num_decisions += len(decided[0])

    def run_steps(state: Any, start: int, stop: int) -> tuple[Any, list[Any]]:
        replicas = []
        metrics = {}
        for step in range(start, stop):
            batch = jax.tree.map(lambda x, a=step: x[a : a + 1], batches)
            state, metrics = trainer.run(state, batch)
            replicas.append(trainer.to_host(state).replica.params)
        decided = metrics.get("decided", np.zeros((1, 0)))
        assert decided.shape == (1, num_decisions)
        return state, replicas

    def make_results(state: Any, replicas: list[Any]) -> dict[str, TrainingResults]:
        path = jax.tree.map(lambda *x: np.stack(x), *replicas)
        sync_state = trainer.to_host(state).sync
        center = jax.device_get(trainer.center(state).params)
        return {
            name: TrainingResults(path[name], sync_state[name], center[name])
            for name in names
        }

    first_state = trainer.init(dict.fromkeys(names, MODEL))
    state, first_replicas = run_steps(first_state, 0, HALF)
    host_state = trainer.to_host(state)
    empty_replica = syncalgos.Replica(())
    own_arrays = state_arrays.name_own_arrays(host_state)
    shared_arrays = state_arrays.name_shared_arrays(host_state, empty_replica)
    shard = shards.Shard(HALF, workers, 0, own_arrays, shared_arrays, {})
    shards.write_shard(folder, shard, 0, 1)
    state, last_replicas = run_steps(state, HALF, STEPS)
    usual = make_results(state, first_replicas + last_replicas)

    zeros = dict.fromkeys(names, jax.tree.map(np.zeros_like, MODEL))
    shard = load_workers(folder, HALF)
    state = state_arrays.restore_state(
        trainer, trainer.init(zeros), shard.own, shard.shared
    )
    state, last_replicas = run_steps(state, HALF, STEPS)
    resumed = make_results(state, first_replicas + last_replicas)

    batches["x"][1, conformance.BATCH // workers :] = np.nan
    first_state = trainer.init(dict.fromkeys(names, MODEL))
    poisoned = make_results(*run_steps(first_state, 0, STEPS))
    return {name: Trained(usual[name], resumed[name], poisoned[name]) for name in names}


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, tuple], Trained]:
    """(name, layout) -> what `train` gives, of others of the session's tests, too."""
    names = chosen_values(request, "name")
    results_by_key = {}

    def get_trained(name: str, layout: tuple) -> Trained:
        if (name, layout) not in results_by_key:
            alike = [x for x in names if LAYOUT[x] == LAYOUT[name]]
            together = split_around(name, alike, TOGETHER)
            results = train(together, *layout, tmp_path_factory.mktemp("state"))
            for trained_name in together:
                results_by_key[trained_name, layout] = results[trained_name]
        return results_by_key[name, layout]

    return get_trained


@pytest.mark.parametrize("name", tiers(NAMES, KINDS[:1], {*NAMES} - {*SLOW_NAMES}))
def test_algorithm_gives_the_same_numbers_on_two_layouts(name, trained):
    workers, *_ = layout = LAYOUT[name]
    on_devices = trained(name, layout)
    on_one = trained(name, (workers, "vmap", 1))
    for x, y in zip(*map(jax.tree.leaves, (on_devices, on_one)), strict=True):
        if x.dtype.kind == "f":  # a bit may fall either way
            assert np.isfinite(x).all()
            np.testing.assert_allclose(x, y, rtol=ROUNDING, atol=ROUNDING)
    for usual, resumed, _ in (on_devices, on_one):
        jax.tree.map(np.testing.assert_array_equal, resumed, usual)
    leaves = jax.tree.leaves(on_one.usual.replicas)
    gaps = np.hstack([np.ptp(x, axis=1).reshape(STEPS, -1) for x in leaves])
    agree = tuple(np.flatnonzero(gaps.max(1) <= ROUNDING))
    assert agree == owed(name).agree_after, "tests/support/requirements.py: agree_after"


@pytest.mark.slow
def test_workers_that_start_from_a_center_have_it_as_theirs():
    """So a run goes on with other workers."""
    strategies = {name: make(name) for name in NAMES}

    def worker(_: Any) -> dict[str, Any]:
        return {
            name: strategy.center(MODEL, strategy.init(MODEL))
            for name, strategy in strategies.items()
        }

    lanes = jax.vmap(worker, axis_name="lanes")
    centers = jax.jit(jax.vmap(lanes, axis_name="devices"))(np.zeros((1, 3)))
    for name, center in centers.items():
        for leaf, x in center.items():  # the mean over three is rounded
            np.testing.assert_allclose(
                x[0], np.stack([MODEL[leaf]] * 3), rtol=1e-6, atol=1e-7, err_msg=name
            )


SOURCES = [
    *(ROOT / "syncalgos/algorithms").rglob("*.py"),
    *(ROOT / "syncalgos/combinators").rglob("*.py"),
    *(ROOT / "syncalgos/reducers").rglob("*.py"),
]


ROUNDED_NAMES = {"loco", "quantized_sgd"}  # by each worker's own draws


@pytest.mark.parametrize(
    "name", tiers([x for x in NAMES if x not in ROUNDED_NAMES], ["diloco"])
)
def test_three_of_four_that_take_part_are_three_workers(name):
    """Or `participating` refuses the algorithm, which then says `no_mean`."""
    # Its default depends on the number of workers.
    settings = {"block_momentum": 0.5} if name == "bmuf" else {}
    x, y = np.random.default_rng(0).normal(size=(2, STEPS, 16, 5))

    def train_center(
        workers: int, wrap: Callable[[syncalgos.Strategy], syncalgos.Strategy]
    ) -> Any:
        strategy = wrap(make(name, **settings))
        optimizer = owed(name).optimizer
        trainer = syncalgos.DataParallel(loss, optimizer, strategy, workers=workers)
        batches = {"x": x[:, : 4 * workers], "y": y[:, : 4 * workers]}
        return trainer.center(trainer.run(trainer.init(MODEL), batches)[0]).params

    take_part = partial(syncalgos.participating, schedule=lambda _, n: np.arange(n) < 3)
    try:
        center = train_center(4, take_part)
    except ValueError as error:
        assert str(error).startswith("participating: ")
    else:
        message = "use collectives.no_mean, unless it should be a mean"
        compare = partial(np.testing.assert_allclose, atol=ROUNDING, err_msg=message)
        jax.tree.map(compare, center, train_center(3, lambda strategy: strategy))


def test_workers_talk_by_the_collectives_alone():
    """These are proven on each layout; no algorithm reaches past them."""
    collective_call = re.compile(
        r"lax\.(p(sum|mean|max|min|permute|shuffle)\w*|all_\w+|axis_\w+|ragged\w+)\("
    )
    assert len(SOURCES) > len(NAMES)
    assert collective_call.search("jax.lax.pmean(x)")
    assert collective_call.search("lax.all_to_all(x, axis)")
    for path in SOURCES:
        assert not collective_call.search(path.read_text()), path


# The bytes


@pytest.mark.parametrize("workers", tiers([2, 3, 8], [8], [2]))
@pytest.mark.parametrize("name", NAMES)
def test_communication_is_what_the_algorithm_owes(name, workers):
    params = conformance.problem()[0]
    decisions = owed(name).decisions(2 * PERIOD)
    counts = syncalgos.communication(
        make(name), params, workers=workers, steps=2 * PERIOD, taken=decisions
    )
    assert counts.bytes_per_worker == pytest.approx(owed(name).expected_bytes(workers))
    assert tuple(np.flatnonzero(np.diff(counts.per_step, prepend=0))) == (
        owed(name).send_steps
    )
    assert counts.syncs == len(owed(name).send_steps)


# The form


def trace_step(
    strategy: syncalgos.Strategy,
    optimizer: optax.GradientTransformation,
    params: Any,
    sizes: tuple[int, int] = (2, 2),
) -> tuple[Any, Any]:
    """The program of a step, whose results must have the form of what they replace."""

    def step(params: Any, grads: Any, number: jax.Array) -> Any:
        start = strong((optimizer.init(params), strategy.init(params)))
        replica = syncalgos.Replica(params, start[0])
        state = start[1]
        grads, state = apply_reduce(strategy, grads, replica, state, number)
        replica, state = apply_sync(strategy, replica, state, number)
        return start[1], strategy.center(replica.params, state), grads, replica

    axis_env = [*zip(syncalgos.WORKERS, sizes, strict=True)]
    return jax.make_jaxpr(step, axis_env=axis_env, return_shape=True)(
        params, params, jnp.int32(0)
    )


def check_form(
    name: str, params: Any, sizes: tuple[int, int], **settings: Any
) -> set[str]:
    """Returns the dtypes of the state."""
    strategy = make(name, **settings)
    _, (state, center, *_) = trace_step(strategy, owed(name).optimizer, params, sizes)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (center, params)]
    assert kinds[0] == kinds[1]
    return {x.dtype.name for x in jax.tree.leaves(state)}


@pytest.mark.parametrize("name", NAMES)
def test_any_model_keeps_its_form_and_nothing_is_promoted(name):
    """jax refuses promotion in the first of them, as in the user's own program."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        model = {"empty": jnp.zeros((0, 3)), "matrix": jnp.zeros((6, 3))}
        check_form(name, model, (2, 2))
    # Numbers and schedules are float64 then: params and state must not become so.
    rate = {"learning_rate": lambda step: jnp.asarray(0.1, float)}
    with jax.enable_x64(True):
        bfloat16_leaf = jnp.zeros((2, 2), jnp.bfloat16)
        float32_leaf = {"leaf": jnp.zeros(1)}
        model = {
            "deep": [bfloat16_leaf, float32_leaf],
            "scalar": jnp.zeros((), jnp.float32),
        }
        rate = rate if "learning_rate" in parameters(name) else {}
        assert "bfloat16" not in check_form(name, model, (1, 3), **rate)


# The parameters


def format_program(name: str, settings: dict[str, Any]) -> str:
    """A step's program, with all that is constant in it."""
    model = {"bias": jnp.zeros(3), "in": jnp.zeros((5, 3))}
    program, _ = trace_step(make(name, **settings), owed(name).optimizer, model)
    return f"{program}{[np.ravel(x).tolist() for x in program.consts]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_changes_the_program(name):
    texts = {}
    for parameter in parameters(name):
        usual = COMPANIONS.get((name, parameter), {})
        key = repr(usual)
        if key not in texts:
            texts[key] = format_program(name, usual)
            assert texts[key] == format_program(name, usual)
        other = {**usual, parameter: other_value(name, parameter)}
        assert format_program(name, other) != texts[key], parameter


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_refuses_values_out_of_range(name):
    for parameter, default in parameters(name).items():
        if isinstance(default, bool):
            bad = []  # both values are legal
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
