"""Every algorithm of the registry: the properties in `requirements.py`, on two layouts.

Most is asked of the traced program alone. Those that are trained share one program.
"""

import itertools
import re
from functools import partial
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
from support.requirements import PERIOD, WITH, make, other_value, owed, parameters
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
LATER = ("slowmo", "lookahead", "co2", "gpa", "ema_nesterov", "muloco", "diloco_x")
LATER += ("eager_diloco", "heloco", "halos", "decoupled_diloco", "noloco", "d2")
LATER += ("qg_dsgdm", "gradient_tracking", "fedprox", "fedopt", "feddyn", "qsr")
LATER += ("post_local_sgd", "des_loc", "sparta", "pulseloco", "topk_sgd", "ef21")
LATER += ("sign_sgd", "distributed_lion", "loco", "dion")
TOGETHER = 8  # the compiler needs more than twice as long for twice as many

# Two leaves are trained; the others have no gradient.
MODEL = {
    "empty": np.zeros((0, 3), np.float32),
    "in": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    "scale": np.float32(0.5),
    "still": np.ones(2, np.float32),
}


def loss(params, batch):
    """The squared error of a small network."""
    hidden = jnp.tanh(batch["x"] @ params["in"]).sum(1)
    return jnp.mean((hidden * params["scale"] - batch["y"][:, 0]) ** 2)


class Seen(NamedTuple):
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

    usual: Seen
    resumed: Seen
    poisoned: Seen


STEPS = 2 * PERIOD
HALF = PERIOD + 1


def train(names, workers, backend, devices, folder):
    """Trains algorithms side by side; by name, what is `Trained`.

    The optimizer skips steps whose gradients are not finite.
    """
    kept = {name: optax.apply_if_finite(owed(name).optimizer, 5) for name in names}
    trainer = syncalgos.DataParallel(
        syncalgos.stateless(joint_strategies.loss_of_all(loss)),
        joint_strategies.optimizers(kept),
        joint_strategies.strategies({name: make(name) for name in names}),
        workers=workers,
        backend=backend,
        placement=syncalgos.Placement(devices=range(devices)),
    )
    _, batches = conformance.problem()
    decisions = [len(found[0]) for x in names if (found := owed(x).decided)]

    def advanced(state, first, stop):
        replicas = []
        metrics = {}
        for step in range(first, stop):
            batch = jax.tree.map(lambda x, a=step: x[a : a + 1], batches)
            state, metrics = trainer.run(state, batch)
            replicas.append(trainer.to_host(state).replica.params)
        decided = metrics.get("decided", np.zeros((1, 0)))
        assert decided.shape == (1, sum(decisions))
        return state, replicas

    def seen(state, replicas):
        path = jax.tree.map(lambda *x: np.stack(x), *replicas)
        held = trainer.to_host(state).sync
        center = trainer.center(state).params
        found = path, held, jax.device_get(center)
        return {name: Seen(*(tree[name] for tree in found)) for name in names}

    state, before = advanced(trainer.init(dict.fromkeys(names, MODEL)), 0, HALF)
    held = trainer.to_host(state)
    of_no_interest = syncalgos.Replica(())
    own = state_arrays.name_own_arrays(held)
    shared = state_arrays.name_shared_arrays(held, of_no_interest)
    shards.write_shard(folder, shards.Shard(HALF, workers, 0, own, shared, {}), 0, 1)
    state, after = advanced(state, HALF, STEPS)
    usual = seen(state, before + after)

    zero = dict.fromkeys(names, jax.tree.map(np.zeros_like, MODEL))
    part = load_workers(folder, HALF)
    state = state_arrays.restore_state(
        trainer, trainer.init(zero), part.own, part.shared
    )
    state, after = advanced(state, HALF, STEPS)
    resumed = seen(state, before + after)

    batches["x"][1, conformance.BATCH // workers :] = np.nan
    poisoned = seen(*advanced(trainer.init(dict.fromkeys(names, MODEL)), 0, STEPS))
    each = usual, resumed, poisoned
    return {name: Trained(*(found[name] for found in each)) for name in names}


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """(name, layout) -> what `train` gives, of others of the session's tests, too."""
    names = chosen_values(request, "name")
    done = {}

    def of(name, layout):
        if (name, layout) not in done:
            alike = [x for x in names if LAYOUT[x] == LAYOUT[name]]
            together = split_around(name, alike, TOGETHER)
            found = train(together, *layout, tmp_path_factory.mktemp("state"))
            done.update({(each, layout): x for each, x in found.items()})
        return done[name, layout]

    return of


@pytest.mark.parametrize("name", tiers(NAMES, KINDS[:1], {*NAMES} - {*LATER}))
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

    def worker(_):
        return {
            name: each.center(MODEL, each.init(MODEL))
            for name, each in strategies.items()
        }

    lanes = jax.vmap(worker, axis_name="lanes")
    found = jax.jit(jax.vmap(lanes, axis_name="devices"))(np.zeros((1, 3)))
    for name, center in found.items():
        for leaf, x in center.items():  # the mean over three is rounded
            np.testing.assert_allclose(
                x[0], np.stack([MODEL[leaf]] * 3), rtol=1e-6, atol=1e-7, err_msg=name
            )


SOURCES = [
    path
    for folder in ("algorithms", "combinators", "reducers")
    for path in (ROOT / "syncalgos" / folder).rglob("*.py")
]


ROUNDED = {"loco", "quantized_sgd"}  # by each worker's own draws


@pytest.mark.parametrize(
    "name", tiers([x for x in NAMES if x not in ROUNDED], ["diloco"])
)
def test_three_of_four_that_take_part_are_three_workers(name):
    """Or `participating` refuses the algorithm, which then says `no_mean`."""
    # Its default depends on the number of workers.
    own = {"block_momentum": 0.5} if name == "bmuf" else {}
    x, y = np.random.default_rng(0).normal(size=(2, STEPS, 16, 5))

    def center(workers, around):
        strategy = around(make(name, **own))
        optimizer = owed(name).optimizer
        trainer = syncalgos.DataParallel(loss, optimizer, strategy, workers=workers)
        seen = {"x": x[:, : 4 * workers], "y": y[:, : 4 * workers]}
        return trainer.center(trainer.run(trainer.init(MODEL), seen)[0]).params

    take_part = partial(syncalgos.participating, schedule=lambda _, n: np.arange(n) < 3)
    try:
        of_three = center(4, take_part)
    except ValueError as error:
        assert str(error).startswith("participating: ")
    else:
        why = "use collectives.no_mean, unless it should be a mean"
        compare = partial(np.testing.assert_allclose, atol=ROUNDING, err_msg=why)
        jax.tree.map(compare, of_three, center(3, lambda strategy: strategy))


def test_workers_talk_by_the_collectives_alone():
    """These are proven on each layout; no algorithm reaches past them."""
    own = re.compile(
        r"lax\.(p(sum|mean|max|min|permute|shuffle)\w*|all_\w+|axis_\w+|ragged\w+)\("
    )
    assert len(SOURCES) > len(NAMES)
    assert own.search("jax.lax.pmean(x)") and own.search("lax.all_to_all(x, axis)")
    for path in SOURCES:
        assert not own.search(path.read_text()), path


# The bytes


@pytest.mark.parametrize("workers", tiers([2, 3, 8], [8], [2]))
@pytest.mark.parametrize("name", NAMES)
def test_communication_is_what_the_algorithm_owes(name, workers):
    params = conformance.problem()[0]
    taken = owed(name).decisions(2 * PERIOD)
    sent = syncalgos.communication(
        make(name), params, workers=workers, steps=2 * PERIOD, taken=taken
    )
    assert sent.bytes_per_worker == pytest.approx(owed(name).expected_bytes(workers))
    assert tuple(np.flatnonzero(np.diff(sent.per_step, prepend=0))) == (
        owed(name).send_steps
    )
    assert sent.syncs == len(owed(name).send_steps)


# The form


def traced(strategy, optimizer, params, sizes=(2, 2)):
    """The program of a step, whose results must have the form of what they replace."""

    def step(params, grads, number):
        start = strong((optimizer.init(params), strategy.init(params)))
        replica = syncalgos.Replica(params, start[0])
        state = start[1]
        grads, state = apply_reduce(strategy, grads, replica, state, number)
        replica, state = apply_sync(strategy, replica, state, number)
        return start[1], strategy.center(replica.params, state), grads, replica

    sizes = [*zip(syncalgos.WORKERS, sizes, strict=True)]
    return jax.make_jaxpr(step, axis_env=sizes, return_shape=True)(
        params, params, jnp.int32(0)
    )


def keeps_its_form(name, params, sizes, **settings):
    """Returns the dtypes of the state."""
    strategy = make(name, **settings)
    _, (state, center, *_) = traced(strategy, owed(name).optimizer, params, sizes)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (center, params)]
    assert kinds[0] == kinds[1]
    return {x.dtype.name for x in jax.tree.leaves(state)}


