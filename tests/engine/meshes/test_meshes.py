"""Workers that are meshes, against workers that are devices.

Those of several places run in a process of its own, which has eight devices
(`meshed`); the others take the three of the tests.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.chosen_tests import chosen_values
from support.device_processes import run_module
from support.placements import placed
from support.requirements import owed
from support.tiers import tiers
from support.trees import assert_close, assert_equal

import syncalgos
from syncalgos import ALGORITHMS
from syncalgos._held_parts import HeldPart
from syncalgos.reducers import _stacking
from syncalgos.reducers._reducer import Draws, _draw_numbers
from syncalgos.reducers._stacking.shards import Cut, Leaf, Sharding, known

ROUNDING = 3e-6  # of float32 after 8 steps, summed in another order
AT_FULL_RANK = 3e-5  # orthonormal columns of a matrix that is sent whole
MESH = {"fsdp": 3}
# Norms, moments, peers; reducers that act on shards, on factors of whole matrices, on
# draws and votes, and in two hops. Everything else is elementwise.
ON_PAIRS = "bmuf", "edit", "powersgd", "quantized_sgd", "topk_sgd"
ALGORITHMS_BY_LAYOUT = {
    "4x2": (*ON_PAIRS, "des_loc", "demo", "sparta", "signum"),
    "2x(2x2)": ("dion",),
    "2x2x2": ("bmuf", "topk_sgd"),
    "2x4": tuple(ALGORITHMS),
    "1x8": ("powersgd",),
}
# In CI; the others are long.
FAST_ALGORITHMS = {"4x2": ON_PAIRS, "2x(2x2)": ("dion",), "2x2x2": ("bmuf",)}
CASES = []
for layout, names in ALGORITHMS_BY_LAYOUT.items():
    for name in names:
        is_fast = name in FAST_ALGORITHMS.get(layout, ())
        mark = pytest.mark.slow if is_fast else pytest.mark.long
        CASES.append(pytest.param(layout, name, marks=mark))


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_algorithm_trains_as_workers_without_a_mesh_and_sends_what_is_counted(
    layout, name, request
):
    names = dict.fromkeys(chosen_values(request, "name", layout=layout))
    results = run_module("mesh_training", layout, *names)[name]
    rounding = AT_FULL_RANK if name in ("powersgd", "diloco_x") else ROUNDING
    assert max(results["apart"]) < rounding  # params, center, metrics, evaluation
    assert results["moved"] > 100 * rounding
    assert results["peers"]
    # Of what is drawn at random, too, each device makes its own part.
    assert "permute" not in results["within"]
    counted = results["counted"]
    if counted is not None:
        assert results["sent"] == pytest.approx(counted)
    if not owed(name).decided and len(owed(name).send_steps) < 8 and results["sent"]:
        assert results["branched"]


def small_model():
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(4, 6)), "out": rng.normal(size=(6, 3))}
    batches = {"x": rng.normal(size=(4, 6, 4)), "y": rng.normal(size=(4, 6, 3))}
    return jax.tree.map(np.float32, (params, batches))


SPECS = {"in": P(None, "fsdp"), "out": P("fsdp")}


def small_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def make_trainer(loss=small_loss, optimizer=None, strategy=None, workers=1, **options):
    options = {"backend": "shard_map", "mesh": MESH, "shardings": SPECS, **options}
    return syncalgos.DataParallel(
        syncalgos.stateless(loss),
        optimizer or optax.adam(0.1),
        strategy or syncalgos.bmuf(period=2),
        workers=workers,
        **placed(options),
    )


WITHOUT = {"backend": "vmap", "mesh": None, "shardings": None, "devices": [0]}


@functools.cache
def without_mesh(workers):
    trainer = make_trainer(workers=workers, **WITHOUT)
    params, batches = small_model()
    state, _ = trainer.run(trainer.init(params), batches)
    return jax.tree.map(np.asarray, trainer.center(state).params)


def ends_alike(trainer, params, workers):
    state, _ = trainer.run(trainer.init(params), small_model()[1])
    assert_close(trainer.center(state).params, without_mesh(workers), rtol=1e-5)
    return state


def constrained(params, batch):
    """A loss that names the axes within a worker."""
    hidden = lax.with_sharding_constraint(
        jnp.tanh(batch["x"] @ params["in"]), P(None, "fsdp")
    )
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"lane_form": "sequential"}),
        (1, {"accumulate": 2}),
        (1, {"shardings": lambda path, shape: SPECS[path]}),
        (1, {"batch_axes": (), "shardings": P()}),
    ],
)
def test_params_are_those_of_workers_without_a_mesh(workers, options):
    trainer = make_trainer(workers=workers, **options)
    assert trainer.layout.shape == (1, workers)
    ends_alike(trainer, small_model()[0], workers)


@pytest.mark.slow
def test_all_that_is_shaped_like_params_is_cut_as_they_are():
    trainer = make_trainer(workers=2, loss=constrained)
    state = ends_alike(trainer, small_model()[0], 2)
    adam = state.replica.opt_state[0]
    assert adam.count.sharding.is_fully_replicated
    for tree in (state.replica.params, adam.mu, adam.nu, *state.sync):
        assert tree["in"].sharding.spec == P("devices", None, None, "fsdp")
        assert tree["out"].addressable_shards[0].data.shape == (1, 2, 2, 3)
    assert trainer.center(state).params["in"].sharding.spec == P(None, "fsdp")


def test_a_mesh_of_jax_and_arrays_that_lie_on_one_say_all():
    mesh = Mesh(
        np.array(jax.devices()).reshape(3, 1),
        ("fsdp", "devices"),
        axis_types=(AxisType.Auto,) * 2,
    )
    params, _ = small_model()
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
        for name, x in params.items()
    }
    trainer = make_trainer(mesh=mesh, shardings=None)
    state = trainer.init(placed)
    assert state.replica.params["in"].sharding.spec == P("devices", None, None, "fsdp")
    again = trainer.from_host(trainer.to_host(state))
    assert again.replica.params["in"].sharding == state.replica.params["in"].sharding


@pytest.mark.slow
def test_a_state_goes_on_bit_for_bit_from_the_host_and_on_other_layouts():
    params, batches = small_model()
    trainer = make_trainer(workers=2)
    workers = 2
    half = jax.tree.map(lambda x: x[:2], batches)
    state, _ = trainer.run(trainer.init(params), half)
    host_state = trainer.to_host(state)
    assert host_state.replica.params["in"].shape == (workers, 4, 6)
    end, _ = trainer.run(state, half)
    again, _ = trainer.run(trainer.from_host(host_state), half)
    end_replicas = trainer.to_host(end).own
    assert_equal(trainer.to_host(again).own, end_replicas)
    plain = make_trainer(workers=workers, **WITHOUT)
    other, _ = plain.run(plain.from_host(host_state), half)
    assert_close(end_replicas, plain.to_host(other).own, rtol=1e-5)


def test_each_device_sends_its_shards():
    trainer = make_trainer(
        workers=2, lanes=2, shardings={"in": SPECS["in"], "out": P()}
    )
    traffic = trainer.communication(trainer.init(small_model()[0]), 2)
    ring = 2 * (2 - 1) / 2
    assert traffic.devices == 3
    assert traffic.bytes_per_device == ring * 4 * (4 * 6 / 3 + 6 * 3)
    assert traffic.bytes_per_worker == 3 * traffic.bytes_per_device
    assert traffic.per_step[-1] == traffic.bytes_per_worker
    assert traffic.by_collective["all_reduce"].per_step[-1] == traffic.bytes_per_worker


@pytest.mark.slow
def test_each_model_of_a_trainer_is_counted_as_it_is_cut():
    trainer = make_trainer(workers=2, lanes=2, shardings=None)
    (params, _) = small_model()
    of_specs = make_trainer(workers=2, lanes=2)
    cut = of_specs.center(of_specs.init(params)).params
    whole_traffic, parts = (
        trainer.communication(trainer.init(x), 2) for x in (params, cut)
    )
    assert whole_traffic.bytes_per_worker == 3 * parts.bytes_per_worker


@pytest.mark.parametrize("name", tiers(["sparta", "quantized_sgd"], slow=["sparta"]))
def test_leaves_that_are_cut_and_whole_ones_draw_numbers_of_their_own(name):
    specs = {"cut": P("fsdp"), "whole": P(), "empty": P("fsdp")}
    trainer = make_trainer(
        loss=lambda params, batch: sum(x.sum() for x in jax.tree.leaves(params)) * 1.0,
        optimizer=optax.sgd(1.0),
        strategy=getattr(syncalgos, name)(),
        workers=2,
        shardings=specs,
    )
    start = {
        "cut": jnp.linspace(-1, 1, 600),
        "whole": jnp.linspace(-1, 1, 200),
        "empty": jnp.zeros((0, 4)),
    }
    state, _ = trainer.run(trainer.init(start), {"x": np.zeros((2, 6, 1), np.float32)})
    for name, x in trainer.center(state).params.items():
        np.testing.assert_allclose(x, start[name] - 2, atol=0.02)


@pytest.mark.slow
def test_numbers_of_leaves_that_are_cut_otherwise_differ():
    key = jax.tree_util.DictKey
    cut = Cut((("fsdp",),), (2,))
    leaves = (Leaf((key("a"),), (8,), cut), Leaf((key("b"),), (4,), None))
    updates = {"a": jnp.ones(8), "b": jnp.ones(4), "n": jnp.ones(4, jnp.int32)}
    draws = Draws(lambda x: x.size, jax.random.key)
    with known(Sharding(leaves)):
        drawn = _draw_numbers(draws, updates, _stacking.pieces_like(0, updates), 0)
    assert jax.tree.map(jnp.shape, drawn) == {"a": (2, 4), "b": (4,), "n": (0,)}
    assert len(np.unique(np.concatenate([*map(np.ravel, drawn.values())]))) == 12


def test_rows_of_a_batch_are_given_in_order():
    layout = make_trainer(workers=2).layout
    assert layout.own_rows(12).tolist() == [*range(12)]
    assert layout.feeders == 1
    with pytest.raises(ValueError, match="12 or 14"):
        layout.own_rows(13)


@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))])
def test_shards_are_those_of_the_array_and_join_to_it(spec):
    sizes = {"a": 2, "b": 3}
    entries = [x if isinstance(x, tuple) else (x,) if x else () for x in spec]
    names = tuple([*entries, ()][:2])
    parts = tuple(math.prod(map(sizes.__getitem__, axis_names)) for axis_names in names)
    cut = Cut(names, parts)
    x = np.arange(72.0).reshape(6, 12)
    rows = []
    for row in np.split(x, parts[0]):
        rows += np.split(row, parts[1], 1)
    shards = cut.split(jnp.asarray(x))
    np.testing.assert_array_equal(shards, rows)
    np.testing.assert_array_equal(cut.join(shards), x)
    np.testing.assert_array_equal(cut.map(jnp.sum)(shards), [y.sum() for y in rows])


def test_the_longest_path_says_how_an_array_is_cut():
    key = jax.tree_util.DictKey
    cut = Cut(((), ("fsdp",)), (1, 3))
    sharding = Sharding(
        (
            Leaf((key("a"), key("w")), (2, 3), cut),
            Leaf((key("w"),), (2, 3), None),
            Leaf((key("v"),), (4, 3), cut),
        )
    )
    assert sharding.spec((key("mu"), key("a"), key("w")), (2, 3)) == P(None, ("fsdp",))
    assert sharding.spec((key("mu"), key("w")), (2, 3)) == P()
    assert sharding.spec((key("mu"), key("v")), (2, 3)) == P(None, ("fsdp",))  # layers
    assert sharding.spec((key("mu"), key("v")), (3, 7)) == P(("fsdp",))  # its pieces
    assert sharding.spec((key("mu"), key("v")), (5,)) == P()
    assert sharding.spec((key("count"),), ()) == P()


def test_rows_of_an_axis_that_the_mesh_cuts_cannot_be_masked():
    cut = Cut((("fsdp",), ()), (3, 1))
    strategy = syncalgos.masked(syncalgos.model_averaging(2), slice(0, 2))
    params = jnp.zeros((6, 2))
    sharding = Sharding((Leaf((), (6, 2), cut),))
    with known(sharding), pytest.raises(ValueError, match="mesh shards its first"):
        strategy.init(params)


REFUSED = [
    ({"backend": "pmap"}, "mesh needs backend 'shard_map', got 'pmap'"),
    ({"mesh": {"fsdp": 4}}, "1 workers of 4 devices (fsdp 4) need 4 devices, but"),
    ({"mesh": {"fsdp": 3}, "workers": 2, "lanes": 1}, "in 1 lanes of 3 devices"),
    ({"mesh": {"devices": 3}}, "an axis within a worker cannot be named 'devices'"),
    ({"mesh": {}}, "mesh must be a jax.sharding.Mesh, or the sizes of the axes"),
    ({"mesh": {"fsdp": 0}}, "mesh: fsdp must be a whole number of at least 1, got 0"),
    ({"mesh": {"fsdp": 2}, "devices": [0, 1, 2]}, "over 3 devices in meshes of 2"),
    ({"batch_axes": "fdsp"}, "unknown axis in batch_axes, 'fdsp'; did you mean 'fsdp'"),
    ({"batch_axes": ("fsdp", "fsdp")}, "batch_axes must be distinct"),
    ({"mesh": None}, "shardings name axes of a mesh: pass mesh, too"),
    ({"mesh": None, "shardings": None, "batch_axes": ("a",)}, "batch_axes name axes"),
]
CUT_WRONGLY = [
    ({"in": P("fdsp"), "out": P()}, "unknown axis in shardings of 'in', 'fdsp'; did"),
    ({"in": P("devices"), "out": P()}, "shardings of 'in': axis 'devices' is for"),
    (P("fsdp"), "shardings of 'in': dimension 0 of shape (4, 6) does not divide"),
    ({"in": P(None, None, "fsdp"), "out": P()}, "more entries than the shape (4, 6)"),
    ({"in": P(None, ("fsdp", "fsdp")), "out": P()}, "names an axis twice"),
    ({"in": 3, "out": P()}, "shardings of 'in' must be a PartitionSpec, got 3"),
    ({"in": P()}, "shardings must be a tree like params"),
    (lambda path, shape: None, "shardings of 'in' must be a PartitionSpec, got None"),
]


def refuses(line, call):
    with pytest.raises(ValueError) as caught:
        call()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(options, line):
    refuses(line, lambda: make_trainer(**options))


@pytest.mark.parametrize(("shardings", "line"), CUT_WRONGLY)
def test_a_leaf_that_cannot_be_cut_so_is_named_before_anything_compiles(
    shardings, line
):
    trainer = make_trainer(shardings=shardings)
    refuses(line, lambda: trainer.init(small_model()[0]))
    assert trainer.compile_seconds == 0


def test_a_batch_that_the_devices_of_a_worker_do_not_divide_is_refused():
    trainer = make_trainer(workers=2)
    params, batches = small_model()
    state = trainer.init(params)
    four = jax.tree.map(lambda x: x[:, :4], batches)
    refuses("batch of 2 examples does not divide", lambda: trainer.run(state, four))


def test_a_part_of_an_array_is_read_across_its_pieces():
    x = np.arange(24.0).reshape(4, 6)
    pieces = {((0, 4), (0, 2)): x[:, :2], ((0, 4), (2, 4)): x[:, 2:4]}
    part = HeldPart((4, 6), x.dtype, pieces)
    np.testing.assert_array_equal(part.read(((1, 3), (1, 4))), x[1:3, 1:4])
    np.testing.assert_array_equal(part.read(((0, 4), (2, 4))), x[:, 2:4])
    assert part.joined is part
    refuses("lacks 4 entries of the array", lambda: part.read(((0, 4), (3, 5))))
    held_matrix = HeldPart((4, 6), x.dtype, {**pieces, ((0, 4), (4, 6)): x[:, 4:]})
    np.testing.assert_array_equal(held_matrix.joined, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["powersgd", "loco"])
def test_a_state_of_shards_goes_on_with_its_mesh_alone(name):
    params, _ = small_model()
    settings = {"min_rate": 0} if name == "powersgd" else {}
    strategy = ALGORITHMS[name](**settings)
    trainer = make_trainer(strategy=strategy, workers=2, lanes=2)
    host_state = trainer.to_host(trainer.init(params))
    with jax.set_mesh(jax.make_mesh((3,), ("users",))):
        trainer.from_host(host_state)
    plain = make_trainer(strategy=strategy, workers=2, **WITHOUT)
    refuses("only on the same mesh", lambda: plain.from_host(host_state))


def test_a_held_state_needs_to_know_how_params_are_cut():
    params, _ = small_model()
    trainer = make_trainer()
    host_state = trainer.to_host(trainer.init(params))
    other = make_trainer(shardings=None)
    refuses("cannot tell how params are sharded", lambda: other.from_host(host_state))
