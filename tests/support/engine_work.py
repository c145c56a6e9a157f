"""Work of the engine by each of N processes: of a list, [a name, its arguments]."""

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

import syncalgos
from support import joint_strategies
from support.problems import conformance, drawing, linear, two_tables
from support.requirements import PERIOD, make, owed
from syncalgos import DataParallel
from syncalgos._keys import is_key

HALF = 4
STEPS = 8


class ProcessResults(NamedTuple):
    """Results of one process, as NumPy arrays.

    Attributes:
        common: what must be the same in all processes.
        worker_values: leaves lead with this process's workers.
        workers: their numbers.
    """

    common: Any
    worker_values: Any
    workers: list[int]


class Key(NamedTuple):
    """The numbers of typed keys, which cannot be pickled."""

    data: np.ndarray


def host(tree):
    """As NumPy arrays."""

    def leaf(x):
        if isinstance(x, jax.Array) and is_key(x):
            return Key(np.asarray(jax.random.key_data(x)))
        return np.asarray(x)

    return jax.tree.map(leaf, tree)


def cut_own_part(trainer, batches):
    """This process's contiguous part of each global batch."""

    def cut(x):
        worker_rows = x.shape[1] // trainer.workers
        own_workers = trainer.layout.own_workers
        return x[:, own_workers.start * worker_rows : own_workers.stop * worker_rows]

    return jax.tree.map(cut, batches)


def take_steps(tree, start, stop):
    return jax.tree.map(lambda x: x[start:stop], tree)


def collect_results(trainer, state, metrics, batches):
    """Everything that a trainer tells of a state."""
    host_state = trainer.to_host(state)
    first_batches = cut_own_part(trainer, take_steps(batches, 0, 2))
    common = {
        "metrics": metrics,
        "evaluation": trainer.evaluate(state, first_batches),
        "center": trainer.center(state),
        "divergence": trainer.divergence(state),
        "key": host_state.key,
        "step": host_state.step,
    }
    worker_values = host({"replica": host_state.replica, "sync": host_state.sync})
    return ProcessResults(host(common), worker_values, [*trainer.layout.own_workers])


def train(trainer, state, batches):
    """In two dispatches; returns the state and what it saw."""
    metrics = []
    for half in (take_steps(batches, 0, HALF), take_steps(batches, HALF, STEPS)):
        state, of_half = trainer.run(state, cut_own_part(trainer, half))
        metrics.append(of_half)
    return state, collect_results(trainer, state, metrics, batches)


# Peers, parts that are gathered, votes in two hops, decisions; `of_draws` has groups.
KINDS = ("push_sum", "topk_sgd", "zero_one_adam", "dynamic_averaging")


def algorithms(backend, workers):
    """Trains by algorithms side by side, on the problem of the conformance tests.

    Two periods; the params are as wide as jax's floats.
    """
    assert 2 * PERIOD == STEPS
    params, batches = conformance.problem(jnp.result_type(float))

    trainer = DataParallel(
        syncalgos.stateless(joint_strategies.loss_of_all(conformance.loss)),
        joint_strategies.optimizers({name: owed(name).optimizer for name in KINDS}),
        joint_strategies.strategies({name: make(name) for name in KINDS}),
        workers=workers,
        backend=backend,
    )
    return train(trainer, trainer.init(dict.fromkeys(KINDS, params)), batches)[1]


def of_draws(backend, workers, devices=None):
    """Trains with workers that talk to a peer, in groups, and by gathering parts."""
    strategy = syncalgos.chain(
        syncalgos.gossip(),
        syncalgos.hierarchical(4, inner_period=2),
        syncalgos.diloco(2, reduce="int4", seed=5),
    )
    trainer = drawing.make_trainer(backend, workers, devices, strategy)
    return train(trainer, drawing.start(trainer), drawing.make_batches())[1]


def of_tables(backend, workers, devices=None):
    """Trains tables sharded over the workers of all processes."""
    strategy = two_tables.STRATEGIES["bmuf"]
    trainer = two_tables.make(strategy, workers, backend, devices=devices)
    return train(trainer, trainer.init(two_tables.START), two_tables.BATCHES)[1]


def debugged(backend, workers, devices=None):
    """Trains while jax looks for what is not a number."""
    with jax.debug_nans(True):
        trainer = linear.make_trainer(None, workers, backend, devices=devices)
        return train(trainer, trainer.init(linear.make_params()), linear.BATCHES)[1]


