"""States through Orbax: restored to the bits, in place or on other devices."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from problems import drawing

import syncalgos
from syncalgos.engine.placement.layout import is_key

ocp = pytest.importorskip("orbax.checkpoint")
BATCHES = drawing.make_batches(8, 24)
HALVES = [jax.tree.map(lambda x, i=i: x[i : i + 4], BATCHES) for i in (0, 4)]
FSDP = {"mesh": {"fsdp": 3}, "batch_axes": ()}
FSDP["shardings"] = lambda _, shape: P("fsdp") if shape[:1] == (3,) else P()
# Where six workers go on: a backend, and a placement.
SAME = "pmap", {"devices": [0, 1]}
ELSEWHERE = {"a device": ("vmap", {"devices": [0]}), "a mesh": ("shard_map", FSDP)}


def make(backend, placement, inner=0.01):
    """A trainer whose workers draw, between two syncs after the first half."""
    return syncalgos.DataParallel(
        drawing.loss,
        lambda rates: optax.MultiSteps(optax.adam(rates["inner"]), 3),
        lambda rates: syncalgos.diloco(period=3, outer_lr=rates["outer"]),
        workers=6,
        backend=backend,
        hyperparams={"inner": inner, "outer": 0.7},
        placement=syncalgos.Placement(**placement),
    )


def bits(tree):
    words = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(x).tobytes() for x in words]


def then(trainer, state):
    """The bits that follow from a state."""
    state, metrics = trainer.run(state, HALVES[1])
    return bits((trainer.to_host(state), metrics))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a state as it is and as `to_host` has it; its bits, and later."""
    folder = tmp_path_factory.mktemp("orbax")
    trainer = make(*SAME, inner=0.02)  # the state's, not of the trainers that go on
    state, _ = trainer.run(drawing.start(trainer), HALVES[0])
    held = trainer.to_host(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.save(folder / "held", held)
        # While Orbax writes, the devices' memory goes to the next steps.
        return folder, bits(held), then(trainer, state)


@pytest.mark.slow
def test_state_restored_in_place_goes_on_to_the_bits(saved):
    """On other devices, by another backend."""
    folder, _, later = saved
    trainer = make("shard_map", {"devices": [2, 1]})
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(folder / "state", drawing.start(trainer))
    assert then(trainer, state) == later


@pytest.mark.slow
@pytest.mark.parametrize("name", ELSEWHERE)
def test_state_of_the_host_is_restored_in_another_layout(saved, name):
    folder, held, _ = saved
    trainer = make(*ELSEWHERE[name])
    like = trainer.to_host(drawing.start(trainer))
    with ocp.StandardCheckpointer() as checkpointer:
        state = trainer.from_host(checkpointer.restore(folder / "held", like))
    assert bits(trainer.to_host(state)) == held