@pytest.mark.parametrize("name", NAMES)
def test_any_model_keeps_its_form_and_nothing_is_promoted(name):
    """jax refuses promotion in the first of them, as in the user's own program."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        model = {"empty": jnp.zeros((0, 3)), "matrix": jnp.zeros((6, 3))}
        keeps_its_form(name, model, (2, 2))
    # Numbers and schedules are float64 then: params and state must not become so.
    rate = {"learning_rate": lambda step: jnp.asarray(0.1, float)}
    with jax.enable_x64(True):
        short = jnp.zeros((2, 2), jnp.bfloat16)
        wide = {"leaf": jnp.zeros(1)}
        model = {"deep": [short, wide], "scalar": jnp.zeros((), jnp.float32)}
        rate = rate if "learning_rate" in parameters(name) else {}
        assert "bfloat16" not in keeps_its_form(name, model, (1, 3), **rate)


# The parameters


def text_of(name, settings):
    """A step's program, with all that is constant in it."""
    model = {"bias": jnp.zeros(3), "in": jnp.zeros((5, 3))}
    program, _ = traced(make(name, **settings), owed(name).optimizer, model)
    return f"{program}{[np.ravel(x).tolist() for x in program.consts]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_changes_the_program(name):
    texts = {}
    for parameter in parameters(name):
        usual = WITH.get((name, parameter), {})
        key = repr(usual)
        if key not in texts:
            texts[key] = text_of(name, usual)
            assert texts[key] == text_of(name, usual)
        other = {**usual, parameter: other_value(name, parameter)}
        assert text_of(name, other) != texts[key], parameter


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_refuses_what_is_out_of_range(name):
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
