"""Each process begins with something of its own, which it must be told."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos


class Begin(NamedTuple):
    """What a process gives to init."""

    params: Any
    buffers: Any = ()
    seed: int = 0
    hyperparams: Any = None


PARAMS = {"b": np.zeros(2, np.float32), "w": np.ones((3, 2), np.float32)}


def other_value(process):
    return Begin({**PARAMS, "w": PARAMS["w"] + process})


def other_dtype(process):
    dtype = jnp.bfloat16 if process else np.float32
    return Begin({**PARAMS, "b": jnp.zeros(2, dtype)})


def other_shape(process):
    return Begin({**PARAMS, "b": np.zeros(2 + process, np.float32)})


def one_more_leaf(process):
    return Begin(PARAMS | ({"z": np.zeros(1, np.float32)} if process else {}))


def other_buffer(process):
    return Begin(PARAMS, {"key": jax.random.key(process)})


def other_seed(process):
    return Begin(PARAMS, seed=process)


def other_number(process):
    return Begin(PARAMS, hyperparams={"rate": 0.1 * (1 + process)})


REFUSED: dict[str, Callable[[int], Begin]] = {
    r"params\['w'\], here float32\[3,2\],": other_value,
    r"params\['b'\], here (bfloat16|float32)\[2\],": other_dtype,
    r"params\['b'\], here float32\[[23]\],": other_shape,
    r"(params\['z'\], here float32\[1\]|seed, here int32\[\]),": one_more_leaf,
    r"buffers\['key'\], here key<fry>\[\],": other_buffer,
    r"seed, here int32\[\],": other_seed,
    r"hyperparams\['rate'\], here float64\[\],": other_number,
}


def loss(params, buffers, batch, key):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2), (buffers, {})


def weigh_alike(step, workers):
    return jnp.ones(workers)


def check_refused(where, pattern, call):
    try:
        call()
    except ValueError as error:
        expected = rf"{where}: {pattern} is not the same in all processes: give .*"
        assert re.fullmatch(expected, str(error)), str(error)
    else:
        raise AssertionError(f"taken: {pattern}")


def work(process: int, processes: int, folder: Path):
    trainer = syncalgos.DataParallel(
        loss,
        lambda numbers: optax.sgd(numbers["rate"]),
        syncalgos.diloco(2),
        workers=2 * processes,
        hyperparams={"rate": 0.1},
    )
    for pattern, begin in REFUSED.items():
        check_refused(
            "init", pattern, lambda begin=begin: trainer.init(*begin(process))
        )

    longer = syncalgos.DataParallel(
        loss,
        optax.sgd(0.1),
        syncalgos.participating(syncalgos.diloco(2 + process), weigh_alike),
        workers=2 * processes,
    )
    pattern = r"strategy, here participating\(diloco\(.*\), weigh_alike, .*\),"
    check_refused("init", pattern, lambda: longer.init(PARAMS))

    buffers = {"key": jax.random.key(0)}
    state = trainer.init(PARAMS, buffers, hyperparams={"rate": 0.05})
    batches = np.ones((4, 4, 3), np.float32) * (1 + process)
    state, _ = trainer.run(state, batches)
    assert trainer.divergence(state) == 0

    host_state = trainer.to_host(state)
    moved = trainer.from_host(host_state)
    center = trainer.center(moved).params
    np.testing.assert_array_equal(center["w"], trainer.center(state).params["w"])
    later = host_state._replace(step=host_state.step + process)
    check_refused(
        "from_host", r"held\.step, here int32\[\],", lambda: trainer.from_host(later)
    )
    if process:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), host_state.replica.params)
        host_state = host_state._replace(
            replica=host_state.replica._replace(params=half)
        )
    check_refused(
        "from_host",
        r"held\.replica\.params\['b'\], here (bfloat16|float32)\[2\],",
        lambda: trainer.from_host(host_state),
    )