def restore_from_orbax(backend, folder):
    """Goes on from a checkpoint of Orbax: on the same devices, and on half of them.

    Returns:
        What was seen without a checkpoint, and with it; the state that was saved, and
        what the half restored.
    """
    import orbax.checkpoint as ocp

    def by_worker(worker_state):
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), worker_state)

    def collect_saved(trainer, state):
        host_state = trainer.to_host(state)
        worker_state = host({"replica": host_state.replica, "sync": host_state.sync})
        return ProcessResults(
            host((host_state.step, host_state.key)),
            worker_state,
            [*trainer.layout.own_workers],
        )

    trainer = drawing.make_trainer(backend, 4, None)
    batches = drawing.make_batches()
    halves = [
        cut_own_part(trainer, take_steps(batches, i, i + HALF)) for i in (0, HALF)
    ]
    state, _ = trainer.run(drawing.start(trainer), halves[0])
    path = Path(folder, backend)
    saved = collect_saved(trainer, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state)
        rows = state._replace(**jax.jit(by_worker)(state.own)._asdict())
        checkpointer.save(path / "rows", rows)
        unbroken = collect_saved(trainer, trainer.run(state, halves[1])[0])
        checkpointer.wait_until_finished()

        again = drawing.make_trainer(backend, 4, None)
        state = checkpointer.restore(path / "state", drawing.start(again))
        resumed = collect_saved(again, again.run(state, halves[1])[0])

        fewer = drawing.make_trainer(backend, 4, [0, 2])
        start = drawing.start(fewer)
        like = start._replace(**jax.jit(by_worker)(start.own)._asdict())
        rows = checkpointer.restore(path / "rows", like)
        worker_state = jax.jit(
            lambda worker_state: jax.tree.map(
                lambda x, y: x.reshape(y.shape), worker_state, start.own
            ),
            out_shardings=jax.tree.map(lambda x: x.sharding, start.own),
        )(rows.own)
        moved = collect_saved(fewer, rows._replace(**worker_state._asdict()))
    return unbroken, resumed, saved, moved


def alone(backend, rounds):
    """Trains on this process's devices, and returns what it saw after each round.

    Args:
        rounds: how many, of each process.
    """
    devices = jax.local_devices()[: 1 if backend == "vmap" else None]
    trainer = linear.make_trainer(backend=backend, devices=devices)
    state = trainer.init(linear.make_params())
    results = []
    for _ in range(rounds[jax.process_index()]):
        state, saw = train(trainer, state, linear.BATCHES)
        results.append(saw)
    return results


def refusals():
    """Refused requests: name -> (kind, message, programs compiled for it)."""
    compiled = []

    def note(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(event)

    def layout(workers, devices=None, backend="pmap"):
        return lambda: drawing.make_trainer(backend, workers, devices)

    jax.monitoring.register_event_duration_secs_listener(note)
    trainer = drawing.make_trainer("pmap", 4, None)
    local_trainer = drawing.make_trainer("pmap", 4, jax.local_devices())
    state = drawing.start(trainer)
    host_state = trainer.to_host(state)
    doubled_params = jax.tree.map(
        lambda x: np.concatenate([x, x]), host_state.replica.params
    )
    elsewhere = [d for d in jax.devices() if d.process_index != jax.process_index()]
    seven, six = (
        jax.tree.map(lambda x, n=n: x[:, :n], drawing.make_batches()) for n in (7, 6)
    )
    attempts = {
        "vmap": layout(4, backend="vmap"),
        "vmap on devices of two": layout(4, [0, 2], "vmap"),
        "workers": layout(3),
        "devices that interleave": layout(4, [0, 2, 1, 3]),
        "uneven devices": layout(6, [0, 1, 2]),
        "devices elsewhere": layout(4, elsewhere),
        "batch": lambda: trainer.run(state, seven),
        "batch of one alone": lambda: local_trainer.run(state, six),
        "workers of another number": lambda: trainer.from_host(
            host_state._replace(
                replica=host_state.replica._replace(params=doubled_params)
            )
        ),
    }
    answers = {}
    for name, attempt in attempts.items():
        compiled.clear()
        try:
            attempt()
        except Exception as error:
            answers[name] = type(error).__name__, str(error), len(compiled)
    return answers


ALL = algorithms, alone, debugged, of_draws, restore_from_orbax, of_tables, refusals
WORK = {function.__name__: function for function in ALL}


def work(process, processes, folder):
    """Does FOLDER/work.json, and leaves the results in FOLDER/PROCESS.pickle."""
    tasks = json.loads(Path(folder, "work.json").read_text())
    results = [WORK[name](**arguments) for name, arguments in tasks]
    Path(folder, f"{process}.pickle").write_bytes(pickle.dumps(results))
