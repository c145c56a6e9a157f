"""NumPy arrays of a caller who writes to them as soon as a call has returned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa

STEPS = 16
BATCH = 4096  # large: the devices still read when a call returns
ROWS = np.full((STEPS, BATCH), 2, np.int32)
ALONE = sa.as_optimizer(sa.lookahead(2), optax.sgd(1.0))
STACKED = sa.stacked(sa.diloco(1, axis="w"))
TRAINER = sa.DataParallel(
    lambda params, batch: jnp.mean((params - batch) ** 2),
    optax.sgd,
    sa.sync_sgd(),
    workers=4,
    backend="vmap",
    hyperparams=0.5,
)


def started(params=0.0, buffers=(), hyperparams=None):
    return TRAINER.init(jnp.asarray(params), buffers, 0, hyperparams)


def trained(batches, data=None):
    return TRAINER.run(started(), batches, data)[1]["loss"]


def by_rows(array):
    rows = array.view(np.int32)
    rows[...] = 1
    return trained(rows, np.arange(4.0))


def placed(data):
    data = TRAINER.place(data)
    return lambda: trained(ROWS, data)


def restored(params):
    host_state = TRAINER.to_host(TRAINER.init(jnp.zeros(BATCH)))
    replica = host_state.replica._replace(params=params)
    return TRAINER.from_host(host_state._replace(replica=replica)).replica.params


def host_params_before_and_after(run=TRAINER.run):
    """Returns a state of the host before and after the devices use its memory."""
    state, _ = run(TRAINER.init(jnp.zeros(BATCH // 4)), ROWS)
    host_state = TRAINER.to_host(state)
    old_params = host_state.replica.params.copy()
    run(state, ROWS + 1)
    return old_params, host_state.replica.params


def mixed(weights):
    """Made by a graph, and traced later."""
    strategy = sa.gossip(topology=weights, axis="w")
    x = jnp.arange(2.0)
    mapped = jax.vmap(
        lambda x: strategy.sync(sa.Replica(x), strategy.init(x), 0)[0].params,
        axis_name="w",
    )
    return lambda: mapped(x)


def synced(params):
    return STACKED.sync(sa.Replica(params), STACKED.init(params), 0)


ALL_BATCHES = (STEPS, BATCH)
USES = {
    "run": (ALL_BATCHES, trained),
    "step": (BATCH, lambda batch: TRAINER.step(started(), batch)[1]),
    "evaluate": (ALL_BATCHES, lambda batches: TRAINER.evaluate(started(), batches)),
    "rows": (ALL_BATCHES, by_rows),
    "data": (BATCH, lambda data: trained(ROWS, data)),
    "place": (BATCH, placed),
    "params": (BATCH, lambda x: TRAINER.init(x).replica.params),
    "buffers": (BATCH, lambda x: started(0.0, x).replica.buffers),
    "hyperparams": ((), lambda x: started(hyperparams=x).hyperparams),
    "from_host": ((4, BATCH), restored),
    "stacked": ((2, BATCH), synced),
    "as_optimizer": (BATCH, ALONE.init),
    "update": (BATCH, lambda x: ALONE.update(x, ALONE.init(x), x)),
    "topology": ((2, 2), mixed),
}


def aligned(shape):
    """Halves, at an address from which jax takes memory as it is."""
    size = 4 * int(np.prod(shape))
    room = np.zeros(size + 64, np.uint8)
    offset = -room.ctypes.data % 64
    array = room[offset : offset + size].view(np.float32).reshape(shape)
    array[...] = 0.5
    return array


@pytest.mark.parametrize("name", USES)
def test_arrays_are_what_they_were_at_the_call(name):
    shape, use = USES[name]
    results = []
    for later in (0.5, 0.25):
        array = aligned(shape)
        result = use(array)
        array[...] = later
        results.append(jax.tree.leaves(result() if callable(result) else result))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_what_came_back_to_the_host_stays():
    np.testing.assert_array_equal(*host_params_before_and_after())
