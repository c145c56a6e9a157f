"""Programs from shapes alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.placements import placed
from support.requirements import PERIOD
from test_meshes import refuses

import syncalgos


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"] - 1) ** 2)


def model():
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(4, 6)), "out": rng.normal(size=(6, 3))}
    return jax.tree.map(np.float32, (params, rng.normal(size=(2 * PERIOD, 6, 4))))


def make_trainer(strategy, **options):
    options = {"workers": 3, "backend": "shard_map", **options}
    return syncalgos.DataParallel(
        syncalgos.stateless(loss), optax.adam(0.1), strategy, **placed(options)
    )


ON_A_MESH = {
    "workers": 2,
    "mesh": {"fsdp": 3},
    "shardings": {"in": P(None, "fsdp"), "out": P("fsdp")},
}


def instructions(compiled):
    """Lists those of a program, without the lines of source that they come from."""
    lines = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()).splitlines()
    return [line for line in lines if re.match(r"\s+(ROOT )?%", line)]


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize(
    "options", [pytest.param({"workers": 6}, marks=pytest.mark.slow), ON_A_MESH]
)
def test_a_program_from_shapes_is_the_one_that_runs(options):
    trainer = make_trainer(syncalgos.bmuf(PERIOD), **options)
    params, batches = model()
    lowered = trainer.lower(shapes(params), shapes(batches))
    state = trainer.init(params)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), lowered.state) == expected
    for own_array, other in zip(
        *map(jax.tree.leaves, (state.own, lowered.state.own)), strict=True
    ):
        assert other.sharding.is_equivalent_to(own_array.sharding, own_array.ndim)
    trainer.run(state, batches)
    [compiled] = [
        program
        for key, program in trainer._compiled.programs.items()
        if key.program.takes_steps
    ]
    assert instructions(lowered.program.compile()) == instructions(compiled)


@pytest.mark.slow
def test_a_program_from_shapes_takes_rows_of_data():
    trainer = make_trainer(syncalgos.bmuf(PERIOD))
    params, batches = model()
    data = jax.ShapeDtypeStruct((50, 4), np.float32)
    rows = jax.ShapeDtypeStruct(batches.shape[:2], np.int32)

    def argument_bytes(lowered):
        return lowered.program.compile().memory_analysis().argument_size_in_bytes

    by_rows = argument_bytes(trainer.lower(params, rows, data=data))
    extra_bytes = by_rows - argument_bytes(trainer.lower(params, batches))
    # A device's rows and all data, instead of its batches.
    assert extra_bytes == 4 * (2 * PERIOD * 2 + 50 * 4 - 2 * PERIOD * 2 * 4)


def test_shapes_that_cannot_be_are_refused_as_arrays_are():
    params, batches = model()
    trainer = make_trainer(syncalgos.bmuf(2))
    refuses("global batch", lambda: trainer.lower(params, batches[:, :5]))
    refuses("params hold no arrays", lambda: trainer.lower({}, batches))
    other = make_trainer(syncalgos.bmuf(2), backend="vmap", devices=[0])
    refuses("lower needs backend 'shard_map'", lambda: other.lower(params, batches))
