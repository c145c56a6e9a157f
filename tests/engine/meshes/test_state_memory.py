"""A strategy's state in the host's memory, and programs from shapes alone.

CPU devices have the same kinds of memory, and one memory behind them.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from owed import PERIOD, make, owed
from placed import placed

import syncalgos
from syncalgos import ALGORITHMS
from syncalgos.combinators import introspection
from syncalgos.engine.ahead import lower

HOST = "pinned_host"
HELD = ("bmuf", "diloco", "slowmo", "streaming_diloco", "overlap_local_sgd")
ROUNDING = 2e-6  # of lanes that are held once, or not


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"] - 1) ** 2)


def model():
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(4, 6)), "out": rng.normal(size=(6, 3))}
    return jax.tree.map(np.float32, (params, rng.normal(size=(2 * PERIOD, 6, 4))))


def trainer_of(strategy, optimizer=None, **given):
    given = {"workers": 3, "backend": "shard_map", **given}
    optimizer = optimizer or optax.adam(0.1)
    return syncalgos.DataParallel(
        syncalgos.stateless(loss), optimizer, strategy, **placed(given)
    )


ON_A_MESH = {
    "workers": 2,
    "mesh": {"fsdp": 3},
    "shardings": {"in": P(None, "fsdp"), "out": P("fsdp")},
}


def rests(name):
    strategy = make(name)
    return introspection.rests(strategy) and not introspection.reduces(strategy)


RESTING = [name for name in ALGORITHMS if rests(name)]


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim > 2}


def trained(name, **given):
    trainer = trainer_of(make(name), owed(name).optimizer, **given)
    params, batches = model()
    state, metrics = trainer.run(trainer.init(params), batches)
    seen = trainer.to_host(state).own, trainer.center(state).params, metrics
    return trainer, state, jax.tree.map(np.asarray, seen)


@pytest.mark.sample(5, slow=10)
@pytest.mark.parametrize("given", [{}, {"workers": 6}, ON_A_MESH])
@pytest.mark.parametrize("name", RESTING)
def test_a_state_in_the_hosts_memory_changes_no_number(name, given):
    trainer, state, seen = trained(name, sync_memory=HOST, **given)
    assert kinds(state.sync) <= {HOST}
    assert kinds(state.sync) or name not in HELD
    assert kinds(state.replica) == {"device"}
    expected = trained(name, **given)[2]
    for mine, other in zip(*map(jax.tree.leaves, (seen, expected)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=ROUNDING, atol=ROUNDING)
    again = trainer.from_host(trainer.to_host(state))
    assert kinds(again.sync) == kinds(state.sync)
    assert trainer.evaluate(again, model()[1])["loss"].shape == (2 * PERIOD,)
    trainer.run(again, model()[1])


def test_most_algorithms_that_rest_have_a_state_there():
    assert {*HELD} <= {*RESTING}


def refuses(line, call):
    with pytest.raises(ValueError) as caught:
        call()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [x for x in ALGORITHMS if x not in RESTING])
def test_a_state_that_steps_may_read_is_refused(name):
    line = "sync_memory needs a strategy that reads its state only at some"
    refuses(line, lambda: trainer_of(make(name), sync_memory=HOST))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"sync_memory": "pined_host"}, "did you mean 'pinned_host'?"),
        ({"backend": "pmap"}, "sync_memory needs backend 'shard_map', got 'pmap'"),
    ],
)
def test_a_memory_that_cannot_be_is_refused(given, line):
    given = {"sync_memory": HOST, **given}
    refuses(line, lambda: trainer_of(syncalgos.bmuf(2), **given))


def instructions(compiled):
    """Lists those of a program, without the lines of source that they come from."""
    lines = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()).splitlines()
    return [line for line in lines if re.match(r"\s+(ROOT )?%", line)]


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.sample(3)
@pytest.mark.parametrize("given", [{}, {"workers": 6}, ON_A_MESH])
@pytest.mark.parametrize("memory", [None, HOST])
def test_a_program_from_shapes_is_the_one_that_runs(given, memory):
    trainer = trainer_of(syncalgos.bmuf(PERIOD), sync_memory=memory, **given)
    params, batches = model()
    lowered = lower(trainer, shapes(params), shapes(batches))
    state = trainer.init(params)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lowered.state) == expected
    for own, other in zip(
        *map(jax.tree.leaves, (state.own, lowered.state.own)), strict=True
    ):
        assert other.sharding.is_equivalent_to(own.sharding, own.ndim)
        assert other.sharding.memory_kind == own.sharding.memory_kind
    trainer.run(state, batches)
    [compiled] = [
        program
        for key, program in trainer._compiled.programs.items()
        if key.program.takes_steps
    ]
    assert instructions(lowered.program.compile()) == instructions(compiled)


def test_a_program_from_shapes_takes_rows_of_data():
    trainer = trainer_of(syncalgos.bmuf(PERIOD))
    params, batches = model()
    data = jax.ShapeDtypeStruct((50, 4), np.float32)
    rows = jax.ShapeDtypeStruct(batches.shape[:2], np.int32)

    def argument_bytes(lowered):
        return lowered.program.compile().memory_analysis().argument_size_in_bytes

    by_rows = argument_bytes(lower(trainer, params, rows, data=data))
    more = by_rows - argument_bytes(lower(trainer, params, batches))
    # A device's rows and all data, instead of its batches.
    assert more == 4 * (2 * PERIOD * 2 + 50 * 4 - 2 * PERIOD * 2 * 4)


def test_shapes_that_cannot_be_are_refused_as_arrays_are():
    params, batches = model()
    trainer = trainer_of(syncalgos.bmuf(2))
    refuses("global batch", lambda: lower(trainer, params, batches[:, :5]))
    refuses("params hold no arrays", lambda: lower(trainer, {}, batches))
    other = trainer_of(syncalgos.bmuf(2), backend="vmap", devices=[0])
    refuses("lower needs backend 'shard_map'", lambda: lower(other, params, batches))
